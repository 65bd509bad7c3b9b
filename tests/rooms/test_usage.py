"""Sums over requests that are over: outcomes, the hit funnel, usage by tenant, time by stage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Candidate, Decision, Stage
from moonserve.core.schedule.record import Measured, PrefillTimes, Record
from moonserve.core.units import InstanceId, RequestId
from moonserve.live.control import usage
from moonserve.live.control.usage import UsageSums
from moonserve.live.http.message import Response

P0, P1, D0 = InstanceId("p0"), InstanceId("p1"), InstanceId("d0")
CHOSEN = Candidate(P0, 400, 600, None, 1_000, 2_000, 3_000, 0.0)
DECISION = Decision("kvcache_centric", P0, D0, 1_000, False, 5_000, 11_000, 20_000, 800, CHOSEN, 2)
PARTS = PrefillTimes(queue_us=1_000, load_us=2_000, compute_us=4_000, publish_us=500)
SERVED = Record(
    RequestId("r"),
    "m",
    "acme",
    0,
    1_000,
    (),
    Slo(),
    arrived_us=0,
    decision=DECISION,
    attempts=1,
    prefill_us=5_000,
    prefilled_us=13_000,
    decode_us=13_000,
    first_us=13_000,
    ended_us=63_000,
    spent_us=9_000,
    measured=Measured(50, 550, 1_000, handover_us=10_000, prefill=PARTS),
    outcome="length",
    is_good=True,
)
REFUSED = msgspec.structs.replace(
    SERVED, attempts=0, outcome="refused", reason="ttft_slo", is_good=None, measured=Measured()
)


def but(**fields: Any) -> Record:
    """The served record with other fields."""
    return msgspec.structs.replace(SERVED, **fields)


def counted(*records: Record) -> UsageSums:
    """The sums over these requests."""
    sums = UsageSums()
    for record in records:
        sums.ended(record)
    return sums


def samples(sums: UsageSums) -> dict[str, float]:
    """Values by name, with the values of labels behind it."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in sums.metrics()
        for sample in family.samples
    }


def test_a_served_request_is_in_all_sums() -> None:
    """Each number of its record is counted once, in seconds and tokens."""
    found = samples(counted(SERVED, SERVED))
    assert found["moonserve_ended_requests_total in_time"] == 2
    stages = ("prompt", "held", "local", "promised", "delivered")
    funnel = [found[f"moonserve_prefix_{stage}_tokens_total"] for stage in stages]
    assert funnel == [2_000, 1_600, 800, 1_200, 1_100]
    assert found["moonserve_prefix_unreported_requests_total"] == 0
    wanted = {
        "requests": 2,
        "refused_requests": 0,
        "prompt_tokens": 2_000,
        "cached_tokens": 1_100,
        "completion_tokens": 100,
        "prefill_seconds": 0.012,
        "decode_seconds": 0.08,
        "wasted_seconds": 0,
    }
    assert {name: found[f"moonserve_tenant_{name}_total acme"] for name in wanted} == wanted
    took = {
        "waited": 0.005,
        "prefill": 0.008,
        "queue": 0.001,
        "load": 0.002,
        "compute": 0.004,
        "publish": 0.0005,
        "handover": 0.01,
        "decode": 0.04,
    }
    sums = {stage: found[f"moonserve_stage_seconds_sum {stage}"] for stage in took}
    assert sums == pytest.approx({stage: 2 * seconds for stage, seconds in took.items()})
    assert found["moonserve_stage_seconds_bucket waited 0.002"] == 0
    assert found["moonserve_stage_seconds_bucket waited 0.005"] == 2
    assert found["moonserve_stage_seconds_count waited"] == 2


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        (SERVED, "in_time"),
        (but(is_good=False), "late"),
        (REFUSED, "refused"),
        (but(outcome="failed", is_good=None), "failed"),
        (but(outcome="engine answered 503", is_good=None), "failed"),
        (but(outcome="engine answered 400", is_good=None), "engine_refused"),
        (but(outcome="cancelled", is_good=None), "cancelled"),
    ],
)
def test_every_request_has_one_outcome(record: Record, outcome: usage.Outcome) -> None:
    """A client that leaves is no failure of the cluster, a 5xx of an engine is."""
    sums = counted(record)
    assert sums.outcomes == dict.fromkeys(sums.outcomes, 0) | {outcome: 1}
    [row] = sums.tenants.values()
    assert (row.requests, row.judged) == (1, outcome not in ("cancelled", "engine_refused"))
    assert (row.in_time, row.refused, row.failed) == (
        outcome == "in_time",
        outcome == "refused",
        outcome == "failed",
    )


