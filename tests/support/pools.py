"""Pools of KV blocks with two hands on each, for what every KVStore must do.

embedded: one client beside its master. shm and tcp: two clients, one putting and one reading, calls
to the master in-process but through the wire's bytes. rpc: the same over a channel. mooncake: two
members of a real Mooncake pool, whose master is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Sequence

from moonserve.core.errors import StoreError
from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.inferred import Reported
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest
from moonserve.live.http.server import App, Server, serve
from moonserve.live.http.switch import Switch
from moonserve.live.ports import KVStore
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.local import MemberConnection
from moonserve.live.store.mooncake import MooncakeSettings, MooncakeStore
from moonserve.live.store.remote import HttpRpc
from moonserve.live.store.reports import POOL
from moonserve.live.store.server import MasterService
from moonserve.live.store.wire import PATH, PROTOCOL
from moonserve.live.transfer import mooncake_master

ROOM = 1 << 20
LEASE = LeaseId("reader")
EMBEDDED = ("embedded", "shm", "tcp", "rpc")
_LEASE_MS = 1_000
_epochs = itertools.count(1)


def key(number: int) -> BlockKey:
    """A key named by a number."""
    return BlockKey(number.to_bytes(32, "big"))


def blocks(*sizes: int, first: int = 0) -> list[tuple[BlockKey, memoryview]]:
    """Random objects, keys `first`, `first` + 1, ..."""
    return [(key(first + n), memoryview(os.urandom(size))) for n, size in enumerate(sizes)]


async def read_all(store: KVStore, keys: Sequence[BlockKey]) -> list[bytes]:
    """Find and read: the leading objects that arrived."""
    found = await store.find(keys, LEASE)
    into = [memoryview(bytearray(it.size)) for it in found]
    count = await store.read(found, into)
    return [bytes(it) for it in into[:count]]


class Pool:
    """A master and two hands on it: `writer` puts, `reader` finds and reads."""

    def __init__(self, kind: str, terms: Terms = Terms()) -> None:  # noqa: B008 - frozen
        self.kind = kind
        self.room = ROOM
        self.terms = terms
        self.now_us = 0
        self.service = self._new_service()
        self.index = PrefixIndex()
        self.is_down = False
        self.hold: asyncio.Event | None = None
        self._http = HttpClient()
        self._server: Server | None = None
        self._remote: HttpRpc | None = None

    def _new_service(self) -> MasterService:
        return MasterService(Master(self.terms, next(_epochs) * 1000), lambda: self.now_us)

    async def rpc(self, op: str, body: bytes, end_s: float) -> bytes:
        """The way to the master; `is_down` breaks it, `hold` delays puts at their end."""
        if self.is_down:
            raise ConnectionRefusedError("master is down")
        if self.hold is not None and op == "put_end":
            async with asyncio.timeout_at(end_s):
                await self.hold.wait()
        if self._remote is not None:
            return await self._remote(op, body, end_s)
        return self.service.handle(op, body)

    async def _switch(self, request: HttpRequest) -> Switch:
        return Switch(PROTOCOL, MemberConnection(self.service.handle, set()))

    async def client(self, name: str, room: int = ROOM, **more: object) -> StoreClient:
        """Another client."""
        fields: dict[str, object] = {
            "segment": SegmentId(name),
            "epoch": next(_epochs),
            "capacity_bytes": room,
            "token": b"secret",
            "shared_memory": self.kind != "tcp",
            "transfer_s": 2.0,
        }
        return await StoreClient.open(self.rpc, StoreSettings(**(fields | more)))  # type: ignore[arg-type]

    async def start(self) -> None:
        """Open both hands."""
        if self.kind == "rpc":
            routes = {("GET", PATH): self._switch}
            self._server = await serve(App(routes, name="master"), "127.0.0.1", 0)
            self._remote = HttpRpc(self._http, f"http://127.0.0.1:{self._server.port}", "")
        self.writer = await self.client("w")
        self.reader = self.writer if self.kind == "embedded" else await self.client("r", room=4096)

    async def stop(self) -> None:
        """Close both hands."""
        await self.writer.close()
        if self.reader is not self.writer:
            await self.reader.close()
        await self._http.close()
        if self._server is not None:
            await self._server.stop(0)

    # What every kind of pool can do to a test

    async def told(self) -> PrefixIndex:
        """The Conductor's index, after all that it was told so far."""
        replay(self.index, self.service.master.drain_events())
        return self.index

    async def corrupt(self, name: BlockKey) -> None:
        """Flip the last bit of a stored object."""
        found = self.service.master.locate(name)
        assert found is not None
        self.writer.owners[0].region.view[found.replicas[0].offset + found.size - 1] ^= 1

    async def lose(self, name: BlockKey) -> None:
        """Let an object vanish, leased or not."""
        found = self.service.master.locate(name)
        assert found is not None
        self.service.master.discard(name, found.version)

    async def leases_end(self) -> None:
        """Release what can be released; else wait until it ran out."""
        await self.reader.release(LEASE)
        await self.writer.release(LEASE)

    async def go_down(self) -> None:
        """The master is out of reach."""
        self.is_down = True

    async def come_back(self) -> None:
        """There is a new master, which knows nothing."""
        self.service = self._new_service()
        self.is_down = False


