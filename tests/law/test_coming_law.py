"""Coming against a naive model: a list of promised chains, compared key by key."""

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.kv.index import PendingPrefixes, PromisedRun
from moonserve.core.units import BlockKey, SegmentId

tokens = st.lists(st.integers(0, 1), max_size=9)
holders = st.sampled_from([SegmentId("a"), SegmentId("b"), SegmentId("c")])
steps = st.lists(st.tuples(holders, tokens, st.integers(0, 99)), max_size=30)


def chain(of: Sequence[int]) -> tuple[BlockKey, ...]:
    """Keys that say all that comes before them."""
    return tuple(BlockKey(bytes(of[: at + 1])) for at in range(len(of)))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(steps, st.lists(tokens, min_size=1, max_size=5))
def test_each_holder_has_its_longest_common_prefix(
    told: list[tuple[SegmentId, list[int], int]], asked: list[list[int]]
) -> None:
    """A holder's run is the longest that a chain promised to it has in common; none is absent."""
    coming = PendingPrefixes()
    now: list[tuple[SegmentId, list[int]]] = []
    for holder, of, number in told:
        if now and number < 40:
            gone, old = now.pop(number % len(now))
            coming.remove(gone, chain(old))
        else:
            now.append((holder, of))
            coming.add(holder, chain(of))
        for query in [*asked, of]:
            runs: dict[SegmentId, int] = {}
            for name, promised in now:
                run = common(promised, query)
                runs[name] = max(run, runs.get(name, 0))
            assert coming.match(chain(query)) == {name: run for name, run in runs.items() if run}
        fresh = PendingPrefixes()
        for name, promised in now:
            fresh.add(name, chain(promised))
        assert shape(coming._heads) == shape(fresh._heads)


def shape(runs: dict[BlockKey, PromisedRun]) -> object:
    """All that a tree is, whatever way it came to be."""
    return {
        key: (run.stop, run.keys[: run.stop], run.counts, shape(run.after))
        for key, run in runs.items()
    }
