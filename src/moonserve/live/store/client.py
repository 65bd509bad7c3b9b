"""The pool as one process uses it: KVStore over the master and the transfer rooms.

Used from one event loop. It owns this process's segments, if it has any. Bytes are copied in a few
threads of its own; the loop itself copies only what is small and mapped already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from moonserve.core.errors import BadRequest, ConfigError, UnknownSegment
from moonserve.core.store.words import (
    Address,
    Exists,
    Found,
    Key,
    Outcome,
    PutOptions,
    Removal,
    Ticket,
)
from moonserve.core.units import MAX_BYTES, BlockKey, Bytes, LeaseId, SegmentId
from moonserve.live.store import operations, wire
from moonserve.live.store.copying import Copier, Write
from moonserve.live.store.disk import open_disk
from moonserve.live.store.link import FAILURES, Link, now_us, text, to_the_end
from moonserve.live.store.link import Rpc as Rpc
from moonserve.live.store.owner import Owner
from moonserve.live.store.settings import StoreSettings as StoreSettings
from moonserve.live.transfer.client import Transfer
from moonserve.live.transfer.mooncake import MooncakeTransport, transport_of_process
from moonserve.live.transfer.region import Region

log = logging.getLogger(__name__)

_DISK_BUSY_S = 0.05


class StoreClient:
    """A KVStore, and what else the master does. Made by `open`, ended by `close`.

    Towards KVStore, the master out of reach is a pool that has nothing: find and put answer so, and
    a warning is logged. Whose caller is cancelled: put and release run to their end all the same
    (bounded by call_s and transfer_s), so that no ticket is left behind; read ends when no thread
    writes to a buffer any more; find ends at once, and a release after it ends what it leased.

    The other calls raise MoonserveError or OSError where the master does not answer.
    """

    def __init__(self, rpc: Rpc, settings: StoreSettings) -> None:
        """Reserve the memory and listen; `open` does this and mounts. Raises ConfigError."""
        self.settings = settings
        self.link = Link(rpc, settings.call_s)
        self.transfer = Transfer(
            settings.token,
            shared_memory=settings.shared_memory,
            cards=settings.cards,
            mooncake=_mooncake(settings),
        )
        self._threads = ThreadPoolExecutor(settings.threads, "kv-copy")
        self._copier = Copier(self.link, self.transfer, self._threads, settings)
        self._segment = settings.segment if settings.capacity_bytes else None
        self.owners: list[Owner] = []
        try:
            if settings.capacity_bytes:
                region = Region.create(settings.capacity_bytes)
                self.owners.append(Owner(self.link, self.transfer, self._threads, region, settings))
            if settings.disk_dir is not None:
                self.owners.append(self._own_disk(settings.disk_dir))
        except ConfigError:
            self.transfer.close()
            self._close_blocking()
            raise
        self._mine = {(it.mounting.id, it.mounting.epoch): it for it in self.owners}
        self._named_s: dict[SegmentId, float] = {}
        """When the master last named each segment, if no beat says which there are."""
        self._forgetting: asyncio.TimerHandle | None = None

    def _own_disk(self, folder: Path) -> Owner:
        """The segment on disk: of the same node, its bytes verified. Raises ConfigError."""
        mine = self.settings
        region, journal = open_disk(folder, mine.disk_bytes)
        settings = msgspec.structs.replace(
            mine,
            segment=SegmentId(f"{mine.segment}-disk"),
            node=mine.node or mine.segment,
            port=0,
        )
        held = list(journal.held.values())
        return Owner(
            self.link, self.transfer, self._threads, region, settings, "disk", held, journal
        )

    @classmethod
    async def open(cls, rpc: Rpc, settings: StoreSettings) -> StoreClient:
        """Make the segments and mount them; without any, make sure that the master answers.

        Raises what its refusal or absence raises.
        """
        making = asyncio.ensure_future(asyncio.to_thread(cls, rpc, settings))
        try:
            client = await to_the_end(making)  # else its memory would be nobody's to give back
            for owner in client.owners:
                await owner.mount()
            if not client.owners:
                await client.exists([])
        except BaseException:
            if making.done() and not making.cancelled() and making.exception() is None:
                await making.result().close()
            raise
        return client

    def start_beats(self) -> None:
        """Keep the segments mounted from now on, also by a master that restarts."""
        for owner in self.owners:
            owner.start_beats(self._heard)

    def _heard(self) -> None:
        """Segments that are gone need no memory mapped, and no connections."""
        own = [owner.mounting.address for owner in self.owners]
        self.transfer.retain([*own, *self.link.addresses.values()])

    def _learn(self, addresses: Mapping[SegmentId, Address]) -> None:
        """The master named these segments."""
        self.link.addresses.update(addresses)
        if self.owners:  # their beats bring all there are
            return
        loop = asyncio.get_running_loop()
        self._named_s |= dict.fromkeys(addresses, loop.time())
        if self._forgetting is None and addresses:
            self._forgetting = loop.call_later(self.settings.times.unnamed_s, self._forget_unnamed)

    def _forget_unnamed(self) -> None:
        """Let go of the segments not named for long; they are met anew where they still are."""
        loop = asyncio.get_running_loop()
        old_s = loop.time() - self.settings.times.unnamed_s
        self._named_s = {name: at_s for name, at_s in self._named_s.items() if at_s > old_s}
        known = self.link.addresses  # replaced and not changed: who reads by it goes on
        self.link.addresses = {name: known[name] for name in self._named_s}
        self._heard()
        self._forgetting = None
        if self._named_s:
            self._forgetting = loop.call_later(self.settings.times.unnamed_s, self._forget_unnamed)

    async def close(self) -> None:
        """Leave the pool: what lies in this process's memory is gone."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        for owner in self.owners:
            await owner.leave()
        await asyncio.to_thread(self.transfer.close)
        for owner in self.owners:
            await owner.idle()
        await asyncio.to_thread(self._close_blocking)

    def _close_blocking(self) -> None:
        self._threads.shutdown()
        for owner in self.owners:
            owner.close()

    # KVStore

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        """See KVStore.find."""
        found: list[Found] = []
        for start in range(0, len(keys), wire.MAX_BATCH):
            batch = keys[start : start + wire.MAX_BATCH]
            try:
                call = wire.FindCall(batch, lease, self._segment)
                reply = await self.link.call(operations.FIND, call)
            except FAILURES as error:
                log.warning("store master: find failed: %s", text(error))
                break
            self._learn(reply.addresses)
            found += reply.found
            if len(reply.found) < len(batch):
                break
        return found

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """See KVStore.read. Corrupt replicas are reported to the master, which drops them."""
        assert [it.size for it in found] == [len(memory) for memory in into]
        missing = await self.fetch(found, into, self.settings.transfer_s)
        return missing[0] if missing else len(found)

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        """See KVStore.put."""
        options = self.settings.options
        if near is not None:
            options = msgspec.structs.replace(options, preferred=near)
        return await to_the_end(self._put(items, lease, parent, options))

    async def release(self, lease: LeaseId) -> None:
        """See KVStore.release. With the master out of reach, the lease ends by its time to live."""
        await to_the_end(self.link.attempt(operations.RELEASE, wire.ReleaseCall(lease)))

    # What else there is, up to wire.MAX_BATCH keys a call

    async def get(self, keys: Sequence[Key], lease: LeaseId) -> list[Found | None]:
        """What each key names, leased; `read` brings it."""
        call = wire.FindCall(keys, lease, self._segment)
        reply = await self.link.call(operations.GET, call)
        self._learn(reply.addresses)
        return reply.found

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key names an object; no lease, no use of it."""
        return await self.link.call(operations.EXISTS, wire.KeysCall(keys))

    async def scan(self, prefix: bytes, after: Key | None, limit: int) -> list[Found]:
        """The first objects, in the order of keys, that start with `prefix` and come after."""
        reply = await self.link.call(operations.SCAN, wire.ScanCall(prefix, after, limit))
        self._learn(reply.addresses)
        return reply.found

    async def remove(self, keys: Sequence[Key], force: bool = False) -> list[Removal]:
        """Remove objects, pinned ones too; leased ones only with `force`."""
        removals = await self.link.call(operations.REMOVE, wire.RemoveCall(keys, force))
        for key, removal in zip(keys, removals, strict=True):
            if removal.version is not None:
                self.link.diary.removed(now_us(), key, removal.version)
        self.link.tidy()
        return removals

    async def pin(self, keys: Sequence[Key], pinned: bool = True) -> list[bool]:
        """Keep objects from eviction, or no longer; whether each exists."""
        return await self.link.call(operations.PIN, wire.PinCall(keys, pinned))

    async def drain(self, segment: SegmentId) -> bool:
        """Move all off a segment. False: there is no such segment."""
        return await self.link.call(operations.DRAIN, wire.DrainCall(segment))

    async def evict(self, segment: SegmentId, size: Bytes) -> Bytes:
        """Let go of `size` bytes of a segment; of how many it did, less where the rest is held.

        They are free then or, where the segment's node has a disk, on their way to it. Raises
        BadRequest: no such size, no such segment.
        """
        if not 0 < size <= MAX_BYTES:
            raise BadRequest(f"size must be 1 to {MAX_BYTES} bytes, not {size}", "size")
        freed = 0
        while True:
            call = wire.EvictCall(segment, size - freed)
            more, moving = await self.link.call(operations.EVICT, call)
            freed += more
            if freed >= size or not (more or moving):
                return freed
            await asyncio.sleep(_DISK_BUSY_S)

    async def fetch(
        self, found: Sequence[Found], into: Sequence[memoryview], most_s: float
    ) -> list[int]:
        """As `read`, but the indices of all that did not arrive, and the others did."""
        fetched = await self._copier.read(found, into, most_s)
        if fetched.corrupt:
            bad = [(found[i].key, found[i].version, segment) for i, segment in fetched.corrupt]
            await self.link.attempt(operations.DISCARD, wire.DiscardCall(bad[: wire.MAX_BATCH]))
        return fetched.missing

    async def write(
        self,
        items: Sequence[tuple[Key, memoryview]],
        lease: LeaseId | None,
        parent: Key | None,
        options: PutOptions,
    ) -> list[Outcome | None]:
        """As `put` of up to a batch, but what became of each: Ticket if this call wrote it.

        None: it did not get where it should have lain. Raises where the master does not answer.
        """
        return await to_the_end(self._write(items, lease, parent, options))

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
                outcomes = await self._write(batch, lease, parent, options)
            except FAILURES as error:  # what was started is reaped by its time to live
                log.warning("store master: put failed: %s", text(error))
                break
            exist += sum(isinstance(it, Exists | Ticket) for it in outcomes)
            parent = batch[-1][0]
        return exist

    async def _write(
        self,
        items: Sequence[tuple[Key, memoryview]],
        lease: LeaseId | None,
        parent: Key | None,
        options: PutOptions,
    ) -> list[Outcome | None]:
        sizes, asked_us = [(key, len(memory)) for key, memory in items], now_us()
        outcomes = await self._start(
            wire.PutStartCall(self._segment, sizes, lease, parent, options)
        )
        writes = []
        for (key, memory), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Ticket):
                self.link.diary.writing(asked_us, outcome, key, len(memory), parent, options)
                writes.append(Write(outcome, memory))
            parent = key if options.blocks else None
        if not writes:
            return list(outcomes)
        self.link.tidy()
        exist = await self._write_and_end(writes, lease)
        return [None if isinstance(it, Ticket) and it.id not in exist else it for it in outcomes]

    async def _start(self, call: wire.PutStartCall) -> list[Outcome]:
        try:
            reply = await self.link.call(operations.PUT_START, call)
        except UnknownSegment:  # a master that restarted, or lost the beats
            await self.owners[0].mount()
            reply = await self.link.call(operations.PUT_START, call)
        self._learn(reply.addresses)
        return reply.outcomes

    async def _write_and_end(self, writes: Sequence[Write], lease: LeaseId | None) -> set[int]:
        """The ids of the tickets whose objects exist then."""
        diary = self.link.diary
        sums = await self._copier.write(writes, self.settings.transfer_s)
        written: list[Write] = []
        ends: list[tuple[int, int]] = []
        failed: list[int] = []
        for write, checksum in zip(writes, sums, strict=True):
            id = write.ticket.id
            if checksum is None:
                diary.drop(id)
                failed.append(id)
            else:
                diary.ended(now_us(), id, checksum)
                written.append(write)
                ends.append((id, checksum))
        if failed:
            await self.link.attempt(operations.PUT_ABORT, wire.PutAbortCall(failed))
        if not ends:
            return set()
        versions = await self.link.call(operations.PUT_END, wire.PutEndCall(ends, lease))
        for write, (id, _), version in zip(written, ends, versions, strict=True):
            at = write.ticket.segment, write.ticket.epoch  # the name may be another's by now
            if version != id:
                diary.drop(id)
                continue
            diary.acknowledged(now_us(), id)
            if (mine := self._mine.get(at)) and (held := diary.held(id)):
                mine.wrote(held)
        return {id for (id, _), it in zip(ends, versions, strict=True) if it is not None}


def _mooncake(settings: StoreSettings) -> MooncakeTransport | None:
    """Raises ConfigError where it is wanted and cannot be."""
    if settings.transport != "mooncake":
        return None
    host = settings.advertise_host or settings.host
    return transport_of_process(host, settings.mooncake_protocol, settings.mooncake_device)
