"""Replicas: copies under way, repair, asked copies, draining, and moves between memory and disk.

core.store.master calls it. Every copy is a task for the owner of the target segment: the master
itself moves no bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moonserve.core.store.catalog import Catalog, Hold, SegmentLedger, StoredObject
from moonserve.core.store.placement import Placement
from moonserve.core.store.words import Copy, Held, Key, Replica, aligned
from moonserve.core.units import Bytes, Micros, SegmentId

_AT_ONCE = 64
_AT_ONCE_BYTES: Bytes = 256 << 20
"""Bounds of the copies under way to one segment: all must end within a put's time to live."""
_MAX_MADE = 4_096
"""The most copies that are remembered after they became replicas."""
_MAX_LOOKS = 256
"""The most objects that one `plan` looks at."""
_MAX_ASKED = 4_096
"""The most objects that wait for an asked copy to one segment."""

Why: TypeAlias = Literal["repair", "drain", "demote", "promote", "asked"]


@dataclass(slots=True)
class CopyTask:
    """One copy under way."""

    stored: StoredObject
    """As it was at the start; the object may have been removed meanwhile."""
    why: Why
    id: int
    source: Replica
    source_ledger: SegmentLedger
    target: Replica
    deadline_us: Micros
    hold: Hold

    @property
    def size(self) -> Bytes:
        """Bytes to copy."""
        return self.stored.found.size


