"""What instances cost, fitted from the stages of recorded requests: a Profile.

`moonserve simulate` of a recording and `moonserve replay --profile-out` use it. Each stage has its
own line, fitted from that stage's recorded times alone; no figure is scaled so that a total comes
out right. It reads neither the prompts nor a clock.

What happened at the same time is reconstructed from the rows: when each instance prefilled and
decoded, and for how many requests. A machine that was idle is slow at first (its cores slept, and
others had its caches), so the time since the last pass of any instance is a term too.

Requests that decode together measure the same passes. Each counts by its share of them: counted
whole, times with many requests, which are often slow ones, would weigh more than they lasted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonserve.core.errors import ConfigError
from moonserve.core.schedule.cost import LAPTOP_PASS, LinearFit, prefill_features
from moonserve.core.schedule.explain import Explanation, Stages
from moonserve.core.schedule.profiles import Overhead, Profile
from moonserve.core.schedule.recorded import RecordedCluster, RecordedInstance
from moonserve.core.units import InstanceId, Tokens
from moonserve.sim.setup import Pace

Times = NDArray[np.float64]
Number = TypeVar("Number", float, Times)
Span: TypeAlias = tuple[float, float]
OneT = TypeVar("OneT")
SpanT = TypeVar("SpanT", bound=tuple[float, ...])

LEAST_ROWS = 8
"""Served requests that a fit needs."""
_MOST_ROWS = 2_000
"""Requests that a fit reads, the last ones: more take long and change nothing."""
_ALONE = 0.02
"""A request met nobody at its instance if others shared less of its time than this."""
_SAME_PASS_US = 5e3
"""First tokens of one pass come within this time, if the parts of a call are not known."""
_UNSURE_US = 30e3
"""When a pass began and ended is known about as well as this."""
_COLD_AFTER_US = (0.0, 250e3, 500e3, 1e6, 2e6, 4e6, 8e6)
"""Values of Profile.cold_after_us that are tried."""
_BETTER = 0.9
"""A machine gets cold, or has few cores, if that makes passes' squared errors so much smaller."""
_UNUSUAL = 10.0
"""A sample of an overhead that took so many times as long as usual, beside what is predicted, is
left out: that request waited for something that the simulator has elsewhere, or not at all."""
_MOST_ON_ONE = 16
"""Of more instances it is not asked whether they share the cores of one machine."""
_PREFILL_SCALES = (1.0, 1e3, 1e6, 1e3, 1.0)
_STEP_SCALES = (1.0, 10.0, 1e3)
_DOUBT = 10.0
"""By so many times what is expected of a term may be wrong."""
_FAR = 3.0
"""An error counts by its share of what is predicted, or of what was measured if that is so many
times more or less."""
_REWEIGHTED = 6
_SWEEPS = 200
_STILL = 1e-5
_ROUNDS = 3
"""So often are found in turns: the length of a step and how many there were; the costs and the
machine's speed."""
_LONG_US = 1e12
_PACE_US = 15e6
"""For so long the machine is taken to be equally fast: some passes of several requests."""
_PACE_DOUBT_US = 1e6
"""So much time of passes counts half as much as is known of it."""
_MOST_PACES = 500
_UNKNOWN_BYTES = 1_000
"""What a token of KV is taken to have if its instance does not report it."""
_OVERHEAD = (5_000.0, 5.0, 5_000.0)
_PREFILL = (*LAPTOP_PASS[:4], 50_000.0)
"""What is expected before anything is read: base, token, cold; of prefills also past and cold."""


class _Load:
    """What one instance had to do at each time: how many requests, and how many tokens of them."""

    def __init__(self, spans: Iterable[tuple[float, float, float]]) -> None:
        """(begin, end, tokens) of each request, in any order."""
        edges = sorted(
            edge
            for begin, end, tokens in spans
            for edge in ((begin, 1, tokens), (end, -1, -tokens))
        )
        self._times = [at for at, _, _ in edges]
        self._seqs = np.cumsum([seqs for _, seqs, _ in edges])[:-1]
        self._tokens = np.cumsum([tokens for _, _, tokens in edges])[:-1]
        self.weigh(lambda seqs, tokens: np.ones(len(seqs)))

    def weigh(self, step_us: Callable[[Times, Times], Times]) -> None:
        """Take means over steps, which last so long for so many requests and tokens."""
        least_us = 1.0  # a fitted step may cost nothing while nobody decodes
        steps = np.diff(self._times) / np.maximum(least_us, step_us(self._seqs, self._tokens))
        parts = np.column_stack((steps, steps * self._seqs, steps * self._tokens))
        self._sums: list[list[float]] = np.vstack((np.zeros(3), np.cumsum(parts, axis=0))).tolist()

    def between(self, begin: float, end: float) -> tuple[float, float, float]:
        """How many steps there were, and the sums over them of requests and of tokens."""
        (steps, seqs, tokens), before = self._until(end), self._until(begin)
        return steps - before[0], seqs - before[1], tokens - before[2]

    def _until(self, at_us: float) -> list[float]:
        """The same sums, from the beginning on."""
        after = bisect_right(self._times, at_us)
        if not 0 < after < len(self._times):
            return self._sums[max(0, after - 1)]
        begin, end = self._times[after - 1 : after + 1]
        share = (at_us - begin) / (end - begin)
        sums = zip(self._sums[after - 1], self._sums[after], strict=True)
        return [one + share * (other - one) for one, other in sums]


