"""Five times more clients than a live cluster holds: who is let in, how well, and who is told what.

    python bench/overload.py [--modes none,early,predictive] [--clients 300] [--seconds 60]

Starts `moonserve up --engine fake` anew for each mode, of a speed at which decode holds about 60
streams within the TBT objective, and drives it in a closed loop over raw sockets: every client
streams an answer, asks for the next one, and where it is told 429 comes back after Retry-After,
obediently, until it is let in. TTFT is of the try that was let in. TBT of a stream is the mean of
its gaps, as in the gateway's records; that of its longest tenth, as in the simulator, stands beside
it: of 20 to 60 tokens, one gap of which is the way to decode and the pass under way there. What a
refusal costs is measured behind the load, on the idle cluster, by refusals alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from common import machine_line
from moonserve.cli.token import token_for

DECODES, SEQS = 4, 15
"""Decode workers, and the streams that one holds within the objective."""
STEP_MS, SEQ_MS = 60, 12
TTFT_MS, TBT_MS = 3_000, 1.05 * (STEP_MS + SEQS * SEQ_MS)
"""So slow that a machine with other work to do, and few cores, is not what is measured."""
OUTPUT = (20, 60)
PROFILE = {
    "name": "overload",
    "source": "made up",
    "pass_us": [20_000, 200, 0, 0, STEP_MS * 1_000, SEQ_MS * 1_000, 0],
    "kv_bytes_per_token": 8,
    "link_bytes_per_s": 1e9,
    "kv_tokens": 32_768,
}
WORDS = ("moons", "of", "jupiter", "seen", "by", "galileo", "through", "his", "telescope", "and")


class Client(asyncio.Protocol):
    """One connection, one request at a time; notes when pieces came, parses next to nothing."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[int] | None = None
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def ask(self, raw: bytes) -> asyncio.Future[int]:
        """The status, once the whole reply is here; its `headers`, and `times` of its pieces."""
        self.headers: dict[str, str] = {}
        self.times: list[float] = []
        self._status, self._left, self._bytes = 0, -1, b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return self._answer

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        now = time.monotonic()
        if not self._status:
            head, found, data = (self._bytes + data).partition(b"\r\n\r\n")
            if not found:
                self._bytes = head
                return
            lines = head.decode("latin-1").split("\r\n")
            self._status, self._bytes = int(lines[0].split(" ")[1]), b""
            self.headers = {k.lower(): v.strip() for k, _, v in (li.partition(":") for li in lines)}
            self._left = int(self.headers.get("content-length", -1))
        if self._left >= 0:
            self._left -= len(data)
            done = self._left == 0
        else:
            self.times += [now] * data.count(b'"text":')
            self._bytes = (self._bytes + data)[-5:]
            done = self._bytes == b"0\r\n\r\n"
        if done and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the gateway hung up"))

    def close(self) -> None:
        """No request is under way any more."""
        self._transport.close()


