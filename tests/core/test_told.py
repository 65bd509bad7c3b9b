"""Told: the calendar of those who were refused, by hand."""

from __future__ import annotations

from itertools import pairwise

from moonserve.core.request import Counted, Request, Slo
from moonserve.core.schedule.retry import LATEST_US, Told
from moonserve.core.units import RequestId

S = 1_000_000
T = 100 * S
NONE = Slo()


def request(prompt: int, tenant: str = "", slo: Slo = NONE, name: str = "r") -> Request:
    """One of a prompt of its own; the id differs from try to try."""
    return Request(RequestId(name), "m", (prompt,), slo=slo, tenant=tenant)


def told(told: Told, count: int, every_us: int = 2 * S) -> list[int]:
    """As many refused at time T, a second or more before there is a place."""
    return [told.tell(request(at), T, S, every_us) for at in range(count)]


def test_each_of_a_crowd_gets_a_time_of_its_own() -> None:
    """One interval or more apart from the next, also beyond what clients would wait."""
    waits = told(Told(), 60)
    assert waits[0] == S
    assert all(b - a >= 2 * S for a, b in pairwise(waits))
    assert max(waits) > LATEST_US


def test_room_is_kept_for_who_is_due_and_not_against_it() -> None:
    """Newcomers of the same tenant see those who are due; they themselves and others do not."""
    it = Told()
    told(it, 3)
    for now_us, wanted in ((T + S // 2, 1.0), (T + 3 * S, 2.0)):
        assert it.ahead(request(9), now_us) == wanted
    assert it.ahead(request(9, tenant="other"), T + 3 * S) == 0
    it.came(request(1, name="again"), T + 3 * S + S // 2)
    assert it.ahead(request(1, name="again"), T + 3 * S + S // 2) == 0
    it.admitted(request(1, name="again"))
    assert len(it) == 2


def test_who_comes_too_early_is_told_the_rest() -> None:
    """It keeps its time, and has no place before that."""
    it = Told()
    last_us = told(it, 5)[-1]
    it.came(request(4), T + 2 * S)
    assert it.ahead(request(4), T + 2 * S) > 0
    assert it.tell(request(4), T + 2 * S, S, S) == last_us - 2 * S
    assert len(it) == 5


def test_who_came_in_time_and_in_vain_is_next() -> None:
    """It is not sent behind all others."""
    it = Told()
    told(it, 20)
    it.came(request(0, name="again"), T + S)
    assert it.tell(request(0, name="again"), T + S, S, 2 * S) <= 3 * S
    assert len(it) == 20


def test_no_room_is_kept_for_those_who_do_not_come() -> None:
    """Whose time is past is forgotten, and the share that comes is learned, both ways."""
    it = Told()
    told(it, 20, S)
    it.came(request(99), 2 * T)
    assert len(it) == 0
    assert it.share < 0.5
    low = it.share
    it.tell(request(5), 2 * T, S, S)
    it.came(request(5), 2 * T + S)
    assert it.share > low


def test_of_a_new_crowd_all_are_expected_to_come() -> None:
    """That those before it did not says nothing of it: its times lie no nearer to each other."""
    it = Told()
    told(it, 40, S)
    it.came(request(99), 2 * T)
    assert it.share < 0.5
    waits = [it.tell(request(at), 2 * T, S, S) for at in range(20)]
    assert all(b - a >= S for a, b in pairwise(waits))


def test_who_came_in_vain_makes_later_ones_later() -> None:
    """It takes a place that the calendar would give out else."""
    it = Told()
    last_us = told(it, 20)[-1]
    it.came(request(0, name="again"), T + S)
    it.tell(request(0, name="again"), T + S, S, 2 * S)
    assert it.next_us("m", T) == last_us + 2 * S


def test_own_objectives_and_made_up_prompts_keep_no_room() -> None:
    """The first may never be met, the others are of a simulation; they are told times apart."""
    it = Told()
    made_up = Request(RequestId("r"), "m", Counted(5))
    for one in (request(1, slo=Slo(ttft_us=1)), made_up):
        waits = {it.tell(one, 0, 8 * S, S) for _ in range(3)}
        assert len(waits) == 3
    assert len(it) == 0
    assert it.next_us("m", 0) == 0


def test_what_is_remembered_is_bounded() -> None:
    """Of ten thousand who are refused at once."""
    it = Told()
    told(it, 10_000, 1)
    assert len(it) == 4_096
