"""The mailbox around core.conductor: facts are collected, one instant at a time, and stepped.

Anyone on the event loop may `tell` it a fact; requests `open` a life and read what the Conductor
wants from their inbox. Nothing here decides; nothing here awaits an instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moonserve.core.actions import Abort, Action, Decode, GiveUp, Prefill, Release
from moonserve.core.conductor import Conductor
from moonserve.core.facts import Arrived, Fact
from moonserve.core.placement import Decision
from moonserve.core.request import Request
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, Tokens
from moonserve.live.clock import LoopClock

log = logging.getLogger(__name__)

_KEPT_RECORDS = 1_000


class Record(msgspec.Struct):
    """What became of one request: the decision, and later the truth beside the prediction."""

    decision: Decision
    attempts: int
    arrived_us: Micros
    ttft_us: Micros | None = None
    cached_tokens: Tokens | None = None
    outcome: str = "running"


def lease_of(request: RequestId, number: int) -> LeaseId:
    """The lease that a prefill call takes on the store, and its decode call after it.

    One per attempt, so that the late end of an aborted attempt cannot touch its successor's.
    """
    return LeaseId(f"{request}/{number}")


class ConductorLoop:
    """Drives one Conductor on the running event loop."""

    def __init__(self, conductor: Conductor, release: Callable[[LeaseId], None]) -> None:
        self.core = conductor
        self.now_us = LoopClock().now_us
        self._release = release
        self._inboxes: dict[RequestId, asyncio.Queue[Any]] = {}
        self._facts: list[Fact] = []
        self._arrived: dict[RequestId, Micros] = {}
        self.records: OrderedDict[RequestId, Record] = OrderedDict()
        """The latest requests' decisions, bounded; read by the API and by `ask`."""

    def tell(self, *facts: Fact) -> None:
        """Hand over facts; they are stepped together with all others of this turn of the loop."""
        if not self._facts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._facts.extend(facts)

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: asyncio.Queue[Any]) -> None:
        """A request arrives; the Conductor's actions for it go to `inbox`."""
        assert request.id not in self._inboxes, "request ids are unique"
        self.records.pop(request.id, None)  # an earlier request of this id
        self._inboxes[request.id] = inbox
        self._arrived[request.id] = self.now_us()
        self.tell(Arrived(request, tuple(keys)))

    def close(self, request: RequestId, outcome: str) -> None:
        """The request's task has ended; whatever the Conductor still says of it is dropped."""
        self._inboxes.pop(request, None)
        self._arrived.pop(request, None)
        record = self.records.get(request)
        if record is not None:
            record.outcome = outcome

    def known(self, request: RequestId) -> bool:
        """Whether a request of this id is under way."""
        return request in self._inboxes

    def first_token(self, request: RequestId, cached_tokens: Tokens) -> None:
        """Prefill gave its token: note the measured TTFT beside the predicted one."""
        record = self.records.get(request)
        if record is not None and record.ttft_us is None:
            record.ttft_us = self.now_us() - record.arrived_us
            record.cached_tokens = cached_tokens

    def _flush(self) -> None:
        facts, self._facts = self._facts, []
        actions = None
        try:
            actions = self.core.step(self.now_us(), facts)
        finally:
            if actions is None:  # a bug, which the loop logs: nobody shall wait for ever
                for request, inbox in self._inboxes.items():
                    inbox.put_nowait(GiveUp(request, "the Conductor failed"))
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Release(request, numbers):
                for number in numbers:
                    self._release(lease_of(request, number))
                return
            case Prefill(request, number, to, decision):
                self._record(request, decision)
                log.debug("%s: call %d: prefill on %s", request, number, to.id)
            case Decode(request, number, to):
                log.debug("%s: call %d: decode on %s", request, number, to.id)
                record = self.records.get(request)
                if record is not None:
                    record.decision = msgspec.structs.replace(record.decision, decode=to.id)
            case Abort(request, number, why):
                log.warning("%s: call %d aborted: %s", request, number, why)
            case _:
                log.warning("%s: %s", action.request, action.why)
        inbox = self._inboxes.get(action.request)
        if inbox is not None:
            inbox.put_nowait(action)

    def _record(self, request: RequestId, decision: Decision) -> None:
        old = self.records.get(request)
        if old is not None:
            old.decision = decision
            old.attempts += 1
            return
        arrived_us = self._arrived.get(request, self.now_us())
        self.records[request] = Record(decision, attempts=1, arrived_us=arrived_us)
        while len(self.records) > _KEPT_RECORDS:
            self.records.popitem(last=False)
