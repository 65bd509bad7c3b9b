"""RetryCalendar: when refused clients should return, by hand."""

from __future__ import annotations

from itertools import pairwise

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.retry import LATEST_US, RetryCalendar
from moonserve.core.units import BlockKey, RequestId

S = 1_000_000
T = 100 * S
NONE = Slo()


def request(prompt: int, tenant: str = "", slo: Slo = NONE, name: str = "r") -> Request:
    """One of a prompt of its own; the id differs from try to try."""
    return Request(RequestId(name), "m", len((prompt,)), (prompt,), slo=slo, tenant=tenant)


def keys(one: Request) -> list[BlockKey]:
    """The prompt's only token stands for its last full block."""
    return [BlockKey(str(one.prompt).encode())]


def book(it: RetryCalendar, one: Request, now_us: int, first_us: int, every_us: int) -> int:
    """One is refused."""
    return it.book(one, keys(one), now_us, first_us, every_us)


def arrive(it: RetryCalendar, one: Request, now_us: int) -> None:
    """One comes."""
    it.arrive(one, keys(one), now_us)


def refused(it: RetryCalendar, count: int, every_us: int = 2 * S) -> list[int]:
    """As many refused at time T, a second or more before there is a place."""
    return [book(it, request(at), T, S, every_us) for at in range(count)]


def test_each_of_a_crowd_gets_a_time_of_its_own() -> None:
    """One interval or more apart from the next, also beyond what clients would wait."""
    waits = refused(RetryCalendar(), 60)
    assert waits[0] == S
    assert all(b - a >= 2 * S for a, b in pairwise(waits))
    assert max(waits) > LATEST_US


def test_room_is_kept_for_who_is_due_and_not_against_it() -> None:
    """New requests of the same tenant count clients that are due; due and other ones do not."""
    it = RetryCalendar()
    refused(it, 3)
    for now_us, wanted in ((T + S // 2, 1.0), (T + 3 * S, 2.0)):
        assert it.ahead(request(9), now_us) == wanted
    assert it.ahead(request(9, tenant="other"), T + 3 * S) == 0
    arrive(it, request(1, name="again"), T + 3 * S + S // 2)
    assert it.ahead(request(1, name="again"), T + 3 * S + S // 2) == 0
    it.admit(request(1, name="again"), keys(request(1, name="again")))
    assert len(it) == 2


def test_who_comes_too_early_is_told_the_rest() -> None:
    """It keeps its time, and has no place before that."""
    it = RetryCalendar()
    last_us = refused(it, 5)[-1]
    arrive(it, request(4), T + 2 * S)
    assert it.ahead(request(4), T + 2 * S) > 0
    assert book(it, request(4), T + 2 * S, S, S) == last_us - 2 * S
    assert len(it) == 5


def test_who_came_in_time_and_in_vain_is_next() -> None:
    """It is not sent behind all others."""
    it = RetryCalendar()
    refused(it, 20)
    arrive(it, request(0, name="again"), T + S)
    assert book(it, request(0, name="again"), T + S, S, 2 * S) <= 3 * S
    assert len(it) == 20


def test_no_room_is_kept_for_those_who_do_not_come() -> None:
    """Past times are forgotten, and the share of clients that return is learned, both ways."""
    it = RetryCalendar()
    refused(it, 20, S)
    arrive(it, request(99), 2 * T)
    assert len(it) == 0
    assert it.share < 0.5
    low = it.share
    book(it, request(5), 2 * T, S, S)
    arrive(it, request(5), 2 * T + S)
    assert it.share > low


def test_of_a_new_crowd_all_are_expected_to_come() -> None:
    """An earlier crowd that did not return does not make the times of a new one denser."""
    it = RetryCalendar()
    refused(it, 40, S)
    arrive(it, request(99), 2 * T)
    assert it.share < 0.5
    waits = [book(it, request(at), 2 * T, S, S) for at in range(20)]
    assert all(b - a >= S for a, b in pairwise(waits))


def test_who_came_in_vain_makes_later_ones_later() -> None:
    """It takes a place that the calendar would give out else."""
    it = RetryCalendar()
    last_us = refused(it, 20)[-1]
    arrive(it, request(0, name="again"), T + S)
    book(it, request(0, name="again"), T + S, S, 2 * S)
    assert it.next_us("m", T) == last_us + 2 * S


def test_no_room_is_kept_for_clients_that_will_not_come() -> None:
    """Own objectives may never be met; a short prompt has no key; simulated clients never return.

    They get times apart all the same.
    """
    own = request(1, slo=Slo(ttft_us=1))
    calendar, simulated = RetryCalendar(), RetryCalendar(returns=False)
    for it, one, who in (
        (calendar, own, keys(own)),
        (calendar, request(1), []),
        (simulated, request(1), keys(request(1))),
    ):
        assert len({it.book(one, who, 0, 8 * S, S) for _ in range(3)}) == 3
        assert len(it) == 0
        assert it.next_us("m", 0) == 0


def test_what_is_remembered_is_bounded() -> None:
    """Of ten thousand clients that are refused at once."""
    it = RetryCalendar()
    refused(it, 10_000, 1)
    assert len(it) == 4_096