class _StageFit:
    """A linear form that is fitted to samples; it gives back the sum of them all.

    It is fitted as cost.LinearFit fits, to all samples at once in place of one after another.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self._prior = prior
        self._scales = scales
        self._features: list[Sequence[float]] = []
        self._took_us: list[float] = []
        self._shares: list[float] = []
        self.spans: list[Span] = []
        """When each sample was."""
        self._solved: tuple[float, ...] | None = None

    def add(
        self,
        features: Sequence[float],
        took_us: float,
        when: Span = (0.0, 0.0),
        share: float = 1.0,
    ) -> None:
        """One sample; times of zero or below are measuring faults, and count for nothing. share:
        how much of it no other sample measured too."""
        if took_us > 0:
            self._shares.append(share)
            self.spans.append(when)
            self._features.append(features)
            self._took_us.append(took_us)
            self._solved = None

    @property
    def count(self) -> int:
        """How many samples it has."""
        return len(self._took_us)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """One for each feature."""
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    @property
    def error(self) -> float:
        """The sum over samples of the squared logarithm of measured over predicted: twice and half
        as long are equally wrong."""
        return float((np.log(self.ratios) ** 2) @ self.shares)

    def usual(self) -> _StageFit:
        """The same line, fitted without the samples that took unusually long."""
        if not self.count:
            return self
        ratios = self.ratios
        most = _UNUSUAL * np.median(ratios)
        if ratios.max() <= most:
            return self
        line = _StageFit(self._prior, self._scales)
        for features, took_us, ratio in zip(self._features, self._took_us, ratios, strict=True):
            if ratio <= most:
                line.add(features, took_us)
        return line

    @property
    def shares(self) -> Times:
        """How much of each sample no other one measured too."""
        return np.array(self._shares, np.float64)

    @property
    def ratios(self) -> Times:
        """Measured over predicted, of each sample."""
        predicted = self._matrix() @ np.array(self.coefficients)
        return np.asarray(np.array(self._took_us) / np.maximum(1.0, predicted))

    def _matrix(self) -> Times:
        return np.array(self._features, np.float64).reshape(-1, len(self._prior))

    def _solve(self) -> tuple[float, ...]:
        features, took_us = self._matrix(), np.array(self._took_us)
        scales = np.array(self._scales)
        weights = self._weights(features / scales, took_us, self._prior * scales) / scales
        counted = self.shares
        predicted_us = float(counted @ features @ weights)
        ratio = counted @ took_us / predicted_us if predicted_us else 1.0
        return tuple((ratio * weights).tolist())

    def _weights(self, rows: Times, took_us: Times, prior: Times) -> Times:
        """None below 0, and near the prior where samples do not say otherwise; one whose prior is 0
        stays 0. Errors count by their share of what is predicted."""
        free = np.flatnonzero(prior)
        counted = np.sqrt(self.shares)
        ridge = (LinearFit.NOISE / (_DOUBT * prior[free])) ** 2
        weights = prior.copy()
        for _ in range(_REWEIGHTED if self.count else 0):
            unit = np.clip(rows @ weights, took_us / _FAR, took_us * _FAR)
            shares = rows[:, free] * (counted / unit)[:, None]
            xx = shares.T @ shares + np.diag(ridge)
            xy = shares.T @ (counted * took_us / unit) + ridge * prior[free]
            weights[free] = _not_negative(xx, xy, weights[free])
        return weights


def _not_negative(xx: Times, xy: Times, weights: Times) -> Times:
    """Solve xx weights = xy with no weight below 0, by one weight at a time, from these."""
    weights = weights.copy()
    for _ in range(_SWEEPS):
        moved = 0.0
        for at, line in enumerate(xx):
            before = weights[at]
            weights[at] = max(0.0, before + (xy[at] - line @ weights) / line[at])
            moved = max(moved, abs(weights[at] - before) / (weights[at] or 1.0))
        if moved < _STILL:
            break
    return weights


class _Together(msgspec.Struct, frozen=True):
    """Requests of one instance that shared passes, or one that had its own."""

    where: InstanceId
    count: int
    first: int
    """The number of the first of them."""
    begin_us: float
    end_us: float
    features: tuple[int, ...]
    """Of all their passes; see cost.prefill_features."""


class _Served(msgspec.Struct, frozen=True):
    """One recorded request: when its stages began and ended, in microseconds since 1970."""

    row: Explanation
    stages: Stages
    arrived_us: float
    called_us: float
    """When its prefill call went out."""
    prefilled_us: float
    """When that call ended."""
    computed_us: tuple[float, float]
    """When its prompt was computed, about."""
    decoded_us: tuple[float, float] | None
    """When it was in decode passes, about; None: it was in none."""
    gaps: int
    """Tokens after the first one of decode."""

    @staticmethod
    def of(row: Explanation, connector: str) -> _Served | None:
        """None: it was not served, or not all of it was measured."""
        stages = row.stages
        if row.in_time is None or stages is None or row.arrived_ms is None:
            return None
        if stages.waited_ms is None or stages.prefill_ms is None or stages.total_ms is None:
            return None
        arrived_us = 1e3 * row.arrived_ms
        called_us = arrived_us + 1e3 * stages.waited_ms
        prefilled_us = called_us + 1e3 * stages.prefill_ms
        end_us = prefilled_us - 1e3 * ((stages.publish_ms or 0.0) + (stages.call_ms or 0.0) / 2)
        compute_ms = stages.prefill_ms if stages.compute_ms is None else stages.compute_ms
        gaps = max(0, (row.output_tokens or 0) - (2 if connector == "embedded" else 1))
        decoded = None
        joint = connector != "embedded" and row.prefill == row.decode
        if (joint or stages.handover_ms is not None) and stages.decode_ms is not None and gaps:
            last_us = arrived_us + 1e3 * stages.total_ms
            first_us = last_us - 1e3 * stages.decode_ms
            if not joint:  # its first token takes a step here too
                first_us -= 1e3 * stages.decode_ms / gaps
            decoded = (first_us, last_us)
        return _Served(
            row,
            stages,
            arrived_us,
            called_us,
            prefilled_us,
            (end_us - 1e3 * compute_ms, end_us),
            decoded,
            gaps,
        )

    @property
    def steps_us(self) -> Span:
        """When it was in decode passes after its first token of decode."""
        assert self.decoded_us is not None
        _, last_us = self.decoded_us
        return last_us - 1e3 * (self.stages.decode_ms or 0.0), last_us

    @property
    def prompt(self) -> Tokens:
        """Tokens of its prompt."""
        return self.row.prompt_tokens or 0

    @property
    def cached(self) -> Tokens:
        """Those that its prefill loaded."""
        return self.row.actual_cached_tokens or 0


class Fitted(msgspec.Struct, frozen=True):
    """What recorded requests say of the instances that served them, and of their machine."""

    profile: Profile
    paces: tuple[Pace, ...]
    """How many times as long as the profile says passes took, in microseconds since 1970. Their
    mean over all passes is 1."""

    def paces_since(self, start_us: float, speed: float = 1.0) -> tuple[Pace, ...]:
        """The same on a clock that began at this time since 1970, and is so many times as fast."""
        return tuple(Pace(round((it.at_us - start_us) / speed), it.factor) for it in self.paces)


def fit(name: str, cluster: RecordedCluster, rows: Iterable[Explanation]) -> Fitted:
    """The costs of the instances that served these rows, and how fast their machine was meanwhile.

    Raises ConfigError: too few of them were served.
    """
    instances = {it.id: it for it in cluster.instances}
    connector = cluster.instances[0].connector if cluster.instances else "embedded"
    found = [one for row in rows if (one := _Served.of(row, connector)) is not None]
    served = [one for one in found if one.row.prefill in instances and one.row.decode in instances]
    if len(served) < LEAST_ROWS:
        what = (
            f"has {len(served)} requests that these instances served; a fit needs {LEAST_ROWS}: "
            "serve more of them, or simulate with another --profile"
        )
        raise ConfigError(what, name)
    served.sort(key=lambda one: one.arrived_us)
    costs = _Fit(served[-_MOST_ROWS:], instances)
    return Fitted(costs.profile(name), costs.paces())


class _Work:
    """The prefills of one instance: when, and the features of each."""

    def __init__(self, them: Sequence[tuple[Span, tuple[int, ...]]]) -> None:
        self._begins, self._ends = np.array([span for span, _ in them]).T
        self._features = np.array([features for _, features in them], np.float64)

    def between(self, begin: float, end: float) -> list[float]:
        """The sum of the features of what it prefilled in this time."""
        shared = np.minimum(end, self._ends) - np.maximum(begin, self._begins)
        shares = np.clip(shared / (self._ends - self._begins), 0.0, 1.0)
        return [float(it) for it in shares @ self._features]


def _work(served: Sequence[_Served], chunk: Tokens, has_parts: bool) -> dict[InstanceId, _Work]:
    """has_parts: whether it is known when a prefill was computed; else when its token came."""
    found: dict[InstanceId, list[tuple[Span, tuple[int, ...]]]] = {}
    before_us: dict[InstanceId, float] = {}
    for one in sorted(served, key=lambda one: one.computed_us[1]):
        begin, end = one.computed_us
        where = one.row.prefill
        if where is not None and one.prompt > one.cached and end > begin:
            span = (begin, end) if has_parts else (end - 1.0, end)
            passes, *rest = prefill_features(one.prompt, one.cached, chunk)
            if not has_parts and end - before_us.get(where, -_LONG_US) < _SAME_PASS_US:
                passes -= 1
            before_us[where] = end
            found.setdefault(where, []).append((span, (passes, *rest)))
    return {where: _Work(them) for where, them in found.items()}


class _Fit:
    """One fit; see the module."""

    def __init__(
        self, served: Sequence[_Served], instances: Mapping[InstanceId, RecordedInstance]
    ) -> None:
        self._served = served
        self._instances = instances
        self._cores = 0.0
        self._cold_after_us = 0.0
        self._chunk = min(it.chunk_tokens for it in instances.values() if it.role != "decode")
        self._activity = _Activity(served)
        self._idle_us = np.array([self._activity.idle_us(one.arrived_us) for one in served])
        self._together = _together(served, self._chunk)
        prefills = _loads(_spans(served, lambda it: it.row.prefill, _called))
        self._decodes = _loads(_spans(served, lambda it: it.row.decode, _decoding))
        self._is_apart = {one.row.request for one in served if _is_apart(one, prefills)}
        self._has_parts = any(one.stages.compute_ms is not None for one in served)
        self._work = _work(served, self._chunk, self._has_parts)
        self._is_mixed = not self._work.keys().isdisjoint(self._decodes)
        self._step: Sequence[float] = LAPTOP_PASS[4:]
        self._speed = _Speed()
        # A slow time has more requests in it, and so looks like the cost of many requests: costs
        # and speed of the machine are found in turns.
        for _ in range(_ROUNDS):
            self._cold_after_us = self._best_cold()
            self._cores = self._best_cores()
            self._cold_after_us = self._best_cold()
            passes, self._step = self._passes()
            self._speed = self._found_speed()
        *self._prefill, self._wake = passes

    def paces(self) -> tuple[Pace, ...]:
        """How many times as long as by these costs passes took, in each span of time."""
        return self._speed.paces()

    def _lines(self) -> list[_StageFit]:
        """The passes of all kinds."""
        return [self._mixed()] if self._is_mixed else [self._prefills(), self._steps()]

    def _slowed(self) -> Callable[[float, float], float]:
        """Returns by what factor work between two times took longer, for want of cores and of a
        fast machine."""
        by_cores, speed = self._activity.slowed(self._cores), self._speed
        return lambda begin, end: by_cores(begin, end) * speed.slowed(begin, end)

    def _found_speed(self) -> _Speed:
        """How fast the machine was in each span of time, by all passes and their costs."""
        lines = self._lines()
        spans = np.array([span for line in lines for span in line.spans]).reshape(-1, 2)
        if not len(spans):
            return _Speed()
        begin, end = spans.T
        slowed = np.array([self._speed.slowed(*span) for span in spans])
        ratios = slowed * np.concatenate([line.ratios for line in lines])
        return _speed_of(begin, end, ratios, np.concatenate([line.shares for line in lines]))

    def profile(self, name: str) -> Profile:
        """All of it."""
        decodes = [it for it in self._instances.values() if it.role != "prefill"]
        one = decodes[0]
        # External engines do not report it. Only times are fitted, so any size gives the same.
        token_bytes = one.block_bytes // one.block_size or _UNKNOWN_BYTES
        own_load = self._line(lambda it: it.cached, lambda it: it.stages.load_ms, self._loads)
        link, decode_call = self._handover(own_load, one.role == "decode")
        return Profile(
            name=name,
            source=f"fitted from {len(self._served):,} recorded requests",
            pass_us=msgspec.convert(
                (*self._prefill, *self._step),
                tuple[float, float, float, float, float, float, float],
            ),
            kv_bytes_per_token=token_bytes,
            link_bytes_per_s=1e6 * token_bytes / max(1e-6, link.token_us),
            kv_tokens=min(it.kv_blocks * it.block_size for it in decodes),
            load_base_us=link.base_us,
            arrive=self._line(lambda it: it.prompt, lambda it: it.stages.waited_ms, self._apart),
            call=self._line(lambda it: it.prompt, lambda it: it.stages.call_ms),
            turn=self._line(lambda it: it.prompt, lambda it: it.stages.queue_ms, self._apart),
            own_load=own_load,
            publish=self._line(_computed, lambda it: it.stages.publish_ms),
            decode_call=decode_call,
            wake_us=self._wake,
            cold_after_us=self._cold_after_us,
            cores=self._cores,
            layers=one.layers,
        )

    def _cold(self) -> Times:
        """How cold the machine was at each arrival, from 0 to 1."""
        if not self._cold_after_us:
            return np.zeros(len(self._served))
        return self._idle_us / (self._idle_us + self._cold_after_us)

    # Passes.

    def _best_cold(self) -> float:
        """The idle time that makes the machine half as cold as it gets; 0: none explains passes."""
        errors: dict[float, float] = {}
        for self._cold_after_us in _COLD_AFTER_US:
            line = self._mixed() if self._is_mixed else self._prefills()
            errors[self._cold_after_us] = line.error
        return _best(errors)

    def _best_cores(self) -> float:
        """How many instances compute at full speed at a time; 0: as many as there are."""
        count = len(self._instances)
        tried = np.arange(1.0, count, 0.25) if count <= _MOST_ON_ONE else ()
        errors: dict[float, float] = {}
        for self._cores in (0.0, *map(float, tried)):
            errors[self._cores] = sum(line.error for line in self._lines())
        return _best(errors)

    def _prefills(self) -> _StageFit:
        """Passes, computed tokens, their squares, tokens before them, and the cold. Prefills that
        shared passes are one sample: they took so long together."""
        prior = _PREFILL if self._cold_after_us else (*_PREFILL[:4], 0.0)
        line = _StageFit(prior, _PREFILL_SCALES)
        slowed = self._slowed()
        colds = self._cold()
        for them in self._together:
            took_us = (them.end_us - them.begin_us) / slowed(them.begin_us, them.end_us)
            span = (them.begin_us, them.end_us)
            line.add((*them.features, float(colds[them.first])), took_us, span)
        return line

    def _steps(self) -> _StageFit:
        """Base, requests and context of decode steps, from the means over each request's steps."""
        slowed = self._slowed()
        step: tuple[float, ...] = LAPTOP_PASS[4:]
        line = _StageFit(step, _STEP_SCALES)
        for _ in range(_ROUNDS):
            for load in self._decodes.values():
                load.weigh(partial(_step_us, step))
            line = _StageFit(LAPTOP_PASS[4:], _STEP_SCALES)
            for one in self._served:
                if one.decoded_us is not None:
                    begin, end = one.steps_us
                    took_us = (end - begin) / slowed(begin, end)
                    stepped = self._stepped(one)
                    share = min(1.0, stepped[0] / stepped[1]) if stepped[1] else 1.0
                    line.add(stepped, took_us, (begin, end), share)
            step = line.coefficients
        return line

    def _passes(self) -> tuple[Sequence[float], Sequence[float]]:
        """The coefficients of prefills, the last that of the cold, and those of steps."""
        if not self._is_mixed:
            return self._prefills().coefficients, self._steps().coefficients
        found = self._mixed().coefficients
        return found[:5], found[5:]

    def _mixed(self) -> _StageFit:
        """The terms of prefills, then those of steps, where one pass may do both.

        The steps of a request have the prefills of others in them, and a prefill has the steps of
        others in its passes. If no parts of it are known, it counts only if it met nobody: what was
        left of the pass that others were in is not known.
        """
        prior = _PREFILL if self._cold_after_us else (*_PREFILL[:4], 0.0)
        line = _StageFit((*prior, *LAPTOP_PASS[4:]), (*_PREFILL_SCALES, *_STEP_SCALES))
        slowed = self._slowed()
        colds = self._cold()
        for load in self._decodes.values():
            load.weigh(partial(_step_us, self._step))
        for them in self._together:
            seqs, context = self._beside(them.where, them.begin_us, them.end_us)
            if self._has_parts or seqs < _ALONE:
                passes = them.features[0]
                steps = (0.0, passes * seqs, passes * context)
                took_us = (them.end_us - them.begin_us) / slowed(them.begin_us, them.end_us)
                span = (them.begin_us, them.end_us)
                line.add((*them.features, float(colds[them.first]), *steps), took_us, span)
        for one in self._served:
            if one.decoded_us is not None:
                begin, end = one.steps_us
                others = self._prefilled_beside(one)
                gaps, seqs, context = self._stepped(one)
                alone = max(0.0, gaps - others[0])
                took_us = (end - begin) / slowed(begin, end)
                share = min(1.0, gaps / seqs) if seqs else 1.0
                line.add((*others, 0.0, alone, seqs, context), took_us, (begin, end), share)
        return line

    def _stepped(self, one: _Served) -> tuple[float, float, float]:
        """How many decode steps it took, and the sums over them of requests and of tokens."""
        seqs, context = self._beside(one.row.decode, *one.steps_us)
        return one.gaps, one.gaps * seqs, one.gaps * context

    def _prefilled_beside(self, one: _Served) -> Sequence[float]:
        """The features of the prefills in its decode steps."""
        assert one.row.decode is not None
        work = self._work.get(one.row.decode)
        if work is None:
            return (0.0,) * 4
        begin, end = one.steps_us
        # A prefill without parts counts when its token came: with the tokens of the same pass.
        late_us = 0.0 if self._has_parts else (end - begin) / one.gaps / 2
        return work.between(begin + late_us, end + late_us)

    def _beside(self, instance: InstanceId | None, begin: float, end: float) -> tuple[float, float]:
        """How many requests decoded there in this time, and how many tokens they had."""
        assert instance is not None
        if instance not in self._decodes:
            return 0.0, 0.0
        steps, seqs, context = self._decodes[instance].between(begin, end)
        return (seqs / steps, context / steps) if steps else (0.0, 0.0)

    # Other stages.

    def _apart(self, one: _Served) -> bool:
        """Whether it waited for no other prefill."""
        return one.row.request in self._is_apart

    def _loads(self, one: _Served) -> bool:
        return one.cached > 0

    def _decoded(self, one: _Served) -> bool:
        return one.decoded_us is not None

    def _finds_idle(self, one: _Served) -> bool:
        """Whether no other request decoded at its instance when its first step began."""
        return one.decoded_us is not None and self._found(one)[0] < _ALONE

    def _found(self, one: _Served) -> tuple[float, float]:
        """How many requests decoded there then, and how many tokens they had."""
        assert one.decoded_us is not None
        first_us = one.decoded_us[0]
        return self._beside(one.row.decode, first_us - 2e3, first_us - 1e3)

    def _handover(self, own_load: Overhead, apart: bool) -> tuple[Overhead, Overhead]:
        """What KV takes that comes from elsewhere, and the decode call beside that. apart: whether
        decode instances are others than prefill instances."""
        line = partial(self._line, lambda it: it.prompt, when=_handed_over, cold=False)
        reported = [one for one in self._served if one.stages.decode_call_ms is not None]
        if len(reported) >= LEAST_ROWS:
            link = line(lambda it: it.stages.decode_load_ms, self._lone_handovers(reported))
            return link if apart else own_load, line(lambda it: it.stages.decode_call_ms)
        idle = [one for one in self._served if self._finds_idle(one)]
        joins = self._finds_idle if len(idle) >= LEAST_ROWS else self._decoded
        take = line(self._taken_ms, joins)
        if not apart:
            return own_load, Overhead(take.base_us)
        base_us = min(own_load.base_us, take.base_us)
        return Overhead(base_us, take.token_us), Overhead(take.base_us - base_us)

    def _lone_handovers(self, them: Sequence[_Served]) -> Callable[[_Served], bool]:
        """Which of these shared the link of their prefill instance with no other; all, if few
        did."""
        loads = _loads(_spans(them, lambda it: it.row.prefill, lambda it: (*_handed_over(it), 0.0)))
        alone: set[str] = set()
        for one in them:
            assert one.row.prefill is not None
            begin, end = _handed_over(one)
            _, seqs_us, _ = loads[one.row.prefill].between(begin, end)
            if seqs_us < (1 + _ALONE) * (end - begin):
                alone.add(one.row.request)
        return lambda it: len(alone) < LEAST_ROWS or it.row.request in alone

    def _taken_ms(self, one: _Served) -> float | None:
        """Of an instance that does not report it: its hand-over without its own first step, on a
        machine that may be cold, and without the rest of the step that it finds, which is half of
        one in the mean. A wait for a place in the batch is in it."""
        if one.stages.handover_ms is None or one.decoded_us is None:
            return None
        seqs, context = self._found(one)
        pace = self._slowed()(*_handed_over(one))
        step_us = pace * _step_us(self._step, seqs + 1, context + one.prompt)
        rest_us = pace * _step_us(self._step, seqs, context) / 2 if seqs > 0.5 else 0.0
        idle_us = self._activity.idle_us(one.decoded_us[0])
        wake_us = self._wake * idle_us / (idle_us + self._cold_after_us) if self._wake else 0.0
        return one.stages.handover_ms - (step_us + rest_us + wake_us) / 1e3

    def _line(
        self,
        tokens: Callable[[_Served], Tokens],
        took_ms: Callable[[_Served], float | None],
        only: Callable[[_Served], bool] = lambda one: True,
        when: Callable[[_Served], Span] = lambda one: (one.arrived_us, one.prefilled_us),
        cold: bool = True,
    ) -> Overhead:
        """One stage of some requests; when: the time of it, with others' work on the same cores."""
        is_cold = cold and self._cold_after_us > 0
        slowed = self._activity.slowed(self._cores)
        line = _StageFit(_OVERHEAD if is_cold else (*_OVERHEAD[:2], 0.0), (1.0, 1e3, 1.0))
        for one, how_cold in zip(self._served, self._cold(), strict=True):
            took = took_ms(one)
            if only(one) and took is not None:
                took_us = 1e3 * took / slowed(*when(one))
                line.add((1.0, tokens(one), float(how_cold)), took_us)
        line = line.usual()
        return Overhead(*line.coefficients) if line.count >= LEAST_ROWS else Overhead()


