"""The mailbox around core.schedule.conductor: facts are collected, one instant at a time, and
stepped.

Anyone on the event loop may `tell` it a fact; requests `open` a life and read what the Conductor
wants from their inbox. One timer wakes the Conductor when it asked for that. Nothing here decides;
nothing here awaits an instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.index import Held
from moonserve.core.request import Request
from moonserve.core.schedule.account import Account
from moonserve.core.schedule.actions import (
    Abort,
    Action,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
    Spread,
)
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.decision import Candidate, Decision
from moonserve.core.schedule.facts import Arrived, Fact, InstanceInfo, Promises, SpreadUpTo
from moonserve.core.schedule.hot import Hot
from moonserve.core.schedule.prediction_errors import PredictionErrors
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView, Promised
from moonserve.core.units import (
    MICROS_PER_SECOND,
    BlockKey,
    InstanceId,
    LeaseId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
    lease_of,
)
from moonserve.live.clock import LoopClock
from moonserve.live.ports import Inbox

log = logging.getLogger(__name__)

Copy = Callable[[Sequence[BlockKey], SegmentId, SegmentId | None], Awaitable[int]]
"""Has the store copy blocks to a segment, from that one where it has them. Gives how many of the
first are there or will be. May raise MoonserveError or OSError."""

_KEPT_RECORDS = 500
"""Beside as many as are under way. One is some kilobytes, written once: many more would push what
every request needs out of the processor's caches."""


class Record(msgspec.Struct):
    """What became of one request: the decision, and later the truth beside the prediction."""

    arrived_us: Micros
    decision: Decision | None = None
    """The last one; for a refused request, what it would have been, if that was why."""
    candidates: Sequence[Candidate] = ()
    """Of that decision, the chosen one first."""
    attempts: int = 0
    """Prefill calls."""
    ttft_us: Micros | None = None
    tbt_us: Micros | None = None
    """Mean over the request's gaps."""
    cached_tokens: Tokens | None = None
    spread: Spread | None = None
    """The copy of its prefix that its placement called for."""
    outcome: str = "waiting"
    reason: str | None = None
    """Of a refusal: for programs."""
    error: str | None = None
    """Of a refusal or a failure: in words."""