class MooncakePool:
    """A mooncake_master and two members; leases are short, so that a test can outwait them."""

    room = 16 << 20

    def __init__(self) -> None:
        self.kind = "mooncake"
        self.index = PrefixIndex()
        self._reported = Reported(POOL)
        self._now_us = 0
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            self._port = trial.getsockname()[1]

    async def start(self) -> None:
        """Start the master and join it twice."""
        self._master = self._new_master()
        self.writer = await self._join(self.room)
        self.reader = await self._join(0)

    def _new_master(self) -> subprocess.Popen[bytes]:
        argv = mooncake_master.command("127.0.0.1", self._port, _LEASE_MS)
        return subprocess.Popen(argv, stdin=subprocess.PIPE)

    async def _join(self, room: int) -> MooncakeStore:
        settings = MooncakeSettings(
            master=f"127.0.0.1:{self._port}", segment_bytes=room, call_s=1.0, transfer_s=5.0
        )
        async with asyncio.timeout(20):
            while True:
                try:
                    return await MooncakeStore.open(settings, self._tell)
                except StoreError:
                    await asyncio.sleep(0.1)

    async def _tell(self, events: Sequence[BlockEvent]) -> None:
        """What the gateway does with it, if time goes by meanwhile."""
        self._now_us += 10_000_000
        for event in events:
            if isinstance(event, BlocksStored):
                replay(self.index, self._reported.stored(self._now_us, event.keys, event.parent))
            elif isinstance(event, BlocksRemoved):
                replay(self.index, self._reported.removed(self._now_us, event.keys))

    async def empty(self) -> None:
        """Remove everything, leased or not, and what is known of it."""
        await self.told()
        self.writer.store.remove_all(True)
        self.index, self._reported = PrefixIndex(), Reported(POOL)

    async def stop(self) -> None:
        """Leave, and end the master."""
        await asyncio.gather(self.writer.close(), self.reader.close())
        self._end_master()

    def _end_master(self) -> None:
        self._master.kill()
        self._master.wait()
        assert self._master.stdin is not None
        self._master.stdin.close()

    async def told(self) -> PrefixIndex:
        """See Pool."""
        while self.writer._reports._unsent or self.reader._reports._unsent:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        return self.index

    async def corrupt(self, name: BlockKey) -> None:
        """See Pool. Mooncake's objects do not change, so a wrong one takes its place."""
        found = await self.writer.find([name], LEASE)
        size = found[0].size + 8
        async with self.writer._lanes.take() as lane:
            _, (place,) = lane.places([size])
            assert self.writer.store.batch_get_into([name.hex()], [place], [size]) == [size]
            lane.memory[size - 9] ^= 1
            assert self.writer.store.remove(name.hex(), True) == 0
            assert self.writer.store.batch_put_from([name.hex()], [place], [size]) == [0]

    async def lose(self, name: BlockKey) -> None:
        """See Pool."""
        assert self.writer.store.remove(name.hex(), True) == 0

    async def leases_end(self) -> None:
        """See Pool."""
        await self.reader.release(LEASE)
        await asyncio.sleep(2 * _LEASE_MS / 1_000)

    async def go_down(self) -> None:
        """See Pool."""
        self._end_master()

    async def come_back(self) -> None:
        """See Pool."""
        self._master = self._new_master()


def replay(index: PrefixIndex, events: Sequence[BlockEvent]) -> None:
    """What the Conductor does with them."""
    for event in events:
        match event:
            case BlocksStored(segment, keys, parent, tier, epoch):
                index.stored(segment, keys, parent, tier, epoch)
            case BlocksRemoved(segment, keys, tier, epoch):
                index.removed(segment, keys, tier, epoch)
            case BlocksCleared(segment, tier, epoch):
                index.cleared(segment, tier, epoch)


AnyPool = Pool | MooncakePool


class Pools:
    """Runs tests against pools: a new one each, but one Mooncake pool for all, emptied before."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._mooncake: MooncakePool | None = None

    def run(self, kind: str, test: Callable[[AnyPool], Awaitable[None]]) -> None:
        """Run one test against a pool of this kind."""
        self._runner.run(asyncio.wait_for(self._run(kind, test), 60))

    async def _run(self, kind: str, test: Callable[[AnyPool], Awaitable[None]]) -> None:
        if kind == "mooncake":
            if self._mooncake is None:
                self._mooncake = MooncakePool()
                await self._mooncake.start()
            await self._mooncake.empty()
            await test(self._mooncake)
            return
        made = Pool(kind)
        await made.start()
        try:
            await test(made)
        finally:
            await made.stop()

    def close(self) -> None:
        """End what was kept."""
        if self._mooncake is not None:
            self._runner.run(self._mooncake.stop())
        self._runner.close()
