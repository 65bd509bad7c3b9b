"""Where a request goes: Algorithm 1 for prefill, the simplest rule for decode.

Functions from views to decisions; they change nothing. Source: FAST'25 "Mooncake", section 6.1
and Algorithm 1 (page 8). The prose of section 4.2 states the balancing condition backwards; this
follows the algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from moonserve.core.prefix import Match
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens
from moonserve.core.view import InstanceView


class Candidate(msgspec.Struct, frozen=True):
    """One prefill instance with the terms of its predicted TTFT."""

    instance: InstanceId
    local_tokens: Tokens
    """Prefix that its own segment holds."""
    reused_tokens: Tokens
    """Prefix it would start from, after fetching where that is the plan."""
    holder: SegmentId | None
    """Where the fetched part comes from; None when nothing is fetched."""
    transfer_us: Micros
    queue_us: Micros
    compute_us: Micros

    @property
    def ttft_us(self) -> Micros:
        """Predicted time to first token."""
        return self.transfer_us + self.queue_us + self.compute_us


class Decision(msgspec.Struct, frozen=True):
    """A placement, with everything it was made from."""

    prefill: InstanceId
    decode: InstanceId
    prompt_tokens: Tokens
    reused_tokens: Tokens
    holder: SegmentId | None
    predicted_ttft_us: Micros
    predicted_tbt_us: Micros
    candidates: tuple[Candidate, ...]


def kvcache_centric(
    length: Tokens,
    match: Match,
    instances: Sequence[InstanceView],
    balancing_threshold: float,
    now_us: Micros,
) -> list[Candidate]:
    """Algorithm 1's estimate for each instance, in the order given.

    best = the longest prefix the pool can give. Where best exceeds an instance's own prefix by
    more than the threshold, the rest is fetched and only length - best is computed; else the
    instance computes from its own prefix. At least one token is always computed: its logits are
    the first token's.
    """
    candidates = []
    for view in instances:
        size = view.info.namespace.block_size
        usable = (length - 1) // size
        local = min(match.by_holder.get(view.info.segment, 0) if view.info.segment else 0, usable)
        best = min(match.pool, usable)
        fetch = best > local * balancing_threshold
        reused = (best if fetch else local) * size
        moved = (best - local) * view.info.block_bytes if fetch else 0
        candidates.append(
            Candidate(
                instance=view.info.id,
                local_tokens=local * size,
                reused_tokens=reused,
                holder=_source(match, view.info.segment) if moved else None,
                transfer_us=view.cost.transfer_us(moved),
                queue_us=view.queue_us(now_us),
                compute_us=view.cost.prefill_us(length, reused, view.info.chunk_tokens),
            )
        )
    return candidates


def choose_prefill(candidates: Sequence[Candidate]) -> Candidate:
    """The strict minimum of predicted TTFT; the first of equals."""
    return min(candidates, key=lambda candidate: candidate.ttft_us)


def choose_decode(length: Tokens, instances: Sequence[InstanceView]) -> InstanceView:
    """Lowest predicted TBT after joining, among those with a free slot if there are any.

    Ties go to the fewest members, then to the first in order.
    """
    free = [view for view in instances if len(view.decoding) < view.info.max_seqs]
    return min(free or instances, key=lambda view: (view.tbt_us(length), len(view.decoding)))


def place(
    length: Tokens,
    match: Match,
    prefills: Sequence[InstanceView],
    decodes: Sequence[InstanceView],
    balancing_threshold: float,
    now_us: Micros,
    avoid: Collection[InstanceId] = (),
) -> Decision | None:
    """Choose both instances; None when no instance of a role takes one more request.

    `avoid` names instances that just failed this request: taken only when nobody else is left.
    """
    prefills = preferred([v for v in prefills if v.takes_prefill], avoid)
    decodes = preferred([v for v in decodes if v.takes_decode], avoid)
    if not prefills or not decodes:
        return None
    candidates = kvcache_centric(length, match, prefills, balancing_threshold, now_us)
    chosen = choose_prefill(candidates)
    decode = choose_decode(length, decodes)
    return Decision(
        prefill=chosen.instance,
        decode=decode.info.id,
        prompt_tokens=length,
        reused_tokens=chosen.reused_tokens,
        holder=chosen.holder,
        predicted_ttft_us=chosen.ttft_us,
        predicted_tbt_us=decode.tbt_us(length),
        candidates=tuple(candidates),
    )


def preferred(views: list[InstanceView], avoid: Collection[InstanceId]) -> list[InstanceView]:
    """Those not to be avoided, or all where that leaves none."""
    return [view for view in views if view.info.id not in avoid] or views


def _source(match: Match, own: SegmentId | None) -> SegmentId | None:
    """The other segment with the longest run of its own, first by id among equals."""
    runs = [(-length, holder) for holder, length in match.by_holder.items() if holder != own]
    return min(runs)[1] if runs else None
