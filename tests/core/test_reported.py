"""The ledger of a pool whose blocks only workers report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.inferred import Reported
from moonserve.core.units import BlockKey, SegmentId

POOL = SegmentId("pool")
LATER_US = 10_000_000
CHAIN = [BlockKey(bytes([n])) for n in range(8)]


def test_a_block_is_told_once() -> None:
    """Only runs of new blocks become facts, each with the key before it."""
    ledger = Reported(POOL)
    assert ledger.stored(0, CHAIN[2:4], CHAIN[1]) == [
        BlocksStored(POOL, (CHAIN[2], CHAIN[3]), CHAIN[1], "dram", 0)
    ]
    assert ledger.stored(0, CHAIN[:6], None) == [
        BlocksStored(POOL, (CHAIN[0], CHAIN[1]), None, "dram", 0),
        BlocksStored(POOL, (CHAIN[4], CHAIN[5]), CHAIN[3], "dram", 0),
    ]
    assert ledger.stored(0, CHAIN[:6], None) == []


def test_a_missed_block_is_removed_once() -> None:
    """A missed block is removed if it was reported; otherwise there is no fact."""
    ledger = Reported(POOL)
    ledger.stored(0, CHAIN[:2], None)
    assert ledger.removed(LATER_US, CHAIN[1:3]) == [BlocksRemoved(POOL, (CHAIN[1],), "dram", 0)]
    assert ledger.removed(LATER_US, CHAIN[1:3]) == []


def test_a_miss_that_crossed_a_put_is_no_removal() -> None:
    """A worker that waits for a block misses it just before its put: that miss is ignored."""
    ledger = Reported(POOL)
    ledger.stored(0, CHAIN[:1], None)
    assert ledger.removed(LATER_US - 1, CHAIN[:1]) == []
    ledger.stored(LATER_US, CHAIN[:1], None)
    assert ledger.removed(LATER_US + 1, CHAIN[:1]) == []
    assert len(ledger.removed(2 * LATER_US, CHAIN[:1])) == 1


def test_beyond_the_bound_the_least_lately_reported_goes_tail_first() -> None:
    """A full ledger removes what was reported longest ago, a chain's tail before its head."""
    ledger = Reported(POOL, max_blocks=4)
    ledger.stored(0, CHAIN[:3], None)
    ledger.stored(0, CHAIN[:1], None)
    assert ledger.stored(0, CHAIN[5:7], CHAIN[4])[1:] == [
        BlocksRemoved(POOL, (CHAIN[2],), "dram", 0)
    ]
    assert len(ledger) == 4


REPORTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=30
)


@given(REPORTS)
def test_the_index_holds_what_the_ledger_knows(reports: list[tuple[bool, int, int]]) -> None:
    """After any reports, the index has exactly the ledger's blocks, one copy of each."""
    ledger, index = Reported(POOL, max_blocks=5), PrefixIndex()
    for turn, (stored, start, length) in enumerate(reports):
        now_us = turn * LATER_US
        keys = CHAIN[start : start + length]
        parent = CHAIN[start - 1] if start else None
        told = ledger.stored(now_us, keys, parent) if stored else ledger.removed(now_us, keys)
        for event in told:
            if isinstance(event, BlocksStored):
                index.stored(POOL, event.keys, event.parent)
            elif isinstance(event, BlocksRemoved):
                index.removed(POOL, event.keys)
        assert index.entries == len(ledger) <= 5
        held = [key for key in CHAIN if index.tiers(key, POOL)]
        assert held == [key for key in CHAIN if key in ledger._known]