class _Speed:
    """By what factor work took longer in each span of time, until the last edge."""

    def __init__(self, edges: Sequence[float] = (), factors: Sequence[float] = ()) -> None:
        self._edges = np.array(edges, np.float64)
        self._factors = np.array(factors, np.float64)
        self._work = np.append(0.0, np.cumsum(np.diff(self._edges) / self._factors[:-1]))

    def slowed(self, begin: float, end: float) -> float:
        """The mean factor of work that lasted so long."""
        if end <= begin or not len(self._edges):
            return 1.0
        done = np.interp((begin, end), self._edges, self._work)
        return (end - begin) / max(1.0, float(done[1] - done[0]))

    def paces(self) -> tuple[Pace, ...]:
        """The same for a simulation."""
        pairs = zip(self._edges, self._factors, strict=True)
        return tuple(Pace(round(at), float(factor)) for at, factor in pairs)


def _speed_of(begin_us: Times, end_us: Times, ratios: Times, shares: Times) -> _Speed:
    """How long what lies in each span of time took, over what it should; little of it counts less.
    All work together takes as long as without these factors."""
    first, last = begin_us.min(), end_us.max()
    edges = np.arange(first, last, max(_PACE_US, (last - first) / _MOST_PACES))
    ends = np.append(edges[1:], last)
    within = np.minimum(end_us[:, None], ends) - np.maximum(begin_us[:, None], edges)
    within = np.maximum(0.0, within) * shares[:, None]
    took_us = within.sum(axis=0)
    work_us = (1 / ratios) @ within
    factors = (took_us + _PACE_DOUBT_US) / (work_us + _PACE_DOUBT_US)
    factors *= work_us.sum() / (factors @ work_us)
    return _Speed([*edges, last], [*factors, 1.0])


