"""A decision for people: every candidate with its terms, why the winner won, and the outcome.

Plain data and one sentence, made from a Decision: the gateway's API sends it, the CLI and the
simulator's reports show it. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonserve.core.schedule.actions import Candidate, Decision, Spread
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens

_PER_MS = 1_000


class CandidateRow(msgspec.Struct, frozen=True):
    """One prefill instance that could have been chosen."""

    instance: InstanceId
    local_tokens: Tokens
    reused_tokens: Tokens
    holder: SegmentId | None
    transfer_ms: float
    queue_ms: float
    compute_ms: float
    ttft_ms: float
    """The three before it, summed."""
    score: float
    """The policy's score; the lowest won."""


class GroupPart(msgspec.Struct, frozen=True):
    """The part that one instance of a group prefills."""

    instance: InstanceId
    start: Tokens
    end: Tokens
    """Of the prompt, [start, end)."""


class Stages(msgspec.Struct, frozen=True):
    """How long each stage took; see record.StageTimes and record.PrefillTimes, whose parts of
    `prefill_ms` are `queue_ms`, `load_ms`, `compute_ms` and `publish_ms`. Those of `handover_ms` in
    record.DecodeTimes are `decode_queue_ms`, `decode_load_ms` and `decode_first_ms`."""

    waited_ms: float | None
    queue_ms: float | None
    load_ms: float | None
    compute_ms: float | None
    publish_ms: float | None
    prefill_ms: float | None
    handover_ms: float | None
    decode_ms: float | None
    total_ms: float | None
    decode_queue_ms: float | None = None
    decode_load_ms: float | None = None
    decode_first_ms: float | None = None

    @property
    def call_ms(self) -> float | None:
        """How long the prefill call was on its way; None: its instance reported no parts."""
        parts = (self.queue_ms, self.load_ms, self.compute_ms, self.publish_ms)
        known = [part for part in parts if part is not None]
        if self.prefill_ms is None or len(known) < len(parts):
            return None
        return self.prefill_ms - sum(known)

    @property
    def decode_call_ms(self) -> float | None:
        """How long the decode call and its first token were on their ways; None: its instance
        reported no parts."""
        parts = (self.decode_queue_ms, self.decode_load_ms, self.decode_first_ms)
        known = [part for part in parts if part is not None]
        if self.handover_ms is None or len(known) < len(parts):
            return None
        return self.handover_ms - sum(known)


class Explanation(msgspec.Struct, kw_only=True):
    """What is known of a request's placement; None: does not apply, or is not known yet."""

    request: str
    arrived_ms: int | None = None
    """Since 1970."""
    model: str | None = None
    tenant: str | None = None
    priority: int | None = None
    outcome: str
    """waiting, running, stop, length, cancelled, refused or failed."""
    why: str
    """One sentence: why the winner won, or why no instance did."""
    policy: str | None = None
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    prompt_tokens: Tokens | None = None
    reused_tokens: Tokens | None = None
    """As planned; `actual_cached_tokens` is what the engine reports."""
    pool_tokens: Tokens | None = None
    """The longest prefix the pool had."""
    holder: SegmentId | None = None
    """Where the part came from that the winner did not have."""
    waited_ms: float | None = None
    """At the Conductor, before the decision; part of the TTFTs."""
    predicted_ttft_ms: float | None = None
    group: list[GroupPart] = []
    """The instances that prefill together; empty: one. Candidates' figures are for one alone."""
    alone: str | None = None
    """Why one instance does it, if several may."""
    held: str | None = None
    """Why its objectives were tightened."""
    actual_ttft_ms: float | None = None
    predicted_tbt_ms: float | None = None
    actual_tbt_ms: float | None = None
    """Mean over the request's gaps."""
    actual_cached_tokens: Tokens | None = None
    attempts: int = 0
    """Prefill calls."""
    output_tokens: Tokens | None = None
    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None
    in_time: bool | None = None
    """Whether it was served within both; None: it was not served, or not yet."""
    stages: Stages | None = None
    """Those of its last calls."""
    reject_reason: str | None = None
    error: str | None = None
    said: str | None = None
    """What the instance said that refused the request, or whose call failed last."""
    spread: str | None = None
    """Which prefix was copied because of it, from where to where, and why."""
    considered: int = 0
    """The number of candidates; `candidates` shows the best of them."""
    candidates: list[CandidateRow] = []
    """The chosen one first."""


def explanation(
    request: str,
    outcome: str,
    decision: Decision | None,
    candidates: Sequence[Candidate],
    why: str,
) -> Explanation:
    """All that a decision contains; the caller fills in the outcome."""
    if decision is None:
        return Explanation(request=request, outcome=outcome, why=why)
    return Explanation(
        request=request,
        outcome=outcome,
        why=why,
        policy=decision.policy,
        prefill=decision.prefill,
        decode=decision.decode,
        prompt_tokens=decision.prompt_tokens,
        reused_tokens=decision.reused_tokens,
        pool_tokens=decision.pool_tokens,
        holder=decision.holder,
        waited_ms=decision.waited_us / _PER_MS,
        predicted_ttft_ms=decision.predicted_ttft_us / _PER_MS,
        group=[GroupPart(stage.instance, stage.start, stage.end) for stage in decision.stages],
        alone=decision.alone,
        held=decision.tightened,
        predicted_tbt_ms=decision.predicted_tbt_us / _PER_MS,
        considered=decision.considered,
        candidates=[_row(candidate) for candidate in candidates],
    )


