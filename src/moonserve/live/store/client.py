"""The pool of KV blocks as one worker holds it: KVStore over the master and the transfer rooms.

Used from one event loop. It owns this process's segment: shared memory, its TCP server, and the
beats that keep it mounted. Bytes are copied in a few threads of its own; the loop itself copies
only what is small and mapped already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from moonserve.core.errors import ConfigError, MoonserveError, StoreError
from moonserve.core.pool import Address, Exists, Found, Mount, Outcome, PutOptions, Ticket
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Bytes, LeaseId, SegmentId
from moonserve.live.store import wire
from moonserve.live.transfer.client import Slice, Transfer
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer

log = logging.getLogger(__name__)
T = TypeVar("T")

Rpc = Callable[[str, bytes], Awaitable[bytes]]
"""Runs one operation of MasterService somewhere. May raise MoonserveError or OSError."""

_INLINE_BYTES = 256 << 10  # copied on the loop: handing over to a thread would take longer
_BEATS_PER_TTL = 4
_BEAT_CALL_S = 2.0  # a beat that takes longer is better sent anew
_FAILURES = (MoonserveError, OSError)  # TimeoutError is an OSError
_encode = msgspec.msgpack.Encoder().encode


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's share in the pool is made of."""

    segment: SegmentId
    epoch: int
    """Larger at every start of this worker, such as its start time in microseconds."""
    capacity_bytes: Bytes
    token: bytes
    """The cluster's shared secret: who has it may read and write segments over TCP."""
    host: str = "127.0.0.1"
    """Where the segment's TCP server listens."""
    port: int = 0
    advertise_host: str | None = None
    """What peers connect to; None: `host`."""
    shared_memory: bool = True
    threads: int = 4
    call_s: float = 5.0
    """The longest a call to the master may take."""
    transfer_s: float = 10.0
    """The longest the bytes of one batch may take; below the master's put_ttl_us."""


class _Fetched(NamedTuple):
    good: set[int]
    corrupt: list[int]


