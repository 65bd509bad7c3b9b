"""Sums over requests: how many were served within their objectives, how much prefill was wasted.

It reads the facts that a driver gives to the Conductor and the actions that come back; it decides
nothing. Its memory is bounded by the requests under way. Times are the Conductor's: TTFT lasts
until PrefillEnded arrives, TBT is the mean over an answer's gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.adoption import Adopted, Deposed, StepFact
from moonserve.core.schedule.facts import Arrived, DecodeEnded, PrefillEnded
from moonserve.core.units import Micros, RequestId, Tokens


class _Open:
    """One request under way."""

    __slots__ = (
        "began_us", "first_us", "lag_us", "number", "predicted_us", "request", "since_us",
        "spent_us",
    )  # fmt: skip

    def __init__(self, request: Request, since_us: Micros) -> None:
        self.request = request
        self.since_us = since_us
        self.number = 0
        """Of the call that is out."""
        self.predicted_us: Micros = 0
        """Work of the prefill call that is out; 0: none is."""
        self.began_us: Micros = 0
        self.lag_us: Micros = 1
        """When it went out, and how long it was predicted to take, waiting included."""
        self.spent_us: Micros = 0
        """Work of the latest prefill, once it has ended."""
        self.first_us: Micros | None = None


class Account:
    """Sums over requests; `slo_of` gives a request's objectives."""

    def __init__(self, slo_of: Callable[[Request], Slo]) -> None:
        self._slo_of = slo_of
        self._open: dict[RequestId, _Open] = {}
        self.good = 0
        """Requests served within their objectives."""
        self.good_tokens: Tokens = 0
        """Of those, input and output."""
        self.wasted_us: Micros = 0
        """Predicted prefill time of requests that were dropped or failed later, or had to be done
        again. Of a call that did not end, the part for which it had time."""
        self.shared = 0
        """Prefill calls that a group of instances was given."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, now_us: Micros, facts: Iterable[StepFact], actions: Iterable[Action]) -> None:
        """Take in one step of the Conductor: its facts and its actions."""
        again: dict[RequestId, _Open] = {}  # their id's last request is released in this step
        deposed = False
        for fact in facts:
            if isinstance(fact, Arrived):
                request = fact.request
                where = again if request.id in self._open else self._open
                where[request.id] = _Open(request, request.since_us(now_us))
            elif isinstance(fact, Adopted):
                self._open[fact.request.id] = _adopted(fact, now_us)
            elif isinstance(fact, (PrefillEnded, DecodeEnded)):
                life = self._open.get(fact.request)
                if life is None or life.number != fact.number:
                    continue  # of a call that is not the one that is out
                if isinstance(fact, DecodeEnded):
                    self._served(life, now_us, fact.tokens)
                    continue
                life.spent_us = life.predicted_us
                life.predicted_us = 0
                life.first_us = now_us if life.first_us is None else life.first_us
                if fact.final:
                    self._served(life, now_us, 1)
            elif isinstance(fact, Deposed):
                deposed = True
        for action in actions:
            if isinstance(action, Prefill):
                life = self._open[action.request]
                self._waste(life, now_us)
                life.number = action.number
                life.began_us = now_us
                decision = action.decision
                life.lag_us = max(1, decision.predicted_ttft_us - decision.waited_us)
                life.predicted_us = sum([share.work_us for share in decision.shares])
                self.shared += bool(action.group)
            elif isinstance(action, Decode):
                self._open[action.request].number = action.number
            elif isinstance(action, (Refuse, GiveUp)):
                self._waste(self._open[action.request], now_us)
            elif isinstance(action, Release):
                del self._open[action.request]
                if action.request in again:
                    self._open[action.request] = again.pop(action.request)
        if deposed:
            self._open.clear()

    def _waste(self, life: _Open, now_us: Micros) -> None:
        """Its last prefill was wasted: all of it, or the part that was done."""
        part = min(1.0, (now_us - life.began_us) / life.lag_us)
        self.wasted_us += life.spent_us + round(part * life.predicted_us)
        life.spent_us = life.predicted_us = 0

    def _served(self, life: _Open, now_us: Micros, tokens: Tokens) -> None:
        """Its answer is complete."""
        slo = self._slo_of(life.request)
        first_us = life.first_us
        assert first_us is not None, "prefill goes before decode"
        in_time = slo.ttft_us is None or first_us - life.since_us <= slo.ttft_us
        gaps = tokens - 1
        if in_time and (slo.tbt_us is None or now_us - first_us <= slo.tbt_us * gaps):
            self.good += 1
            self.good_tokens += life.request.length + tokens


def _adopted(fact: Adopted, now_us: Micros) -> _Open:
    """A request that another Conductor has placed. What that one had spent before is not known."""
    life = _Open(fact.request, fact.request.since_us(now_us))
    life.number = fact.number
    life.began_us = fact.called_us
    life.first_us = fact.first_us
    if fact.decodes:
        life.first_us = fact.called_us if fact.first_us is None else fact.first_us
    else:
        life.lag_us = max(1, fact.decision.predicted_ttft_us - fact.decision.waited_us)
        life.predicted_us = sum([share.work_us for share in fact.decision.shares])
    return life
