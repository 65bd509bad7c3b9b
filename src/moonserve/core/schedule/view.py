"""What the Conductor believes about each instance, and what it has promised there.

Beliefs come from joins and heartbeats; promises are the Conductor's own ledger, exact at decision
time, where reports lag. Only the Conductor changes a view; placement reads it. Every read is O(1).

A fleet may have thousands of instances. So the instances of each role are also kept in the orders
in which decisions look for them (Prefills, Decodes).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import overload

from moonserve.core.frozen import Frozen
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.external_load import NO_LOAD, external_load
from moonserve.core.schedule.facts import SELF_HELP, InstanceInfo, InstanceLoad
from moonserve.core.schedule.forecast import Residencies
from moonserve.core.schedule.observed import Trust
from moonserve.core.schedule.ranking import Ranking, first_entry, number_of, row_of
from moonserve.core.schedule.residency import Residency
from moonserve.core.shares import extended
from moonserve.core.units import (
    Bytes,
    InstanceId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
    nearest,
)

NO_SEGMENT = SegmentId("")
"""Stands for the segment of an instance that has none; it holds nothing."""
_USUAL: Tokens = 1_024
"""A prompt, before any was promised."""
_FEW = 8
"""Changes that are brought up to date one by one, however small the role."""
_OFTEN = 64
"""Changes, beside one for each instance, after which the lowest costs are found anew."""
_FINE = 1_024.0
"""A power of two: parts of a microsecond by which loads are told apart."""


class PrefillShape:
    """What the work for a prefill depends on, beside the prompt and the prefix that is there.

    Compared by identity: ClusterView lets instances that are alike share one.
    """

    __slots__ = ("block_bytes", "chunk", "fetches", "rack")

    def __init__(self, info: InstanceInfo) -> None:
        self.chunk: Tokens = info.chunk_tokens
        """The most tokens of a pass."""
        self.block_bytes: Bytes = info.block_bytes
        self.rack: str = info.rack
        self.fetches: bool = info.fetches
        """Whether it loads prefixes of others."""

    def is_like(self, other: PrefillShape) -> bool:
        """Whether both are the same."""
        return (
            self.chunk == other.chunk
            and self.block_bytes == other.block_bytes
            and self.rack == other.rack
            and self.fetches == other.fetches
        )


class Kind:
    """What the time for a prefill depends on, beside the work. Shared as a shape is."""

    __slots__ = ("cost", "shape")

    def __init__(self, shape: PrefillShape, cost: Cost) -> None:
        self.cost = cost
        self.shape = shape


class InstanceView:
    """One live instance: what it reported last, and what is promised to it.

    The second half of the attributes are counters, kept as promises come and go: a decision reads
    them in O(1). `check` recomputes them. Only the Conductor calls methods that change a view.
    """

    def __init__(self, info: InstanceInfo, now_us: Micros, cost: Cost | None = None) -> None:
        self.info = info
        self.segment = info.segment or NO_SEGMENT
        """Where it keeps what it holds, for look-ups."""
        self.cost = cost or Cost()
        self.kind = Kind(PrefillShape(info), self.cost)
        self.load = InstanceLoad(free_blocks=info.kv_blocks)
        self.heard_us = now_us
        """When its last heartbeat came."""
        self.drained = False
        """Whether it gets no new work, by an operator's order."""
        self.trust = Trust()
        """How far its claims to hold prefixes are believed."""
        self.block_size: Tokens = info.namespace.block_size
        self.kv_tokens = info.kv_blocks * self.block_size
        """The most context that fits here."""
        size = info.block_bytes
        self.store_blocks = info.segment_bytes // size if size else 0
        """Blocks for which its segment has room; 0: it has none, or no bound."""
        self.turns = count(1)
        """Numbers that all instances of a ClusterView take in turn."""
        self.used = 0
        """The number that it took when something was promised here last; 0: nothing was."""
        # Load that this Conductor did not send here.
        self.external = NO_LOAD
        """What the engine counted in its last two reports."""
        self.external_until_us: Micros = 0
        """When external prefills that are ahead of ours are done."""
        self._seen = NO_LOAD
        """What it counted in the last one."""
        self._usual_us = 0.0
        """Mean time of prefills that were promised here lately."""
        # Our promises.
        self._queue: dict[RequestId, tuple[Micros, Tokens, Tokens]] = {}
        """Prefills in order: time, tokens to compute, tokens of the prompt."""
        self._decoding: dict[RequestId, Tokens] = {}
        """Decodes that run here or will, with their contexts."""
        self._tbt_goals: dict[RequestId, Micros] = {}
        self.residencies = Residencies()
        """The same decodes over time."""
        # Counters over these.
        self.prefills = 0
        """Prefills promised here."""
        self.takes_prefill = True
        """Whether one more prefill may be promised."""
        self.idle_us: Micros = 0
        """When all promised prefills would be done, if the head took no longer than predicted."""
        self.behind_us: Micros = 0
        """Prefill time promised behind the head."""
        self.promised_us: Micros = 0
        """Prefill time promised here, spent or not."""
        self.promised_tokens: Tokens = 0
        """Prompt tokens that those prefills compute."""
        self.prompt_tokens: Tokens = 0
        """All their prompt tokens, cached ones included."""
        self.decodes = 0
        """Decodes promised here, those still in prefill included."""
        self.takes_decode = True
        """Whether one more decode may be promised."""
        self.context: Tokens = 0
        """Context lengths of all those decodes, summed."""
        self.joined_seqs = 1
        """Members of a pass once one more has joined: ours, promised ones, and external ones."""
        self.joined_context: Tokens = 0
        """The context of all of them but that one."""
        self.room_tokens: Tokens = 0
        """The most context that one more decode may have; below zero without a free slot."""
        self.order = 0
        """Of equal instances the lowest is next: the fewest decodes, then the least lately used."""
        self._strictest_us: Micros | None = None
        self.stale_in: list[dict[InstanceView, None]] = []
        """Where it notes that a number changed by which it stands in an order; see Role."""
        self._count_decodes()

    def check(self) -> None:
        """Recompute every counter; an AssertionError names the first that is wrong."""
        queue = list(self._queue.values())
        limit = self.info.max_requests
        assert self.prefills == len(queue)
        assert self.promised_us == sum(work_us for work_us, _, _ in queue)
        assert self.behind_us == sum(work_us for work_us, _, _ in queue[1:])
        assert self.promised_tokens == sum(tokens for _, tokens, _ in queue)
        assert self.prompt_tokens == sum(prompt for _, _, prompt in queue)
        assert queue or self.idle_us == 0
        assert self.takes_prefill == (len(queue) < limit)
        contexts = self._decoding
        assert self.decodes == len(contexts)
        assert self.order == (self.decodes << 64) + self.used
        assert self.context == sum(contexts.values())
        assert self.takes_decode == (len(contexts) < limit)
        assert self.joined_seqs == len(contexts) + self.external.running + 1
        assert self.joined_context == self.context + self.external.context
        has_slot = self.joined_seqs <= self.info.max_seqs
        assert self.room_tokens == (self.kv_tokens - self.joined_context if has_slot else -1)
        assert self._tbt_goals.keys() <= contexts.keys()
        assert self._strictest_us == min(self._tbt_goals.values(), default=None)
        active, promised = self.residencies.active, self.residencies.promised
        assert not active.keys() & promised.keys()
        assert active.keys() | promised.keys() == contexts.keys()
        assert self.residencies.context == sum(it.context for it in active.values())

    def beat(self, load: InstanceLoad, now_us: Micros) -> None:
        """Take in a heartbeat: the load, and measured samples for the cost fit."""
        self.heard_us = now_us
        self.load = load
        self.cost.observe(load.passes, load.transfers)
        for hit in load.hits:
            self.trust.observe(hit)
        if load.everybody:
            self._see_external(load, now_us)

    def _see_external(self, load: InstanceLoad, now_us: Micros) -> None:
        active = len(self.residencies.active)
        context = self.residencies.context
        before = self._seen
        found = external_load(self.info.role, load, self.prefills, active, context)
        self._seen = found
        self.external = self.residencies.external = found.or_less(before)
        usual_us = self._usual_us or self.cost.prefill_us(_USUAL, 0, self.info.chunk_tokens)
        self.external_until_us = now_us + round(self.external.waiting * usual_us)
        self._count_decodes()

    def promise_prefill(
        self,
        request: RequestId,
        work_us: Micros,
        tokens: Tokens,
        now_us: Micros,
        cached: Tokens = 0,
    ) -> None:
        """Reserve `work_us` of this instance's prefill time, behind earlier promises.

        tokens: prompt tokens to compute; cached: prompt tokens before them.
        """
        assert request not in self._queue
        self.use()
        if self._queue:
            self.behind_us += work_us
            self.idle_us += work_us
        else:
            self.idle_us = now_us + work_us
        self._usual_us += (work_us - self._usual_us) * (0.1 if self._usual_us else 1.0)
        self._queue[request] = (work_us, tokens, tokens + cached)
        self._promise(work_us, tokens, tokens + cached)

    def use(self) -> None:
        """It was chosen: of equal instances, others are next."""
        self.used = next(self.turns)
        self.order = (self.decodes << 64) + self.used
        self.changed()

    def changed(self) -> None:
        """A number changed by which it stands in an order."""
        for stale in self.stale_in:
            stale[self] = None

    def end_prefill(self, request: RequestId, now_us: Micros) -> None:
        """The promise is over, kept or not; unknown requests are no error."""
        if request not in self._queue:
            return
        was_head = next(iter(self._queue)) == request
        work_us, tokens, prompt = self._queue.pop(request)
        self._promise(-work_us, -tokens, -prompt)
        if not was_head:
            self.behind_us -= work_us
            self.idle_us -= work_us
        elif self._queue:
            self.behind_us -= next(iter(self._queue.values()))[0]
            self.idle_us = now_us + self.promised_us
        else:
            self.behind_us = self.idle_us = 0

    def _promise(self, work_us: Micros, tokens: Tokens, prompt: Tokens) -> None:
        """Add to the sums over promised prefills, or subtract."""
        self.promised_us += work_us
        self.promised_tokens += tokens
        self.prompt_tokens += prompt
        self._count_prefills()

    def _count_prefills(self) -> None:
        self.prefills = len(self._queue)
        self.takes_prefill = self.prefills < self.info.max_requests
        self.changed()

    def queue_us(self, now_us: Micros) -> Micros:
        """Prefill work promised and not yet done: T_queue of Algorithm 1.

        The head has been running since it became the head, so that much of it is spent.
        """
        left_us = self.idle_us - now_us
        ours_us = left_us if left_us > self.behind_us else self.behind_us
        return ours_us + max(0, self.external_until_us - now_us)

    @property
    def ready_us(self) -> Micros:
        """It has nothing to prefill before then, or less: `queue_us` is at least the rest of it."""
        return max(self.idle_us, self.external_until_us)

    def is_free(self, now_us: Micros, ahead_us: Micros) -> bool:
        """Whether it prefills nothing, or one prompt of which at most `ahead_us` are left."""
        if not self.prefills:
            return self.external_until_us <= now_us + ahead_us
        return self.prefills == 1 and 0 < ahead_us >= self.queue_us(now_us)

    def promise_decode(
        self,
        request: RequestId,
        context: Tokens,
        tbt_goal_us: Micros | None = None,
        residency: Residency | None = None,
    ) -> None:
        """Reserve a decode of this context; promised again, it is counted once.

        tbt_goal_us: its own objective for the time between tokens; residency: when it begins and
        how long it is expected to last.
        """
        self.use()
        self.residencies.promise(request, residency or Residency(context))
        self.context += context - self._decoding.get(request, 0)
        self._decoding[request] = context
        self._count_decodes()
        if tbt_goal_us is not None and self._tbt_goals.get(request) != tbt_goal_us:
            self._tbt_goals[request] = tbt_goal_us
            self._strictest_us = min(self._tbt_goals.values())

    def begin_decode(self, request: RequestId, now_us: Micros) -> None:
        """The prefill is over: the promised decode begins."""
        self.residencies.begin(request, now_us, self.cost.step_us)

    def resume_decode(self, request: RequestId, began_us: Micros, now_us: Micros) -> None:
        """The promised decode runs since `began_us`, by the order of another Conductor."""
        self.residencies.resume(request, began_us, now_us, self.cost.step_us)

    def end_decode(self, request: RequestId, now_us: Micros) -> Residency | None:
        """The promise is over, kept or not; unknown requests are no error.

        Returns the residency if the decode had begun.
        """
        residency = self.residencies.end(request, now_us, self.cost.step_us)
        self.context -= self._decoding.pop(request, 0)
        if self._tbt_goals.pop(request, None) == self._strictest_us:
            self._strictest_us = min(self._tbt_goals.values(), default=None)
        self._count_decodes()
        return residency

    def _count_decodes(self) -> None:
        self.decodes = len(self._decoding)
        self.order = (self.decodes << 64) + self.used
        self.takes_decode = self.decodes < self.info.max_requests
        self.joined_seqs = self.decodes + self.external.running + 1
        self.joined_context = self.context + self.external.context
        has_slot = self.joined_seqs <= self.info.max_seqs
        self.room_tokens = self.kv_tokens - self.joined_context if has_slot else -1
        self.changed()

    def spares_prefill(self, rank: int, context: Tokens) -> bool:
        """Whether it takes one more prefill from its reserve for clients of this rank."""
        return self.prefills < extended(self.info.max_requests, rank) and context <= self.kv_tokens

    def spares_decode(self, rank: int, context: Tokens) -> bool:
        """Whether it takes one more decode from its reserve for clients of this rank."""
        return self.decodes < extended(self.info.max_requests, rank) and context <= self.kv_tokens

    def has_slot(self, context: Tokens) -> bool:
        """Whether the batch has a place and the memory has room for one more decode."""
        return context <= self.room_tokens

    @property
    def has_place(self) -> bool:
        """Whether one that begins to decode now takes part in the next pass."""
        return len(self.residencies.active) + self.residencies.external.running < self.info.max_seqs

    def tbt_us(self, joining: Tokens) -> Micros:
        """Predicted time between tokens once a request of context `joining` has joined.

        All members share a pass, so it is the same for every one of them.
        """
        return nearest(self.step_us() + self.cost.step_us[2] * joining)

    def step_us(self) -> float:
        """The part of `tbt_us` that does not depend on who joins."""
        base, per_seq, per_context = self.cost.step_us
        return base + per_seq * self.joined_seqs + per_context * self.joined_context

    def tbt_now_us(self, joining: Tokens) -> Micros:
        """The same with only the decodes that run here by now, without those still in prefill."""
        return round(self.residencies.step_us(self.cost.step_us, joining))

    def strictest_us(self) -> Micros | None:
        """The tightest TBT objective of the decodes here; None if none has one."""
        return self._strictest_us


