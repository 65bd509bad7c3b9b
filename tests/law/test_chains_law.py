"""ChainEviction against the simplest form of its rule, under every order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.store.evict import EVICTIONS, ChainEviction
from moonserve.core.store.words import Key

KEYS = [bytes([n]) for n in range(8)]
PARENTS = {key: KEYS[n // 2] if n else None for n, key in enumerate(KEYS)}
"""A tree: 1 continues 0, 2 and 3 continue 1, and so on."""
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.lists(st.sampled_from(KEYS), max_size=4, unique=True)),
        st.tuples(st.just("hold"), st.sampled_from(KEYS)),
        st.tuples(st.just("unhold"), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("evict"), st.none()),
    ),
    max_size=60,
)


class Model:
    """The keys that are here, and those that are held."""

    def __init__(self) -> None:
        self.here: set[Key] = set()
        self.held: set[Key] = set()

    def is_free(self, key: Key) -> bool:
        return key in self.here and key not in self.held

    def free_below(self, key: Key) -> list[Key]:
        """The free keys that continue this one without a gap."""
        below = [it for it in KEYS if PARENTS[it] == key and it != key and self.is_free(it)]
        return below + [deep for it in below for deep in self.free_below(it)]


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_the_tail_goes_first(eviction: str, steps: list[tuple[str, object]]) -> None:
    """A victim is free, and no free key continues it; no free key is ever forgotten."""
    chains, model = ChainEviction(eviction), Model()

    def leave(key: Key) -> None:
        chains.remove(key, PARENTS[key])
        model.here.discard(key)

    for what, about in steps:
        if what == "use":
            assert isinstance(about, list)
            for key in about:
                if key not in model.here:
                    model.here.add(key)
                    if (parent := PARENTS[key]) is not None:
                        chains.add(key, parent)
            chains.use(about)
        elif what == "evict":
            victim = chains.pop(model.is_free)
            assert (victim is None) == (not [it for it in KEYS if model.is_free(it)])
            if victim is not None:
                assert model.is_free(victim)
                assert not model.free_below(victim)
                leave(victim)
        elif isinstance(about, bytes) and about in model.here:
            if what == "hold":
                model.held.add(about)
            elif what == "unhold":
                model.held.discard(about)
                chains.enter(about)
            else:
                model.held.discard(about)
                leave(about)
    model.held.clear()
    for key in KEYS:
        if key in model.here:
            chains.enter(key)
    while (victim := chains.pop(model.is_free)) is not None:
        leave(victim)
    assert not model.here


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=60, deadline=None)
@given(uses=st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)))
def test_without_chains_the_order_alone_decides(eviction: str, uses: list[list[Key]]) -> None:
    """Keys without chains are evicted in the order's own order."""
    chains, plain = ChainEviction(eviction), EVICTIONS[eviction]()
    here: set[Key] = set()
    for keys in uses:
        chains.use(keys)
        plain.use(keys)
        here.update(keys)
    for _ in range(len(here)):
        victim = chains.pop(here.__contains__)
        assert victim == plain.pop()
        assert victim is not None
        here.discard(victim)
        chains.remove(victim, None)
