"""Hot prefixes: what counts as hot, which instance gets a copy, what prevents a copy."""

from __future__ import annotations

import pytest

from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.schedule.facts import Leading, SpreadUpTo
from moonserve.core.schedule.hot import EACH, HALF_LIFE_US, OFF, ON, Heat
from moonserve.core.units import BlockKey, RequestId, SegmentId
from tests.support.hot import BLOCK_BYTES, HEAD, World


def test_an_access_counts_half_after_a_half_life() -> None:
    """The rate falls by itself, and hot ends below a lower bound than it begins at."""
    heat = Heat()
    now_us = 0
    for number in range(1, 20):
        found = heat.touch(HEAD, 10, now_us)
        assert found == ((10, float(number)) if number >= ON else (0, 0.0))
    now_us += HALF_LIFE_US
    assert heat.touch(HEAD, 10, now_us) == (10, 19 / 2 + 1)
    now_us += HALF_LIFE_US
    assert heat.touch(HEAD, 10, now_us) == (10, (19 / 2 + 1) / 2 + 1)
    assert ON > (19 / 2 + 1) / 2 + 1, "it stays hot between the bounds"
    for _ in range(3):
        now_us += HALF_LIFE_US
        found = heat.touch(HEAD, 10, now_us)
    assert found == (0, 0.0)
    assert OFF < ON


def test_what_chains_share_is_counted_together() -> None:
    """A hot head is separated from the tails behind it, wherever they part."""
    heat = Heat()
    for number in range(12):
        chain = (*HEAD, BlockKey(bytes([1, number])), BlockKey(bytes([2, number])))
        hot, count = heat.touch(chain, 12, 0)
    assert (hot, count) == (10, 12.0)
    assert heat.touch(HEAD[:3], 3, 0) == (3, 13.0)
    assert heat.touch(HEAD, 10, 0) == (10, 13.0)


def test_memory_is_bounded() -> None:
    """Beyond its room the least asked for goes, and what is hot stays."""
    heat = Heat(most_blocks=100)
    for _ in range(20):
        heat.touch(HEAD, 10, 0)
    for number in range(1_000):
        heat.touch((BlockKey(number.to_bytes(3, "big")),), 1, 0)
        assert heat.blocks <= 100
    assert heat.touch(HEAD, 10, 0) == (10, 21.0)


def test_relief_goes_to_who_has_least_to_do() -> None:
    """The holder is overloaded: the least loaded of the others gets a copy, with the reason."""
    world = World()
    p1 = next(v for v in world.view.instances.values() if v.info.id == "p1")
    p1.promise_prefill(RequestId("short"), 10**8, 1, 0)
    order = world.until_copied()
    assert (order.source, order.to, order.first, order.keys) == ("p0", "p2", 0, HEAD)
    assert (order.tokens, order.missed, order.target_us) == (40, False, 0)
    assert order.holder_us is not None
    assert order.holder_us > order.mean_us
    assert order.count >= ON
    assert len(world.hot) == 1
    assert world.hot.bytes_under_way == 10 * BLOCK_BYTES


def test_a_few_requests_make_nothing_hot() -> None:
    """Less often than the bound, nothing is copied, whatever the holder has to do."""
    world = World()
    for _ in range(20):
        world.now_us += HALF_LIFE_US
        assert world.ask() == []


def test_holders_without_much_to_do_need_no_relief() -> None:
    """Where all have nothing to do, or all much, nothing is copied."""
    for busy in (0, 4):
        world = World(busy=busy)
        for _ in range(40):
            assert world.ask() == []
        assert world.hot.skipped.keys() == {"even"}


def test_holders_grow_with_the_rate_only() -> None:
    """For each holder there must be so many accesses: a prefix asked for a little has few."""
    world = World()
    order = world.until_copied()
    world.arrives(order)
    for v in world.view.instances.values():
        if v.info.id == order.to:
            v.promise_prefill(RequestId("long"), 10**9, 1, 0)
    second = world.until_copied()
    assert second.count >= EACH * 3
    assert second.to not in ("p0", order.to)


def test_a_universal_first_block_is_never_followed() -> None:
    """A block that heads every prompt is never copied, however often it is used."""
    world = World()
    for number in range(200):
        tail = tuple(BlockKey(bytes([9, number % 250, n])) for n in range(20))
        assert world.ask(keys=(HEAD[0], *tail)) == []
    assert world.hot.skipped["short"]
    assert set(world.hot.skipped) <= {"short", "even"}


