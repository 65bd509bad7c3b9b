"""Mixed load on a cluster without faults, for an hour, and what it left behind.

    python -m tests.chaos.soak [--minutes 60] [--workers 2]

Short and long prompts, streams, clients that leave, refusals and wrong requests. A warm-up fills
the store and every index first. Exit status 1: RSS, descriptors, threads or shared memory grew by
more than 5%, a stream was wrong, or something was left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from moonserve.core.errors import MoonserveError
from moonserve.live.http.client import HttpClient, sse_events
from tests.chaos.campaign import tracebacks
from tests.chaos.cluster import Cluster, Use, answer
from tests.chaos.streams import MODEL, Load
from tests.support.up import TOKEN

_MOST_GROWTH = 1.05
_SLACK_BYTES = 1 << 20
_SLACK_COUNT = 2
"""A connection or a thread of a pool more or less is no growth."""
_WARM_UP_SHARE = 0.25
"""Of the whole time; at least a minute."""
_FILL_S = 600.0
_FULL = 0.9
_PAUSE_S = 0.3
_REST_S = 60.0
"""Longer than any process of ours keeps an idle connection to another one."""
_LOOK_S = 60.0
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
WRONG: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"model": "another", "prompt": "x"}),
    ("/v1/completions", {"model": MODEL, "prompt": [1], "max_tokens": -1}),
    ("/v1/completions", {"model": MODEL, "prompt": [1] * 9_000, "max_tokens": 8}),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}),
    (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3},
    ),
    ("/v1/nothing", {}),
)


class Mixed:
    """Clients that do what clients do, besides the checked streams of `Load`."""

    def __init__(self, url: str, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._url = url
        self._draw = random.Random(seed)
        self._http = HttpClient()
        self._clients: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        """Begin."""
        self._clients = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def stop(self) -> None:
        """End all of them at once."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._http.close()

    async def fill(self, full: Callable[[], Awaitable[bool]]) -> None:
        """Send long prompts until the store is full."""
        async with asyncio.timeout(_FILL_S):
            while not await full():
                await asyncio.gather(*(self._fresh() for _ in range(8)))

    async def _fresh(self) -> None:
        prompt = [self._draw.randrange(1_000, 40_000) for _ in range(4_000)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1_500, "ignore_eos": True}
        await self._post("/v1/completions", body)

    async def _client(self) -> None:
        kinds = {
            "whole": self._whole,
            "left": self._leave,
            "wrong": self._wrong,
            "late": self._refused,
            "read": self._read,
        }
        while True:
            kind = self._draw.choice(list(kinds))
            try:
                await kinds[kind]()
                self.done[kind] += 1
            except MoonserveError:
                self.done[f"{kind} failed"] += 1
            await asyncio.sleep(_PAUSE_S)

    async def _post(self, path: str, body: Any, **more: str) -> int:
        data = json.dumps(body).encode()
        reply = await self._http.request(
            "POST", self._url + path, headers={**HEADERS, **more}, body=data, timeout_s=60
        )
        return reply.status

    async def _whole(self) -> None:
        """One reply without a stream, to a chat."""
        said = " ".join(
            self._draw.choices(["wind", "sea", "whale", "night"], k=self._draw.choice((3, 900)))
        )
        messages = [{"role": "user", "content": said}]
        await self._post(
            "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8}
        )

    async def _leave(self) -> None:
        """A stream whose client leaves after some events."""
        prompt = [self._draw.randrange(1_000, 40_000) for _ in range(self._draw.choice((5, 700)))]
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 500,
            "stream": True,
            "ignore_eos": True,
        }
        async with self._http.stream(
            "POST", self._url + "/v1/completions", headers=HEADERS, body=json.dumps(body).encode(),
            timeout_s=60, idle_timeout_s=60,
        ) as reply:  # fmt: skip
            left = self._draw.randrange(1, 20)
            async for _ in sse_events(reply):
                left -= 1
                if not left:
                    return

    async def _wrong(self) -> None:
        """A request that is refused with a 4xx."""
        path, body = self._draw.choice(WRONG)
        status = await self._post(path, body)
        assert 400 <= status < 500, (path, body, status)

    async def _refused(self) -> None:
        """A request whose objective cannot be met."""
        prompt = [self._draw.randrange(1_000, 40_000) for _ in range(2_000)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        await self._post("/v1/completions", body, **{"x-moonserve-ttft-slo-ms": "0.001"})

    async def _read(self) -> None:
        """What operators read."""
        for path in ("/metrics", "/api/stats", "/api/instances", "/health", "/ready"):
            await self._http.request("GET", self._url + path, headers=HEADERS, timeout_s=60)


async def soak(minutes: float, fronts: int, seed: int = 1) -> int:
    """Run it; the exit status."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        cluster = Cluster(Path(name), "--segment-bytes", "1MiB", "--decode-kv", "4", fronts=fronts)
        wrong: list[str] = []
        try:
            await cluster.start()
            wrong = await _loaded(cluster, minutes, seed)
        finally:
            left = await cluster.end()
        wrong += [f"left behind: {it}" for it in left] + tracebacks(cluster.up.lines)
    for line in wrong:
        print("WRONG:", line)
    return 1 if wrong else 0


async def _loaded(cluster: Cluster, minutes: float, seed: int) -> list[str]:
    filling = Mixed(cluster.url, seed)
    await filling.fill(lambda: asyncio.to_thread(is_full, cluster))
    await filling.stop()
    whole_s = minutes * 60
    warm_up_s = max(60.0, _WARM_UP_SHARE * whole_s)
    wrong = await _worked(cluster, seed, warm_up_s)
    first, first_shared = await _at_rest(cluster), cluster.shared_memory_bytes()
    wrong += await _worked(cluster, seed + 1, max(60.0, whole_s - warm_up_s))
    last, last_shared = await _at_rest(cluster), cluster.shared_memory_bytes()
    wrong += show(first, last)
    print(f"/dev/shm: {first_shared >> 10} KiB -> {last_shared >> 10} KiB")
    if last_shared > first_shared * _MOST_GROWTH:
        wrong.append("shared memory grew")
    wrong += [f"{it}: {count} at the end" for it, count in (await cluster.settled()).items()]
    return wrong


def is_full(cluster: Cluster) -> bool:
    """Whether the segments in which prefill publishes are full, so that no index grows any more."""
    segments = answer(cluster.url + "/api/stats")["store"]["segments"]
    used = {it["id"]: it["used_bytes"] / it["capacity_bytes"] for it in segments}
    print("filling:", ", ".join(f"{name} {share:.0%}" for name, share in used.items()), flush=True)
    return all(share > _FULL for name, share in used.items() if name.startswith("p"))


async def _worked(cluster: Cluster, seed: int, lasting_s: float) -> list[str]:
    """Let all clients work for so long, and print what the processes hold now and then."""
    print(f"load for {lasting_s:.0f} s", flush=True)
    load = Load(cluster.url, seed, lambda: 0, 400)
    mixed = Mixed(cluster.url, seed)
    load.start(8)
    mixed.start(8)
    end_s = time.monotonic() + lasting_s
    while (left_s := end_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, _LOOK_S))
        sizes = ", ".join(f"{name} {it.rss_bytes >> 20}" for name, it in cluster.use().items())
        print(f"{load.outcomes.whole} streams; RSS in MiB: {sizes}", flush=True)
    await mixed.stop()
    await load.stop()
    print(f"{load.outcomes}; others: {dict(mixed.done)}")
    return load.outcomes.wrong


async def _at_rest(cluster: Cluster) -> dict[str, Use]:
    """The least that each process holds while it rests; idle connections close meanwhile."""
    least = cluster.use()
    end_s = time.monotonic() + _REST_S
    while time.monotonic() < end_s:
        await asyncio.sleep(3)
        for name, use in cluster.use().items():
            least[name] = use.least(least.get(name, use))
    return least


def show(first: dict[str, Use], last: dict[str, Use]) -> list[str]:
    """Print a table of both, and return what grew by more than 5%."""
    grew = [] if first.keys() == last.keys() else ["a process ended or began"]
    print(f"{'process':12}{'RSS KiB':>20}{'descriptors':>16}{'threads':>12}")
    for name in sorted(first.keys() & last.keys()):
        a, b = first[name], last[name]
        print(
            f"{name:12}{f'{a.rss_bytes >> 10} -> {b.rss_bytes >> 10}':>20}"
            f"{f'{a.descriptors} -> {b.descriptors}':>16}{f'{a.threads} -> {b.threads}':>12}"
        )
        for what, before, after, slack in (
            ("RSS", a.rss_bytes, b.rss_bytes, _SLACK_BYTES),
            ("descriptors", a.descriptors, b.descriptors, _SLACK_COUNT),
            ("threads", a.threads, b.threads, _SLACK_COUNT),
        ):
            if after > before * _MOST_GROWTH + slack:
                grew.append(f"{what} of {name} grew from {before} to {after}")
    return grew


def main(words: Sequence[str] | None = None) -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(soak(given.minutes, given.workers, given.seed))
    return 130


if __name__ == "__main__":
    raise SystemExit(main())
