"""The store's machine: what exists in the pool, where, and who keeps it there.

For live.store.server, which feeds it calls with a clock. Pure and synchronous; it never sees a
byte of any object, only keys, extents and checksums.

What holds at every moment:
- An object exists once its put has ended: complete and readable. `drain_events` tells every
  appearance and disappearance, so a replay of the events is exactly what `find` would say.
- A leased object is not evicted. It goes only with its segment, or when it is found corrupt.
- A released lease is dead: calls under its name that come late go on, and hold nothing. They may
  come after the release, since whoever releases does not wait for who was told to stop.
- Ids of puts never repeat, so a stale ticket names nothing. Two owners may put one key at the
  same time; each has an extent of its own, the first to end wins and the other's is freed. (Keys
  name contents; neither owner then depends on the other's being alive.)
- An extent may be reused while a reader whose lease ran out, or a writer whose put ran out, still
  touches it. Hence readers verify the checksum after the copy: such an object is lost, never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonserve.core.errors import UnknownSegment
from moonserve.core.evict import Lru
from moonserve.core.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, merged
from moonserve.core.pool import (
    Address,
    Exists,
    Found,
    Full,
    Key,
    MasterStats,
    Mount,
    Outcome,
    Replica,
    SegmentStats,
    Terms,
    Ticket,
)
from moonserve.core.segments import Extents, aligned
from moonserve.core.units import BlockKey, Bytes, LeaseId, Micros, SegmentId

_MAX_DEAD = 65_536


@dataclass(slots=True)
class _Segment:
    mount: Mount
    extents: Extents
    heard_us: Micros
    lru: Lru[Key] = field(default_factory=Lru)
    """What no lease holds."""
    evictable_bytes: Bytes = 0
    objects: dict[Key, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Object:
    found: Found
    leases: int = 0

    @property
    def at(self) -> Replica:
        return self.found.replicas[0]


@dataclass(slots=True)
class _Put:
    key: Key
    parent: Key | None
    size: Bytes
    owner: SegmentId
    segment: SegmentId
    offset: Bytes
    deadline_us: Micros


@dataclass(slots=True)
class _Lease:
    expires_us: Micros
    held: dict[Key, int] = field(default_factory=dict)
    """Key -> version, in the order taken. Grows only by what its holder asks for, until it ends."""


class Master:
    """Segments, objects, puts and leases of one pool.

    Bounds: objects and pending puts by the mounted bytes, leases by their time to live, names of
    dead leases by that and by their number, events by the driver, which drains them after every
    call. `first_id` must be larger than every ticket id an earlier master of this pool gave out (a
    start time in microseconds will do).
    """

    def __init__(self, terms: Terms, first_id: int) -> None:
        self.terms = terms
        self._next_id = first_id
        self._segments: dict[SegmentId, _Segment] = {}
        self._objects: dict[Key, _Object] = {}
        self._puts: dict[int, _Put] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._dead: OrderedDict[LeaseId, Micros] = OrderedDict()
        self._reaped_us: Micros = 0
        self._events: list[BlockEvent] = []
        self._evicted = 0

    # Segments

    def mount(self, now_us: Micros, mount: Mount) -> bool:
        """Add a segment, empty. False: refused, a newer epoch of it is mounted.

        The same epoch again is a repeated message. A newer one is a restarted owner: all that the
        old one held is dropped first.
        """
        old = self._segments.get(mount.id)
        if old is not None and old.mount.epoch >= mount.epoch:
            old.heard_us = now_us
            return old.mount.epoch == mount.epoch
        self._drop_segment(mount.id)
        self._segments[mount.id] = _Segment(mount, Extents(mount.capacity_bytes), now_us)
        return True

    def beat(self, now_us: Micros, segment: SegmentId, epoch: int) -> bool:
        """The owner lives. False: this epoch is not mounted, so mount again."""
        held = self._segments.get(segment)
        if held is None or held.mount.epoch != epoch:
            return False
        held.heard_us = now_us
        return True

    def unmount(self, segment: SegmentId, epoch: int) -> None:
        """Drop a segment and all it holds; another epoch's is left alone."""
        held = self._segments.get(segment)
        if held is not None and held.mount.epoch == epoch:
            self._drop_segment(segment)

    def addresses(self) -> dict[SegmentId, Address]:
        """Where the mounted segments are reached."""
        return {name: segment.mount.address for name, segment in self._segments.items()}

    # Puts

    def put_start(
        self,
        now_us: Micros,
        owner: SegmentId | None,
        items: Sequence[tuple[Key, Bytes]],
        lease: LeaseId | None,
        parent: Key | None = None,
    ) -> list[Outcome]:
        """Start one put per (key, size > 0), onto the owner's own segment where there is room.

        The keys are a piece of a chain; `parent` comes before it, None where it heads the chain.
        Else onto the segment with most free bytes, else in place of the owner's least recently
        used objects, else of another's. Objects that exist are leased, unless the lease is dead.
        UnknownSegment: the owner is not mounted.
        """
        if owner is None or owner not in self._segments:
            raise UnknownSegment(f"put by {owner!r}, which is not mounted")
        outcomes: list[Outcome] = []
        for key, size in items:
            existing = self._objects.get(key)
            if existing is not None:
                self._use(now_us, existing, lease)
                outcomes.append(Exists())
            elif (place := self._allocate(owner, size)) is None:
                outcomes.append(Full())
            else:
                deadline_us = now_us + self.terms.put_ttl_us
                put = _Put(key, parent, size, owner, place.segment, place.offset, deadline_us)
                self._puts[self._next_id] = put
                epoch = self._segments[place.segment].mount.epoch
                outcomes.append(Ticket(self._next_id, place.segment, place.offset, epoch))
                self._next_id += 1
            parent = key
        return outcomes

    def put_end(
        self, now_us: Micros, ends: Sequence[tuple[int, int]], lease: LeaseId | None
    ) -> list[bool]:
        """End puts, each (ticket id, checksum of the bytes written).

        True: the object exists, and is leased unless the lease is dead. False: the ticket is
        stale, its extent was lost.
        """
        return [self._end(now_us, ticket, checksum, lease) for ticket, checksum in ends]

    def put_abort(self, tickets: Sequence[int]) -> None:
        """Give up puts; stale tickets are no error."""
        for ticket in tickets:
            put = self._puts.pop(ticket, None)
            if put is not None:
                self._segments[put.segment].extents.free(put.offset)

    # Reads

    def find(self, now_us: Micros, keys: Sequence[Key], lease: LeaseId) -> list[Found]:
        """The leading run of `keys` that exist, each leased; the whole lease lasts anew.

        Under a dead lease they are told all the same, but not held: they may be gone, or another's
        bytes, before they are read. Readers verify the checksum anyway.
        """
        found: list[Found] = []
        for key in keys:
            existing = self._objects.get(key)
            if existing is None:
                break
            self._use(now_us, existing, lease)
            found.append(existing.found)
        return found

    def locate(self, key: Key) -> Found | None:
        """Look an object up without using it."""
        existing = self._objects.get(key)
        return None if existing is None else existing.found

    def release(self, lease: LeaseId) -> None:
        """End a lease; an unknown one is no error. The name is dead for a lease's time to live.

        Its last key becomes the oldest: a chain is then evicted from its tail, and what is left
        of it stays a usable prefix.
        """
        self._dead[lease] = self._reaped_us  # the last reap is near enough to now
        self._dead.move_to_end(lease)
        if len(self._dead) > _MAX_DEAD:
            self._dead.popitem(last=False)
        self._let_go(lease)

    def discard(self, key: Key, version: int) -> None:
        """Remove an object whose bytes a reader found corrupt; a newer version is left alone."""
        existing = self._objects.get(key)
        if existing is not None and existing.found.version == version:
            self._remove(existing)

    # Time and ledgers

    def reap(self, now_us: Micros) -> list[SegmentId]:
        """Take back what ran out: segments not heard of (returned), overdue puts, old leases.

        A lease that ran out is not dead: its holder may be slow, and use it again.
        """
        self._reaped_us = now_us
        silent_us = now_us - self.terms.segment_ttl_us
        lost = [name for name, held in self._segments.items() if held.heard_us <= silent_us]
        for name in lost:
            self._drop_segment(name)
        self.put_abort([id for id, put in self._puts.items() if put.deadline_us <= now_us])
        for lease in [name for name, it in self._leases.items() if it.expires_us <= now_us]:
            self._let_go(lease)
        forget_us = now_us - self.terms.lease_ttl_us
        while self._dead and next(iter(self._dead.values())) <= forget_us:
            self._dead.popitem(last=False)
        return lost

    def drain_events(self) -> list[BlockEvent]:
        """What appeared and disappeared since the last call, in order; runs of a kind as one."""
        events, self._events = self._events, []
        return merged(events)

    def stats(self) -> MasterStats:
        """The ledgers now."""
        return MasterStats(
            segments=tuple(
                SegmentStats(
                    id=name,
                    epoch=held.mount.epoch,
                    address=held.mount.address,
                    node=held.mount.node or name,
                    tier=held.mount.tier,
                    capacity_bytes=held.extents.capacity_bytes,
                    used_bytes=held.extents.used_bytes,
                    evictable_bytes=held.evictable_bytes,
                    objects=len(held.objects),
                    draining=False,
                )
                for name, held in self._segments.items()
            ),
            objects=len(self._objects),
            leases=len(self._leases),
            pending_puts=len(self._puts),
            pending_copies=0,
            waiting=0,
            tenants={},
            evicted=self._evicted,
            demoted=0,
            promoted=0,
            recovering=False,
        )

    # Inside

    def _end(self, now_us: Micros, ticket: int, checksum: int, lease: LeaseId | None) -> bool:
        put = self._puts.pop(ticket, None)
        if put is None:
            return False
        existing = self._objects.get(put.key)
        if existing is not None:  # another owner's put of the same key ended first
            self._segments[put.segment].extents.free(put.offset)
            self._use(now_us, existing, lease)
            return True
        replica = Replica(put.segment, put.offset)
        stored = _Object(Found(put.key, put.size, checksum, ticket, (replica,)))
        self._objects[put.key] = stored
        held = self._segments[put.segment]
        held.objects[put.key] = None
        self._events.append(
            BlocksStored(
                put.segment,
                (BlockKey(put.key),),
                None if put.parent is None else BlockKey(put.parent),
                "dram",
                held.mount.epoch,
            )
        )
        self._use(now_us, stored, lease)
        return True

    def _use(self, now_us: Micros, existing: _Object, lease: LeaseId | None) -> None:
        """Keep an object under `lease`, or only mark it as used now."""
        if lease is None or lease in self._dead:
            if existing.leases == 0:
                self._make_evictable(existing)
            return
        record = self._leases.setdefault(lease, _Lease(0))
        record.expires_us = now_us + self.terms.lease_ttl_us
        found = existing.found
        if record.held.get(found.key) != found.version:
            record.held[found.key] = found.version
            existing.leases += 1
            self._keep(existing)

    def _let_go(self, lease: LeaseId) -> None:
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        for key, version in reversed(ended.held.items()):
            existing = self._objects.get(key)
            if existing is None or existing.found.version != version:
                continue
            existing.leases -= 1
            if existing.leases == 0:
                self._make_evictable(existing)

    def _make_evictable(self, existing: _Object) -> None:
        held, found = self._segments[existing.at.segment], existing.found
        if found.key not in held.lru:
            held.evictable_bytes += aligned(found.size)
        held.lru.use((found.key,))

    def _keep(self, existing: _Object) -> None:
        """Take an object out of the order of eviction: leased, or gone."""
        held, found = self._segments[existing.at.segment], existing.found
        if held.lru.discard(found.key):
            held.evictable_bytes -= aligned(found.size)

    def _allocate(self, owner: SegmentId, size: Bytes) -> Replica | None:
        own = self._segments[owner]
        offset = own.extents.allocate(size)
        if offset is not None:
            return Replica(owner, offset)
        others = [held for held in self._segments.values() if held is not own]
        others.sort(key=lambda held: held.extents.free_bytes, reverse=True)
        for held in others:
            offset = held.extents.allocate(size)
            if offset is not None:
                return Replica(held.mount.id, offset)
        for held in (own, *others):
            offset = self._evict_for(held, size)
            if offset is not None:
                return Replica(held.mount.id, offset)
        return None

    def _evict_for(self, held: _Segment, size: Bytes) -> Bytes | None:
        """Evict oldest first until `size` fits.

        Among leased objects of other sizes all may be evicted in vain; with blocks of one size,
        the first victim's extent fits.
        """
        if held.extents.free_bytes + held.evictable_bytes < aligned(size):
            return None
        while (victim := held.lru.pop()) is not None:
            held.evictable_bytes -= aligned(self._objects[victim].found.size)
            self._remove(self._objects[victim])
            self._evicted += 1
            offset = held.extents.allocate(size)
            if offset is not None:
                return offset
        return None

    def _remove(self, existing: _Object) -> None:
        key, at = existing.found.key, existing.at
        held = self._segments[at.segment]
        del self._objects[key]
        del held.objects[key]
        self._keep(existing)
        held.extents.free(at.offset)
        self._events.append(BlocksRemoved(at.segment, (BlockKey(key),), "dram", held.mount.epoch))

    def _drop_segment(self, name: SegmentId) -> None:
        """Forget a segment, its objects, and every put that is onto it or by its owner."""
        held = self._segments.get(name)
        if held is None:
            return
        for key in held.objects:
            del self._objects[key]
        self._events.append(BlocksCleared(name, "dram", held.mount.epoch))
        self.put_abort([id for id, put in self._puts.items() if name in (put.owner, put.segment)])
        del self._segments[name]
