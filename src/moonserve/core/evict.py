"""Eviction order of one segment: least recently used first.

For core.master. It holds only what may be evicted: an object enters when its last lease ends and
leaves when a reader takes one, so leased objects are passed over without being looked at, and
unfinished puts have never entered.
"""

from __future__ import annotations

from collections import OrderedDict

from moonserve.core.units import BlockKey, Bytes


class Lru:
    """The evictable objects of one segment, oldest use first."""

    def __init__(self) -> None:
        self.evictable_bytes: Bytes = 0
        self._sizes: OrderedDict[BlockKey, Bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: BlockKey, size: Bytes) -> None:
        """Make an object evictable, or move it to the most recently used end."""
        self.discard(key)
        self._sizes[key] = size
        self.evictable_bytes += size

    def discard(self, key: BlockKey) -> None:
        """Take an object out: leased, or gone."""
        self.evictable_bytes -= self._sizes.pop(key, 0)

    def oldest(self) -> BlockKey | None:
        """The next to evict; None when all that is left is leased."""
        return next(iter(self._sizes), None)
