"""The catalog: the pool's objects, the segments and extents where they are, and their leases.

The master and its parts (core.store.placement, replicas and owners) share one Catalog. Each of its
methods makes one change and keeps all ledgers in balance: extents, evictable bytes, bytes per
tenant, KV events, and the changes that segment owners have not received. The catalog decides
nothing, and it never touches a byte of a segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import NamedTuple

import msgspec

from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, merged
from moonserve.core.store.runs import RunOrder, StoredRun, code_of
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

_ID_BITS = 64
_ID = (1 << _ID_BITS) - 1
"""The id in a change, which is one number: many may wait for their owner's beat."""
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
            self.free_bytes -= need
            return start
        return None

    def free(self, offset: Bytes, size: Bytes) -> None:
        """Free the extent of `size` bytes that starts at `offset`."""
        length = aligned(size)
        self.free_bytes += length
        index = bisect_left(self._starts, offset)
        assert index == len(self._starts) or offset + length <= self._starts[index], "it was free"
        if index < len(self._starts) and self._starts[index] == offset + length:
            length += self._holes.pop(self._starts.pop(index))
        before = self._starts[index - 1] + self._holes[self._starts[index - 1]] if index else -1
        assert before <= offset, "it was free"
        if before == offset:
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
        self.free_bytes -= need
        return True


class SegmentLedger:
    """One mounted segment: its extents, replicas, eviction order and unreported changes.

    Bounded by the segment's replicas, and by the keys that left it since the last beat.
    """

    def __init__(self, mount: Mount, order: RunOrder, mounting: int, now_us: Micros) -> None:
        self.mount = mount
        self.name = mount.id
        self.node = mount.node or mount.id
        self.tier = mount.tier
        self.last_contact_us = now_us
        self.beats = 0
        self.extents = Extents(mount.capacity_bytes)
        self.code = code_of(mount.capacity_bytes)
        self.order = order
        self.runs: dict[StoredRun, None] = {}
        """Its replicas."""
        self.replicas = 0
        """How many replicas there are."""
        self.gone: dict[Key, int] = {}
        """The `Gone` records that the owner mounted with: a claim with such an id, or a lower one,
        is void. As bounded as the owner's SegmentContents."""
        self.evictable_bytes: Bytes = 0
        self.leaving_bytes: Bytes = 0
        """Bytes that will be free once their copies to disk are made."""
        self.draining = False
        self._changed: dict[Key, int] = {}
        """Key -> (number of its last change, highest id put or dropped), in that order."""
        self._changes = 0
        self._mounting = mounting

    def keys(self) -> Iterator[Key]:
        """The keys of its replicas."""
        return chain.from_iterable(run.keys for run in self.runs)

    def note_change(self, key: Key, id: int) -> None:
        """A replica was added or dropped: the owner has to receive this change."""
        self._changes += 1
        old = self._changed.pop(key, 0)
        self._changed[key] = self._changes << _ID_BITS | max(id, old & _ID)

    def changes_after(
        self, seen: Seen, held: Callable[[Key], Held | None]
    ) -> tuple[tuple[Held | Gone, ...], Seen, bool]:
        """Return the changes after `seen`, the new `seen`, and whether there are more.

        Changes up to `seen` are forgotten. A key that changed twice is reported once, as it is now:
        `held` returns its replica here.
        """
        changed = self._changed
        last = seen[1] if seen[0] == self._mounting else 0
        if last:
            changed = {key: it for key, it in changed.items() if it >> _ID_BITS > last}
            self._changed = changed
        changes: list[Held | Gone] = []
        for key, change in islice(changed.items(), _MAX_CHANGES):
            id = change & _ID
            here = held(key)
            if here is None or here.id != id:
                changes.append(Gone(key, id))
            if here is not None:
                changes.append(here)
            last = change >> _ID_BITS
        return tuple(changes), (self._mounting, last), len(changed) > _MAX_CHANGES

    def unreported(self) -> list[Key]:
        """The keys whose last change the owner may not have received."""
        return list(self._changed)


class Hold:
    """What keeps one object from eviction; there is one while anything does.

    It ends with the object too: if the object is gone and comes back, it is not held.
    """

    __slots__ = ("count", "leases")

    def __init__(self) -> None:
        self.count = 0
        """Leases, a pin, and copies of it under way."""
        self.leases = 0


