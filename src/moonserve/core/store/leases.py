"""Leases: which reader keeps which objects, until when, and which names are dead.

For core.store.master. It knows names and times; what a lease keeps is kept by core.store.catalog.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from moonserve.core.store.catalog import Object
from moonserve.core.store.words import Key
from moonserve.core.units import LeaseId, Micros

_MAX_DEAD = 65_536


@dataclass(slots=True)
class _Lease:
    expires_us: Micros
    held: dict[Key, Object] = field(default_factory=dict)
    """In the order taken, some gone since. Grows only by what its holder asks for."""


class Leases:
    """Leases by name. A released name is dead for a lease's time to live, or until too many are."""

    def __init__(self, ttl_us: Micros) -> None:
        self._ttl_us = ttl_us
        self._leases: dict[LeaseId, _Lease] = {}
        self._dead: OrderedDict[LeaseId, Micros] = OrderedDict()
        self._now_us: Micros = 0

    def __len__(self) -> int:
        return len(self._leases)

    def names(self) -> list[LeaseId]:
        """The leases that hold something."""
        return list(self._leases)

    def take(self, now_us: Micros, lease: LeaseId) -> dict[Key, Object] | None:
        """The record of what it holds, to be added to; it lasts anew. None: the lease is dead."""
        if lease in self._dead:
            return None
        record = self._leases.get(lease)
        if record is None:
            record = self._leases[lease] = _Lease(0)
        record.expires_us = now_us + self._ttl_us
        return record.held

    def release(self, lease: LeaseId) -> dict[Key, Object]:
        """End a lease, dead from now on; what it held, nothing if it is unknown."""
        self._dead[lease] = self._now_us  # the last reap is near enough to now
        self._dead.move_to_end(lease)
        if len(self._dead) > _MAX_DEAD:
            self._dead.popitem(last=False)
        return self._end(lease)

    def reap(self, now_us: Micros) -> list[dict[Key, Object]]:
        """End what ran out, but not as dead: a holder may be slow and use it again. What it held.

        Dead names that are old enough are forgotten.
        """
        self._now_us = now_us
        forget_us = now_us - self._ttl_us
        while self._dead and next(iter(self._dead.values())) <= forget_us:
            self._dead.popitem(last=False)
        old = [name for name, lease in self._leases.items() if lease.expires_us <= now_us]
        return [self._end(name) for name in old]

    def _end(self, lease: LeaseId) -> dict[Key, Object]:
        record = self._leases.pop(lease, None)
        return {} if record is None else record.held
