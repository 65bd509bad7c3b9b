"""Puts under way: tickets, their extents and deadlines.

For core.store.master and core.store.owners. A put ends by its owner's word, by its deadline, or
with a segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.words import Found, Held, Key, PutOptions, Replica
from moonserve.core.units import Bytes, Micros, SegmentId


@dataclass(slots=True)
class Put:
    """One object being written by `owner` (None: a client without a segment)."""

    key: Key
    parent: Key | None
    size: Bytes
    owner: SegmentId | None
    shelf: Shelf
    offset: Bytes
    deadline_us: Micros
    options: PutOptions


class Puts:
    """The pending puts by ticket id. Their extents are taken in the stock before."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._puts: dict[int, Put] = {}

    def __len__(self) -> int:
        return len(self._puts)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._puts

    def oldest(self) -> dict[Key, int]:
        """The first ticket of each key that is being put."""
        tickets: dict[Key, int] = {}
        for id, put in self._puts.items():
            tickets[put.key] = min(id, tickets.get(put.key, id))
        return tickets

    def add(self, ticket: int, put: Put) -> None:
        """A put begins."""
        self._puts[ticket] = put

    def claimed(self, shelf: Shelf, held: Held, deadline_us: Micros) -> None:
        """A put under way that an earlier master allowed, its extent reserved."""
        put = Put(
            held.key,
            held.parent,
            held.size,
            None,
            shelf,
            held.offset,
            deadline_us,
            held.options,
        )
        self._puts[held.id] = put

    def end(self, ticket: int, checksum: int) -> Object | None:
        """The bytes are written: the object that there is now, by this put or by another that ended
        first. It is in no order of eviction until used. None: the ticket is stale.
        """
        put = self._puts.pop(ticket, None)
        if put is None:
            return None
        stock, shelf = self._stock, put.shelf
        existing = stock.objects.get(put.key)
        if existing is not None:
            stock.give(shelf, put.offset, put.size, put.options.tenant)
            return existing
        replica = Replica(shelf.name, put.offset)
        found = Found(put.key, put.size, checksum, ticket, (replica,))
        return stock.create(found, put.parent, put.options, shelf, ticket)

    def abort(self, tickets: Iterable[int]) -> None:
        """Give up puts; stale tickets are no error."""
        for ticket in tickets:
            put = self._puts.pop(ticket, None)
            if put is not None:
                self._stock.give(put.shelf, put.offset, put.size, put.options.tenant)

    def abort_overdue(self, now_us: Micros) -> None:
        """Give up puts whose deadline has come."""
        self.abort([id for id, put in self._puts.items() if put.deadline_us <= now_us])

    def abort_of(self, segment: SegmentId) -> None:
        """Give up puts onto a segment that goes, and those of its owner elsewhere."""
        puts = self._puts.items()
        self.abort([id for id, put in puts if segment in (put.owner, put.shelf.name)])
