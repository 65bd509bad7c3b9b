"""Master: replicas, repair, drain and tiers, one example each."""

import msgspec

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.store.master import Master
from moonserve.core.store.words import Full, PutOptions, Terms, Ticket, TooLarge
from moonserve.core.units import BlockKey, SegmentId
from tests.support.pool import (
    BLOCK,
    LEASE,
    TERMS,
    A,
    B,
    C,
    copies,
    copy_all,
    key,
    master,
    mount,
    start,
    store,
    where,
)

TWO = PutOptions(replicas=2)
D = SegmentId("d")
TIERED = Terms(lease_ttl_us=100, put_ttl_us=50, segment_ttl_us=200, high=0.7, low=0.5)


def test_replicas_are_made_after_the_put() -> None:
    """The object is readable once its put has ended; its second replica is a task for another."""
    it = master(a=4, b=4)
    ticket = store(it, 1, options=TWO)
    assert where(it, 1) == [A]
    assert copies(it, A) == []
    (copy,) = copies(it, B)
    assert (copy.source.segment, copy.source.offset) == (A, ticket.offset)
    assert (copy.held.checksum, copy.held.version, copy.left_us) == (1, ticket.id, 50)
    assert it.stats().pending_copies == it.stats().waiting == 1
    assert copy_all(it, B) == [True]
    assert where(it, 1) == [A, B]
    assert it.stats().pending_copies == it.stats().waiting == 0
    assert it.drain_events()[1] == BlocksStored(B, (BlockKey(key(1)),), None, "dram", 1)


def test_an_answer_that_was_lost_is_given_again() -> None:
    """An owner that reports a copy twice gets the present answer."""
    it = master(a=4, b=4)
    store(it, 1, options=TWO)
    (copy,) = copies(it, B)
    results = [(copy.held.id, True)]
    assert it.copied(0, B, 1, results) == it.copied(0, B, 1, results) == [True]
    it.discard(key(1), copy.held.version, B)
    assert it.copied(0, B, 1, results) == [False]
    assert it.copied(0, B, 2, results) == [False]


def test_replicas_avoid_a_common_node() -> None:
    """Another node's segment is taken though there is more room on the own node's other one."""
    it = master()
    for name, blocks, node in ((A, 4, "x"), (B, 9, "x"), (C, 4, "y")):
        it.mount(0, mount(name, blocks, node=node))
    store(it, 1, options=PutOptions(replicas=3))
    assert copies(it, B) == []
    assert copy_all(it, C) == [True]
    assert copy_all(it, B) == [True], "there is no third node"
    assert it.stats().waiting == 0


def test_replicas_spread_over_racks() -> None:
    """Another rack's segment is taken though there is more room in the own rack."""
    it = master()
    for name, blocks, rack in ((A, 4, "x"), (B, 9, "x"), (C, 4, "y"), (D, 3, "z")):
        it.mount(0, msgspec.structs.replace(mount(name, blocks), rack=rack))
    store(it, 1, options=TWO)
    assert (copies(it, B), copies(it, D)) == ([], [])
    copy_all(it, C)
    store(it, 2, options=PutOptions(replicas=4))
    for name in (C, D, B):
        copy_all(it, name)
    assert where(it, 2) == [A, C, D, B]


def test_a_failed_copy_goes_elsewhere() -> None:
    """Its extent is freed, and for some time the next tries go to other segments."""
    it = master(a=4, b=4, c=4)
    store(it, 1, options=TWO)
    assert copy_all(it, B, done=False) == [False]
    assert copies(it, B) == []
    assert copy_all(it, C, done=False) == [False]
    it.reap(49)
    assert it.stats().pending_copies == 0
    assert [s.used_bytes for s in it.stats().segments] == [BLOCK, 0, 0]
    it.reap(50)
    assert it.stats().pending_copies == 1


def test_an_overdue_copy_is_given_up() -> None:
    """Without an answer the extent is freed; a late answer makes no replica."""
    it = master(a=4, b=4)
    store(it, 1, options=TWO)
    (copy,) = copies(it, B)
    it.reap(50)
    assert it.copied(50, B, 1, [(copy.held.id, True)]) == [False]
    assert where(it, 1) == [A]
    assert it.stats().segments[1].used_bytes == 0