def preferred(
    views: Sequence[InstanceView], avoid: Collection[InstanceId]
) -> Sequence[InstanceView]:
    """The views that are not to be avoided, or all if that leaves none."""
    if not avoid:
        return views
    return [view for view in views if view.info.id not in avoid] or views


def allowed(views: Sequence[InstanceView], among: Collection[InstanceId]) -> Sequence[InstanceView]:
    """The views that a request may use; see Request.among."""
    if not among:
        return views
    names = frozenset(among)
    return [view for view in views if view.info.id in names]


class Role:
    """The instances that may take one role for one model, in the order of their ids.

    Kept by ClusterView: a view notes in `stale` that it changed, and `sync` brings what changed up
    to date before a decision reads it. A Role of a plain list, or a part of another Role, is as of
    now.
    """

    def __init__(
        self, views: Sequence[InstanceView], kept: bool = False, whole: Role | None = None
    ) -> None:
        self.kept = kept
        """Whether some may not take one more request; else each does."""
        self.members = views
        self.views: Sequence[InstanceView] = views if whole is None else whole.views
        """The members, or those of the whole: orders have their rows."""
        self.rows: dict[InstanceView, int]
        """The place of each in `views`."""
        if whole is None:
            self.rows = {view: row for row, view in enumerate(views)}
        else:
            self.rows = whole.rows
        self.stale: dict[InstanceView, None] = {}
        self.least_kv: Tokens = min([view.kv_tokens for view in views], default=0)
        """The memory of the smallest: any request of this length fits into each."""
        self.ways = dict.fromkeys([view.info.connector for view in views])
        """Their connectors."""
        self.takes: list[bool] = [False] * len(self.views)
        """Whether each of `views` is a member that takes one more request."""
        self.taking = 0
        """How many do."""
        self.order: Ranking = Ranking([]) if whole is None else whole.order
        """By InstanceView.order."""
        if whole is None:
            self._rank()
        else:
            self._find_takes()

    def __len__(self) -> int:
        return len(self.members)

    def _takes_one(self, view: InstanceView) -> bool:
        """Whether one more request may be promised there."""
        raise NotImplementedError

    def _spares_one(self, view: InstanceView, rank: int, need: Tokens) -> bool:
        """Whether its reserve for clients of this rank has room for one of this length."""
        raise NotImplementedError

    def _fitting(self, need: Tokens, rank: int) -> list[InstanceView]:
        """Those that take one of this length; if none does, those whose reserve has room."""
        found = [view for view in self.all() if view.kv_tokens >= need]
        if rank and not found:
            found = [view for view in self.members if self._spares_one(view, rank, need)]
        return found

    def _rank(self) -> None:
        """Bring all up to date."""
        self.order = Ranking([view.order for view in self.views])
        self._find_takes()

    def _find_takes(self) -> None:
        self.taking = 0
        for view in self.members:
            takes = not self.kept or self._takes_one(view)
            self.takes[self.rows[view]] = takes
            self.taking += takes

    def _put(self, row: int, view: InstanceView) -> None:
        """Bring one instance up to date."""
        self.order.put(row, view.order)
        takes = self._takes_one(view)
        if takes != self.takes[row]:
            self.takes[row] = takes
            self.taking += 1 if takes else -1

    def sync(self) -> None:
        """Bring all up to date that changed since the last time."""
        stale = self.stale
        if len(stale) > _FEW + len(self.views) // 4:
            self._rank()
        else:
            rows = self.rows
            for view in stale:
                self._put(rows[view], view)
        stale.clear()

    def has(self, view: InstanceView) -> bool:
        """Whether this instance is one of those that take one more request."""
        row = self.rows.get(view)
        return row is not None and self.takes[row]

    def all(self) -> Sequence[InstanceView]:
        """Those that take one more request."""
        if self.taking == len(self.members):
            return self.members
        return [view for view in self.members if self.takes[self.rows[view]]]

    def first(self, most: int) -> list[int]:
        """Rows of those that take one more request, the first by `order`."""
        found: list[int] = []
        for entry in self.order.entries:
            row = row_of(entry)
            if self.takes[row]:
                found.append(row)
                if len(found) == most:
                    break
        return found

    def check(self) -> None:
        """Compare what was kept with what all instances say now; for tests."""
        self.sync()
        assert self.order.entries == Ranking([view.order for view in self.views]).entries
        assert self.takes == [self._takes_one(view) for view in self.views]
        assert self.taking == sum(self.takes)


