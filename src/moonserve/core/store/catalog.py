"""The catalog: the pool's objects, the segments and extents where they are, and their leases.

The master and its parts (core.store.placement, replicas and owners) share one Catalog. Each of its
methods makes one change and keeps all ledgers in balance: extents, evictable bytes, bytes per
tenant, KV events, and the changes that segment owners have not received. The catalog decides
nothing, and it never touches a byte of a segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, merged
from moonserve.core.store.evict import ChainEviction
from moonserve.core.store.words import (
    ALIGN,
    Found,
    Gone,
    Held,
    Key,
    Medium,
    Mount,
    PutOptions,
    Replica,
    Seen,
    Terms,
    aligned,
)
from moonserve.core.units import BlockKey, Bytes, LeaseId, Micros, SegmentId

_MAX_CHANGES = 1_024
"""The most changed keys in one answer to a beat."""
_MAX_RELEASED = 65_536
"""The most names of released leases that the master remembers."""


class Extents:
    """First-fit allocator over one segment. It joins free neighbours at once.

    Nearly all KV blocks have one size, so the first hole nearly always fits.
    """

    def __init__(self, capacity_bytes: Bytes) -> None:
        self.capacity_bytes = capacity_bytes // ALIGN * ALIGN
        self.free_bytes = self.capacity_bytes
        self._starts: list[Bytes] = [0] if self.capacity_bytes else []
        """Offsets of the holes, ascending; never more than extents in use plus one."""
        self._holes: dict[Bytes, Bytes] = dict.fromkeys(self._starts, self.capacity_bytes)
        self._used: dict[Bytes, Bytes] = {}

    @property
    def used_bytes(self) -> Bytes:
        """Bytes in use, alignment included."""
        return self.capacity_bytes - self.free_bytes

    def allocate(self, size: Bytes) -> Bytes | None:
        """Return the offset of a new extent of at least `size` (> 0) bytes; None: no hole fits."""
        assert size > 0, "an extent has at least one byte"
        need = aligned(size)
        if need > self.free_bytes:
            return None
        for index, start in enumerate(self._starts):
            length = self._holes[start]
            if length < need:
                continue
            del self._holes[start]
            if length > need:
                self._starts[index] = start + need
                self._holes[start + need] = length - need
            else:
                del self._starts[index]
            self._used[start] = need
            self.free_bytes -= need
            return start
        return None

    def free(self, offset: Bytes) -> None:
        """Free the extent that starts at `offset`."""
        length = self._used.pop(offset)
        self.free_bytes += length
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + length:
            length += self._holes.pop(self._starts.pop(index))
        if index > 0 and self._starts[index - 1] + self._holes[self._starts[index - 1]] == offset:
            self._holes[self._starts[index - 1]] += length
        else:
            self._starts.insert(index, offset)
            self._holes[offset] = length

    def reserve(self, offset: Bytes, size: Bytes) -> bool:
        """Take exactly `size` (> 0) bytes at `offset`. False: not all of them are free.

        A recovering master uses it for replicas that an owner reports.
        """
        need = aligned(size)
        index = bisect_right(self._starts, offset) - 1
        if offset % ALIGN or index < 0:
            return False
        start = self._starts[index]
        end = start + self._holes[start]
        if offset + need > end:
            return False
        del self._holes[start], self._starts[index]
        for hole, length in ((offset + need, end - offset - need), (start, offset - start)):
            if length:
                self._starts.insert(index, hole)
                self._holes[hole] = length
        self._used[offset] = need
        self.free_bytes -= need
        return True


class SegmentLedger:
    """One mounted segment: its extents, replicas, eviction order and unreported changes.

    Bounded by the segment's replicas, and by the keys that left it since the last beat.
    """

    def __init__(self, mount: Mount, eviction: str, mounting: int, now_us: Micros) -> None:
        self.mount = mount
        self.name = mount.id
        self.node = mount.node or mount.id
        self.tier = mount.tier
        self.last_contact_us = now_us
        self.beats = 0
        self.extents = Extents(mount.capacity_bytes)
        self.chains: ChainEviction[Key] = ChainEviction(eviction)
        self.objects: dict[Key, int] = {}
        """The id of the put or copy that wrote each replica."""
        self.gone: dict[Key, int] = {}
        """The `Gone` records that the owner mounted with: a claim with such an id, or a lower one,
        is void. As bounded as the owner's SegmentContents."""
        self.evictable_bytes: Bytes = 0
        self.leaving_bytes: Bytes = 0
        """Bytes that will be free once their copies to disk are made."""
        self.draining = False
        self._changed: dict[Key, tuple[int, int]] = {}
        """Key -> (number of its last change, highest id put or dropped), in that order."""
        self._changes = 0
        self._mounting = mounting

    def note_change(self, key: Key, id: int) -> None:
        """A replica was added or dropped: the owner has to receive this change."""
        self._changes += 1
        old = self._changed.pop(key, None)
        self._changed[key] = (self._changes, id if old is None else max(id, old[1]))

    def changes_after(
        self, seen: Seen, held: Callable[[Key], Held]
    ) -> tuple[tuple[Held | Gone, ...], Seen, bool]:
        """Return the changes after `seen`, the new `seen`, and whether there are more.

        Changes up to `seen` are forgotten. A key that changed twice is reported once, as it is now.
        """
        changed = self._changed
        last = seen[1] if seen[0] == self._mounting else 0
        if last:
            changed = {key: change for key, change in changed.items() if change[0] > last}
            self._changed = changed
        changes: list[Held | Gone] = []
        for key, (number, id) in islice(changed.items(), _MAX_CHANGES):
            here = self.objects.get(key)
            if here != id:
                changes.append(Gone(key, id))
            if here is not None:
                changes.append(held(key))
            last = number
        return tuple(changes), (self._mounting, last), len(changed) > _MAX_CHANGES

    def unreported(self) -> list[Key]:
        """The keys on this segment whose last change the owner may not have received."""
        return [key for key in self._changed if key in self.objects]


