"""A Conductor, its standby, fronts, workers, a real etcd: the leader is lost under streams."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import MoonserveError
from moonserve.live.http.client import client_of, sse_events
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.tls.authority import init
from tests.chaos.proxy import Link
from tests.support.certificates import tls_of
from tests.support.etcd import Etcd
from tests.support.store_processes import TOKEN, Process

pytestmark = pytest.mark.model  # for its tokenizer

STREAMS = 64
TOKENS = 120
"""Of each stream, some five seconds by the profile of the workers."""
PROMPT_TOKENS = 96
MOST_WAIT_S = 3.0
"""That a new request waits because of the loss."""
AWAY_S = 7.0
"""Longer than the lease of a leader."""
HEADERS = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}


class Fleet:
    """The processes, and what is asked of them."""

    def __init__(
        self, etcd: Etcd, stack: contextlib.AsyncExitStack, certificates: Path | None
    ) -> None:
        """certificates: the folder of `moonserve tls init`; None: all speak in clear."""
        self.etcd = etcd
        self.http = client_of(tls_of(certificates, "client") if certificates else None)
        self._tls = ("--tls-dir", str(certificates)) if certificates else ()
        self._stack = stack
        self.links: dict[str, Link] = {}
        """The proxy between each Conductor and etcd."""
        self.conductors: dict[str, Process] = {}
        self.fronts: list[str] = []
        self.processes: list[Process] = []

    def start(self, *argv: str) -> Process:
        """Start one process, which is ended with the fleet."""
        process = Process(*argv, *self._tls)
        self.processes.append(process)
        self._stack.callback(process.close)
        return process

    async def listening(self, process: Process) -> str:
        """The URL of a process, once it listens."""
        while True:
            for line in process.lines:
                if "listening on http" in line:
                    return line.split()[-1]
            assert process.process.poll() is None, "it ended"
            await asyncio.sleep(0.05)

    async def conductor(self) -> str:
        """Start a Conductor behind a proxy to etcd; its URL."""
        link = Link()
        self._stack.push_async_callback(link.close)
        port = await link.listen("127.0.0.1", 0, self.etcd.port)
        registry = self.etcd.url.replace(str(self.etcd.port), str(port))
        process = self.start(
            "conductor", "--port", "0", "--model", DEFAULT_MODEL, "--registry", registry
        )
        url = await self.listening(process)
        self.links[url], self.conductors[url] = link, process
        return url

    async def front(self) -> None:
        """Start a front."""
        argv = ("gateway", "--port", "0", "--conductor", self.etcd.url, "--model", DEFAULT_MODEL)
        self.fronts.append(await self.listening(self.start(*argv)))

    def worker(self, name: str, role: str) -> None:
        """Start a worker whose passes take some 30 ms."""
        self.start(
            "worker", "--name", name, "--role", role, "--engine", "fake", "--model", DEFAULT_MODEL,
            "--block-size", "16", "--segment-bytes", "64MiB", "--max-seqs", "64",
            "--profile", "a800", "--registry", self.etcd.url,
        )  # fmt: skip

    async def get(self, url: str) -> Any:
        """The JSON of a GET; None: no answer in time."""
        with contextlib.suppress(MoonserveError):
            reply = await self.http.request("GET", url, headers=HEADERS, timeout_s=2)
            return msgspec.json.decode(reply.body)
        return None

    async def leader(self) -> str:
        """The URL of the Conductor that leads, once one says so and the others do not."""
        while True:
            said = {url: await self.get(url + "/api/conductor") for url in self.conductors}
            leads = [url for url, it in said.items() if it and it.get("leads")]
            if len(leads) == 1:
                return leads[0]
            await asyncio.sleep(0.05)

    async def ready(self) -> None:
        """Wait until the leader and the standby know all workers."""
        for url in self.conductors:
            while len(await self.get(url + "/api/instances") or ()) < 4:
                assert all(it.process.poll() is None for it in self.processes), "one ended"
                await asyncio.sleep(0.1)

    async def ask(self, front: int, prompt: list[int], count: int) -> tuple[int, Any]:
        """Status and reply of a request that is not streamed."""
        reply = await self.http.request(
            "POST",
            self.fronts[front % len(self.fronts)] + "/v1/completions",
            headers=HEADERS,
            body=_body(prompt, count),
            timeout_s=30,
        )
        return reply.status, msgspec.json.decode(reply.body)

    async def stream(self, front: int, prompt: list[int], began: Callable[[], None]) -> list[int]:
        """The token ids of a stream, which must be whole. began: called with its third piece."""
        ids: list[int] = []
        reason = None
        async with self.http.stream(
            "POST",
            self.fronts[front % len(self.fronts)] + "/v1/completions",
            headers=HEADERS,
            body=_body(prompt, TOKENS, stream=True),
            timeout_s=60,
            idle_timeout_s=60,
        ) as reply:
            assert reply.status == 200, await reply.read()
            pieces = 0
            async for event in sse_events(reply):
                said = msgspec.json.decode(event)
                assert "error" not in said, said
                for choice in said["choices"]:
                    ids += choice["token_ids"]
                    reason = choice["finish_reason"] or reason
                pieces += 1
                if pieces == 3:
                    began()
        assert reason == "length", "the stream broke off"
        return ids

    async def hits(self) -> float:
        """The share of cached tokens of prompts that were served before."""
        cached = 0
        for at in range(8):
            status, said = await self.ask(at, prompt_of(at), 1)
            assert status == 200, said
            cached += said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached / (8 * PROMPT_TOKENS)

    async def settled(self) -> None:
        """All ledgers are zero, those of standbys included."""
        for url in self.conductors:
            while any((await self.ledger(url)).values()):
                await asyncio.sleep(0.1)

    async def ledger(self, url: str) -> dict[str, int]:
        """What a Conductor counts as under way, and as promised."""
        stats = await self.get(url + "/api/stats") or {"requests": 1}
        return {key: stats[key] for key in stats if key == "requests" or "promised" in key}


def prompt_of(at: int) -> list[int]:
    """One of eight prompts."""
    return [100 + at % 8] * PROMPT_TOKENS


def _body(prompt: list[int], count: int, stream: bool = False) -> bytes:
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream, "return_token_ids": True}
    return msgspec.json.encode(body)


@contextlib.asynccontextmanager
async def fleet_of(folder: Path, certificates: Path | None) -> AsyncIterator[Fleet]:
    """A store's master, two Conductors, two fronts, and two workers of each role."""
    async with contextlib.AsyncExitStack() as stack:
        etcd = Etcd(folder, certificates)
        stack.callback(etcd.close)
        it = Fleet(etcd, stack, certificates)
        try:
            it.start("store", "serve", "--listen", "0", "--registry", etcd.url)
            for name in ("p0", "p1", "d0", "d1"):
                it.worker(name, "prefill" if name[0] == "p" else "decode")
            await asyncio.gather(it.conductor(), it.conductor())
            await asyncio.gather(it.front(), it.front())
            await it.ready()
            yield it
        except BaseException:
            print("".join(line for process in it.processes for line in process.lines))
            raise