class Floor:
    """The lowest costs of instances whose kinds differ in nothing else; no coefficient is higher
    than that of any of them."""

    __slots__ = ("load_us", "prompt_us", "shape")

    def __init__(self, kind: Kind) -> None:
        self.shape = kind.shape
        self.prompt_us = kind.cost.prompt_us
        self.load_us = kind.cost.load_us

    def lower(self, cost: Cost) -> None:
        """Go down to the coefficients of this cost where they are lower."""
        base, new, square, past = cost.prompt_us
        mine = self.prompt_us
        self.prompt_us = (
            min(mine[0], base),
            min(mine[1], new),
            min(mine[2], square),
            min(mine[3], past),
        )
        load, byte = cost.load_us
        self.load_us = (min(self.load_us[0], load), min(self.load_us[1], byte))


class Prefills(Role):
    """Those that may prefill."""

    def __init__(
        self, views: Sequence[InstanceView], kept: bool = False, whole: Prefills | None = None
    ) -> None:
        self.ready: Ranking = Ranking([]) if whole is None else whole.ready
        """By InstanceView.ready_us: those that are free first come first."""
        self.floors: dict[PrefillShape, Floor] = {} if whole is None else whole.floors
        self.most_error: float = 0.0 if whole is None else whole.most_error
        """No instance's Cost.error is higher."""
        self._priced: list[tuple[float, ...]] = []
        """The coefficients by which the floors were lowered, by row."""
        self._put_since = 0
        """Changes since the floors were found: a fit that was low once may be so no more."""
        self.bounded: bool
        """Whether a store of them may have to evict."""
        self.by_segment: dict[SegmentId, list[int]]
        """The rows that keep what they hold in a segment."""
        if whole is not None:
            self.bounded = whole.bounded
            self.by_segment = whole.by_segment
        else:
            self.bounded = any(view.store_blocks for view in views)
            self.by_segment = {}
            for row, view in enumerate(views):
                if view.segment != NO_SEGMENT:
                    self.by_segment.setdefault(view.segment, []).append(row)
        super().__init__(views, kept, whole)

    def only(self, views: Sequence[InstanceView], kept: bool = False) -> Prefills:
        """A part of them; unless `kept`, each takes the request at hand."""
        return Prefills(views, kept, self)

    def free(self, now_us: Micros, ahead_us: Micros) -> list[InstanceView]:
        """Those that prefill nothing, or are about to be done; see InstanceView.is_free."""
        self.sync()
        count = self.ready.until(now_us + ahead_us)
        rows = sorted(self.ready.rows(count))
        views = [self.views[row] for row in rows]
        return [view for view in views if view.is_free(now_us, ahead_us)]

    def _takes_one(self, view: InstanceView) -> bool:
        return view.takes_prefill

    def _spares_one(self, view: InstanceView, rank: int, need: Tokens) -> bool:
        return view.spares_prefill(rank, need)

    def able(self, need: Tokens, rank: int) -> Prefills | None:
        """Those that take one more request of this length from a client of this rank."""
        self.sync()
        if self.taking and need <= self.least_kv:
            return self
        found = self._fitting(need, rank)
        return self.only(found) if found else None

    def _rank(self) -> None:
        super()._rank()
        self.ready = Ranking([int(view.ready_us) for view in self.views])
        self._find_floors()

    def _find_floors(self) -> None:
        self._put_since = 0
        self.floors = {}
        self.most_error = 0.0
        for view in self.views:
            self._lower(view)
        self._priced = [view.cost.pass_us for view in self.views]

    def _lower(self, view: InstanceView) -> None:
        kind = view.kind
        floor = self.floors.get(kind.shape)
        if floor is None:
            floor = self.floors[kind.shape] = Floor(kind)
        floor.lower(kind.cost)
        if kind.cost.error > self.most_error:
            self.most_error = kind.cost.error

    def _put(self, row: int, view: InstanceView) -> None:
        super()._put(row, view)
        self.ready.put(row, int(view.ready_us))
        if view.cost.pass_us is not self._priced[row]:
            self._priced[row] = view.cost.pass_us
            self._lower(view)
            self._put_since += 1
            if self._put_since > _OFTEN + len(self.views):
                self._find_floors()

    def check(self) -> None:
        """See Role."""
        super().check()
        assert self.ready.entries == Ranking([int(view.ready_us) for view in self.views]).entries
        for view in self.views:
            kind = view.kind
            floor = self.floors[kind.shape]
            pairs = [*zip(floor.prompt_us, kind.cost.prompt_us, strict=True)]
            pairs += zip(floor.load_us, kind.cost.load_us, strict=True)
            assert all(least <= own for least, own in pairs)
            assert kind.cost.error <= self.most_error