def _best(errors: Mapping[float, float]) -> float:
    """The value with the least error; 0 if that explains little."""
    best = min(errors, key=lambda value: errors[value])
    return best if errors[best] < _BETTER * errors[0.0] else 0.0


def _computed(one: _Served) -> Tokens:
    return one.prompt - one.cached


def _handed_over(one: _Served) -> Span:
    """From its decode call to its first token."""
    first_us = one.arrived_us + 1e3 * ((one.stages.total_ms or 0.0) - (one.stages.decode_ms or 0.0))
    return first_us - 1e3 * (one.stages.handover_ms or 0.0), first_us


def _called(one: _Served) -> tuple[float, float, float]:
    return (one.called_us, one.prefilled_us, 0.0)


def _decoding(one: _Served) -> tuple[float, float, float] | None:
    """With the mean over its steps of its known tokens."""
    if one.decoded_us is None:
        return None
    return (*one.decoded_us, one.prompt + (one.row.output_tokens or 0) / 2)


def _loads(spans: Mapping[InstanceId, list[tuple[float, float, float]]]) -> dict[InstanceId, _Load]:
    return {where: _Load(them) for where, them in spans.items()}


def _spans(
    served: Sequence[OneT],
    instance: Callable[[OneT], InstanceId | None],
    span: Callable[[OneT], SpanT | None],
) -> dict[InstanceId, list[SpanT]]:
    """When each instance had something to do."""
    spans: dict[InstanceId, list[SpanT]] = {}
    for one in served:
        where, found = instance(one), span(one)
        if where is not None and found is not None:
            spans.setdefault(where, []).append(found)
    return spans


