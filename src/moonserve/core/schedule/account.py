"""The account of requests: a record of each, and sums over them.

It reads the facts that a driver gives to the Conductor and the actions that come back, and what the
drivers of requests measured; it decides nothing. Its memory is bounded by the requests under way
and by `KEPT`.

A request is over when its driver has closed it and the Conductor has released it, whichever comes
last: only then is its record complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import (
    Action,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
    Spread,
)
from moonserve.core.schedule.adoption import Adopted, Deposed, StepFact
from moonserve.core.schedule.facts import Arrived, CallFailed, DecodeEnded, PrefillEnded
from moonserve.core.schedule.record import KEPT_CALLS, FailedCall, Measured, Record
from moonserve.core.units import BlockKey, Micros, RequestId, Tokens

KEPT = 500
"""Records of requests that are over. A record has some kilobytes and is written once: many more
would evict from the processor's caches what every request needs."""


class Account:
    """Records and sums."""

    def __init__(
        self,
        slo_of: Callable[[Request], Slo],
        on_ended: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """slo_of: gives a request's objectives. on_ended: is called with each record that is
        complete; the keys are dropped afterwards."""
        self._slo_of = slo_of
        self._on_ended = on_ended
        self._held: dict[RequestId, Record] = {}
        """Requests that the Conductor has not released."""
        self._served: dict[RequestId, Record] = {}
        """Requests that their drivers have not closed."""
        self._over: OrderedDict[RequestId, Record] = OrderedDict()
        """The latest that are over, the last one last."""
        self.placed = 0
        """How many requests were placed, ever."""
        self.waited_us: Micros = 0
        """How long all of them together waited for that at the Conductor."""
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
        return len(self._held)

    def has(self, request: RequestId) -> bool:
        """Whether a request of this id has arrived here, and its driver has not closed it."""
        return request in self._served

    def find(self, request: RequestId) -> Record | None:
        """The record of the latest request of this id; None: none is kept."""
        return self._served.get(request) or self._held.get(request) or self._over.get(request)

    def latest(self) -> Iterator[Record]:
        """All records that are kept, the latest first; those under way before those over."""
        yield from reversed(self._under_way())
        yield from reversed(self._over.values())

    def _under_way(self) -> list[Record]:
        """Records that are not complete, each once, in order of arrival."""
        records = [*self._served.values(), *(it for it in self._held.values() if it.is_closed)]
        return sorted(records, key=lambda record: record.arrived_us)

    def take(self, now_us: Micros, facts: Iterable[StepFact], actions: Iterable[Action]) -> None:
        """Take in one step of the Conductor: its facts and its actions."""
        again: dict[RequestId, Record] = {}  # their id's last request is released in this step
        deposed = False
        for fact in facts:
            if isinstance(fact, Arrived):
                record = self._arrived(fact.request, fact.keys, now_us)
                where = again if record.id in self._held else self._held
                where[record.id] = record
            elif isinstance(fact, (DecodeEnded, PrefillEnded)):
                held = self._held.get(fact.request)
                if held is not None and held.number == fact.number:  # else of an earlier call
                    self._ended(held, fact, now_us)
            elif isinstance(fact, CallFailed):
                held = self._held.get(fact.request)
                if held is not None and held.number == fact.number:
                    _failed(held, fact, now_us)
            elif isinstance(fact, Adopted):
                self._adopted(fact, now_us)
            elif isinstance(fact, Deposed):
                deposed = True
        for action in actions:
            if isinstance(action, Release):
                record = self._held.pop(action.request)
                record.ended_us = now_us
                if record.is_closed:
                    self._complete(record)
                if action.request in again:
                    self._held[action.request] = again.pop(action.request)
            elif isinstance(action, (Prefill, Decode, Refuse, GiveUp, Spread)):
                self._act(self._held[action.request], action, now_us)
        if deposed:
            self._depose()

    def first_token(self, request: RequestId, now_us: Micros, cached: Tokens | None) -> None:
        """The driver has seen the request's first token; cached: see Measured."""
        record = self._served.get(request)
        if record is not None:
            if record.first_us is None:
                record.first_us = now_us
            if cached is not None:
                record.measured = Measured(cached_tokens=cached)

    def close(self, request: RequestId, outcome: str, measured: Measured) -> None:
        """The driver has closed the request."""
        record = self._served.pop(request, None)
        if record is None:
            return
        record.outcome = outcome
        record.is_closed = True
        cached = record.measured.cached_tokens
        if measured.cached_tokens is None and cached is not None:
            measured = msgspec.structs.replace(measured, cached_tokens=cached)
        record.measured = measured
        if record.ended_us is not None:
            self._complete(record)

    # One request.

    def _arrived(self, request: Request, keys: Sequence[BlockKey], now_us: Micros) -> Record:
        record = Record(
            request.id,
            request.model,
            request.tenant,
            request.priority,
            request.length,
            keys,
            self._slo_of(request),
            request.since_us(now_us),
            request.trace,
        )
        self._served[request.id] = record
        return record

    def _adopted(self, fact: Adopted, now_us: Micros) -> None:
        """Another Conductor has placed it. What that one had spent before is not known."""
        record = self._arrived(fact.request, fact.keys, now_us)
        self._held[record.id] = record
        record.decision = fact.decision
        record.attempts = len(fact.leases)
        record.outcome = "running"
        record.number = fact.number
        record.first_us = fact.first_us
        if fact.decodes:
            record.decode_us = record.prefilled_us = fact.called_us
        else:
            record.prefill_us = fact.called_us
            record.predicted_us = sum([share.work_us for share in fact.decision.shares])

    def _ended(self, record: Record, fact: PrefillEnded | DecodeEnded, now_us: Micros) -> None:
        """A call has ended."""
        if isinstance(fact, DecodeEnded):
            self._done(record, now_us, fact.tokens)
            return
        record.prefilled_us = now_us
        record.spent_us = record.predicted_us
        record.predicted_us = 0
        decision = record.decision
        assert decision is not None, "a decision goes before each call"
        if record.first_us is None and decision.connector == "embedded":
            record.first_us = now_us  # other engines' prefills give the client no token
        if fact.final:
            self._done(record, now_us, 1)

    def _act(
        self, record: Record, action: Prefill | Decode | Refuse | GiveUp | Spread, now_us: Micros
    ) -> None:
        match action:
            case Prefill():
                self._prefill(record, action, now_us)
            case Decode():
                record.number = action.number
                record.decode_us = now_us
                decision = record.decision
                if decision is not None and decision.decode != action.to.id:
                    record.decision = msgspec.structs.replace(decision, decode=action.to.id)
            case Refuse() | GiveUp():
                self._waste(record, now_us)
                record.error = action.why
                if isinstance(action, Refuse):
                    record.reason = action.reason
                    record.decision = action.decision
                    record.candidates = action.candidates
            case Spread():
                record.spread = action

    def _prefill(self, record: Record, action: Prefill, now_us: Micros) -> None:
        decision = action.decision
        self._waste(record, now_us)
        if not record.attempts:
            self.placed += 1
            self.waited_us += decision.waited_us
        record.decision = decision
        record.candidates = action.candidates
        record.attempts += 1
        record.outcome = "running"
        record.number = action.number
        record.prefill_us = now_us
        record.prefilled_us = record.decode_us = None
        record.predicted_us = sum([share.work_us for share in decision.shares])
        self.shared += bool(action.group)

    def _waste(self, record: Record, now_us: Micros) -> None:
        """Its last prefill was wasted: all of it, or the part that was done."""
        wasted_us = record.spent_us
        if record.predicted_us and record.prefill_us is not None and record.decision is not None:
            decision = record.decision
            lag_us = max(1, decision.predicted_ttft_us - decision.waited_us)
            part = min(1.0, (now_us - record.prefill_us) / lag_us)
            wasted_us += round(part * record.predicted_us)
        record.wasted_us += wasted_us
        self.wasted_us += wasted_us
        record.spent_us = record.predicted_us = 0

    def _done(self, record: Record, now_us: Micros, tokens: Tokens) -> None:
        """Its answer is complete."""
        slo = record.slo
        first_us = record.prefilled_us if record.first_us is None else record.first_us
        assert first_us is not None, "prefill goes before decode"
        in_time = slo.ttft_us is None or first_us - record.arrived_us <= slo.ttft_us
        gaps = max(0, tokens - 1)
        record.is_good = in_time and (slo.tbt_us is None or now_us - first_us <= slo.tbt_us * gaps)
        if record.is_good:
            self.good += 1
            self.good_tokens += record.prompt_tokens + tokens

    # Records that are not under way any more.

    def _complete(self, record: Record) -> None:
        _settle_first(record)
        self._on_ended(record)
        self._keep(record)

    def _keep(self, record: Record) -> None:
        record.keys = ()
        self._over.pop(record.id, None)  # an earlier request of this id
        self._over[record.id] = record
        while len(self._over) > KEPT:
            self._over.popitem(last=False)

    def _depose(self) -> None:
        """Another Conductor leads, and adopts all requests."""
        for record in self._under_way():
            record.outcome = "with another Conductor"
            self._keep(record)
        self._held.clear()
        self._served.clear()


def _settle_first(record: Record) -> None:
    """Say when its first token came, now that it is known whether one came."""
    if record.is_good is None:
        if not record.measured.tokens:
            record.first_us = None  # a prefill ended, and its token came to nobody
    elif record.first_us is None and record.decision is not None and record.decision.joint:
        record.first_us = record.prefilled_us  # the reply did not show it: as predicted


def _failed(record: Record, fact: CallFailed, now_us: Micros) -> None:
    """A call that was out has failed."""
    decision, began_us = record.decision, record.prefill_us
    decodes = record.decode_us is not None
    if decodes:
        began_us = record.decode_us
    if decision is None or began_us is None:
        return
    instance = decision.decode if decodes else fact.member or decision.prefill
    call = FailedCall(instance, decodes, began_us, now_us, fact.why, fact.said)
    record.failed = (*record.failed, call)[-KEPT_CALLS:]