def test_what_is_being_copied_is_not_evicted() -> None:
    """A copy holds its object until the copy ends."""
    it = master(a=1, b=1)
    store(it, 1, options=TWO)
    assert it.stats().segments[0].evictable_bytes == 0
    assert start(it, 2) == Full()
    copy_all(it, B)
    assert isinstance(start(it, 2), Ticket)
    assert where(it, 1) == [B]


def test_a_copy_of_what_is_gone_makes_nothing() -> None:
    """The object was removed, and even put again: the late copy's extent is freed."""
    it = master(a=4, b=4)
    store(it, 1, options=TWO)
    it.remove(0, [key(1)])
    store(it, 1)
    assert copy_all(it, B) == [False]
    assert where(it, 1) == [A]
    assert it.stats().segments[1].used_bytes == 0
    assert it.stats().pending_copies == 0


def test_a_lost_segment_is_repaired() -> None:
    """An object with another replica is copied once more; the other objects are gone."""
    it = master(a=4, b=4, c=4)
    store(it, 1, options=TWO)
    store(it, 2)
    copy_all(it, B)
    it.unmount(A, 1)
    assert where(it, 1) == [B]
    assert where(it, 2) == []
    assert it.stats().waiting == 1
    it.reap(1)
    assert copy_all(it, C) == [True]
    assert where(it, 1) == [B, C]


def test_a_new_segment_gets_what_is_short() -> None:
    """An object without its second replica gets it when a segment is mounted."""
    it = master(a=4)
    store(it, 1, options=TWO)
    assert it.stats().waiting == 0
    it.mount(0, mount(B, 4))
    it.reap(1)
    assert copy_all(it, B) == [True]


def test_eviction_is_not_repaired() -> None:
    """An object that loses one of two replicas to eviction has one fewer."""
    it = master(a=1, b=1)
    store(it, 1, options=TWO)
    copy_all(it, B)
    store(it, 2)
    it.reap(1)
    assert where(it, 1) in ([A], [B])
    assert it.stats().pending_copies == it.stats().waiting == 0


def test_a_corrupt_replica_is_dropped_alone() -> None:
    """The object keeps its other replica and is repaired. With its last replica it is gone."""
    it = master(a=4, b=4)
    version = store(it, 1, options=TWO).id
    copy_all(it, B)
    it.discard(key(1), version, A)
    assert where(it, 1) == [B]
    it.discard(key(1), version + 1, B)
    assert where(it, 1) == [B], "the complaint is about another version"
    it.reap(1)
    assert copies(it, A) != []
    it.discard(key(1), version, B)
    assert where(it, 1) == []
    assert copy_all(it, A) == [False]


def test_a_drained_segment_becomes_empty() -> None:
    """It gets nothing new; single replicas are copied away, others dropped; leased ones wait."""
    it = master(a=4, b=8)
    store(it, 1)
    store(it, 2, options=TWO)
    store(it, 3, lease=LEASE, options=PutOptions(pin=True))
    copy_all(it, B)
    pending = start(it, 4)
    assert it.drain(0, A)
    assert not it.drain(0, C)
    assert isinstance(pending, Ticket)
    assert it.put_end(0, [(pending.id, 4)], None) == [pending.id]
    assert store(it, 5).segment == B
    it.reap(1)
    copy_all(it, B)
    it.reap(2)
    assert [where(it, n) for n in (1, 2, 3, 4)] == [[B], [B], [A, B], [B]]
    it.release(LEASE)
    it.reap(3)
    assert where(it, 3) == [B]
    assert (it.stats().segments[0].draining, it.stats().segments[0].used_bytes) == (True, 0)


def test_the_last_segment_keeps_what_it_has_when_drained() -> None:
    """If there is no other segment, nothing is dropped."""
    it = master(a=4)
    store(it, 1)
    it.drain(0, A)
    it.reap(1)
    assert where(it, 1) == [A]
    assert start(it, 2) == TooLarge(0), "no segment takes objects"
    it.mount(1, mount(B, 4))
    it.reap(2)
    copy_all(it, B)
    it.reap(3)
    assert where(it, 1) == [B]


def tiered() -> Master:
    """A node with memory for four blocks and a disk."""
    it = master(TIERED)
    it.mount(0, mount(A, 4, node="x"))
    it.mount(0, mount(D, 8, node="x", tier="disk"))
    return it