@dataclass(slots=True)
class StoredObject:
    """One object that exists."""

    found: Found
    parent: Key | None
    options: PutOptions
    leases: int = 0
    holds: int = 0
    """Leases, a pin, and copies of it under way. While there are any, it is not evicted."""


class Catalog:
    """Segments, objects, bytes per tenant, events and counters of one pool."""

    def __init__(self, terms: Terms, first_id: int) -> None:
        self.terms = terms
        self.next_id = first_id
        self.segments: dict[SegmentId, SegmentLedger] = {}
        self.objects: dict[Key, StoredObject] = {}
        self.tenant_bytes: dict[str, Bytes] = {}
        """Bytes in use by tenant: replicas, and extents of puts and copies under way."""
        self.tenant_orders: dict[str, ChainEviction[Key]] = {
            tenant: ChainEviction("lru") for tenant in terms.quotas
        }
        """The objects of each tenant with a quota, in their order of eviction."""
        self.evicted = 0
        """Replicas evicted since the start; `demoted` and `promoted` count the same way."""
        self.demoted = 0
        self.promoted = 0
        self._events: list[BlockEvent] = []

    def new_id(self) -> int:
        """Return an id for a put, a copy or a mounting. No id is given out twice."""
        self.next_id += 1
        return self.next_id - 1

    def drain_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order; runs of one kind are merged."""
        events = self._events
        self._events = []
        return merged(events)

    def inventory(self) -> list[BlockEvent]:
        """Return events that describe every block replica that exists now."""
        events: list[BlockEvent] = []
        for ledger in self.segments.values():
            for key in ledger.objects:
                stored = self.objects[key]
                if stored.options.blocks:
                    events.append(self._stored_event(stored, ledger))
        return merged(events)

    # Extents

    def take(self, ledger: SegmentLedger, size: Bytes, tenant: str) -> Bytes | None:
        """Take an extent for an object of `tenant`; None: no hole fits."""
        offset = ledger.extents.allocate(size)
        if offset is not None:
            self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + aligned(size)
        return offset

    def reserve(self, ledger: SegmentLedger, offset: Bytes, size: Bytes, tenant: str) -> bool:
        """Take exactly this extent. False: it is not free."""
        if not ledger.extents.reserve(offset, size):
            return False
        self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + aligned(size)
        return True

    def give(self, ledger: SegmentLedger, offset: Bytes, size: Bytes, tenant: str) -> None:
        """Free an extent."""
        ledger.extents.free(offset)
        self._subtract_bytes(size, tenant)

    def _subtract_bytes(self, size: Bytes, tenant: str) -> None:
        self.tenant_bytes[tenant] -= aligned(size)
        if not self.tenant_bytes[tenant]:
            del self.tenant_bytes[tenant]

    # Objects and replicas

    def create(
        self, found: Found, parent: Key | None, options: PutOptions, ledger: SegmentLedger, id: int
    ) -> StoredObject:
        """Add an object whose first replica is `found.replicas[0]`, in an extent taken before.

        It enters its orders of eviction at its first `use` or `enter`.
        """
        created = StoredObject(found, parent, options, holds=int(options.pin))
        key = found.key
        self.objects[key] = created
        order = self.tenant_orders.get(options.tenant)
        if order is not None and parent is not None:
            order.add(key, parent)
        self._appear(created, ledger, id)
        return created

    def add_replica(
        self, stored: StoredObject, ledger: SegmentLedger, offset: Bytes, id: int
    ) -> None:
        """Add a replica in an extent taken before. Replicas in memory stay before those on disk."""
        found = stored.found
        replicas = [*found.replicas, Replica(ledger.name, offset)]
        replicas.sort(key=lambda it: self.segments[it.segment].tier == "disk")
        stored.found = msgspec.structs.replace(found, replicas=tuple(replicas))
        self._appear(stored, ledger, id)
        ledger.chains.enter(found.key)

    def _appear(self, stored: StoredObject, ledger: SegmentLedger, id: int) -> None:
        key = stored.found.key
        parent = stored.parent
        ledger.objects[key] = id
        if parent is not None:
            ledger.chains.add(key, parent)
        ledger.note_change(key, id)
        if not stored.holds:
            ledger.evictable_bytes += aligned(stored.found.size)
        if stored.options.blocks:
            self._events.append(self._stored_event(stored, ledger))

    def _stored_event(self, stored: StoredObject, ledger: SegmentLedger) -> BlocksStored:
        keys = (BlockKey(stored.found.key),)
        parent = None if stored.parent is None else BlockKey(stored.parent)
        return BlocksStored(ledger.name, keys, parent, ledger.tier, ledger.mount.epoch)

    def drop(self, stored: StoredObject, ledger: SegmentLedger) -> None:
        """Drop the replica on this segment. With its last replica the object is gone."""
        found = stored.found
        offset = self._offset(stored, ledger)
        self._disappear(stored, ledger)
        self.give(ledger, offset, found.size, stored.options.tenant)
        if stored.options.blocks:
            self._events.append(
                BlocksRemoved(ledger.name, (BlockKey(found.key),), ledger.tier, ledger.mount.epoch)
            )

    def _disappear(self, stored: StoredObject, ledger: SegmentLedger) -> None:
        key = stored.found.key
        parent = stored.parent
        ledger.note_change(key, ledger.objects.pop(key))
        ledger.chains.remove(key, parent)
        if not stored.holds:
            ledger.evictable_bytes -= aligned(stored.found.size)
        if len(stored.found.replicas) > 1:
            left = tuple(it for it in stored.found.replicas if it.segment != ledger.name)
            stored.found = msgspec.structs.replace(stored.found, replicas=left)
            return
        del self.objects[key]
        order = self.tenant_orders.get(stored.options.tenant)
        if order is not None:
            order.remove(key, parent)

    def remove(self, stored: StoredObject) -> None:
        """Remove an object with all its replicas."""
        for replica in stored.found.replicas:
            self.drop(stored, self.segments[replica.segment])

    def drop_segment(self, ledger: SegmentLedger) -> list[StoredObject]:
        """Drop a segment and its replicas; return its objects that have replicas elsewhere."""
        left = []
        for key in list(ledger.objects):
            stored = self.objects[key]
            self._disappear(stored, ledger)
            self._subtract_bytes(stored.found.size, stored.options.tenant)
            if self.objects.get(key) is stored:
                left.append(stored)
        self._events.append(BlocksCleared(ledger.name, ledger.tier, ledger.mount.epoch))
        del self.segments[ledger.name]
        return left

    def held(self, ledger: SegmentLedger, key: Key) -> Held:
        """Return what the segment's owner has to remember about a replica."""
        stored = self.objects[key]
        found = stored.found
        return Held(
            key,
            found.size,
            found.checksum,
            found.version,
            ledger.objects[key],
            self._offset(stored, ledger),
            stored.parent,
            stored.options,
        )

    def _offset(self, stored: StoredObject, ledger: SegmentLedger) -> Bytes:
        return next(it.offset for it in stored.found.replicas if it.segment == ledger.name)

    def short(self) -> list[Key]:
        """Return the objects whose replicas are on fewer nodes than the replicas they want."""
        found = []
        for key, stored in self.objects.items():
            if stored.options.replicas > 1:
                nodes = {self.segments[it.segment].node for it in stored.found.replicas}
                if len(nodes) < stored.options.replicas:
                    found.append(key)
        return found

    # What may be evicted, and in which order

    def hold(self, stored: StoredObject) -> None:
        """Add one hold: the object is not evicted until all holds have ended."""
        stored.holds += 1
        if stored.holds == 1:
            for replica in stored.found.replicas:
                self.segments[replica.segment].evictable_bytes -= aligned(stored.found.size)

    def unhold(self, stored: StoredObject) -> None:
        """End one hold. The caller then puts the object into its orders, by `use` or `enter`."""
        stored.holds -= 1
        if stored.holds == 0:
            for replica in stored.found.replicas:
                self.segments[replica.segment].evictable_bytes += aligned(stored.found.size)

    def pin(self, stored: StoredObject, pinned: bool) -> None:
        """Keep an object from eviction until it is unpinned."""
        if stored.options.pin == pinned:
            return
        stored.options = msgspec.structs.replace(stored.options, pin=pinned)
        if pinned:
            self.hold(stored)
        else:
            self.unhold(stored)
            self.enter(stored)
        for replica in stored.found.replicas:
            ledger = self.segments[replica.segment]
            ledger.note_change(stored.found.key, ledger.objects[stored.found.key])

    def use(self, objects: Iterable[StoredObject]) -> None:
        """Mark the objects of one request, first block first, as used now on all segments."""
        by_segment: dict[SegmentId, list[Key]] = {}
        by_tenant: dict[str, list[Key]] = {}
        for stored in objects:
            key = stored.found.key
            for replica in stored.found.replicas:
                by_segment.setdefault(replica.segment, []).append(key)
            if stored.options.tenant in self.tenant_orders:
                by_tenant.setdefault(stored.options.tenant, []).append(key)
        for name, keys in by_segment.items():
            self.segments[name].chains.use(keys)
        for tenant, keys in by_tenant.items():
            self.tenant_orders[tenant].use(keys)

    def enter(self, stored: StoredObject) -> None:
        """Put an object into its orders of eviction, where it is not in them; this is no use."""
        for replica in stored.found.replicas:
            self.segments[replica.segment].chains.enter(stored.found.key)
        if stored.options.tenant in self.tenant_orders:
            self.tenant_orders[stored.options.tenant].enter(stored.found.key)

    def is_free(self, key: Key) -> bool:
        """Whether an object exists and may be evicted."""
        stored = self.objects.get(key)
        return stored is not None and stored.holds == 0

    def next_victim(self, ledger: SegmentLedger) -> StoredObject | None:
        """Take the next object to evict out of a segment's order; None: nothing is evictable."""
        objects, here = self.objects, ledger.objects
        key = ledger.chains.pop(lambda key: key in here and objects[key].holds == 0)
        return None if key is None else objects[key]

    def usable(self, tier: Medium) -> Sequence[SegmentLedger]:
        """Return the segments of a tier that take new replicas."""
        return [it for it in self.segments.values() if it.tier == tier and not it.draining]


