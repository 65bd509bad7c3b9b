"""How full a decode instance will be when a prefill ends.

One ledger per instance, Residencies, holds the decodes that run there and those that are promised,
with their times. A predictor gives the chance that each is still there at a later moment. The
forecast joins the two. InstanceView keeps the ledger; core.schedule.decode_forecast asks for the
forecast. Source: arXiv 2407.00079 "Mooncake", section 7.4: load must be predicted for the moment
when prefill ends, since a check of the load now makes both pools swing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

import msgspec

from moonserve.core.schedule.cost import StepUs
from moonserve.core.schedule.external_load import NO_LOAD, ExternalLoad
from moonserve.core.schedule.residency import BINS, PER_OCTAVE, Chance, Predictor, Residency
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId, Tokens

_POINTS = 16
"""Moments that a forecast looks at; if there are more hand-overs, they are taken in groups."""
_SOONEST_US: Micros = MICROS_PER_SECOND
_KEPT = 64
"""Hand-overs by which the rate of future ones is measured."""
_DUE = attrgetter("due_us")
_LATEST_US: Micros = 600 * MICROS_PER_SECOND


class Residencies:
    """The decodes that run on one instance now, and those that are promised there.

    Decodes of one instance share its passes, one token each. So one count of passes, from predicted
    pass times, gives the tokens that each has by now.
    """

    def __init__(self) -> None:
        self.active: dict[RequestId, Residency] = {}
        self.promised: dict[RequestId, Residency] = {}
        self.context: Tokens = 0
        """Contexts of the active decodes, summed."""
        self.external: ExternalLoad = NO_LOAD
        """Decodes there that this Conductor did not send."""
        self._begun: deque[tuple[Micros, Micros, Tokens]] = deque(maxlen=_KEPT)
        """(when, lag, context) of the latest decodes that began."""
        self._passes = 0.0
        self._counted_us: Micros = 0
        self._walk: tuple[tuple[object, ...], _Walk] | None = None
        """The last walk, and what it depended on."""
        self._changes = 0

    def walk(self, step: StepUs, predictor: Predictor, now_us: Micros) -> _Walk:
        """The hand-overs promised here, as of now."""
        passes = self.passes(now_us, step)
        of = (now_us, self._changes, self.external, step, predictor, predictor.learned)
        if self._walk is None or self._walk[0] != of:
            self._walk = of, _Walk(self, step, predictor, now_us, passes)
        return self._walk[1]

    def passes(self, now_us: Micros, step: StepUs) -> float:
        """The passes so far; `step`: Cost.step_us."""
        if self.active:
            now_us = max(now_us, self._counted_us)
            self._passes += (now_us - self._counted_us) / self.step_us(step)
        self._counted_us = now_us
        return self._passes

    def step_us(self, step: StepUs, joining: Tokens | None = None) -> float:
        """A pass with the decodes that run now, and with one more of context `joining`."""
        more = 0 if joining is None else 1
        base, per_seq, per_context = step
        count = len(self.active) + self.external.running + more
        context = self.context + self.external.context + (joining or 0)
        return max(1.0, base + per_seq * count + per_context * context)

    def promise(self, request: RequestId, residency: Residency) -> None:
        """A decode will come; promised again, it is counted once."""
        if request not in self.active:
            self._changes += 1
            before = self.promised.get(request)
            residency.lag_us = before.lag_us if before is not None else residency.lag_us
            self.promised[request] = residency

    def begin(self, request: RequestId, now_us: Micros, step: StepUs) -> None:
        """The promised decode begins."""
        passes = self.passes(now_us, step)
        self._changes += 1
        residency = self.promised.pop(request)
        self._begun.append((now_us, residency.lag_us, residency.context))
        residency.began_tokens = passes
        residency.due_us = now_us
        self.active[request] = residency
        self.context += residency.context

    def resume(self, request: RequestId, began_us: Micros, now_us: Micros, step: StepUs) -> None:
        """The promised decode runs since `began_us`, by the order of another Conductor.

        It has as many tokens as fit into that time by the present pass. It is no hand-over, by
        which the rate of future ones could be measured.
        """
        passes = self.passes(now_us, step)
        self._changes += 1
        residency = self.promised.pop(request)
        self.context += residency.context
        self.active[request] = residency
        residency.began_tokens = passes - (now_us - began_us) / self.step_us(step)
        residency.due_us = began_us

    def unseen_us(self, lag_us: Micros, now_us: Micros, step: StepUs) -> float:
        """The part of a pass, `lag_us` from now, of requests that have not arrived yet.

        Short requests overtake long ones. The rate of recent hand-overs, each with its lag,
        predicts them. A request with a longer lag than this is promised already, or comes later.
        """
        if len(self._begun) < _KEPT // 4 or now_us <= self._begun[0][0]:
            return 0.0
        _, per_seq, per_context = step
        ahead = [
            (lag_us - lag) * (per_seq + per_context * context)
            for _, lag, context in self._begun
            if lag < lag_us
        ]
        return sum(ahead) / (now_us - self._begun[0][0])

    def end(self, request: RequestId, now_us: Micros, step: StepUs) -> Residency | None:
        """The decode is over, or will not come; returns the residency if it had begun."""
        self.passes(now_us, step)
        self._changes += 1
        self.promised.pop(request, None)
        residency = self.active.pop(request, None)
        if residency is not None:
            self.context -= residency.context
        return residency


def forecast(
    residencies: Residencies,
    step: StepUs,
    joining: Residency,
    predictor: Predictor,
    now_us: Micros,
    deviations: float,
    wait_us: Micros = 0,
    seqs: int | None = None,
) -> tuple[Micros, Micros]:
    """Pass times when `joining` begins: the mean, and the one that is `deviations` above the mean.

    The second is for the time when it has waited `wait_us`; decodes that are handed over meanwhile
    are behind it. If more than `seqs` decodes are there, it includes the wait for a place.

    Hand-overs are taken in order, since the decodes that are there by then set the pace of all:
    those that run now and are still there, and those that began meanwhile. Their number is a sum of
    independent chances. Other requests are not counted: see Residencies.unseen_us. step:
    Cost.step_us of the instance.
    """
    walk = residencies.walk(step, predictor, now_us)
    rows, ahead, at_us = walk.until(joining)
    pass_us, high_us, count = _pass_us(rows, step[0], deviations, ahead, at_us - now_us)
    mean_us = pass_us
    if wait_us:
        ahead += wait_us / pass_us
        at_us += wait_us
        pass_us, high_us, count = _pass_us(rows, step[0], deviations, ahead, at_us - now_us)
    if seqs is not None and count > seqs:
        high_us += (count - seqs) * place_us(joining, pass_us, seqs)
    return round(mean_us), round(high_us)


def place_us(joining: Residency, pass_us: float, seqs: int) -> float:
    """How long until one of `seqs` places, all taken, is free: outputs end like the expected
    one."""
    return max(1.0, joining.expected) * pass_us / seqs


_SURE = Chance()
"""That of the decode that joins."""
_Row: TypeAlias = tuple[Sequence[float] | None, float, float, float, Micros, float, float]
"""A decode: its Chance (shares, most, most_us); the tokens and the time that it has by now, below 0
if it begins later; the chance that it was there until now; its part of a pass."""


class _Point(msgspec.Struct):
    """Where a walk is after some hand-overs."""

    rows: int
    """Decodes that are counted by then."""
    ahead: float
    """Passes from now until then."""
    at_us: Micros
    pass_us: float | None
    """How long a pass takes then; None: not computed yet."""


class _Walk:
    """The hand-overs that are promised on one instance, in order, as seen at one moment.

    Several requests that arrive together ask for the same ones; a Residencies keeps its last walk.
    """

    def __init__(
        self,
        residencies: Residencies,
        step: StepUs,
        predictor: Predictor,
        now_us: Micros,
        passes: float,
    ) -> None:
        self._step = step
        self._predictor = predictor
        self._now_us = now_us
        self._coming = sorted(residencies.promised.values(), key=_DUE)
        self._group = -(-(len(self._coming) + 1) // _POINTS)
        active = residencies.active.values()
        self._rows = [
            self._row(it, predictor.lasts(it), passes - it.began_tokens, now_us - it.due_us, True)
            for it in active
        ]
        self._points = [_Point(len(self._rows), 0.0, now_us, residencies.step_us(step))]
        """After each group of hand-overs."""

    def until(self, joining: Residency) -> tuple[Sequence[_Row], float, Micros]:
        """The decodes that are there when `joining` begins, it included; how many passes from now,
        and when."""
        now_us = self._now_us
        coming = self._coming
        group = self._group
        own_us = max(now_us, joining.due_us)
        at = bisect_right(coming, joining.due_us, key=_DUE)
        before = at // group
        for number in range(before):
            point = self._after(number + 1)
            if point.at_us >= own_us:
                return self._rows[: point.rows], point.ahead, point.at_us
        point = self._after(before)
        first = before * group
        arrived = coming[first : first + group - 1]
        arrived.insert(at - first, joining)
        ahead, then_us = self._ahead(point, arrived[-1].due_us)
        rows = self._rows[: point.rows]
        for residency in arrived:
            lasts = _SURE if residency is joining else self._predictor.lasts(residency)
            rows.append(self._row(residency, lasts, -ahead, now_us - then_us, False))
        return rows, ahead, then_us

    def _after(self, groups: int) -> _Point:
        """After so many groups of promised hand-overs."""
        points = self._points
        group = self._group
        while len(points) <= groups:
            first = (len(points) - 1) * group
            arrived = self._coming[first : first + group]
            ahead, then_us = self._ahead(points[-1], arrived[-1].due_us)
            for residency in arrived:
                lasts = self._predictor.lasts(residency)
                row = self._row(residency, lasts, -ahead, self._now_us - then_us, False)
                self._rows.append(row)
            points.append(_Point(len(self._rows), ahead, then_us, None))
        return points[groups]

    def _ahead(self, point: _Point, due_us: Micros) -> tuple[float, Micros]:
        """The passes until the next hand-over, and when that is."""
        if due_us <= point.at_us:
            return point.ahead, point.at_us
        if point.pass_us is None:
            rows, more_us = self._rows[: point.rows], point.at_us - self._now_us
            point.pass_us, _, _ = _pass_us(rows, self._step[0], 0.0, point.ahead, more_us)
        return point.ahead + (due_us - point.at_us) / point.pass_us, due_us

    def _row(
        self, residency: Residency, lasts: Chance, tokens: float, us: Micros, began: bool
    ) -> _Row:
        _, per_seq, per_context = self._step
        chance = lasts.of(tokens, us) if began else lasts.of(0.0, 0)
        weight = per_seq + per_context * residency.context
        return (lasts.shares, lasts.most, lasts.most_us, tokens, us, chance, weight)


def _pass_us(
    rows: Sequence[_Row], base: float, deviations: float, ahead: float, more_us: Micros
) -> tuple[float, float, float]:
    """A pass `ahead` tokens from now: the mean, the high value, how many take part.

    The chances are those of Chance.of, written out: this loop is most of a forecast.
    """
    mean = base
    variance = count = 0.0
    log2 = math.log2
    for shares, most, most_us, tokens, us, before, weight in rows:
        chance = 1.0
        then = tokens + ahead
        if then > 0:
            if not before or then >= most or us + more_us >= most_us:
                chance = 0.0
            elif shares is None:
                chance = 1.0 / before
            elif then <= 1:
                chance = shares[0] / before
            else:
                place = PER_OCTAVE * log2(then)
                at = int(place)
                if at < BINS:
                    share = shares[at]
                    chance = (share + (place - at) * (shares[at + 1] - share)) / before
                else:
                    chance = shares[BINS] / before
            variance += chance * (1 - chance) * weight * weight
        mean += chance * weight
        count += chance
    return max(1.0, mean), mean + deviations * math.sqrt(variance), count


def room_in_us(
    residencies: Residencies,
    step: StepUs,
    joining: Tokens,
    goal_us: Micros,
    predictor: Predictor,
    now_us: Micros,
    seqs: int | None = None,
) -> Micros:
    """How long until one more decode may join within the goal, if no other request comes.

    By doubling; at least a second, at most ten minutes.
    """
    wait_us = _SOONEST_US
    last_us = max(
        [residency.due_us - now_us for residency in residencies.promised.values()], default=0
    )
    wait_us = max(wait_us, last_us)
    while wait_us < _LATEST_US:
        joins = Residency(joining, now_us + wait_us, 1, 1)
        if forecast(residencies, step, joins, predictor, now_us, 0.0, 0, seqs)[1] <= goal_us:
            break
        wait_us *= 2
    return min(wait_us, _LATEST_US)
