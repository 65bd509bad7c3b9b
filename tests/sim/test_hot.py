"""A hot prefix in the simulator: copies relieve its holder, and cost what they move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moonserve.core.schedule.view import Promised
from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.segments import key_of
from moonserve.sim.synthesize import Shape, synthesize

SHAPE = Shape(hot_share=0.6, turns=1.0, sigma=0.5, output_tokens=20)
BLOCK_BYTES = 512 * 327_680


def served(policy: str, **more: Any) -> Simulation:
    """300 requests, of which six in ten begin with the same 8,192 tokens, on 4 + 4 instances."""
    values = {"policy": policy, "split": "4+4", "one_copy": True, **more}
    setup = setup_of(values)
    sim = Simulation(synthesize(1, 300, 6.0, SHAPE), setup, keep_events=True)
    assert sim.run()
    assert sim.conductor.promised() == Promised(0, 0, 0, 0)
    assert len(sim.conductor.hot) == sim.conductor.hot.bytes_under_way == 0
    return sim


@pytest.mark.parametrize("policy", ["llmd_scorers", "least_loaded"])
def test_copies_relieve_the_holder(policy: str) -> None:
    """Who follows the cache no longer waits for one; who does not finds it wherever it goes."""
    without, spread = (
        measure(served(policy, spread_bytes=most), 0.0).summary for most in (0, 8 << 30)
    )
    assert without["spread_copies"] == without["spread_bytes"] == 0
    assert 1 <= spread["spread_copies"] <= 6
    assert spread["ttft_mean_s"] < 0.8 * without["ttft_mean_s"]
    if policy == "least_loaded":
        assert spread["hit_rate_tokens"] > without["hit_rate_tokens"] + 0.1
    else:
        assert spread["imbalance"] < without["imbalance"]


def test_copies_cross_the_links() -> None:
    """What they bring is whole blocks, and is among the bytes that moved."""
    sim = served("least_loaded")
    found = measure(sim, 0.0).summary
    assert found["spread_bytes"] % BLOCK_BYTES == 0
    assert found["spread_bytes"] >= 3 * 8_192 * 327_680, "to three of four"
    assert found["transfer_bytes"] > found["spread_bytes"]
    assert sim.events is not None
    ordered = [event for event in sim.events if event.what == "spread"]
    assert len(ordered) == sim.conductor.hot.done["started"]
    assert all(one.spread is None or one.spread.request == one.id for one in sim.served)


def test_no_more_than_the_bound_is_under_way() -> None:
    """A copy is within `spread_bytes`, from the head of what is lacking on."""
    sim = served("least_loaded", spread_bytes=10 * BLOCK_BYTES)
    orders = [one.spread for one in sim.served if one.spread is not None]
    assert orders
    assert all(len(order.keys) - order.first <= 10 for order in orders)


def test_a_policy_that_copies_what_it_fetches_needs_hardly_any() -> None:
    """Algorithm 1 keeps what it fetched, also where the store has one copy of the rest."""
    sim = served("kvcache_centric")
    assert sim.carrier.copied_blocks >= 3 * 16
    assert sim.conductor.hot.done["started"] <= 1
    long = [row.blocks for row in sim.trace.rows if len(row.blocks) > 16]
    [(hot, _)] = Counter(blocks[15] for blocks in long).most_common(1)
    assert sum(key_of(hot) in cache for cache in sim.segments._caches.values()) == 4


def test_the_short_head_of_all_requests_is_copied_nowhere() -> None:
    """One block under every session, and nothing else shared: not followed."""
    shape = Shape(hot_share=1.0, hot_tokens=512, turns=1.0, sigma=0.3, user_tokens=8_000)
    for policy in ("least_loaded", "llmd_scorers"):
        setup = setup_of({"policy": policy, "split": "4+4", "one_copy": True})
        sim = Simulation(synthesize(2, 200, 4.0, shape), setup)
        sim.run()
        assert sim.conductor.hot.done["started"] == 0
        assert sim.conductor.hot.skipped["short"]
