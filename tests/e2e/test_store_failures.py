"""A pool of real processes, some of which are killed: a master alone, and segments around it.

The client is this process. Nothing but loopback; over TCP, so that a dead owner's memory is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from threading import Thread

import pytest

from moonserve.core.errors import MoonserveError, StoreError
from moonserve.core.pool import PutOptions
from moonserve.core.units import SegmentId
from moonserve.live.http.client import HttpClient
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.objects import Objects
from moonserve.live.store.remote import HttpRpc
from moonserve.live.transfer import region

TOKEN = "the-tests-own-token"
SIZE = 50_000
TWICE = PutOptions(replicas=2, blocks=False)


def content(name: str) -> bytes:
    """What object `name` is."""
    return hashlib.shake_128(name.encode()).digest(SIZE)


class Process:
    """One `moonserve ...`, with what it printed."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonserve", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "MOONSERVE_TOKEN": TOKEN},
        )
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    async def says(self, pattern: str) -> str:
        """Wait for a line; its first group."""
        end = time.monotonic() + 20
        while True:
            for line in self.lines:
                if found := re.search(pattern, line):
                    return found[1] if found.groups() else found[0]
            assert time.monotonic() < end, f"never said {pattern!r}:\n{''.join(self.lines)}"
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, however."""
        self.kill()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Pool:
    """A master and the segments a, b and c, each a process."""

    def __init__(self, stack: contextlib.AsyncExitStack, disk: Path | None = None) -> None:
        self._stack = stack
        self._disk = disk
        self.segments: dict[str, Process] = {}
        self.port = 0

    def start(self, *argv: str) -> Process:
        """Start one role."""
        process = Process(*argv)
        self._stack.callback(process.close)
        return process

    async def start_master(self) -> None:
        """Start the master, or start it anew where it was."""
        argv = ("store", "serve", "--listen", str(self.port))
        self.master = self.start(*argv, "--segment-ttl-s", "2", "--recover-s", "1")
        self.port = int(await self.master.says(r"listening on http://127.0.0.1:(\d+)"))

    async def start_segment(self, name: str, memory: str = "64MiB") -> Process:
        """Start a segment."""
        argv = ["segment", "--name", name, "--store-url", self.url, "--segment-bytes", memory]
        if self._disk is not None:
            argv += ["--disk-bytes", "32MiB", "--disk-dir", str(self._disk)]
        self.segments[name] = self.start(*argv)
        await self.segments[name].says(r"MiB of dram")
        return self.segments[name]

    @property
    def url(self) -> str:
        """The master's."""
        return f"http://127.0.0.1:{self.port}"

    async def client(self, name: str, **more: object) -> StoreClient:
        """A member in this process, without a segment unless told otherwise."""
        http = HttpClient()
        self._stack.push_async_callback(http.close)
        fields: dict[str, object] = {
            "segment": SegmentId(name),
            "epoch": time.time_ns(),
            "capacity_bytes": 0,
            "token": TOKEN.encode(),
            "shared_memory": False,
        }
        settings = StoreSettings(**(fields | more))  # type: ignore[arg-type]
        made = await StoreClient.open(HttpRpc(http, self.url, TOKEN), settings)
        self._stack.push_async_callback(made.close)
        made.start_beats()
        return made


@contextlib.asynccontextmanager
async def pool(disk: Path | None = None) -> AsyncIterator[Pool]:
    """A running pool."""
    async with contextlib.AsyncExitStack() as stack:
        made = Pool(stack, disk)
        await made.start_master()
        await asyncio.gather(*(made.start_segment(name) for name in "abc"))
        yield made


def run(test: Callable[[Pool], Awaitable[None]], disk: Path | None = None) -> None:
    """Run a test with a pool."""

    async def body() -> None:
        async with pool(disk) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(body(), 60))
    region.clean_stale()


async def put(client: StoreClient, name: str, options: PutOptions = TWICE) -> None:
    """Put object `name`."""
    await Objects(client).put([(name.encode(), memoryview(content(name)))], options)


async def replicas(client: StoreClient) -> dict[str, list[str]]:
    """Where every object lies."""
    found = await client.scan(b"", None, 1000)
    return {it.key.decode(): [place.segment for place in it.replicas] for it in found}


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(20):
        while not await true():
            await asyncio.sleep(0.05)


