"""Tiers: room ahead of need by water marks, memory to disk and back.

For core.store.master. A replica in memory that is to go moves to a disk of its node, where there
is one; what a reader finds on disk only comes back to the reader's memory.
"""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.copies import Copies, Task
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.placement import Room
from moonserve.core.units import Bytes, Micros


class Tiers:
    """What moves between tiers."""

    def __init__(self, stock: Stock, room: Room, copies: Copies, new_id: Callable[[], int]) -> None:
        self._stock = stock
        self._room = room
        self._copies = copies
        self._new_id = new_id
        self.demoted = 0
        self.promoted = 0

    def is_high(self, shelf: Shelf) -> bool:
        """Whether a shelf is above its high water mark, what is about to leave not counted."""
        used = shelf.extents.used_bytes - shelf.leaving_bytes
        return used > self._stock.terms.high * shelf.extents.capacity_bytes

    def lower(self, now_us: Micros, shelf: Shelf, evict: bool) -> None:
        """Bring a shelf that is high down to its low water mark; by demotion only, or not at all,
        unless `evict`."""
        if self.is_high(shelf):
            low = self._stock.terms.low * shelf.extents.capacity_bytes
            self.shrink(now_us, shelf, int(low), evict)

    def shrink(self, now_us: Micros, shelf: Shelf, to: Bytes, evict: bool) -> None:
        """Let go of what is to go next, until `to` bytes stay, or all is held, or the disk is busy.

        By demotion where there is a disk, else by eviction, if `evict`.
        """
        disk = self._disk_of(shelf)
        if disk is None and not evict:
            return
        while shelf.extents.used_bytes - shelf.leaving_bytes > to:
            if disk is not None and not self._copies.accepts(disk, 0):
                return
            victim = self._stock.next_victim(shelf)
            if victim is None:
                return
            if self._is_on_disk(victim):
                self._stock.drop(victim, shelf)
                self.demoted += 1
            elif disk is None or not self._copies.start(
                now_us, self._new_id(), victim, disk, "demote", source=shelf
            ):
                if not evict:
                    return
                self._stock.drop(victim, shelf)
                self._room.evicted += 1

    def promote(self, now_us: Micros, of: Object, to: Shelf) -> None:
        """Begin to copy what lies on disk only to a shelf in memory, if that has free room."""
        replicas = of.found.replicas
        if (
            to.tier == "dram"
            and not to.draining
            and not self.is_high(to)
            and self._stock.shelves[replicas[0].segment].tier == "disk"
            and not self._copies.coming(of.found.key)
            and self._copies.accepts(to, of.found.size)
        ):
            self._copies.start(now_us, self._new_id(), of, to, "promote")

    def ended(self, task: Task) -> None:
        """A copy between tiers is a replica now: of a demoted object, the one in memory goes."""
        if task.why == "promote":
            self.promoted += 1
        elif task.why == "demote" and task.of.holds == 0:
            shelf = task.source_shelf
            if self._stock.shelves.get(shelf.name) is shelf and task.of.found.key in shelf.objects:
                self._stock.drop(task.of, shelf)
                self.demoted += 1

    def _disk_of(self, shelf: Shelf) -> Shelf | None:
        if shelf.tier == "disk":
            return None
        return next((it for it in self._stock.usable("disk") if it.node == shelf.node), None)

    def _is_on_disk(self, of: Object) -> bool:
        return self._stock.shelves[of.found.replicas[-1].segment].tier == "disk"
