"""The spans of a request: its stages in order, each within the one above, and what was decided."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Candidate, Decision
from moonserve.core.schedule.record import DecodeTimes, FailedCall, Measured, PrefillTimes, Record
from moonserve.core.schedule.spans import StageSpan, span_tree
from moonserve.core.units import InstanceId, RequestId, SegmentId

CHOSEN = Candidate(
    instance=InstanceId("p0"),
    local_tokens=16,
    reused_tokens=64,
    holder=SegmentId("p1"),
    transfer_us=1_000,
    queue_us=2_000,
    compute_us=27_000,
    score=30_000,
)
DECISION = Decision(
    policy="kvcache_centric",
    prefill=InstanceId("p0"),
    decode=InstanceId("d0"),
    prompt_tokens=100,
    copies=False,
    waited_us=500,
    predicted_ttft_us=30_500,
    predicted_tbt_us=9_000,
    pool_tokens=80,
    chosen=CHOSEN,
    considered=3,
)


def served(**changes: object) -> Record:
    """A request that arrived at 1 ms, was placed at 1.5 ms, and was over at 101 ms."""
    it = Record(RequestId("r"), "m", "team", 0, 100, (), Slo(2_000_000, None), 1_000)
    it.decision, it.attempts, it.is_closed, it.is_good, it.outcome = DECISION, 1, True, True, "stop"
    it.prefill_us, it.prefilled_us, it.first_us = 1_500, 31_500, 31_500
    it.decode_us, it.ended_us = 31_600, 101_000
    parts = PrefillTimes(2_000, 0, 25_000, 3_000), DecodeTimes(900, 600, 3_000)
    it.measured = Measured(10, 48, 7_000, 5_000, *parts)
    for name, value in changes.items():
        setattr(it, name, value)
    return it


def walk(span: StageSpan, depth: int = 0) -> Iterator[tuple[int, str, int, int]]:
    """Depth, name and times of all spans."""
    yield depth, span.name, span.began_us, span.ended_us
    for part in span.within:
        yield from walk(part, depth + 1)


def stage(record: Record, name: str) -> StageSpan:
    """The stage of this name."""
    [found] = [it for it in span_tree(record).within if it.name == name]
    return found


def test_the_stages_follow_each_other_within_the_request() -> None:
    """A part that took no time has no span."""
    assert list(walk(span_tree(served()))) == [
        (0, "gateway", 1_000, 101_000),
        (1, "schedule", 1_000, 1_500),
        (1, "prefill", 1_500, 31_500),
        (2, "queue", 1_500, 3_500),
        (2, "compute", 3_500, 28_500),
        (2, "publish", 28_500, 31_500),
        (1, "transfer", 31_600, 36_600),
        (2, "queue", 31_600, 32_500),
        (2, "load", 32_500, 33_100),
        (2, "compute", 33_100, 36_100),
        (1, "decode", 36_600, 101_000),
    ]


def test_the_span_of_the_request_has_the_names_of_the_conventions() -> None:
    """Times in seconds, as vLLM's; what is not known has no attribute."""
    tree = span_tree(served())
    assert tree.attributes == {
        "gen_ai.request.id": "r",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 48,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.0005,
        "gen_ai.latency.time_to_first_token": 0.0305,
        "gen_ai.latency.e2e": 0.1,
        "moonserve.outcome": "in_time",
        "moonserve.tenant": "team",
        "moonserve.priority": 0,
        "moonserve.prefill_calls": 1,
        "moonserve.ttft_slo_s": 2.0,
        "moonserve.tbt_s": 0.007,
    }
    assert (tree.first_token_us, tree.error) == (31_500, None)


def test_the_schedule_has_the_decision() -> None:
    """Policy, instances, reuse, and what was predicted beside what came."""
    about = stage(served(), "schedule").attributes
    wanted = {
        "moonserve.policy": "kvcache_centric",
        "moonserve.prefill_instance": "p0",
        "moonserve.decode_instance": "d0",
        "moonserve.candidates": 3,
        "moonserve.reused_tokens": 64,
        "moonserve.pool_tokens": 80,
        "moonserve.holder": "p1",
        "moonserve.predicted_ttft_s": 0.0305,
        "moonserve.actual_ttft_s": 0.0305,
        "moonserve.predicted_compute_s": 0.027,
    }
    assert {name: about[name] for name in wanted} == wanted


def test_a_refused_request_has_a_schedule_with_the_reason_and_nothing_else() -> None:
    """Both spans are errors, with the words of the refusal."""
    times = {"prefill_us": None, "prefilled_us": None, "decode_us": None, "first_us": None}
    said = {"outcome": "refused", "reason": "ttft_slo", "error": "it would come late"}
    tree = span_tree(served(is_good=None, measured=Measured(), attempts=0, **times, **said))
    assert [(it.name, it.ended_us, it.error) for it in tree.within] == [
        ("schedule", 101_000, "it would come late")
    ]
    assert tree.within[0].attributes["moonserve.refusal_reason"] == "ttft_slo"
    assert tree.attributes["error.type"] == "ttft_slo"
    assert tree.error == "it would come late"


def test_a_call_that_failed_has_a_span_with_its_error() -> None:
    """Each before the last call; the last call is a stage of the request."""
    failed = (
        FailedCall(InstanceId("p1"), False, 1_100, 1_200, "closed"),
        FailedCall(InstanceId("d1"), True, 1_300, 1_400, "d1 hangs"),
        FailedCall(InstanceId("d0"), True, 31_600, 101_000, "d0 is gone"),
    )
    spans = [it for it in span_tree(served(failed=failed)).within if it.error]
    assert [(it.name, it.began_us, it.ended_us, it.error) for it in spans] == [
        ("prefill", 1_100, 1_200, "closed"),
        ("decode", 1_300, 1_400, "d1 hangs"),
    ]
    assert [it.attributes["moonserve.instance"] for it in spans] == ["p1", "d1"]


def test_a_stage_that_did_not_end_ends_with_the_request() -> None:
    """A prefill that failed has no parts; a decode without a token is a transfer only."""
    lost = {"outcome": "failed", "is_good": None, "error": "p0 is gone"}
    early = served(prefilled_us=None, decode_us=None, first_us=None, **lost)
    assert list(walk(span_tree(early)))[1:] == [
        (1, "schedule", 1_000, 1_500),
        (1, "prefill", 1_500, 101_000),
    ]
    assert span_tree(early).error == "p0 is gone"
    late = served(measured=Measured(1), **lost)
    assert [it.name for it in span_tree(late).within] == ["schedule", "prefill", "transfer"]
    assert stage(late, "transfer").ended_us == 101_000


def test_one_call_that_does_both_has_no_transfer() -> None:
    """Its decode begins with the first token; a request of one token has no decode at all."""
    whole = msgspec.structs.replace(DECISION, joint=True, decode=InstanceId("p0"))
    names = [it.name for it in span_tree(served(decision=whole, decode_us=None)).within]
    assert names == ["schedule", "prefill", "decode"]
    one = span_tree(served(decode_us=None, ended_us=31_500))
    assert [it.name for it in one.within] == ["schedule", "prefill"]


def test_an_adopted_request_has_the_stages_that_this_conductor_saw() -> None:
    """Its prefill was ordered by another one."""
    names = [it.name for it in span_tree(served(prefill_us=None)).within]
    assert names == ["schedule", "transfer", "decode"]
