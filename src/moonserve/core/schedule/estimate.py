"""What a request would take on each instance: the terms of Algorithm 1, and the time between
tokens.

Estimate computes T_transfer, T_queue and T_prefill; Options holds them for many instances in
columns; Candidates shows the best of them to people. How a policy weighs the terms stands in
core.schedule.policies. `choose_decode` picks the decode instance with the lowest predicted time
between tokens that breaks no objective. All are functions of views; nothing here changes a view.

Source: FAST'25 "Mooncake", section 6.1 and Algorithm 1 (page 8); the prose of section 4.2 states
the balancing condition backwards, this follows the algorithm.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias, overload

from moonserve.core.frozen import Frozen
from moonserve.core.kv.index import Match
from moonserve.core.request import EffectiveSlo
from moonserve.core.schedule.actions import Candidate
from moonserve.core.schedule.cost import Cost, Features, loaded_us, prefill_features, priced_us
from moonserve.core.schedule.ranking import number_of, row_of
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Decodes, Floor, InstanceView, Kind, Prefills, PrefillShape
from moonserve.core.units import Bytes, InstanceId, Micros, SegmentId, Tokens

Fetch: TypeAlias = Literal["never", "threshold", "cheaper"]
"""When an instance loads a prefix of others rather than computing it. never; threshold: if it
exceeds its own prefix by the balancing threshold (Algorithm 1); cheaper: if that is predicted to be
faster."""

HOLDERS = 24
"""The holders of the longest runs that a decision looks at one by one."""
Held: TypeAlias = Callable[[SegmentId], int]
"""How many blocks a segment holds."""


def _nothing(segment: SegmentId) -> int:
    return 0


def evicted(view: InstanceView, blocks: int, held: Held) -> int:
    """How many blocks its store must evict for so many new ones.

    What it will store for promised prefills counts as stored.
    """
    if not view.store_blocks:
        return 0
    coming = view.promised_tokens // view.block_size
    return max(0, held(view.segment) + coming + blocks - view.store_blocks)


class Ask(Frozen, frozen=True):
    """One request as a decision sees it."""

    length: Tokens
    """Of its prompt, and of what was generated before it is placed again."""
    match: Match
    """What the index knows of its prefix."""
    pending: Mapping[SegmentId, int] = {}
    """Leading blocks that each holder will have once its promised prefills are done."""
    waited_us: Micros = 0
    """Since it arrived."""
    expected_tokens: Tokens = 0
    """Output to be expected; for KV room."""
    whole: bool = False
    """Whether one call must do all of it; see Request."""
    rank: int = 0
    """How far it may go above the number of requests that an instance takes; see core.shares."""
    slo: EffectiveSlo = EffectiveSlo()
    """The objectives that it is held to."""
    avoid: Collection[InstanceId] = ()
    """Instances that failed this request: taken only if no other is left."""
    decode_load: DecodeLoad | None = None
    """Forecast of decode load. None: the promised decodes suffice."""


class Roles:
    """The instances that a decision may choose from."""

    __slots__ = ("decodes", "doubts", "held", "partners", "prefills", "racks")

    def __init__(
        self,
        prefills: Prefills | Sequence[InstanceView],
        decodes: Decodes | Sequence[InstanceView],
        partners: Sequence[InstanceView] | None = None,
        racks: Mapping[SegmentId, str] | None = None,
        doubts: Mapping[SegmentId, float] | None = None,
        held: Held = _nothing,
    ) -> None:
        self.prefills = prefills if isinstance(prefills, Prefills) else Prefills(prefills, True)
        self.decodes = decodes if isinstance(decodes, Decodes) else Decodes(decodes, True)
        self.partners = partners
        """Instances that may share a prefill with the chosen one; None: those of `prefills`."""
        self.racks = racks or {}
        """Rack of each segment whose instance reported one."""
        self.doubts = doubts or {}
        """Segments whose claims are not believed, and the share of them that counts all the
        same."""
        self.held = held
        """How full the stores are: ties go to an instance that need not evict."""


class Options:
    """The terms of many instances in columns: row i belongs to views[i].

    Columns, since a decision may look at a thousand instances and shows only few of them.
    """

    __slots__ = (
        "ask", "block_size", "compute_us", "decodes", "local", "now_us", "queue_us", "reused",
        "transfer_us", "ttft_us", "views",
    )  # fmt: skip

    def __init__(self, ask: Ask, block_size: Tokens, now_us: Micros) -> None:
        self.ask = ask
        self.block_size = block_size
        self.now_us = now_us
        self.views: list[InstanceView] = []
        self.local: list[int] = []
        """Blocks of the prompt that each instance has itself."""
        self.reused: list[int] = []
        """Blocks that each would start from."""
        self.transfer_us: list[Micros] = []
        """The time to load those that it lacks of them."""
        self.queue_us: list[Micros] = []
        self.compute_us: list[Micros] = []
        """The time to compute the rest."""
        self.ttft_us: list[Micros] = []
        """Predicted TTFT of each instance, from now: the sum of these times."""
        self.decodes: list[int] = []

    def only(self, rows: Sequence[int]) -> Options:
        """Some of the rows."""
        part = Options(self.ask, self.block_size, self.now_us)
        part.views = [self.views[row] for row in rows]
        part.local = [self.local[row] for row in rows]
        part.reused = [self.reused[row] for row in rows]
        part.transfer_us = [self.transfer_us[row] for row in rows]
        part.queue_us = [self.queue_us[row] for row in rows]
        part.compute_us = [self.compute_us[row] for row in rows]
        part.ttft_us = [self.ttft_us[row] for row in rows]
        part.decodes = [self.decodes[row] for row in rows]
        return part

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the prompt, a partial last one included."""
        return -(-self.ask.length // self.block_size)

    def candidate(self, row: int, score: float) -> Candidate:
        """One row as plain data."""
        own = self.views[row].info
        size = self.block_size
        local, reused = self.local[row], self.reused[row]
        return Candidate(
            own.id,
            local * size,
            reused * size,
            source(self.ask.match, own.segment) if reused > local else None,
            self.transfer_us[row],
            self.queue_us[row],
            self.compute_us[row],
            score,
            self.decodes[row],
        )


class Candidates(Sequence[Candidate]):
    """The chosen candidate, then those it won against, best first, `most` in all.

    Made when looked at: of most decisions only the first is ever read.
    """

    __slots__ = ("_all", "_chosen", "_most", "_options", "_row", "_scores")

    def __init__(self, options: Options, scores: Sequence[float], row: int, most: int) -> None:
        self._options = options
        self._scores = scores
        self._row = row
        self._most = most
        self._chosen = options.candidate(row, scores[row])
        self._all: list[Candidate] | None = None

    @property
    def chosen(self) -> Candidate:
        """The first of them."""
        return self._chosen

    def __len__(self) -> int:
        return min(self._most, len(self._scores))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if self._all is None:
            scores = self._scores
            order = sorted(range(len(scores)), key=scores.__getitem__)[: self._most]
            others = [row for row in order if row != self._row][: self._most - 1]
            losers = [self._options.candidate(row, scores[row]) for row in others]
            self._all = [self._chosen, *losers]
        return self._all[at]


class Plan:
    """What an instance does for one prompt, whatever its speed."""

    __slots__ = ("alone", "factor", "features", "local", "reused", "size_bytes")

    def __init__(
        self,
        local: int,
        reused: int,
        size_bytes: Bytes,
        factor: float,
        features: Features,
        alone: Features | None,
    ) -> None:
        self.local = local
        """Blocks that it holds."""
        self.reused = reused
        """Blocks that it starts from."""
        self.size_bytes = size_bytes
        """What it loads of them."""
        self.factor = factor
        """How many times longer that takes than within a rack."""
        self.features = features
        """What it computes then."""
        self.alone = alone
        """What it computes if loading does not pay; None: it loads all the same."""

    def terms(self, cost: Cost) -> tuple[int, Micros, Micros]:
        """Blocks to start from, time to load those it lacks, time to compute the rest."""
        compute_us = priced_us(cost.prompt_us, self.features)
        if self.reused == self.local:
            return self.reused, 0, compute_us
        transfer_us = loaded_us(cost.load_us, self.size_bytes)
        if self.factor != 1.0:
            transfer_us = round(self.factor * transfer_us)
        if self.alone is not None:
            alone_us = priced_us(cost.prompt_us, self.alone)
            if transfer_us + compute_us >= alone_us:
                return self.local, 0, alone_us
        return self.reused, transfer_us, compute_us


NO_PLAN = Plan(0, 0, 0, 1.0, (0, 0, 0, 0), None)


class Estimate:
    """Algorithm 1's estimate of one request for any instance: T_transfer, T_queue and T_prefill.

    best = the longest prefix the pool can give. Where an instance fetches, only length - best is
    computed; else it computes from its own prefix. At least one token is always computed: its
    logits are the first token's.
    """

    def __init__(
        self, ask: Ask, roles: Roles, block_size: Tokens, fetch: Fetch, tuning: Tuning
    ) -> None:
        self._ask = ask
        self._length = ask.length
        self._block_size = block_size
        self._fetch = fetch
        self._threshold = tuning.kvcache_balancing_threshold
        self._cross_rack = tuning.cross_rack
        self._usable = (ask.length - 1) // block_size
        self._best = min(ask.match.pool, self._usable)
        known = ask.match.by_holder
        held = known.copy() if ask.pending or roles.doubts else known
        for segment, blocks in ask.pending.items():
            if blocks > held.get(segment, 0):
                held[segment] = blocks
        for segment, share in roles.doubts.items():
            if held.get(segment):
                held[segment] = max(1, int(share * held[segment]))
        self._own = held
        """Leading blocks that each segment has, or will have."""
        longest = source(ask.match, None) if roles.racks else None
        self._home = roles.racks.get(longest, "") if longest is not None else ""
        self._plans: dict[PrefillShape, dict[int, Plan]] = {}
        """By the blocks that an instance holds."""
        self._rests: dict[Tokens, Features] = {}
        """What is computed behind the longest prefix, by the tokens of a pass."""

    def options(self, views: Sequence[InstanceView], now_us: Micros) -> Options:
        """The terms of these instances."""
        options = Options(self._ask, self._block_size, now_us)
        self.extend(options, views)
        return options

    def extend(self, options: Options, views: Sequence[InstanceView]) -> None:
        """Add the terms of these instances.

        One loop: successive instances that hold as much often share a plan, and maybe their costs.
        """
        own = self._own
        usable = self._usable
        now_us = options.now_us
        blocks = -1
        kind: Kind | None = None
        shape: PrefillShape | None = None
        plans: dict[int, Plan] = {}
        plan = NO_PLAN
        terms: tuple[int, Micros, Micros] = (0, 0, 0)
        for view in views:
            held = own.get(view.segment, 0)
            if held > usable:
                held = usable
            if held != blocks or view.kind is not kind:
                kind = view.kind
                if kind.shape is not shape:
                    shape = kind.shape
                    plans = self._plans_of(shape)
                    blocks = -1
                if held != blocks:
                    blocks = held
                    plan = plans.get(held) or self._planned(held, shape)
                terms = plan.terms(kind.cost)
            reused, transfer_us, compute_us = terms
            queue_us = view.queue_us(now_us)
            options.views.append(view)
            options.local.append(held)
            options.reused.append(reused)
            options.transfer_us.append(transfer_us)
            options.queue_us.append(queue_us)
            options.compute_us.append(compute_us)
            options.ttft_us.append(transfer_us + queue_us + compute_us)
            options.decodes.append(view.decodes)

    def own_tokens(self, view: InstanceView) -> Tokens:
        """The prefix of it that the instance has itself, or will have."""
        return self.own_blocks(view) * self._block_size

    def own_blocks(self, view: InstanceView) -> int:
        """The same in blocks."""
        return min(self._own.get(view.segment, 0), self._usable)

    def cut(self) -> int:
        """The longest run of those that are not among the HOLDERS holders of longer ones."""
        if len(self._own) <= HOLDERS:
            return 0
        return min(self._usable, sorted(self._own.values(), reverse=True)[HOLDERS])

    def holders(self, cut: int) -> list[SegmentId]:
        """The segments with a longer run than `cut`."""
        usable = self._usable
        return [it for it, blocks in self._own.items() if min(blocks, usable) > cut]

    def least_us(self, floors: Collection[Floor], most: int) -> Micros:
        """What transfer and compute take at least where no more than `most` blocks are held.

        Every step of `_terms` grows with its coefficients, so that of the lowest ones is least.
        """
        return min([self._least_us(floor, most) for floor in floors])

    def _least_us(self, floor: Floor, most: int) -> Micros:
        shape = floor.shape
        best = self._best
        alone_us = priced_us(floor.prompt_us, self._least_features(most, shape.chunk))
        if best <= most or not shape.fetches or self._fetch == "never":
            return alone_us
        size_bytes, factor = self._load(most, shape)
        load_us = loaded_us(floor.load_us, size_bytes)
        if factor != 1.0:
            load_us = round(factor * load_us)
        rest_us = priced_us(floor.prompt_us, self._rest(shape.chunk))
        if self._fetch == "threshold" and best > most * self._threshold:
            return load_us + rest_us
        return min(alone_us, load_us + rest_us)

    def _load(self, local: int, shape: PrefillShape) -> tuple[Bytes, float]:
        """The bytes that an instance lacks of the longest prefix, and how much longer a transfer
        takes there than within a rack."""
        crosses = self._home and shape.rack not in ("", self._home)
        return (self._best - local) * shape.block_bytes, self._cross_rack if crosses else 1.0

    def _features(self, blocks: int, chunk: Tokens) -> Features:
        """The features of a prefill that starts from so many blocks."""
        return prefill_features(self._length, blocks * self._block_size, chunk)

    def _least_features(self, most: int, chunk: Tokens) -> Features:
        """No feature is lower for a prefill that starts from `most` blocks or fewer."""
        passes, new, square, past = self._features(most, chunk)
        return passes, new, square, past - passes * most * self._block_size

    def _rest(self, chunk: Tokens) -> Features:
        """The features of a prefill that starts from the longest prefix."""
        rest = self._rests.get(chunk)
        if rest is None:
            rest = self._rests[chunk] = self._features(self._best, chunk)
        return rest

    def _plans_of(self, shape: PrefillShape) -> dict[int, Plan]:
        plans = self._plans.get(shape)
        if plans is None:
            plans = self._plans[shape] = {}
        return plans

    def _planned(self, local: int, shape: PrefillShape) -> Plan:
        """What an instance of this shape does that holds so many blocks; kept in `_plans`."""
        chunk = shape.chunk
        best = self._best
        fetch = self._fetch
        loads = best > local and shape.fetches and fetch != "never"
        if fetch == "threshold" and best <= local * self._threshold:
            loads = False
        if loads:
            size_bytes, factor = self._load(local, shape)
            own = self._features(local, chunk) if fetch == "cheaper" else None
            plan = Plan(local, best, size_bytes, factor, self._rest(chunk), own)
        else:
            plan = Plan(local, local, 0, 1.0, self._features(local, chunk), None)
        self._plans_of(shape)[local] = plan
        return plan


def source(match: Match, own: SegmentId | None) -> SegmentId | None:
    """The other segment with the longest run of its own; of equal runs the first id."""
    runs = match.by_holder
    if own in runs:
        runs = {holder: length for holder, length in runs.items() if holder != own}
    longest = max(runs.values(), default=0)
    return min((holder for holder, length in runs.items() if length == longest), default=None)


_ORDER = attrgetter("order")
_ANY: Tokens = -(1 << 60)
"""Less than any room."""
_TRIED = 4
"""Decode instances, those with the fewest promises, whose load over time is looked at."""
_NEAR = 1.02
"""Predicted TBTs this near are a tie, which the shorter path wins."""


class DecodeLoad(Protocol):
    """How full decode will be for one request; see core.schedule.decode_forecast."""

    def tbt_us(self, view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
        """Predicted TBTs on that instance once the request joins it at `ends_us`: the mean, and
        the most."""


def choose_decode(
    context: Tokens,
    among: Decodes | Sequence[InstanceView],
    goal_us: Micros | None = None,
    near: InstanceView | None = None,
    leaves: bool = False,
) -> tuple[InstanceView, bool]:
    """The instance for a request of this context, and whether all its members then meet their TBT.

    near: the prefill instance, where the KV is already. leaves: whether the request may leave it.

    1. `near`, if it decodes and has a slot, or if no instance has one. With `leaves`, only if it
       meets every objective.
    2. Else the instances with KV room for the request; all of them, if none has room.
    3. Of these, those that break no objective; all of these, if each breaks one.
    4. The lowest predicted TBT after joining.
    5. Ties: an instance of near's rack wins, also if its TBT is up to 2 % above the lowest
       (_NEAR). Else the fewest members win, then the instance that was not used for the longest
       time, then the first; `near` counts as the first. TBTs that differ by no more than a fitted
       prediction errs are a tie too.
    """
    decodes = among if isinstance(among, Decodes) else Decodes(among)
    home = near if near is not None and decodes.has(near) else None
    if home is not None and (
        home.has_slot(context) or not any(view.has_slot(context) for view in decodes.all())
    ):
        meets_here = meets_goals(home, home.tbt_us(context), goal_us)
        if meets_here or not leaves:
            return home, meets_here
    tbt_us, best = _lowest(decodes, context, home)
    meets = meets_goals(best, tbt_us, goal_us)
    rack = near.info.rack if near is not None else ""
    if meets and (not rack or best.info.rack == rack):
        return best, True
    rows = [(view.tbt_us(context), view) for view in _roomy(decodes, context)]  # all of them
    met = [(us, view) for us, view in rows if meets_goals(view, us, goal_us)]
    rows = met or rows
    tbt_us, best = _lowest(decodes.only([view for _, view in rows]), context, home)
    same = [view for us, view in rows if view.info.rack == rack and us <= tbt_us * _NEAR]
    if rack and best.info.rack != rack and same:
        best = min(same, key=_ORDER)
    return best, bool(met)


def _roomy(decodes: Decodes, context: Tokens) -> Sequence[InstanceView]:
    """Those with room for this context, or all, if none has."""
    views = decodes.all()
    return [view for view in views if view.room_tokens >= context] or views


def _lowest(
    decodes: Decodes, context: Tokens, home: InstanceView | None
) -> tuple[Micros, InstanceView]:
    """The lowest predicted TBT of those with room, or one as low as predictions can tell, and its
    instance: the first by `order`; of equal ones `home`.

    The first one of all is it, if its TBT is surely low enough. Else those are looked at whose load
    allows for such a TBT, the lowest loads first.
    """
    room = context
    first = _first(decodes, room, home)
    if first is None:
        room = _ANY
        first = _first(decodes, room, home)
    assert first is not None
    first_us = first.tbt_us(context)
    loads = decodes.load.entries
    if first_us <= decodes.least_us(loads[0], context) * (1 + decodes.least_error):
        return first_us, first
    views = decodes.views
    takes = decodes.takes
    low_us = first_us
    beyond = decodes.beyond(first_us, context)
    rows: list[int] = []
    tbts_us: list[Micros] = []
    for entry in loads:
        if entry >= beyond:
            break
        row = row_of(entry)
        if takes[row] and views[row].room_tokens >= room:
            us = decodes.tbt_us(row, context)
            rows.append(row)
            tbts_us.append(us)
            if us < low_us:
                low_us = us
                most_us = min(first_us, low_us * (1 + decodes.most_error))
                beyond = decodes.beyond(most_us, context)
    lowest = first
    if low_us in tbts_us:  # of equal ones the first, as which `home` counts
        at = [row for row, us in zip(rows, tbts_us, strict=True) if us == low_us]
        lowest = views[min(at)]
        if home is not None and any(views[row] is home for row in at):
            lowest = home
    limit_us = low_us * (1 + lowest.cost.error)
    if first_us <= limit_us:
        return first_us, first
    ties = [row for row, us in zip(rows, tbts_us, strict=True) if us <= limit_us]
    best = row_of(min([decodes.order.entry(row) for row in ties]))
    for row in ties:
        if views[row] is home and home.order == views[best].order:
            best = row
    return tbts_us[rows.index(best)], views[best]


def _first(decodes: Decodes, room: Tokens, home: InstanceView | None) -> InstanceView | None:
    """The first by `order` with this much room; of equal ones `home`."""
    best: InstanceView | None = None
    for entry in decodes.order.entries:
        if best is not None and (home is None or number_of(entry) != best.order):
            break
        row = row_of(entry)
        view = decodes.views[row]
        if decodes.takes[row] and view.room_tokens >= room and (best is None or view is home):
            best = view
    return best


def roomy_decode(
    first: InstanceView,
    decodes: Decodes | None,
    context: Tokens,
    goal_us: Micros | None,
    load: DecodeLoad,
    ends_us: Micros,
) -> tuple[InstanceView, Micros, Micros]:
    """`first`, if it meets every objective at `ends_us`; and the TBTs found there.

    Else the first of three others that does: those with KV room and the lowest TBT by the promised
    decodes. Else `first`. If no request has an objective, nothing is forecast. decodes: None: there
    are no others.
    """
    if goal_us is None and first.strictest_us() is None:
        tbt_us = first.tbt_us(context)
        return first, tbt_us, tbt_us
    found = load.tbt_us(first, ends_us)
    if decodes is None or meets_goals(first, found[1], goal_us):
        return first, *found
    for view in _least_loaded(decodes, context, first):
        other = load.tbt_us(view, ends_us)
        if meets_goals(view, other[1], goal_us):
            return view, *other
    return first, *found


def _least_loaded(decodes: Decodes, context: Tokens, but: InstanceView) -> Sequence[InstanceView]:
    """Three with room and the lowest TBTs, beside one; of equal ones the first."""
    found: list[tuple[Micros, int]] = []
    for entry in decodes.load.entries:
        if len(found) == _TRIED - 1 and decodes.least_us(entry, context) > found[-1][0]:
            break
        row = row_of(entry)
        view = decodes.views[row]
        if view is not but and view.room_tokens >= context and decodes.takes[row]:
            insort(found, (view.tbt_us(context), row))
            del found[_TRIED - 1 :]
    return [decodes.views[row] for _, row in found]


def meets_goals(view: InstanceView, tbt_us: Micros, goal_us: Micros | None) -> bool:
    """Whether that time between tokens is within the goal and the goals of all decodes there."""
    strictest_us = view.strictest_us()
    return (goal_us is None or tbt_us <= goal_us) and (
        strictest_us is None or tbt_us <= strictest_us
    )
