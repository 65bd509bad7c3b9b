"""A rolling restart of a cluster under load: each worker, then each gateway process, one by one.

    python -m tests.chaos.rolling [--rounds 3] [--workers 2] [--clients 16]

An operator drains a worker, waits until it is idle, and stops it; its supervisor starts it again.
Gateway processes and the Conductor only get SIGTERM. Streams are checked token by token meanwhile.
Exit status 1: a stream had an error, was refused, lost a token, or something was left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.chaos.campaign import tracebacks
from tests.chaos.cluster import WORKERS, Cluster
from tests.chaos.streams import Load
from tests.support.up import TOKEN

_LOOK_S = 0.1
_STEP_S = 120.0
"""Longest time for one process."""


class Rolled(msgspec.Struct):
    """What a rolling restart did to the clients."""

    steps: int = 0
    ttfts_s: dict[str, list[float]] = {}
    """Times to the first token by what was restarted meanwhile."""
    summary: str = ""
    wrong: list[str] = []
    output: str = ""

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"{self.steps} processes restarted; {self.summary}"]
        quiet_ms = 0.0
        for what, times_s in self.ttfts_s.items():
            mean_ms = 1e3 * statistics.mean(times_s)
            quiet_ms = quiet_ms or mean_ms
            p50_s, p90_s = statistics.quantiles(times_s, n=10)[4::4]
            shown.append(
                f"TTFT, {what}: {len(times_s)} streams, mean {mean_ms:.0f} ms"
                f" ({mean_ms / quiet_ms - 1:+.0%}), p50 {1e3 * p50_s:.0f}, p90 {1e3 * p90_s:.0f}"
            )
        return shown


async def rolling(
    rounds: int = 1,
    fronts: int = 1,
    clients: int = 16,
    quiet_s: float = 5,
    most: int = 120,
    workers: Sequence[str] = WORKERS,
) -> Rolled:
    """Run one rolling restart of everything that can be restarted without loss.

    A gateway of one process (`fronts` 1) is the whole gateway, which clients would notice: only
    workers are restarted then. most: tokens of a stream. workers: those that are restarted.
    """
    rolled = Rolled()
    with tempfile.TemporaryDirectory(prefix="rolling-") as name:
        cluster = Cluster(
            Path(name), "--segment-bytes", "4MiB", "--profile", "a800-loaded", fronts=fronts
        )
        try:
            await cluster.start()
            load = Load(cluster.url, 1, lambda: 0, most)
            load.start(clients)
            await load.until_streams(2 * clients)
            await _roll(cluster, load, rounds, quiet_s, workers, rolled)
        finally:
            left = await cluster.end()
        rolled.wrong += [f"left behind: {it}" for it in left]
        rolled.wrong += tracebacks(cluster.up.lines)
        rolled.output = cluster.up.output
    return rolled


async def _roll(
    cluster: Cluster,
    load: Load,
    rounds: int,
    quiet_s: float,
    workers: Sequence[str],
    rolled: Rolled,
) -> None:
    """Restart processes under this load, and reckon up."""
    times_s = load.outcomes.ttfts_s
    times_s.clear()
    await asyncio.sleep(quiet_s)
    rolled.ttfts_s["nothing restarts"] = list(times_s)
    for _ in range(rounds):
        pids = cluster.processes()
        others = [it for it in pids if it not in (*WORKERS, "supervisor", "gateway")]
        for name in [*workers, *others]:
            times_s.clear()
            await _restart(cluster, name, pids[name])
            kind = "workers restart" if name in WORKERS else "Conductor and fronts restart"
            rolled.ttfts_s.setdefault(kind, []).extend(times_s)
            rolled.steps += 1
    await load.stop()
    out = load.outcomes
    rolled.summary = str(out)
    rolled.wrong += out.wrong
    rolled.wrong += [f"{count} streams ended with: {text}" for text, count in out.errors.items()]
    rolled.wrong += [f"{count} streams were refused: {it}" for it, count in out.refused.items()]
    left = await cluster.settled()
    rolled.wrong += [f"{name}: {count} at the end" for name, count in left.items()]


async def _restart(cluster: Cluster, name: str, pid: int) -> None:
    """Stop one process as an operator would, and wait until its next start serves."""
    end_s = time.monotonic() + _STEP_S
    epoch = 0
    if name in WORKERS:
        epoch = (await _members(cluster))[name]
        while await asyncio.to_thread(_drained, cluster.url, name) != "idle":
            assert time.monotonic() < end_s, f"{name} is not idle after {_STEP_S:g} s"
            await asyncio.sleep(_LOOK_S)
    started = _started(cluster)
    os.kill(pid, signal.SIGTERM)
    while not await _is_back(cluster, name, started, epoch):
        assert time.monotonic() < end_s, f"{name} is not back after {_STEP_S:g} s"
        await asyncio.sleep(_LOOK_S)


def _started(cluster: Cluster) -> int:
    """How many processes have begun to listen so far."""
    return sum("listening on http" in line for line in cluster.up.lines)


async def _is_back(cluster: Cluster, name: str, started: int, epoch: int) -> bool:
    """Whether the next start of a process serves."""
    if name in WORKERS:
        return (await _members(cluster)).get(name, epoch) != epoch
    if _started(cluster) == started:
        return False
    try:
        return bool(await asyncio.to_thread(_asked, cluster.url + "/ready", "GET"))
    except OSError:  # URLError is one
        return False


async def _members(cluster: Cluster) -> dict[str, int]:
    """The epochs of the instances that have joined."""
    listed = await asyncio.to_thread(_asked, cluster.url + "/api/instances", "GET")
    return {it["id"]: it["epoch"] for it in json.loads(listed)}


def _drained(url: str, name: str) -> str:
    return str(json.loads(_asked(f"{url}/api/instances/{name}/drain", "POST"))["state"])


def _asked(url: str, method: str) -> bytes:
    request = urllib.request.Request(
        url, method=method, headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return bytes(reply.read())


def main(words: Sequence[str] | None = None) -> int:
    """Run it from the command line; 1: something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="gateway processes")
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args(words)
    rolled = asyncio.run(rolling(options.rounds, options.workers, options.clients, quiet_s=20))
    print("\n".join([*rolled.lines(), *(f"WRONG: {it}" for it in rolled.wrong)]))
    return 1 if rolled.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