def test_a_refused_request_used_nothing() -> None:
    """It has a decision, which admission did not accept; only what it wasted counts."""
    found = samples(counted(msgspec.structs.replace(REFUSED, attempts=1, wasted_us=7_000)))
    assert found["moonserve_prefix_prompt_tokens_total"] == 0
    assert found["moonserve_stage_seconds_count prefill"] == 0
    assert found["moonserve_tenant_wasted_seconds_total acme"] == 0.007
    assert samples(counted(REFUSED))["moonserve_tenant_prompt_tokens_total acme"] == 0


def test_an_engine_that_reports_nothing_is_left_out_of_the_funnel() -> None:
    """Else its hits would look lost. Its prefill counts as predicted."""
    found = samples(counted(but(measured=Measured(50, handover_us=10_000))))
    assert found["moonserve_prefix_prompt_tokens_total"] == 0
    assert found["moonserve_prefix_unreported_requests_total"] == 1
    assert found["moonserve_tenant_prefill_seconds_total acme"] == 0.009
    assert found["moonserve_stage_seconds_count prefill"] == 1
    assert found["moonserve_stage_seconds_count queue"] == 0


def test_prefill_time_is_what_was_of_use() -> None:
    """Of a group all members count, as predicted; what was wasted is counted as that only."""
    group = (Stage(P0, 600, 800, 5_000), Stage(P1, 800, 1_000, 4_000))
    shared = but(decision=msgspec.structs.replace(DECISION, stages=group))
    wasted = but(spent_us=0, wasted_us=9_000)
    for record, seconds in ((SERVED, 0.006), (shared, 0.009), (wasted, 0.0)):
        [row] = counted(record).tenants.values()
        assert row.prefill_us / 1e6 == seconds


def test_a_prefix_of_a_resumed_request_counts_up_to_its_prompt() -> None:
    """A decision about prompt and answer together does not make more hits than prompts."""
    longer = msgspec.structs.replace(DECISION, prompt_tokens=1_050, pool_tokens=1_040)
    assert counted(but(decision=longer)).reuse.reported.held == 1_000


def test_so_many_tenants_have_sums_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may invent names: the rest is one sum. A request without a tenant has a name too."""
    monkeypatch.setattr(usage, "MOST_TENANTS", 3)
    names = ("", "a", "b", "c", "d", "a")
    sums = counted(*(but(tenant=name) for name in names))
    assert {name: row.requests for name, row in sums.tenants.items()} == {
        "none": 1,
        "a": 2,
        "b": 1,
        "other": 2,
    }


def test_rows_for_people_have_seconds_and_the_largest_tenant_first() -> None:
    """GET /api/tenants."""
    sums = counted(SERVED, but(tenant="b"), but(tenant="b"), REFUSED)
    reply = asyncio.run(sums.tenants_route(None))  # type: ignore[arg-type]
    assert isinstance(reply, Response)
    first, second = json.loads(reply.body)["tenants"]
    assert (first["tenant"], second["tenant"]) == ("b", "acme")
    assert second == {
        "tenant": "acme",
        "requests": 2,
        "judged": 2,
        "in_time": 1,
        "refused": 1,
        "failed": 0,
        "prompt_tokens": 1_000,
        "cached_tokens": 550,
        "output_tokens": 50,
        "prefill_s": 0.006,
        "decode_s": 0.04,
        "wasted_s": 0.0,
    }