def test_a_full_memory_moves_its_oldest_to_disk() -> None:
    """Above the high-water mark, objects move to the node's disk, down to the low-water mark."""
    it = tiered()
    for number in (1, 2, 3):
        store(it, number)
    it.drain_events()
    it.reap(1)
    assert [copy.held.key for copy in copies(it, D)] == [key(1)]
    assert where(it, 1) == [A]
    copy_all(it, D)
    assert where(it, 1) == [D]
    assert it.drain_events() == [
        BlocksStored(D, (BlockKey(key(1)),), None, "disk", 1),
        BlocksRemoved(A, (BlockKey(key(1)),), "dram", 1),
    ]
    assert (it.stats().demoted, it.stats().evicted) == (1, 0)


def test_evicted_by_an_operator_moves_to_disk() -> None:
    """It moves to the node's disk if that has room; otherwise it is evicted."""
    it = tiered()
    store(it, 1)
    store(it, 2)
    assert it.evict(0, A, 2 * BLOCK) == (2 * BLOCK, True)
    assert it.evict(0, A, BLOCK) == (0, True)
    copy_all(it, D)
    assert [where(it, n) for n in (1, 2)] == [[D], [D]]
    assert it.evict(0, A, BLOCK) == (0, False)
    assert (it.stats().segments[0].used_bytes, it.stats().evicted) == (0, 0)
    small = master(TERMS, a=4)
    small.mount(0, msgspec.structs.replace(mount(D, 1, tier="disk"), node="a", capacity_bytes=64))
    store(small, 1)
    assert small.evict(0, A, 1) == (BLOCK, False)
    assert where(small, 1) == []


def test_a_put_starts_demotion_but_evicts_nothing_ahead() -> None:
    """A put starts copies ahead of need; without a disk, only reap evicts ahead of need."""
    it = master(TIERED)
    it.mount(0, mount(A, 4, node="x"))
    for number in (1, 2, 3):
        store(it, number)
    start(it, 4)
    assert it.stats().evicted == 0
    it.mount(0, mount(D, 8, node="x", tier="disk"))
    start(it, 5)
    assert copies(it, D) != []


def test_without_a_disk_a_full_memory_evicts_down_to_the_low_mark() -> None:
    """The oldest go first, and no more than down to the low-water mark."""
    it = master(TIERED, a=10)
    for number in range(8):
        store(it, number)
    it.reap(1)
    assert [n for n in range(8) if where(it, n)] == [3, 4, 5, 6, 7]
    it.reap(2)
    assert it.stats().evicted == 3


def test_what_is_leased_while_it_moves_stays_in_memory() -> None:
    """If a reader comes during the demotion, both replicas stay."""
    it = tiered()
    for number in (1, 2, 3):
        store(it, number)
    it.reap(1)
    it.find(1, [key(1)], LEASE)
    copy_all(it, D)
    assert where(it, 1) == [A, D]
    it.release(LEASE)
    for number in (2, 3, 4):
        it.find(2, [key(number)], LEASE)
    store(it, 5)
    it.reap(3)
    assert where(it, 1) == [D], "no second copy is needed to go"


def test_what_is_found_on_disk_comes_back_to_the_readers_memory() -> None:
    """It is copied once, to free memory only; the replica on disk stays."""
    it = master(TIERED)
    it.mount(0, mount(A, 4, node="x"))
    it.mount(0, mount(B, 4, node="y"))
    it.mount(0, mount(D, 8, node="x", tier="disk"))
    store(it, 1, options=PutOptions(preferred=D))
    assert where(it, 1) == [D]
    it.find(0, [key(1)], LEASE)
    assert it.stats().pending_copies == 0, "the reader has no memory of its own"
    it.find(0, [key(1)], LEASE, B)
    it.find(0, [key(1)], LEASE, A)
    assert copies(it, A) == []
    copy_all(it, B)
    assert where(it, 1) == [B, D]
    assert it.stats().promoted == 1


def test_nothing_is_evicted_for_what_comes_back() -> None:
    """A full memory promotes nothing."""
    it = master(TERMS, a=1)
    it.mount(0, mount(D, 8, node="x", tier="disk"))
    store(it, 1)
    store(it, 2, options=PutOptions(preferred=D))
    it.find(0, [key(2)], LEASE, A)
    assert it.stats().pending_copies == 0
    assert where(it, 1) == [A]


