"""Eviction along chains: an order that names a victim, and the chain's tail that goes before it.

For core.store.catalog, one per segment and one per tenant with a quota. A block is of no use
without those before it; so a block that others here continue is evicted only after them, and what
is left of a chain stays a usable prefix, whatever the order says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonserve.core.store.evict import EVICTIONS, Eviction
from moonserve.core.store.words import Key


class Chains:
    """The keys of one place in their order of eviction, and who continues whom there.

    Held keys may be in the order: `pop` sets them aside when it meets them. Whoever ends a hold
    sees to it that the key is in again (`enter` or `use`): then every free key is in the order, or
    doomed. O(1) beside the order's own cost, amortised; `pop` also looks at the held children of
    what it gives.
    """

    def __init__(self, eviction: str) -> None:
        self._order: Eviction[Key] = EVICTIONS[eviction]()
        self._children: dict[Key, dict[Key, None]] = {}
        self._doomed: list[Key] = []
        """A victim of the order and, each after its parent, those that go before it."""

    def add(self, key: Key, parent: Key) -> None:
        """A key that continues another is here now; it is in the order once used."""
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = {key: None}
        else:
            siblings[key] = None

    def remove(self, key: Key, parent: Key | None) -> None:
        """A key is here no more."""
        self._order.discard(key)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]

    def use(self, keys: Sequence[Key]) -> None:
        """The blocks of one request, first block first, are used now; see Eviction.use."""
        self._order.use(keys)

    def enter(self, key: Key) -> None:
        """See that a key is in the order; no use of one that is."""
        if key not in self._order:
            self._order.use((key,))

    def pop(self, free: Callable[[Key], bool]) -> Key | None:
        """Take out the key to evict next, of those here that are `free`; None: there is none.

        Whoever does not evict it holds it, or puts it back by `use`.
        """
        doomed, order = self._doomed, self._order
        while True:
            while doomed:
                key = doomed[-1]
                if key in order or not free(key):  # used since, held or gone
                    doomed.pop()
                    continue
                for child in self._children.get(key, ()):
                    if free(child) and order.discard(child):
                        doomed.append(child)
                        break
                else:
                    return doomed.pop()
            victim = order.pop()
            if victim is None:
                return None
            doomed.append(victim)
