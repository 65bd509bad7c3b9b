"""Placement: where a new object goes, what the master evicts for it, and the puts under way.

core.store.master and core.store.replicas call it. It never evicts a held object: one that is
leased, pinned or being copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonserve.core.store.catalog import Catalog, SegmentLedger
from moonserve.core.store.words import Found, Held, Key, PutOptions, Replica, aligned
from moonserve.core.units import Bytes, Micros, SegmentId


class Placement:
    """Allocation and eviction over the segments of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def place(
        self, first: SegmentLedger | None, size: Bytes, tenant: str
    ) -> tuple[SegmentLedger, Bytes] | None:
        """Take an extent for a new object; None: no segment has room.

        The order of trials: free bytes on `first`; free bytes on the memory segment with most of
        them; eviction on `first`; eviction on another memory segment.
        """
        catalog = self._catalog
        need = aligned(size)
        if first is not None:
            if first.draining:
                first = None
            elif (offset := catalog.take(first, size, tenant)) is not None:
                return first, offset
        others = [it for it in catalog.usable("dram") if it is not first]
        roomy = [it for it in others if it.extents.free_bytes >= need]
        roomy.sort(key=_free_bytes, reverse=True)
        for ledger in roomy:
            if (offset := catalog.take(ledger, size, tenant)) is not None:
                return ledger, offset
        if first is not None and (offset := self._evict_for(first, size, tenant)) is not None:
            return first, offset
        others.sort(key=_free_bytes, reverse=True)
        for ledger in others:
            if (offset := self._evict_for(ledger, size, tenant)) is not None:
                return ledger, offset
        return None

    def largest(self, first: SegmentLedger | None) -> Bytes:
        """Return the largest size of one object that an empty segment could take."""
        usable = [*self._catalog.usable("dram")]
        if first is not None and not first.draining:
            usable.append(first)
        return max((it.extents.capacity_bytes for it in usable), default=0)

    def take(self, ledger: SegmentLedger, size: Bytes, tenant: str) -> Bytes | None:
        """Take an extent on this segment, with eviction if needed; None: that is not enough."""
        offset = self._catalog.take(ledger, size, tenant)
        return self._evict_for(ledger, size, tenant) if offset is None else offset

    def _evict_for(self, ledger: SegmentLedger, size: Bytes, tenant: str) -> Bytes | None:
        """Evict until `size` fits.

        With blocks of one size, the first victim's extent fits. With mixed sizes and held objects
        between them, it may evict everything and still find no hole.
        """
        if ledger.extents.free_bytes + ledger.evictable_bytes < aligned(size):
            return None
        while (victim := self._catalog.next_victim(ledger)) is not None:
            self._catalog.drop(victim, ledger.name)
            self._catalog.evicted += 1
            if (offset := self._catalog.take(ledger, size, tenant)) is not None:
                return offset
        return None

    def fits_quota(self, tenant: str, size: Bytes, evict: bool = True) -> bool:
        """Whether `size` more bytes fit into the tenant's quota.

        With `evict`, the tenant's own oldest objects are evicted to make them fit.
        """
        catalog = self._catalog
        need = aligned(size)
        quota = catalog.terms.quotas.get(tenant)
        if quota is None:
            return True
        if need > quota or not evict:
            return catalog.tenant_bytes.get(tenant, 0) + need <= quota
        while catalog.tenant_bytes.get(tenant, 0) + need > quota:
            run = catalog.tenant_orders[tenant].pop()
            if run is None:
                return False
            catalog.evicted += len(catalog.runs_of(run.keys[-1]))
            catalog.remove(run.keys[-1])
        return True


def _free_bytes(ledger: SegmentLedger) -> Bytes:
    return ledger.extents.free_bytes


@dataclass(slots=True)
class Put:
    """One object being written by `owner` (None: a client without a segment)."""

    key: Key
    parent: Key | None
    size: Bytes
    owner: SegmentId | None
    ledger: SegmentLedger
    offset: Bytes
    deadline_us: Micros
    options: PutOptions


class Puts:
    """The puts under way, by ticket id. Each has an extent, which was taken before.

    A put ends when its client ends or aborts it, at its deadline, or when its segment leaves.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._puts: dict[int, Put] = {}

    def __len__(self) -> int:
        return len(self._puts)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._puts

    def oldest(self) -> dict[Key, int]:
        """Return the lowest ticket id of each key that is being put."""
        tickets: dict[Key, int] = {}
        for id, put in self._puts.items():
            tickets[put.key] = min(id, tickets.get(put.key, id))
        return tickets

    def add(self, ticket: int, put: Put) -> None:
        """A put begins."""
        self._puts[ticket] = put

    def add_claimed(self, ledger: SegmentLedger, held: Held, deadline_us: Micros) -> None:
        """Continue a put that an earlier master allowed. Its extent is reserved already."""
        self._puts[held.id] = Put(
            held.key,
            held.parent,
            held.size,
            None,
            ledger,
            held.offset,
            deadline_us,
            held.options,
        )

    def end(self, ticket: int, checksum: int) -> Key | None:
        """The bytes are written: return the key of the object. None: the ticket is stale.

        If another put of the key ended first, its object exists and this extent is freed. A new
        object enters its orders of eviction when it is used.
        """
        put = self._puts.pop(ticket, None)
        if put is None:
            return None
        catalog = self._catalog
        ledger = put.ledger
        if put.key in catalog.objects:
            catalog.give(ledger, put.offset, put.size, put.options.tenant)
            return put.key
        replica = Replica(ledger.name, put.offset)
        found = Found(put.key, put.size, checksum, ticket, (replica,))
        catalog.create(found, put.parent, put.options, ledger, ticket)
        return put.key

    def abort(self, tickets: Iterable[int]) -> None:
        """Abort puts; stale tickets are no error."""
        for ticket in tickets:
            put = self._puts.pop(ticket, None)
            if put is not None:
                self._catalog.give(put.ledger, put.offset, put.size, put.options.tenant)

    def abort_overdue(self, now_us: Micros) -> None:
        """Abort puts whose deadline has passed."""
        self.abort([id for id, put in self._puts.items() if put.deadline_us <= now_us])

    def abort_of(self, segment: SegmentId) -> None:
        """Abort puts onto a segment that leaves, and its owner's puts onto other segments."""
        puts = self._puts.items()
        self.abort([id for id, put in puts if segment in (put.owner, put.ledger.name)])
