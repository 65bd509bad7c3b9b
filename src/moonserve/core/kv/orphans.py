"""Stored events whose parent is not known: kept for a while, since it may yet be told.

For core.kv.stream. Bounded; the oldest are given up. What is removed or cleared meanwhile is noted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, TypeAlias

from moonserve.core.kv.events import EngineHash, StoredEvent
from moonserve.core.kv.facts import Tier

Place: TypeAlias = Tier | Literal["pool"]
"""A tier of the engine's own, or the store that it shares with others."""


class Orphan:
    """A stored event that waits for its parent, and what was removed of it meanwhile."""

    __slots__ = ("event", "parent", "place", "removed")

    def __init__(self, event: StoredEvent, parent: EngineHash, place: Place) -> None:
        self.event = event
        self.parent = parent
        self.place = place
        self.removed: list[EngineHash] = []


class Orphans:
    """See the module; `most` events."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[EngineHash, list[Orphan]] = OrderedDict()
        """By parent, oldest first."""
        self._count = 0
        self._missing: dict[EngineHash, Orphan] = {}
        """The latest that has this hash."""

    def __len__(self) -> int:
        return self._count

    def put(self, event: StoredEvent, place: Place) -> int:
        """One more; how many blocks of others were given up for it."""
        parent = event.parent_block_hash
        assert parent is not None, "who has no parent is no orphan"
        dropped = 0
        if self._count >= self._most:
            oldest = next(iter(self._waiting.values()))[0]
            dropped = len(oldest.event.block_hashes)
            self._take_out(oldest)
        orphan = Orphan(event, parent, place)
        self._waiting.setdefault(parent, []).append(orphan)
        self._count += 1
        self._missing.update(dict.fromkeys(event.block_hashes, orphan))
        return dropped

    def take(self, parent: EngineHash) -> list[Orphan]:
        """Those that waited for this parent, in the order they came; they wait no more."""
        taken = list(self._waiting.get(parent, ()))
        for orphan in taken:
            self._take_out(orphan)
        return taken

    def removed(self, hash: EngineHash, place: Place) -> bool:
        """Note that a copy of a block went. False: nobody here has it."""
        orphan = self._missing.get(hash)
        if orphan is None or orphan.place != place:
            return False
        if len(orphan.removed) < len(orphan.event.block_hashes):
            orphan.removed.append(hash)
        return True

    def clear(self, place: Place | None = None) -> None:
        """Those of one place are gone; None: all."""
        for orphan in [it for waiting in self._waiting.values() for it in waiting]:
            if place in (None, orphan.place):
                self._take_out(orphan)

    def _take_out(self, orphan: Orphan) -> None:
        waiting = self._waiting[orphan.parent]
        waiting.remove(orphan)
        if not waiting:
            del self._waiting[orphan.parent]
        self._count -= 1
        for hash in orphan.event.block_hashes:
            if self._missing.get(hash) is orphan:
                del self._missing[hash]
