"""Repair: objects get the replicas they want, or were asked for, and leave what is drained.

For core.store.master, which names the objects to look at: those just put with replicas to make,
those that lost one with a segment, those on a segment that drains, those that want more when a
segment is mounted. Eviction names none: an object that lost a replica to it has just fewer. What
was asked for beyond that is copied once: should it fail, or be evicted, nobody makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.copies import Copies, Why
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.words import Key
from moonserve.core.units import Micros, SegmentId

_MAX_LOOKS = 256
"""The most objects looked at in one call."""
_MAX_ASKED = 4_096
"""The most objects that wait to be copied to one segment because somebody asked for it."""


class Repair:
    """The objects that wait for a copy or for leaving a segment; each is looked at in turn."""

    def __init__(self, stock: Stock, copies: Copies, new_id: Callable[[], int]) -> None:
        self._stock = stock
        self._copies = copies
        self._new_id = new_id
        self._waiting: dict[Key, dict[SegmentId, Micros]] = {}
        """Key -> the segments to which a copy failed, and when."""
        self._asked: dict[SegmentId, dict[Key, SegmentId | None]] = {}
        """What waits to be copied to each segment, and from where."""

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._asked.values()))

    def look_at(self, keys: Iterable[Key]) -> None:
        """These may lack replicas, or have to leave a segment."""
        for key in keys:
            self._waiting.setdefault(key, {})

    def failed(self, now_us: Micros, key: Key, target: SegmentId) -> None:
        """A copy to `target` failed: for a put's time to live, the next goes elsewhere."""
        self._waiting.setdefault(key, {})[target] = now_us

    def ask(
        self, now_us: Micros, keys: Sequence[Key], to: SegmentId, source: SegmentId | None
    ) -> int:
        """Copy objects to one more segment, from `source` where it has them, evicting for them.

        How many of the first are there, or will be if all goes well.
        """
        objects, asked = self._stock.objects, self._asked.setdefault(to, {})
        asked.update(dict.fromkeys(keys[: _MAX_ASKED - len(asked)], source))
        self._plan_asked(now_us, to)
        left = self._asked.get(to, {})
        for count, key in enumerate(keys):
            of = objects.get(key)
            there = of is not None and any(it.segment == to for it in of.found.replicas)
            if not there and key not in left and (of is None or to not in self._copies.coming(key)):
                return count
        return len(keys)

    def plan(self, now_us: Micros) -> None:
        """Look at what waits, start copies, drop replicas that left."""
        for to in list(self._asked):
            self._plan_asked(now_us, to)
        waiting = self._waiting
        for _ in range(min(_MAX_LOOKS, len(waiting))):
            key = next(iter(waiting))
            failed = waiting.pop(key)
            of = self._stock.objects.get(key)
            if of is not None and not self._is_settled(now_us, of, failed):
                waiting[key] = failed

    def _plan_asked(self, now_us: Micros, to: SegmentId) -> None:
        """Start the copies to a segment that it takes now."""
        stock, asked = self._stock, self._asked[to]
        shelf = stock.shelves.get(to)
        for key, source in list(asked.items()):
            of = stock.objects.get(key)
            if shelf is None or shelf.draining:
                asked.clear()
            elif of is None or key in shelf.objects or to in self._copies.coming(key):
                del asked[key]
            elif not self._copies.accepts(shelf, of.found.size):
                return
            elif self._copies.start(
                now_us, self._new_id(), of, shelf, "asked", self._of(of, source)
            ):
                del asked[key]
            else:
                asked.clear()  # there is no room
            if not asked:
                break
        del self._asked[to]

    def _of(self, of: Object, source: SegmentId | None) -> Shelf | None:
        """That shelf, if the object lies there."""
        here = [it.segment for it in of.found.replicas if it.segment == source]
        return self._stock.shelves[here[0]] if here else None

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
