"""A record for those outside: the explanation of one request, and the row of a list.

The gateway's API sends both. Times of a record become milliseconds, and its arrival a time since
1970. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moonserve.core.schedule.explain import Explanation, Stages, explanation, why, why_spread
from moonserve.core.schedule.record import Record, StageTimes
from moonserve.core.units import InstanceId, Micros, Tokens

_PER_MS = 1_000


class ListedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a list of requests; the fields mean what they mean in Explanation."""

    request: str
    arrived_ms: int
    outcome: str
    reject_reason: str | None
    tenant: str
    prefill: InstanceId | None
    decode: InstanceId | None
    prompt_tokens: Tokens
    output_tokens: Tokens | None
    reused_tokens: Tokens | None
    actual_cached_tokens: Tokens | None
    predicted_ttft_ms: float | None
    actual_ttft_ms: float | None
    actual_tbt_ms: float | None
    total_ms: float | None
    in_time: bool | None


def explained(record: Record, clock_ms: Callable[[Micros], int]) -> Explanation:
    """All that is known of a request; clock_ms: a time of its record in milliseconds since 1970."""
    decision, measured = record.decision, record.measured
    sentence = record.error or "It waits for an instance to be free."
    if decision is not None and record.reason is None:
        sentence = why(decision, record.candidates)
    explained = explanation(record.id, record.outcome, decision, record.candidates, sentence)
    explained.arrived_ms = clock_ms(record.arrived_us)
    explained.model = record.model
    explained.tenant = record.tenant
    explained.priority = record.priority
    explained.prompt_tokens = record.prompt_tokens
    explained.attempts = record.attempts
    explained.output_tokens = measured.tokens if record.is_closed else None
    explained.ttft_slo_ms = _ms(record.slo.ttft_us)
    explained.tbt_slo_ms = _ms(record.slo.tbt_us)
    explained.in_time = record.is_good
    explained.stages = in_ms(record.stages())
    explained.actual_ttft_ms = _ms(record.ttft_us)
    explained.actual_tbt_ms = _ms(measured.tbt_us)
    explained.actual_cached_tokens = measured.cached_tokens
    explained.reject_reason = record.reason
    explained.error = record.error
    if measured.said:
        explained.said = measured.said
    elif record.failed and record.failed[-1].said:
        last = record.failed[-1]
        explained.said = f"{last.instance}: {last.said}"
    explained.spread = None if record.spread is None else why_spread(record.spread)
    return explained


def listed(record: Record, clock_ms: Callable[[Micros], int]) -> ListedRequest:
    """The row of one request; clock_ms: see `explained`."""
    decision, measured = record.decision, record.measured
    return ListedRequest(
        request=record.id,
        arrived_ms=clock_ms(record.arrived_us),
        outcome=record.outcome,
        reject_reason=record.reason,
        tenant=record.tenant,
        prefill=None if decision is None else decision.prefill,
        decode=None if decision is None else decision.decode,
        prompt_tokens=record.prompt_tokens,
        output_tokens=measured.tokens if record.is_closed else None,
        reused_tokens=None if decision is None else decision.reused_tokens,
        actual_cached_tokens=measured.cached_tokens,
        predicted_ttft_ms=None if decision is None else _ms(decision.predicted_ttft_us),
        actual_ttft_ms=_ms(record.ttft_us),
        actual_tbt_ms=_ms(measured.tbt_us),
        total_ms=_ms(record.stages().total_us),
        in_time=record.is_good,
    )


def in_ms(times: StageTimes) -> Stages:
    """The stages of a request in milliseconds."""
    parts, entry = times.parts, times.entry
    return Stages(
        waited_ms=_ms(times.waited_us),
        queue_ms=None if parts is None else _ms(parts.queue_us),
        load_ms=None if parts is None else _ms(parts.load_us),
        compute_ms=None if parts is None else _ms(parts.compute_us),
        publish_ms=None if parts is None else _ms(parts.publish_us),
        prefill_ms=_ms(times.prefill_us),
        handover_ms=_ms(times.handover_us),
        decode_ms=_ms(times.decode_us),
        total_ms=_ms(times.total_us),
        decode_queue_ms=None if entry is None else _ms(entry.queue_us),
        decode_load_ms=None if entry is None else _ms(entry.load_us),
        decode_first_ms=None if entry is None else _ms(entry.compute_us),
    )


def _ms(us: Micros | None) -> float | None:
    return None if us is None else us / _PER_MS
