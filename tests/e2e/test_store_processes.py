"""The store between real processes: this one is the master, the children are workers.

A child takes a line of JSON per command and answers with one. Run as a script, this file is the
child.
"""

import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.server import MasterService
from moonserve.live.transfer import region

SIZE = 300_000
TERMS = Terms(segment_ttl_us=1_000_000)


def key(number: int) -> BlockKey:
    """A key named by a number."""
    return BlockKey(number.to_bytes(32, "big"))


def content(number: int) -> bytes:
    """What both processes agree that block `number` is."""
    return hashlib.shake_128(str(number).encode()).digest(SIZE)


def now_us() -> int:
    """The master's clock."""
    return time.monotonic_ns() // 1000


def left_by(*children: subprocess.Popen[str]) -> list[str]:
    """The regions of these processes."""
    pids = tuple(f"moonserve-kv-{child.pid}-" for child in children)
    return [path.name for path in region._ours() if path.name.startswith(pids)]


class Hub:
    """The master behind a socket, and the children."""

    def __init__(self) -> None:
        self.service = MasterService(Master(TERMS, 1), now_us)
        self.children: list[subprocess.Popen[str]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one child's calls."""
        try:
            while True:
                op = (await reader.readline()).decode().strip()
                if not op:
                    break
                size = int.from_bytes(await reader.readexactly(4), "big")
                reply = self.service.handle(op, await reader.readexactly(size))
                writer.write(len(reply).to_bytes(4, "big") + reply)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        writer.close()

    def start(self, name: str, port: int, shared: bool) -> subprocess.Popen[str]:
        """Start a child; its first line says that it is mounted."""
        child = subprocess.Popen(
            [sys.executable, __file__, name, str(port), str(int(shared))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    async def ask(self, child: subprocess.Popen[str], *words: object) -> Any:
        """One command and its answer; without words, only an answer."""
        assert child.stdin is not None
        assert child.stdout is not None
        if words:
            child.stdin.write(json.dumps(words) + "\n")
            child.stdin.flush()
        line = await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), 20)
        assert line, child.communicate(timeout=5)[1]
        return json.loads(line)


def run(test: Callable[[Hub, int], Awaitable[None]]) -> None:
    """Run a test with a hub; every child is ended."""

    async def body() -> None:
        hub = Hub()
        server = await asyncio.start_server(hub.serve, "127.0.0.1", 0)
        try:
            await test(hub, server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for child in hub.children:
                child.kill()
                child.communicate(timeout=10)

    asyncio.run(asyncio.wait_for(body(), 60))
    region.clean_stale()


@pytest.mark.parametrize("shared", [True, False])
def test_one_process_reads_what_another_put(shared: bool) -> None:
    """Equal bytes across processes, and a clean exit: no warning, no shared memory left."""

    async def test(hub: Hub, port: int) -> None:
        first, second = (hub.start(name, port, shared) for name in "ab")
        await hub.ask(first)
        await hub.ask(second)
        assert await hub.ask(first, "put", 5) == 5
        assert await hub.ask(second, "get", 5) == {"found": 5, "read": 5, "equal": True}
        for child in (first, second):
            assert await hub.ask(child, "close") == "closed"
            out, err = await asyncio.to_thread(child.communicate, timeout=10)
            assert (child.returncode, out, err) == (0, "", "")
        assert not left_by(first, second)
        assert hub.service.master.stats().objects == 0

    run(test)


def test_a_killed_owner_is_missed_and_its_memory_removed() -> None:
    """kill -9: reads are short at once, the objects go in time, the memory at the next start."""

    async def test(hub: Hub, port: int) -> None:
        owner, reader = (hub.start(name, port, shared=False) for name in "ab")
        await hub.ask(owner)
        await hub.ask(reader)
        assert await hub.ask(owner, "put", 3) == 3
        owner.kill()
        await asyncio.to_thread(owner.wait, 10)
        assert await hub.ask(reader, "get", 3) == {"found": 3, "read": 0, "equal": True}
        deadline = time.monotonic() + 20
        while "a" in hub.service.master.addresses():
            assert time.monotonic() < deadline
            hub.service.reap()
            await asyncio.sleep(0.05)
        assert await hub.ask(reader, "get", 3) == {"found": 0, "read": 0, "equal": True}
        again = hub.start("a", port, shared=False)
        await hub.ask(again)
        assert not left_by(owner)
        assert len(left_by(reader, again)) == 2
        assert await hub.ask(again, "put", 3) == 3
        assert await hub.ask(reader, "get", 3) == {"found": 3, "read": 3, "equal": True}

    run(test)


async def child(name: str, port: int, shared: bool) -> None:
    """The worker's side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    one_call = asyncio.Lock()

    async def rpc(op: str, body: bytes, end_s: float) -> bytes:
        async with asyncio.timeout_at(end_s), one_call:
            writer.write(op.encode() + b"\n" + len(body).to_bytes(4, "big") + body)
            return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))

    settings = StoreSettings(
        segment=SegmentId(name),
        epoch=time.time_ns(),
        capacity_bytes=8 << 20,
        token=b"secret",
        shared_memory=shared,
        transfer_s=3.0,
    )
    store = await StoreClient.open(rpc, settings)
    store.start_beats()
    print(json.dumps("mounted"), flush=True)
    while True:
        command, *rest = json.loads(await asyncio.to_thread(sys.stdin.readline))
        if command == "close":
            await store.close()
            print(json.dumps("closed"), flush=True)
            return
        numbers = range(rest[0])
        if command == "put":
            items = [(key(n), memoryview(content(n))) for n in numbers]
            print(await store.put(items, None), flush=True)
        else:
            found = await store.find([key(n) for n in numbers], LeaseId(name))
            into = [memoryview(bytearray(it.size)) for it in found]
            read = await store.read(found, into)
            await store.release(LeaseId(name))
            equal = all(bytes(into[n]) == content(n) for n in range(read))
            answer = {"found": len(found), "read": read, "equal": equal}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(child(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3]))))
