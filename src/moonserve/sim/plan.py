"""How fast may a trace come, and how should instances be split? Answers by search.

For `moonserve plan` and the table of policies. A search runs few simulations, remembers them, and
leaves each as soon as too many requests have missed their TTFT. Beside it stand two kinds of bound
that need none: fluid ones, and one queue before an ideal shared pool.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heapreplace
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.units import Micros
from moonserve.sim.cache import Cache
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import Times, gaps_ms, paper_tbt_ms
from moonserve.sim.node import Node
from moonserve.sim.served import Served
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Trace, scale

Figure: TypeAlias = Literal["attainment", "attainment_ttft"]
MOST = 100.0
"""No search goes beyond this speed."""
_WHOLE = 1 << 40


class Try(msgspec.Struct, frozen=True):
    """What came of one speed. Where it was left early, attained shares are upper bounds."""

    speed: float
    attainment: float
    attainment_ttft: float
    attainment_tbt: float
    """Those that missed their TTFT count as if they had met it."""
    whole: bool
    """Not left early."""
    seen: float = 1.0
    """The share of requests that had come when it was left."""


class Trials:
    """One setup and trace at any speed; each speed is simulated once.

    A run is left as soon as more than 1 - `target` have missed what `figure` counts.
    """

    def __init__(
        self, trace: Trace, setup: Setup, target: float, figure: Figure = "attainment"
    ) -> None:
        self.trace = trace
        self.setup = setup
        self.target = target
        self.figure = figure
        self.tries: dict[float, Try] = {}

    def __call__(self, speed: float) -> Try:
        """Simulate at that speed, or remember."""
        if speed not in self.tries:
            self.tries[speed] = self._simulate(speed)
        return self.tries[speed]

    def _simulate(self, speed: float) -> Try:
        sim = Simulation(scale(self.trace, speed), self.setup)
        misses = Misses(sim)
        count = len(self.trace.rows)

        def hopeless() -> bool:
            misses.look()
            missed = misses.any if self.figure == "attainment" else misses.ttft
            return missed > (1 - self.target) * count

        whole = sim.run(lambda: hopeless() or misses.decided)
        if whole:
            misses.look()
        return Try(
            speed,
            1 - misses.any / count,
            1 - misses.ttft / count,
            1 - misses.tbt / count,
            whole=misses.decided,
            seen=len(sim.served) / count,
        )


class Misses:
    """Who has missed an objective for certain, while a simulation goes on.

    `decided`: of no request it is still open, so that the rest of the run changes nothing. Without
    an objective for TBT that is so when it has its first token, if nothing can fail after that.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._seen = 0
        self._open: list[Served] = []
        setup = sim.setup
        lasts = setup.breakdowns or setup.first_token == "decode" or setup.goal.tbt_us is not None
        self._safe_tokens = 0 if lasts else setup.profile.kv_tokens
        """Requests of up to so many tokens in all are decided by their first."""
        self.tokens = 0
        """Input tokens of the requests that missed."""
        self.ttft = 0
        """Too late with the first token, refused, or failed."""
        self.tbt = 0
        """In time with the first token, too slow with the others."""

    @property
    def any(self) -> int:
        """Requests that missed."""
        return self.ttft + self.tbt

    @property
    def decided(self) -> bool:
        """Whether all have come, and none is open."""
        return not self._open and self._seen == len(self._sim.trace.rows)

    def look(self) -> None:
        """Take in what happened since."""
        served, goal = self._sim.served, self._sim.setup.goal
        now_us = self._sim.clock.now_us
        ends: dict[Node, Times] = {}
        still = []
        for one in self._open + served[self._seen :]:
            first_us = now_us if one.first_us is None else one.first_us
            late = goal.ttft_us is not None and first_us - one.arrived_us > goal.ttft_us
            tokens = one.row.input_tokens + one.row.output_tokens
            if late or one.outcome in ("refused", "failed"):
                self.ttft += 1
                self.tokens += one.row.input_tokens
            elif one.outcome == "running":
                if one.first_us is None or tokens > self._safe_tokens:
                    still.append(one)
            elif goal.tbt_us is not None:
                tbt_ms = paper_tbt_ms(gaps_ms(one, ends))
                if tbt_ms is not None and tbt_ms * 1e3 > goal.tbt_us:
                    self.tbt += 1
                    self.tokens += one.row.input_tokens
        self._seen = len(served)
        self._open = still


