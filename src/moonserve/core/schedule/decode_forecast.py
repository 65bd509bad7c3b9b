"""How full decode instances will be, and how long outputs are expected to be.

Kept by the Conductor: it reports every output that ended, and asks for the load that a new request
will meet when its prefill has ended. core.schedule.forecast computes one instance's load over time,
core.schedule.residency predicts how long each decode lasts. Nothing here refuses a request.
Source: arXiv 2407.00079 "Mooncake", section 7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moonserve.core.request import Request
from moonserve.core.schedule.estimate import DecodeLoad
from moonserve.core.schedule.facts import ClientGone, DecodeEnded, PrefillEnded
from moonserve.core.schedule.forecast import forecast, room_in_us
from moonserve.core.schedule.handoff import LifeFact
from moonserve.core.schedule.objectives import Objectives
from moonserve.core.schedule.policies import policy_of
from moonserve.core.schedule.residency import Residency, predictor_of
from moonserve.core.schedule.retry import RetryCalendar
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import Micros, RequestId, Tokens

_KEPT = 1_024


class ErrorSeries:
    """The errors of one prediction: their mean over all time, and the latest of them."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self.latest: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """Pairs (predicted, actual), the newest last."""

    def add(self, predicted: float, actual: float) -> None:
        """Note one more prediction and what came of it."""
        self.count += 1
        self._sum += predicted - actual
        self.latest.append((predicted, actual))

    @property
    def bias(self) -> float | None:
        """Mean of predicted less actual; None before the first."""
        return self._sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """That quantile of the sizes of the latest errors; None before the first."""
        if not self.latest:
            return None
        ordered = sorted(abs(predicted - actual) for predicted, actual in self.latest)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class PredictionErrors:
    """The series of one Conductor."""

    def __init__(self) -> None:
        self.tbt = ErrorSeries()
        """Time between tokens (us), predicted on admission for when the prefill has ended."""
        self.output = ErrorSeries()
        """Output lengths (tokens), predicted when decode begins."""


GROWTH = 1.01
"""Contexts grow while they decode: so much is kept of every TBT objective."""
_TAIL = 10
"""A request's TBT is the mean of the longest of so many of its gaps, at least of one (FAST'25)."""
_UNSEEN, _SEEN = 8, 256
"""Outputs that weigh as much as knowing nothing, and as many as are remembered."""


class DecodeForecast:
    """See the module. length_of: for the oracle."""

    def __init__(
        self,
        tuning: Tuning,
        objectives: Objectives,
        calendar: RetryCalendar,
        errors: PredictionErrors,
        length_of: Callable[[RequestId], Tokens] | None = None,
    ) -> None:
        self._tuning = tuning
        self._objectives = objectives
        self._calendar = calendar
        self._errors = errors
        self._turns = policy_of(tuning.policy).late
        self.predictor = predictor_of(tuning.predictor, length_of)
        self._outputs = 0.0
        """Mean output length seen, newer ones counting more."""
        self.expected_tokens: Tokens = 0
        """The same: the output to be expected of any request."""
        self._joined_share = 0.0
        """Mean over outputs of the part that the first gap has in a TBT as it is measured."""
        self._seen = 0

    def context(self, length: Tokens) -> Tokens:
        """The context of a prompt of this length, with the output to be expected."""
        return length + self.expected_tokens

    def residency(self, request: Request, length: Tokens, due_us: Micros) -> Residency:
        """The decode of a request of this length by now, which begins at `due_us`."""
        return self.predictor.residency(request, self.context(length), due_us)

    def promise(self, request: Request, length: Tokens, due_us: Micros) -> Residency:
        """The same for a request that is placed: its class of outputs is remembered."""
        return self.predictor.promise(request, self.context(length), due_us)

    @property
    def growth(self) -> float:
        """What TBT as measured will be, as a multiple of the pass that a request joins."""
        return GROWTH + self._tuning.join_passes * self._joined_share

    def load_for(
        self, request: Request, length: Tokens, now_us: Micros, among: int
    ) -> DecodeLoad | None:
        """The load of decode as admission sees it; None where what is promised there says it.

        among: the number of instances over which returning clients will spread.
        """
        mode = "none" if self._turns else self._tuning.mode(request.priority)
        if mode == "early":
            return _LoadNow(self.context(length))
        if mode != "predictive":
            return None
        return _LoadThen(self, request, self.context(length), now_us, among)

    def wait_us(self, request: Request, took_us: Micros) -> Micros:
        """How long it may wait for room in decode when its first token took so long."""
        share = self._tuning.held_share
        if self._calendar.is_due(request):
            share = max(share, self._tuning.due_share)
        ttft_us = self._objectives.own(request).ttft_us
        allowed_us = self._tuning.patience_us if ttft_us is None else ttft_us
        return round(share * max(0, allowed_us - took_us))

    def then_us(
        self,
        view: InstanceView,
        request: Request,
        context: Tokens,
        ends_us: Micros,
        now_us: Micros,
        among: int,
    ) -> tuple[Micros, Micros]:
        """TBT there once this request joins at `ends_us`: the mean, and the most; see load_for."""
        step = view.cost.step_us
        lag_us = ends_us - now_us
        mean_us, most_us = forecast(
            view.residencies,
            step,
            self.predictor.residency(request, context, ends_us),
            self.predictor,
            now_us,
            self._tuning.deviations,
            self.wait_us(request, lag_us),
            view.info.max_seqs,
        )
        unseen_us = self._tuning.overtaken * view.residencies.unseen_us(lag_us, now_us, step)
        _, per_seq, per_context = step
        returning = self._objectives.returning(request, now_us) / among
        unseen_us += returning * (per_seq + per_context * context)
        growth = self.growth if view.decodes else GROWTH  # no pass to wait for
        return round(mean_us + unseen_us), round(growth * (most_us + unseen_us))

    def interval_us(
        self, request: Request, decodes: Sequence[InstanceView], now_us: Micros
    ) -> float:
        """How long from one end of a decode to the next; 0.0 where there are no instances."""
        context = self.context(request.length)
        residency = self.predictor.residency(request, context, now_us)
        expected = max(1.0, residency.expected)
        ends = [max(1, one.decodes) / (expected * max(1, one.tbt_us(context))) for one in decodes]
        return 1 / sum(ends, 0.0) if any(ends) else 0.0

    def room_us(
        self, view: InstanceView, context: Tokens, least_us: Micros, now_us: Micros
    ) -> Micros:
        """How long until one more may decode there, if no other request comes."""
        goal_us = view.strictest_us()
        if goal_us is None or not view.decodes:
            return least_us
        goal_us = round(goal_us / self.growth)
        step = view.cost.step_us
        seqs = view.info.max_seqs
        return room_in_us(view.residencies, step, context, goal_us, self.predictor, now_us, seqs)

    def learn(
        self, fact: LifeFact, request: Request, view: InstanceView | None, now_us: Micros
    ) -> None:
        """Take in that a request's life has ended by this fact; it may have decoded at `view`."""
        residency = view.residencies.active.get(request.id) if view is not None else None
        match fact:
            case DecodeEnded(tokens=tokens):
                self._learn_output(request, residency, tokens, now_us)
            case PrefillEnded():
                self.predictor.ended(request, 1, None)
            case ClientGone() if residency is not None and view is not None:
                passes = view.residencies.passes(now_us, view.cost.step_us)
                self.predictor.left(request, max(1, round(passes - residency.began_tokens)))
            case _:
                pass

    def _learn_output(
        self, request: Request, residency: Residency | None, tokens: Tokens, now_us: Micros
    ) -> None:
        """An output is whole; without a residency its instance has restarted meanwhile."""
        self._outputs += (tokens - self._outputs) / 64
        self.expected_tokens = round(self._outputs)
        share = 1 / max(1, (tokens - 1) // _TAIL) if tokens > 1 else 0.0
        self._seen = min(self._seen + 1, _SEEN)
        self._joined_share += (share - self._joined_share) / (_UNSEEN + self._seen)
        if residency is not None:
            self._errors.output.add(residency.expected, tokens)
            self.predictor.ended(request, tokens, now_us - residency.due_us)


class _LoadNow:
    """Admission `early`: the decodes that are there now."""

    def __init__(self, context: Tokens) -> None:
        self._context = context

    def tbt_us(self, view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
        """See DecodeLoad."""
        return view.tbt_now_us(self._context), grown_us(view, self._context)


class _LoadThen:
    """Admission `predictive`: the decodes that will be there when the prefill has ended."""

    def __init__(
        self,
        forecast: DecodeForecast,
        request: Request,
        context: Tokens,
        now_us: Micros,
        among: int,
    ) -> None:
        self._forecast = forecast
        self._request = request
        self._context = context
        self._now_us = now_us
        self._among = among

    def tbt_us(self, view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
        """See DecodeLoad."""
        return self._forecast.then_us(
            view, self._request, self._context, ends_us, self._now_us, self._among
        )


def grown_us(view: InstanceView, context: Tokens) -> Micros:
    """TBT there for one that joins now, with what contexts grow."""
    return round(GROWTH * view.tbt_now_us(context))
