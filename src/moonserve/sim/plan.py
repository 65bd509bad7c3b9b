"""How fast may a trace come, and how should instances be split? A search answers.

`moonserve plan` and the table of policies use it. A search runs few simulations, remembers them,
and leaves each as soon as too many requests have missed their TTFT. Two kinds of bound need no
simulation: fluid ones, and one queue before an ideal shared pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from math import ceil
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.units import MICROS_PER_SECOND, Micros
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
    """The result at one speed. If the run was left early, the attained shares are upper bounds."""

    speed: float
    attainment: float
    attainment_ttft: float
    attainment_tbt: float
    """Requests that missed their TTFT count as if they had met their TBT."""
    whole: bool
    """False if the run was left early."""
    seen: float = 1.0
    """The share of requests that had arrived when the run was left."""


Several: TypeAlias = Callable[[Sequence[Callable[[], Try]]], list[Try]]
"""Runs simulations, perhaps side by side in processes of their own, and returns their results in
order."""


def one_by_one(calls: Sequence[Callable[[], Try]]) -> list[Try]:
    """Run simulations in this process."""
    return [call() for call in calls]


class Trials(msgspec.Struct, eq=False):
    """One setup and trace at any speed; each speed is simulated once.

    A run is left as soon as more than 1 - `target` of the requests have missed what `figure`
    counts.
    """

    trace: Trace
    setup: Setup
    target: float
    figure: Figure = "attainment"
    tries: dict[float, Try] = {}

    def __call__(self, speed: float) -> Try:
        """Simulate at that speed, or return the earlier result."""
        if speed not in self.tries:
            self.tries[speed] = self.simulate(speed)
        return self.tries[speed]

    def ahead(self, several: Several, speeds: Sequence[float]) -> None:
        """Simulate at these speeds, side by side, since they may be asked for next."""
        fresh = [speed for speed in dict.fromkeys(speeds) if speed not in self.tries]
        alone = Trials(self.trace, self.setup, self.target, self.figure)
        tried = several([partial(alone.simulate, speed) for speed in fresh])
        self.tries.update(zip(fresh, tried, strict=True))

    def simulate(self, speed: float) -> Try:
        """Simulate at that speed, whatever was simulated before."""
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
    """Counts the requests that have missed an objective for certain, while a simulation runs.

    `decided`: every request's result is certain, so the rest of the run changes nothing. Without a
    TBT objective, a request is decided at its first token if nothing can fail after that.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._seen = 0
        self._open: list[Served] = []
        setup = sim.setup
        lasts = setup.breakdowns or setup.first_token == "decode" or setup.goal.tbt_us is not None
        self._safe_tokens = 0 if lasts else setup.profile.kv_tokens
        """A request of up to this many tokens in all is decided at its first token."""
        self.tokens = 0
        """Input tokens of the requests that missed."""
        self.ttft = 0
        """Requests whose first token was late, or that were refused or failed."""
        self.tbt = 0
        """Requests whose first token was in time, and the later ones too slow."""

    @property
    def any(self) -> int:
        """All requests that missed."""
        return self.ttft + self.tbt

    @property
    def decided(self) -> bool:
        """Whether all requests have arrived and none is open."""
        return not self._open and self._seen == len(self._sim.trace.rows)

    def look(self) -> None:
        """Count what happened since the last look."""
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


class SpeedFound(msgspec.Struct, frozen=True):
    """The highest speed that attains, and the lowest speed above it that was seen to miss."""

    speed: float | None
    """None: not even one step of the tolerance attains."""
    missed: Try | None
    """None: nothing missed up to MOST."""


