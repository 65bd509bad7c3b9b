"""How full a decode instance will be when a prefill ends.

One ledger per instance, Residencies, holds the decodes that run there and those that are promised,
with their times. A predictor gives the chance that each is still there at a later moment. The
forecast joins the two. InstanceView keeps the ledger; core.schedule.decode_forecast asks for the
forecast. Source: arXiv 2407.00079 "Mooncake", section 7.4: load must be predicted for the moment
when prefill ends, since a check of the load now makes both pools swing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from moonserve.core.schedule.external_load import NO_LOAD, ExternalLoad
from moonserve.core.schedule.residency import Chance, Predictor, Residency
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

    def passes(self, now_us: Micros, step: Sequence[float]) -> float:
        """The passes so far; `step`: Cost.step_us."""
        if self.active:
            now_us = max(now_us, self._counted_us)
            self._passes += (now_us - self._counted_us) / self.step_us(step)
        self._counted_us = now_us
        return self._passes

    def step_us(self, step: Sequence[float], joining: Tokens | None = None) -> float:
        """A pass with the decodes that run now, and with one more of context `joining`."""
        more = 0 if joining is None else 1
        base, per_seq, per_context = step
        count = len(self.active) + self.external.running + more
        context = self.context + self.external.context + (joining or 0)
        return max(1.0, base + per_seq * count + per_context * context)

    def promise(self, request: RequestId, residency: Residency) -> None:
        """A decode will come; promised again, it is counted once."""
        if request not in self.active:
            before = self.promised.get(request)
            residency.lag_us = before.lag_us if before is not None else residency.lag_us
            self.promised[request] = residency

    def begin(self, request: RequestId, now_us: Micros, step: Sequence[float]) -> None:
        """The promised decode begins."""
        passes = self.passes(now_us, step)
        residency = self.promised.pop(request)
        self._begun.append((now_us, residency.lag_us, residency.context))
        residency.began_tokens = passes
        residency.due_us = now_us
        self.active[request] = residency
        self.context += residency.context

    def resume(
        self, request: RequestId, began_us: Micros, now_us: Micros, step: Sequence[float]
    ) -> None:
        """The promised decode runs since `began_us`, by the order of another Conductor.

        It has as many tokens as fit into that time by the present pass. It is no hand-over, by
        which the rate of future ones could be measured.
        """
        passes = self.passes(now_us, step)
        residency = self.promised.pop(request)
        self.context += residency.context
        self.active[request] = residency
        residency.began_tokens = passes - (now_us - began_us) / self.step_us(step)
        residency.due_us = began_us

    def unseen_us(self, lag_us: Micros, now_us: Micros, step: Sequence[float]) -> float:
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

    def end(self, request: RequestId, now_us: Micros, step: Sequence[float]) -> Residency | None:
        """The decode is over, or will not come; returns the residency if it had begun."""
        self.passes(now_us, step)
        self.promised.pop(request, None)
        residency = self.active.pop(request, None)
        if residency is not None:
            self.context -= residency.context
        return residency


def forecast(
    residencies: Residencies,
    step: Sequence[float],
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
    passes = residencies.passes(now_us, step)
    own_us = max(now_us, joining.due_us)
    coming = sorted([*residencies.promised.values(), joining], key=_DUE)
    group = -(-len(coming) // _POINTS)
    at_us = now_us
    ahead = 0.0
    pass_us = residencies.step_us(step)
    here = _Here(predictor, joining, step, deviations)
    for residency in residencies.active.values():
        here.add(residency, passes - residency.began_tokens, now_us - residency.due_us, began=True)
    for first in range(0, len(coming), group):
        arrived = coming[first : first + group]
        then_us = max(now_us, arrived[-1].due_us)
        if then_us > at_us:
            if first:
                pass_us, _, _ = here.pass_us(ahead, at_us - now_us)
            ahead += (then_us - at_us) / pass_us
            at_us = then_us
        for residency in arrived:
            here.add(residency, -ahead, now_us - then_us, began=False)
        if then_us >= own_us:
            break
    pass_us, high_us, count = here.pass_us(ahead, at_us - now_us)
    mean_us = pass_us
    if wait_us:
        ahead += wait_us / pass_us
        at_us += wait_us
        pass_us, high_us, count = here.pass_us(ahead, at_us - now_us)
    if seqs is not None and count > seqs:
        high_us += (count - seqs) * place_us(joining, pass_us, seqs)
    return round(mean_us), round(high_us)


def place_us(joining: Residency, pass_us: float, seqs: int) -> float:
    """How long until one of `seqs` places, all taken, is free: outputs end like the expected
    one."""
    return max(1.0, joining.expected) * pass_us / seqs


class _Here:
    """Decodes that run or will run: their chances to be there at a time, and the pass time then."""

    def __init__(
        self, predictor: Predictor, joining: Residency, step: Sequence[float], deviations: float
    ) -> None:
        self._predictor = predictor
        self._joining = joining
        self._step = step
        self._deviations = deviations
        self._rows: list[tuple[Chance | None, float, Micros, float, float]] = []
        """For each decode: its chances (None for the one that joins); the tokens and the time that
        it has by now, below 0 if it begins later; the chance that it was there until now; its part
        of a pass."""

    def add(self, residency: Residency, tokens: float, us: Micros, *, began: bool) -> None:
        """Add a decode; `began`: it runs already."""
        _, per_seq, per_context = self._step
        lasts = None
        chance = 1.0
        if residency is not self._joining:
            has, since_us = (tokens, us) if began else (0.0, 0)
            lasts = self._predictor.lasts(residency, has)
            chance = lasts(has, since_us)
        self._rows.append((lasts, tokens, us, chance, per_seq + per_context * residency.context))

    def pass_us(self, ahead: float, more_us: Micros) -> tuple[float, float, float]:
        """A pass `ahead` tokens from now: the mean, the high value, how many take part."""
        mean = self._step[0]
        variance = count = 0.0
        for lasts, tokens, us, before, weight in self._rows:
            chance = 1.0
            then = tokens + ahead
            if lasts is not None and (then > 0 or tokens > 0):
                chance = lasts(then, us + more_us) / before if before else 0.0
                variance += chance * (1 - chance) * weight * weight
            mean += chance * weight
            count += chance
        return max(1.0, mean), mean + self._deviations * math.sqrt(variance), count


def room_in_us(
    residencies: Residencies,
    step: Sequence[float],
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
