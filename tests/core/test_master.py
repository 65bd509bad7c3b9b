"""Master: the rules of puts, leases, eviction and segments, one example each."""

import msgspec
import pytest

from moonserve.core.errors import UnknownSegment
from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.store.catalog import Catalog, Leases
from moonserve.core.store.words import Address, Exists, Full, Holder, Ticket
from moonserve.core.units import BlockKey, LeaseId
from tests.support.pool import (
    BLOCK,
    LEASE,
    TERMS,
    A,
    B,
    key,
    master,
    mount,
    start,
    store,
)


def test_a_put_is_invisible_until_it_ends() -> None:
    """Until its put has ended, `find` and `locate` miss an object, and no event reports it."""
    it = master(a=2)
    (ticket,) = it.put_start(0, A, [(key(1), BLOCK)], None)
    assert isinstance(ticket, Ticket)
    assert it.find(0, [key(1)], LEASE) == []
    assert it.locate(key(1)) is None
    assert it.drain_events() == []
    it.put_end(0, [(ticket.id, 7)], None)
    (found,) = it.find(0, [key(1)], LEASE)
    assert (found.checksum, found.version, found.size) == (7, ticket.id, BLOCK)
    assert it.drain_events() == [BlocksStored(A, (BlockKey(key(1)),), None, "dram", 1)]


def test_find_stops_at_the_first_missing_key() -> None:
    """A key behind a gap is useless for a prefix, so it is not leased."""
    it = master(a=3)
    store(it, 1)
    store(it, 3)
    assert [f.key for f in it.find(0, [key(1), key(2), key(3)], LEASE)] == [key(1)]
    (segment,) = it.stats().segments
    assert segment.evictable_bytes == BLOCK


def test_stale_tickets_complete_nothing() -> None:
    """An aborted, ended or reaped ticket is refused, also after its extent was reused."""
    it = master(a=1)
    (old,) = it.put_start(0, A, [(key(1), BLOCK)], None)
    assert isinstance(old, Ticket)
    it.reap(50)
    (new,) = it.put_start(60, A, [(key(1), BLOCK)], None)
    assert isinstance(new, Ticket)
    assert new.offset == old.offset
    assert it.put_end(60, [(old.id, 7)], None) == [None]
    it.put_abort([old.id])
    assert it.put_end(60, [(new.id, 8), (new.id, 8)], None) == [new.id, None]
    found = it.locate(key(1))
    assert found is not None
    assert found.checksum == 8


def test_two_puts_of_one_key_leave_one_object() -> None:
    """The first put to end makes the object; the second one's extent is freed, its lease holds."""
    it = master(a=4, b=4)
    (first,) = it.put_start(0, A, [(key(1), BLOCK)], None)
    (second,) = it.put_start(0, B, [(key(1), BLOCK)], None)
    assert isinstance(first, Ticket)
    assert isinstance(second, Ticket)
    assert it.put_end(0, [(second.id, 7)], None) == [second.id]
    assert it.put_end(0, [(first.id, 7)], LEASE) == [second.id]
    assert [s.used_bytes for s in it.stats().segments] == [0, BLOCK]
    assert it.stats().leases == 1
    assert it.put_start(0, A, [(key(1), BLOCK)], None) == [Exists()]


def test_space_is_taken_in_the_stated_order() -> None:
    """First the owner's free space, then the freest segment's, then the owner's oldest objects."""
    it = master(a=1, b=1, c=2)
    assert [store(it, n).segment for n in range(4)] == ["a", "c", "b", "c"]
    assert store(it, 4).segment == "a"
    assert it.locate(key(0)) is None
    assert it.stats().evicted == 1


def test_leased_objects_are_never_evicted() -> None:
    """If all objects are leased, one item gets no space, and the rest of the batch goes on."""
    it = master(a=2)
    store(it, 1, lease=LEASE)
    store(it, 2)
    outcomes = it.put_start(0, A, [(key(3), BLOCK), (key(4), BLOCK), (key(1), BLOCK)], LEASE)
    assert isinstance(outcomes[0], Ticket)
    assert outcomes[1:] == [Full(), Exists()]
    it.release(LEASE)
    assert isinstance(it.put_start(0, A, [(key(4), BLOCK)], None)[0], Ticket)


def test_a_released_chain_is_evicted_from_its_tail() -> None:
    """After the release of a whole chain, its last block is evicted first: a prefix is left."""
    it = master(a=3)
    for number in (1, 2, 3):
        store(it, number)
    it.find(0, [key(1), key(2), key(3)], LEASE)
    it.release(LEASE)
    store(it, 4)
    store(it, 5)
    assert [f.key for f in it.find(0, [key(1), key(2), key(3)], LEASE)] == [key(1)]


def test_leases_end_by_time_and_are_renewed_by_find() -> None:
    """A lease lasts its time to live after its last use, for all its objects."""
    it = master(a=2)
    store(it, 1)
    store(it, 2)
    it.find(0, [key(1)], LEASE)
    it.find(90, [key(2)], LEASE)
    it.reap(189)
    assert it.stats().leases == 1
    it.reap(190)
    assert it.stats().leases == 0
    assert it.stats().segments[0].evictable_bytes == 2 * BLOCK


