"""The gateway before external engines, beside sglang-router, SMG and vllm-router: CPU and latency.

    python bench/gateway.py --peers FOLDER [--routers BIN:...] [--secs 2.5] [--rounds 3] [--quick]
                            [--only NAME,...] [--work short,...] [--connections 32,128]
                            [--workers N]

FOLDER has http/mock_engine.c and http/load.c, small programs that are built here with gcc: engines
that answer at once, and a client in a closed loop. Each BIN is a folder with programs of routers
(sglang-router 0.3.2, SMG 1.13.0 and vllm-router 0.1.17 were measured). Routers that are in none are
left out, which is printed.
Both may be given as MOONSERVE_PEERS and MOONSERVE_ROUTERS.

Four engines are behind every target; P/D has two of each role. Work: `short`, a prompt of 120
characters and 8 tokens in one reply; `stream64`, the same with 64 tokens streamed; `long30k`, a
prompt of 30,000 characters that shares 20,000 with an eighth of the others, `huge220k` one of
220,000 that shares 20,000. Targets take turns in each round; figures are medians over rounds.
`paced64` is stream64 on engines that take 20 ms to the first token and 5 ms for each other.

  cpu       CPU of the target's processes (all threads) per request, microseconds
  least     the same in the cheapest round: other work on the machine disturbs it least
  p50       latency, less what the engines alone take with as many connections (direct)
  first     the same until the first event of a stream

Our gateway decides for each request, its KV events off: keys over the prompt's text. With
--workers N there is one more of it, in N processes and one with the Conductor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import machine_line

ALL = (1, 32, 128)
WORK = {
    "short": (ALL, 0),
    "stream64": (ALL, 66),
    "long30k": ((1, 32), 0),
    "huge220k": ((20, 100, 200), 0),
    "paced64": (ALL, 66),
}
"""Numbers of connections, and events of a stream."""
PACE_US = ("5000", "20000")
"""Times of paced engines: between tokens, and until the first."""
ENGINES = 4
ROUTES = "/v1/chat/completions"
READY_S = 60.0


def text(length: int, seed: int) -> str:
    """Made-up words of this many characters."""
    draw, words, size = random.Random(seed), [], 0
    while size < length:
        words.append("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]


def bodies(folder: Path) -> dict[str, Path]:
    """One file of request bodies per kind of work, a line each."""
    short = [text(120, seed) for seed in range(256)]
    heads = [text(20_000, 1_000 + seed) for seed in range(8)]
    long = [f"{heads[seed % 8]} {text(10_000, 5_000 + seed)}" for seed in range(256)]
    huge = [f"{heads[seed % 8]} {text(200_000, 9_000 + seed)}" for seed in range(64)]
    kinds = {
        "short": (short, {"max_tokens": 8}),
        "stream64": (short, {"max_tokens": 64, "stream": True}),
        "paced64": (short, {"max_tokens": 64, "stream": True}),
        "long30k": (long, {"max_tokens": 8}),
        "huge220k": (huge, {"max_tokens": 8}),
    }
    made = {}
    for kind, (prompts, fields) in kinds.items():
        lines = [
            {"model": "mock", "messages": [{"role": "user", "content": prompt}], **fields}
            for prompt in prompts
        ]
        made[kind] = folder / f"{kind}.jsonl"
        made[kind].write_text("".join(json.dumps(it, separators=(",", ":")) + "\n" for it in lines))
    return made


def build(peers: Path, folder: Path) -> None:
    """Build the mock engine and the client. A reply of one token ends with "length", as vLLM's
    does."""
    for name in ("mock_engine", "load"):
        source = peers / "http" / f"{name}.c"
        if not source.exists():
            sys.exit(f"{source} is missing: --peers must name the folder that has http/{name}.c")
        code = source.read_text()
        code = code.replace(r"\"stop\"}],\"usage", r"\"length\"}],\"usage")
        (folder / source.name).write_text(code)
        command = ["gcc", "-O2", "-w", "-o", folder / name, folder / source.name]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            sys.exit("gcc is missing: it builds the mock engine and the client")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_us(pid: int) -> float:
    """CPU time of a process and its descendants, all threads, so far."""
    spent = 0
    for one in family(pid):
        for stat in Path(f"/proc/{one}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                spent += int(stat.read_text().split()[0])
    return spent / 1e3


def commands(urls: Sequence[str], routers: Sequence[Path], workers: int) -> dict[str, list[str]]:
    """The command that starts each target; its port is added later."""
    half = len(urls) // 2
    ours = [sys.executable, "-m", "moonserve", "gateway", "--events", "off"]
    plain = [word for url in urls for word in ("--url", url)]
    pd = [word for url in urls[:half] for word in ("--prefill-url", url)]
    pd += [word for url in urls[half:] for word in ("--decode-url", url)]
    found = {"moonserve": [*ours, *plain], "moonserve P/D": [*ours, *pd]}
    if workers > 1:
        found[f"moonserve x{workers}"] = [*ours, *plain, "--workers", str(workers)]
    sides = [word for url in urls[:half] for word in ("--prefill", url)]
    sides += [word for url in urls[half:] for word in ("--decode", url)]
    common = ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    for name, program, words, pairs in (
        ("sglang", "sglang-router", ["launch", "--log-level", "warn"], "--pd-disaggregation"),
        ("smg", "smg", ["launch", "--log-level", "warn"], "--pd-disaggregation"),
        ("vllm", "vllm-router", ["--log-level", "warning"], "--vllm-pd-disaggregation"),
    ):
        here = [folder / program for folder in routers if (folder / program).exists()]
        if not here:
            print(f"{program} is in no folder of --routers: it is left out")
            continue
        router = [str(here[0]), *words, *common]
        for policy in ("round_robin", "cache_aware"):
            found[f"{name} {policy}"] = [*router, "--worker-urls", *urls, "--policy", policy]
        found[f"{name} P/D"] = [*router, pairs, *sides, "--policy", "round_robin"]
    return found


class Bench:
    """The processes that are started here. They end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = contextlib.ExitStack()

    def start(self, name: str, command: Sequence[str | Path]) -> int:
        """Start a process; its pid. Its output goes to a file."""
        log = self.stack.enter_context((self.folder / f"{name.replace('/', '')}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.stack.callback(_end, process)
        return process.pid

    def engines(self, pace_us: Sequence[str]) -> list[str]:
        """Start the mock engines; their URLs."""
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            self.start(f"engine{port}", [self.folder / "mock_engine", str(port), *pace_us])
        return [f"http://127.0.0.1:{port}" for port in ports]

    def target(self, name: str, command: Sequence[str]) -> tuple[int, int]:
        """Start a target; its port and pid once it serves. Exits if it does not serve."""
        port = free_port()
        more = [] if "moonserve" in name else ["--prometheus-port", str(free_port())]
        pid = self.start(name, [*command, "--port", str(port), *more])
        deadline_s = time.monotonic() + READY_S
        while not serves(port):
            if time.monotonic() > deadline_s:
                log = (self.folder / f"{name.replace('/', '')}.log").read_text()[-800:]
                sys.exit(f"{name} does not serve; it said:\n{log}")
            time.sleep(0.2)
        return port, pid

    def load(self, port: int, body: Path, connections: int, secs: float, events: int) -> Any:
        """Run the client; its measurements."""
        command = [self.folder / "load", str(port), ROUTES, body, str(connections), str(secs)]
        more = [str(events)] if events else []
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        seen = json.loads(done.stdout)
        if seen["errs"]:
            sys.exit(f"{seen['errs']} of {seen['n']} failed: {seen.get('err')}")
        return seen


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()


def serves(port: int) -> bool:
    """Whether a request is answered."""
    body = b'{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":8}'
    url, headers = f"http://127.0.0.1:{port}{ROUTES}", {"content-type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5).read()
    except OSError:
        return False
    return True


def measure(
    bench: Bench, args: argparse.Namespace, kinds: Sequence[str], pace_us: Sequence[str] = ()
) -> None:
    """Run these kinds of work, then print a table for each and each number of connections."""
    work = bodies(bench.folder)
    urls = bench.engines(pace_us)
    targets: dict[str, tuple[int, int | None]] = {"direct": (int(urls[0].rpartition(":")[2]), None)}
    for name, command in commands(urls, args.routers, args.workers).items():
        if not args.only or name in args.only:
            targets[name] = bench.target(name, command)
    seen: dict[tuple[str, int, str], list[Any]] = {}
    for turn in range(args.rounds):
        for kind in kinds:
            counts, events = WORK[kind]
            for connections in args.connections or counts:
                for name, (port, pid) in targets.items():
                    if not turn:
                        bench.load(port, work[kind], connections, args.secs / 4, events)
                    before = 0.0 if pid is None else cpu_us(pid)
                    run = bench.load(port, work[kind], connections, args.secs, events)
                    spent = 0.0 if pid is None else cpu_us(pid) - before
                    run["cpu"] = spent / max(1, run["n"])
                    seen.setdefault((kind, connections, name), []).append(run)
    show(seen, list(targets))


def show(seen: dict[tuple[str, int, str], list[Any]], names: Sequence[str]) -> None:
    """Medians over rounds; latencies less those of the engines alone."""
    fields = ("cpu", "p50", "ttfb50", "rps")
    for kind, connections in dict.fromkeys((kind, many) for kind, many, _ in seen):
        title = f"{kind}, {connections} connections"
        print(f"\n{title:24} {'cpu':>7} {'least':>7} {'p50':>8} {'first':>8} {'per s':>8}")
        base = {"p50": 0.0, "ttfb50": 0.0}
        for name in names:
            runs = seen[kind, connections, name]
            row = {field: statistics.median([run[field] for run in runs]) for field in fields}
            p50, first = row["p50"] - base["p50"], row["ttfb50"] - base["ttfb50"]
            cpu = f"{row['cpu']:7.1f} {min(run['cpu'] for run in runs):7.1f}"
            print(f"{name:24} {cpu} {p50:8.0f} {first:8.0f} {row['rps']:8.0f}", flush=True)
            if name == "direct":
                base = row


def folder_of(given: str | None, what: str, flag: str) -> Path | None:
    """The folder. Exits if it does not exist."""
    if not given:
        print(f"without {flag}, {what}")
        return None
    if not Path(given).is_dir():
        sys.exit(f"{flag}: {given} is no folder")
    return Path(given)


@contextlib.contextmanager
def started() -> Iterator[Bench]:
    """A folder of its own, and what runs in it."""
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        with bench.stack:
            yield bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=os.environ.get("MOONSERVE_PEERS"))
    parser.add_argument("--routers", default=os.environ.get("MOONSERVE_ROUTERS"))
    parser.add_argument("--secs", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", type=lambda given: given.split(","), default=[])
    parser.add_argument("--work", type=lambda given: given.split(","), default=list(WORK))
    parser.add_argument(
        "--connections", type=lambda given: [int(one) for one in given.split(",")], default=[]
    )
    parser.add_argument("--quick", action="store_true", help="32 connections only")
    args = parser.parse_args()
    peers = folder_of(args.peers, "there is nothing to measure with", "--peers")
    if peers is None:
        sys.exit("--peers must name the folder that has http/mock_engine.c and http/load.c")
    given = args.routers.split(":") if args.routers else [None]
    folders = [folder_of(one, "the routers are left out", "--routers") for one in given]
    args.routers = [folder for folder in folders if folder is not None]
    if args.quick:
        args.connections = [32]
    print(machine_line())
    for pace_us in ((), PACE_US):
        kinds = [kind for kind in args.work if (kind == "paced64") == bool(pace_us)]
        if kinds:
            with started() as bench:
                build(peers, bench.folder)
                measure(bench, args, kinds, pace_us)


if __name__ == "__main__":
    main()
