"""Eviction: which block goes next when room is short. LRU, FIFO, SIEVE, LFU and length-aware.

For core.store.master (one order per segment) and for the simulator's caches. An order knows keys
only, never sizes or time. It holds what may be evicted: the master takes a block out while it is
leased, so leased blocks are passed over without being looked at.

Every operation is O(1), amortised for SIEVE, and O(log n) for LFU and length-aware.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Eviction(Protocol[K]):
    """An order of eviction over keys that each name a block and all before it."""

    def use(self, keys: Sequence[K]) -> None:
        """The blocks of one request, first block first, enter, or are used again.

        The last counts as used first: a prefix is worth something without its continuation, a
        continuation is worth nothing without its prefix.
        """

    def discard(self, key: K) -> bool:
        """Take a block out: leased, or gone. False: it was not in."""

    def pop(self) -> K | None:
        """Take out the block to evict next; None when there is none."""

    def __contains__(self, key: K) -> bool: ...

    def __len__(self) -> int: ...


class Fifo(Eviction[K]):
    """First in, first out, however often used since."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def use(self, keys: Sequence[K]) -> None:
        """New blocks enter; for those in, nothing changes."""
        for key in reversed(keys):
            self._order[key] = None

    def discard(self, key: K) -> bool:
        """Take a block out."""
        found = key in self._order
        self._order.pop(key, None)
        return found

    def pop(self) -> K | None:
        """Take out the oldest."""
        return self._order.popitem(last=False)[0] if self._order else None

    def __contains__(self, key: K) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)


class Lru(Fifo[K]):
    """Least recently used first."""

    def use(self, keys: Sequence[K]) -> None:
        """All become the most recently used, the first block last."""
        order, to_end = self._order, self._order.move_to_end
        for key in reversed(keys):
            order[key] = None
            to_end(key)


class Sieve(Eviction[K]):
    """FIFO with a hand that spares, once, what was used since it last passed (NSDI'24).

    The queue is `_passed`, `_ahead`, `_entered`; the hand stands between the first two. What it
    spares keeps its place, unlike in CLOCK. The paper makes room before it inserts: so the latest
    request's new blocks wait in `_entered`, where the hand comes only when all else is gone.
    (Let in at once, unmarked, they would be all that it ever evicts.) Values: used since.
    """

    def __init__(self) -> None:
        self._passed: OrderedDict[K, bool] = OrderedDict()
        self._ahead: OrderedDict[K, bool] = OrderedDict()
        self._entered: OrderedDict[K, bool] = OrderedDict()

    def use(self, keys: Sequence[K]) -> None:
        """New blocks enter, unmarked; those in are marked."""
        passed, ahead, entered = self._passed, self._ahead, self._entered
        ahead.update(entered)
        entered.clear()
        for key in reversed(keys):
            if key in passed:
                passed[key] = True
            elif key in ahead:
                ahead[key] = True
            else:
                entered[key] = False

    def discard(self, key: K) -> bool:
        """Take a block out; the hand stays between its neighbours."""
        found = key in self
        for part in (self._passed, self._ahead, self._entered):
            part.pop(key, None)
        return found

    def pop(self) -> K | None:
        """Move the hand to the next unmarked block, clearing marks, and take that out."""
        while len(self):
            if not self._ahead and self._passed:
                self._ahead, self._passed = self._passed, self._ahead
            elif not self._ahead:
                self._ahead, self._entered = self._entered, self._ahead
            key, used = self._ahead.popitem(last=False)
            if not used:
                return key
            self._passed[key] = False
        return None

    def __contains__(self, key: K) -> bool:
        return key in self._passed or key in self._ahead or key in self._entered

    def __len__(self) -> int:
        return len(self._passed) + len(self._ahead) + len(self._entered)


class Lfu(Eviction[K]):
    """Least frequently used first, among equals the least recently used.

    Uses are counted from entry: a block that comes back starts anew, so that memory is bounded by
    what is held. Ranks are (uses, -depth or 0, time of use); the heap keeps old ranks until they
    surface, or until they outnumber the true ones.
    """

    _by_depth = False

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[int, int, int]] = {}
        self._heap: list[tuple[tuple[int, int, int], K]] = []
        self._now = 0

    def use(self, keys: Sequence[K]) -> None:
        """Each gets one use more."""
        ranks, heap, now = self._ranks, self._heap, self._now
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            now += 1
            old = ranks.get(key)
            rank = (old[0] + 1 if old else 1, -depth if self._by_depth else 0, now)
            ranks[key] = rank
            heappush(heap, (rank, key))
        self._now = now
        if len(heap) > 2 * len(ranks) + 64:
            heap[:] = [(rank, key) for key, rank in ranks.items()]
            heapify(heap)

    def discard(self, key: K) -> bool:
        """Take a block out; its count is forgotten."""
        return self._ranks.pop(key, None) is not None

    def pop(self) -> K | None:
        """Take out the block of the lowest rank."""
        while self._heap:
            rank, key = heappop(self._heap)
            if self._ranks.get(key) == rank:
                del self._ranks[key]
                return key
        return None

    def __contains__(self, key: K) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)


class LengthAware(Lfu[K]):
    """LFU which, among equally frequent blocks, evicts those deepest in their requests first.

    After arXiv 2407.00079, Table 1, whose LengthAwareCache is like LFU but gives priority to
    evicting blocks that occur later in requests. It gives no formula; this is ours.
    """

    _by_depth = True


EVICTIONS: dict[str, Callable[[], Eviction[Any]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "sieve": Sieve,
    "length_aware": LengthAware,
}
"""The orders by name."""
