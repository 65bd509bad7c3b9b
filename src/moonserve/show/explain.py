"""One request's placement as text for the terminal: the sentence, the figures, the candidates.

The CLI calls it with what the gateway or the simulator returns of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moonserve.core.schedule.explain import CandidateRow, Explanation, Stages
from moonserve.show.table import table

_HEADS = ("", "candidate", "from", "local", "reused", "transfer", "queue", "compute", "total")


def lines(told: Explanation) -> Iterator[str]:
    """The whole text, line by line; times in milliseconds."""
    yield f"request {told.request}: {told.outcome}{_attempts(told)}"
    if told.reject_reason is not None:
        yield f"rejected ({told.reject_reason})"
    yield told.why
    if told.spread is not None:
        yield told.spread
    if told.error is not None and told.error != told.why:
        yield f"error: {told.error}"
    if told.said is not None:
        yield f"the instance that refused it, or whose call failed last, said: {told.said}"
    if told.policy is None:
        return
    yield ""
    rows = [_cells(row, row is told.candidates[0]) for row in told.candidates]
    yield from table([_HEADS, *rows], words=3)
    hidden = told.considered - len(told.candidates)
    if hidden > 0:
        yield f"  and {hidden:,} more"
    yield ""
    held = f"{told.pool_tokens:,} of {told.prompt_tokens:,} prompt tokens"
    yield f"decode on {told.decode}; the pool held {held}"
    for part in told.group:
        yield f"part of {part.instance}: tokens {part.start:,} to {part.end:,}"
    if told.held is not None:
        yield f"objectives: {told.held}"
    if told.waited_ms:
        yield f"waited {told.waited_ms:,.1f} ms to be placed, part of the TTFTs"
    figures = [
        ("", "predicted", "actual"),
        ("TTFT ms", _number(told.predicted_ttft_ms), _number(told.actual_ttft_ms)),
        ("mean TBT ms", _number(told.predicted_tbt_ms), _number(told.actual_tbt_ms)),
        ("reused tokens", _number(told.reused_tokens), _number(told.actual_cached_tokens)),
    ]
    yield from table(figures, words=1)
    if told.stages is not None:
        yield from _took(told.stages)


def _took(stages: Stages) -> Iterator[str]:
    """Where the time went, if the request is over."""
    if stages.total_ms is None:
        return
    parts = {
        "prefill": {
            "queue": stages.queue_ms,
            "load": stages.load_ms,
            "compute": stages.compute_ms,
            "publish": stages.publish_ms,
        },
        "hand-over": {
            "queue": stages.decode_queue_ms,
            "load": stages.decode_load_ms,
            "first token": stages.decode_first_ms,
        },
    }
    took = {
        "waited": stages.waited_ms,
        "prefill": stages.prefill_ms,
        "hand-over": stages.handover_ms,
        "decode": stages.decode_ms,
    }
    steps = []
    for name, ms in _measured(took):
        inside = ", ".join(f"{part} {of:,.1f}" for part, of in _measured(parts.get(name, {})))
        steps.append(f"{name} {ms:,.1f}" + (f" ({inside})" if inside else ""))
    yield f"took {stages.total_ms:,.1f} ms: {', '.join(steps)}"


def _measured(stages: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    return ((name, ms) for name, ms in stages.items() if ms is not None)


def _attempts(told: Explanation) -> str:
    return f", in {told.attempts} attempts" if told.attempts > 1 else ""


def _cells(row: CandidateRow, chosen: bool) -> tuple[str, ...]:
    return (
        "*" if chosen else "",
        row.instance,
        row.holder or "-",
        f"{row.local_tokens:,}",
        f"{row.reused_tokens:,}",
        *(f"{ms:,.1f}" for ms in (row.transfer_ms, row.queue_ms, row.compute_ms, row.ttft_ms)),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