def _row(candidate: Candidate) -> CandidateRow:
    return CandidateRow(
        instance=candidate.instance,
        local_tokens=candidate.local_tokens,
        reused_tokens=candidate.reused_tokens,
        holder=candidate.holder,
        transfer_ms=candidate.transfer_us / _PER_MS,
        queue_ms=candidate.queue_us / _PER_MS,
        compute_ms=candidate.compute_us / _PER_MS,
        ttft_ms=candidate.ttft_us / _PER_MS,
        score=candidate.score,
    )


def why(decision: Decision, candidates: Sequence[Candidate]) -> str:
    """Why the winner won, and which instances share its work or why none does: two sentences."""
    best = decision.chosen
    others = candidates[1:]
    alone = " alone" if decision.stages else ""
    call = f" and {_ms(decision.call_us)} for its call" if decision.call_us else ""
    expected = f"{_ms(best.ttft_us)} to the first token{alone}{call}, {_plan(best, decision)}"
    waited = f" after {_ms(decision.waited_us)} at the Conductor" if decision.waited_us else ""
    if not others:
        chose = f"{best.instance} was the only one to choose from{waited}"
        return f"{chose}: {expected}.{_shared(decision)}"
    chose = f"{decision.policy} chose {best.instance} of {decision.considered}{waited}"
    return f"{chose}: {expected}; {_against(best, others[0], decision.policy)}.{_shared(decision)}"


def _shared(decision: Decision) -> str:
    """How a group prefills the prompt, or why none does if one could."""
    stages = decision.stages
    if not stages:
        return f" Not split: {decision.alone}." if decision.alone else ""
    if stages[0].end == stages[-1].end:
        what = f" the layers, in {stages[0].pieces} chunks"
    else:
        what = "".join(f" {s.instance} {s.end - s.start:,}" for s in stages) + " tokens"
    took = _ms(decision.predicted_ttft_us - decision.waited_us)
    return f" {len(stages)} instances share it:{what}; {took} to the first token together."


def why_spread(order: Spread) -> str:
    """Which prefix is copied from where to where, and why, in one sentence."""
    to = order.to
    copied = f"Its first {order.tokens:,} tokens are copied from {order.source} to {to}"
    asked = f"about {order.count:,.0f} requests asked for them lately"
    if order.missed:
        reason = f"{to} was chosen for one before and has not kept them"
    elif order.holder_us is None:
        reason = "no prefill instance has them"
    else:
        reason = (
            f"the least loaded instance that has them has {_ms(order.holder_us)} of work, "
            f"the mean is {_ms(order.mean_us)}, {to} has {_ms(order.target_us)}"
        )
    return f"{copied}, in the background: {asked}, and {reason}."


def _plan(best: Candidate, decision: Decision) -> str:
    """What the winner computes, and what it reuses."""
    prompt = decision.prompt_tokens
    if best.reused_tokens == 0:
        return f"computing all {prompt:,} prompt tokens"
    of = f"{best.reused_tokens:,} of {prompt:,} prompt tokens"
    if best.reused_tokens == best.local_tokens:
        return f"reusing its own {of}"
    fetched = f"{best.reused_tokens - best.local_tokens:,} of them loaded"
    source = f" from {best.holder}" if best.holder else ""
    return f"reusing {of}, {fetched}{source}" + (" and kept" if decision.copies else "")


def _against(best: Candidate, other: Candidate, policy: str) -> str:
    """The difference between the winner and the next candidate."""
    if policy == "random":
        return "by a draw"
    name = other.instance
    if (best.score, other.score) != (best.ttft_us, other.ttft_us):
        if best.score == other.score:
            return f"its score equals that of {name}, which {_tie(best, other)}"
        return f"its score of {best.score:,.4g} was the lowest, {name} had {other.score:,.4g}"
    if best.ttft_us == other.ttft_us:
        return f"{name} would have taken as long, but {_tie(best, other)}"
    terms = [
        (other.queue_us - best.queue_us, f"{_ms(other.queue_us)} of it in its queue"),
        (other.compute_us - best.compute_us, f"{_ms(other.compute_us)} of it computing"),
        (other.transfer_us - best.transfer_us, f"{_ms(other.transfer_us)} of it loading KV"),
    ]
    return f"{name} would have taken {_ms(other.ttft_us)}, {max(terms)[1]}"


def _tie(best: Candidate, other: Candidate) -> str:
    """Why the winner won with equal scores: the fewest decodes win, then the first id."""
    if other.decodes > best.decodes:
        return f"has {other.decodes} to decode, not {best.decodes}"
    return "comes after it"


def _ms(us: Micros) -> str:
    ms = us / _PER_MS
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.3g} ms"
