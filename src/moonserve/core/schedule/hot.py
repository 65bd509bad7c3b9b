"""Hot prefixes: a prefix that many requests share is copied to less loaded instances.

The Conductor reports every placement and every block event, and passes the copies that are ordered
here to its driver. Nothing here moves bytes, and nothing drops a copy: when no request uses it any
more, eviction removes it. A copy costs a transfer, so it is made only

- of a prefix that is used often: ON times within a half-life, and EACH times for each holder;
- if the target lacks much of it: a tenth of a mean prompt. So a short universal head, such as block
  0 of the conversation trace, is never copied: instances have it from whatever they served;
- if the load takes less time than it saves in the expected uses;
- while its holders have more to do than other instances, and to one that has less than the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PendingPrefixes, PrefixIndex, parting
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decision, Spread
from moonserve.core.schedule.estimate import evicted
from moonserve.core.schedule.facts import Leading, SpreadUpTo
from moonserve.core.schedule.policies import policy_of
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import BlockKey, Bytes, InstanceId, Micros, SegmentId, Tokens

HALF_LIFE_US: Micros = 30_000_000
"""After this time an access counts half."""
ON, OFF = 8.0, 4.0
"""Accesses that make a prefix hot, and below which it is so no longer."""
EACH = 2.0
"""Accesses that there must be for each holder, the new one included."""
RATIO = 1.25
"""How many times the mean load its least loaded holder must have."""
WORTH = 0.1
"""The share of the mean prompt that a copy must bring at least."""
SKIPPED = ("even", "held", "short", "slow", "lately", "busy")
"""Why a hot prefix is not copied. even: its holders have no more to do than other instances. held:
it has enough holders, or every less loaded instance is one. short: the instances lack little of it.
slow: a transfer takes longer than it saves. lately: they were sent it within a half-life. busy: too
much is being copied, or to or from the same segments."""
_MEAN_OF = 64
"""About the number of prompts in the mean length."""
_LOOK_US: Micros = 20_000
"""Between two looks at holders and targets: they take longer than a placement."""
_PATIENCE_US: Micros = 20_000_000
"""A copy without any event for this long is given up."""
_MOST_BLOCKS = 65_536


class _Run:
    """A run of blocks in the tree; requests used all of them equally often."""

    __slots__ = ("after", "at_us", "count", "hot", "keys")

    def __init__(
        self, keys: Sequence[BlockKey], count: float, at_us: Micros, hot: bool = False
    ) -> None:
        self.keys = keys
        self.count = count
        """Accesses, each halved with every half-life, as of `at_us`."""
        self.at_us = at_us
        self.hot = hot
        self.after: dict[BlockKey, _Run] = {}
        """What comes next, by its first key."""


class Heat:
    """How often each prefix is used: a radix tree of chains that is bounded and decays."""

    def __init__(self, most_blocks: int = _MOST_BLOCKS) -> None:
        self.blocks = 0
        self._most_blocks = most_blocks
        self._heads: dict[BlockKey, _Run] = {}

    def touch(self, keys: Sequence[BlockKey], stop: int, now_us: Micros) -> tuple[int, float]:
        """Count one more use of the first `stop` blocks of a chain.

        Returns how many of them are hot, and how often the last of these was used.
        """
        at = 0
        after = self._heads
        found = (0, 0.0)
        while at < stop:
            run = after.get(keys[at])
            if run is None:
                run = after[keys[at]] = _Run(keys[at:stop], 0.0, now_us)
                self.blocks += stop - at
            most = min(len(run.keys), stop - at)
            shared = parting(run.keys, 0, keys, at, most)
            if shared < len(run.keys):
                rest = _Run(run.keys[shared:], run.count, run.at_us, run.hot)
                rest.after = run.after
                run.keys = run.keys[:shared]
                run.after = {rest.keys[0]: rest}
            run.count = 1.0 + _decayed(run, now_us)
            run.at_us = now_us
            run.hot = run.count >= (OFF if run.hot else ON)
            at, after = at + shared, run.after
            if run.hot:
                found = at, run.count
        if self.blocks > self._most_blocks:
            self._forget(now_us)
        return found

    def _forget(self, now_us: Micros) -> None:
        """Drop the least used blocks, until half of the room is free."""
        least = 1.0
        while self.blocks > self._most_blocks // 2:
            self.blocks = 0
            trees = [self._heads]
            while trees:
                tree = trees.pop()
                for first, run in list(tree.items()):
                    if _decayed(run, now_us) <= least:  # nor was what follows used more
                        del tree[first]
                    else:
                        self.blocks += len(run.keys)
                        trees.append(run.after)
            least *= 2.0


def _decayed(run: _Run, now_us: Micros) -> float:
    return float(run.count * 0.5 ** ((now_us - run.at_us) / HALF_LIFE_US))


class _Flight(msgspec.Struct):
    """One copy under way."""

    order: Spread
    left: dict[BlockKey, None]
    """Blocks that have not come yet."""
    block_bytes: Bytes
    until_us: Micros


class _Row(NamedTuple):
    """A prefill instance, and how many of the blocks it has."""

    load_us: Micros
    has: int
    view: InstanceView
    segment: SegmentId


class Hot:
    """See the module. No more than `tuning.spread_bytes` is under way at once in the cluster,
    and each segment gives and takes one copy at a time.
    """

    def __init__(
        self, tuning: Tuning, view: ClusterView, index: PrefixIndex, coming: PendingPrefixes
    ) -> None:
        self.most_bytes = tuning.spread_bytes
        self.leads = True
        """Whether this Conductor, of several, may begin copies."""
        self.bytes_under_way: Bytes = 0
        self.done = Counter[str]()
        """Numbers of copies, by `started`, `done` and `failed`, and the `bytes` that came."""
        self.skipped = Counter[str]()
        """Looks at a hot prefix that ended without a copy, by one of SKIPPED."""
        self._fetches = policy_of(tuning.policy).fetch != "never"
        self._view = view
        self._index = index
        self._coming = coming
        self._heat = Heat()
        self._mean_tokens = 0.0
        self._prompts = 0
        self._flights: dict[int, _Flight] = {}
        self._sent: dict[tuple[SegmentId, BlockKey], Micros] = {}
        """When a prefix, by its first missing key, was sent to a segment: once in a half-life."""
        self._missed: dict[tuple[InstanceId, BlockKey], Micros] = {}
        """When an instance was last chosen that lacked hot blocks, from this key on."""
        self._count = 0
        self._looked_us: Micros | None = None

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._flights)

    def take(self, fact: BlockEvent | SpreadUpTo | Leading) -> None:
        """Take in a block event, the shortened end of a copy, or whether this Conductor leads."""
        match fact:
            case Leading(leads):
                self.leads = leads
            case BlocksStored(segment, keys, parent, tier, epoch):
                self._index.stored(segment, keys, parent, tier, epoch)
                for flight in [it for it in self._flights.values() if it.order.to == segment]:
                    self._came(flight, keys)
            case BlocksRemoved(segment, keys, tier, epoch):
                self._index.removed(segment, keys, tier, epoch)
            case BlocksCleared(segment, tier, epoch):
                self._index.cleared(segment, tier, epoch)
                for number, flight in list(self._flights.items()):
                    if flight.order.to == segment:
                        self._cut(number, 0)
            case SpreadUpTo(number, blocks):
                self._cut(number, blocks)

    def _came(self, flight: _Flight, keys: Sequence[BlockKey]) -> None:
        before = len(flight.left)
        for key in keys:
            flight.left.pop(key, None)
        came = (before - len(flight.left)) * flight.block_bytes
        self.done["bytes"] += came
        self.bytes_under_way -= came
        if not flight.left:
            self._over(flight, "done")

    def _cut(self, number: int, blocks: int) -> None:
        """Only the first `blocks` of a copy come, or have come."""
        flight = self._flights.get(number)
        if flight is None:
            return
        order = flight.order
        for key in order.keys[order.first + blocks :]:
            if key in flight.left:
                del flight.left[key]
                self.bytes_under_way -= flight.block_bytes
        if not flight.left:
            self._over(flight, "failed")

    def _over(self, flight: _Flight, how: str) -> None:
        del self._flights[flight.order.number]
        self.done[how] += 1

    def expire(self, now_us: Micros) -> None:
        """Give up copies without events; forget what was sent long ago."""
        for number, flight in list(self._flights.items()):
            if flight.until_us <= now_us:
                self._cut(number, 0)
        old_us = now_us - HALF_LIFE_US
        self._sent = {it: at_us for it, at_us in self._sent.items() if at_us > old_us}
        self._missed = {it: at_us for it, at_us in self._missed.items() if at_us > old_us}

    def placed(
        self, request: Request, keys: Sequence[BlockKey], decision: Decision, now_us: Micros
    ) -> list[Spread]:
        """A request was placed: order a copy of the prefix that it shares, if one is wanted now."""
        views = self._view.prefills(request.model)
        if not self.most_bytes or not views or views[0].info.connector != "embedded":
            return []  # blocks of external engines cannot be copied from here
        self._prompts = min(self._prompts + 1, _MEAN_OF)
        self._mean_tokens += (decision.prompt_tokens - self._mean_tokens) / self._prompts
        size = views[0].info.namespace.block_size
        held = min(decision.pool_tokens // size, len(keys))
        hot, count = self._heat.touch(keys, held, now_us)
        if not hot or not self.leads:
            return []
        missed = self._missed_again(decision, keys[:hot], size, now_us)
        if self._looked_us is not None and now_us - self._looked_us < _LOOK_US:
            return []
        self._looked_us = now_us
        self.expire(now_us)
        found = self._look(request, keys[:hot], count, views, missed, now_us)
        if isinstance(found, str):
            self.skipped[found] += 1
            return []
        self.done["started"] += 1
        return [found]

    def _missed_again(
        self, decision: Decision, keys: Sequence[BlockKey], size: Tokens, now_us: Micros
    ) -> InstanceId | None:
        """The chosen instance, if it lacks the same hot blocks as at an earlier placement.

        Then it does not keep what it computes or loads of them.
        """
        chosen = decision.chosen
        has = chosen.local_tokens // size
        if has >= len(keys):
            return None
        missed = chosen.instance, keys[has]
        before_us = self._missed.get(missed)
        self._missed[missed] = now_us
        recent = before_us is not None and now_us - before_us < HALF_LIFE_US
        return chosen.instance if recent else None

    def _look(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        count: float,
        views: Sequence[InstanceView],
        missed: InstanceId | None,
        now_us: Micros,
    ) -> Spread | str:
        """A copy of these keys, or why there is none."""
        own = self._index.match(keys).by_holder
        coming = self._coming.match(keys)
        rows = []
        for view in views:
            segment = view.info.segment
            if segment is not None:
                has = own.get(segment, 0)
                if view.info.id != missed:  # what is promised there it would lose again
                    has = max(has, coming.get(segment, 0))
                rows.append(_Row(view.queue_us(now_us), has, view, segment))
        holding = [row.load_us for row in rows if row.has == len(keys)]
        mean_us = sum(row.load_us for row in rows) / max(1, len(rows))
        lacking = [row for row in rows if row.has < len(keys)]
        uses = count / (len(holding) + 1)
        if missed is not None:
            lacking = [row for row in lacking if row.view.info.id == missed]
        elif holding and min(holding) <= RATIO * mean_us:
            return "even"
        else:
            lacking = [row for row in lacking if row.load_us < mean_us]
        if uses < EACH or not lacking:
            return "held"
        giving = [flight.order.source for flight in self._flights.values()]
        taking = [flight.order.to for flight in self._flights.values()]
        sources = [it for it, has in own.items() if has == len(keys) and it not in giving]
        lacking = [row for row in lacking if row.segment not in taking]
        if not lacking or not sources:
            return "busy"
        lacking = [row for row in lacking if (row.segment, keys[row.has]) not in self._sent]
        if not lacking:
            return "lately"

        def price(row: _Row) -> tuple[Micros, int, int]:
            needs = evicted(row.view, len(keys) - row.has, self._index.blocks)
            return row.load_us, needs, row.view.used

        row = min(lacking, key=price)
        least = math.ceil(WORTH * self._mean_tokens / row.view.info.namespace.block_size)
        room = (self.most_bytes - self.bytes_under_way) // row.view.info.block_bytes
        stop = min(len(keys), row.has + room)
        if len(keys) - row.has < least:
            return "short"
        if stop < len(keys) and stop - row.has < least:
            return "busy"
        if self._is_slow(row, stop, request, uses):
            return "slow"
        return self._start(
            Spread(
                request=request.id,
                number=self._count + 1,
                keys=tuple(keys[:stop]),
                first=row.has,
                source=min(sources),
                to=row.segment,
                tokens=stop * row.view.info.namespace.block_size,
                count=count,
                missed=missed is not None,
                holder_us=min(holding, default=None),
                mean_us=round(mean_us),
                target_us=row.load_us,
            ),
            row.view.info.block_bytes,
            now_us,
        )

    def _is_slow(self, row: _Row, stop: int, request: Request, uses: float) -> bool:
        """Whether a transfer takes longer than it saves in this many uses."""
        info = row.view.info
        cost = row.view.cost
        length = request.length
        size = info.namespace.block_size
        chunk = info.chunk_tokens
        load_us = cost.transfer_us((stop - row.has) * info.block_bytes)
        alone_us = cost.prefill_us(length, row.has * size, chunk)
        saves_us = alone_us - cost.prefill_us(length, stop * size, chunk)
        return load_us > uses * (min(saves_us, load_us) if self._fetches else saves_us)

    def _start(self, order: Spread, block_bytes: Bytes, now_us: Micros) -> Spread:
        self._count = order.number
        left = dict.fromkeys(order.keys[order.first :])
        self._flights[order.number] = _Flight(order, left, block_bytes, now_us + _PATIENCE_US)
        self.bytes_under_way += len(left) * block_bytes
        self._sent[order.to, order.keys[order.first]] = now_us
        return order
