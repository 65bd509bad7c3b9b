"""How long outputs will be: the chance that a decode still runs at a later moment.

core.schedule.forecast asks; core.schedule.decode_forecast reports outputs that ended. Nothing here
knows an instance. Source: arXiv 2407.00079 "Mooncake", section 7.4 (one decode time for all); the
rest is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, Protocol, TypeAlias

from moonserve.core.errors import ConfigError
from moonserve.core.request import Request
from moonserve.core.units import Micros, RequestId, Tokens

PredictorName: TypeAlias = Literal["uniform", "survival", "oracle"]
_Class: TypeAlias = tuple[str, str, int, int]

PER_OCTAVE = 4
BINS = 20 * PER_OCTAVE
"""Histograms of lengths have this many bins, and as many to an octave."""
_EDGES: Sequence[float] = tuple(2 ** (at / PER_OCTAVE) for at in range(BINS + 1))
_WIDTHS: Sequence[float] = tuple(high - low for low, high in pairwise(_EDGES))
_PRIOR_TOKENS = 256.0
"""Scale of outputs before any was seen, like a median."""
_PRIOR: Sequence[float] = tuple((1 + edge / _PRIOR_TOKENS) ** -2 for edge in _EDGES)
_PRIOR_WEIGHT = 8.0
"""The prior weighs as much as this many outputs; so does the mean over all classes in a class."""
_HALVED_AT = 4_096
"""The number of outputs in a histogram at which all earlier ones are halved."""
_STALE = 64
"""A histogram's table is made anew after this many outputs, or a sixteenth of those seen."""
_MOST_CLASSES = 256


class Lengths:
    """Output lengths seen, as the share that exceeds a length; `wider` is used while there are few.

    A histogram of quarter octaves: bounded, and old outputs fade. Before any output was seen, a
    tail with the power -2: an output that has lasted long is expected to last as long again.
    """

    def __init__(self, wider: Lengths | None = None) -> None:
        self._wider = wider
        self._counts = [0.0] * BINS
        self._cuts: dict[Tokens, int] = {}
        """Lengths at which outputs were cut off, not yet in `_counts`, with their numbers."""
        self._total = 0.0
        self._seen = 0
        self._shares: list[float] = []
        self._means: list[float] = []
        self._asked = (-1, 0.0)
        """The bound of the latest mean, and that mean."""
        self._until = (-1, -1)
        """Outputs seen, its own and the wider's, up to which `_shares` and `_means` are used: they
        are read far more often than outputs end."""

    def add(self, tokens: Tokens) -> None:
        """One output ended at this length."""
        self._counts[_bin(tokens)] += 1
        self._added()

    def add_cut(self, tokens: Tokens) -> None:
        """One output was cut off at this length: it would have gone on like others of this length.

        Its weight goes to the lengths beyond, as far as these are known: Efron's way to the
        estimate of Kaplan and Meier (1958), as far as that can be done without keeping the sample.
        """
        self._table()  # with those before it, where that is due
        self._cuts[tokens] = self._cuts.get(tokens, 0) + 1
        self._added()

    def _place_cuts(self) -> None:
        cuts = self._cuts
        self._cuts = {}
        shares = self._shares
        for tokens, count in cuts.items():
            first = _bin(tokens)
            left = whole = _beyond(shares, tokens)
            for at in range(first, BINS - 1):
                self._counts[at] += count * (left - shares[at + 1]) / whole
                left = shares[at + 1]
            self._counts[BINS - 1] += count * left / whole

    def _added(self) -> None:
        self._total += 1
        self._seen += 1
        if self._total >= _HALVED_AT:
            self._place_cuts()
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2

    def beyond(self, tokens: float) -> float:
        """The share of outputs that are longer; above zero."""
        return _beyond(self._table(), tokens)

    def mean(self, most: Tokens = 1 << 20) -> float:
        """Expected length, where outputs are cut off at `most`."""
        shares = self._table()
        if most != self._asked[0]:
            at = _bin(most)
            width = max(0.0, min(most, _EDGES[BINS]) - _EDGES[at])
            mean = self._means[at] + width * (shares[at] + self.beyond(most)) / 2
            self._asked = (most, mean)
        return self._asked[1]

    def _table(self) -> list[float]:
        """Shares at the edges; made anew only after enough new outputs."""
        wider = self._wider
        seen = 0 if wider is None else wider._seen
        own, others = self._until
        if self._seen <= own and seen <= others:
            return self._shares
        self._place_cuts()
        prior = _PRIOR if wider is None else wider._table()
        above = list(accumulate(reversed(self._counts), initial=0.0))
        weight = _PRIOR_WEIGHT + self._total
        pairs = zip(reversed(above), prior, strict=True)
        self._shares = [(count + _PRIOR_WEIGHT * share) / weight for count, share in pairs]
        sides = zip(self._shares, self._shares[1:], _WIDTHS, strict=False)
        parts = [(a + b) / 2 * width for a, b, width in sides]
        self._means = list(accumulate(parts, initial=1.0))
        self._asked = (-1, 0.0)
        self._until = (_will_do(self._seen), _will_do(seen))
        return self._shares


