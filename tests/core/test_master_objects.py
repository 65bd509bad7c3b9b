"""Master: names of any bytes, pins, removal, quotas, group eviction and scans."""

import pytest

from moonserve.core.store.evict import EVICTIONS
from moonserve.core.store.words import Full, OverQuota, PutOptions, Removal, Terms, Ticket
from moonserve.core.units import LeaseId
from tests.support.pool import BLOCK, LEASE, A, B, copy_all, key, master, start, store, where

PINNED = PutOptions(pin=True)
QUOTA = Terms(
    lease_ttl_us=100, put_ttl_us=50, segment_ttl_us=200, high=1.0, quotas={"t": 2 * BLOCK}
)
OF_T = PutOptions(tenant="t")


def test_get_does_not_stop_at_a_missing_key() -> None:
    """Each key has its own answer, and the objects that exist are leased."""
    it = master(a=4)
    store(it, 1)
    store(it, 3)
    got = it.get(0, [key(1), key(2), key(3)], LEASE)
    assert [None if found is None else found.key for found in got] == [key(1), None, key(3)]
    assert it.stats().segments[0].evictable_bytes == 0
    assert it.exists([key(3), key(2)]) == [True, False]


def test_any_bytes_are_no_blocks() -> None:
    """Objects that are not blocks cause no event and have no parent."""
    it = master(a=4)
    outcomes = it.put_start(
        0, None, [(b"x/1", 5), (b"x/2", 5)], None, None, PutOptions(blocks=False)
    )
    ends = [(outcome.id, 7) for outcome in outcomes if isinstance(outcome, Ticket)]
    assert it.put_end(0, ends, None) == [id for id, _ in ends]
    assert it.drain_events() == []
    assert [found.key for found in it.scan(b"x/", None, 10)] == [b"x/1", b"x/2"]
    orders = it.beat(0, A, 1)
    assert orders is not None
    assert [change.parent for change in orders.changes] == [None, None]  # type: ignore[union-attr]


def test_a_scan_goes_on_where_it_stopped() -> None:
    """Its pages have every key with the prefix once, in the order of keys."""
    it = master(a=20)
    for number in (5, 3, 9, 1):
        store(it, number)
    first = it.scan(b"", None, 3)
    assert [found.key for found in first] == [key(1), key(3), key(5)]
    assert [found.key for found in it.scan(b"", first[-1].key, 3)] == [key(9)]
    assert it.scan(b"other", None, 3) == []


def test_removal_has_an_answer_per_key() -> None:
    """Removed with its version, missing, or refused because it is leased, unless forced."""
    it = master(a=4)
    version = store(it, 1).id
    leased = store(it, 2, lease=LEASE).id
    keys = [key(1), key(2), key(3)]
    assert it.remove(0, keys) == [
        Removal("removed", version),
        Removal("leased"),
        Removal("missing", leased),
    ]
    assert it.remove(0, [key(2)], force=True) == [Removal("removed", leased)]
    assert it.stats().segments[0].used_bytes == 0
    store(it, 2)
    it.release(LEASE)
    assert it.stats().segments[0].evictable_bytes == BLOCK, "the old lease is not the new object's"


def test_pinned_objects_are_not_evicted() -> None:
    """A pinned object stays until it is unpinned or removed."""
    it = master(a=1)
    store(it, 1, options=PINNED)
    it.find(0, [key(1)], LEASE)
    it.release(LEASE)
    assert start(it, 2) == Full()
    assert it.evict(0, A, BLOCK) == (0, False)
    assert it.pin([key(1), key(9)], False) == [True, False]
    assert it.pin([key(1)], True) == [True]
    assert start(it, 2) == Full()
    it.pin([key(1)], False)
    assert isinstance(start(it, 2), Ticket)


def test_an_operator_may_evict() -> None:
    """As many objects go as the size needs, the oldest first."""
    it = master(a=4)
    for number in (1, 2, 3):
        store(it, number)
    assert it.evict(0, A, BLOCK + 1) == (2 * BLOCK, False)
    assert where(it, 3) == [A]
    assert it.evict(0, B, 1) == (0, False)


def test_a_tenant_evicts_its_own_oldest_first() -> None:
    """Over its quota its own objects are evicted; if none can be, the put is refused."""
    it = master(QUOTA, a=9)
    store(it, 0)
    store(it, 1, options=OF_T)
    store(it, 2, options=OF_T)
    it.find(0, [key(1)], LEASE)
    store(it, 3, options=OF_T)
    assert [bool(where(it, n)) for n in range(4)] == [True, True, False, True]
    assert it.stats().tenants == {"": BLOCK, "t": 2 * BLOCK}
    it.find(0, [key(3)], LEASE)
    assert start(it, 4, options=OF_T) == OverQuota("t", 2 * BLOCK)
    it.release(LEASE)
    assert isinstance(start(it, 4, options=OF_T), Ticket)


def test_a_quota_counts_all_replicas_and_what_is_being_written() -> None:
    """Two replicas of two blocks count as four blocks before they are made."""
    it = master(QUOTA, a=9, b=9)
    both = PutOptions(tenant="t", replicas=2)
    store(it, 1, options=both)
    copy_all(it, B)
    assert it.stats().tenants == {"t": 2 * BLOCK}
    assert isinstance(start(it, 2, options=both), Ticket)
    assert where(it, 1) == []
    assert start(it, 3, options=both) == OverQuota("t", 2 * BLOCK)
    it.reap(50)
    assert it.stats().tenants == {}


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_chain_goes_tail_first_under_every_order(eviction: str) -> None:
    """Under every order, a block goes after the blocks that continue it here."""
    it = master(Terms(eviction=eviction, high=1.0), a=6)
    for number in (1, 2, 3):
        store(it, number, parent=key(number - 1) if number > 1 else None)
    for turn in range(3):
        it.find(0, [key(3)], LeaseId(f"{turn}"))
        it.release(LeaseId(f"{turn}"))
    left = []
    for _ in range(3):
        it.evict(0, A, BLOCK)
        left.append([n for n in (1, 2, 3) if where(it, n)])
    assert left == [[1, 2], [1], []]


def test_a_leased_tail_does_not_keep_its_head() -> None:
    """A free block may go though a held block continues it."""
    it = master(a=6)
    for number, parent in ((1, None), (2, 1), (3, 2), (4, 1)):
        store(it, number, parent=None if parent is None else key(parent))
    it.find(0, [key(3)], LEASE)
    it.evict(0, A, BLOCK)
    it.evict(0, A, BLOCK)
    assert [n for n in (1, 2, 3, 4) if where(it, n)] == [1, 3]
    it.evict(0, A, BLOCK)
    assert [n for n in (1, 2, 3, 4) if where(it, n)] == [3]


def test_a_quota_does_not_keep_a_segment_from_draining() -> None:
    """A moving object may count twice for a moment, beyond the quota."""
    it = master(QUOTA, a=9, b=9)
    for number in (1, 2):
        store(it, number, options=OF_T)
    it.find(0, [key(1), key(2)], LEASE)
    it.drain(0, A)
    copy_all(it, B)
    it.release(LEASE)
    it.reap(1)
    assert [where(it, n) for n in (1, 2)] == [[B], [B]]
    assert it.stats().tenants == {"t": 2 * BLOCK}