async def under_streams(it: Fleet, lose: Callable[[], Awaitable[None]]) -> None:
    """Lose something under 64 streams and a load of short requests: nobody notices more than a
    short wait."""
    wanted = [
        said["choices"][0]["token_ids"]
        for _, said in await asyncio.gather(*(it.ask(at, prompt_of(at), TOKENS) for at in range(8)))
    ]
    before = await it.hits()
    begun = asyncio.Semaphore(0)
    streams = [
        asyncio.create_task(it.stream(at, prompt_of(at), begun.release)) for at in range(STREAMS)
    ]
    for _ in range(STREAMS):
        await begun.acquire()
    usual_s = await _longest(it, lambda: False, 4)
    over = asyncio.Event()
    asking = asyncio.create_task(_longest(it, over.is_set))
    await lose()
    got = await asyncio.gather(*streams)
    over.set()
    longest_s = await asking
    print(f"{lose.__name__}: longest request {longest_s:.2f} s, before {usual_s:.2f} s")
    assert got == [wanted[at % 8] for at in range(STREAMS)]
    assert longest_s - usual_s <= MOST_WAIT_S
    assert abs(await it.hits() - before) <= 0.02
    await it.settled()


async def _longest(it: Fleet, over: Callable[[], bool], count: int = 1_000) -> float:
    """The longest of requests that come one after the other at both fronts, all of them served."""
    longest_s = 0.0
    asked = 0
    while not over() and asked < count:
        start_s = time.monotonic()
        said = await asyncio.gather(*(it.ask(front, prompt_of(asked), 1) for front in (0, 1)))
        assert [status for status, _ in said] == [200, 200], said
        longest_s = max(longest_s, time.monotonic() - start_s)
        asked += 1
        await asyncio.sleep(0.05)
    return longest_s