def _step_us(step: Sequence[float], seqs: Number, context: Number) -> Number:
    base, per_seq, per_context = step
    return base + per_seq * seqs + per_context * context


def _together(served: Sequence[_Served], chunk: Tokens) -> list[_Together]:
    """The prefills that shared passes: their times overlap by more than the clocks err."""
    found: list[_Together] = []
    by_instance = _spans(
        list(range(len(served))), lambda at: served[at].row.prefill, lambda at: (at,)
    )
    for where, them in by_instance.items():
        numbers = sorted((at for (at,) in them), key=lambda at: served[at].computed_us)
        groups: list[list[int]] = []
        end_us = 0.0
        for at in numbers:
            begin, end = served[at].computed_us
            if served[at].prompt <= served[at].cached or end <= begin:
                continue
            if groups and begin < end_us - min(_UNSURE_US, (end - begin) / 4):
                groups[-1].append(at)
                end_us = max(end_us, end)
            else:
                groups.append([at])
                end_us = end
        found += [
            _of_group(where, [served[at] for at in group], min(group), chunk) for group in groups
        ]
    return found


def _of_group(where: InstanceId, them: Sequence[_Served], first: int, chunk: Tokens) -> _Together:
    all_features = [prefill_features(one.prompt, one.cached, chunk) for one in them]
    _, new, square, past = (sum(column) for column in zip(*all_features, strict=True))
    begin_us = min(one.computed_us[0] for one in them)
    end_us = max(one.computed_us[1] for one in them)
    return _Together(
        where, len(them), first, begin_us, end_us, (-(-new // chunk), new, square, past)
    )


def _is_apart(one: _Served, prefills: Mapping[InstanceId, _Load]) -> bool:
    """Whether it met no other prefill at its instance, from its arrival until its own began."""
    assert one.row.prefill is not None
    began_us = one.computed_us[0]
    _, seqs_us, _ = prefills[one.row.prefill].between(one.arrived_us, began_us)
    return seqs_us - (began_us - one.called_us) < _ALONE * (one.prefilled_us - one.arrived_us)


class _Activity:
    """When instances computed, and how many at a time."""

    def __init__(self, served: Sequence[_Served]) -> None:
        prefills = _spans(served, lambda it: it.row.prefill, lambda it: it.computed_us)
        decodes = _spans(served, lambda it: it.row.decode, lambda it: it.decoded_us)
        spans = {
            where: _joined([*prefills.get(where, ()), *decodes.get(where, ())])
            for where in sorted({*prefills, *decodes})
        }
        self._busy = _Load((*span, 0.0) for them in spans.values() for span in them)
        in_order = sorted(span for them in spans.values() for span in them)
        self._begins = np.array([begin for begin, _ in in_order])
        self._latest = np.maximum.accumulate([end for _, end in in_order])

    def idle_us(self, at_us: float) -> float:
        """For how long none had computed then; very long before the first time."""
        before = int(np.searchsorted(self._begins, at_us))
        return max(0.0, at_us - float(self._latest[before - 1])) if before else _LONG_US

    def slowed(self, cores: float) -> Callable[[float, float], float]:
        """Returns by what factor passes between two times were longer, with so many cores."""
        if not cores:
            return lambda begin, end: 1.0
        busy = self._busy
        busy.weigh(lambda seqs, _: np.maximum(1.0, seqs / cores))

        def slowed(begin: float, end: float) -> float:
            alone_us, _, _ = busy.between(begin, end)
            return max(1.0, (end - begin) / alone_us) if alone_us else 1.0

        return slowed


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that at least one of these covers."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