def test_a_released_lease_is_dead() -> None:
    """Calls that come after the release succeed and hold nothing, also if they are the first."""
    it = master(a=3)
    store(it, 1)
    (ticket,) = it.put_start(0, A, [(key(2), BLOCK)], LEASE)
    assert isinstance(ticket, Ticket)
    it.release(LEASE)
    assert it.put_end(0, [(ticket.id, 7)], LEASE) == [ticket.id]
    assert it.put_start(0, A, [(key(1), BLOCK)], LEASE) == [Exists()]
    assert [f.key for f in it.find(0, [key(1), key(2)], LEASE)] == [key(1), key(2)]
    assert it.stats().leases == 0
    assert it.stats().segments[0].evictable_bytes == 2 * BLOCK
    assert it.find(0, [key(1)], LeaseId("r1/2"))
    assert it.stats().leases == 1
    it.release(LeaseId("unused"))
    assert it.find(0, [key(1)], LeaseId("unused"))
    assert it.stats().leases == 1


def test_dead_names_are_forgotten_by_time_and_number() -> None:
    """A released name is usable again after a lease's time to live, or after many more releases."""
    it = master(a=1)
    store(it, 1)
    it.release(LEASE)
    it.reap(99)
    it.find(99, [key(1)], LEASE)
    assert it.stats().leases == 0
    it.reap(100)
    it.find(100, [key(1)], LEASE)
    assert it.stats().leases == 1
    leases = Leases(Catalog(TERMS, first_id=1), max_released=2)
    for name in ("r1", "r2", "r3"):
        leases.release(LeaseId(name))
        leases.use(0, [], LeaseId(name))
    assert leases.names() == []
    leases.use(0, [], LeaseId("r1"))
    assert leases.names() == ["r1"]


def test_a_restarted_owner_starts_empty() -> None:
    """A newer epoch drops the old one's objects, leased or not, once the old one is silent for
    longer than beats take. An older epoch is refused."""
    it = master(a=2)
    store(it, 1, lease=LEASE)
    it.drain_events()
    assert it.mount(0, mount(A, 2, epoch=1))
    assert it.locate(key(1)) is not None
    assert not it.mount(99, mount(A, 2, epoch=2))
    assert it.mount(100, mount(A, 2, epoch=2))
    assert it.drain_events() == [BlocksCleared(A, "dram", 1)]
    assert not it.mount(0, mount(A, 2, epoch=1))
    assert not it.beat(0, A, epoch=1)
    it.unmount(A, epoch=1)
    assert list(it.addresses()) == [A]
    it.release(LEASE)
    assert it.stats().segments[0].used_bytes == 0


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_beating_segment_keeps_its_name(epoch: int) -> None:
    """While a segment beats, no other start of its owner gets the name, whatever the epoch. The
    other start can see the holder and its number of beats."""
    it = master(a=2)
    other = msgspec.structs.replace(
        mount(A, 2, epoch=epoch), address=Address("h", 9, "", b"x" * 16)
    )
    for now_us in range(0, 500, 50):
        assert it.beat(now_us, A, 1)
        assert not it.mount(now_us + 49, other)
    assert it.holder(A) == Holder(mount(A, 2).address, 10)
    it.unmount(A, 1)
    assert it.holder(A) is None
    assert it.mount(500, other)


def test_a_silent_segment_is_dropped_with_its_owners_puts_elsewhere() -> None:
    """A silent segment's objects go, and so do its owner's puts onto other segments."""
    it = master(a=1, b=1)
    store(it, 1, owner=A)
    (spilled,) = it.put_start(190, A, [(key(2), BLOCK)], None)
    assert isinstance(spilled, Ticket)
    assert spilled.segment == B
    assert it.beat(150, B, epoch=1)
    assert it.reap(200) == [A]
    assert it.stats().pending_puts == 0
    assert [(s.id, s.used_bytes) for s in it.stats().segments] == [(B, 0)]
    with pytest.raises(UnknownSegment):
        it.put_start(200, A, [(key(2), BLOCK)], None)


def test_a_lease_on_a_lost_object_does_not_count_for_its_successor() -> None:
    """A key that is lost and put again is a new object: an old lease neither holds nor frees it."""
    it = master(a=1)
    it.discard(key(1), store(it, 1, lease=LEASE).id)
    again = store(it, 1, lease=LeaseId("other"))
    it.release(LEASE)
    assert start(it, 2) == Full()
    it.discard(key(1), again.id)
    store(it, 1)
    it.find(0, [key(1)], LeaseId("other"))
    assert it.put_start(0, A, [(key(2), BLOCK)], None) == [Full()]


def test_puts_onto_a_segment_that_left_are_stale() -> None:
    """A ticket cannot make an object after its segment has left."""
    it = master(a=1, b=1)
    store(it, 1)
    (spilled,) = it.put_start(0, A, [(key(2), BLOCK)], None)
    assert isinstance(spilled, Ticket)
    it.unmount(spilled.segment, epoch=1)
    assert it.put_end(0, [(spilled.id, 7)], None) == [None]
    assert it.locate(key(2)) is None
