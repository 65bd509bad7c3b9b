"""The order of eviction over runs against the simplest form of its rule, under every order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.store.catalog import Catalog, Hold
from moonserve.core.store.evict import EVICTIONS
from moonserve.core.store.words import ALIGN, Address, Found, Key, Mount, PutOptions, Replica, Terms
from moonserve.core.units import SegmentId

KEYS = [bytes([n]) for n in range(1, 13)]
PARENTS = {key: KEYS[n - 1 if n % 4 else n // 2] if n else None for n, key in enumerate(KEYS)}
"""A tree of chains of four keys; later ones continue a key in the middle of an earlier one."""
CHAINS = [KEYS[:4], KEYS[4:8], KEYS[8:], KEYS[:3], KEYS[:2], [*KEYS[:3], *KEYS[4:6]]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.sampled_from(CHAINS)),
        st.tuples(st.just("use"), st.lists(st.sampled_from(KEYS), max_size=4, unique=True)),
        st.tuples(st.just("hold"), st.sampled_from(KEYS)),
        st.tuples(st.just("unhold"), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(KEYS)),
        st.tuples(st.just("pin"), st.sampled_from(KEYS)),
        st.tuples(st.just("evict"), st.none()),
    ),
    max_size=60,
)
SEGMENT, OTHER = SegmentId("s"), SegmentId("t")


class Pool:
    """A catalog with one segment, or with a second one that has a replica of every object."""

    def __init__(self, eviction: str, both: bool = False, quota: bool = False) -> None:
        terms = Terms(eviction=eviction, quotas={"": 1 << 30} if quota else {})
        self.catalog = Catalog(terms, 1)
        address = Address("", 0, "", b"")
        for name in (SEGMENT, OTHER) if both else (SEGMENT,):
            self.catalog.mount(Mount(name, 1, 64 * ALIGN, address), 0)
        self.ledger = self.catalog.segments[SEGMENT]
        self.other = self.catalog.segments.get(OTHER)

    def put(self, key: Key, parent: Key | None) -> None:
        """A new object, not used yet."""
        offset = self.catalog.take(self.ledger, 1, "")
        assert offset is not None
        id = self.catalog.new_id()
        found = Found(key, 1, id + 7, id, (Replica(SEGMENT, offset),))
        self.catalog.create(found, parent, PutOptions(), self.ledger, id)
        stored = self.catalog.get(key)
        assert stored is not None
        assert (stored.found, stored.parent) == (found, parent)
        if self.other is not None:
            offset = self.catalog.take(self.other, 1, "")
            assert offset is not None
            self.catalog.add_replica(stored, self.other, offset, self.catalog.new_id())

    def check(self) -> None:
        """Every table says the same."""
        catalog = self.catalog
        for ledger in catalog.segments.values():
            here = [(key, run) for run in ledger.runs for key in run.keys]
            assert ledger.replicas == len(here) == len(dict(here))
            assert all(run in catalog.runs_of(key) for key, run in here)
            assert all(len(run) <= ledger.order.longest for run in ledger.runs)
            free = [key for key, _ in here if key not in catalog.holds]
            assert ledger.evictable_bytes == len(free) * ALIGN
            assert ledger.extents.used_bytes == len(here) * ALIGN
        runs = [run for ledger in catalog.segments.values() for run in ledger.runs]
        for key in catalog.objects:
            assert all(run in runs for run in catalog.runs_of(key))
            stored = catalog.get(key)
            assert stored is not None
            assert stored.parent == PARENTS[key]
            assert stored.found.checksum == stored.found.version + 7
        offsets = [run.offset(at) for run in self.ledger.runs for at in range(len(run))]
        assert len(set(offsets)) == len(offsets)


class Model:
    """The keys that are here, those that are held, and when each was used."""

    def __init__(self) -> None:
        self.here: set[Key] = set()
        self.held: set[Key] = set()
        self.pinned: set[Key] = set()

    def is_free(self, key: Key) -> bool:
        return key in self.here and key not in self.held and key not in self.pinned

    def free_below(self, key: Key) -> list[Key]:
        """The free keys that continue this one without a gap."""
        below = [it for it in KEYS if PARENTS[it] == key and it != key and self.is_free(it)]
        return below + [deep for it in below for deep in self.free_below(it)]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_the_tail_goes_first(eviction: str, both: bool, steps: list[tuple[str, object]]) -> None:
    """A victim is free, and no free key continues it; no free key is ever forgotten."""
    pool, model = Pool(eviction, both), Model()
    catalog = pool.catalog
    holds: dict[Key, Hold] = {}

    def leave(key: Key) -> None:
        catalog.remove(key)
        for keys in (model.here, model.held, model.pinned):
            keys.discard(key)

    def evict() -> Key | None:
        victim = catalog.next_victim(pool.ledger)
        if victim is not None:
            assert model.is_free(victim)
            assert not model.free_below(victim)
            leave(victim)
        return victim

    for what, about in steps:
        if what == "use":
            assert isinstance(about, list)
            for key in about:
                if key not in model.here:
                    model.here.add(key)
                    pool.put(key, PARENTS[key])
            catalog.use(about)
        elif what == "evict":
            free = [it for it in KEYS if model.is_free(it)]
            assert (evict() is None) == (not free)
        elif isinstance(about, bytes) and about in model.here:
            if what == "hold" and about not in model.held:
                model.held.add(about)
                holds[about] = catalog.hold(about)
            elif what == "unhold" and about in model.held:
                model.held.discard(about)
                catalog.unhold(about, holds[about])
                catalog.enter(about)
            elif what == "pin":
                model.pinned ^= {about}
                catalog.pin(about, about in model.pinned)
            elif what == "remove":
                leave(about)
        pool.check()
    for key in sorted(model.held):
        catalog.unhold(key, holds[key])
        catalog.enter(key)
    for key in sorted(model.pinned):
        catalog.pin(key, False)
    model.held.clear()
    model.pinned.clear()
    while evict() is not None:
        pool.check()
    assert not model.here
    assert not pool.ledger.order._children
    assert not catalog.objects
    assert not catalog.others


@pytest.mark.parametrize("eviction", EVICTIONS)
@settings(max_examples=60, deadline=None)
@given(uses=st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)))
def test_without_chains_the_order_alone_decides(eviction: str, uses: list[list[Key]]) -> None:
    """Keys without chains are evicted in the order's own order."""
    pool, plain = Pool(eviction), EVICTIONS[eviction]()
    for keys in uses:
        for key in keys:
            if key not in pool.catalog.objects:
                pool.put(key, None)
        pool.catalog.use(keys)
        plain.use(keys)
    while (victim := pool.catalog.next_victim(pool.ledger)) is not None:
        assert victim == plain.pop()
        pool.catalog.drop(victim, SEGMENT)
    assert plain.pop() is None


