"""Eviction orders, each against the plainest model of its rule, and the cache that uses them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.store.evict import EVICTIONS, Lru, Sieve
from moonserve.core.units import BlockKey
from moonserve.sim.cache import Cache


class Model:
    """Every use of every block held, as (time, depth): enough to state four of the rules."""

    def __init__(self, rank: Callable[[list[tuple[int, int]]], tuple[int, ...]]) -> None:
        self.uses: dict[int, list[tuple[int, int]]] = {}
        self.rank = rank
        self.now = 0

    def use(self, keys: tuple[int, ...]) -> None:
        for depth in reversed(range(len(keys))):
            self.now += 1
            self.uses.setdefault(keys[depth], []).append((self.now, depth))

    def discard(self, key: int) -> bool:
        return self.uses.pop(key, None) is not None

    def pop(self) -> int | None:
        victim = min(self.uses, key=lambda key: self.rank(self.uses[key]), default=None)
        if victim is not None:
            del self.uses[victim]
        return victim


RULES = {
    "lru": lambda uses: uses[-1],
    "fifo": lambda uses: uses[0],
    "lfu": lambda uses: (len(uses), uses[-1][0]),
    "length_aware": lambda uses: (len(uses), -uses[-1][1], uses[-1][0]),
}


@pytest.mark.parametrize("name", RULES)
def test_orders_pop_what_their_rule_names(name: str) -> None:
    """Under any uses, discards and evictions, the next to go is the one the rule names."""
    rng = Random(7)
    order, model = EVICTIONS[name](), Model(RULES[name])
    for _ in range(4_000):
        choice = rng.random()
        if choice < 0.5:
            keys = tuple(rng.sample(range(60), rng.randint(1, 6)))
            order.use(keys)
            model.use(keys)
        elif choice < 0.7:
            key = rng.randrange(60)
            assert (key in order) == (key in model.uses)
            assert order.discard(key) == model.discard(key)
        else:
            assert order.pop() == model.pop()
        assert len(order) == len(model.uses)
    assert model.now > 5_000


def test_sieve_is_the_papers_algorithm() -> None:
    """With one block a request, SIEVE keeps what the paper's queue, marks and hand would keep."""
    rng = Random(7)
    capacity = 20
    cache = Cache(capacity, "sieve")
    queue: list[int] = []  # the tail, where the hand starts, first
    marked: dict[int, bool] = {}
    hand = wraps = 0
    for _ in range(8_000):
        key = min(int(rng.expovariate(0.03)), 150)
        assert (key in cache) == (key in marked)
        cache.insert((key,))
        if key in marked:
            marked[key] = True
            continue
        if len(queue) == capacity:
            while True:
                if hand == len(queue):
                    hand = 0
                    wraps += 1
                if not marked[queue[hand]]:
                    break
                marked[queue[hand]] = False
                hand += 1
            del marked[queue.pop(hand)]
        queue.append(key)
        marked[key] = False
    assert wraps > 10


def test_sieve_goes_round_past_new_blocks() -> None:
    """A request's own new blocks are no cheaper prey than old blocks whose marks are used up."""
    order: Sieve[int] = Sieve()
    order.use((1, 2))
    order.use((1, 2))
    order.use((3, 4))
    assert [order.pop() for _ in range(5)] == [2, 1, 4, 3, None]


@pytest.mark.parametrize("name", EVICTIONS)
def test_discarded_blocks_are_never_named(name: str) -> None:
    """A leased block leaves the order; discarding an unknown one is no error."""
    order = EVICTIONS[name]()
    order.use((1, 2))
    order.use((1, 2))
    assert order.discard(1)
    assert not order.discard(1)
    assert (1 in order, 2 in order, len(order)) == (False, True, 1)
    assert [order.pop(), order.pop()] == [2, None]


def test_orders_take_block_keys() -> None:
    """The store's orders hold keys of bytes; of a chain, the tail goes first."""
    order: Lru[BlockKey] = Lru()
    order.use((BlockKey(b"a"), BlockKey(b"b")))
    assert [order.pop(), order.pop()] == [b"b", b"a"]


@pytest.mark.parametrize("name", EVICTIONS)
def test_caches_hold_no_more_than_they_may(name: str) -> None:
    """After every insert a cache is within its capacity, and tells exactly what left."""
    rng = Random(7)
    cache = Cache(40, name)
    held: set[int] = set()
    for _ in range(500):
        start = rng.randrange(100)
        keys = range(start, start + rng.randint(1, 50))
        evicted = cache.insert(keys)
        assert len(set(evicted)) == len(evicted)
        held = (held | set(keys)) - set(evicted)
        assert held == {key for key in range(150) if key in cache}
        assert len(cache) == len(held) <= 40
        run = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        assert cache.run(keys) == run


def test_touching_uses_the_leading_run_only() -> None:
    """A touch brings nothing in, and does not use what lies behind a hole."""
    cache = Cache(4)
    cache.insert((4,))
    cache.insert((1, 2))
    cache.insert((9,))
    cache.touch((1, 2, 3, 4))
    assert 3 not in cache
    assert cache.insert((5, 6, 7)) == [4, 9, 2]


def test_caches_refuse_what_they_cannot_be() -> None:
    """An unknown policy or a negative capacity is told by name."""
    with pytest.raises(ConfigError, match="eviction: 'lifo' must be one of lru, lfu, fifo"):
        Cache(1, "lifo")
    with pytest.raises(ConfigError, match="cache_blocks: -1"):
        Cache(-1)