class Found(msgspec.Struct, frozen=True):
    """The highest speed, and the lowest above it that was seen to miss."""

    speed: float | None
    """None: not even at one step of the tolerance."""
    missed: Try | None
    """None: nothing was missed up to MOST."""


def max_speed(
    at: Callable[[float], Try],
    target: float,
    guess: float,
    tolerance: float = 0.05,
    figure: Figure = "attainment",
) -> Found:
    """The highest multiple of `tolerance` at which the share `figure` is `target` or more.

    Gallops from `guess` to a bracket, by steps that double, so that a good guess needs few
    simulations; then bisects. Attainment need not fall steadily with speed
    (a burst may fall differently), so what bisection ends with counts only if the next two steps
    miss as well; where one attains, the search walks on from there. A dip wider than that is not
    seen through: the answer is where misses begin, not the last speed that happens to attain.
    """

    def attains(step: int) -> bool:
        tried = at(round(step * tolerance, 9))
        share = tried.attainment if figure == "attainment" else tried.attainment_ttft
        return share >= target

    low = high = max(1, round(guess / tolerance))
    stride = 1
    while attains(high):
        low, high, stride = high, high + stride, 2 * stride
        if high * tolerance > MOST:
            return Found(round(low * tolerance, 9), None)
    while not attains(low):
        if low == 1:
            return Found(None, at(round(tolerance, 9)))
        low, high, stride = max(1, low - stride), low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attains(middle) else (low, middle)
    while attains(low + 1) or attains(low + 2):
        low += 1 if attains(low + 1) else 2
    return Found(round(low * tolerance, 9), at(round((low + 1) * tolerance, 9)))


# Bounds.


def decode_bound(trace: Trace, setup: Setup) -> float:
    """The speed at which decode instances, evenly and fully loaded, just meet the TBT objective.

    Fluid: the batch whose step takes as long as the objective, or that fills the KV, at the mean
    context of a generated token; against the trace's rate of output tokens.
    """
    rows = trace.rows
    tokens = sum(row.output_tokens for row in rows)
    weighted = sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
    context = weighted / tokens
    cost = setup.profile.cost()
    base, per_seq, per_context = cost.pass_us[4:]
    batch = setup.profile.kv_tokens / context
    if setup.goal.tbt_us is not None:
        batch = min(batch, (setup.goal.tbt_us - base) / (per_seq + per_context * context))
    step_us = base + (per_seq + per_context * context) * batch
    per_s = max(0.0, batch) / step_us * 1e6 * (setup.decode or setup.mixed)
    return per_s * _span_s(trace) / tokens


def prefill_bound(trace: Trace, setup: Setup) -> float:
    """The speed at which prefill instances are busy all the time, with an ideal shared cache."""
    work_s = sum(_ideal_us(trace, setup)) / 1e6
    return (setup.prefill or setup.mixed) * _span_s(trace) / work_s


def _span_s(trace: Trace) -> float:
    """At least a microsecond."""
    return max(1, trace.rows[-1].at_us - trace.rows[0].at_us) / 1e6