def max_speed(
    at: Callable[[float], Try],
    target: float,
    guess: float,
    tolerance: float = 0.05,
    figure: Figure = "attainment",
    ahead: Callable[[Sequence[float]], None] = lambda speeds: None,
) -> SpeedFound:
    """The highest multiple of `tolerance` at which the share `figure` is `target` or more.

    It doubles steps from `guess` to a bracket, so that a good guess needs few simulations, and then
    bisects. Attainment need not fall steadily with speed, because a burst may fall differently. So
    the end of the bisection counts only if the next two steps miss as well; if one attains, the
    search goes on from there. A wider dip is not seen through: the answer is the speed where misses
    begin. `ahead` is called with the speed that is asked for next, and one that may follow it.
    """

    def soon(*steps: int) -> None:
        ahead([round(step * tolerance, 9) for step in steps if step * tolerance <= MOST])

    def attains(step: int) -> bool:
        tried = at(round(step * tolerance, 9))
        share = tried.attainment if figure == "attainment" else tried.attainment_ttft
        return share >= target

    low = high = max(1, round(guess / tolerance))
    stride = 1
    soon(high, high + 1)
    while attains(high):
        low = high
        high = high + stride
        stride = 2 * stride
        if high * tolerance > MOST:
            return SpeedFound(round(low * tolerance, 9), None)
        soon(high, high + stride)
    while not attains(low):
        if low == 1:
            return SpeedFound(None, at(round(tolerance, 9)))
        low, high, stride = max(1, low - stride), low, 2 * stride
        soon(low, max(1, low - stride))
    while high - low > 1:
        middle = (low + high) // 2
        soon(middle, (middle + high) // 2)
        low, high = (middle, high) if attains(middle) else (low, middle)
    soon(low + 1, low + 2)
    while attains(low + 1) or attains(low + 2):
        low += 1 if attains(low + 1) else 2
    return SpeedFound(round(low * tolerance, 9), at(round((low + 1) * tolerance, 9)))


# Bounds.


def decode_bound(trace: Trace, setup: Setup) -> float:
    """The speed at which decode instances, evenly and fully loaded, just meet the TBT objective.

    A fluid bound: it takes the batch whose step lasts as long as the objective, or that fills the
    KV, at the mean context of a generated token. It divides that by the trace's rate of output
    tokens. Infinite if decode takes no time, by costs that were fitted, or no output is asked for.
    """
    rows = trace.rows
    tokens = sum(row.output_tokens for row in rows)
    if not tokens:
        return math.inf
    weighted = sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
    context = weighted / tokens
    base, per_seq, per_context = setup.profile.cost().pass_us[4:]
    each_us = per_seq + per_context * context
    batch = setup.profile.kv_tokens / context
    if setup.goal.tbt_us is not None:
        left_us = setup.goal.tbt_us - base
        if left_us <= 0:
            return 0.0
        if each_us > 0:
            batch = min(batch, left_us / each_us)
    step_us = base + each_us * batch
    if step_us <= 0:
        return math.inf
    per_s = batch / step_us * 1e6 * (setup.decode or setup.mixed)
    return per_s * _span_s(trace) / tokens


def prefill_bound(trace: Trace, setup: Setup) -> float:
    """The speed at which prefill instances are always busy, with an ideal shared cache. Infinite if
    prefill takes no time."""
    work_s = sum(_ideal_us(trace, setup)) / 1e6
    return (setup.prefill or setup.mixed) * _span_s(trace) / work_s if work_s else math.inf


def _span_s(trace: Trace) -> float:
    """The trace's duration in seconds; at least one microsecond."""
    return max(1, trace.rows[-1].at_us - trace.rows[0].at_us) / 1e6


def _ideal_us(trace: Trace, setup: Setup) -> list[Micros]:
    """Prefill times if every block that was computed before is at hand."""
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

    Returns the shares of requests and of input tokens that meet the TTFT objective. `refuse`: a
    request that cannot meet it when its turn comes is dropped. Nothing moves, so nothing waits for
    KV: no scheduler does better with this order of service.
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
"""Which kind of instance limits: one more of it serves more of the requests that missed, by
simulation. both: each serves as much more. neither: none does. nothing: no request missed."""


class Split(msgspec.Struct, frozen=True):
    """One way to divide the instances, and what it serves."""

    prefill: int
    decode: int
    speed: float | None
    """None: see `not_above`; if that is None too, not even one step of the tolerance attains."""
    not_above: float | None
    """The best speed so far, if one simulation showed that this split does not exceed it."""
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
    several: Several | None = None,
) -> list[Split]:
    """The best split first, then those it was compared with, in the order of the search.

    The search begins where the fluid bounds of prefill and decode are nearest to each other. It
    moves to a neighbour as long as that one is faster; one simulation shows whether it is. More
    prefill means less decode, so there is one peak, apart from noise. several: where simulations
    run side by side, also those that may not be needed; None: they run one by one.
    """

    def made(prefill: int) -> Setup:
        return msgspec.structs.replace(setup, prefill=prefill, decode=nodes - prefill, mixed=0)

    def bounds(prefill: int) -> tuple[float, float]:
        return prefill_bound(trace, made(prefill)), decode_bound(trace, made(prefill))

    def look(prefill: int, to_beat: float | None) -> Split:
        fluid = bounds(prefill)
        trials = Trials(trace, made(prefill), target)
        not_above = None

        def ahead(speeds: Sequence[float]) -> None:
            if several is not None:
                trials.ahead(several, speeds)

        if to_beat is None:
            found = max_speed(trials, target, min(fluid), tolerance, ahead=ahead)
        else:
            first = trials(to_beat + tolerance)
            if first.attainment < target:
                found, not_above = SpeedFound(None, first), to_beat or None
            else:
                found = max_speed(trials, target, to_beat + tolerance, tolerance, ahead=ahead)
        binds = _binds(trace, made(prefill), target, found.missed, several or one_by_one)
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


def requests_needed(trace: Trace, setup: Setup, target: float, speed: float | None) -> int:
    """How many requests a trace must have for this speed to hold for a lasting load.

    One that misses must be no more than the share that may miss. And the requests must come for
    longer than the TTFT objective: those of a shorter trace are one burst, which may wait until
    then.
    """
    by_share = 0 if target >= 1 else ceil(round(1 / (1 - target), 6))
    all_at_once = trace.rows[-1].at_us == trace.rows[0].at_us
    if speed is None or setup.goal.ttft_us is None or all_at_once:
        return by_share
    per_s = speed * len(trace.rows) / _span_s(trace)
    return max(by_share, ceil(per_s * setup.goal.ttft_us / MICROS_PER_SECOND))


def _binds(
    trace: Trace, setup: Setup, target: float, missed: Try | None, several: Several
) -> Binds:
    """TTFT and TBT do not show what limits: if decode is full, requests may wait before prefill."""
    if missed is None:
        return "nothing"

    replace = msgspec.structs.replace
    more = replace(setup, prefill=setup.prefill + 1), replace(setup, decode=setup.decode + 1)
    tries = several([partial(Trials(trace, one, target).simulate, missed.speed) for one in more])
    base = missed.seen, missed.attainment
    by_prefill, by_decode = [max(base, (tried.seen, tried.attainment)) for tried in tries]
    if by_prefill == by_decode:
        return "neither" if by_prefill == base else "both"
    return "prefill" if by_prefill > by_decode else "decode"
