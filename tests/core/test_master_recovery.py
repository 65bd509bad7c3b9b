"""Master: a restart among segments that outlived the earlier master, and returning segments."""

import pytest

from moonserve.core.errors import Recovering
from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.store.master import Master
from moonserve.core.store.words import Claim, Gone, Held, PutOptions, Removal, Ticket
from moonserve.core.units import BlockKey, LeaseId
from tests.support.pool import BLOCK, LEASE, TERMS, A, B, copies, key, master, mount, store, where


def held(number: int, id: int, block: int, version: int | None = None, checksum: int = 7) -> Held:
    """One replica as its owner reports it, at the place of block `block`."""
    made = id if version is None else version
    return Held(key(number), BLOCK, checksum, made, id, block * BLOCK, None, PutOptions())


def recovering() -> Master:
    """A master that gathers until time 100; ids below 1,000 are of an earlier master."""
    return Master(TERMS, first_id=1_000, recovering_until_us=100)


def test_nothing_is_answered_before_it_is_known() -> None:
    """Calls that need to know the objects are refused, even if all segments are mounted."""
    it = recovering()
    assert it.mount(0, mount(A, 4), [held(1, 5, 0)])
    assert it.beat(0, A, 1) is not None
    for call in (
        lambda: it.find(99, [key(1)], LEASE),
        lambda: it.get(99, [key(1)], LEASE),
        lambda: it.put_start(99, A, [(key(1), BLOCK)], None),
        lambda: it.put_end(99, [(5, 7)], None),
        lambda: it.remove(99, [key(1)]),
        lambda: it.exists([key(1)]),
        lambda: it.locate(key(1)),
        lambda: it.pin([key(1)], True),
        lambda: it.drain(99, A),
        lambda: it.evict(99, A, BLOCK),
    ):
        with pytest.raises(Recovering):
            call()
    assert it.stats().recovering
    (found,) = it.find(100, [key(1)], LEASE)
    assert (found.version, found.checksum, found.replicas[0].offset) == (5, 7, 0)
    assert it.drain_events() == [BlocksStored(A, (BlockKey(key(1)),), None, "dram", 1)]


def test_the_master_waits_for_owners_between_two_pages() -> None:
    """It waits for one segment's time to live; pages out of sequence start again."""
    it = recovering()
    assert it.mount(0, mount(A, 4), [held(1, 5, 0)], 0, False)
    assert it.beat(0, A, 1) is None, "it is mounted with its last page"
    it.reap(150)
    assert it.stats().recovering
    assert not it.mount(150, mount(A, 4), [held(3, 7, 2)], 2, True)
    assert it.mount(150, mount(A, 4), [held(2, 6, 1)], 1, True)
    it.reap(150)
    assert [where(it, n) for n in (1, 2, 3)] == [[A], [A], []]
    late = recovering()
    late.mount(90, mount(A, 4), [held(1, 5, 0)], 0, False)
    late.reap(300)
    assert not late.stats().recovering
    assert late.mount(300, mount(A, 4), [held(2, 6, 1)], 1, True) is False


def test_of_overlapping_extents_the_later_is_true() -> None:
    """The older object was overwritten; its owner receives that it is gone."""
    it = recovering()
    it.mount(0, mount(A, 4), [held(1, 5, 0), held(2, 6, 0), held(3, 4, 9)])
    it.reap(100)
    assert [where(it, n) for n in (1, 2, 3)] == [[], [A], []]
    assert it.stats().segments[0].used_bytes == BLOCK
    orders = it.beat(100, A, 1)
    assert orders is not None
    assert sorted(change.key for change in orders.changes) == [key(n) for n in (1, 2, 3)]


def test_claims_restore_puts_that_owners_do_not_know() -> None:
    """A client's put comes back by its claim, if the claim has the segment's present epoch."""
    it = recovering()
    it.claim(0, [Claim(A, 1, held(1, 5, 0), False), Claim(A, 2, held(2, 6, 1), False)], [])
    it.claim(0, [Claim(A, 1, held(3, 1_000, 2), False)], [])
    it.mount(0, mount(A, 4))
    it.reap(100)
    assert [where(it, n) for n in (1, 2, 3)] == [[A], [], []], "3 is no earlier master's"


@pytest.mark.parametrize("claimed_us", [0, 100])
def test_a_claim_of_a_gone_replica_is_void(claimed_us: int) -> None:
    """The owner knows that it is gone, so its extent was reused. A claim of a later put is not
    void."""
    it = recovering()
    it.mount(0, mount(A, 4), [held(1, 5, 0), Gone(key(2), 6), Gone(key(3), 7)])
    if claimed_us:
        it.reap(100)
    claims = [Claim(A, 1, held(2, 6, 1), False), Claim(A, 1, held(3, 8, 2), False)]
    it.claim(claimed_us, claims, [])
    it.reap(100)
    assert [where(it, n) for n in (1, 2, 3)] == [[A], [], [A]]


def test_a_put_under_way_goes_on() -> None:
    """Its extent is reserved, and it ends with its old ticket, or by its deadline."""
    it = recovering()
    it.mount(0, mount(A, 2))
    it.claim(0, [Claim(A, 1, held(n, 5 + n, n), True) for n in (0, 1)], [])
    assert it.put_start(100, A, [(key(2), BLOCK)], None) != []
    assert it.stats().pending_puts == 2
    assert it.put_end(100, [(5, 9)], None) == [5]
    it.reap(150)
    assert it.put_end(150, [(6, 9)], None) == [None]
    assert it.stats().segments[0].used_bytes == BLOCK