class StoredObject(NamedTuple):
    """One object as it is now; later changes of the catalog do not show."""

    found: Found
    parent: Key | None
    options: PutOptions


class Catalog:
    """Segments, objects, bytes per tenant, events and counters of one pool.

    An object is a key with a run for each replica. What nearly all objects have is in their runs;
    what few have is in tables of its own: further replicas, and holds.
    """

    def __init__(self, terms: Terms, first_id: int) -> None:
        self.terms = terms
        self.next_id = first_id
        self.segments: dict[SegmentId, SegmentLedger] = {}
        self.objects: dict[Key, StoredRun] = {}
        """The run with the first replica of each object. Replicas in memory come before others."""
        self.others: dict[Key, tuple[StoredRun, ...]] = {}
        """The runs with further replicas."""
        self._latest_others: tuple[StoredRun, ...] = ()
        """The tuple that was noted last: blocks of one run share it."""
        self.holds: dict[Key, Hold] = {}
        """The objects that are not evicted now."""
        self.tenant_bytes: dict[str, Bytes] = {}
        """Bytes in use by tenant: replicas, and extents of puts and copies under way."""
        self.tenant_orders: dict[str, RunOrder] = {
            tenant: RunOrder("lru", self.holds, self.divide) for tenant in terms.quotas
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

    def mount(self, mount: Mount, now_us: Micros) -> SegmentLedger:
        """Add a segment without replicas."""
        order = RunOrder(self.terms.eviction, self.holds, self.divide)
        ledger = SegmentLedger(mount, order, self.new_id(), now_us)
        self.segments[mount.id] = ledger
        return ledger

    def drain_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order; runs of one kind are merged."""
        events = self._events
        self._events = []
        return merged(events)

    def inventory(self) -> list[BlockEvent]:
        """Return events that describe every block replica that exists now."""
        return merged(
            [
                _stored_event(ledger, run.keys, run.parent)
                for ledger in self.segments.values()
                for run in ledger.runs
                if run.options.blocks
            ]
        )

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
        ledger.extents.free(offset, size)
        self._subtract_bytes(size, tenant)

    def _subtract_bytes(self, size: Bytes, tenant: str) -> None:
        self.tenant_bytes[tenant] -= aligned(size)
        if not self.tenant_bytes[tenant]:
            del self.tenant_bytes[tenant]

    # What there is

    def get(self, key: Key) -> StoredObject | None:
        """Return an object as it is now."""
        run = self.objects.get(key)
        if run is None:
            return None
        at = run.index(key)
        return StoredObject(self._found(run, at, at + 1)[0], run.before(at), run.options)

    def found(self, keys: Sequence[Key]) -> list[Found]:
        """Return the objects of these keys, which all exist."""
        found: list[Found] = []
        while len(found) < len(keys):
            run = self.objects[keys[len(found)]]
            start, stop = run.span(keys, len(found))
            found += self._found(run, start, stop)
        return found

    def _found(self, run: StoredRun, start: int, stop: int) -> list[Found]:
        """The objects of a part of a run, which has their first replicas."""
        keys = run.keys[start:stop]
        replicas: list[tuple[Replica, ...]] = [(it,) for it in run.replicas(start, stop)]
        if run.several:
            replicas = [it + self._others(key) for key, it in zip(keys, replicas, strict=True)]
        sums, versions = run.checksums[start:stop], run.versions[start:stop]
        return list(map(Found, keys, repeat(run.size), sums, versions, replicas))

    def _others(self, key: Key) -> tuple[Replica, ...]:
        runs = self.others.get(key, ())
        return tuple([Replica(it.segment, it.offset(it.index(key))) for it in runs])

    def version(self, key: Key) -> int | None:
        """Return the version of the object that has this key now."""
        run = self.objects.get(key)
        return None if run is None else run.versions[run.index(key)]

    def runs_of(self, key: Key) -> tuple[StoredRun, ...]:
        """Return the runs with the replicas of an object that exists."""
        return (self.objects[key], *self.others.get(key, ()))

    def replica(self, key: Key, segment: SegmentId) -> StoredRun | None:
        """Return the run with the object's replica on this segment, if there is one."""
        run = self.objects.get(key)
        if run is None or run.segment == segment:
            return run
        others = self.others.get(key, ()) if run.several else ()
        return next((it for it in others if it.segment == segment), None)

    def held(self, segment: SegmentId, key: Key) -> Held | None:
        """Return what the segment's owner has to remember about a replica."""
        run = self.replica(key, segment)
        if run is None:
            return None
        at = run.index(key)
        return Held(
            key,
            run.size,
            run.checksums[at],
            run.versions[at],
            run.ids[at],
            run.offset(at),
            run.before(at),
            run.options,
        )

    def short(self) -> list[Key]:
        """Return the objects whose replicas are on fewer nodes than the replicas they want."""
        found = []
        for key, run in self.objects.items():
            if run.options.replicas > 1:
                nodes = {self.segments[it.segment].node for it in self.runs_of(key)}
                if len(nodes) < run.options.replicas:
                    found.append(key)
        return found

    # Objects and replicas

    def create(
        self, found: Found, parent: Key | None, options: PutOptions, ledger: SegmentLedger, id: int
    ) -> None:
        """Add an object whose first replica is `found.replicas[0]`, in an extent taken before.

        It enters its orders of eviction at its first `use` or `enter`.
        """
        key = found.key
        self.objects[key] = self._appear(
            found, parent, options, ledger, found.replicas[0].offset, id
        )
        if options.pin:
            self.hold(key)

    def add_replica(
        self, stored: StoredObject, ledger: SegmentLedger, offset: Bytes, id: int
    ) -> None:
        """Add a replica in an extent taken before. Replicas in memory stay before those on disk."""
        key = stored.found.key
        run = self._appear(stored.found, stored.parent, stored.options, ledger, offset, id)
        runs = [*self.runs_of(key), run]
        for it in runs:
            it.several = True
        runs.sort(key=lambda it: self.segments[it.segment].tier == "disk")
        self._set_runs(key, runs)
        for order in self._orders(run):
            order.enter(run)

    def _set_runs(self, key: Key, runs: Sequence[StoredRun]) -> None:
        """Note where an object has its replicas: in at least one run."""
        self.objects[key] = runs[0]
        if len(runs) == 1:
            self.others.pop(key, None)
            return
        others = tuple(runs[1:])
        if others != self._latest_others:
            self._latest_others = others
        self.others[key] = self._latest_others

    def _appear(
        self,
        found: Found,
        parent: Key | None,
        options: PutOptions,
        ledger: SegmentLedger,
        offset: Bytes,
        id: int,
    ) -> StoredRun:
        """Add a replica to a run, which is returned; it is not in `objects` yet."""
        key = found.key
        run = self._growing(found.size, parent, options, ledger)
        below = None if run is not None else self._growing_below(found, options, ledger)
        if below is not None:
            run = below
            run.prepend(key, parent, (found.checksum, found.version, id), offset)
            for order in self._orders(run):
                order.prepended(run)
        elif run is not None:
            run.append(key, found.checksum, found.version, id, offset)
        else:
            run = StoredRun(ledger.name, parent, found.size, options, ledger.code)
            ledger.runs[run] = None
            for order in self._orders(run):
                order.add(run)
            run.append(key, found.checksum, found.version, id, offset)
        ledger.replicas += 1
        ledger.note_change(key, id)
        if key not in self.holds:
            ledger.evictable_bytes += aligned(found.size)
        if options.blocks:
            self._events.append(_stored_event(ledger, (key,), parent))
        return run

    def _growing(
        self, size: Bytes, parent: Key | None, options: PutOptions, ledger: SegmentLedger
    ) -> StoredRun | None:
        """The run on this segment that a block after `parent` can be added to."""
        run = None if parent is None else self.replica(parent, ledger.name)
        if run is None or run.keys[-1] != parent or run.size != size or run.options != options:
            return None
        return run if all(order.may_grow(run) for order in self._orders(run)) else None

    def _growing_below(
        self, found: Found, options: PutOptions, ledger: SegmentLedger
    ) -> StoredRun | None:
        """The run on this segment that continues a block, and that the block can be put before.

        Chains move to disk from their ends, so there each block comes before the last one.
        """
        run = ledger.order.only_child(found.key)
        if run is None or run.size != found.size or run.options != options:
            return None
        return run if all(order.may_grow(run) for order in self._orders(run)) else None

    def _orders(self, run: StoredRun) -> Sequence[RunOrder]:
        """The orders of eviction that a run is in: its segment's, its tenant's if there is a
        quota."""
        own = self.segments[run.segment].order
        of_tenant = self.tenant_orders.get(run.options.tenant)
        return (own,) if of_tenant is None else (own, of_tenant)

    def divide(self, run: StoredRun, at: int, keep_head: bool) -> StoredRun:
        """Give the blocks of a run from `at` on, or those before it, to a new run."""
        new = run.divided(at, keep_head)
        self.segments[run.segment].runs[new] = None
        if not run.several:
            self.objects.update(dict.fromkeys(new.keys, new))
        else:
            for key in new.keys:
                runs = [new if it is run else it for it in self.runs_of(key)]
                self._set_runs(key, runs)
        for order in self._orders(run):
            order.divided(run, new, keep_head)
        return new

    def _part(self, run: StoredRun, start: int, stop: int) -> StoredRun:
        """Make a part of a run a run of its own."""
        if stop < len(run):
            if start == 0:
                return self.divide(run, stop, False)
            self.divide(run, stop, True)
        return self.divide(run, start, True) if start else run

    def drop(self, key: Key, segment: SegmentId) -> None:
        """Drop the object's replica on this segment. With its last replica the object is gone."""
        run = self.replica(key, segment)
        assert run is not None, "it has a replica there"
        at = run.index(key)
        if at < len(run) - 1:
            run = self._part(run, at, at + 1)
        ledger = self.segments[segment]
        offset = run.offset(-1)
        self._disappear(key, run.ids[-1], run, ledger)
        run.pop()
        if not len(run):
            del ledger.runs[run]
            for order in self._orders(run):
                order.remove(run)
        self.give(ledger, offset, run.size, run.options.tenant)
        if run.options.blocks:
            self._events.append(BlocksRemoved(segment, (BlockKey(key),), *_where(ledger)))

    def _disappear(self, key: Key, id: int, run: StoredRun, ledger: SegmentLedger) -> bool:
        """A replica leaves its segment; returns whether the object is gone."""
        ledger.replicas -= 1
        ledger.note_change(key, id)
        if key not in self.holds:
            ledger.evictable_bytes -= aligned(run.size)
        left = [it for it in self.runs_of(key) if it is not run] if run.several else []
        if not left:
            del self.objects[key]
            self.others.pop(key, None)
            self.holds.pop(key, None)
            return True
        self._set_runs(key, left)
        return False

    def remove(self, key: Key) -> None:
        """Remove an object with all its replicas."""
        for run in self.runs_of(key):
            self.drop(key, run.segment)

    def drop_segment(self, ledger: SegmentLedger) -> list[Key]:
        """Drop a segment and its replicas; return its objects that have replicas elsewhere."""
        left = []
        for run in ledger.runs:
            for key, id in zip(run.keys, run.ids, strict=True):
                if not self._disappear(key, id, run, ledger):
                    left.append(key)
                self._subtract_bytes(run.size, run.options.tenant)
            for order in self._orders(run):
                order.remove(run)
            run.keys.clear()
        self._events.append(BlocksCleared(ledger.name, *_where(ledger)))
        del self.segments[ledger.name]
        return left

    # What may be evicted, and in which order

    def hold(self, key: Key) -> Hold:
        """Keep an object from eviction until all that hold it have ended."""
        hold = self.holds.get(key)
        if hold is None:
            hold = self.holds[key] = Hold()
            self._add_evictable(key, -1)
        hold.count += 1
        return hold

    def is_held(self, key: Key, hold: Hold) -> bool:
        """Whether the object is still there that was held."""
        return self.holds.get(key) is hold

    def unhold(self, key: Key, hold: Hold) -> None:
        """End one hold of an object that is still held by it.

        The caller then puts the object into its orders, by `use` or `enter`.
        """
        hold.count -= 1
        if not hold.count:
            del self.holds[key]
            self._add_evictable(key, 1)

    def _add_evictable(self, key: Key, sign: int) -> None:
        """All replicas of an object may be evicted from now on, or, if `sign` is -1, may not."""
        run = self.objects[key]
        self.segments[run.segment].evictable_bytes += sign * run.extent
        if run.several:
            for it in self.others.get(key, ()):
                self.segments[it.segment].evictable_bytes += sign * it.extent

    def pin(self, key: Key, pinned: bool) -> None:
        """Keep an object from eviction until it is unpinned."""
        options = self.objects[key].options
        if options.pin == pinned:
            return
        for run in self.runs_of(key):
            at = run.index(key)
            alone = self._part(run, at, at + 1)
            alone.options = msgspec.structs.replace(options, pin=pinned)
            self.segments[run.segment].note_change(key, alone.ids[0])
        if pinned:
            self.hold(key)
        else:
            self.unhold(key, self.holds[key])
            self.enter(key)

    def use(self, keys: Sequence[Key]) -> None:
        """Mark the objects of one request, first block first, as used now on all segments."""
        by_tenant: dict[str, list[StoredRun]] = {}
        self._use_on(None, keys, by_tenant)
        if self.others:
            elsewhere: dict[SegmentId, list[Key]] = {}
            for key in keys:
                for run in self.others.get(key, ()):
                    elsewhere.setdefault(run.segment, []).append(key)
            for segment, there in elsewhere.items():
                self._use_on(segment, there, by_tenant)
        for tenant, runs in by_tenant.items():
            self.tenant_orders[tenant].use(runs)

    def _use_on(
        self, segment: SegmentId | None, keys: Sequence[Key], by_tenant: dict[str, list[StoredRun]]
    ) -> None:
        """Mark the replicas on a segment as used, None: the first replicas; add their runs to those
        of tenants with a quota."""
        by_segment: dict[SegmentId, list[StoredRun]] = {}
        at = 0
        while at < len(keys):
            run = self.objects[keys[at]] if segment is None else self.replica(keys[at], segment)
            assert run is not None, "it has a replica there"
            start, stop = run.span(keys, at)
            if segment is None and run.several:  # the next ones may have their first elsewhere
                firsts = [self.objects[key] is run for key in run.keys[start:stop]]
                stop = start + firsts.index(False) if False in firsts else stop
            part = self._part(run, start, stop)
            at += stop - start
            by_segment.setdefault(part.segment, []).append(part)
            if part.options.tenant in self.tenant_orders:
                by_tenant.setdefault(part.options.tenant, []).append(part)
        for name, runs in by_segment.items():
            self.segments[name].order.use(runs)

    def enter(self, key: Key) -> None:
        """Put an object into its orders of eviction, where it is not in them; this is no use."""
        for run in self.runs_of(key):
            for order in self._orders(run):
                order.enter(run)

    def next_victim(self, ledger: SegmentLedger) -> Key | None:
        """Take the next object to evict out of a segment's order; None: nothing is evictable."""
        run = ledger.order.pop()
        return None if run is None else run.keys[-1]

    def usable(self, tier: Medium) -> Sequence[SegmentLedger]:
        """Return the segments of a tier that take new replicas."""
        return [it for it in self.segments.values() if it.tier == tier and not it.draining]


def _stored_event(ledger: SegmentLedger, keys: Sequence[Key], parent: Key | None) -> BlocksStored:
    before = None if parent is None else BlockKey(parent)
    return BlocksStored(ledger.name, tuple(map(BlockKey, keys)), before, *_where(ledger))


def _where(ledger: SegmentLedger) -> tuple[Medium, int]:
    """The tier and the epoch of events."""
    return ledger.tier, ledger.mount.epoch


@dataclass(slots=True)
class _Lease:
    expires_us: Micros
    held: dict[Key, Hold] = field(default_factory=dict)
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

    def use(self, now_us: Micros, keys: Sequence[Key], lease: LeaseId | None) -> None:
        """Hold objects, which exist, under `lease`; it lasts its time to live anew.

        With no lease, or with a dead one, the objects are only marked as used now.
        """
        if lease is None or lease in self._released:
            self._catalog.use(keys)
            return
        record = self._leases.get(lease)
        if record is None:
            record = self._leases[lease] = _Lease(0)
        record.expires_us = now_us + self._ttl_us
        held = record.held
        holds = self._catalog.holds
        for key in keys:
            hold = held.get(key)
            if hold is None or holds.get(key) is not hold:
                hold = held[key] = self._catalog.hold(key)
                hold.leases += 1

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
        catalog = self._catalog
        still_held = [key for key, hold in record.held.items() if catalog.is_held(key, hold)]
        for key in still_held:
            hold = record.held[key]
            hold.leases -= 1
            catalog.unhold(key, hold)
        catalog.use(still_held)
