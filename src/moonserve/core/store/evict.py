"""Eviction: which block goes next when memory is short. LRU, FIFO, SIEVE, LFU, length-aware.

The simulator's caches use the orders; core.store.catalog uses them through core.store.runs, one per
segment and one per tenant with a quota. An order knows keys only, never sizes or time.

Every operation is O(1), amortised for SIEVE, and O(log n) for LFU and length-aware.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Eviction(Protocol[K]):
    """An order of eviction over block keys. Each key names a block and all blocks before it."""

    def use(self, keys: Sequence[K]) -> None:
        """The blocks of one request, first block first, enter the order or are used again.

        The last block counts as used first: a prefix is useful without its continuation, but a
        continuation is useless without its prefix.
        """

    def discard(self, key: K) -> bool:
        """Take a block out of the order. False: it was not in it."""

    def pop(self) -> K | None:
        """Take out the block to evict next; None: the order is empty."""

    def __contains__(self, key: K) -> bool: ...

    def __len__(self) -> int: ...


class Fifo(Eviction[K]):
    """First in, first out. Later uses of a block change nothing."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def use(self, keys: Sequence[K]) -> None:
        """New blocks enter; blocks in the order keep their places."""
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
        """All become the most recently used; the first block is the most recent of them."""
        order, to_end = self._order, self._order.move_to_end
        for key in reversed(keys):
            order[key] = None
            to_end(key)

    def use_first(self, key: K) -> None:
        """Make a block the least recently used."""
        self._order[key] = None
        self._order.move_to_end(key, last=False)

    def is_latest(self, key: K) -> bool:
        """Whether a block in the order is the most recently used."""
        return key == next(reversed(self._order))


class Sieve(Eviction[K]):
    """FIFO with a hand that skips, once, a block used since the hand last passed (NSDI'24).

    The queue is `_passed`, `_ahead`, `_entered`; the hand is between the first two. A skipped block
    keeps its place, unlike in CLOCK. The paper evicts before it inserts. Here, blocks enter before
    the excess is evicted, so the latest request's new blocks wait in `_entered`, and the hand
    reaches them last. Otherwise these unmarked blocks would always be the victims. The values say
    whether a block was used since.
    """

    def __init__(self) -> None:
        self._passed: OrderedDict[K, bool] = OrderedDict()
        self._ahead: OrderedDict[K, bool] = OrderedDict()
        self._entered: OrderedDict[K, bool] = OrderedDict()

    def use(self, keys: Sequence[K]) -> None:
        """New blocks enter unmarked; blocks in the order are marked."""
        passed = self._passed
        ahead = self._ahead
        entered = self._entered
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
        """Take a block out; the hand stays between the same blocks."""
        found = key in self
        for part in (self._passed, self._ahead, self._entered):
            part.pop(key, None)
        return found

    def pop(self) -> K | None:
        """Move the hand to the next unmarked block, clear marks on the way, take the block out."""
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
    """Least frequently used first; if two have the same count, the least recently used.

    Uses are counted from entry: a block that was taken out and comes back starts at one. So memory
    is bounded by the blocks in the order. A rank is (uses, -depth or 0, time of use). The heap
    keeps outdated ranks until they come to its top, or until they outnumber the current ones.
    """

    _by_depth = False

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[int, int, int]] = {}
        self._heap: list[tuple[tuple[int, int, int], K]] = []
        self._now = 0

    def use(self, keys: Sequence[K]) -> None:
        """Count one more use of each block."""
        ranks = self._ranks
        heap = self._heap
        now = self._now
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
        """Take a block out and forget its count."""
        return self._ranks.pop(key, None) is not None

    def pop(self) -> K | None:
        """Take out the block with the lowest rank."""
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
    """LFU that, if two blocks are equally frequent, evicts the one deeper in its request first.

    After LengthAwareCache in arXiv 2407.00079, Table 1: like LFU, but blocks that occur later in
    requests are evicted first. The paper gives no formula; this one is ours.
    """

    _by_depth = True


EVICTIONS: dict[str, Callable[[], Eviction[Any]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "sieve": Sieve,
    "length_aware": LengthAware,
}
"""The orders by name, as in the setting `eviction`."""
