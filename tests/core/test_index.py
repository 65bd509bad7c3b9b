"""The prefix index: its bounds, and what the law test does not ask."""

from moonserve.core.kv.index import Match, PrefixIndex
from moonserve.core.units import SegmentId
from tests.support.native import attributes

A, B = SegmentId("a"), SegmentId("b")
LONG = list(range(1_000))


def test_runs_of_many_holders_along_a_long_chain() -> None:
    """Change points anywhere are found, and the pool is the longest run of all."""
    index = PrefixIndex()
    ends = {SegmentId(f"h{n}"): (n * 37) % 1_000 for n in range(100)}
    for name, end in ends.items():
        index.stored(name, LONG[:end], None)
    match = index.match([*LONG, "unknown"])
    assert match.by_holder == {name: end for name, end in ends.items() if end}
    assert match.pool == max(ends.values())


def test_the_pool_goes_on_where_each_holder_has_a_hole() -> None:
    """Two holders with every other block each make a whole pool, and runs of one and of none."""
    index = PrefixIndex()
    for key in LONG:
        index.stored((A, B)[key % 2], [key], key - 1 if key else None)
    match = index.match(LONG)
    assert (match.pool, match.by_holder) == (1_000, {A: 1})
    index.stored(B, LONG[:500], None)
    match = index.match(LONG)
    assert (match.pool, match.by_holder) == (1_000, {A: 1, B: 500})


def test_a_full_index_evicts_ends_of_chains_of_the_largest_holder() -> None:
    """What a small holder reports has room: the largest one gives it, the deepest blocks first."""
    index = PrefixIndex(max_entries=6)
    index.stored(A, [0, 1, 2, 3, 4, 5], None)
    index.stored(B, [0, 1], None)
    assert (index.entries, index.evicted, index.refused) == (6, 2, 0)
    assert index.match([0, 1, 2, 3, 4, 5]).by_holder == {A: 4, B: 2}
    assert (index.blocks(A), index.blocks(B)) == (4, 2)
    index.removed(A, [5, 4, 3])  # two of them were evicted: no error
    assert (index.entries, index.blocks(A)) == (5, 3)


def test_a_full_index_keeps_what_requests_are_placed_by() -> None:
    """Of chains of one holder, those that were not used for the longest time are evicted first."""
    index = PrefixIndex(max_entries=100)
    chains = [list(range(10 * n, 10 * n + 10)) for n in range(30)]
    for number, chain in enumerate(chains):
        index.stored(A, chain, None)
        index.touch(chains[0])
        assert index.entries <= 100
        assert len(index) == index.entries == index.blocks(A)
        assert index.match(chain).pool == 10, number
    assert index.match(chains[0]).by_holder == {A: 10}
    assert index.match(chains[5]).by_holder == {}
    assert index.evicted == 200


def test_an_index_takes_no_more_than_its_bound_from_one_report() -> None:
    """The rest is refused and counted."""
    index = PrefixIndex(max_entries=4)
    index.stored(A, [100, 101], None)
    index.stored(B, list(range(9)), None)
    assert (index.entries, index.refused) == (4, 5)
    assert index.match(list(range(9))).by_holder == {B: 4}


def test_chains_that_are_no_chains_are_evicted_too() -> None:
    """Keys that name each other as parents end neither a report nor an eviction."""
    index = PrefixIndex(max_entries=2)
    index.stored(A, ["a"], "b")
    index.stored(A, ["b"], "a")
    index.stored(B, ["c", "d"], None)
    assert (index.entries, index.match(["c", "d"]).pool) == (2, 2)


def test_a_match_is_a_snapshot() -> None:
    """What happens to the index after a match does not show in it, even if read later."""
    index = PrefixIndex()
    index.stored(A, LONG, None)
    before = index.match(LONG)
    index.dropped(A, 0)
    index.stored(B, LONG[:10], None)
    assert before.by_holder == {A: 1_000}
    assert index.match(LONG).by_holder == {B: 10}


def test_a_holder_of_nothing_costs_nothing() -> None:
    """Bits of holders that are gone are used again, however many names come and go."""
    index = PrefixIndex()
    for i in range(10_000):
        index.stored(SegmentId(f"s{i}"), [1], None)
        index.removed(SegmentId(f"s{i}"), [1])
    index.stored(A, [1], None)
    assert index._names == (A,)
    assert len(index._gone) <= 4_096


def test_late_facts_are_counted() -> None:
    """Facts of an epoch that is over change nothing, and are counted by the block."""
    index = PrefixIndex()
    index.stored(A, [0], None, epoch=2)
    index.stored(A, [0, 1], None, epoch=1)
    index.removed(A, [0], epoch=1)
    index.dropped(A, 1)
    assert index.match([0, 1]).by_holder == {A: 1}
    index.dropped(A, 2)
    index.stored(A, [0], None, epoch=2)
    assert (len(index), index.late) == (0, 4)


def test_parents_that_contradict_leak_nothing() -> None:
    """A key stored with another parent, or as its own parent, leaves no trace after its removal."""
    index = PrefixIndex()
    index.stored(A, [1, 2, 3], None)
    index.stored(B, [3, 2, 1], 9)
    index.stored(B, [7, 7], 7)
    index.removed(A, [2, 1, 3])
    index.removed(B, [1, 7, 3, 2, 7])
    left = {name: it for name, it in attributes(index).items() if it}
    assert set(left) <= {"max_entries", "_free", "_names", "_gone"}


def test_an_empty_chain_matches_nothing() -> None:
    """No keys, no match."""
    assert (PrefixIndex().match([]).pool, PrefixIndex().match([]).by_holder) == (0, {})
    assert Match(3, {A: 3}).by_holder == {A: 3}


def test_an_index_made_of_an_inventory_is_alike() -> None:
    """inventory: holes, tiers, copies counted and epochs come along, in whatever order."""
    index, other = PrefixIndex(), PrefixIndex()
    a, b = SegmentId("a"), SegmentId("b")
    keys = tuple(range(20))
    index.stored(a, keys, None, "dram", 3)
    index.stored(a, keys[5:9], 4, "dram", 3)
    index.stored(a, keys[:2], None, "disk", 3)
    index.stored(b, keys[:12], None, "device", 1)
    index.removed(a, keys[14:16], "dram", 3)
    for holder in (a, b):
        for held, parent, tier, epoch in reversed(index.inventory(holder)):
            other.stored(holder, held, parent, tier, epoch)
    assert index.inventory(SegmentId("c")) == []
    assert other.match(keys).by_holder == index.match(keys).by_holder == {a: 14, b: 12}
    assert other.entries == index.entries
    assert other.tiers(0, a) == ("dram", "disk")
    other.removed(a, keys[5:9], "dram", 3)
    assert other.match(keys).by_holder[a] == 14, "it has another copy"
    other.removed(a, keys[5:9], "dram", 3)
    assert other.match(keys).by_holder[a] == 5
    other.stored(a, keys, None, "dram", 2)
    assert other.match(keys).by_holder[a] == 5, "told of an older start"
