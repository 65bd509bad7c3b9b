"""From a view of the cluster to a decision: what each instance would take, and who decodes.

Functions from views to decisions; they change nothing. What an instance's TTFT is made of stands
here, once, for every policy; how a policy weighs it stands in core.schedule.policies. Source:
FAST'25 "Mooncake", section 6.1 and Algorithm 1 (page 8); the prose of section 4.2 states the
balancing condition backwards, this follows the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeAlias, cast

import msgspec

from moonserve.core.kv.index import Match
from moonserve.core.schedule.facts import Connector
from moonserve.core.schedule.pipeline import Group, Stage
from moonserve.core.schedule.view import InstanceView, Kind, tbts_us
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens

Fetch: TypeAlias = Literal["never", "threshold", "cheaper"]
"""When a prefix that others hold is loaded rather than computed: never; where it exceeds one's own
by the balancing threshold (Algorithm 1); where that is predicted to be faster."""

Look: TypeAlias = Callable[[InstanceView, Micros], tuple[Micros, Micros]]
"""Predicted TBTs on a decode instance of one that joins it at that time: the mean, and the most."""

_DECODES = attrgetter("decodes")
_MANY = 32
"""Kinds of instances, times prefixes, of which all are not worth looking at."""
_TRIED = 4
"""Decode instances, those with the fewest promises, whose load over time is looked at."""
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
    doubts: Mapping[SegmentId, float] = {}
    """Holders whose claims are not believed, and the share of them that counts all the same."""
    waited_us: Micros = 0
    """Since it arrived."""
    expected_tokens: Tokens = 0
    """Output to be expected; for KV room."""
    whole: bool = False
    """Whether one call must do all of it; see Request."""


class Options:
    """Every candidate's terms, in columns: row i belongs to views[i].

    Columns, since a decision may look at a thousand instances and show only few of them.
    """

    __slots__ = (
        "_longest", "ask", "block_size", "compute_us", "decodes", "local", "now_us", "queue_us",
        "reused", "scores", "transfer_us", "views",
    )  # fmt: skip

    def __init__(
        self,
        ask: Ask,
        block_size: Tokens,
        views: Sequence[InstanceView],
        local: Sequence[int],
        terms: Sequence[tuple[int, Micros, Micros]],
        now_us: Micros,
    ) -> None:
        self.ask = ask
        self.block_size = block_size
        self.views = views
        self.now_us = now_us
        self.local = local
        """Blocks of the prompt that it has itself."""
        self.reused, self.transfer_us, self.compute_us = map(list, zip(*terms, strict=True))
        """Blocks that each would start from; time to load those it lacks, to compute the rest."""
        left = [
            left_us if (left_us := view.idle_us - now_us) > view.behind_us else view.behind_us
            for view in views
        ]
        if max([view.others_until_us for view in views]) > now_us:  # others have work there too
            left = [view.queue_us(now_us) for view in views]
        self.queue_us: list[Micros] = left
        self.decodes = [view.decodes for view in views]
        self.scores: Sequence[float] = ()
        self._longest: SegmentId | None = None

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
        own, size = self.views[row].info, self.block_size
        local, reused = self.local[row], self.reused[row]
        return Candidate(
            own.id,
            local * size,
            reused * size,
            self._source(own.segment) if reused > local else None,
            self.transfer_us[row],
            self.queue_us[row],
            self.compute_us[row],
            self.scores[row],
            self.decodes[row],
        )

    def _source(self, own: SegmentId | None) -> SegmentId | None:
        if self._longest is None:
            self._longest = source(self.ask.match, None)
        return self._longest if own != self._longest else source(self.ask.match, own)


class Candidates(Sequence[Candidate]):
    """The chosen row, then those it won against, best first, `most` in all.

    Made when looked at: of most decisions nobody reads more than the first.
    """

    __slots__ = ("_all", "_chosen", "_made", "_most", "_row")

    def __init__(self, made: Options, row: int, most: int) -> None:
        self._made, self._row, self._most = made, row, most
        self._chosen = made.candidate(row)
        self._all: list[Candidate] | None = None

    def __len__(self) -> int:
        return min(self._most, len(self._made.views))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __getitem__(self, at: Any) -> Any:
        if at == 0:
            return self._chosen
        if self._all is None:
            made, row = self._made, self._row
            order = sorted(range(len(made.views)), key=made.scores.__getitem__)[: self._most]
            others = [other for other in order if other != row][: self._most - 1]
            self._all = [self._chosen, *map(made.candidate, others)]
        return self._all[at]


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
    candidates: Sequence[Candidate]
    """The chosen one first, then those it won against, best first; the best KEPT of many. Of a
    group, it is the first stage, with the terms that it would have had alone."""
    considered: int
    """How many there were."""
    stages: tuple[Stage, ...] = ()
    """Who prefills which part of the prompt, `prefill` the last; empty: `prefill` does it all."""
    alone: str = ""
    """Why there is no group of them, where one may be (Tuning.cpp); why decode does it alone, where
    it must."""
    held: str = ""
    """Why it was held to less than its own objectives, where it was."""
    connector: Connector = "embedded"
    """How KV gets from `prefill` to `decode`."""
    joint: bool = False
    """Whether both are one foreign engine, that does all of it in one call: whose first token is
    told as PrefillEnded, and no Decode follows."""

    @property
    def shares(self) -> tuple[Stage, ...]:
        """The stages, or the one that `prefill` is by itself."""
        first = self.candidates[0]
        work_us = first.transfer_us + first.compute_us
        alone = Stage(self.prefill, self.reused_tokens, self.prompt_tokens, work_us)
        return self.stages or (alone,)

    def shared(self, group: Group) -> Decision:
        """The same with the prompt prefilled by this group, which begins with the chosen one."""
        return msgspec.structs.replace(
            self,
            prefill=group.stages[-1].instance,
            predicted_ttft_us=self.waited_us + group.ttft_us,
            stages=group.stages,
        )


class Estimate:
    """Algorithm 1's estimate of one request for any instance: T_transfer, T_queue and T_prefill.

    best = the longest prefix the pool can give. Where an instance fetches, only length - best is
    computed; else it computes from its own prefix. At least one token is always computed: its
    logits are the first token's. `cross_rack`: how many times longer a transfer between racks is.
    """

    def __init__(
        self, ask: Ask, block_size: Tokens, fetch: Fetch, threshold: float, cross_rack: float
    ) -> None:
        self._ask, self._block_size = ask, block_size
        self._fetch, self._threshold, self._cross_rack = fetch, threshold, cross_rack
        self._usable = (ask.length - 1) // block_size
        self._best = min(ask.match.pool, self._usable)
        told = ask.match.by_holder
        held = told.copy() if ask.coming or ask.doubts else told
        for segment, blocks in ask.coming.items():
            if blocks > held.get(segment, 0):
                held[segment] = blocks
        for segment, share in ask.doubts.items():
            if held.get(segment):
                held[segment] = max(1, int(share * held[segment]))
        self._own = cast("dict[SegmentId | None, int]", held)
        """Leading blocks that each segment has, or will have."""
        longest = source(ask.match, None) if ask.racks else None
        self._home = ask.racks.get(longest, "") if longest is not None else ""
        self._known: dict[tuple[int, Kind], tuple[int, Micros, Micros]] = {}

    def options(self, views: Sequence[InstanceView], now_us: Micros) -> Options:
        """The terms of these instances."""
        own, known, usable = self._own, self._known, self._usable
        local = [own.get(view.info.segment, 0) for view in views]
        if max(local) > usable:
            local = [blocks if blocks < usable else usable for blocks in local]
        # Most have nothing, and may be of one kind.
        pairs = zip(local, [view.kind for view in views], strict=True)
        rows = [known.get(pair) or self._terms(*pair) for pair in pairs]
        return Options(self._ask, self._block_size, views, local, rows, now_us)

    def own_tokens(self, view: InstanceView) -> Tokens:
        """The prefix of it that the instance has itself, or will have."""
        return min(self._own.get(view.info.segment, 0), self._usable) * self._block_size

    def least_us(self, kinds: Collection[Kind]) -> Micros:
        """What transfer and compute take at least on instances of these kinds; 0 where many."""
        runs = dict.fromkeys((0, *self._own.values()))
        if len(runs) * len(kinds) > _MANY:
            return 0
        terms = [self._terms(min(run, self._usable), kind) for run in runs for kind in kinds]
        return min(transfer_us + compute_us for _, transfer_us, compute_us in terms)

    def _terms(self, local: int, kind: Kind) -> tuple[int, Micros, Micros]:
        """Blocks to start from, time to load those it lacks, time to compute the rest."""
        length, size, best, fetch = self._ask.length, self._block_size, self._best, self._fetch
        cost, chunk = kind.cost, kind.chunk_tokens
        reused, transfer_us = local, 0
        if (best > local and kind.fetches) and (
            fetch == "cheaper" or (fetch == "threshold" and best > local * self._threshold)
        ):
            crosses = self._home and kind.rack not in ("", self._home)
            load_us = cost.transfer_us((best - local) * kind.block_bytes)
            reused, transfer_us = best, round(self._cross_rack * load_us) if crosses else load_us
        compute_us = cost.prefill_us(length, reused * size, chunk)
        if fetch == "cheaper" and reused > local:
            alone_us = cost.prefill_us(length, local * size, chunk)
            if transfer_us + compute_us >= alone_us:
                reused, transfer_us, compute_us = local, 0, alone_us
        row = self._known[local, kind] = reused, transfer_us, compute_us
        return row


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
    free = [view for view in views if view.room_tokens >= context] or views
    tbts = tbts_us(free, context)
    tbt_us, best = _lowest(tbts, free)
    meets = _meets(best, tbt_us, goal_us)
    rack = near.info.rack if near is not None else ""
    if not meets or (rack and best.info.rack != rack):  # then all must be looked at
        rows = list(zip(tbts, free, strict=True))
        met = [(us, view) for us, view in rows if _meets(view, us, goal_us)]
        meets, rows = bool(met), met or rows
        tbt_us, best = _lowest([us for us, _ in rows], [view for _, view in rows])
        same = [view for us, view in rows if view.info.rack == rack and us <= tbt_us * _NEAR]
        if rack and best.info.rack != rack and same:
            best = same[0]
    return best, meets


def roomy_decode(
    first: InstanceView,
    views: Sequence[InstanceView],
    context: Tokens,
    goal_us: Micros | None,
    look: Look,
    ends_us: Micros,
) -> tuple[InstanceView, Micros, Micros]:
    """`first`, or the next where a look at `ends_us` finds every goal met; and what it found.

    Where nobody has a goal nobody is looked at. Where all miss, it is `first`.
    """
    if goal_us is None and first.strictest_us() is None:
        tbt_us = first.tbt_us(context)
        return first, tbt_us, tbt_us
    found = look(first, ends_us)
    if _meets(first, found[1], goal_us):
        return first, *found
    free = [v for v in views if v.room_tokens >= context and v is not first]
    order = sorted(zip(tbts_us(free, context), range(len(free)), strict=True))
    for _, at in order[: _TRIED - 1]:
        other = look(free[at], ends_us)
        if _meets(free[at], other[1], goal_us):
            return free[at], *other
    return first, *found


def _lowest(tbts: Sequence[Micros], views: Sequence[InstanceView]) -> tuple[Micros, InstanceView]:
    """The lowest predicted TBT; of equals, the fewest members, the first."""
    lowest = min(tbts)
    return lowest, min([v for v, us in zip(views, tbts, strict=True) if us == lowest], key=_DECODES)


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
