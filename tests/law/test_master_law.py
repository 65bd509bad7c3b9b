"""Master against a naive model that only believes what it was told.

The model knows no allocator and no order of eviction: it holds the set that the events replay to,
the leases and the tickets, and checks every answer against them.
"""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.facts import BlocksCleared, BlocksStored
from moonserve.core.master import Master
from moonserve.core.pool import Address, Exists, Found, Full, Mount, Terms, Ticket
from moonserve.core.segments import aligned
from moonserve.core.units import BlockKey, LeaseId, SegmentId

TERMS = Terms(lease_ttl_us=40, put_ttl_us=30, segment_ttl_us=60)
SEGMENTS = [SegmentId(name) for name in "abc"]
KEYS = [BlockKey(bytes([n]) * 32) for n in range(12)]
LEASES = [LeaseId(name) for name in "xyz"]
CAPACITY = 6 * 64
keys = st.sampled_from(KEYS)
leases = st.sampled_from(LEASES)
segments = st.sampled_from(SEGMENTS)


class MasterAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.master = Master(TERMS, first_id=1)
        self.replayed: dict[BlockKey, SegmentId] = {}
        self.epochs: dict[SegmentId, int] = {}
        self.tickets: dict[int, tuple[BlockKey, int, Ticket]] = {}
        self.spent: list[int] = []
        self.leased: dict[LeaseId, dict[BlockKey, int]] = {}
        self.lease_ends: dict[LeaseId, int] = {}
        self.dead: dict[LeaseId, int] = {}
        self.objects: dict[BlockKey, Found] = {}

    def sync(self, may_lose: set[SegmentId] | None = None) -> None:
        """Replay the events; leased objects may vanish only with the segments named."""
        for event in self.master.drain_events():
            if isinstance(event, BlocksStored):
                assert not set(event.keys) & set(self.replayed)
                self.replayed.update(dict.fromkeys(event.keys, event.segment))
                continue
            if isinstance(event, BlocksCleared):
                gone = [key for key, at in self.replayed.items() if at == event.segment]
            else:
                gone = list(event.keys)
            for key in gone:
                assert self.replayed.pop(key) == event.segment
                version = self.objects.pop(key).version
                held = any(it.get(key) == version for it in self.leased.values())
                assert not held or event.segment in (may_lose or set())
        for key in self.replayed:
            found = self.master.locate(key)
            assert found is not None
            known = self.objects.setdefault(key, found)
            assert known == found, "an object never changes in place"

    def hold(self, lease: LeaseId | None, key: BlockKey) -> None:
        if lease is not None and lease not in self.dead:
            self.leased.setdefault(lease, {})[key] = self.objects[key].version
            self.lease_ends[lease] = self.now + TERMS.lease_ttl_us

    @rule(name=segments, newer=st.booleans())
    def mount(self, name: SegmentId, newer: bool) -> None:
        epoch = self.epochs.get(name, 1) + newer
        lost = {name} if newer else set()
        assert self.master.mount(
            self.now, Mount(name, epoch, CAPACITY, Address("h", 1, "", bytes(16)))
        )
        self.epochs[name] = epoch
        self.sync(lost)

    @rule(name=segments)
    def unmount(self, name: SegmentId) -> None:
        self.master.unmount(name, self.epochs.get(name, 0))
        self.sync({name})

    @rule(name=segments)
    def beat(self, name: SegmentId) -> None:
        mounted = name in self.master.addresses()
        orders = self.master.beat(self.now, name, self.epochs.get(name, 0))
        assert (orders is not None) == mounted

    @precondition(lambda self: self.master.addresses())
    @rule(
        data=st.data(),
        items=st.lists(st.tuples(keys, st.integers(1, 150)), min_size=1, max_size=4),
        lease=st.none() | leases,
    )
    def put_start(
        self, data: st.DataObject, items: list[tuple[BlockKey, int]], lease: LeaseId | None
    ) -> None:
        owner = data.draw(st.sampled_from(sorted(self.master.addresses())))
        before = dict(self.objects)
        outcomes = self.master.put_start(self.now, owner, items, lease)
        for (key, size), outcome in zip(items, outcomes, strict=True):
            match outcome:
                case Exists():
                    assert key in before
                    if lease is not None:
                        self.hold(lease, key)
                case Ticket():
                    assert outcome.id not in self.spent
                    self.spent.append(outcome.id)
                    self.tickets[outcome.id] = (key, size, outcome)
                case Full():
                    pass
        self.sync()

    @precondition(lambda self: self.spent)
    @rule(data=st.data(), lease=st.none() | leases)
    def put_end(self, data: st.DataObject, lease: LeaseId | None) -> None:
        ticket = data.draw(st.sampled_from(self.spent))
        pending = self.master.stats().pending_puts
        (version,) = self.master.put_end(self.now, [(ticket, ticket)], lease)
        done = version is not None
        assert self.master.stats().pending_puts == pending - done
        mine = self.tickets.pop(ticket, None)
        assert not done or mine is not None
        self.sync()
        if done and mine is not None:
            assert mine[0] in self.objects
            self.hold(lease, mine[0])

    @precondition(lambda self: self.spent)
    @rule(data=st.data())
    def put_abort(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.spent))
        self.master.put_abort([ticket])
        self.tickets.pop(ticket, None)
        self.sync()

    @rule(wanted=st.lists(keys, max_size=5), lease=leases)
    def find(self, wanted: list[BlockKey], lease: LeaseId) -> None:
        found = self.master.find(self.now, wanted, lease)
        run = [self.objects.get(key) for key in wanted]
        expected = run[: run.index(None)] if None in run else run
        assert found == expected
        for it in found:
            self.hold(lease, it.key)

    @rule(lease=leases)
    def release(self, lease: LeaseId) -> None:
        self.master.release(lease)
        self.leased.pop(lease, None)
        self.lease_ends.pop(lease, None)
        self.dead[lease] = self.now
        self.sync()

    @rule(key=keys, stale=st.booleans())
    def discard(self, key: BlockKey, stale: bool) -> None:
        known = self.objects.get(key)
        if known is None:
            return
        self.master.discard(key, known.version - stale)
        assert (self.master.locate(key) is None) == (not stale)
        self.sync(set(SEGMENTS))

    @rule(us=st.integers(1, 45))
    def time_passes(self, us: int) -> None:
        self.now += us
        lost = self.master.reap(self.now)
        for lease in [it for it, end in self.lease_ends.items() if end <= self.now]:
            del self.leased[lease], self.lease_ends[lease]
        for lease in [it for it, at in self.dead.items() if at + TERMS.lease_ttl_us <= self.now]:
            del self.dead[lease]
        self.sync(set(lost))

    @invariant()
    def finds_exactly_what_the_events_replay_to(self) -> None:
        assert [k for k in KEYS if self.master.locate(k) is not None] == sorted(self.replayed)
        stats = self.master.stats()
        by_segment = {s.id: s.objects for s in stats.segments}
        assert stats.objects == len(self.replayed) == sum(by_segment.values())

    @invariant()
    def evictable_is_exactly_what_no_lease_holds(self) -> None:
        free = dict.fromkeys(self.master.addresses(), 0)
        for key, it in self.objects.items():
            if not any(held.get(key) == it.version for held in self.leased.values()):
                free[it.replicas[0].segment] += aligned(it.size)
        assert {s.id: s.evictable_bytes for s in self.master.stats().segments} == free

    @invariant()
    def a_released_name_opens_no_lease(self) -> None:
        assert set(self.leased) == set(self.master._leases.names())
        assert not set(self.dead) & set(self.leased)

    @invariant()
    def no_two_live_extents_overlap(self) -> None:
        extents = [(it.replicas[0], it.size) for it in self.objects.values()]
        for number in self.tickets:
            _, size, ticket = self.tickets[number]
            if number in self.master._puts:  # the model does not track which were reaped
                extents.append((ticket, size))
        for name in SEGMENTS:
            spans = sorted((at.offset, size) for at, size in extents if at.segment == name)
            for (start, size), (after, _) in itertools.pairwise(spans):
                assert start + size <= after
            assert all(start + size <= CAPACITY for start, size in spans)

    def teardown(self) -> None:
        """Once every lease and put ran out and every segment left, nothing is counted any more."""
        for name, epoch in self.epochs.items():
            self.master.beat(self.now, name, epoch)
        self.master.reap(self.now + TERMS.lease_ttl_us)
        stats = self.master.stats()
        assert (stats.leases, stats.pending_puts) == (0, 0)
        for segment in stats.segments:
            assert segment.evictable_bytes == segment.used_bytes
        self.master.reap(self.now + TERMS.segment_ttl_us)
        stats = self.master.stats()
        assert (stats.objects, stats.segments) == (0, ())


TestMaster = MasterAgainstModel.TestCase
TestMaster.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