class FreeTimes(Sequence[Micros]):
    """When each prefill instance will be free; asked of them when read."""

    def __init__(self, views: Sequence[InstanceView], now_us: Micros) -> None:
        self._views = views
        self._now_us = now_us

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, at: int) -> Micros: ...
    @overload
    def __getitem__(self, at: slice) -> list[Micros]: ...
    def __getitem__(self, at: int | slice) -> Micros | list[Micros]:
        now_us = self._now_us
        if isinstance(at, int):
            return now_us + self._views[at].queue_us(now_us)
        return [now_us + view.queue_us(now_us) for view in self._views[at]]


class Decodes(Role):
    """Those that may decode."""

    def __init__(
        self, views: Sequence[InstanceView], kept: bool = False, whole: Decodes | None = None
    ) -> None:
        self.load: Ranking = Ranking([]) if whole is None else whole.load
        """By InstanceView.step_us, in 1/1,024 us: the lowest time between tokens comes first, but
        for what the request itself adds."""
        self.least_context_us: float = 0.0 if whole is None else whole.least_context_us
        """No instance takes less for a token of context."""
        self.least_error: float = 0.0 if whole is None else whole.least_error
        """No instance's Cost.error is lower."""
        self.most_error: float = 0.0 if whole is None else whole.most_error
        """No instance's Cost.error is higher."""
        self._steps_us: list[float] = [] if whole is None else whole._steps_us
        """InstanceView.step_us of each row."""
        self._contexts_us: list[float] = [] if whole is None else whole._contexts_us
        """What each takes for a token of context."""
        self._put_since = 0
        super().__init__(views, kept, whole)

    def only(self, views: Sequence[InstanceView], kept: bool = False) -> Decodes:
        """A part of them; unless `kept`, each takes the request at hand."""
        return Decodes(views, kept, self)

    def _takes_one(self, view: InstanceView) -> bool:
        return view.takes_decode

    def _spares_one(self, view: InstanceView, rank: int, need: Tokens) -> bool:
        return view.spares_decode(rank, need)

    def able(self, need: Tokens, rank: int) -> Decodes | None:
        """Those that take one more request of this length from a client of this rank."""
        self.sync()
        if self.taking and need <= self.least_kv:
            return self
        found = self._fitting(need, rank)
        return self.only(found) if found else None

    def _rank(self) -> None:
        super()._rank()
        self._steps_us = [view.step_us() for view in self.views]
        self._contexts_us = [view.cost.step_us[2] for view in self.views]
        self.load = Ranking([int(_FINE * step_us) for step_us in self._steps_us])
        self._find_least()

    def _find_least(self) -> None:
        self._put_since = 0
        costs = [view.cost for view in self.views]
        self.least_context_us = min([cost.step_us[2] for cost in costs], default=0.0)
        self.least_error = min([cost.error for cost in costs], default=0.0)
        self.most_error = max([cost.error for cost in costs], default=0.0)

    def _put(self, row: int, view: InstanceView) -> None:
        super()._put(row, view)
        cost = view.cost
        step_us = view.step_us()
        self.load.put(row, int(_FINE * step_us))
        self._steps_us[row] = step_us
        if self._contexts_us[row] == cost.step_us[2]:
            return
        self._contexts_us[row] = cost.step_us[2]
        self.least_context_us = min(self.least_context_us, cost.step_us[2])
        self.least_error = min(self.least_error, cost.error)
        self.most_error = max(self.most_error, cost.error)
        self._put_since += 1
        if self._put_since > _OFTEN + len(self.views):
            self._find_least()

    def least_us(self, entry: int, context: Tokens) -> Micros:
        """What `tbt_us` is at least for an entry of `load` and those behind it."""
        return round(number_of(entry) / _FINE + self.least_context_us * context)

    def tbt_us(self, row: int, context: Tokens) -> Micros:
        """InstanceView.tbt_us of this row."""
        return nearest(self._steps_us[row] + self._contexts_us[row] * context)

    def beyond(self, limit_us: float, context: Tokens) -> int:
        """No entry of `load` from here on has a `tbt_us` within this limit."""
        part_us = limit_us + 1 - self.least_context_us * context
        return first_entry(int(_FINE * part_us) + 2) if part_us > 0 else 0

    def check(self) -> None:
        """See Role."""
        super().check()
        loads = [int(_FINE * view.step_us()) for view in self.views]
        assert self.load.entries == Ranking(loads).entries
        for view in self.views:
            assert self.least_context_us <= view.cost.step_us[2]
            assert self.least_error <= view.cost.error <= self.most_error
        for row, view in enumerate(self.views):
            assert self.tbt_us(row, 7) == view.tbt_us(7)