def run(
    test: Callable[[Fleet], Awaitable[None]],
    folder: Path,
    within_s: float = 240,
    certificates: Path | None = None,
) -> None:
    """Run a test with a fleet, within a deadline."""

    async def main() -> None:
        async with asyncio.timeout(within_s), fleet_of(folder, certificates) as it:
            await test(it)

    asyncio.run(main())


def test_the_loss_of_a_leader_costs_nobody_a_token(tmp_path: Path) -> None:
    """It is cut from etcd, etcd is away for all, it sleeps, it is killed with SIGKILL."""

    async def test(it: Fleet) -> None:
        leader = await it.leader()
        [standby] = set(it.conductors) - {leader}
        ready = await it.http.request("GET", standby + "/ready", timeout_s=5)
        assert (ready.status, b"is a standby" in ready.body) == (503, True)
        health = await it.get(standby + "/health")
        assert health["instances"] == 4
        assert leader in (await it.get(standby + "/api/conductor"))["leader"]

        async def cut() -> None:
            """Cut from etcd, it leads until the standby does."""
            it.links[leader].cut()
            while await it.leader() != standby:
                await asyncio.sleep(0.05)
            it.links[leader].heal()

        await under_streams(it, cut)

        async def away() -> None:
            """Without any etcd, the leader leads on, also when its lease is over."""
            await asyncio.to_thread(it.etcd.kill)
            await asyncio.sleep(AWAY_S)
            assert await it.leader() == standby
            await asyncio.to_thread(it.etcd.start)

        await under_streams(it, away)
        assert await it.leader() == standby
        process = it.conductors[standby]

        async def sleep() -> None:
            """While it sleeps it is replaced, and when it wakes it decides nothing."""
            process.process.send_signal(signal.SIGSTOP)
            while not (await it.get(leader + "/api/conductor") or {}).get("leads"):
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
            process.process.send_signal(signal.SIGCONT)
            assert await it.leader() == leader
            while not any("does not lead any more" in line for line in process.lines):
                await asyncio.sleep(0.05)  # a thread writes its log

        await under_streams(it, sleep)

        async def kill() -> None:
            it.conductors.pop(leader).process.kill()
            assert await it.leader() == standby

        await under_streams(it, kill)

    run(test, tmp_path)


@pytest.mark.slow
def test_a_standby_takes_over_by_tls(tmp_path: Path) -> None:
    """Fronts, workers, the store and etcd are called by TLS only, and the leader is killed."""
    init(tmp_path / "tls")

    async def test(it: Fleet) -> None:
        leader = await it.leader()
        assert all(url.startswith("https://") for url in (leader, *it.fronts))
        for worker in await it.get(leader + "/api/instances"):
            assert worker["url"].startswith("https://")

        async def kill() -> None:
            it.conductors.pop(leader).process.kill()
            assert await it.leader() != leader

        await under_streams(it, kill)

    run(test, tmp_path, certificates=tmp_path / "tls")


@pytest.mark.slow
def test_etcd_may_be_away_for_a_minute(tmp_path: Path) -> None:
    """All continue; then the leader is still the one that it was."""

    async def test(it: Fleet) -> None:
        leader = await it.leader()

        async def away() -> None:
            await asyncio.to_thread(it.etcd.kill)
            assert await _longest(it, _after(60), 100_000) < MOST_WAIT_S
            await asyncio.to_thread(it.etcd.start)

        await under_streams(it, away)
        assert await it.leader() == leader

    run(test, tmp_path, 300)


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() > end_s
