"""Master against a simple model that knows only the master's events and answers.

The model has no allocator, no order of eviction and no plan of copies. It has the replicas that a
replay of the events gives, and the leases, pins and tickets. It checks every answer against them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.store.master import Master
from moonserve.core.store.owners import SegmentContents
from moonserve.core.store.words import (
    Address,
    Exists,
    Found,
    Full,
    Mount,
    OverQuota,
    PutOptions,
    Terms,
    Ticket,
    aligned,
)
from moonserve.core.units import BlockKey, LeaseId, SegmentId

QUOTA = 8 * 64
TERMS = Terms(
    lease_ttl_us=40, put_ttl_us=30, segment_ttl_us=60, high=0.9, low=0.6, quotas={"t": QUOTA}
)
NODES = {"a": ("x", "dram"), "b": ("y", "dram"), "c": ("z", "dram"), "d": ("x", "disk")}
SEGMENTS = [SegmentId(name) for name in NODES]
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
        self.lives = 1
        self.replayed: set[tuple[SegmentId, BlockKey]] = set()
        self.epochs: dict[SegmentId, int] = {}
        self.catalogues: dict[SegmentId, SegmentContents] = {}
        self.tickets: dict[int, tuple[BlockKey, int, Ticket]] = {}
        self.spent: list[int] = []
        self.pins: dict[int, bool] = {}
        self.leased: dict[LeaseId, dict[BlockKey, int]] = {}
        self.lease_ends: dict[LeaseId, int] = {}
        self.dead: dict[LeaseId, int] = {}
        self.objects: dict[BlockKey, Found] = {}
        self.pinned: set[BlockKey] = set()
        self.draining: set[SegmentId] = set()

    def sync(self, may_lose: Sequence[SegmentId] = (), may_remove: Sequence[BlockKey] = ()) -> None:
        """Replay the events; a held object may go only with the named segments and keys."""
        left: dict[BlockKey, list[SegmentId]] = {}
        for event in self.master.drain_events():
            tier = NODES[event.segment][1]
            assert (event.tier, event.epoch) == (tier, self.epochs[event.segment])
            if isinstance(event, BlocksStored):
                new = {(event.segment, key) for key in event.keys}
                assert not new & self.replayed
                self.replayed |= new
                continue
            if isinstance(event, BlocksCleared):
                gone = [key for at, key in self.replayed if at == event.segment]
            else:
                gone = list(event.keys)
            for key in gone:
                self.replayed.remove((event.segment, key))
                left.setdefault(key, []).append(event.segment)
        for key, lost in left.items():
            excused = key in may_remove or all(at in may_lose for at in lost)
            assert excused or not self.is_leased(key)
            assert excused or key not in self.pinned or set(lost) <= self.draining
        there = {key for _, key in self.replayed}
        for key in [key for key in self.objects if key not in there]:
            del self.objects[key]
            self.pinned.discard(key)
            for held in self.leased.values():  # if it comes back, this lease does not hold it
                held.pop(key, None)
        for key in there:
            found = self.master.locate(key)
            assert found is not None
            old = self.objects.get(key)
            if old is not None and old.version == found.version:
                assert (old.size, old.checksum) == (found.size, found.checksum)
            self.objects[key] = found

    def is_leased(self, key: BlockKey) -> bool:
        version = self.objects[key].version if key in self.objects else None
        return any(held.get(key) == version for held in self.leased.values())

    def hold(self, lease: LeaseId | None, key: BlockKey) -> None:
        if lease is not None and lease not in self.dead:
            self.leased.setdefault(lease, {})[key] = self.objects[key].version
            self.lease_ends[lease] = self.now + TERMS.lease_ttl_us

    def mount_of(self, name: SegmentId) -> Mount:
        node, tier = NODES[name]
        address = Address("h", 1, "", bytes(16))
        return Mount(name, self.epochs[name], CAPACITY, address, node, tier)  # type: ignore[arg-type]

    @rule(name=segments, newer=st.booleans())
    def mount(self, name: SegmentId, newer: bool) -> None:
        old = self.epochs.get(name)
        fresh = newer or old is None
        if fresh:
            self.master.unmount(name, old or 0)  # the BlocksCleared event has the old epoch
            self.sync([name])
            self.epochs[name] = (old or 1) + 1
            self.catalogues[name] = SegmentContents()
        if name not in self.master.addresses():
            self.catalogues[name].restart()
            self.draining.discard(name)
        assert self.master.mount(
            self.now, self.mount_of(name), list(self.catalogues[name].held.values())
        )
        self.sync()

    @rule(name=segments)
    def unmount(self, name: SegmentId) -> None:
        self.master.unmount(name, self.epochs.get(name, 0))
        self.sync([name])

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), done=st.booleans(), most=st.integers(0, 3))
    def beat(self, data: st.DataObject, done: bool, most: int) -> None:
        """Receive the changes, and answer some copies."""
        name = data.draw(st.sampled_from(sorted(self.epochs)))
        catalogue = self.catalogues[name]
        orders = self.master.beat(self.now, name, self.epochs[name], catalogue.seen)
        assert (orders is not None) == (name in self.master.addresses())
        if orders is None:
            return
        catalogue.apply(orders)
        for copy in orders.copies[:most]:
            found = self.objects.get(BlockKey(copy.held.key))
            good = found is not None and found.version == copy.held.version
            results = [(copy.held.id, done)]
            (became,) = self.master.copied(self.now, name, self.epochs[name], results)
            assert became == (done and good)
            self.sync()
            assert not became or (name, copy.held.key) in self.replayed

    @precondition(lambda self: self.master.addresses())
    @rule(
        data=st.data(),
        items=st.lists(st.tuples(keys, st.integers(1, 150)), min_size=1, max_size=4),
        lease=st.none() | leases,
        replicas=st.integers(1, 3),
        tenant=st.sampled_from(["", "t"]),
        pin=st.integers(0, 9),
    )
    def put_start(
        self,
        data: st.DataObject,
        items: list[tuple[BlockKey, int]],
        lease: LeaseId | None,
        replicas: int,
        tenant: str,
        pin: int,
    ) -> None:
        owner = data.draw(st.sampled_from(sorted(self.master.addresses())))
        before = dict(self.objects)
        options = PutOptions(replicas, None, tenant, pin == 0)
        outcomes = self.master.put_start(self.now, owner, items, lease, None, options)
        for (key, size), outcome in zip(items, outcomes, strict=True):
            match outcome:
                case Exists():
                    assert key in before
                    self.hold(lease, key)
                case Ticket():
                    assert outcome.id not in self.spent
                    assert outcome.segment not in self.draining
                    self.spent.append(outcome.id)
                    self.tickets[outcome.id] = (key, size, outcome)
                    self.pins[outcome.id] = options.pin
                case OverQuota():
                    assert tenant == "t"
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
            assert self.objects[mine[0]].version == version
            if version == ticket and self.pins[ticket]:
                self.pinned.add(mine[0])
            self.hold(lease, mine[0])

    @precondition(lambda self: self.spent)
    @rule(data=st.data())
    def put_abort(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.spent))
        self.master.put_abort([ticket])
        self.tickets.pop(ticket, None)
        self.sync()

    @rule(wanted=st.lists(keys, max_size=5), lease=leases, reader=st.none() | segments)
    def find(self, wanted: list[BlockKey], lease: LeaseId, reader: SegmentId | None) -> None:
        found = self.master.find(self.now, wanted, lease, reader)
        run = [self.objects.get(key) for key in wanted]
        assert found == (run[: run.index(None)] if None in run else run)
        for it in found:
            self.hold(lease, BlockKey(it.key))

    @rule(wanted=st.lists(keys, max_size=5), lease=leases)
    def get(self, wanted: list[BlockKey], lease: LeaseId) -> None:
        got = self.master.get(self.now, wanted, lease)
        assert got == [self.objects.get(key) for key in wanted]
        for it in got:
            if it is not None:
                self.hold(lease, BlockKey(it.key))

    @rule(lease=leases)
    def release(self, lease: LeaseId) -> None:
        self.master.release(lease)
        self.leased.pop(lease, None)
        self.lease_ends.pop(lease, None)
        self.dead[lease] = self.now
        self.sync()

    @rule(key=keys, stale=st.booleans(), data=st.data())
    def discard(self, key: BlockKey, stale: bool, data: st.DataObject) -> None:
        known = self.objects.get(key)
        if known is None:
            return
        at = data.draw(st.sampled_from(known.replicas)).segment
        self.master.discard(key, known.version - stale, at)
        assert ((at, key) in {(it.segment, key) for it in known.replicas}) or stale
        self.sync([at])
        assert stale == ((at, key) in self.replayed)

    @rule(wanted=st.lists(keys, max_size=3, unique=True), force=st.booleans())
    def remove(self, wanted: list[BlockKey], force: bool) -> None:
        expected: list[Any] = []
        for key in wanted:
            known = self.objects.get(key)
            if known is None:
                expected.append(("missing", None))
            elif self.is_leased(key) and not force:
                expected.append(("leased", None))
            else:
                expected.append(("removed", known.version))
        removals = self.master.remove(self.now, wanted, force)
        found = [(it.outcome, None if it.outcome == "missing" else it.version) for it in removals]
        assert found == expected
        self.sync(may_remove=wanted)

    @rule(key=keys, pinned=st.booleans())
    def pin(self, key: BlockKey, pinned: bool) -> None:
        assert self.master.pin([key], pinned) == [key in self.objects]
        if key in self.objects:
            (self.pinned.add if pinned else self.pinned.discard)(key)

    @rule(name=segments)
    def drain(self, name: SegmentId) -> None:
        known = name in self.master.addresses()
        if known:
            self.draining.add(name)
        assert self.master.drain(self.now, name) == known
        self.sync()

    @rule(wanted=st.lists(keys, max_size=5, unique=True), to=segments, source=st.none() | segments)
    def copy(self, wanted: list[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """Ask for copies: every promised one is of an object, to a mounted segment."""
        count = self.master.copy(self.now, wanted, to, source)
        assert not count or to in self.master.addresses()
        assert all(key in self.objects for key in wanted[:count])
        self.sync([to])

    @rule(us=st.integers(1, 45))
    def time_passes(self, us: int) -> None:
        self.now += us
        lost = self.master.reap(self.now)
        for lease in [it for it, end in self.lease_ends.items() if end <= self.now]:
            del self.leased[lease], self.lease_ends[lease]
        for lease in [it for it, at in self.dead.items() if at + TERMS.lease_ttl_us <= self.now]:
            del self.dead[lease]
        self.sync(lost)

    @rule()
    def restart(self) -> None:
        """Another master: every owner has received all changes, and mounts with its replicas."""
        mounted = list(self.master.addresses())
        for name in mounted:
            orders = self.master.beat(self.now, name, self.epochs[name], self.catalogues[name].seen)
            assert orders is not None
            self.catalogues[name].apply(orders)
        self.lives += 1
        self.master = Master(TERMS, self.lives << 20, self.now + 1)
        self.replayed.clear()
        before, pinned = dict(self.objects), set(self.pinned)
        for name in mounted:
            self.catalogues[name].restart()
            for page, held in enumerate(pages := self.catalogues[name].pages(2)):
                last = page == len(pages) - 1
                assert self.master.mount(self.now, self.mount_of(name), held, page, last)
        self.tickets, self.leased, self.lease_ends, self.dead = {}, {}, {}, {}
        self.draining = set()
        self.now += 1
        self.master.reap(self.now)
        self.sync()
        assert set(self.objects) == set(before)
        for key, found in self.objects.items():
            assert (found.version, found.checksum) == (before[key].version, before[key].checksum)
            assert set(found.replicas) == set(before[key].replicas)
        assert self.pinned == pinned

    @invariant()
    def finds_exactly_what_the_events_replay_to(self) -> None:
        there = {
            (replica.segment, found.key)
            for found in self.master.scan(b"", None, 100)
            for replica in found.replicas
        }
        assert there == self.replayed
        stats = self.master.stats()
        assert stats.objects == len({key for _, key in there})
        assert sum(it.objects for it in stats.segments) == len(there)

    @invariant()
    def evictable_is_exactly_what_nothing_holds(self) -> None:
        free = dict.fromkeys(self.master.addresses(), 0)
        for key, it in self.objects.items():
            copied = self.master._copies.targets(key)
            if not self.is_leased(key) and key not in self.pinned and not copied:
                for replica in it.replicas:
                    free[replica.segment] += aligned(it.size)
        assert {s.id: s.evictable_bytes for s in self.master.stats().segments} == free

    @invariant()
    def a_released_name_opens_no_lease(self) -> None:
        assert set(self.leased) == set(self.master._leases.names())
        assert not set(self.dead) & set(self.leased)

    @invariant()
    def no_two_live_extents_overlap(self) -> None:
        spans = {name: list[tuple[int, int]]() for name in SEGMENTS}
        for it in self.objects.values():
            for replica in it.replicas:
                spans[replica.segment].append((replica.offset, it.size))
        for number, (_, size, ticket) in self.tickets.items():
            if number in self.master._puts:  # the model does not track which were reaped
                spans[ticket.segment].append((ticket.offset, size))
        for task in self.master._copies._tasks.values():
            spans[task.target.segment].append((task.target.offset, task.size))
        used = {it.id: it.used_bytes for it in self.master.stats().segments}
        for name, extents in spans.items():
            extents.sort()
            for (start, size), (after, _) in itertools.pairwise(extents):
                assert start + size <= after
            assert all(start + size <= CAPACITY for start, size in extents)
            assert sum(aligned(size) for _, size in extents) == used.get(name, 0)
        assert sum(self.master.stats().tenants.values()) == sum(used.values())

    def teardown(self) -> None:
        """After every lease, put and copy has expired and every segment has left, all is zero."""
        for name, epoch in self.epochs.items():
            self.master.beat(self.now, name, epoch)
        self.master.reap(self.now + TERMS.lease_ttl_us)
        stats = self.master.stats()
        assert (stats.leases, stats.pending_puts) == (0, 0)
        self.master.reap(self.now + 3 * TERMS.segment_ttl_us)
        stats = self.master.stats()
        assert (stats.objects, stats.segments, stats.pending_copies) == (0, (), 0)
        assert stats.tenants == {}


TestMaster = MasterAgainstModel.TestCase
TestMaster.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