class ClusterView:
    """All live instances, in the order of their ids. Only the Conductor changes it."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, InstanceView] = {}
        self._turns = count(1)
        self.version = 0
        """Changes whenever an instance was added or removed."""
        self._prefills: dict[str, Prefills] = {}
        self._decodes: dict[str, Decodes] = {}
        self._paying: dict[Cost, list[InstanceView]] = {}
        """The instances of each cost model: some share one."""
        self.racks: dict[SegmentId, str] = {}
        """The rack of each segment whose instance reported one."""
        self.doubts: dict[SegmentId, float] = {}
        """The share of a segment's claims that counts, for each one that is not trusted."""
        self._drained: dict[InstanceId, int] = {}
        """The epochs of instances that get no new work."""

    def check(self) -> None:
        """Recompute every counter of every instance; for tests."""
        assert list(self.instances) == sorted(self.instances)
        for view in self.instances.values():
            view.check()
        for role in (*self._prefills.values(), *self._decodes.values()):
            role.check()

    def beat(self, view: InstanceView, load: InstanceLoad, now_us: Micros) -> None:
        """Take in an instance's heartbeat."""
        view.beat(load, now_us)
        if load.passes or load.transfers:
            self.cost_changed(view.cost)
        if view.info.segment is not None:
            self.doubts.pop(view.info.segment, None)
            if not view.trust.trusted:
                self.doubts[view.info.segment] = view.trust.share

    def use(self, *instances: InstanceId) -> None:
        """These were chosen, but nothing is promised: of equal instances, others are next."""
        for instance in instances:
            if instance in self.instances:
                self.instances[instance].use()

    def add(self, view: InstanceView) -> None:
        """Add or replace an instance, keeping id order so that ties fall the same way always."""
        for other in self.instances.values():
            if other.kind.shape.is_like(view.kind.shape):
                view.kind.shape = other.kind.shape
                if other.cost is view.cost:
                    view.kind = other.kind
                    break
        view.turns = self._turns
        view.drained = self._drained.get(view.info.id) == view.info.epoch
        self.instances[view.info.id] = view
        self.instances = dict(sorted(self.instances.items()))
        self._changed()

    def drain(self, instance: InstanceId, epoch: int, drains: bool) -> bool:
        """Leave this start of an instance out of all roles, or take it in again; what runs there
        goes on. Returns whether an instance that has joined changed.

        One that has not joined yet is left out once it does.
        """
        if drains:
            self._drained[instance] = epoch
        elif self._drained.get(instance) == epoch:
            del self._drained[instance]
        view = self.instances.get(instance)
        if view is None or view.info.epoch != epoch or view.drained == drains:
            return False
        view.drained = drains
        self._changed()
        return True

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance; unknown ones are no error."""
        self.instances.pop(instance, None)
        self._changed()

    def prefills(self, model: str) -> Sequence[InstanceView]:
        """Instances that may prefill for `model`, in id order; the list must not be changed.

        External: those with a compatible decode instance; if none, those that can serve alone.
        """
        return self.prefill_role(model).views

    def decodes(self, model: str) -> Sequence[InstanceView]:
        """Instances that may decode for `model`, in id order; the list must not be changed."""
        return self.decode_role(model).views

    def promised(self, requests: int) -> Promised:
        """The ledger of all instances together."""
        views = self.instances.values()
        return Promised(
            requests=requests,
            prefills=sum(view.prefills for view in views),
            prefill_us=sum(view.promised_us for view in views),
            decodes=sum(view.decodes for view in views),
        )

    def prefill_role(self, model: str) -> Prefills:
        """The same instances, in the orders of decisions."""
        role = self._prefills.get(model)
        if role is None:
            ways = ["embedded", *self.decode_role(model).ways]
            found = self._serving(model, "prefill")
            found = [view for view in found if view.info.connector in ways]
            own = [view for view in self.decodes(model) if view.info.connector in SELF_HELP]
            role = Prefills(found or own, kept=True)
            if role.views:  # clients may ask for any model name: unknown ones are not kept
                self._prefills[model] = role
                self._keep(role)
        return role

    def decode_role(self, model: str) -> Decodes:
        """The same instances, in the orders of decisions."""
        role = self._decodes.get(model)
        if role is None:
            role = Decodes(self._serving(model, "decode"), kept=True)
            if role.views:
                self._decodes[model] = role
                self._keep(role)
        return role

    def _serving(self, model: str, role: str) -> list[InstanceView]:
        return [
            view
            for view in self.instances.values()
            if serves(view.info, model, role) and not view.drained
        ]

    def _keep(self, role: Role) -> None:
        """Its instances note there what changes."""
        for view in role.views:
            view.stale_in.append(role.stale)

    def _changed(self) -> None:
        self.version += 1
        self._prefills.clear()
        self._decodes.clear()
        self._paying.clear()
        for view in self.instances.values():
            view.stale_in.clear()
            self._paying.setdefault(view.cost, []).append(view)
        infos = [view.info for view in self.instances.values()]
        self.racks = {i.segment: i.rack for i in infos if i.segment is not None and i.rack}
        here = [info.segment for info in infos] if self.doubts else []
        self.doubts = {it: share for it, share in self.doubts.items() if it in here}

    def cost_changed(self, cost: Cost) -> None:
        """A cost model has learned: orders and lowest costs of all that share it change."""
        for view in self._paying.get(cost, ()):
            view.changed()


def serves(info: InstanceInfo, model: str, role: str) -> bool:
    """Whether an instance takes this role for this model."""
    return info.model == model and info.role in (role, "both")


class Promised(Frozen, frozen=True):
    """The ledger in numbers: all zero if no request is under way."""

    requests: int
    prefills: int
    prefill_us: Micros
    decodes: int