class Copies:
    """The copies under way, by id, by target and by key.

    A task holds its object from eviction and has an extent at its target. Both end with the task:
    by the owner's answer, at the deadline, or when the target segment leaves.
    """

    def __init__(self, catalog: Catalog, placement: Placement) -> None:
        self._catalog = catalog
        self._placement = placement
        self._tasks: dict[int, CopyTask] = {}
        self._by_target: dict[SegmentId, dict[int, CopyTask]] = {}
        self._by_key: dict[Key, dict[int, CopyTask]] = {}
        self._made: OrderedDict[int, Key] = OrderedDict()
        self._new_targets: dict[SegmentId, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def drain_new_targets(self) -> list[SegmentId]:
        """Return the segments to which a copy was started since the last call."""
        targets = self._new_targets
        self._new_targets = {}
        return list(targets)

    def targets(self, key: Key) -> list[SegmentId]:
        """Return the segments to which an object is being copied."""
        tasks = self._by_key.get(key, {}).values()
        return [it.target.segment for it in tasks if self._catalog.is_held(key, it.hold)]

    def accepts(self, ledger: SegmentLedger, size: Bytes) -> bool:
        """Whether a segment can take one more copy now."""
        tasks = self._by_target.get(ledger.name, {})
        if not tasks:
            return True
        under_way = sum(task.size for task in tasks.values())
        return len(tasks) < _AT_ONCE and under_way + size <= _AT_ONCE_BYTES

    def start(
        self,
        now_us: Micros,
        stored: StoredObject,
        to: SegmentLedger,
        why: Why,
        source: SegmentLedger | None = None,
    ) -> bool:
        """Start a copy. False: the segment has no room, or the tenant's quota is used up.

        A copy may evict for its extent, a promotion may not. A demotion or a drain moves bytes that
        the quota counts already, so the quota does not stop it.
        """
        id = self._catalog.new_id()
        hold = self._catalog.hold(stored.found.key)  # or the copy could evict what it copies
        offset = self._take_extent(stored, to, why)
        if offset is None:
            self._let_go(stored.found.key, hold)
            return False
        found = stored.found
        origin = next(it for it in found.replicas if source is None or it.segment == source.name)
        from_ledger = self._catalog.segments[origin.segment]
        target = Replica(to.name, offset)
        deadline_us = now_us + self._catalog.terms.put_ttl_us
        task = CopyTask(stored, why, id, origin, from_ledger, target, deadline_us, hold)
        self._tasks[id] = task
        self._new_targets[to.name] = None
        self._by_target.setdefault(to.name, {})[id] = task
        self._by_key.setdefault(found.key, {})[id] = task
        if why == "demote":
            from_ledger.leaving_bytes += aligned(found.size)
        return True

    def _take_extent(self, stored: StoredObject, to: SegmentLedger, why: Why) -> Bytes | None:
        """Take an extent for the copy of an object that is held; None: no room."""
        catalog = self._catalog
        placement = self._placement
        size = stored.found.size
        tenant = stored.options.tenant
        promote = why == "promote"
        moves = why in ("demote", "drain")
        if moves or placement.fits_quota(tenant, size, evict=not promote):
            take = catalog.take if promote else placement.take
            return take(to, size, tenant)
        return None

    def _let_go(self, key: Key, hold: Hold) -> None:
        """The object may be evicted, if it still exists."""
        if self._catalog.is_held(key, hold):
            self._catalog.unhold(key, hold)
            self._catalog.enter(key)

    def orders(self, now_us: Micros, segment: SegmentId) -> tuple[Copy, ...]:
        """Return the copies that a segment's owner has to make; repeated until it answers."""
        return tuple(
            Copy(self._held(task), task.source, task.deadline_us - now_us)
            for task in self._by_target.get(segment, {}).values()
            if task.deadline_us > now_us
        )

    def _held(self, task: CopyTask) -> Held:
        stored, found = task.stored, task.stored.found
        return Held(
            found.key,
            found.size,
            found.checksum,
            found.version,
            task.id,
            task.target.offset,
            stored.parent,
            stored.options,
        )

    def end(self, segment: SegmentId, id: int, done: bool) -> tuple[CopyTask, bool] | None:
        """End a copy to `segment`; return the task and whether it became a replica.

        None: there is no such task.
        """
        task = self._tasks.get(id)
        if task is None or task.target.segment != segment:
            return None
        catalog = self._catalog
        stored = task.stored
        key = task.stored.found.key
        now = catalog.get(key) if catalog.is_held(key, task.hold) else None
        self._forget(task)
        ledger = catalog.segments[segment]
        offset = task.target.offset
        if not done or now is None or catalog.replica(key, segment) is not None:
            catalog.give(ledger, offset, task.size, stored.options.tenant)
            return task, False
        catalog.add_replica(now, ledger, offset, id)
        self._made[id] = key
        if len(self._made) > _MAX_MADE:
            self._made.popitem(last=False)
        return task, True

    def was_made(self, segment: SegmentId, id: int) -> bool:
        """Whether a copy that ended before is still a replica.

        An owner asks again if it did not receive the first answer.
        """
        key = self._made.get(id)
        held = None if key is None else self._catalog.held(segment, key)
        return held is not None and held.id == id

    def overdue(self, now_us: Micros) -> list[CopyTask]:
        """Return the tasks whose deadline has passed."""
        return [task for task in self._tasks.values() if task.deadline_us <= now_us]

    def drop_target(self, ledger: SegmentLedger) -> None:
        """Forget the copies to a segment that leaves."""
        for task in list(self._by_target.get(ledger.name, {}).values()):
            self._forget(task)
            self._catalog.give(ledger, task.target.offset, task.size, task.stored.options.tenant)

    def _forget(self, task: CopyTask) -> None:
        stored = task.stored
        key = stored.found.key
        target = task.target.segment
        del self._tasks[task.id]
        del self._by_target[target][task.id]
        del self._by_key[key][task.id]
        if not self._by_target[target]:
            del self._by_target[target]
        if not self._by_key[key]:
            del self._by_key[key]
        if task.why == "demote":
            task.source_ledger.leaving_bytes -= aligned(stored.found.size)
        self._let_go(key, task.hold)


class Repair:
    """Gives objects the replicas that they want or that were asked for, and empties draining ones.

    The master names the objects to look at: just put with more replicas to make, left with fewer
    replicas by a segment that is gone, on a draining segment, or short when a segment is mounted.
    Eviction names none: an object that loses a replica to eviction has one fewer. An asked copy is
    made once: if it fails or is evicted, nothing makes it again.
    """

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self._catalog = catalog
        self._copies = copies
        self._waiting: dict[Key, dict[SegmentId, Micros]] = {}
        """Key -> the segments to which a copy failed, and when."""
        self._asked: dict[SegmentId, dict[Key, SegmentId | None]] = {}
        """Target segment -> the keys that wait to be copied to it, each with its source."""

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._asked.values()))

    def look_at(self, keys: Iterable[Key]) -> None:
        """These objects may lack replicas, or may have to leave a segment."""
        for key in keys:
            self._waiting.setdefault(key, {})

    def failed(self, now_us: Micros, key: Key, target: SegmentId) -> None:
        """A copy to `target` failed: for a put's time to live, the next copy goes elsewhere."""
        self._waiting.setdefault(key, {})[target] = now_us

    def ask(
        self, now_us: Micros, keys: Sequence[Key], to: SegmentId, source: SegmentId | None
    ) -> int:
        """Copy objects to one more segment, from `source` if they have a replica there.

        Such a copy may evict. Returns how many of the first keys are there or will be, if no copy
        fails.
        """
        objects = self._catalog.objects
        asked = self._asked.setdefault(to, {})
        asked.update(dict.fromkeys(keys[: _MAX_ASKED - len(asked)], source))
        self._plan_asked(now_us, to)
        left = self._asked.get(to, {})
        for count, key in enumerate(keys):
            if self._catalog.replica(key, to) is not None or key in left:
                continue
            if key not in objects or to not in self._copies.targets(key):
                return count
        return len(keys)

    def plan(self, now_us: Micros) -> None:
        """Look at the waiting objects, start their copies, drop replicas on draining segments."""
        for to in list(self._asked):
            self._plan_asked(now_us, to)
        waiting = self._waiting
        for _ in range(min(_MAX_LOOKS, len(waiting))):
            key = next(iter(waiting))
            failed = waiting.pop(key)
            stored = self._catalog.get(key)
            if stored is not None and not self._is_settled(now_us, stored, failed):
                waiting[key] = failed

    def _plan_asked(self, now_us: Micros, to: SegmentId) -> None:
        """Start the asked copies that the segment accepts now."""
        catalog = self._catalog
        asked = self._asked[to]
        ledger = catalog.segments.get(to)
        for key, source in list(asked.items()):
            stored = catalog.get(key)
            if ledger is None or ledger.draining:
                asked.clear()
            elif stored is None or self._is_at(key, to):
                del asked[key]
            elif not self._copies.accepts(ledger, stored.found.size):
                return
            elif self._copies.start(
                now_us, stored, ledger, "asked", self._source_ledger(stored, source)
            ):
                del asked[key]
            else:
                asked.clear()  # there is no room
            if not asked:
                break
        del self._asked[to]

    def _is_at(self, key: Key, segment: SegmentId) -> bool:
        """Whether an object has a replica there, or is being copied there."""
        there = self._catalog.replica(key, segment) is not None
        return there or segment in self._copies.targets(key)

    def _source_ledger(
        self, stored: StoredObject, source: SegmentId | None
    ) -> SegmentLedger | None:
        """Return the segment `source` if the object has a replica there."""
        if source is not None and any(it.segment == source for it in stored.found.replicas):
            return self._catalog.segments[source]
        return None

    def _is_settled(
        self, now_us: Micros, stored: StoredObject, failed: dict[SegmentId, Micros]
    ) -> bool:
        """Do what is possible for an object now; return whether nothing is left to do."""
        catalog = self._catalog
        here = [catalog.segments[it.segment] for it in stored.found.replicas]
        leaving = [it for it in here if it.draining]
        staying = [it for it in here if not it.draining]
        coming = [catalog.segments[name] for name in self._copies.targets(stored.found.key)]
        targets = self._targets(stored, staying + coming)
        if targets:
            self._copy(now_us, stored, "drain" if leaving else "repair", targets, failed)
            return False
        if coming:
            return False
        key = stored.found.key
        hold = catalog.holds.get(key)
        if leaving and staying and (hold is None or hold.count == int(stored.options.pin)):
            for ledger in leaving:
                catalog.drop(key, ledger.name)
            leaving = []
        return not leaving or not staying

    def _targets(self, stored: StoredObject, taken: list[SegmentLedger]) -> list[SegmentLedger]:
        """Return where one more replica beside those on `taken` should go, best first.

        None where the replicas suffice or no other segment exists. Two replicas share a node only
        if there is no other node, and a rack only if no other rack has memory.
        """
        wanted = stored.options.replicas
        nodes = {it.node for it in taken}
        if len(nodes) >= wanted:
            return []
        usable = [it for tier in ("dram", "disk") for it in self._catalog.usable(tier)]
        usable = [it for it in usable if it not in taken]
        apart = [it for it in usable if it.node not in nodes]
        if not apart and len(taken) < wanted:
            apart = usable
        racks = {it.mount.rack for it in taken}
        apart.sort(
            key=lambda it: (it.tier == "disk", it.mount.rack in racks, -it.extents.free_bytes)
        )
        return apart

    def _copy(
        self,
        now_us: Micros,
        stored: StoredObject,
        why: Why,
        targets: list[SegmentLedger],
        failed: dict[SegmentId, Micros],
    ) -> None:
        """Start one copy, to the first target that takes it."""
        for ledger in targets:
            when_us = failed.get(ledger.name)
            if when_us is not None and now_us - when_us < self._catalog.terms.put_ttl_us:
                continue
            if not self._copies.accepts(ledger, stored.found.size):
                continue
            if self._copies.start(now_us, stored, ledger, why):
                return


