"""The advice of the twin as lines for the terminal: what `moonserve advise` prints."""

from __future__ import annotations

from collections.abc import Iterator

from moonserve.core.schedule.advice import Advice, ClusterShape, LoadOutcome
from moonserve.core.schedule.verdict import percent
from moonserve.show.table import table

_HEADS = ("", "policy", "in time", "refused", "TTFT p50", "TTFT p90", "TBT p50", "TBT p90")


def lines(advice: Advice, age_s: float, is_stale: bool) -> Iterator[str]:
    """The sentence, the figures behind it, and how old they are."""
    if is_stale:
        yield f"This advice is stale: the twin has not reported for {age_s:,.0f} s."
    yield advice.text
    if advice.happened is None:
        return
    yield ""
    yield from table(
        [
            _HEADS,
            _row("happened", advice.now, advice.happened),
            *(_row(_name(it.shape, advice), it.shape, it.outcome) for it in advice.trials),
        ],
        words=2,
    )
    yield ""
    count, span_s = advice.happened.requests, (advice.until_ms - advice.from_ms) / 1e3
    goals = [
        f"{name} {goal:,.0f} ms"
        for name, goal in (("TTFT", advice.ttft_slo_ms), ("TBT", advice.tbt_slo_ms))
        if goal is not None
    ]
    requests = "1 request" if count == 1 else f"{count:,} requests"
    yield (
        f"{requests} that arrived within {span_s:,.0f} s; objectives:"
        f" {' and '.join(goals) or 'those of the requests'}; reported {age_s:,.0f} s ago, after"
        f" {advice.took_s:,.1f} s of work"
    )


def _name(shape: ClusterShape, advice: Advice) -> str:
    marks = [
        text
        for text, is_so in (
            ("twin", shape == advice.now),
            ("wanted", shape == advice.wanted),
        )
        if is_so
    ]
    return f"{shape}" + (f" ({', '.join(marks)})" if marks else "")


def _row(name: str, shape: ClusterShape, outcome: LoadOutcome) -> tuple[str, ...]:
    times = (
        outcome.ttft_p50_ms,
        outcome.ttft_p90_ms,
        outcome.tbt_p50_ms,
        outcome.tbt_p90_ms,
    )
    return (
        name,
        shape.policy,
        percent(outcome.in_time),
        percent(outcome.refused),
        *("-" if it is None else f"{it:,.0f} ms" for it in times),
    )
