"""The spans of one request, made from its record: gateway, schedule, prefill, transfer, decode.

`live.record.traces` exports them to OpenTelemetry. `span_tree` is a pure function of a record that
is complete. Attributes have the names of OpenTelemetry's conventions for generative AI where there
is one, and vLLM's for what it adds (gen_ai.request.id, gen_ai.latency…, in seconds). All others
begin with `moonserve.`. No span has text or token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from moonserve.core.schedule.actions import Decision
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes, Record
from moonserve.core.units import MICROS_PER_SECOND, Micros

Attribute: TypeAlias = str | bool | int | float | tuple[str, ...]


class StageSpan(msgspec.Struct, frozen=True):
    """One stage of a request. Its times are the Conductor's, as those of the record."""

    name: str
    began_us: Micros
    ended_us: Micros
    attributes: Mapping[str, Attribute] = {}
    within: tuple[StageSpan, ...] = ()
    """Its parts, in order of time."""
    first_token_us: Micros | None = None
    """When the first token of the request came; only the span of the request has it."""
    error: str | None = None
    """Why it failed or was refused, in words; None: it did not."""


def span_tree(record: Record) -> StageSpan:
    """The span of a request that is over, with its stages in it.

    Of a request that was placed several times, the stages are those of its last calls. Each earlier
    call that failed is a span of its own, with its error.
    """
    ended_us = record.ended_us
    assert ended_us is not None, "the record is complete"
    fate = record.fate
    stages = (
        _schedule(record, ended_us),
        *_failed(record),
        *_prefill(record, ended_us),
        *_transfer(record, ended_us),
        *_decode(record, ended_us),
    )
    return StageSpan(
        "gateway",
        record.arrived_us,
        ended_us,
        _about(record),
        stages,
        record.first_us,
        (record.error or fate) if fate in ("refused", "failed") else None,
    )


def _about(record: Record) -> Mapping[str, Attribute]:
    measured, stages, slo = record.measured, record.stages(), record.slo
    finished = record.outcome in ("stop", "length")
    return _known(
        {
            "gen_ai.request.id": record.id,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": measured.tokens,
            "gen_ai.usage.cache_read.input_tokens": measured.cached_tokens,
            "gen_ai.response.finish_reasons": (record.outcome,) if finished else None,
            "gen_ai.latency.time_in_queue": _s(stages.waited_us),
            "gen_ai.latency.time_to_first_token": _s(record.ttft_us),
            "gen_ai.latency.e2e": _s(stages.total_us),
            "moonserve.outcome": record.fate,
            "moonserve.tenant": record.tenant or None,
            "moonserve.priority": record.priority,
            "moonserve.prefill_calls": record.attempts,
            "moonserve.ttft_slo_s": _s(slo.ttft_us),
            "moonserve.tbt_slo_s": _s(slo.tbt_us),
            "moonserve.tbt_s": _s(measured.tbt_us),
            "moonserve.refusal_reason": record.reason,
            "error.type": record.reason or ("failed" if record.fate == "failed" else None),
        }
    )


def _schedule(record: Record, ended_us: Micros) -> StageSpan:
    """From the arrival to the call of prefill, or to the refusal."""
    until_us = ended_us if record.prefill_us is None else record.prefill_us
    decision = record.decision
    about = {} if decision is None else _decided(decision)
    about |= {
        "moonserve.actual_ttft_s": _s(record.ttft_us),
        "moonserve.refusal_reason": record.reason,
    }
    error = record.error if record.reason is not None else None
    return StageSpan("schedule", record.arrived_us, until_us, _known(about), error=error)


def _decided(decision: Decision) -> dict[str, Attribute | None]:
    chosen = decision.chosen
    return {
        "moonserve.policy": decision.policy,
        "moonserve.prefill_instance": decision.prefill,
        "moonserve.decode_instance": decision.decode,
        "moonserve.group": tuple(stage.instance for stage in decision.stages) or None,
        "moonserve.connector": decision.connector,
        "moonserve.candidates": decision.considered,
        "moonserve.reused_tokens": decision.reused_tokens,
        "moonserve.local_tokens": chosen.local_tokens,
        "moonserve.pool_tokens": decision.pool_tokens,
        "moonserve.holder": decision.holder,
        "moonserve.predicted_ttft_s": _s(decision.predicted_ttft_us),
        "moonserve.predicted_tbt_s": _s(decision.predicted_tbt_us),
        "moonserve.predicted_transfer_s": _s(chosen.transfer_us),
        "moonserve.predicted_queue_s": _s(chosen.queue_us),
        "moonserve.predicted_compute_s": _s(chosen.compute_us),
    }


def _failed(record: Record) -> Iterator[StageSpan]:
    """The calls that failed, without the last ones, which are stages."""
    for call in record.failed:
        if call.began_us in (record.prefill_us, record.decode_us):
            continue
        name = "decode" if call.decodes else "prefill"
        about: dict[str, Attribute] = {"moonserve.instance": call.instance}
        yield StageSpan(name, call.began_us, call.ended_us, about, error=call.why)


def _prefill(record: Record, ended_us: Micros) -> Iterator[StageSpan]:
    """The last call of prefill, with what its worker reported of it."""
    decision, began_us = record.decision, record.prefill_us
    if decision is None or began_us is None:
        return
    until_us = ended_us if record.prefilled_us is None else record.prefilled_us
    about: dict[str, Attribute | None] = {
        "moonserve.instance": decision.prefill,
        "moonserve.reused_tokens": decision.reused_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.measured.cached_tokens,
    }
    times = record.measured.prefill
    parts = () if times is None or record.prefilled_us is None else _parts(times, began_us)
    yield StageSpan("prefill", began_us, until_us, _known(about), tuple(parts))


def _parts(times: PrefillTimes | DecodeTimes, began_us: Micros) -> Iterator[StageSpan]:
    for field, took_us in msgspec.structs.asdict(times).items():
        if took_us:
            yield StageSpan(field.removesuffix("_us"), began_us, began_us + took_us)
        began_us += took_us


def _transfer(record: Record, ended_us: Micros) -> Iterator[StageSpan]:
    """From the call of decode to its first token: KV comes, and the first step is computed."""
    decision, began_us = record.decision, record.decode_us
    if decision is None or began_us is None:
        return
    took_us = record.measured.handover_us
    until_us = ended_us if took_us is None else began_us + took_us
    about: dict[str, Attribute] = {
        "moonserve.instance": decision.decode,
        "moonserve.connector": decision.connector,
    }
    entry = record.measured.decode
    parts = () if entry is None or took_us is None else _parts(entry, began_us)
    yield StageSpan("transfer", began_us, min(until_us, ended_us), about, tuple(parts))


def _decode(record: Record, ended_us: Micros) -> Iterator[StageSpan]:
    decision, took_us = record.decision, record.stages().decode_us
    if decision is None or took_us is None or (record.decode_us is None and not decision.joint):
        return
    about: dict[str, Attribute | None] = {
        "moonserve.instance": decision.decode,
        "gen_ai.usage.output_tokens": record.measured.tokens,
        "moonserve.tbt_s": _s(record.measured.tbt_us),
        "moonserve.predicted_tbt_s": _s(decision.predicted_tbt_us),
    }
    yield StageSpan("decode", min(ended_us, ended_us - took_us), ended_us, _known(about))


def _known(attributes: Mapping[str, Attribute | None]) -> Mapping[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}


def _s(us: Micros | None) -> float | None:
    return None if us is None else us / MICROS_PER_SECOND
