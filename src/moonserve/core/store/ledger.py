"""Shelf: one segment's ledger. What lies where, what may go next, what its owner has yet to hear.

For core.store.catalog, which alone changes it. Never a byte of the segment itself.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from moonserve.core.store.chains import Chains
from moonserve.core.store.extents import Extents
from moonserve.core.store.words import Gone, Held, Key, Mount, Seen
from moonserve.core.units import Bytes, Micros

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_CHANGES = 1_024
"""The most changed keys one answer tells of."""


class Shelf:
    """A mounted segment. Bounded by its objects, and the names of those gone since a beat."""

    def __init__(self, mount: Mount, eviction: str, mounting: int, heard_us: Micros) -> None:
        self.mount = mount
        self.name = mount.id
        self.node = mount.node or mount.id
        self.tier = mount.tier
        self.heard_us = heard_us
        self.beats = 0
        self.extents = Extents(mount.capacity_bytes)
        self.chains = Chains(eviction)
        self.objects: dict[Key, int] = {}
        """The id of the put or copy that wrote each replica."""
        self.gone: dict[Key, int] = {}
        """What the owner mounted it with as gone: nothing as old is claimed on it. As bounded as
        the owner's catalogue keeps it."""
        self.evictable_bytes: Bytes = 0
        self.leaving_bytes: Bytes = 0
        """What goes when its copy to disk is made."""
        self.draining = False
        self._changed: dict[Key, tuple[int, int]] = {}
        """Key -> (number of its last change, highest id put or dropped), in that order."""
        self._changes = 0
        self._mounting = mounting

    def note(self, key: Key, id: int) -> None:
        """A replica came or went: its owner is to hear of it."""
        self._changes += 1
        old = self._changed.pop(key, None)
        self._changed[key] = (self._changes, id if old is None else max(id, old[1]))

    def changes(
        self, seen: Seen, held: Callable[[Key], Held]
    ) -> tuple[tuple[Held | Gone, ...], Seen, bool]:
        """What is to be told after `seen`, what is seen then, and whether there is more.

        All up to `seen` is forgotten. A key that changed twice is told once, as it is now.
        """
        changed = self._changed
        last = seen[1] if seen[0] == self._mounting else 0
        if last:
            changed = {key: change for key, change in changed.items() if change[0] > last}
            self._changed = changed
        told: list[Held | Gone] = []
        for key, (number, id) in islice(changed.items(), _MAX_CHANGES):
            here = self.objects.get(key)
            if here != id:
                told.append(Gone(key, id))
            if here is not None:
                told.append(held(key))
            last = number
        return tuple(told), (self._mounting, last), len(changed) > _MAX_CHANGES

    def untold(self) -> list[Key]:
        """The keys here that the owner may not have heard of."""
        return [key for key in self._changed if key in self.objects]