def test_whoever_has_it_or_will_is_sent_nothing() -> None:
    """Instances that hold the prefix, or were promised it, are no targets."""
    world = World()
    for name in ("p1", "p2"):
        world.coming.add(SegmentId(name), HEAD)
    world.tell(BlocksStored(SegmentId("p3"), HEAD, None, "dram", 1))
    for v in world.view.instances.values():
        if v.info.role == "prefill" and v.info.id != "p0":
            v.promise_prefill(RequestId("own"), 10**8, 1, 0)
    for _ in range(40):
        assert world.ask() == []


def test_one_copy_at_a_time_for_each_segment() -> None:
    """A segment that gives or takes a copy takes part in no other until it is over."""
    world = World()
    world.until_copied()
    for _ in range(10):
        assert world.ask() == []
    assert world.hot.skipped["busy"]


def test_bytes_under_way_are_bounded() -> None:
    """A copy takes no more than is left, from the head on; where that is too little, it waits."""
    world = World(most=6 * BLOCK_BYTES)
    order = world.until_copied()
    assert order.keys == HEAD[:6]
    world = World(most=1)
    for _ in range(40):
        assert world.ask() == []
    assert world.hot.skipped["busy"]
    world = World(most=0)
    for _ in range(40):
        assert world.ask() == []
    assert not world.hot.skipped


def test_what_was_evicted_is_not_sent_again_at_once() -> None:
    """A segment that lost a copy gets another after a half-life, not before."""
    world = World(busy=1)
    for v in list(world.view.instances.values()):
        if v.info.id in ("p2", "p3"):
            world.view.remove(v.info.id)
    order = world.until_copied()
    world.arrives(order)
    world.tell(BlocksCleared(order.to, "dram", 1))
    for _ in range(20):
        assert world.ask() == []
    assert world.hot.skipped["lately"]
    world.now_us += HALF_LIFE_US
    assert world.until_copied().to == order.to


def test_who_is_chosen_again_without_it_gets_it() -> None:
    """An instance that was placed such a request before, and has not kept the prefix: it is sent
    there, also where nobody has much to do; not the first time, when it may yet keep it."""
    world = World(policy="least_loaded", busy=0)
    for _ in range(20):
        assert world.ask() == []  # on its holder
    assert world.ask(at="p3") == []
    [order] = world.ask(at="p3")
    assert (order.to, order.missed) == ("p3", True)
    world.arrives(order)
    assert world.ask(at="p3") == []


def test_a_transfer_slower_than_computing_is_not_made() -> None:
    """Where loading takes longer than it saves in the uses to be expected, nothing is copied."""
    world = World()
    for v in world.view.instances.values():
        v.cost.load_us = (10**9, 1.0)
    for _ in range(40):
        assert world.ask() == []
    assert world.hot.skipped["slow"]


@pytest.mark.parametrize("how", ["arrives", "cut", "refused", "cleared", "late"])
def test_every_copy_ends(how: str) -> None:
    """Complete, partial, refused, target lost, or without events: the ledger is zero again."""
    world = World()
    order = world.until_copied()
    if how == "arrives":
        world.arrives(order)
    elif how == "cut":
        world.tell(BlocksStored(order.to, order.keys[:4], None, "dram", 1))
        assert world.hot.bytes_under_way == 6 * BLOCK_BYTES
        world.tell(SpreadUpTo(order.number, 4))
    elif how == "refused":
        world.tell(SpreadUpTo(order.number, 0))
    elif how == "cleared":
        world.tell(BlocksCleared(order.to, "dram", 1))
    else:
        world.hot.expire(world.now_us + 60_000_000)
    assert len(world.hot) == world.hot.bytes_under_way == 0
    done = {"arrives": 10, "cut": 4}.get(how, 0)
    assert world.hot.done["bytes"] == done * BLOCK_BYTES
    assert world.hot.done["done" if how == "arrives" else "failed"] == 1
    world.tell(SpreadUpTo(order.number, 0))
    assert world.hot.bytes_under_way == 0


def test_nothing_is_known_of_a_chain_that_nobody_holds() -> None:
    """Only what could be copied is counted: what the pool holds."""
    world = World()
    keys = tuple(BlockKey(bytes([5, n])) for n in range(10))
    for _ in range(40):
        assert world.ask(keys=keys) == []
    assert world.hot._heat.blocks == 0


def test_only_the_leader_has_hot_prefixes_copied() -> None:
    """Without the duty no copy begins; what was asked meanwhile is known when it comes."""
    world = World()
    world.hot.take(Leading(False))
    for _ in range(20):
        assert world.ask() == []
    world.hot.take(Leading(True))
    assert world.ask(), "it was hot already"
    world.hot.take(Leading(False))
    assert len(world.hot) == 1, "what is under way ends by itself"
