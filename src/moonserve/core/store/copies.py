"""Copies: replicas being made. Tasks for the owners of the segments they go to.

For core.store.master, core.store.repair and core.store.tiers. A task holds its object from
eviction and an extent at its target. Both end with it: by its owner's answer, by its deadline, or
with the target segment.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.extents import aligned
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.placement import Room
from moonserve.core.store.words import Copy, Held, Key, Replica
from moonserve.core.units import Bytes, Micros, SegmentId

_AT_ONCE = 64
_AT_ONCE_BYTES: Bytes = 256 << 20
"""Bounds of what is being copied to one segment: it must be done within a put's time to live."""

_MAX_BECAME = 4_096

Why: TypeAlias = Literal["repair", "drain", "demote", "promote", "asked"]


@dataclass(slots=True)
class Task:
    """One copy being made."""

    of: Object
    """It may be gone meanwhile."""
    why: Why
    id: int
    source: Replica
    source_shelf: Shelf
    target: Replica
    deadline_us: Micros

    @property
    def size(self) -> Bytes:
        """Bytes to copy."""
        return self.of.found.size


class Copies:
    """The tasks, by id and by target."""

    def __init__(self, stock: Stock, room: Room) -> None:
        self._stock = stock
        self._room = room
        self._tasks: dict[int, Task] = {}
        self._by_target: dict[SegmentId, dict[int, Task]] = {}
        self._by_key: dict[Key, dict[int, Task]] = {}
        self._became: OrderedDict[int, Key] = OrderedDict()

        self._called: dict[SegmentId, None] = {}
        """Segments with new tasks since the driver last asked."""

    def __len__(self) -> int:
        return len(self._tasks)

    def drain_called(self) -> list[SegmentId]:
        """The segments that tasks were begun for since the last call."""
        called, self._called = self._called, {}
        return list(called)

    def coming(self, key: Key) -> list[SegmentId]:
        """The segments that copies of an object are being made to."""
        of = self._stock.objects[key]
        return [it.target.segment for it in self._by_key.get(key, {}).values() if it.of is of]

    def accepts(self, shelf: Shelf, size: Bytes) -> bool:
        """Whether one copy more may be made to a shelf now."""
        tasks = self._by_target.get(shelf.name, {})
        if not tasks:
            return True
        under_way = sum(task.size for task in tasks.values())
        return len(tasks) < _AT_ONCE and under_way + size <= _AT_ONCE_BYTES

    def start(
        self, now_us: Micros, id: int, of: Object, to: Shelf, why: Why, source: Shelf | None = None
    ) -> bool:
        """Begin a copy, evicting for it if need be, unless it is a promotion. False: no room, or
        the tenant may have no more (what moves is its already)."""
        found, tenant = of.found, of.options.tenant
        stock, room = self._stock, self._room
        stock.hold(of)  # not to be evicted for its own sake
        promote = why == "promote"
        fits = why in ("demote", "drain") or room.fits_quota(tenant, found.size, evict=not promote)
        take = stock.take if promote else room.take
        offset = take(to, found.size, tenant) if fits else None
        if offset is None:
            stock.unhold(of)
            stock.enter(of)
            return False
        (at, *_) = [it for it in found.replicas if source is None or it.segment == source.name]
        deadline_us = now_us + stock.terms.put_ttl_us
        from_shelf = stock.shelves[at.segment]
        task = Task(of, why, id, at, from_shelf, Replica(to.name, offset), deadline_us)
        self._tasks[id] = task
        self._called[to.name] = None
        self._by_target.setdefault(to.name, {})[id] = task
        self._by_key.setdefault(found.key, {})[id] = task
        if why == "demote":
            from_shelf.leaving_bytes += aligned(found.size)
        return True

    def orders(self, now_us: Micros, segment: SegmentId) -> tuple[Copy, ...]:
        """What the owner of a segment is to copy; told anew until it answers."""
        return tuple(
            Copy(self._held(task), task.source, task.deadline_us - now_us)
            for task in self._by_target.get(segment, {}).values()
            if task.deadline_us > now_us
        )

    def _held(self, task: Task) -> Held:
        found, of = task.of.found, task.of
        offset = task.target.offset
        return Held(
            found.key,
            found.size,
            found.checksum,
            found.version,
            task.id,
            offset,
            of.parent,
            of.options,
        )

    def end(self, segment: SegmentId, id: int, done: bool) -> tuple[Task, bool] | None:
        """A copy to `segment` ended; whether it became a replica. None: there is no such task."""
        task = self._tasks.get(id)
        if task is None or task.target.segment != segment:
            return None
        self._forget(task)
        stock, of, key = self._stock, task.of, task.of.found.key
        shelf, offset = stock.shelves[segment], task.target.offset
        lives = stock.objects.get(key) is of
        if not done or not lives or key in shelf.objects:
            stock.give(shelf, offset, task.size, of.options.tenant)
            return task, False
        stock.add_replica(of, shelf, offset, id)
        self._became[id] = key
        if len(self._became) > _MAX_BECAME:
            self._became.popitem(last=False)
        return task, True

    def became(self, segment: SegmentId, id: int) -> bool:
        """Whether a copy that ended lately is a replica still: the owner did not get the answer."""
        key = self._became.get(id)
        return key is not None and self._stock.shelves[segment].objects.get(key) == id

    def overdue(self, now_us: Micros) -> list[Task]:
        """The tasks whose time is up."""
        return [task for task in self._tasks.values() if task.deadline_us <= now_us]

    def drop_target(self, shelf: Shelf) -> None:
        """Forget the tasks to a segment that goes."""
        for task in list(self._by_target.get(shelf.name, {}).values()):
            self._forget(task)
            self._stock.give(shelf, task.target.offset, task.size, task.of.options.tenant)

    def _forget(self, task: Task) -> None:
        stock, of, key, target = self._stock, task.of, task.of.found.key, task.target.segment
        del self._tasks[task.id], self._by_target[target][task.id], self._by_key[key][task.id]
        if not self._by_target[target]:
            del self._by_target[target]
        if not self._by_key[key]:
            del self._by_key[key]
        if task.why == "demote":
            task.source_shelf.leaving_bytes -= aligned(of.found.size)
        if stock.objects.get(key) is of:
            stock.unhold(of)
            stock.enter(of)
