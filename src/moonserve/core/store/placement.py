"""Room: where something new goes, and what is evicted for it.

For core.store.master and core.store.copies. What is held (leased, pinned, being copied) is never
evicted.
"""

from __future__ import annotations

from moonserve.core.store.catalog import Stock
from moonserve.core.store.extents import aligned
from moonserve.core.store.ledger import Shelf
from moonserve.core.units import Bytes


class Room:
    """Allocation and eviction over the shelves of one stock."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.evicted = 0
        """Replicas evicted since the start."""

    def place(self, first: Shelf | None, size: Bytes, tenant: str) -> tuple[Shelf, Bytes] | None:
        """An extent on `first` if there is room, else on the segment in memory with most of it.

        Else in place of what `first` evicts, else of what another does. None: nowhere.
        """
        stock, need = self._stock, aligned(size)
        if first is not None:
            if first.draining:
                first = None
            elif (offset := stock.take(first, size, tenant)) is not None:
                return first, offset
        others = [it for it in stock.usable("dram") if it is not first]
        roomy = [it for it in others if it.extents.free_bytes >= need]
        roomy.sort(key=_free_bytes, reverse=True)
        for shelf in roomy:
            if (offset := stock.take(shelf, size, tenant)) is not None:
                return shelf, offset
        if first is not None and (offset := self._evict_for(first, size, tenant)) is not None:
            return first, offset
        others.sort(key=_free_bytes, reverse=True)
        for shelf in others:
            if (offset := self._evict_for(shelf, size, tenant)) is not None:
                return shelf, offset
        return None

    def largest(self, first: Shelf | None) -> Bytes:
        """The most bytes that one object may have, were all else evicted."""
        usable = [*self._stock.usable("dram")]
        if first is not None and not first.draining:
            usable.append(first)
        return max((it.extents.capacity_bytes for it in usable), default=0)

    def take(self, shelf: Shelf, size: Bytes, tenant: str) -> Bytes | None:
        """An extent on this shelf, evicting what must go for it; None: that would not do."""
        offset = self._stock.take(shelf, size, tenant)
        return self._evict_for(shelf, size, tenant) if offset is None else offset

    def _evict_for(self, shelf: Shelf, size: Bytes, tenant: str) -> Bytes | None:
        """Evict until `size` fits.

        Among held objects of other sizes all may be evicted in vain; with blocks of one size, the
        first victim's extent fits.
        """
        if shelf.extents.free_bytes + shelf.evictable_bytes < aligned(size):
            return None
        while self._evict(shelf):
            if (offset := self._stock.take(shelf, size, tenant)) is not None:
                return offset
        return None

    def _evict(self, shelf: Shelf) -> bool:
        """Evict the next replica. False: there was none."""
        victim = self._stock.next_victim(shelf)
        if victim is None:
            return False
        self._stock.drop(victim, shelf)
        self.evicted += 1
        return True

    def fits_quota(self, tenant: str, size: Bytes, evict: bool = True) -> bool:
        """Whether the tenant may have `size` bytes more; its own oldest objects go for it."""
        stock, need = self._stock, aligned(size)
        quota = stock.terms.quotas.get(tenant)
        if quota is None:
            return True
        if need > quota or not evict:
            return stock.tenants.get(tenant, 0) + need <= quota
        while stock.tenants.get(tenant, 0) + need > quota:
            key = stock.own[tenant].pop(stock.is_free)
            if key is None:
                return False
            victim = stock.objects[key]
            self.evicted += len(victim.found.replicas)
            stock.remove(victim)
        return True


def _free_bytes(shelf: Shelf) -> Bytes:
    return shelf.extents.free_bytes
