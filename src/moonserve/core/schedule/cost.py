"""What an engine pass and a KV transfer cost in time: linear forms, fitted from measured samples.

One form serves the Conductor, live and simulated, and what makes up time: fake engine, simulator:

    pass = base + a new + b square + c past + d seqs + e context

with one base for a pass that prefills and another one for a pass that only decodes: a pass reads
the weights once, also if it does both. new = tokens computed, square = sum(end^2 - start^2)
(attention), past = sum(start) over the chunks; see PassSample. Prefilling n tokens of which p are
cached then costs the papers' right form in (n - p), (n^2 - p^2) and p. Nothing here knows an
engine; all times are microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import Final, TypeAlias

from moonserve.core.engine.batch import Pass
from moonserve.core.schedule.facts import PassSample, TransferSample
from moonserve.core.units import Bytes, Micros, Tokens, nearest


class LinearFit:
    """Non-negative least squares, online: decayed normal equations, solved when asked.

    Errors count relative to the prediction: passes last from milliseconds to seconds. (Relative to
    the sample, slow ones would count less than fast ones, and a noisy machine be taken for a faster
    one.) A sample off by over `trust` times the usual counts less (Huber): a pass may have been
    descheduled.
    The prior is Gaussian around `prior` with a standard deviation of `doubt` times each
    coefficient, against samples that err by NOISE: a few samples of one kind cannot blow up a term
    that they hardly show. A prior coefficient of zero means that the term is absent.
    """

    NOISE: Final = 0.1
    """Relative error of one sample, as a standard deviation."""

    def __init__(
        self,
        prior: Sequence[float],
        scales: Sequence[float],
        doubt: Sequence[float],
        *,
        decay: float = 0.995,
        trust: float = 3.0,
    ) -> None:
        assert len(prior) == len(scales) == len(doubt)
        self._scales = tuple(scales)
        self._doubt = tuple(doubt)
        self._first = self._prior = self._scaled(prior)
        self._ridge = self._ridges(self._first)
        self._decay = decay
        self._trust = trust
        size = len(prior)
        self._xx = [[0.0] * size for _ in range(size)]
        self._xy = [0.0] * size
        self._sum_x = [0.0] * size
        self._sum_y = 0.0
        self._weights = list(self._prior)
        self._stale = False
        self.spread = 0.5
        """The mean relative error of samples, of late."""
        self.samples = 0

    def _scaled(self, coefficients: Sequence[float]) -> tuple[float, ...]:
        return tuple(c * s for c, s in zip(coefficients, self._scales, strict=True))

    def _ridges(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """How firmly each term is held to the prior, for terms of about these sizes."""
        return tuple(
            (self.NOISE / (d * p)) ** 2 if p else math.inf
            for d, p in zip(self._doubt, sizes, strict=True)
        )

    def lean_on(self, coefficients: Sequence[float]) -> None:
        """Take these for the prior; what was learned stays.

        It is doubted no less than the first prior: the truth may be far slower than a fast one.
        """
        self._prior = self._scaled(coefficients)
        self._ridge = self._ridges(list(map(max, self._prior, self._first)))
        if not self.samples:
            self._weights = list(self._prior)
        else:
            self._stale = True

    def predict(self, features: Sequence[float]) -> float:
        """The fitted value, never negative."""
        if self._stale:
            self._solve()
        return self._value(features)

    def coefficients(self) -> tuple[float, ...]:
        """The fitted weight of each feature, as it comes."""
        if self._stale:
            self._solve()
        return tuple(w / s for w, s in zip(self._weights, self._scales, strict=True))

    def balanced(self) -> tuple[float, ...]:
        """The coefficients, scaled so that they predict the sum of all samples as it was.

        A weighted fit need not: where large samples err most, as on a busy machine, it falls short.
        """
        found = self.predict(self._sum_x)
        ratio = self._sum_y / found if found else 1.0
        return tuple(ratio * weight for weight in self.coefficients())

    def observe(self, features: Sequence[float], value: float) -> None:
        """Learn from one sample; values of zero or below are measuring faults and are ignored."""
        if value <= 0:
            return
        if self._stale and self.samples % _SOLVE_EVERY == 0:
            self._solve()
        predicted = self._value(features)
        unit = min(max(predicted, value / _FAR), value * _FAR)
        relative = abs(predicted - value) / unit
        trusted = self.samples >= 2 * len(self._prior)
        weight = 1.0
        if trusted and relative > self._trust * self.spread:
            weight = self._trust * self.spread / relative
        self.spread = max(0.02, 0.95 * self.spread + 0.05 * min(relative, 1.0))
        row = [f / s / unit for f, s in zip(features, self._scales, strict=True)]
        height = value / unit
        for i, x in enumerate(row):
            line = self._xx[i]
            for j, other in enumerate(row):
                line[j] = self._decay * line[j] + weight * x * other
            self._xy[i] = self._decay * self._xy[i] + weight * x * height
        self._sum_x = [a + b for a, b in zip(self._sum_x, features, strict=True)]
        self._sum_y += value
        self.samples += 1
        self._stale = True

    def _value(self, features: Sequence[float]) -> float:
        pairs = zip(self._weights, features, self._scales, strict=True)
        return sum(w * f / s for w, f, s in pairs)

    def _solve(self) -> None:
        """Coordinate descent on the ridge problem with weights >= 0, from where it stood."""
        for _ in range(_SWEEPS):
            moved = 0.0
            for i, line in enumerate(self._xx):
                ridge = self._ridge[i]
                if ridge == math.inf:
                    continue
                others = sum(line[j] * w for j, w in enumerate(self._weights) if j != i)
                target = (self._xy[i] - others + ridge * self._prior[i]) / (line[i] + ridge)
                target = max(0.0, target)
                moved = max(moved, abs(target - self._weights[i]) / (target or 1.0))
                self._weights[i] = target
            if moved < 1e-4:
                break
        self._stale = False


# Microseconds per feature before anything was measured: a small model on two laptop cores.
# (prefill base, new, square, past, decode base, sequences, context)
LAPTOP_PASS = (20_000.0, 1_000.0, 0.05, 0.5, 40_000.0, 5_000.0, 5.0)
_PASS_SCALES = (1.0, 1e3, 1e6, 1e3, 1.0, 10.0, 1e3)  # typical sizes, so that the fit is well scaled
_PASS_DOUBT = (10.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0)
LAPTOP_TRANSFER = (2_000.0, 0.0005)
_TRANSFER_SCALES = (1.0, 1e6)
_TRANSFER_DOUBT = (10.0, 10.0)
_FAR = 3.0
"""A prediction further off than this factor does not weigh a sample; early ones are."""
_SWEEPS = 60
KNOWN_FROM = 8
"""The number of measured passes from which on a fit may refuse a request."""
_MOST_ERROR = 0.1
"""The largest error that makes predictions equal: beyond it, even a poor fit says something."""
CALLS_KEPT = 32
"""Calls whose times beside their work are kept; the usual one of them is predicted."""
LENDS_FROM = 4
"""The number of measured passes from which on a fit may be the prior of others."""
_STRANGER = 16.0
_LIKE = 2.0
"""By how much an instance without measurements may be faster than a laptop, or than its like."""
_SOLVE_EVERY = 16
"""Samples between solves while only learning: a heartbeat may bring hundreds."""


class Cost:
    """The costs of one instance: given, or given and then fitted to what it measures.

    `learns` False: the coefficients are the truth (a simulated or a fake engine's).
    """

    def __init__(
        self,
        pass_prior: Sequence[float] = LAPTOP_PASS,
        transfer_prior: Sequence[float] = LAPTOP_TRANSFER,
        *,
        learns: bool = True,
    ) -> None:
        self._pass = LinearFit(pass_prior, _PASS_SCALES, _PASS_DOUBT)
        self._transfer = LinearFit(transfer_prior, _TRANSFER_SCALES, _TRANSFER_DOUBT)
        lasting = {"decay": 1.0, "trust": math.inf}
        self._all_passes = LinearFit(pass_prior, _PASS_SCALES, _PASS_DOUBT, **lasting)
        self._all_transfers = LinearFit(
            transfer_prior, _TRANSFER_SCALES, _TRANSFER_DOUBT, **lasting
        )
        self._learns = learns
        self._beside_us: deque[Micros] = deque(maxlen=CALLS_KEPT)
        self.call_us: Micros = 0
        """What a prefill call usually takes beside its transfer and its passes: its way, loading
        KV that the instance has itself, publishing, and that the first pass of an idle machine is
        slow. 0: too few were measured."""
        self._lent = 0
        """Samples of the fit of its like, when that was taken for the prior; 0: it was not."""
        self._take()

    def prefill_us(self, length: Tokens, cached: Tokens, chunk: Tokens) -> Micros:
        """Compute time of a prompt of `length`, `cached` of it loaded, in passes of `chunk`."""
        if length <= cached:
            return 0
        return priced_us(self.prompt_us, prefill_features(length, cached, chunk))

    def decode_step_us(self, seqs: int, context: Tokens) -> Micros:
        """One token for each of `seqs` requests whose context lengths sum to `context`."""
        base, per_seq, per_context = self.step_us
        return round(base + per_seq * seqs + per_context * context)

    def pass_of_us(self, sample: PassSample) -> Micros:
        """The whole pass that `sample` describes; its elapsed_us is not read."""
        pairs = zip(self.pass_us, _pass_features(sample), strict=True)
        return round(sum(weight * feature for weight, feature in pairs))

    def transfer_us(self, size: Bytes) -> Micros:
        """Loading `size` bytes of KV from another segment; nothing for nothing."""
        return loaded_us(self.load_us, size)

    def observe(self, passes: Sequence[PassSample], transfers: Sequence[TransferSample]) -> None:
        """Learn from measured passes and loads."""
        if not self._learns or not (passes or transfers):
            return
        for sample in passes:
            for fit in (self._pass, self._all_passes):
                fit.observe(_pass_features(sample), sample.elapsed_us)
        for load in transfers:
            for fit in (self._transfer, self._all_transfers):
                fit.observe((1, load.size_bytes), load.elapsed_us)
        self._take()

    def took(self, beside_us: Micros) -> None:
        """Learn from a prefill call that met no other: what it took beside what was predicted."""
        if not self._learns:
            return
        self._beside_us.append(beside_us)
        if len(self._beside_us) >= KNOWN_FROM:
            self.call_us = max(0, median_low(self._beside_us))

    @property
    def known(self) -> bool:
        """Whether it is more than a prior: given as true, or fitted to some passes."""
        return not self._learns or self.samples >= KNOWN_FROM

    @property
    def samples(self) -> int:
        """How many passes it was fitted to."""
        return self._pass.samples

    @property
    def optimism(self) -> float:
        """How many times faster than predicted it may be, as long as it is not known; else 1.0."""
        if self.known:
            return 1.0
        most = _LIKE if self._lent else _STRANGER
        return float(most ** (1 - self.samples / KNOWN_FROM))

    def borrow(self, like: Cost) -> None:
        """Take the fit of an instance of the same kind for the prior, until this one is known."""
        samples = like.samples
        if self.known or not like._learns or samples < max(LENDS_FROM, 2 * self._lent):
            return
        if samples > self.samples:
            self._lent = samples
            self._pass.lean_on(like.pass_us)
            self._transfer.lean_on(like.load_us)
            self._take()

    def lasting(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """As (pass_us, load_us), but of all that was ever measured alike: for a profile."""
        return self._all_passes.balanced(), self._all_transfers.balanced()

    def _take(self) -> None:
        self.error = min(_MOST_ERROR, self._pass.spread) if self._learns else 0.0
        """By which share a prediction of one pass may err; 0: it is exact."""
        self.pass_us = self._pass.coefficients()
        """Microseconds per (prefill base, new, square, past, decode base, sequence, context)."""
        base, new, square, past, step, seq, context = self.pass_us
        self.prompt_us: PromptUs = (base, new, square, past)
        self.step_us: StepUs = (step, seq, context)
        load, byte = self._transfer.coefficients()
        self.load_us: LoadUs = (load, byte)
        """Microseconds per (load, byte)."""


PromptUs: TypeAlias = tuple[float, float, float, float]
"""Those of Cost.pass_us that price a prefill. Of known length, as the next two: compiled code then
reads the numbers without a call."""
StepUs: TypeAlias = tuple[float, float, float]
"""Those of Cost.pass_us that price a pass which only decodes."""
LoadUs: TypeAlias = tuple[float, float]
Features: TypeAlias = tuple[int, int, int, int]
"""Of a prefill: its passes, new tokens, their squares and what lies before them."""


def prefill_features(length: Tokens, cached: Tokens, chunk: Tokens) -> Features:
    """Those of a prompt of `length` that has `cached` of its tokens, in passes of `chunk`."""
    new = length - cached
    if new <= chunk:
        return 1, new, length * length - cached * cached, cached
    passes = -(-new // chunk)
    past = passes * cached + chunk * (passes * (passes - 1) // 2)
    return passes, new, length * length - cached * cached, past


def priced_us(prompt_us: PromptUs, features: Features) -> Micros:
    """The time of a prefill with these features. No coefficient that is lower, and no feature,
    makes it higher."""
    per_pass, per_new, per_square, per_past = prompt_us
    passes, new, square, past = features
    return nearest(per_pass * passes + per_new * new + per_square * square + per_past * past)


def loaded_us(load_us: LoadUs, size: Bytes) -> Micros:
    """The time of a load of `size` bytes; nothing for nothing. load_us: see Cost."""
    return nearest(load_us[0] + load_us[1] * size) if size else 0


def pass_sample(work: Pass, elapsed_us: Micros) -> PassSample:
    """A pass as the cost model's features; a chunk of one token counts as a decode."""
    new = square = past = seqs = context = 0
    for chunk in work.chunks:
        count = len(chunk.tokens)
        start = chunk.start
        if count == 1:
            seqs += 1
            context += start + 1
        else:
            new += count
            square += (start + count) ** 2 - start**2
            past += start
    return PassSample(new, square, past, seqs, context, elapsed_us, decodes=0 if new else 1)


def _pass_features(sample: PassSample) -> tuple[float, ...]:
    prefills = sample.prefills if sample.prefill_new else 0
    decodes = sample.decodes if sample.decode_seqs else 0
    return (
        prefills,
        sample.prefill_new,
        sample.prefill_square,
        sample.prefill_past,
        decodes,
        sample.decode_seqs,
        sample.decode_context,
    )