class StoreClient:
    """A KVStore with a segment of its own. Made by `open`, ended by `close`.

    The master out of reach is a pool that has nothing: find and put answer so, and a warning is
    logged. Once started, find, read, put and release run to their end (bounded by call_s and
    transfer_s) even if the caller is cancelled, so that no thread writes to a buffer its owner
    thinks is free, and no lease or ticket is left behind.
    """

    def __init__(self, rpc: Rpc, settings: StoreSettings) -> None:
        """Reserve the memory and listen; `open` does this and mounts."""
        self.settings = settings
        self._rpc = rpc
        self._region = Region.create(settings.capacity_bytes)
        try:
            self._server = TransferServer(
                self._region, settings.token, settings.host, settings.port
            )
        except OSError as error:
            self._region.close()
            at = f"{settings.host}:{settings.port}"
            raise ConfigError(f"cannot listen on {at}: {error.strerror}", "host") from None
        self.address = self._server.address(settings.advertise_host or settings.host)
        self._transfer = Transfer(settings.token, shared_memory=settings.shared_memory)
        self._transfer.adopt(self._region)
        self._threads = ThreadPoolExecutor(settings.threads, "kv-copy")
        self._addresses: dict[SegmentId, Address] = {}
        """As the master last told them; every beat brings all that are mounted."""
        self._beat_s = 1.0
        self._beats: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, rpc: Rpc, settings: StoreSettings) -> StoreClient:
        """Make the segment and mount it. Raises what the master's refusal or absence raises."""
        client = await asyncio.to_thread(cls, rpc, settings)
        try:
            await client._mount()
        except BaseException:
            await client.close()
            raise
        return client

    def start_beats(self) -> None:
        """Keep the segment mounted from now on, also by a master that restarts."""
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat_forever())
            self._beats.add_done_callback(self._beats_ended)

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        """See KVStore.find."""
        return await _to_the_end(self._find(keys, lease))

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """See KVStore.read. What arrives corrupt is reported to the master, which removes it."""
        assert [it.size for it in found] == [len(memory) for memory in into]
        return await _to_the_end(self._read(found, into))

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        """See KVStore.put."""
        return await _to_the_end(self._put(items, lease, parent, PutOptions(preferred=near)))

    async def release(self, lease: LeaseId) -> None:
        """See KVStore.release. With the master out of reach, the lease ends by its time to live."""
        await _to_the_end(self._tell("release", wire.ReleaseCall(lease)))

    async def close(self) -> None:
        """Leave the pool: what this segment held is gone."""
        beats, self._beats = self._beats, None
        if beats is not None:
            beats.cancel()
            await asyncio.wait([beats])
        await self._tell("unmount", wire.SegmentCall(self.settings.segment, self.settings.epoch))
        await asyncio.to_thread(self._close_blocking)

    def _close_blocking(self) -> None:
        self._threads.shutdown()
        self._transfer.close()
        self._server.close()
        self._region.close()

    # The master

    async def _call(
        self, op: str, call: msgspec.Struct, reply: type[T], most_s: float | None = None
    ) -> T:
        async with asyncio.timeout(most_s or self.settings.call_s):
            body = await self._rpc(op, _encode(call))
        try:
            return msgspec.msgpack.decode(body, type=reply)
        except msgspec.DecodeError as error:
            raise StoreError(f"the master's reply to {op!r} is not understood: {error}") from None

    async def _tell(self, op: str, call: msgspec.Struct) -> None:
        try:
            await self._call(op, call, wire.Done)
        except _FAILURES as error:
            # At a stop of the whole cluster the master is gone first, and forgets by itself.
            level = logging.DEBUG if op == "unmount" else logging.WARNING
            log.log(level, "store master: %s failed: %s", op, _text(error))

    async def _mount(self) -> None:
        mine = self.settings
        mount = Mount(mine.segment, mine.epoch, len(self._region.view), self.address)
        reply = await self._call("mount", wire.MountCall(mount), wire.Mounted)
        if not reply.accepted:
            raise StoreError(
                f"segment {mine.segment!r} was refused: a later start of it is mounted"
            )
        self._beat_s = reply.terms.segment_ttl_us / MICROS_PER_SECOND / _BEATS_PER_TTL

    async def _beat_forever(self) -> None:
        call = wire.SegmentCall(self.settings.segment, self.settings.epoch)
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                reply = await self._call("beat", call, wire.Beaten, _BEAT_CALL_S)
                if not reply.mounted:
                    log.warning("the store master forgot segment %s: mounting again", call.segment)
                    await self._mount()
            except _FAILURES as error:
                log.warning("store master: beat failed: %s", _text(error))
                continue
            self._addresses = reply.addresses
            self._transfer.retain([self.address, *reply.addresses.values()])

    def _beats_ended(self, task: asyncio.Task[None]) -> None:
        """A bug must not cost the segment in silence: say it, and beat on."""
        if task is self._beats and not task.cancelled():
            log.critical("the store's beats broke off", exc_info=task.exception())
            self._beats = None
            self.start_beats()

    # Reading

    async def _find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        found: list[Found] = []
        for start in range(0, len(keys), wire.MAX_BATCH):
            batch = list(keys[start : start + wire.MAX_BATCH])
            try:
                reply = await self._call("find", wire.FindCall(batch, lease), wire.FoundReply)
            except _FAILURES as error:
                log.warning("store master: find failed: %s", _text(error))
                break
            self._addresses.update(reply.addresses)
            found += reply.found
            if len(reply.found) < len(batch):
                break
        return found

    async def _read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        deadline_s = time.monotonic() + self.settings.transfer_s
        missing = list(range(len(found)))
        corrupt: dict[int, None] = {}
        for turn in range(max((len(it.replicas) for it in found), default=0)):
            jobs = []
            for address, indices in self._by_address(found, missing, turn):
                slices = [Slice(found[i].replicas[turn].offset, into[i]) for i in indices]
                sums = [found[i].checksum for i in indices]
                jobs.append(self._copy(address, slices, self._fetch, indices, sums, deadline_s))
            for fetched in await asyncio.gather(*jobs):
                missing = [i for i in missing if i not in fetched.good]
                corrupt.update(dict.fromkeys(fetched.corrupt))
        if corrupt:
            objects = [(found[i].key, found[i].version, None) for i in corrupt]
            await self._tell("discard", wire.DiscardCall(objects[: wire.MAX_BATCH]))
        return missing[0] if missing else len(found)

    def _by_address(
        self, found: Sequence[Found], missing: Sequence[int], turn: int
    ) -> list[tuple[Address, list[int]]]:
        groups: dict[SegmentId, list[int]] = {}
        for index in missing:
            if turn < len(found[index].replicas):
                groups.setdefault(found[index].replicas[turn].segment, []).append(index)
        return [(self._addresses[s], g) for s, g in groups.items() if s in self._addresses]

    def _fetch(
        self,
        address: Address,
        slices: Sequence[Slice],
        indices: Sequence[int],
        checksums: Sequence[int],
        deadline_s: float,
    ) -> _Fetched:
        """Copy and verify; in a thread, or on the loop when small."""
        fetched = _Fetched(set(), [])
        arrived = self._transfer.read(address, slices, deadline_s)
        for index, piece, checksum, here in zip(indices, slices, checksums, arrived, strict=True):
            if here:
                if xxhash.xxh3_64_intdigest(piece.memory) == checksum:
                    fetched.good.add(index)
                else:
                    fetched.corrupt.append(index)
        return fetched

    # Writing

    async def _put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None,
        options: PutOptions,
    ) -> int:
        exist = 0
        for start in range(0, len(items), wire.MAX_BATCH):
            batch = items[start : start + wire.MAX_BATCH]
            try:
                exist += await self._put_batch(batch, lease, parent, options)
                parent = batch[-1][0]
            except _FAILURES as error:  # what was started is reaped by its time to live
                log.warning("store master: put failed: %s", _text(error))
                break
        return exist

    async def _put_batch(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None,
        options: PutOptions,
    ) -> int:
        sizes = [(key, len(memory)) for key, memory in items]
        outcomes = await self._put_start(
            wire.PutStartCall(self.settings.segment, sizes, lease, parent, options)
        )
        exist = sum(isinstance(outcome, Exists) for outcome in outcomes)
        groups: dict[SegmentId, list[tuple[Ticket, memoryview]]] = {}
        for (_, memory), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Ticket):
                groups.setdefault(outcome.segment, []).append((outcome, memory))
        deadline_s = time.monotonic() + self.settings.transfer_s
        jobs = []
        for segment, writes in groups.items():
            slices = [Slice(ticket.offset, memory) for ticket, memory in writes]
            ids = [ticket.id for ticket, _ in writes]
            jobs.append(self._copy(self._addresses[segment], slices, self._write, ids, deadline_s))
        ends: list[tuple[int, int]] = []
        failed: list[int] = []
        for written in await asyncio.gather(*jobs):
            for ticket_id, checksum in written:
                if checksum is None:
                    failed.append(ticket_id)
                else:
                    ends.append((ticket_id, checksum))
        if failed:
            await self._tell("put_abort", wire.PutAbortCall(failed))
        if ends:
            ended = await self._call("put_end", wire.PutEndCall(ends, lease), wire.PutEnded)
            exist += sum(version is not None for version in ended.versions)
        return exist

    async def _put_start(self, call: wire.PutStartCall) -> list[Outcome]:
        reply = await self._call("put_start", call, wire.PutStarted)
        if reply.outcomes is None:
            await self._mount()
            reply = await self._call("put_start", call, wire.PutStarted)
        if reply.outcomes is None:
            raise StoreError("the master takes no puts of this segment, though it was mounted")
        self._addresses.update(reply.addresses)
        return reply.outcomes

    def _write(
        self,
        address: Address,
        slices: Sequence[Slice],
        ids: Sequence[int],
        deadline_s: float,
    ) -> list[tuple[int, int | None]]:
        """Copy; (ticket id, checksum) of each, None where the bytes did not get there."""
        there = self._transfer.write(address, slices, deadline_s)
        return [
            (id, xxhash.xxh3_64_intdigest(piece.memory) if done else None)
            for id, piece, done in zip(ids, slices, there, strict=True)
        ]

    async def _copy(
        self,
        address: Address,
        slices: Sequence[Slice],
        run: Callable[..., T],
        *args: Any,
    ) -> T:
        """Run a copying function in a thread, or here if that is sooner over."""
        size = sum(len(piece.memory) for piece in slices)
        if size <= _INLINE_BYTES and self._transfer.is_near(address):
            return run(address, slices, *args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, run, address, slices, *args)


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until it is done, also when cancelled meanwhile; then let the cancel go on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen; the cancel is what counts now
        raise cancelled
    return task.result()


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
