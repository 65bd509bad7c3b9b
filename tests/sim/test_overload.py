"""More than decode can take, in every mode of admission: what is kept, and what is wasted."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.trace import Row, Trace

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "ttft": {},
    "early": {},
    "predictive": {},
    "uniform": {"admission": "predictive", "predictor": "uniform"},
    "oracle": {"admission": "predictive", "predictor": "oracle"},
}
GOAL = Slo(30_000_000, 100_000)


@cache
def long_prompts() -> Trace:
    """Prefills of 4.5 s or so, on eight instances; one decodes for half of what they can do."""
    rng, rows, at_us = Random(1), [], 0
    for number in range(300):
        tokens = round(32_000 * math.exp(rng.gauss(0, 0.3)))
        output = 2 + round(100 * math.exp(rng.gauss(0, 0.5)))
        rows.append(
            Row(at_us, tokens, output, tuple(range(number * 999, number * 999 + tokens // 512)))
        )
        at_us += round(rng.expovariate(2.0) * 1e6)
    return Trace("long", 512, rows)


@cache
def ran(mode: str, first_token: str = "decode") -> Simulation:
    """A whole run in this mode."""
    values = {"admission": mode, "split": "8+1", "tbt_slo": "100ms", "first_token": first_token}
    setup = msgspec.structs.replace(setup_of({**values, **MODES[mode]}), sample_us=1_000_000)
    sim = Simulation(long_prompts(), setup)
    assert sim.run()
    return sim


@pytest.mark.parametrize("mode", MODES)
def test_everybody_is_accounted_for(mode: str) -> None:
    """Refusals by reason add up, and the ledger is empty at the end."""
    sim = ran(mode)
    found = measure(sim, 0.0).summary
    reasons = ("rejected_ttft_slo", "rejected_tbt_slo", "dropped_tbt_slo", "rejected_other")
    assert sum(found[reason] for reason in reasons) == found["rejected"]
    assert found["completed"] + found["rejected"] == found["requests"]
    assert set(msgspec.structs.astuple(sim.conductor.promised())) == {0}
    for view in sim.conductor.view.instances.values():
        assert not view.residencies.active
        assert not view.residencies.promised
        assert view.residencies.context == 0


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_no_member_is_broken_by_who_joins(mode: str) -> None:
    """Nearly every served request meets both goals, whatever comes after."""
    found = measure(ran(mode), 0.0).summary
    assert found["rejected"] > 50
    assert found["attainment"] * found["requests"] >= 0.97 * found["completed"]


def test_prediction_wastes_less_and_serves_as_much() -> None:
    """Where the way to decode is long: far less waste than early, and more tokens in time."""
    early, ours = (measure(ran(mode), 0.0).summary for mode in ("early", "predictive"))
    assert early["wasted_prefill_s"] > 50
    assert ours["wasted_prefill_s"] < 0.2 * early["wasted_prefill_s"]
    assert ours["goodput_tokens_per_s"] > early["goodput_tokens_per_s"]
    assert ours["seesaw_amplitude_decode"] < early["seesaw_amplitude_decode"]


def test_survival_predicts_better_than_the_load_now_and_the_oracle_better_still() -> None:
    """Errors of the TBT that is predicted for the moment when prefill ends."""
    errors = [
        measure(ran(mode), 0.0).summary["decode_tbt_error_p50_ms"]
        for mode in ("early", "predictive", "oracle")
    ]
    assert errors == sorted(errors, reverse=True)


def test_a_first_token_is_kept_until_decode_takes_its_request() -> None:
    """Where prefill streams it: a request that is refused afterwards has sent no token."""
    sim = ran("predictive", "prefill")
    held = 0
    for served in sim.served:
        if served.outcome == "completed" and served.calls:
            assert served.first_us is not None
            assert served.prefilled_us is not None
            assert served.first_us >= served.prefilled_us
            held += served.first_us > served.prefilled_us
    assert held > 0


@pytest.mark.parametrize("mode", ["early", "predictive"])
def test_places_in_decode_that_are_taken_make_nobody_wait_between_tokens(mode: str) -> None:
    """Eight decode at a time and more want to: served requests go on without waiting."""
    setup = setup_of({"admission": mode, "split": "8+1", "tbt_slo": "100ms", "decode_seqs": 8})
    sim = Simulation(long_prompts(), setup)
    assert sim.run()
    found = measure(sim, 0.0)
    assert found.gaps_ms.max() < 3 * 100
    assert found.summary["attainment"] > 0.4


@cache
def short_prompts() -> Trace:
    """Little to prefill, and more to decode than two instances can."""
    rng, rows, at_us = Random(1), [], 0
    for number in range(900):
        output = 2 + round(150 * math.exp(rng.gauss(0, 1.0)))
        rows.append(Row(at_us, 8_000, output, tuple(range(number * 99, number * 99 + 15))))
        at_us += round(rng.expovariate(2.0) * 1e6)
    return Trace("short", 512, rows)


def test_a_second_token_that_is_late_leaves_the_goal_met() -> None:
    """First token from prefill: decode is not filled so far that all new requests just miss."""
    good = {}
    for mode in ("ttft", "early", "predictive"):
        setup = setup_of({"admission": mode, "split": "8+2", "tbt_slo": "100ms"})
        sim = Simulation(short_prompts(), setup)
        assert sim.run()
        found = measure(sim, 0.0).summary
        good[mode] = found["goodput_rps"]
    assert found["wasted_prefill_s"] < 10
    assert good["predictive"] > 0.98 * max(good.values())