def test_a_put_evicts_nothing_for_a_disk_that_is_full() -> None:
    """If the disk is full, objects stay in memory until a put needs room, or until reap."""
    it = master(TIERED)
    it.mount(0, mount(A, 4, node="x"))
    it.mount(0, mount(D, 1, node="x", tier="disk"))
    store(it, 0, options=PutOptions(preferred=D, pin=True))
    for number in (1, 2, 3):
        store(it, number)
    start(it, 4)
    assert it.stats().evicted == 0
    assert where(it, 1) == [A]
    it.reap(1)
    assert where(it, 1) == []


def asked(it: Master, *numbers: int, to: SegmentId = B, source: SegmentId | None = A) -> int:
    """Ask for copies of these blocks."""
    return it.copy(0, [key(n) for n in numbers], to, source)


def test_copies_that_are_asked_for() -> None:
    """They are made from the named segment, beyond the replicas that the objects want."""
    it = master(a=4, b=4, c=4)
    for number in (1, 2):
        store(it, number)
    assert asked(it, 1, 2) == 2
    assert [copy.source.segment for copy in copies(it, B)] == [A, A]
    assert asked(it, 1, 2) == 2, "they are coming"
    assert copy_all(it, B) == [True, True]
    assert asked(it, 1, 2) == 2, "they are there"
    assert copies(it, B) == []
    assert where(it, 1) == [A, B]
    assert asked(it, 1, to=C, source=B) == 1
    assert [copy.source.segment for copy in copies(it, C)] == [B]
    assert asked(it, 2, to=C, source=C) == 1, "it is not there: from wherever it is"
    assert copy_all(it, C) == [True, True]
    assert it.stats().waiting == 0


def test_asked_copies_are_counted() -> None:
    """The leading objects that exist count; none if the segment is missing, draining or full."""
    it = master(a=4, b=1, c=4)
    store(it, 1)
    store(it, 3)
    assert asked(it, 1, 2, 3, to=C) == 1
    assert asked(it, 1, to=D) == 0
    store(it, 4, B, lease=LEASE)
    assert asked(it, 1, to=B) == 0
    assert it.drain(0, C)
    assert asked(it, 3, to=C) == 1, "it is coming since before"
    store(it, 5)
    assert asked(it, 5, to=C) == 0


def test_a_copy_that_was_asked_for_ages_out() -> None:
    """It evicts the oldest object for its place, and is evicted like any other."""
    it = master(a=1, b=1)
    store(it, 9, B)
    store(it, 1)
    assert asked(it, 1) == 1
    copy_all(it, B)
    assert (where(it, 9), where(it, 1)) == ([], [A, B])
    store(it, 8, B)
    assert where(it, 1) == [A]
    assert copies(it, B) == [], "it is not made again"


def test_many_copies_wait_for_their_turn() -> None:
    """Copies beyond a segment's bound are made when others end."""
    it = master(a=200, b=200)
    for number in range(150):
        store(it, number)
    assert asked(it, *range(150)) == 150
    assert it.stats().waiting == 150 - len(copies(it, B)) > 0
    while copies(it, B):
        copy_all(it, B)
    assert it.stats().waiting == 0
    assert all(where(it, number) == [A, B] for number in range(150))


def test_a_chain_that_moves_to_disk_is_one_run() -> None:
    """It moves from its end, and costs the master no more memory there than where it was put."""
    it = master(a=16)
    it.mount(0, msgspec.structs.replace(mount(D, 32, tier="disk"), node="a"))
    parent = None
    for number in range(1, 13):
        store(it, number, parent=parent)
        parent = key(number)
    assert len(it._catalog.segments[A].runs) == 12, "each was used alone"
    it.find(0, [key(number) for number in range(1, 13)], LEASE)
    it.release(LEASE)
    while it.evict(0, A, BLOCK)[1]:
        copy_all(it, D)
    assert [where(it, number) for number in range(1, 13)] == [[D]] * 12
    (run,) = it._catalog.segments[D].runs
    assert run.keys == [key(number) for number in range(1, 13)]
    assert list(run.versions) == sorted(run.versions)
    assert list(run.ids) == sorted(run.ids, reverse=True)
    found = it.locate(key(5))
    assert found is not None
    assert found.checksum == 5
    assert it._catalog.held(D, key(1)).parent is None