class ConductorLoop:
    """Drives one Conductor on the running event loop. Implements ports.Conducting."""

    def __init__(
        self,
        conductor: Conductor,
        release: Callable[[LeaseId], None],
        copy: Copy | None = None,
        on_step: Callable[[Micros, list[Fact], list[Action]], None] | None = None,
    ) -> None:
        """`copy` None: the store makes no copies. on_step: is called with every step, for an
        account of the run (core.schedule.events)."""
        self.core = conductor
        self.now_us = LoopClock().now_us
        self.account = Account(conductor.slo)
        self._release = release
        self._copy = copy
        self._copying: set[asyncio.Task[None]] = set()
        self._inboxes: dict[RequestId, Inbox] = {}
        self._on_step = on_step
        self._watchers: list[Callable[[], None]] = []
        self._version = -1
        self._infos: list[InstanceInfo] = []
        self._facts: list[Fact] = []
        self._timer: asyncio.TimerHandle | None = None
        self.records: OrderedDict[RequestId, Record] = OrderedDict()
        """The latest requests, bounded; read by the API, `ask` and `explain`."""
        self.placed = 0
        """Requests that were placed, ever."""
        self.waited_us: Micros = 0
        """What they waited for that at the Conductor, together."""
        self.kept_blocks = 0
        """Blocks that prefill instances loaded from others and keep copies of (Algorithm 1)."""

    def instances(self) -> list[InstanceInfo]:
        """See ports.Conducting."""
        if self._version != self.core.view.version:
            self._version = self.core.view.version
            self._infos = [view.info for view in self.core.view.instances.values()]
        return self._infos

    # What the Conductor knows: for parts of this process that read. See ports.ClusterRead.

    def views(self) -> Mapping[InstanceId, InstanceView]:
        """The instances that have joined, by id."""
        return self.core.view.instances

    def promised(self) -> Promised:
        """The ledger: what is promised to requests that are under way."""
        return self.core.promised()

    def promises(self) -> tuple[Promises, ...]:
        """What is promised by instance, as other gateways are sent it."""
        return self.core.view.promises(self.now_us())

    def index_blocks(self) -> int:
        """How many blocks the prefix index knows."""
        return len(self.core.index)

    def inventory(self, holder: SegmentId) -> list[Held]:
        """What the index knows of one segment; see PrefixIndex.inventory."""
        return self.core.index.inventory(holder)

    def dry_run(self, request: Request, keys: Sequence[BlockKey]) -> Decision | Refuse:
        """What the Conductor would decide for this request now; nothing changes."""
        return self.core.preview(request, keys, self.now_us())

    @property
    def tuning(self) -> Tuning:
        """The Conductor's settings."""
        return self.core.tuning

    @property
    def copies(self) -> Hot:
        """The copies of hot prefixes."""
        return self.core.hot

    @property
    def errors(self) -> PredictionErrors:
        """How far off the Conductor's predictions were."""
        return self.core.errors

    def watch_instances(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every step in which an instance joined or left, until `instances`
        is called."""
        self._watchers.append(changed)

    def tell(self, *facts: Fact) -> None:
        """Hand over facts; they are stepped together with all others of this turn of the loop."""
        if not self._facts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._facts.extend(facts)

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """A request arrives; the Conductor's actions for it go to `inbox`."""
        assert request.id not in self._inboxes, "request ids are unique"
        self.records.pop(request.id, None)  # an earlier request of this id
        self.records[request.id] = Record(request.since_us(self.now_us()))
        self._inboxes[request.id] = inbox
        while len(self.records) > _KEPT_RECORDS + len(self._inboxes):
            self.records.popitem(last=False)
        self.tell(Arrived(request, tuple(keys)))

    def close(
        self,
        request: RequestId,
        outcome: str,
        tbt_us: Micros | None = None,
        cached_tokens: Tokens | None = None,
    ) -> None:
        """The request's task has ended; whatever the Conductor still says of it is dropped.

        tbt_us: the mean of its gaps, if it had any; cached_tokens: see ports.Conducting.
        """
        self._inboxes.pop(request, None)
        record = self.records.get(request)
        if record is not None:
            record.outcome = outcome
            record.tbt_us = tbt_us
            if cached_tokens is not None:
                record.cached_tokens = cached_tokens

    def stop(self) -> None:
        """No timer goes off any more; to be told nothing after."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._copying:
            task.cancel()

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """An instance has loaded these from others: its own segment is to have them as well."""
        self._begin(self._have_copied(keys, to, source, None))

    def known(self, request: RequestId) -> bool:
        """Whether a request of this id is under way."""
        return request in self._inboxes

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """Prefill gave its token: note the measured TTFT beside the predicted one."""
        record = self.records.get(request)
        if record is not None and record.ttft_us is None:
            record.ttft_us = self.now_us() - record.arrived_us
            record.cached_tokens = cached_tokens

    def _flush(self) -> None:
        facts, self._facts = self._facts, []
        now_us = self.now_us()
        actions = None
        try:
            actions = self.core.step(now_us, facts)
        finally:
            if actions is None:  # a bug, which the loop logs: nobody shall wait for ever
                for request, inbox in self._inboxes.items():
                    inbox.put_nowait(GiveUp(request, "the Conductor failed"))
        self.account.take(now_us, facts, actions)
        if self._on_step is not None:
            self._on_step(now_us, facts, actions)
        for action in actions:
            self._act(action)
        if self._version != self.core.view.version:
            for changed in self._watchers:
                changed()
        self._wake_at(self.core.wake_us(now_us))

    def _wake_at(self, wake_us: Micros | None) -> None:
        """Step again at that time, though nothing happens; at no other."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_us is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(wake_us / MICROS_PER_SECOND, self._flush)

    def _act(self, action: Action) -> None:
        match action:
            case Release(request, numbers):
                for number in numbers:
                    self._release(lease_of(request, number))
                return
            case Prefill(request, number, to):
                self._decided(action)
                log.debug("%s: call %d: prefill on %s", request, number, to.id)
            case Decode(request, number, to):
                log.debug("%s: call %d: decode on %s", request, number, to.id)
                record = self.records.get(request)
                if record is not None and record.decision is not None:
                    record.decision = msgspec.structs.replace(record.decision, decode=to.id)
            case Spread(request, number, keys, first, source, to):
                log.info("copy %d: %d blocks to %s", number, len(keys) - first, to)
                record = self.records.get(request)
                if record is not None:
                    record.spread = action
                self._begin(self._have_copied(keys[first:], to, source, number))
                return
            case Abort(request, number, why):
                log.warning("%s: call %d aborted: %s", request, number, why)
            case Refuse() | GiveUp():
                # Refusals come in hundreds where they come: counted and recorded, not told each.
                level = logging.DEBUG if isinstance(action, Refuse) else logging.WARNING
                log.log(level, "%s: %s", action.request, action.why)
                self._over(action)
        inbox = self._inboxes.get(action.request)
        if inbox is not None:
            inbox.put_nowait(action)

    def _begin(self, copying: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(copying)
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)

    async def _have_copied(
        self,
        keys: Sequence[BlockKey],
        to: SegmentId,
        source: SegmentId | None,
        number: int | None,
    ) -> None:
        """Ask the store for copies; the Conductor hears of its own ones what will not come."""
        count = 0
        try:
            if self._copy is not None:
                count = await self._copy(keys, to, source)
        except (MoonserveError, OSError) as error:
            log.warning("no copy of %d blocks to %s: %s", len(keys), to, error)
        if number is None:
            self.kept_blocks += count
        elif count < len(keys):
            self.tell(SpreadUpTo(number, count))

    def _decided(self, action: Prefill) -> None:
        record = self.records.get(action.request)
        if record is not None:
            if not record.attempts:
                self.placed += 1
                self.waited_us += action.decision.waited_us
            record.decision = action.decision
            record.candidates = action.candidates
            record.candidates = action.candidates
            record.attempts += 1
            record.outcome = "running"

    def _over(self, action: Refuse | GiveUp) -> None:
        record = self.records.get(action.request)
        if record is None:
            return
        record.error = action.why
        if isinstance(action, Refuse):
            record.reason = action.reason
            record.decision = action.decision
            record.candidates = action.candidates
            record.candidates = action.candidates