class Tiers:
    """Moves replicas between memory and disk.

    Above the high-water mark, objects move from memory to a disk of the node; without a disk they
    are evicted. An object that a reader finds only on disk is copied to the reader's memory.
    """

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self._catalog = catalog
        self._copies = copies

    def is_high(self, ledger: SegmentLedger) -> bool:
        """Whether a segment is above its high-water mark; bytes about to leave do not count."""
        used = ledger.extents.used_bytes - ledger.leaving_bytes
        return used > self._catalog.terms.high * ledger.extents.capacity_bytes

    def lower(self, now_us: Micros, ledger: SegmentLedger, evict: bool) -> None:
        """Bring a segment above its high-water mark down to its low one.

        Without `evict`, only by moves to disk.
        """
        if self.is_high(ledger):
            low = self._catalog.terms.low * ledger.extents.capacity_bytes
            self.shrink(now_us, ledger, int(low), evict)

    def shrink(self, now_us: Micros, ledger: SegmentLedger, to: Bytes, evict: bool) -> None:
        """Demote or evict replicas until at most `to` bytes stay, in the order of eviction.

        It stops early if every object is held, or if the disk takes no more copies now. With a
        disk, objects are demoted; without one, or if a demotion fails, they are evicted if `evict`.
        """
        catalog = self._catalog
        disk = self._disk_of(ledger)
        if disk is None and not evict:
            return
        while ledger.extents.used_bytes - ledger.leaving_bytes > to:
            if disk is not None and not self._copies.accepts(disk, 0):
                return
            key = catalog.next_victim(ledger)
            victim = None if key is None else catalog.get(key)
            if key is None or victim is None:
                return
            if self._is_on_disk(victim):
                catalog.drop(key, ledger.name)
                catalog.demoted += 1
            elif disk is None or not self._copies.start(
                now_us, victim, disk, "demote", source=ledger
            ):
                if not evict:
                    return
                catalog.drop(key, ledger.name)
                catalog.evicted += 1

    def promote(self, now_us: Micros, key: Key, to: SegmentLedger) -> None:
        """Start to copy an object that is only on disk to a memory segment with free bytes."""
        catalog = self._catalog
        run = catalog.objects[key]
        if (
            to.tier == "dram"
            and not to.draining
            and not self.is_high(to)
            and catalog.segments[run.segment].tier == "disk"
            and not self._copies.targets(key)
            and self._copies.accepts(to, run.size)
            and (stored := catalog.get(key)) is not None
        ):
            self._copies.start(now_us, stored, to, "promote")

    def copied(self, task: CopyTask) -> None:
        """A copy became a replica: of a demoted object, drop the replica in memory."""
        catalog = self._catalog
        key = task.stored.found.key
        if task.why == "promote":
            catalog.promoted += 1
        elif task.why == "demote" and key not in catalog.holds:
            ledger = task.source_ledger
            mounted = catalog.segments.get(ledger.name) is ledger
            if mounted and catalog.replica(key, ledger.name) is not None:
                catalog.drop(key, ledger.name)
                catalog.demoted += 1

    def _disk_of(self, ledger: SegmentLedger) -> SegmentLedger | None:
        if ledger.tier == "disk":
            return None
        return next((it for it in self._catalog.usable("disk") if it.node == ledger.node), None)

    def _is_on_disk(self, stored: StoredObject) -> bool:
        return self._catalog.segments[stored.found.replicas[-1].segment].tier == "disk"