class Tally:
    """What came of it."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.tbt_s: list[float] = []
        self.mean_s: list[float] = []
        self.tokens_ok = self.ok = 0
        self.reasons: Counter[str] = Counter()
        self.other: Counter[int] = Counter()
        self.refused_s: list[float] = []
        self.told_s: list[float] = []
        self.tries: Counter[int] = Counter()
        """By how many refusals had been obeyed, of those let in."""
        self.next_tries: Counter[bool] = Counter()
        """Of tries after a 429: whether they were let in."""
        self.entry_s: list[float] = []
        """From the first try until let in."""


def request(rng: random.Random, port: int, output: int, *headers: str) -> bytes:
    """A streamed completion of a prompt of about 150 tokens."""
    text = " ".join(rng.choices(WORDS, k=150))
    body = json.dumps(
        {"model": "smollm2-135m-instruct", "prompt": text, "max_tokens": output,
         "ignore_eos": True, "stream": True}
    ).encode()  # fmt: skip
    head = [
        "POST /v1/completions HTTP/1.1", f"host: 127.0.0.1:{port}",
        "content-type: application/json", f"content-length: {len(body)}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*head, "", ""]).encode() + body


async def client(number: int, port: int, until: float, tally: Tally) -> None:
    """Ask, obey, ask again; what was begun by the end is finished, what is told by then is not."""
    rng, loop = random.Random(number), asyncio.get_running_loop()
    _, it = await loop.create_connection(Client, "127.0.0.1", port)
    await asyncio.sleep(rng.random())
    try:
        while time.monotonic() < until:
            raw = request(rng, port, rng.randint(*OUTPUT))
            refused, first_s = 0, time.monotonic()
            while time.monotonic() < until:
                asked_s = time.monotonic()
                status = await it.ask(raw)
                now_s = time.monotonic()
                if refused:
                    tally.next_tries[status != 429] += 1
                if status == 200:
                    served(tally, asked_s, first_s, refused, it.times)
                    break
                if status != 429:
                    tally.other[status] += 1
                    await asyncio.sleep(1)
                    break
                refused += 1
                tally.reasons[it.headers["x-moonserve-reject-reason"]] += 1
                tally.refused_s.append(now_s - asked_s)
                tally.told_s.append(float(it.headers["retry-after"]))
                await asyncio.sleep(min(tally.told_s[-1], max(0.0, until - now_s)))
    finally:
        it.close()


def served(tally: Tally, asked_s: float, first_s: float, refused: int, times: list[float]) -> None:
    """Account for one answer."""
    gaps = sorted(b - a for a, b in pairwise(times))
    worst = gaps[-max(1, len(gaps) // 10) :]
    ttft_s, tbt_s = times[0] - asked_s, sum(worst) / len(worst)
    tally.ttft_s.append(ttft_s)
    tally.tbt_s.append(tbt_s)
    tally.mean_s.append(sum(gaps) / len(gaps))
    tally.tries[refused] += 1
    tally.entry_s.append(asked_s - first_s)
    if ttft_s * 1e3 <= TTFT_MS and tally.mean_s[-1] * 1e3 <= TBT_MS:
        tally.ok += 1
        tally.tokens_ok += len(times)


class Cluster:
    """One `moonserve up`, its processes and what it says of itself."""

    def __init__(self, mode: str, folder: Path) -> None:
        profile = folder / "overload.json"
        profile.write_text(json.dumps(PROFILE))
        argv = [
            sys.executable, "-m", "moonserve", "up", "--port", "0", "--engine", "fake",
            "--profile", str(profile), "--prefill", "1", "--decode", str(DECODES),
            "--max-seqs", "150", "--segment-bytes", "64MiB", "--admission", mode,
            "--ttft-slo", f"{TTFT_MS}ms", "--tbt-slo", f"{TBT_MS}ms",
        ]  # fmt: skip
        self.log = folder / f"{mode}.log"
        env = {**os.environ, "CI": "true"}
        with self.log.open("w") as out:
            self.up = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)
        self.url = ""
        end = time.monotonic() + 120
        while not (found := re.search(r"^Ready at (http\S+)$", self.log.read_text(), re.MULTILINE)):
            assert time.monotonic() < end, self.log.read_text()
            assert self.up.poll() is None, self.log.read_text()
            time.sleep(0.1)
        self.url = found[1]
        self.pids = dict(self._children())

    def _children(self) -> Iterator[tuple[str, int]]:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                argv = stat.with_name("cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.up.pid:
                name = argv[argv.index("--name") + 1] if "--name" in argv else "gateway"
                yield name, int(stat.parent.name)

    def get(self, path: str, base: str = "") -> Any:
        """The JSON there."""
        headers = {"authorization": f"Bearer {token_for(self.url)}"}
        request = urllib.request.Request((base or self.url) + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def rss_mib(self) -> dict[str, float]:
        """Of every process."""
        pages = {n: Path(f"/proc/{p}/statm").read_text().split()[1] for n, p in self.pids.items()}
        return {n: int(count) * 4096 / 2**20 for n, count in sorted(pages.items())}

    def cpu_s(self) -> dict[str, float]:
        """Of every process until now."""
        return {name: _cpu_s(pid) for name, pid in sorted(self.pids.items())}

    def ledgers(self) -> dict[str, int]:
        """Whatever is not zero: promised work, leases, streams, blocks, requests in flight."""
        stats = self.get("/api/stats")
        found = {key: stats[key] for key in stats if key == "requests" or "promised" in key}
        found |= {key: stats["store"].get(key, 0) for key in ("leases", "pending_puts")}
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        name = "moonserve_requests_in_flight "
        found["in_flight"] = next(int(float(li.split()[1])) for li in lines if li.startswith(name))
        for instance in self.get("/api/instances"):
            own = self.get("/debug/ledger", instance["url"])
            found |= {f"{instance['id']}.{key}": value for key, value in own.items()}
        return {key: value for key, value in found.items() if value}

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.up.send_signal(signal.SIGINT)
        self.up.wait(60)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(mode: str) -> Iterator[Cluster]:
    """A cluster that is stopped again."""
    with tempfile.TemporaryDirectory() as folder:
        it = Cluster(mode, Path(folder))
        try:
            yield it
        finally:
            it.stop()


async def refusals(port: int, count: int, cluster: Cluster) -> tuple[list[float], float]:
    """Seconds of each of so many refusals, one after the other, and the gateway's CPU seconds."""
    rng = random.Random(0)
    loop = asyncio.get_running_loop()
    _, it = await loop.create_connection(Client, "127.0.0.1", port)
    took, before_s = [], cluster.cpu_s()["gateway"]
    for _ in range(count):
        raw = request(rng, port, 50, "x-moonserve-ttft-slo-ms: 0.001")
        began = time.monotonic()
        status = await it.ask(raw)
        took.append(time.monotonic() - began)
        assert status == 429, status
    it.close()
    return took, cluster.cpu_s()["gateway"] - before_s


