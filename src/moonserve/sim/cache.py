"""One cache of KV blocks in the simulator: a node's, or a whole pool's.

The simulator's nodes and sim.stats use it. It counts blocks, not bytes, and knows no time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from moonserve.core.errors import ConfigError
from moonserve.core.store.evict import EVICTIONS, Eviction

K = TypeVar("K", bound=Hashable)


class Cache(Generic[K]):
    """Up to `capacity` blocks (None: any number), evicted in the order that `policy` names.

    A request's blocks are given in their order. All of them enter, then the surplus is evicted. A
    request that is longer than the cache leaves its leading blocks.
    """

    def __init__(self, capacity: int | None, policy: str = "lru", low: int | None = None) -> None:
        """low: when it is over its capacity, so many stay; None: as many as it can hold."""
        if capacity is not None and capacity < 0:
            raise ConfigError(f"{capacity} must be 0 or more blocks", "cache_blocks")
        if policy not in EVICTIONS:
            raise ConfigError(f"{policy!r} must be one of {', '.join(EVICTIONS)}", "eviction")
        self.capacity = capacity
        self._low = capacity if low is None else low
        self._order: Eviction[K] = EVICTIONS[policy]()

    def __contains__(self, key: K) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def run(self, keys: Sequence[K]) -> int:
        """The length of the longest leading run of `keys` that the cache holds; marks nothing as
        used."""
        held = self._order
        for length, key in enumerate(keys):
            if key not in held:
                return length
        return len(keys)

    def touch(self, keys: Sequence[K]) -> None:
        """Use the leading run of `keys` that the cache holds, the deepest first."""
        self._order.use(keys[: self.run(keys)])

    def insert(self, keys: Sequence[K]) -> list[K]:
        """Hold `keys`, and mark those that it held as used. Returns what was evicted, perhaps some
        of `keys`."""
        order = self._order
        order.use(keys)
        if self.capacity is None or self._low is None or len(order) <= self.capacity:
            return []
        evicted = []
        for _ in range(len(order) - self._low):
            key = order.pop()
            assert key is not None
            evicted.append(key)
        return evicted