def test_what_was_removed_does_not_come_back() -> None:
    """A claimed removal voids replicas of that version, whether it comes before or after them."""
    it = recovering()
    it.claim(0, [], [(key(1), 5)])
    it.mount(0, mount(A, 4), [held(1, 5, 0), held(2, 6, 1)])
    it.reap(100)
    assert [where(it, n) for n in (1, 2)] == [[], [A]]
    it.claim(100, [], [(key(2), 6)])
    assert where(it, 2) == []
    it.mount(100, mount(B, 4), [held(1, 5, 0), held(2, 7, 1)])
    assert [where(it, n) for n in (1, 2)] == [[], [B]]


def test_the_later_version_of_a_key_is_true() -> None:
    """Of two owners' versions the older is dropped. Versions with equal bytes are replicas."""
    it = recovering()
    it.mount(0, mount(A, 4), [held(1, 5, 0), held(2, 6, 1)])
    it.mount(0, mount(B, 4), [held(1, 9, 0, checksum=8), held(2, 8, 1)])
    it.reap(100)
    assert [where(it, n) for n in (1, 2)] == [[B], [A, B]]
    assert [s.used_bytes for s in it.stats().segments] == [BLOCK, 2 * BLOCK]


def test_a_silent_segment_comes_back_with_what_it_holds() -> None:
    """Its own report counts, and so do the changes that it had not received."""
    it = master(a=4, b=4)
    first, second = store(it, 1), store(it, 2)
    it.beat(100, B, 1)
    it.drain_events()
    assert it.reap(200) == [A]
    assert it.drain_events() == [BlocksCleared(A, "dram", 1)]
    known = Held(key(1), BLOCK, 1, first.id, first.id, first.offset, None, PutOptions())
    assert it.mount(210, mount(A, 4), [known])
    assert [where(it, n) for n in (1, 2)] == [[A], [A]]
    found = it.locate(key(2))
    assert found is not None
    assert (found.version, found.checksum) == (second.id, 2)
    assert isinstance(it.put_start(210, A, [(key(3), BLOCK)], None)[0], Ticket)


def test_removed_while_its_owner_was_silent_is_removed() -> None:
    """A returning segment's replica does not bring a removed object back."""
    it = master(a=4, b=4)
    version = store(it, 1, options=PutOptions(replicas=2)).id
    (copy,) = copies(it, B)
    it.copied(0, B, 1, [(copy.held.id, True)])
    it.beat(100, B, 1)
    it.reap(200)
    assert it.remove(200, [key(1)]) == [Removal("removed", version)]
    it.mount(210, mount(A, 4), [held(1, version, 0, checksum=1)])
    assert where(it, 1) == []


def test_what_was_missing_when_removed_does_not_come_back() -> None:
    """Nor after a restart, by the client's claim. A put under way at that time stays."""
    it = master(a=4, b=4)
    version = store(it, 1).id
    it.beat(100, B, 1)
    it.reap(200)
    (put,) = it.put_start(200, B, [(key(2), BLOCK)], None)
    assert isinstance(put, Ticket)
    first, second = it.remove(200, [key(1), key(2)])
    assert (first.outcome, second.outcome) == ("missing", "missing")
    it.put_end(200, [(put.id, 1)], None)
    it.mount(210, mount(A, 4), [held(1, version, 0, checksum=1)])
    assert [where(it, n) for n in (1, 2)] == [[], [B]]
    assert first.version is not None
    assert second.version is not None
    it = recovering()
    it.claim(0, [], [(key(1), first.version), (key(2), second.version)])
    it.mount(0, mount(A, 4), [held(1, version, 0), held(2, put.id, 1)])
    it.reap(100)
    assert [where(it, n) for n in (1, 2)] == [[], [A]]


def test_a_newer_epoch_brings_only_what_it_says() -> None:
    """A restarted owner of a disk reports its complete objects; the others are gone."""
    it = master(a=4)
    ticket = store(it, 1)
    store(it, 2)
    again = Held(key(1), BLOCK, 1, ticket.id, ticket.id, ticket.offset, None, PutOptions())
    assert it.mount(100, mount(A, 4, epoch=2), [again])
    assert [where(it, n) for n in (1, 2)] == [[A], []]
    assert not it.mount(100, mount(A, 4, epoch=1), [again])


def test_a_lease_does_not_outlive_its_objects_absence() -> None:
    """An object that comes back with its segment is not held by an earlier lease."""
    it = master(a=4)
    ticket = store(it, 1, lease=LEASE)
    it.reap(99)
    it.unmount(A, 1)
    again = Held(key(1), BLOCK, 1, ticket.id, ticket.id, ticket.offset, None, PutOptions())
    it.mount(99, mount(A, 4), [again])
    assert it.stats().segments[0].evictable_bytes == BLOCK
    it.release(LEASE)
    assert it.stats().segments[0].evictable_bytes == BLOCK
    it.find(99, [key(1)], LeaseId("r2"))
    assert it.stats().segments[0].evictable_bytes == 0
