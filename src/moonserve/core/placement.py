"""From a view of the cluster to a decision: what each instance would take, and who decodes.

Functions from views to decisions; they change nothing. What an instance's TTFT is made of stands
here, once, for every policy; how a policy weighs it stands in core.policies. Source: FAST'25
"Mooncake", section 6.1 and Algorithm 1 (page 8); the prose of section 4.2 states the balancing
condition backwards, this follows the algorithm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.cost import Cost
from moonserve.core.index import Match
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens
from moonserve.core.view import InstanceView

Fetch: TypeAlias = Literal["never", "threshold", "cheaper"]
"""When a prefix that others hold is loaded rather than computed: never; where it exceeds one's own
by the balancing threshold (Algorithm 1); where that is predicted to be faster."""

_TBT_THEN_DECODES = itemgetter(0, 1)
_NEAR = 1.02
"""Predicted TBTs this near are a tie, which the shorter path wins."""


class Candidate(msgspec.Struct, frozen=True):
    """One prefill instance with the terms of its predicted TTFT."""

    instance: InstanceId
    local_tokens: Tokens
    """Prefix that its own segment holds, or will when it has done what it was promised."""
    reused_tokens: Tokens
    """Prefix it would start from, after fetching where that is the plan."""
    holder: SegmentId | None
    """Where the fetched part comes from; None when nothing is fetched."""
    transfer_us: Micros
    queue_us: Micros
    compute_us: Micros
    score: float
    """What the policy chose by: the lowest wins; of equals the fewest decodes, then the first."""
    decodes: int = 0
    """How many requests decode there, or will."""

    @property
    def ttft_us(self) -> Micros:
        """Predicted time to first token, from the moment of the decision."""
        return self.transfer_us + self.queue_us + self.compute_us


class Ask(msgspec.Struct, frozen=True):
    """What placement knows of a request, beside the views."""

    length: Tokens
    match: Match
    coming: Mapping[SegmentId, int] = {}
    """Leading blocks that each holder will have once its promised prefills are done."""
    racks: Mapping[SegmentId, str] = {}
    """Rack of each holder that said one."""
    waited_us: Micros = 0
    """Since it arrived."""
    expected_tokens: Tokens = 0
    """Output to be expected; for KV room."""


class Options:
    """Every candidate's terms, in columns: row i belongs to views[i].

    Columns, since a decision may look at a thousand instances and show only few of them.
    """

    __slots__ = (
        "ask", "block_size", "compute_us", "local", "longest", "now_us", "queue_us", "reused",
        "scores", "transfer_us", "views",
    )  # fmt: skip

    def __init__(self, ask: Ask, views: Sequence[InstanceView], now_us: Micros) -> None:
        self.ask = ask
        self.views = views
        self.now_us = now_us
        self.longest = source(ask.match, None)
        """The segment with the longest run of its own."""
        self.block_size = views[0].info.namespace.block_size
        self.local: list[int] = []
        """Blocks of the prompt that it has itself."""
        self.reused: list[int] = []
        """Blocks it would start from."""
        self.transfer_us: list[Micros] = []
        self.compute_us: list[Micros] = []
        self.queue_us = [view.queue_us(now_us) for view in views]
        self.scores: Sequence[float] = ()

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompt, a partial last one included."""
        return -(-self.ask.length // self.block_size)

    def ttft_us(self) -> list[Micros]:
        """Predicted TTFT of each, from now."""
        columns = zip(self.transfer_us, self.queue_us, self.compute_us, strict=True)
        return [transfer + queue + compute for transfer, queue, compute in columns]

    def candidate(self, row: int) -> Candidate:
        """One row, for people."""
        own = self.views[row].info
        fetched = self.reused[row] > self.local[row]
        return Candidate(
            instance=own.id,
            local_tokens=self.local[row] * self.block_size,
            reused_tokens=self.reused[row] * self.block_size,
            holder=self._source(own.segment) if fetched else None,
            transfer_us=self.transfer_us[row],
            queue_us=self.queue_us[row],
            compute_us=self.compute_us[row],
            score=self.scores[row],
            decodes=self.views[row].decodes,
        )

    def _source(self, own: SegmentId | None) -> SegmentId | None:
        return self.longest if own != self.longest else source(self.ask.match, own)


class Decision(msgspec.Struct, frozen=True):
    """A placement, with everything it was made from."""

    policy: str
    prefill: InstanceId
    decode: InstanceId
    prompt_tokens: Tokens
    reused_tokens: Tokens
    holder: SegmentId | None
    copies: bool
    """Whether the prefill instance keeps a copy of what it fetches (hot-prefix migration)."""
    waited_us: Micros
    """Time spent at the Conductor before the decision; part of the predicted TTFT."""
    predicted_ttft_us: Micros
    predicted_tbt_us: Micros
    pool_tokens: Tokens
    """Prefix that the pool as a whole holds: the most that any plan could reuse."""
    candidates: tuple[Candidate, ...]
    """The chosen one first, then those it won against, best first; the best KEPT of many."""
    considered: int
    """How many there were."""


def options(
    ask: Ask,
    views: Sequence[InstanceView],
    fetch: Fetch,
    threshold: float,
    cross_rack: float,
    now_us: Micros,
) -> Options:
    """Algorithm 1's estimate for each instance: T = T_transfer + T_queue + T_prefill.

    best = the longest prefix the pool can give. Where an instance fetches, only length - best is
    computed; else it computes from its own prefix. At least one token is always computed: its
    logits are the first token's. `cross_rack`: how many times longer a transfer between racks is.
    """
    made = Options(ask, views, now_us)
    usable = (ask.length - 1) // made.block_size
    best = min(ask.match.pool, usable)
    own = _own(ask)
    segments = [view.info.segment for view in views]
    made.local = [0 if segment is None else own.get(segment, 0) for segment in segments]
    if max(own.values(), default=0) > usable:
        made.local = [local if local < usable else usable for local in made.local]
    home = "" if made.longest is None else ask.racks.get(made.longest, "")
    known: dict[tuple[int, Cost, bool, Tokens], tuple[int, Micros, Micros]] = {}
    rows = []
    for local, view in zip(made.local, views, strict=True):
        crosses = home != "" and view.info.rack not in ("", home)
        # Most instances have nothing, and may cost the same.
        key = (local, view.cost, crosses, view.info.chunk_tokens)
        row = known.get(key)
        if row is None:
            factor = cross_rack if crosses else 1.0
            row = known[key] = _terms(ask.length, local, best, view, fetch, threshold, factor)
        rows.append(row)
    made.reused, made.transfer_us, made.compute_us = map(list, zip(*rows, strict=True))
    return made


def _own(ask: Ask) -> dict[SegmentId, int]:
    """Leading blocks that each segment has, or will have."""
    own = ask.match.by_holder.copy() if ask.coming else ask.match.by_holder
    for segment, blocks in ask.coming.items():
        if blocks > own.get(segment, 0):
            own[segment] = blocks
    return own


def _terms(
    length: Tokens,
    local: int,
    best: int,
    view: InstanceView,
    fetch: Fetch,
    threshold: float,
    factor: float,
) -> tuple[int, Micros, Micros]:
    """Blocks to start from, time to load those it lacks, time to compute the rest."""
    info, cost = view.info, view.cost
    size = info.namespace.block_size
    if fetch == "never" or best <= local or (fetch == "threshold" and best <= local * threshold):
        return local, 0, cost.prefill_us(length, local * size, info.chunk_tokens)
    transfer_us = round(factor * cost.transfer_us((best - local) * info.block_bytes))
    compute_us = cost.prefill_us(length, best * size, info.chunk_tokens)
    if fetch == "cheaper":
        alone_us = cost.prefill_us(length, local * size, info.chunk_tokens)
        if transfer_us + compute_us >= alone_us:
            return local, 0, alone_us
    return best, transfer_us, compute_us


def choose_decode(
    context: Tokens,
    views: Sequence[InstanceView],
    goal_us: Micros | None = None,
    near: InstanceView | None = None,
    leaves: bool = False,
) -> tuple[InstanceView, bool]:
    """Who decodes a request of this context, and whether every member then meets its TBT goal.

    KV already there (`near`, the prefill instance, decodes too): there; where it `leaves`, only
    with every goal met. Else the lowest predicted TBT after joining among those with a slot and KV
    room, if there are any, and with every goal met, if that can be. Ties go to the instance that
    has the KV, to the prefill's rack, to the fewest members, to the first.
    """
    home = near if near is not None and near in views else None
    if home is not None and (home.has_slot(context) or not any(v.has_slot(context) for v in views)):
        meets_here = _meets(home, home.tbt_us(context), goal_us)
        if meets_here or not leaves:
            return home, meets_here
        views = [home, *views]
    free = [view for view in views if view.has_slot(context)] or views
    rows = [(view.tbt_us(context), view.decodes, view) for view in free]
    meets = [row for row in rows if _meets(row[2], row[0], goal_us)]
    tbt_us, _, best = min(meets or rows, key=_TBT_THEN_DECODES)
    rack = near.info.rack if near is not None else ""
    if rack and best.info.rack != rack:
        limit_us = tbt_us * _NEAR
        same = [view for us, _, view in meets or rows if view.info.rack == rack and us <= limit_us]
        best = same[0] if same else best
    return best, bool(meets)


def _meets(view: InstanceView, tbt_us: Micros, goal_us: Micros | None) -> bool:
    """Whether that time between tokens is within the goals of all who decode there."""
    strictest_us = view.strictest_us()
    return (goal_us is None or tbt_us <= goal_us) and (
        strictest_us is None or tbt_us <= strictest_us
    )


def preferred(views: list[InstanceView], avoid: Collection[InstanceId]) -> list[InstanceView]:
    """Those not to be avoided, or all where that leaves none."""
    return [view for view in views if view.info.id not in avoid] or views if avoid else views


def source(match: Match, own: SegmentId | None) -> SegmentId | None:
    """The other segment with the longest run of its own, first by id among equals."""
    runs = match.by_holder
    if own in runs:
        runs = {holder: length for holder, length in runs.items() if holder != own}
    longest = max(runs.values(), default=0)
    return min((holder for holder, length in runs.items() if length == longest), default=None)
