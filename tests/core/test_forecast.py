"""How full a decode instance will be."""

from __future__ import annotations

import pytest

from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.forecast import Residencies, forecast, room_in_us
from moonserve.core.schedule.residency import Oracle, Residency, Survival
from moonserve.core.units import RequestId

STEP = (0.0, 100.0, 0.0)
"""100 us a pass for each that decodes."""
ORACLE = Oracle(lambda request: 0)


def residencies(
    active: dict[str, int], promised: dict[str, tuple[int, int]] | None = None
) -> Residencies:
    """Decodes since time 0, by length; and promised ones, by (due_us, length)."""
    made = Residencies()
    for name, length in active.items():
        made.promise(RequestId(name), Residency(1, 0, length))
        made.begin(RequestId(name), 0, STEP)
    for name, (due_us, length) in (promised or {}).items():
        made.promise(RequestId(name), Residency(1, due_us, length))
    return made


def test_who_ends_before_does_not_count() -> None:
    """Of two that decode, at 200 us a pass, one has ended when this one comes."""
    load = residencies({"a": 5, "b": 100})
    assert forecast(load, STEP, Residency(1, 900, 9), ORACLE, 0, 0.0) == (300, 300)
    assert forecast(load, STEP, Residency(1, 1_100, 9), ORACLE, 0, 0.0) == (200, 200)


def test_who_comes_before_counts_and_who_comes_later_does_not() -> None:
    """Earlier promised decodes are there, unless they have ended by then; none counts twice."""
    load = residencies({"a": 1_000}, {"b": (1_000, 100), "c": (1_100, 1), "d": (9_000, 100)})
    assert forecast(load, STEP, Residency(1, 500, 9), ORACLE, 0, 0.0)[0] == 200
    assert forecast(load, STEP, Residency(1, 1_050, 9), ORACLE, 0, 0.0)[0] == 300
    assert forecast(load, STEP, Residency(1, 2_000, 9), ORACLE, 0, 0.0)[0] == 300  # c has ended
    assert forecast(load, STEP, Residency(1, 9_500, 9), ORACLE, 0, 0.0)[0] == 400


def test_a_promise_that_is_overdue_counts_as_here() -> None:
    """A decode whose prefill should have ended by now may begin at any moment."""
    load = residencies({}, {"a": (10, 100)})
    assert forecast(load, STEP, Residency(1, 600, 9), ORACLE, 500, 0.0)[0] == 200


def test_deviations_keep_room() -> None:
    """What is certain has no spread; what is not is taken higher, the more so with more of it."""
    load = residencies({"a": 100, "b": 100})
    assert forecast(load, STEP, Residency(1, 200, 9), ORACLE, 0, 2.0) == (300, 300)
    model, load = Survival(), Residencies()
    request = Request(RequestId("r"), "m", 1, stopping=Stopping(1_000))
    for name in "abcd":
        load.promise(RequestId(name), model.residency(request, 1, 0))
        load.begin(RequestId(name), 0, STEP)
    joins = model.residency(request, 1, 40_000)
    mean, most = forecast(load, STEP, joins, model, 0, 2.0)
    assert 100 < mean < most < 500 + 200


def test_ages_are_counted_in_passes() -> None:
    """Alone a token takes 100 us, with another decode 200: the earlier one is ahead."""
    load = residencies({"a": 1_000})
    load.promise(RequestId("b"), Residency(1, 1_000, 1_000))
    load.begin(RequestId("b"), 1_000, STEP)
    assert load.passes(2_000, STEP) == 10 + 5
    assert load.active[RequestId("b")].began_tokens == 10
    load.end(RequestId("a"), 2_000, STEP)
    assert load.passes(2_300, STEP) == 18


@pytest.mark.parametrize("count", [1, 16, 17, 500])
def test_a_crowd_of_promises_is_all_counted(count: int) -> None:
    """Looked at in groups where they are many, and none is left out."""
    load = residencies({}, {f"r{at:03}": (1_000 + at, 10**6) for at in range(count)})
    joins = Residency(1, 5_000, 9)
    assert forecast(load, STEP, joins, ORACLE, 0, 0.0)[0] == 100 * (count + 1)


def test_the_short_overtake() -> None:
    """Where requests with a short way to decode keep coming, a long way is met by more of them."""
    load = Residencies()
    for at in range(64):
        residency = Residency(1, 0, 10)
        residency.lag_us = 1_000
        load.promise(RequestId(f"r{at}"), residency)
        load.begin(RequestId(f"r{at}"), at * 1_000, STEP)
        load.end(RequestId(f"r{at}"), at * 1_000, STEP)
    near, far = (load.unseen_us(lag_us, 64_000, STEP) for lag_us in (1_000, 11_000))
    assert near == 0
    assert 0 < far <= 100 * 10 * 64 / 64


def test_room_comes_when_somebody_ends() -> None:
    """The time until one more fits: at least a second, at most ten minutes."""
    step = (0.0, 100_000.0, 0.0)
    assert room_in_us(residencies({"a": 5}), step, 1, 200_000, ORACLE, 0) == 1_000_000
    full = Residencies()
    for name in ("a", "b"):
        full.promise(RequestId(name), Residency(1, 0, 40))
        full.begin(RequestId(name), 0, step)
    assert 4_000_000 <= room_in_us(full, step, 1, 200_000, ORACLE, 0) <= 16_000_000
    assert room_in_us(full, step, 1, 50_000, ORACLE, 0) == 600_000_000


def test_who_finds_no_place_waits_until_one_is_free() -> None:
    """With more decodes than places, outputs of 40 end at 2 in 40 passes of 30."""
    load = residencies({"a": 40, "b": 40})
    joining = Residency(1, 0, 40, expected=40)
    step = (0.0, 10.0, 0.0)
    assert forecast(load, step, joining, ORACLE, 0, 0.0, 0, 3) == (30, 30)
    assert forecast(load, step, joining, ORACLE, 0, 0.0, 0, 2) == (30, 30 + 40 * 30 // 2)
    full = Residencies()
    full.promise(RequestId("a"), Residency(1, 0, 40))
    full.begin(RequestId("a"), 0, (0.0, 100_000.0, 0.0))
    wait_us = room_in_us(full, (0.0, 100_000.0, 0.0), 1, 250_000, ORACLE, 0, 1)
    assert 4_000_000 <= wait_us <= 8_000_000
