"""Repair: objects get the replicas they want, and leave segments that are drained.

For core.master, which names the objects to look at: those just put with replicas to make, those
that lost one with a segment, those on a segment that drains, those that want more when a segment is
mounted. Eviction names none: an object that lost a replica to it has just fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moonserve.core.copies import Copies, Why
from moonserve.core.pool import Key
from moonserve.core.shelf import Shelf
from moonserve.core.stock import Object, Stock
from moonserve.core.units import Micros, SegmentId

_MAX_LOOKS = 256
"""The most objects looked at in one call."""


class Repair:
    """The objects that wait for a copy or for leaving a segment; each is looked at in turn."""

    def __init__(self, stock: Stock, copies: Copies, new_id: Callable[[], int]) -> None:
        self._stock = stock
        self._copies = copies
        self._new_id = new_id
        self._waiting: dict[Key, dict[SegmentId, Micros]] = {}
        """Key -> the segments to which a copy failed, and when."""

    def __len__(self) -> int:
        return len(self._waiting)

    def look_at(self, keys: Iterable[Key]) -> None:
        """These may lack replicas, or have to leave a segment."""
        for key in keys:
            self._waiting.setdefault(key, {})

    def failed(self, now_us: Micros, key: Key, target: SegmentId) -> None:
        """A copy to `target` failed: for a put's time to live, the next goes elsewhere."""
        self._waiting.setdefault(key, {})[target] = now_us

    def plan(self, now_us: Micros) -> None:
        """Look at what waits, start copies, drop replicas that left."""
        waiting = self._waiting
        for _ in range(min(_MAX_LOOKS, len(waiting))):
            key = next(iter(waiting))
            failed = waiting.pop(key)
            of = self._stock.objects.get(key)
            if of is not None and not self._is_settled(now_us, of, failed):
                waiting[key] = failed

    def _is_settled(self, now_us: Micros, of: Object, failed: dict[SegmentId, Micros]) -> bool:
        """Do what can be done for an object now; whether nothing is left to do."""
        stock = self._stock
        here = [stock.shelves[it.segment] for it in of.found.replicas]
        leaving = [it for it in here if it.draining]
        staying = [it for it in here if not it.draining]
        coming = [stock.shelves[name] for name in self._copies.coming(of.found.key)]
        targets = self._targets(of, staying + coming)
        if targets:
            self._copy(now_us, of, "drain" if leaving else "repair", targets, failed)
            return False
        if coming:
            return False
        if leaving and staying and of.holds == int(of.options.pin):
            for shelf in leaving:
                stock.drop(of, shelf)
            leaving = []
        return not leaving or not staying

    def _targets(self, of: Object, taken: list[Shelf]) -> list[Shelf]:
        """Where one more replica than those on `taken` should go, best first; none if they do, or
        if there is no other segment. Replicas share a node only while there is no other node, and
        a rack only while there is no memory in another.
        """
        wanted = of.options.replicas
        nodes = {it.node for it in taken}
        if len(nodes) >= wanted:
            return []
        usable = [it for tier in ("dram", "disk") for it in self._stock.usable(tier)]
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
        of: Object,
        why: Why,
        targets: list[Shelf],
        failed: dict[SegmentId, Micros],
    ) -> None:
        """Start one copy, to the first that takes it."""
        for shelf in targets:
            when_us = failed.get(shelf.name)
            if when_us is not None and now_us - when_us < self._stock.terms.put_ttl_us:
                continue
            if not self._copies.accepts(shelf, of.found.size):
                continue
            if self._copies.start(now_us, self._new_id(), of, shelf, why):
                return