def _bin(tokens: Tokens) -> int:
    """The quarter octave of this length."""
    return min(BINS - 1, int(PER_OCTAVE * math.log2(max(1, tokens))))


def _beyond(shares: Sequence[float], tokens: float) -> float:
    """The share of outputs that are longer; above zero."""
    if tokens <= 1:
        return shares[0]
    place = PER_OCTAVE * math.log2(tokens)
    at = int(place)
    if at >= BINS:
        return shares[BINS]
    return shares[at] + (place - at) * (shares[at + 1] - shares[at])


def _will_do(seen: int) -> int:
    """The number of outputs up to which a table made of this many is used."""
    return seen + min(seen // 16, _STALE)


class Chance:
    """The probability that one output has more tokens, and takes longer, than these.

    shares: the shares of outputs that exceed a length, by bin; None: all do. The probability is 0
    from `most` tokens on, and from `most_us` on.
    """

    __slots__ = ("most", "most_us", "shares")

    def __init__(
        self,
        shares: Sequence[float] | None = None,
        most: float = math.inf,
        most_us: float = math.inf,
    ) -> None:
        self.shares = shares
        self.most = most
        self.most_us = most_us

    def of(self, tokens: float, us: Micros) -> float:
        """The probability. core.schedule.forecast has the same in its loop."""
        if tokens >= self.most or us >= self.most_us:
            return 0.0
        return 1.0 if self.shares is None else _beyond(self.shares, tokens)


class Residency:
    """One decode on one instance, promised or under way.

    context: tokens that it will have there. due_us: when its prefill should end, or when it ended.
    length: the distribution of its output's length, or that length. most: its max_tokens.
    """

    __slots__ = ("began_tokens", "context", "due_us", "expected", "lag_us", "length", "most")

    def __init__(
        self,
        context: Tokens,
        due_us: Micros = 0,
        length: Lengths | Tokens = 0,
        most: Tokens = 0,
        expected: float = 0.0,
    ) -> None:
        self.context = context
        self.due_us = due_us
        self.length = length
        self.most = most
        self.expected = expected
        """Its output's mean length, as predicted when it was promised."""
        self.lag_us: Micros = 0
        """Predicted time from its admission to its hand-over."""
        self.began_tokens = 0.0
        """The instance's count of passes when it began."""


class Predictor(Protocol):
    """Predicts how long decodes last."""

    learned: int
    """Outputs that it learned from."""

    def residency(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """A decode to come, which takes over from prefill at `due_us`. Changes nothing."""
        ...

    def promise(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """The same for a request that is placed: its class of outputs is remembered."""
        ...

    def lasts(self, residency: Residency) -> Chance:
        """The chances of a decode; valid until an output ends.

        If it has tokens already, divide by its chance for now: see core.schedule.forecast.
        """
        ...

    def ended(self, request: Request, tokens: Tokens, took_us: Micros | None) -> None:
        """An output ended at this length, after this time in decode; None: without decode."""
        ...

    def left(self, request: Request, tokens: Tokens) -> None:
        """A client left when its output had this length."""
        ...


def predictor_of(
    name: PredictorName, length_of: Callable[[RequestId], Tokens] | None = None
) -> Predictor:
    """A predictor by its name. Raises ConfigError if the oracle has no lengths."""
    if name == "uniform":
        return Uniform()
    if name == "survival":
        return Survival()
    if length_of is None:
        raise ConfigError("oracle works in simulation only; use survival or uniform", "predictor")
    return Oracle(length_of)


class Uniform:
    """Every decode takes the mean time of past decodes: the paper's t_d, literally.

    Before any decode was seen, none is expected to last. The predicted load is low by design:
    decodes that end sooner than t_d are gone, and decodes that last longer are left out as well.
    """

    def __init__(self) -> None:
        self.learned = 0
        self.mean_us = 0.0
        self._tokens = 0.0
        self._seen = 0

    def residency(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor."""
        return Residency(context, due_us, expected=self._tokens)

    def promise(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor: there are no classes."""
        return self.residency(request, context, due_us)

    def lasts(self, residency: Residency) -> Chance:
        """See Predictor."""
        return Chance(most_us=self.mean_us)

    def ended(self, request: Request, tokens: Tokens, took_us: Micros | None) -> None:
        """See Predictor."""
        if took_us is None:
            return
        self.learned += 1
        self._seen = min(self._seen + 1, 256)
        self.mean_us += (took_us - self.mean_us) / self._seen
        self._tokens += (tokens - self._tokens) / self._seen

    def left(self, request: Request, tokens: Tokens) -> None:
        """See Predictor: only whole decodes count."""


class Survival:
    """Lengths learned online by model, tenant, max_tokens and prompt length, given the age.

    An output that its client left, or that max_tokens ended, would have been longer: see
    Lengths.add_cut.
    """

    def __init__(self) -> None:
        self.learned = 0
        self._all: dict[str, Lengths] = {}
        self._classes: dict[_Class, Lengths] = {}

    def residency(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor."""
        lengths = self._classes.get(_class_of(request))
        if lengths is None:
            lengths = Lengths(self._all.get(request.model) or Lengths())
        return _residency(lengths, request, context, due_us)

    def promise(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor."""
        return _residency(self._of(request), request, context, due_us)

    def lasts(self, residency: Residency) -> Chance:
        """See Predictor."""
        length = residency.length
        assert isinstance(length, Lengths), "a residency of this predictor's"
        return Chance(length._table(), residency.most)

    def ended(self, request: Request, tokens: Tokens, took_us: Micros | None) -> None:
        """See Predictor."""
        if tokens >= request.stopping.max_tokens:
            self.left(request, tokens)
            return
        self.learned += 1
        self._of(request).add(tokens)
        self._all[request.model].add(tokens)

    def left(self, request: Request, tokens: Tokens) -> None:
        """See Predictor."""
        self.learned += 1
        self._of(request).add_cut(tokens)
        self._all[request.model].add_cut(tokens)

    def _of(self, request: Request) -> Lengths:
        """The lengths of its class; the least recently used classes are forgotten."""
        key = _class_of(request)
        found = self._classes.pop(key, None)
        if found is None:
            found = Lengths(self._all.setdefault(request.model, Lengths()))
            if len(self._classes) >= _MOST_CLASSES:
                del self._classes[next(iter(self._classes))]
        self._classes[key] = found
        return found


def _residency(lengths: Lengths, request: Request, context: Tokens, due_us: Micros) -> Residency:
    most = request.stopping.max_tokens
    return Residency(context, due_us, lengths, most, lengths.mean(most))


def _class_of(request: Request) -> _Class:
    """Its model and tenant, and the sizes of its max_tokens and prompt in powers of two."""
    most = request.stopping.max_tokens
    prompt = request.length
    return (request.model, request.tenant, most.bit_length(), prompt.bit_length() // 2)


class Oracle:
    """Knows every length beforehand: in simulation, as the upper bound."""

    def __init__(self, length_of: Callable[[RequestId], Tokens]) -> None:
        self.learned = 0
        self._length_of = length_of

    def residency(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor."""
        length = self._length_of(request.id)
        return Residency(context, due_us, length, expected=length)

    def promise(self, request: Request, context: Tokens, due_us: Micros) -> Residency:
        """See Predictor: there are no classes."""
        return self.residency(request, context, due_us)

    def lasts(self, residency: Residency) -> Chance:
        """See Predictor."""
        length = residency.length
        assert isinstance(length, int), "a residency of this predictor's"
        return Chance(most=length)

    def ended(self, request: Request, tokens: Tokens, took_us: Micros | None) -> None:
        """See Predictor: the oracle learns nothing."""

    def left(self, request: Request, tokens: Tokens) -> None:
        """See Predictor."""