def _ideal_us(trace: Trace, setup: Setup) -> list[Micros]:
    """Prefill times where every block that anybody computed before is at hand."""
    cost, size = setup.profile.cost(), trace.block_size
    cache: Cache[int] = Cache(None)
    times = []
    for row in trace.rows:
        cached = min(cache.run(row.blocks), (row.input_tokens - 1) // size) * size
        cache.insert(row.blocks)
        times.append(cost.prefill_us(row.input_tokens, cached, _WHOLE))
    return times


def central_queue(trace: Trace, setup: Setup, speed: float, refuse: bool) -> tuple[float, float]:
    """One first-come-first-served queue before all prefill instances and an ideal shared pool.

    Shares of requests and of input tokens that meet the TTFT objective. `refuse`: whoever cannot
    meet it when its turn comes is dropped. Nothing moves, so nothing waits for KV: with this order
    of service nobody does better.
    """
    times = _ideal_us(trace, setup)
    free = [0] * (setup.prefill or setup.mixed)
    heapify(free)
    goal_us = setup.goal.ttft_us
    met = tokens = 0
    for row, work_us in zip(trace.rows, times, strict=True):
        at_us = round(row.at_us / speed)
        ends_us = max(free[0], at_us) + work_us
        in_time = goal_us is None or ends_us - at_us <= goal_us
        if in_time or not refuse:
            heapreplace(free, ends_us)
        if in_time:
            met += 1
            tokens += row.input_tokens
    total = sum(row.input_tokens for row in trace.rows)
    return met / len(trace.rows), tokens / total


# The split.


Binds: TypeAlias = Literal["prefill", "decode", "both", "neither", "nothing"]
"""Of which one more instance serves more of what was missed, by simulation: of one, of each as
much, of neither. `nothing`: nothing was missed."""


class Split(msgspec.Struct, frozen=True):
    """One way to divide the instances, and what it serves."""

    prefill: int
    decode: int
    speed: float | None
    """None: see `not_above`; where that is None too, not even at one step of the tolerance."""
    not_above: float | None
    """The best speed so far, which one simulation showed this split not to exceed."""
    binds: Binds
    prefill_bound: float
    decode_bound: float
    missed: Try | None


def plan(
    trace: Trace,
    setup: Setup,
    nodes: int,
    target: float = 0.99,
    tolerance: float = 0.05,
    tell: Callable[[Split], None] = lambda split: None,
) -> list[Split]:
    """The best split first, then those it was compared with, in the order they were tried.

    Begins where the fluid bounds of prefill and decode are nearest to each other, and walks to a
    neighbour as long as that one is faster; one simulation shows whether it is. More prefill means
    less decode, so there is one peak but for noise.
    """

    def made(prefill: int) -> Setup:
        return msgspec.structs.replace(setup, prefill=prefill, decode=nodes - prefill, mixed=0)

    def bounds(prefill: int) -> tuple[float, float]:
        return prefill_bound(trace, made(prefill)), decode_bound(trace, made(prefill))

    def look(prefill: int, to_beat: float | None) -> Split:
        fluid = bounds(prefill)
        trials = Trials(trace, made(prefill), target)
        not_above = None
        if to_beat is None:
            found = max_speed(trials, target, min(fluid), tolerance)
        else:
            first = trials(to_beat + tolerance)
            if first.attainment < target:
                found, not_above = Found(None, first), to_beat or None
            else:
                found = max_speed(trials, target, to_beat + tolerance, tolerance)
        binds = _binds(trace, made(prefill), target, found.missed)
        split = Split(prefill, nodes - prefill, found.speed, not_above, binds, *fluid, found.missed)
        tell(split)
        return split

    best = look(max(range(1, nodes), key=lambda p: min(bounds(p))), None)
    others: list[Split] = []
    for step in (1, -1):
        while 0 < best.prefill + step < nodes:
            if any(split.prefill == best.prefill + step for split in others):
                break
            next_one = look(best.prefill + step, best.speed or 0.0)
            if next_one.speed is None:
                others.append(next_one)
                break
            others.append(best)
            best = next_one
    return [best, *others]


def _binds(trace: Trace, setup: Setup, target: float, missed: Try | None) -> Binds:
    """What TTFT and TBT do not tell: where decode is full, requests may wait before prefill."""
    if missed is None:
        return "nothing"

    def served(more: Setup) -> tuple[float, float]:
        tried = Trials(trace, more, target)(missed.speed)
        return tried.seen, tried.attainment

    base = missed.seen, missed.attainment
    replace = msgspec.structs.replace
    by_prefill = max(base, served(replace(setup, prefill=setup.prefill + 1)))
    by_decode = max(base, served(replace(setup, decode=setup.decode + 1)))
    if by_prefill == by_decode:
        return "neither" if by_prefill == base else "both"
    return "prefill" if by_prefill > by_decode else "decode"
