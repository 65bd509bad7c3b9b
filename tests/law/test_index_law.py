"""PrefixIndex against a naive model: a count per (holder, epoch, tier, key), walked key by key."""

from collections import Counter
from collections.abc import Hashable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.core.kv.facts import Tier
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.units import SegmentId
from tests.support.native import attributes

TIERS: list[Tier] = ["device", "dram", "disk"]
KEYS = range(28)
PARENT = {k: None if k in (0, 20) else k - 1 if k % 6 else k // 2 for k in KEYS}
"""Two trees; runs of six, forks of up to three."""


def chain_to(key: int | None) -> list[Hashable]:
    """The chain that ends with `key`."""
    return [] if key is None else [*chain_to(PARENT[key]), key]


CHAINS = [chain_to(key) for key in KEYS]
ASKED = [c for c in CHAINS if c[-1] not in PARENT.values()] + [CHAINS[9], CHAINS[0]]
"""To every leaf, and to two inner keys."""
pieces = st.tuples(st.sampled_from(CHAINS), st.integers(0, 27), st.integers(1, 28)).map(
    lambda it: (it[0], it[1] % len(it[0]), it[1] % len(it[0]) + it[2])
)
numbers = st.integers(0, 69)
tiers = st.sampled_from(TIERS)
ages = st.sampled_from([0, 0, 0, 0, 0, 1])


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.counts: dict[SegmentId, Counter[tuple[Tier, Hashable]]] = {}
        self.epochs: dict[SegmentId, int] = {}

    @initialize(holders=st.sampled_from([1, 2, 2, 3, 5, 70]), spread=st.booleans())
    def begin(self, holders: int, spread: bool) -> None:
        """So many holders; all with one chain, or with nothing."""
        self.names = [SegmentId(f"h{n}") for n in range(holders)]
        for n, name in enumerate(self.names):
            self.counts[name] = Counter()
            self.epochs[name] = 5
            self.index.dropped(name, 4)
            if spread:
                self.store((CHAINS[19], 0, 1 + n % 7), n, "device", 0)

    def told(self, number: int, age: int) -> tuple[SegmentId, int, bool]:
        """A holder, the epoch of the report, and whether that epoch is not over."""
        name = self.names[number % len(self.names)]
        return name, self.epochs[name] - age, not age

    @rule(piece=pieces, number=numbers, tier=tiers, age=ages)
    def store(
        self, piece: tuple[Sequence[Hashable], int, int], number: int, tier: Tier, age: int
    ) -> None:
        chain, start, end = piece
        name, epoch, counts = self.told(number, age)
        keys = chain[start:end]
        self.index.stored(name, keys, chain[start - 1] if start else None, tier, epoch)
        if counts:
            self.counts[name].update((tier, key) for key in keys)

    @rule(
        piece=pieces,
        number=numbers,
        tier=tiers,
        age=ages,
        order=st.sampled_from([1, -1, 2]),
    )
    def remove(
        self,
        piece: tuple[Sequence[Hashable], int, int],
        number: int,
        tier: Tier,
        age: int,
        order: int,
    ) -> None:
        """Head first, tail first, or every other one."""
        chain, start, end = piece
        name, epoch, counts = self.told(number, age)
        keys = chain[start:end][::order]
        self.index.removed(name, keys, tier, epoch)
        if counts:
            self.counts[name] -= Counter((tier, key) for key in keys)

    @rule(number=numbers, tier=tiers, age=ages)
    def clear(self, number: int, tier: Tier, age: int) -> None:
        name, epoch, counts = self.told(number, age)
        self.index.cleared(name, tier, epoch)
        if counts:
            self.counts[name] = Counter(
                {at: n for at, n in self.counts[name].items() if at[0] != tier}
            )

    @rule(number=numbers, age=ages)
    def drop(self, number: int, age: int) -> None:
        """It is gone; should it come back, then with a newer epoch."""
        name, epoch, counts = self.told(number, age)
        self.index.dropped(name, epoch)
        if counts:
            self.counts[name].clear()
            self.epochs[name] += 1

    @rule(piece=pieces, number=numbers, how=st.sampled_from(["store", "remove", "clear"]))
    def restart(self, piece: tuple[Sequence[Hashable], int, int], number: int, how: str) -> None:
        """The first report of a newer epoch drops what the older one held."""
        name = self.names[number % len(self.names)]
        self.epochs[name] += 1
        self.counts[name].clear()
        if how == "store":
            self.store(piece, number, "dram", 0)
        elif how == "remove":
            self.remove(piece, number, "dram", 0, 1)
        else:
            self.clear(number, "dram", 0)

    @invariant()
    def matches_are_what_a_walk_finds(self) -> None:
        held = {name: {key for _, key in at} for name, at in self.counts.items()}
        anybody = set().union(*held.values())
        for chain in ASKED:
            match = self.index.match(chain)
            runs = {name: run(chain, keys) for name, keys in held.items()}
            assert match.by_holder == {name: n for name, n in runs.items() if n}
            assert match.pool == run(chain, anybody)
        assert len(self.index) == len(anybody)
        assert self.index.entries == sum(len(keys) for keys in held.values())

    @invariant()
    def tiers_are_told_fastest_first(self) -> None:
        for name, at in list(self.counts.items())[:5]:
            for key in KEYS:
                assert self.index.tiers(key, name) == tuple(t for t in TIERS if (t, key) in at)

    def teardown(self) -> None:
        """When the last copy of everything was removed, nothing is left."""
        for name, at in self.counts.items():
            for (tier, key), count in at.items():
                for _ in range(count):
                    self.index.removed(name, [key], tier, self.epochs[name])
        counts = ("max", "late", "evicted", "refused")
        left = {k: v for k, v in attributes(self.index).items() if v and not k.startswith(counts)}
        assert set(left) <= {"_names", "_free", "_gone"}, left
        assert sorted(self.index._free) == list(range(len(self.index._names)))


class FullIndexAgainstModel(IndexAgainstModel):
    """The same reports to an index that has room for some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=17)

    @rule(chain=st.sampled_from(ASKED))
    def place(self, chain: Sequence[Hashable]) -> None:
        """A request is placed by this chain."""
        self.index.touch(chain)

    @invariant()
    def matches_are_what_a_walk_finds(self) -> None:
        """It claims no more than is true, and keeps its bound and its counts."""
        held = {name: {key for _, key in at} for name, at in self.counts.items()}
        for chain in ASKED:
            match = self.index.match(chain)
            for name, n in match.by_holder.items():
                assert n <= run(chain, held[name])
            assert match.pool <= run(chain, set().union(*held.values()))
        assert len(self.index) <= self.index.entries <= 17
        of = {name: sum(len(rows[0]) for rows in self.index.inventory(name)) for name in held}
        holders = self.index._holders.values()
        pieces = {it.name: sum(len(piece.keys) for piece in it.pieces) for it in holders}
        assert {it.name: it.blocks for it in holders} == pieces
        assert sum(pieces.values()) == self.index.entries
        assert all(of[name] >= n for name, n in pieces.items())

    @invariant()
    def tiers_are_told_fastest_first(self) -> None:
        """A tier that it claims is true."""
        for name, at in list(self.counts.items())[:5]:
            for key in KEYS:
                assert set(self.index.tiers(key, name)) <= {t for t in TIERS if (t, key) in at}


def run(chain: Sequence[Hashable], held: set[Hashable]) -> int:
    """The leading run of `chain` in `held`."""
    return next((i for i, key in enumerate(chain) if key not in held), len(chain))


TestIndex = IndexAgainstModel.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestFullIndex = FullIndexAgainstModel.TestCase
TestFullIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