async def drive(cluster: Cluster, clients: int, seconds: float) -> dict[str, Any]:
    """The load, then the refusals; the figures by name."""
    port, tally = int(cluster.url.rpartition(":")[2]), Tally()
    warm = Tally()
    await asyncio.gather(*(client(i, port, time.monotonic() + 4, warm) for i in range(20)))
    rss = [cluster.rss_mib()]
    cpu, own, began = cluster.cpu_s(), time.process_time(), time.monotonic()
    load = asyncio.gather(
        *(client(i, port, began + seconds, tally) for i in range(clients)), return_exceptions=True
    )
    await asyncio.sleep(seconds / 2)
    rss.append(await asyncio.to_thread(cluster.rss_mib))
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    took = time.monotonic() - began
    cpu = {name: 100 * (s - cpu[name]) / took for name, s in cluster.cpu_s().items()}
    cpu["this load"] = 100 * (time.process_time() - own) / took
    errors = [e for e in await load if e is not None]
    for _ in range(40):
        left = await asyncio.to_thread(cluster.ledgers)
        if not left:
            break
        await asyncio.sleep(0.25)
    rss.append(await asyncio.to_thread(cluster.rss_mib))
    quiet: tuple[list[float], float] | None = None
    if not cluster.log.name.startswith("none"):
        quiet = await refusals(port, 300, cluster)
    return figures(tally, took, cpu, rss, left, errors, quiet)


def figures(
    tally: Tally, took: float, cpu: dict[str, float], rss: list[dict[str, float]],
    left: dict[str, int], errors: list[Any], quiet: tuple[list[float], float] | None,
) -> dict[str, Any]:  # fmt: skip
    """One column of the table."""
    served, refused = len(tally.ttft_s), sum(tally.reasons.values())
    tries = sum(tally.next_tries.values())
    tries_of = tally.tries.items()
    again = sum(n for count, n in tries_of if count)
    made: dict[str, Any] = {
        "answered": served,
        "429, by reason": ", ".join(f"{n} {r}" for r, n in tally.reasons.most_common()) or "none",
        "other statuses, broken connections": f"{dict(tally.other) or 0}, {len(errors)}",
        "answers with TTFT in time": share(sum(s * 1e3 <= TTFT_MS for s in tally.ttft_s), served),
        "answers with TBT in time (longest tenth)": share(
            sum(s * 1e3 <= TBT_MS for s in tally.tbt_s), served
        ),
        "answers with TBT in time (mean)": share(
            sum(s * 1e3 <= TBT_MS for s in tally.mean_s), served
        ),
        "TTFT p50, p99": ms(tally.ttft_s),
        "TBT p50, p99 (mean)": ms(tally.mean_s),
        "TBT p50, p99 (longest tenth)": ms(tally.tbt_s),
        "answers in time, /s": f"{tally.ok / took:.2f}",
        "tokens of those, /s": f"{tally.tokens_ok / took:.0f}",
        "429 under load p50, p99": ms(tally.refused_s),
        "Retry-After p50, max": f"{q(tally.told_s, 0.5):.0f}, {q(tally.told_s, 1.0):.0f} s",
        "tries after a 429 that were let in": share(tally.next_tries[True], tries),
        "of those once refused, in at the next try": share(tally.tries[1], again),
        "... at the second": share(tally.tries[2], again),
        "tries until in, mean": f"{1 + sum(k * n for k, n in tries_of) / max(1, served):.2f}",
        "wait until in p50, p99": ms(tally.entry_s),
        "429 alone, idle cluster p50, p99": ms(quiet[0]) if quiet else "-",
        "gateway's CPU for one 429": f"{quiet[1] / len(quiet[0]) * 1e6:.0f} us" if quiet else "-",
        "ledgers not at zero": ", ".join(f"{k} {v}" for k, v in left.items()) or "none",
        "CPU %": ", ".join(f"{n} {v:.0f}" for n, v in cpu.items()),
    }
    for name in rss[0]:
        made[f"RSS of {name}, start, middle, end"] = (
            ", ".join(f"{r[name]:.0f}" for r in rss) + " MiB"
        )
    assert refused == len(tally.refused_s)
    return made


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({int(1000 * part / whole) / 10}%)" if whole else "-"


def q(values: list[float], at: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]


def ms(values: list[float]) -> str:
    return f"{q(values, 0.5) * 1e3:.0f}, {q(values, 0.99) * 1e3:.0f} ms"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="none,early,predictive")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    print(machine_line())
    print(
        f"{args.clients} clients for {args.seconds:g} s; decode holds {DECODES * SEQS} streams;",
        end=" ",
    )
    print(f"objectives: TTFT {TTFT_MS} ms, TBT {TBT_MS:.4g} ms", flush=True)
    columns = {}
    for mode in args.modes.split(","):
        with started(mode) as cluster:
            columns[mode] = uvloop.run(drive(cluster, args.clients, args.seconds))
    names = list(dict.fromkeys(name for made in columns.values() for name in made))
    print(f"\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in names:
        print(f"| {name} | {' | '.join(str(made.get(name, '-')) for made in columns.values())} |")


if __name__ == "__main__":
    main()
