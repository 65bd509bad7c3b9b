"""One sentence on how the cluster does."""

from __future__ import annotations

from typing import Any

import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.history import REASONS, Pools, Tally
from moonserve.core.schedule.verdict import _WHY, binding, verdict

SLO = Slo(2_000_000, 100_000)
THERE = {"prefills": 3, "decodes": 2}


def tally(**counts: Any) -> Tally:
    """These counts; `refused` by reason."""
    made = Tally()
    for name, value in counts.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("counts", "levels", "level", "text"),
    [
        ({"in_time": 1_234}, {}, "good", "All 1,234 requests of the last minute were in time."),
        (
            {"in_time": 999, "late": 1},
            {"decode_slots": 0.9},
            "good",
            "99% of 1,000 requests of the last minute were in time; decode binds (90% full): 1%"
            " came late.",
        ),
        (
            {"in_time": 71, "late": 4, "failed": 5, "refused": {"tbt_slo": 15, "tbt_slo_late": 5}},
            {"decode_slots": 0.97, "prefill_busy": 0.99},
            "bad",
            "71% of 100 requests of the last minute were in time; decode binds (97% full): 20% were"
            " refused, mostly because decode had no room within the TBT objectives, 5% failed, 4%"
            " came late.",
        ),
        (
            {"in_time": 95, "refused": {"ttft_slo": 5}},
            {"prefill_busy": 0.8, "queue_ms": 1_900},
            "late",
            "95% of 100 requests of the last minute were in time; prefill binds (95% full): 5% were"
            " refused, because they would have missed their TTFT objective.",
        ),
        (
            {},
            {},
            "idle",
            "No request ended in the last minute; none is under way.",
        ),
        (
            {},
            {"under_way": 7},
            "idle",
            "No request ended in the last minute; 7 are under way.",
        ),
        (
            {"refused": {"nobody_alive": 1_200}},
            {"decodes": 0},
            "bad",
            "No decode instance is there, so nothing can be served; 1,200 requests were refused in"
            " the last minute.",
        ),
        (
            {},
            {"decodes": 0, "prefills": 0},
            "bad",
            "No prefill and no decode instance is there, so nothing can be served.",
        ),
    ],
)
def test_the_verdict_says_what_limits(
    counts: dict[str, Any], levels: dict[str, Any], level: str, text: str
) -> None:
    """How many were in time, which pool binds, and what became of the others."""
    said = verdict(tally(**counts), 60, Pools(**{**THERE, **levels}), SLO, 0)
    assert said.text.startswith(text)
    assert said.level == level


def test_an_alarm_spoils_a_good_verdict() -> None:
    """Requests are in time, yet an operator should look."""
    said = verdict(tally(in_time=9), 12, Pools(**THERE), Slo(), 1)
    assert (said.level, said.text) == ("late", "All 9 requests of the last 12 s were served.")


def test_what_was_refused_names_the_binding_pool() -> None:
    """Refusals tell more than how full a pool is; without them the fuller one binds, if it is
    nearly full by its load or by its objective."""
    full = Pools(prefill_busy=1.0, **THERE)
    assert binding(tally(refused={"tbt_slo": 1}), full, SLO) == "decode"
    assert binding(tally(), full, SLO) == "prefill"
    assert binding(tally(), Pools(step_ms=90, **THERE), SLO) == "decode"
    assert binding(tally(), Pools(step_ms=90, **THERE), Slo()) == "none"
    assert binding(tally(), Pools(decode_kv=0.74, **THERE), SLO) == "none"


def test_every_reason_has_its_words() -> None:
    """A refusal of any kind is said in words."""
    assert set(REASONS) == set(_WHY)
