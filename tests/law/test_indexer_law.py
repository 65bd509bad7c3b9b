"""The Indexer API's index against block-by-block counting, for any history."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.kv.facts import TIERS, Tier
from moonserve.core.kv.indexer import (
    BlockSource,
    Key,
    TieredIndex,
    TierHits,
    keyed,
    local_hashes,
    rolling,
)
from moonserve.core.units import SegmentId

SIZE = 2
CHAINS = [
    rolling(local_hashes([*head, *tail], SIZE, 1), 1)
    for head in ([1, 1, 2, 2, 3, 3], [1, 1, 5, 5, 6, 6])
    for tail in ([7, 7, 8, 8], [9, 9, 4, 4])
]
INSTANCES = ("a", "b")
ranks = st.sampled_from([("a", 0), ("a", 1), ("b", 0), ("pool", 0)])
runs = st.tuples(st.sampled_from(range(len(CHAINS))), st.integers(0, 4), st.integers(1, 5))
tiers = st.sampled_from(TIERS)
covers = st.sampled_from([0, 77])


class Law(RuleBasedStateMachine):
    """Streams come and go, store and remove; every answer is what counting blocks gives."""

    def __init__(self) -> None:
        super().__init__()
        self.space = TieredIndex(SIZE, 1)
        self.streams: dict[tuple[str, int], BlockSource] = {}
        self.copies: dict[tuple[str, int], dict[Tier, Counter[Key]]] = {}
        self.started = 0

    @rule(who=ranks)
    def join(self, who: tuple[str, int]) -> None:
        """Again, it is of no effect."""
        if who not in self.streams:
            self.started += 1
            name = SegmentId(f"{who} {self.started}")
            self.streams[who] = BlockSource(name, who[0], who[1], shared=who[0] == "pool")
            self.copies[who] = {tier: Counter() for tier in TIERS}
        self.space.join(self.streams[who])

    @precondition(lambda self: self.streams)
    @rule(who=ranks)
    def leave(self, who: tuple[str, int]) -> None:
        """All that it had goes."""
        if who in self.streams:
            stream = self.streams.pop(who)
            del self.copies[who]
            assert self.space.leave(stream) == bool(self.streams)

    @rule(who=ranks, run=runs, tier=tiers, cover=covers)
    def store(
        self, who: tuple[str, int], run: tuple[int, int, int], tier: Tier, cover: int
    ) -> None:
        """A piece of a chain; of a shared store nothing is on a device."""
        if who in self.streams and (who[0] != "pool" or tier != "device"):
            chain, start, count = run
            keys = [keyed(cover, key) for key in CHAINS[chain]]
            parent = keys[start - 1] if start else None
            self.space.stored(self.streams[who], keys[start : start + count], parent, tier)
            self.copies[who][tier].update(keys[start : start + count])

    @rule(who=ranks, run=runs, tier=tiers, cover=covers)
    def remove(
        self, who: tuple[str, int], run: tuple[int, int, int], tier: Tier, cover: int
    ) -> None:
        """One copy less of each, of what there is."""
        if who in self.streams:
            chain, start, count = run
            keys = [keyed(cover, key) for key in CHAINS[chain][start : start + count]]
            self.space.removed(self.streams[who], keys, tier)
            self.copies[who][tier] -= Counter(keys)

    @rule(who=ranks, tier=tiers)
    def clear(self, who: tuple[str, int], tier: Tier) -> None:
        """That tier is empty."""
        if who in self.streams:
            self.space.cleared(self.streams[who], tier)
            self.copies[who][tier].clear()

    def expected(self, keys: list[Key]) -> dict[str, TierHits]:
        """By looking at every block."""
        found = {}
        for name in INSTANCES:
            ends: dict[int, list[int]] = {}
            for who in self.streams:
                if who[0] != name:
                    continue
                at, ends[who[1]] = 0, []
                for tier in TIERS:
                    holders = [self.copies[who][tier]]
                    if ("pool", 0) in self.copies:
                        holders.append(self.copies["pool", 0][tier])
                    while at < len(keys) and any(keys[at] in held for held in holders):
                        at += 1
                    ends[who[1]].append(at * SIZE)
            if any(end[-1] for end in ends.values()):
                gpu, cpu, disk = (max(end[at] for end in ends.values()) for at in range(3))
                dp = {str(rank): end[0] for rank, end in ends.items()}
                found[name] = TierHits(disk, gpu, dp, cpu, disk)
        return found

    @invariant()
    def answers_are_counts(self) -> None:
        """For every chain, marked and not; and what is held is counted."""
        for chain in CHAINS:
            for cover in (0, 77):
                keys = [keyed(cover, key) for key in chain]
                assert self.space.hits(keys) == self.expected(keys)
        held = sum(len(copies) for tiers in self.copies.values() for copies in tiers.values())
        assert self.space.entries == held
        names = {who[0] for who in self.streams} - {"pool"}
        assert self.space.instances.keys() == names


Law.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLaw = Law.TestCase