def test_a_killed_owner_costs_no_read_of_what_lies_twice() -> None:
    """Under load, kill -9 of an owner: all reads of doubled objects give their bytes, single ones
    fail in time and say why, and soon everything lies twice again.
    """

    async def test(it: Pool) -> None:
        client = await it.client("reader")
        names = [f"twice-{n}" for n in range(60)]
        await asyncio.gather(*(put(client, name) for name in names))
        on_a = PutOptions(preferred=SegmentId("a"), blocks=False)
        await asyncio.gather(*(put(client, f"once-{n}", on_a) for n in range(5)))

        async def all_twice() -> bool:
            lie = await replicas(client)
            return all(len(lie[name]) == 2 for name in names)

        await until(all_twice)
        assert any("a" in places for name, places in (await replicas(client)).items())
        stop = asyncio.Event()
        reads = 0
        written: list[float] = []

        async def read_on(seed: int) -> None:
            nonlocal reads
            rng = random.Random(seed)
            while not stop.is_set():
                some = rng.sample(names, 3)
                got = await Objects(client).get([name.encode() for name in some])
                assert got == [content(name) for name in some]
                reads += 1

        async def write_on() -> None:
            while not stop.is_set():
                await put(client, f"new-{len(written)}")
                written.append(time.monotonic())
                await asyncio.sleep(0.02)

        load = [asyncio.create_task(read_on(seed)) for seed in range(4)]
        load.append(asyncio.create_task(write_on()))
        await asyncio.sleep(0.5)
        it.segments["a"].kill()
        killed, before = time.monotonic(), reads
        with pytest.raises(StoreError, match=r"6f6e63652d30 is (out of reach|lost): segment a"):
            await Objects(client, 1.0).get([b"once-0"])
        assert time.monotonic() < killed + 4

        async def gone() -> bool:
            return all("a" not in places for places in (await replicas(client)).values())

        await until(gone)
        await until(all_twice)
        stop.set()
        await asyncio.gather(*load)
        assert reads > before + 10
        print(
            f"{reads} reads of 3, {len(written)} puts, mended in {time.monotonic() - killed:.1f} s"
        )
        late = [f"new-{n}".encode() for n, at in enumerate(written) if at > killed + 0.5]
        assert await Objects(client).get(late) == [content(name.decode()) for name in late]
        assert await Objects(client).get([b"once-0"]) == [None]

    run(test)


def test_a_killed_master_forgets_nothing_readable() -> None:
    """kill -9 of the master under load, and its restart: what any put had ended is read then."""

    async def test(it: Pool) -> None:
        member = await it.client("m", capacity_bytes=16 << 20)
        client = await it.client("reader")
        ended: list[str] = []
        removed: list[str] = []
        stop = asyncio.Event()

        async def write_on(who: StoreClient, kind: str, options: PutOptions) -> None:
            number = 0
            while not stop.is_set():
                name = f"{kind}-{number}"
                number += 1
                await put(who, name, options)
                ended.append(name)
                await asyncio.sleep(0.01)

        once = PutOptions(blocks=False)
        load = [
            asyncio.create_task(write_on(member, "own", once)),
            asyncio.create_task(write_on(client, "other", once)),
            asyncio.create_task(write_on(client, "twice", TWICE)),
        ]
        await asyncio.sleep(1.0)
        gone = [ended.pop(0).encode() for _ in range(3)]
        assert [it.outcome for it in await client.remove(gone)] == ["removed"] * 3
        removed += [name.decode() for name in gone]
        it.master.kill()
        killed, before = time.monotonic(), len(ended)
        await it.start_master()
        await until(lambda: _answers(client))
        print(f"answers {time.monotonic() - killed:.1f} s after, {before} objects before")
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*load)
        assert len(ended) > before
        for name in ended:
            assert await Objects(client).get([name.encode()]) == [content(name)], name
        assert await client.exists([name.encode() for name in removed]) == [False] * 3
        it.master.process.send_signal(signal.SIGTERM)
        await it.master.says("stopped")

    run(test)


def test_a_killed_owner_finds_on_disk_what_lay_there(tmp_path: Path) -> None:
    """What memory had no room for lies on disk; kill -9 of the owner, and its restart, keep it."""

    async def test(it: Pool) -> None:
        client = await it.client("reader")
        it.segments["b"].kill()
        it.segments["c"].kill()
        await it.start_segment("small", memory="1MiB")
        names = [f"on-{n}" for n in range(60)]
        on = PutOptions(preferred=SegmentId("small"), blocks=False)
        it.segments["a"].process.send_signal(signal.SIGTERM)
        await it.segments["a"].says("stopped")

        for name in names:
            await put(client, name, on)

        async def on_disk() -> list[str]:
            lie = await replicas(client)
            return [name for name, places in lie.items() if "small-disk" in places]

        async def many() -> bool:
            return len(await on_disk()) > 30

        await until(many)
        lay = await on_disk()
        it.segments["small"].kill()
        await it.start_segment("small", memory="1MiB")
        await until(many)
        for name in lay:
            (got,) = await Objects(client).get([name.encode()])
            assert got == content(name), name

    run(test, tmp_path)


async def _answers(client: StoreClient) -> bool:
    try:
        await client.exists([b"x"])
    except (MoonserveError, OSError):
        return False
    return True