@dataclass(slots=True)
class _Lease:
    expires_us: Micros
    held: dict[Key, StoredObject] = field(default_factory=dict)
    """In the order taken; some may be gone since. It grows only by the holder's own calls."""


class Leases:
    """Leases by name: each keeps objects from eviction until its release or its expiry.

    A released name is dead: for a lease's time to live, calls under it hold nothing. Names that
    were released first are forgotten first when more than `max_released` are dead.
    """

    def __init__(self, catalog: Catalog, max_released: int = _MAX_RELEASED) -> None:
        self._catalog = catalog
        self._ttl_us = catalog.terms.lease_ttl_us
        self._max_released = max_released
        self._leases: dict[LeaseId, _Lease] = {}
        self._released: OrderedDict[LeaseId, Micros] = OrderedDict()
        self._now_us: Micros = 0

    def __len__(self) -> int:
        return len(self._leases)

    def names(self) -> list[LeaseId]:
        """The leases that hold something."""
        return list(self._leases)

    def use(self, now_us: Micros, objects: Sequence[StoredObject], lease: LeaseId | None) -> None:
        """Hold objects under `lease`, which lasts its time to live anew.

        With no lease, or with a dead one, the objects are only marked as used now.
        """
        if lease is None or lease in self._released:
            self._catalog.use(objects)
            return
        record = self._leases.get(lease)
        if record is None:
            record = self._leases[lease] = _Lease(0)
        record.expires_us = now_us + self._ttl_us
        held = record.held
        for stored in objects:
            key = stored.found.key
            if held.get(key) is not stored:
                held[key] = stored
                stored.leases += 1
                self._catalog.hold(stored)

    def release(self, lease: LeaseId) -> None:
        """End a lease; its name is dead from now on. An unknown lease is no error."""
        self._released[lease] = self._now_us  # the time of the last `reap` is near enough to now
        self._released.move_to_end(lease)
        if len(self._released) > self._max_released:
            self._released.popitem(last=False)
        self._end(lease)

    def reap(self, now_us: Micros) -> None:
        """End leases that expired, and forget dead names that are older than a time to live.

        An expired lease is not dead: its holder may be slow, and may use it again.
        """
        self._now_us = now_us
        forget_us = now_us - self._ttl_us
        while self._released and next(iter(self._released.values())) <= forget_us:
            self._released.popitem(last=False)
        for name in [it for it, lease in self._leases.items() if lease.expires_us <= now_us]:
            self._end(name)

    def _end(self, lease: LeaseId) -> None:
        """Unhold a lease's objects. Those that still exist count as used now."""
        record = self._leases.pop(lease, None)
        if record is None:
            return
        objects = self._catalog.objects
        still_held = [of for key, of in record.held.items() if objects.get(key) is of]
        for stored in still_held:
            stored.leases -= 1
            self._catalog.unhold(stored)
        self._catalog.use(still_held)
