"""The pool as one process uses it: a KVStore over the master and the Transfer Engine.

It is used from one event loop, and owns this process's segments, if it has any. Its threads copy
bytes; the loop itself copies only what is small and mapped.
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
from moonserve.live.store.link import FAILURES, MasterLink, log_failure, now_us, to_the_end
from moonserve.live.store.link import Rpc as Rpc
from moonserve.live.store.owner import Owner
from moonserve.live.store.settings import StoreSettings as StoreSettings
from moonserve.live.transfer.client import Transfer
from moonserve.live.transfer.mooncake import MooncakeTransport, transport_of_process
from moonserve.live.transfer.region import Region

log = logging.getLogger(__name__)

_DISK_BUSY_S = 0.05


class StoreClient:
    """A KVStore, and the other calls of the master. Made by `open`, ended by `close`.

    If the master is out of reach, the pool looks empty to a KVStore's user. find returns what
    it found before that, usually nothing; put returns how many were stored before. A warning is
    logged. If the caller is cancelled, put and release still run to
    completion (bounded by call_s and transfer_s), so that no ticket is left behind. A cancelled
    read ends when no thread writes to a buffer any more. After a cancelled find, release
    still works: a released name stays dead.

    The other calls raise MoonserveError or OSError if the master does not answer.
    """

    def __init__(self, rpc: Rpc, settings: StoreSettings) -> None:
        """Reserve the memory and listen; `open` does this and mounts. Raises ConfigError."""
        self.settings = settings
        self.link = MasterLink(rpc, settings.call_s)
        self.transfer = Transfer(
            settings.token,
            shared_memory=settings.shared_memory,
            cards=settings.cards,
            mooncake=_mooncake(settings),
            trust=settings.tls.trust if settings.tls else None,
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
        """When the master last named each segment; used only if there are no beats, which name all.
        """
        self._forgetting: asyncio.TimerHandle | None = None

    def _own_disk(self, folder: Path) -> Owner:
        """Make the segment on disk, on the same node, and verify its bytes. Raises ConfigError."""
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
        """Make the segments and mount them. Without segments, check that the master answers.

        Raises MoonserveError or OSError if the master refuses or is away.
        """
        making = asyncio.ensure_future(asyncio.to_thread(cls, rpc, settings))
        try:
            client = await to_the_end(making)  # else its memory could not be given back
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
        """Keep the segments mounted from now on, also at a master that restarts."""
        for owner in self.owners:
            owner.start_beats(self._drop_gone)

    def _drop_gone(self) -> None:
        """Unmap the memory of segments that are gone, and close their connections."""
        own = [owner.mounting.address for owner in self.owners]
        self.transfer.retain([*own, *self.link.addresses.values()])

    def _learn(self, addresses: Mapping[SegmentId, Address]) -> None:
        """Keep the addresses that the master named."""
        self.link.addresses.update(addresses)
        if self.owners:  # their beats bring all addresses
            return
        loop = asyncio.get_running_loop()
        self._named_s |= dict.fromkeys(addresses, loop.time())
        if self._forgetting is None and addresses:
            self._forgetting = loop.call_later(self.settings.times.unnamed_s, self._forget_unnamed)

    def _forget_unnamed(self) -> None:
        """Forget segments that no reply has named for long; a later reply may name them again."""
        loop = asyncio.get_running_loop()
        old_s = loop.time() - self.settings.times.unnamed_s
        self._named_s = {name: at_s for name, at_s in self._named_s.items() if at_s > old_s}
        known = self.link.addresses  # replaced, not changed, since readers may still use it
        self.link.addresses = {name: known[name] for name in self._named_s}
        self._drop_gone()
        self._forgetting = None
        if self._named_s:
            self._forgetting = loop.call_later(self.settings.times.unnamed_s, self._forget_unnamed)

    async def close(self) -> None:
        """Leave the pool: objects in this process's memory are gone."""
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
                log_failure("find", error)
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
        """See KVStore.release. If the master is away, the lease ends by its time to live."""
        await to_the_end(self.link.attempt(operations.RELEASE, wire.ReleaseCall(lease)))

    # Other calls, with up to wire.MAX_BATCH keys each

    async def get(self, keys: Sequence[Key], lease: LeaseId) -> list[Found | None]:
        """Return what each key names, leased; `read` fetches it."""
        call = wire.FindCall(keys, lease, self._segment)
        reply = await self.link.call(operations.GET, call)
        self._learn(reply.addresses)
        return reply.found

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return whether each key names an object. It gets no lease and does not count as used."""
        return await self.link.call(operations.EXISTS, wire.KeysCall(keys))

    async def scan(self, prefix: bytes, after: Key | None, limit: int) -> list[Found]:
        """Return the first objects, in the order of keys, that start with `prefix` and come after
        `after`."""
        reply = await self.link.call(operations.SCAN, wire.ScanCall(prefix, after, limit))
        self._learn(reply.addresses)
        return reply.found

    async def remove(self, keys: Sequence[Key], force: bool = False) -> list[Removal]:
        """Remove objects, also pinned ones; leased ones only with `force`."""
        removals = await self.link.call(operations.REMOVE, wire.RemoveCall(keys, force))
        for key, removal in zip(keys, removals, strict=True):
            if removal.version is not None:
                self.link.recent.removed(now_us(), key, removal.version)
        self.link.tidy()
        return removals

    async def pin(self, keys: Sequence[Key], pinned: bool = True) -> list[bool]:
        """Keep objects from eviction, or allow it again; return whether each exists."""
        return await self.link.call(operations.PIN, wire.PinCall(keys, pinned))

    async def drain(self, segment: SegmentId) -> bool:
        """Move everything off a segment. False: there is no such segment."""
        return await self.link.call(operations.DRAIN, wire.DrainCall(segment))

    async def evict(self, segment: SegmentId, size: Bytes) -> Bytes:
        """Evict `size` bytes of a segment; return how many, fewer if the rest is leased or pinned.

        They are free then or, if the segment's node has a disk, on their way to it. Raises
        BadRequest: no such size or segment.
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
        """As `read`, but return the indices of all objects that did not arrive; the others did."""
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
        """As `put` of up to one batch, but return each outcome: Ticket if this call wrote the
        object.

        None: its bytes could not be written. Raises if the master does not answer.
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
            except FAILURES as error:  # started puts end by their time to live
                log_failure("put", error)
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
        sizes = [(key, len(memory)) for key, memory in items]
        asked_us = now_us()
        outcomes = await self._start(
            wire.PutStartCall(self._segment, sizes, lease, parent, options)
        )
        writes = []
        for (key, memory), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Ticket):
                self.link.recent.writing(asked_us, outcome, key, len(memory), parent, options)
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
        except UnknownSegment:  # the master has restarted, or lost the beats
            await self.owners[0].mount()
            reply = await self.link.call(operations.PUT_START, call)
        self._learn(reply.addresses)
        return reply.outcomes

    async def _write_and_end(self, writes: Sequence[Write], lease: LeaseId | None) -> set[int]:
        """Return the ids of the tickets whose objects exist then."""
        recent = self.link.recent
        sums = await self._copier.write(writes, self.settings.transfer_s)
        written: list[Write] = []
        ends: list[tuple[int, int]] = []
        failed: list[int] = []
        for write, checksum in zip(writes, sums, strict=True):
            id = write.ticket.id
            if checksum is None:
                recent.drop(id)
                failed.append(id)
            else:
                recent.ended(now_us(), id, checksum)
                written.append(write)
                ends.append((id, checksum))
        if failed:
            await self.link.attempt(operations.PUT_ABORT, wire.PutAbortCall(failed))
        if not ends:
            return set()
        versions = await self.link.call(operations.PUT_END, wire.PutEndCall(ends, lease))
        for write, (id, _), version in zip(written, ends, versions, strict=True):
            at = write.ticket.segment, write.ticket.epoch  # another start may have the name by now
            if version != id:
                recent.drop(id)
                continue
            recent.acknowledged(now_us(), id)
            if (mine := self._mine.get(at)) and (held := recent.held(id)):
                mine.wrote(held)
        return {id for (id, _), it in zip(ends, versions, strict=True) if it is not None}


def _mooncake(settings: StoreSettings) -> MooncakeTransport | None:
    """Raises ConfigError if the transport is set and cannot be used."""
    if settings.transport != "mooncake":
        return None
    host = settings.advertise_host or settings.host
    return transport_of_process(host, settings.mooncake_protocol, settings.mooncake_device)
