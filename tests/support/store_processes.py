"""A pool of real processes: a master alone, and segments around it. The client is the test.

Over TCP, so that a dead owner's memory is gone; nothing but loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from moonserve.core.errors import MoonserveError
from moonserve.core.store.words import PutOptions
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

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        disk: Path | None = None,
        master: Sequence[str] = ("--recover-s", "1"),
    ) -> None:
        self._stack = stack
        self._disk = disk
        self._flags = master
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
        self.master = self.start(*argv, "--segment-ttl-s", "2", *self._flags)
        self.port = int(await self.master.says(r"listening on http://127.0.0.1:(\d+)"))

    async def start_segment(
        self, name: str, memory: str = "64MiB", more: Sequence[str] = ()
    ) -> Process:
        """Start a segment."""
        argv = ["segment", "--name", name, "--store-url", self.url, "--segment-bytes", memory]
        argv += more
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
async def pool(*settings: Any) -> AsyncIterator[Pool]:
    """A running pool."""
    async with contextlib.AsyncExitStack() as stack:
        made = Pool(stack, *settings)
        await made.start_master()
        await asyncio.gather(*(made.start_segment(name) for name in "abc"))
        yield made


def run(test: Callable[[Pool], Awaitable[None]], *settings: Any) -> None:
    """Run a test with a pool; `settings` as Pool's."""

    async def body() -> None:
        async with pool(*settings) as made:
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


async def answers(client: StoreClient) -> bool:
    """Whether the master does."""
    try:
        await client.exists([b"x"])
    except (MoonserveError, OSError):
        return False
    return True
