"""Equal shares of whatever is limited in number: places, bytes, requests.

The gateway's limiter, its queue of long prompts, the Conductor and the workers use it. It never
refuses anything itself: it counts, and says how far above a limit a client may go.

A client is known by two names, its tenant and its address. A name can be invented (nothing proves a
tenant's name unless API keys are on), and one tenant may have many addresses. So both count, and a
client with an equal share by both names may go further than one with an equal share by one of them.
"""

from __future__ import annotations

from typing import NamedTuple

_RESERVE = 8
"""Each of the two reserves is this part of the limit."""
_LEAST_SHARE = 16
"""A name with at most this part of what is used is below its share, however many names there are:
many invented names must not make the shares of others small."""


class Party(NamedTuple):
    """Whose request it is. `""` as address: it is unknown, and counts as one address."""

    tenant: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """The tenant; without one, each address is a tenant. No name of a tenant has a space."""
        return self.tenant or f"address {self.address}"


class Shares:
    """What is used of one limited thing, by tenant and by address.

    A party without a tenant is a tenant of its own for each address.
    """

    def __init__(self) -> None:
        self.used = 0
        self._tenants: dict[str, int] = {}
        self._nameless: dict[str, int] = {}
        """Of parties without a tenant, by address."""
        self._addresses: dict[str, int] = {}

    def rank(self, party: Party) -> int:
        """How many of the party's two names use less than an equal share: 0, 1 or 2."""
        tenant, address = party
        used, tenants = self.used, len(self._tenants) + len(self._nameless)
        own = self._tenants.get(tenant, 0) if tenant else self._nameless.get(address, 0)
        by_tenant = own * min(tenants, _LEAST_SHARE) < used
        addresses = min(len(self._addresses), _LEAST_SHARE)
        return by_tenant + (self._addresses.get(address, 0) * addresses < used)

    def limit(self, places: int, party: Party) -> int:
        """How much may be used in all when this party takes something, where `places` is the limit.

        Above the limit are two reserves, each 1/8 of it: the first for parties of rank 1 and 2, the
        second for those of rank 2. So one tenant alone may use all places, also by many addresses,
        and so may one address by many names of tenants; a client beside them finds room all the
        same.
        """
        return extended(places, self.rank(party))

    def take(self, party: Party, size: int = 1) -> None:
        """Count `size` more for the party; `give` must follow."""
        tenant, address = party
        self.used += size
        self._addresses[address] = self._addresses.get(address, 0) + size
        if tenant:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + size
        else:
            self._nameless[address] = self._nameless.get(address, 0) + size

    def give(self, party: Party, size: int = 1) -> None:
        """The party gives back what it took."""
        tenant, address = party
        self.used -= size
        _less(self._addresses, address, size)
        if tenant:
            _less(self._tenants, tenant, size)
        else:
            _less(self._nameless, address, size)


def _less(counts: dict[str, int], name: str, size: int) -> None:
    left = counts[name] - size
    if left:
        counts[name] = left
    else:
        del counts[name]


def extended(places: int, rank: int) -> int:
    """The limit `places` for a party of this rank: see `Shares.limit`."""
    return places + rank * (places // _RESERVE)


_MOST_NAMES = 1_024
"""The most names whose received size is kept."""


class Waiting:
    """The order of those that wait for one thing that serves one at a time: a thread, a loop.

    First goes the one whose tenant and address, taken together, have received least since nobody
    waited last. If two have received the same, the one that came first goes first.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Party, int]] = {}
        self._count = 0
        self._given: dict[str, int] = {}

    def add(self, party: Party, size: int) -> int:
        """Let one wait that will receive `size`; returns its ticket."""
        self._count += 1
        self._waiting[self._count] = party, size
        return self._count

    def remove(self, ticket: int) -> None:
        """It waits no more."""
        self._waiting.pop(ticket, None)

    def next(self) -> int | None:
        """Remove the one that goes next, and return its ticket. None: nobody waits."""
        if not self._waiting:
            self._given = {}
            return None
        ticket = min(self._waiting, key=lambda one: self._received(self._waiting[one][0]))
        party, size = self._waiting.pop(ticket)
        if len(self._given) > _MOST_NAMES:
            kept = {name for waiting, _ in self._waiting.values() for name in _names(waiting)}
            self._given = {name: size for name, size in self._given.items() if name in kept}
        for name in _names(party):
            self._given[name] = self._given.get(name, 0) + size
        return ticket

    def _received(self, party: Party) -> int:
        return sum(self._given.get(name, 0) for name in _names(party))


def _names(party: Party) -> tuple[str, str]:
    """The names of its tenant and of its address, which are never the same."""
    return party.name, f"at {party.address}"
