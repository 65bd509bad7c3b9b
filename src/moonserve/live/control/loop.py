"""ConductorLoop: runs the pure Conductor (core.schedule.conductor) on the event loop.

Any part of this process may `tell` it a fact; all facts of one turn of the event loop make one
step. A driver opens each request with an inbox, and reads the Conductor's actions from it. One
timer steps the Conductor again at the time that it asked for. Nothing here decides; nothing here
waits for an instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.index import Held, PrefixIndex
from moonserve.core.request import Request
from moonserve.core.schedule.account import Account
from moonserve.core.schedule.actions import (
    Abort,
    Action,
    Decision,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
    Spread,
)
from moonserve.core.schedule.adoption import Adopted, Deposed, FactOfRequest, StepFact
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.decode_forecast import PredictionErrors
from moonserve.core.schedule.facts import Arrived, ClientGone, InstanceInfo, SpreadUpTo
from moonserve.core.schedule.hot import Hot
from moonserve.core.schedule.membership import MemberChange
from moonserve.core.schedule.record import Measured, Record
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
from moonserve.page import pointer

log = logging.getLogger(__name__)

Copy = Callable[[Sequence[BlockKey], SegmentId, SegmentId | None], Awaitable[int]]
"""Asks the store to copy blocks to the first segment, from the second one where that has them.
Returns how many leading blocks are there or will be. May raise MoonserveError or OSError."""


class ConductorLoop:
    """Drives one Conductor on the running event loop. Implements ports.Conducting."""

    def __init__(
        self,
        conductor: Conductor,
        release: Callable[[LeaseId], None],
        copy: Copy | None = None,
        on_step: Callable[[Micros, list[StepFact], list[Action]], None] | None = None,
        has_page: bool = False,
    ) -> None:
        """`copy` None: the store makes no copies. on_step: is called with every step, for an
        account of the run (core.schedule.events). has_page: see ports.Conducting."""
        self.core = conductor
        self.has_page = has_page
        self.now_us = LoopClock().now_us
        self.account = Account(conductor.slo, self._ended)
        self._release = release
        self._copy = copy
        self._copying: set[asyncio.Task[None]] = set()
        self._inboxes: dict[RequestId, Inbox] = {}
        self._on_step = on_step
        self._watchers: list[Callable[[], None]] = []
        self._version = -1
        self._infos: list[InstanceInfo] = []
        self._facts: list[StepFact] = []
        self._timer: asyncio.TimerHandle | None = None
        self._end_watchers: list[Callable[[Record], None]] = []
        self.kept_blocks = 0
        """Blocks that prefill instances loaded from others and keep copies of (Algorithm 1)."""

    def instances(self) -> list[InstanceInfo]:
        """See ports.Conducting."""
        if self._version != self.core.view.version:
            self._version = self.core.view.version
            views = self.core.view.instances.values()
            self._infos = [view.info for view in views if not view.drained]
        return self._infos

    def drained(self) -> list[InstanceInfo]:
        """See ports.Conducting."""
        return [view.info for view in self.core.view.instances.values() if view.drained]

    # What the Conductor knows: for parts of this process that read. See ports.ClusterRead.

    def views(self) -> Mapping[InstanceId, InstanceView]:
        """The instances that have joined, by id."""
        return self.core.view.instances

    def promised(self) -> Promised:
        """The ledger: what is promised to requests that are under way."""
        return self.core.promised()

    def index_blocks(self) -> int:
        """How many blocks the prefix index knows."""
        return len(self.core.index)

    def inventory(self, holder: SegmentId) -> list[Held]:
        """The blocks of one segment in the index; see PrefixIndex.inventory."""
        return self.core.index.inventory(holder)

    @property
    def waiting(self) -> int:
        """Requests that wait at the Conductor for an instance to be free."""
        return self.core.waiting

    def member_changes(self) -> list[MemberChange]:
        """The instances that came or went since the last call; for one caller."""
        return self.core.member_changes()

    def dry_run(self, request: Request, keys: Sequence[BlockKey]) -> Decision | Refuse:
        """What the Conductor would decide for this request now; nothing changes."""
        return self.core.preview(request, keys, self.now_us())

    @property
    def tuning(self) -> Tuning:
        """The Conductor's settings."""
        return self.core.tuning

    @property
    def index(self) -> PrefixIndex:
        """The prefix index, for its counts."""
        return self.core.index

    @property
    def copies(self) -> Hot:
        """The copies of hot prefixes."""
        return self.core.hot

    @property
    def errors(self) -> PredictionErrors:
        """How far off the Conductor's predictions were."""
        return self.core.errors

    @property
    def placed(self) -> int:
        """How many requests were placed, ever."""
        return self.account.placed

    def watch_ended(self, ended: Callable[[Record], None]) -> None:
        """Have `ended` called with the record of each request that is over, refused ones included.

        It must be quick, and must not raise. The record's keys are dropped afterwards.
        """
        self._end_watchers.append(ended)

    def _ended(self, record: Record) -> None:
        if record.is_good is False:  # overload makes them in hundreds, too
            log.debug("%s: missed its objectives%s", record.id, pointer(record.id, self.has_page))
        for ended in self._end_watchers:
            ended(record)

    def watch_instances(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after each step while the list of instances has changed and nobody
        has read it with `instances`."""
        self._watchers.append(changed)

    def tell(self, *facts: StepFact) -> None:
        """Report facts; all facts of this turn of the event loop make one step."""
        if facts and not self._facts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._facts.extend(facts)

    def settle(self) -> None:
        """Take the reported facts in now, so that later ones come into a later step."""
        if self._facts:
            self._flush()

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """A request arrives; the Conductor's actions for it go to `inbox`. See ports.Conducting."""
        assert request.id not in self._inboxes, "request ids are unique"
        self._inboxes[request.id] = inbox
        self.tell(Arrived(request, tuple(keys)))

    def adopt(self, adopted: Adopted, facts: Sequence[FactOfRequest], inbox: Inbox) -> None:
        """Go on with a request that another Conductor has placed; later actions go to `inbox`.

        facts: those that were reported since its last call went out. A request that is known
        already is counted once, and its actions go to the new inbox only.
        """
        self._inboxes[adopted.request.id] = inbox
        self.tell(adopted, *facts)

    def abandon(self) -> None:
        """Another Conductor leads, and adopts all requests: forget them, and release nothing."""
        self._inboxes.clear()
        self.tell(Deposed())
        self.settle()

    def end_all(self, why: str) -> None:
        """See ports.Conducting."""
        for request, inbox in self._inboxes.items():
            self.tell(ClientGone(request))
            inbox.put_nowait(GiveUp(request, why, stopping=True))

    def close(
        self,
        request: RequestId,
        outcome: str,
        measured: Measured = Measured(),  # noqa: B008 - frozen
    ) -> None:
        """The request's task has ended; later actions for it are dropped. See ports.Conducting."""
        self._inboxes.pop(request, None)
        if not self.account.has(request):
            self.settle()  # it has arrived in this turn
        self.account.close(request, outcome, measured)

    def stop(self) -> None:
        """Stop the timer and all copies. Call `tell` no more afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._copying:
            task.cancel()

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """Copy blocks that an instance has loaded from other segments into its own segment too."""
        self._begin(self._have_copied(keys, to, source, None))

    def known(self, request: RequestId) -> bool:
        """Whether a request of this id is under way."""
        return request in self._inboxes

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """Prefill has returned its token: record the measured TTFT."""
        self.account.first_token(request, self.now_us(), cached_tokens)

    def _flush(self) -> None:
        facts, self._facts = self._facts, []
        now_us = self.now_us()
        actions = None
        try:
            actions = self.core.step(now_us, facts)
        finally:
            if actions is None:  # a bug, which asyncio logs: no request may wait for ever
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
        """Step again at that time, also without a new fact; cancel an earlier timer."""
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
                log.debug("%s: call %d: prefill on %s", request, number, to.id)
            case Decode(request, number, to):
                log.debug("%s: call %d: decode on %s", request, number, to.id)
            case Spread(request, number, keys, first, source, to):
                log.info("copy %d: %d blocks to %s", number, len(keys) - first, to)
                self._begin(self._have_copied(keys[first:], to, source, number))
                return
            case Abort(request, number, why):
                shown = pointer(request, self.has_page)
                log.warning("%s: call %d aborted: %s%s", request, number, why, shown)
            case Refuse() | GiveUp():
                # Refusals come in hundreds: count and record them, but do not log a warning each.
                level = logging.DEBUG if isinstance(action, Refuse) else logging.WARNING
                shown = pointer(action.request, self.has_page)
                log.log(level, "%s: %s%s", action.request, action.why, shown)
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
        """Ask the store for copies. For copies that the Conductor ordered, report how many blocks
        will arrive, if not all."""
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