@settings(max_examples=200, deadline=None)
@given(uses=st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(1, 5), st.booleans())))
def test_runs_are_evicted_as_single_blocks_would_be(
    uses: list[tuple[list[Key], int, bool]],
) -> None:
    """Requests use leading blocks of chains; LRU over runs is LRU over these blocks."""
    pool, plain = Pool("lru"), EVICTIONS["lru"]()
    longest = 0

    def evict() -> None:
        victim = pool.catalog.next_victim(pool.ledger)
        assert victim == plain.pop()
        if victim is not None:
            pool.catalog.drop(victim, SEGMENT)

    for chain, stop, evicts in uses:
        keys = whole(chain)[: stop + len(chain) - 1]
        for key in keys:
            if key not in pool.catalog.objects:
                pool.put(key, PARENTS[key])
        pool.catalog.use(keys)
        plain.use(keys)
        longest = max([longest, *map(len, pool.ledger.runs)])
        if evicts:
            evict()
    for _ in range(len(pool.catalog.objects) + 1):
        evict()
    assert longest > 1 or all(len(whole(chain)) < 2 for chain, *_ in uses)


def whole(chain: list[Key]) -> list[Key]:
    """The chain with all keys before it."""
    head = PARENTS[chain[0]]
    before: list[Key] = []
    while head is not None:
        before.insert(0, head)
        head = PARENTS[head]
    return [*before, *chain]
