"""What owners and clients remember: segment contents, copy queues, recent writes."""

from moonserve.core.store.owners import CopyQueue, RecentWrites, SegmentContents
from moonserve.core.store.words import (
    UNSEEN,
    Change,
    Copy,
    Gone,
    Held,
    Orders,
    PutOptions,
    Replica,
    Seen,
    Ticket,
)
from tests.support.pool import A, B, key

OPTIONS = PutOptions()


def held(number: int, id: int) -> Held:
    """A replica."""
    return Held(key(number), 64, 7, id, id, 64 * number, None, OPTIONS)


def orders(after: Seen, seen: Seen, *changes: Change) -> Orders:
    """An answer to a beat."""
    return Orders(after, changes, seen, False, ())


def copy(id: int, left_us: int = 100) -> Copy:
    """A task."""
    return Copy(held(1, id), Replica(B, 0), left_us)


def test_changes_are_taken_in_order_and_once() -> None:
    """An answer to an earlier beat changes nothing."""
    it = SegmentContents()
    it.apply(orders(UNSEEN, (9, 2), held(1, 5), held(2, 6)))
    it.apply(orders(UNSEEN, (9, 1), Gone(key(1), 5)))
    assert (sorted(it.held), it.seen) == ([key(1), key(2)], (9, 2))
    it.apply(orders((9, 2), (9, 3), Gone(key(1), 5)))
    assert list(it.held) == [key(2)]
    it.restart()
    assert it.seen == UNSEEN


def test_the_larger_id_stays() -> None:
    """A change of an earlier put or copy does not drop or overwrite a later replica."""
    it = SegmentContents([held(1, 5)])
    it.drop(key(1), 4)
    it.add(held(1, 3))
    it.apply(orders(UNSEEN, (9, 1), Gone(key(1), 4), held(1, 4)))
    assert it.held[key(1)].id == 5
    it.add(held(1, 6))
    it.drop(key(1), 6)
    assert it.held == {}


def test_a_gone_replica_is_not_added_late() -> None:
    """The answer to a put may come after the change that reports its eviction."""
    it = SegmentContents()
    it.apply(orders(UNSEEN, (9, 1), Gone(key(1), 5)))
    it.add(held(1, 5))
    assert it.held == {}
    it.add(held(1, 6))
    assert it.held[key(1)].id == 6


def test_contents_are_reported_in_pages() -> None:
    """The pages have every replica once; empty contents are one empty page."""
    it = SegmentContents([held(n, n) for n in range(5)])
    assert [len(page) for page in it.pages(2)] == [2, 2, 1]
    assert [change.id for page in it.pages(2) for change in page] == list(range(5))
    assert SegmentContents().pages(2) == [()]
    it = SegmentContents([held(1, 5)])
    it.apply(orders(UNSEEN, (9, 1), Gone(key(1), 5), held(2, 6)))
    assert it.pages(1) == [(held(2, 6),), (Gone(key(1), 5),)], "others may still claim it"


def test_each_task_is_done_once_and_some_at_a_time() -> None:
    """A beat's answer repeats open copies; the owner makes each once."""
    it = CopyQueue(at_once=1)
    it.take(0, [copy(1), copy(2)])
    it.take(10, [copy(1), copy(2)])
    assert it.next(0) == copy(1)
    assert it.next(0) is None
    it.end(1, True)
    assert it.next(0) == copy(2)
    assert it.results() == [(1, True)]
    it.take(0, [copy(1)])
    it.reported([1])
    it.take(0, [copy(1)])
    it.end(2, False)
    assert it.next(0) is None
    assert it.results() == [(2, False)]


def test_tasks_end_with_their_time() -> None:
    """The time counts from the beat; a late copy does not start."""
    it = CopyQueue(at_once=2)
    it.take(50, [copy(1, left_us=100), copy(2, left_us=20)])
    assert it.next(70) == copy(1, left_us=80)
    assert it.next(70) is None


def test_void_tasks_are_stopped_and_not_taken_again() -> None:
    """After the master has dropped the segment, no old copy is made."""
    it = CopyQueue(at_once=1)
    it.take(0, [copy(1), copy(2)])
    it.next(0)
    assert it.forget() == [copy(1)]
    it.take(0, [copy(1), copy(2)])
    assert it.next(0) is None
    it.end(1, True)
    assert it.results() == []


def test_a_client_claims_its_puts() -> None:
    """A put is claimed as under way, then with its checksum, until it is dropped or old."""
    it = RecentWrites()
    it.writing(0, Ticket(5, A, 128, 3), key(1), 64, None, OPTIONS)
    it.writing(0, Ticket(6, A, 192, 3), key(2), 64, key(1), OPTIONS)
    it.ended(10, 5, 7)
    (first, second), removed = it.claims(10, 100)
    assert (first.writing, first.held.checksum, first.held.offset, first.epoch) == (
        False,
        7,
        128,
        3,
    )
    assert (second.writing, second.held.parent) == (True, key(1))
    assert removed == []
    assert it.held(5) == first.held
    it.drop(6)
    it.forget(10)
    assert it.claims(30, 100)[0] == [first]
    it.forget(30)
    assert it.claims(30, 100)[0] == [first], "a claimed put counts as new"
    it.forget(31)
    assert it.claims(31, 100) == ([], [])
    assert it.held(5) is None


def test_a_client_claims_no_put_that_the_master_gave_up() -> None:
    """After a put's time to live without an answer, the extent may be reused."""
    it = RecentWrites()
    for ticket in (5, 6, 7):
        it.writing(0, Ticket(ticket, A, 64 * ticket, 3), key(ticket), 64, None, OPTIONS)
    for ticket in (6, 7):
        it.ended(10, ticket, 7)
    it.acknowledged(20, 7)
    assert [claim.held.id for claim in it.claims(99, 100)[0]] == [5, 6, 7]
    assert [claim.held.id for claim in it.claims(100, 100)[0]] == [7], "claims give no more time"
    assert it.held(6) is not None, "its answer may still come"
    it.forget(100)
    assert [claim.held.id for claim in it.claims(101, 100)[0]] == [7]
    assert it.held(6) is None


def test_a_client_claims_its_removals() -> None:
    """It claims the removed version for as long as its puts."""
    it = RecentWrites()
    it.removed(0, key(1), 5)
    assert it.claims(0, 100) == ([], [(key(1), 5)])
    it.forget(1)
    assert it.claims(1, 100) == ([], [])
