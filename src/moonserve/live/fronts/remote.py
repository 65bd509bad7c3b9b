"""The Conductor as a front uses it: in another process, on this host or another one.

Implements ports.Conducting. It connects again by itself. While no Conductor is there, requests
under way go on: a call needs the Conductor only when it has ended. What the front reports of them
is kept. The next Conductor adopts them (core.schedule.adoption), be it a new process or a standby.
New requests wait for it, and are refused after `AbsenceLimits.new_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from uuid import uuid4

import msgspec

from moonserve.core.errors import (
    BadRequest,
    ConfigError,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.adoption import FactOfRequest, Tracked
from moonserve.core.schedule.facts import ClientGone, InstanceInfo
from moonserve.core.schedule.record import Measured
from moonserve.core.units import BlockKey, RequestId, SegmentId, Tokens
from moonserve.live.access.keys import ApiKey, KeyLimits
from moonserve.live.access.meter import REASON, CountedCall
from moonserve.live.clock import LoopClock
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family
from moonserve.live.fronts.road import Road
from moonserve.live.http.client import UpstreamError
from moonserve.live.openai.trace_context import SamplingRule
from moonserve.live.ports import DriverFact, Inbox
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection
from moonserve.live.tasks import keep_doing

log = logging.getLogger(__name__)

_AGAIN_S = 0.1
_LONG = 20
"""After this many tries in a row, the wait is logged once."""

_GONE = (
    "this gateway's Conductor does not answer; the gateway connects to it again as soon as it runs"
)
_NO_ANSWER = "the request needs its Conductor, and none has answered for {:g} s"
_ENTER_S = 5.0
_MOST_ENDED = 10_000
"""Requests that ended while no Conductor was there, and that the next one hears of."""
_LEAVE_S = 1.0
"""Longest wait until the last messages have gone out."""
_encode = msgspec.msgpack.Encoder().encode
_decode_entered = msgspec.msgpack.Decoder(wire.Entered).decode


class AbsenceLimits(msgspec.Struct, frozen=True):
    """How long requests wait while no Conductor is there, in seconds since it was lost."""

    new_s: float = 30.0
    """Those that no Conductor has placed."""
    joins_s: float = 3.0
    """The same, since a Conductor is there again: until the instances that were there join it."""
    placed_s: float = 30.0
    """Those whose call has ended, and that need another one."""


class _Life(msgspec.Struct, eq=False):
    """One request of this front."""

    tracked: Tracked
    inbox: Inbox


class RemoteConductor:
    """See the module. Its clock is this host's; the Conductor may have another one."""

    def __init__(
        self,
        road: Road,
        limits: ConnectionLimits = wire.LIMITS,
        absence: AbsenceLimits = AbsenceLimits(),  # noqa: B008 - frozen
    ) -> None:
        """road: the way to the Conductor; `leave` closes it."""
        self._absence = absence
        self._me = wire.Hello(uuid4().hex)
        self.now_us = LoopClock().now_us
        self.road = road
        self._counts: Callable[[], list[Family]] = list
        self._on_engines: Callable[[list[wire.EngineState]], None] = lambda engines: None
        self._on_gone: Callable[[], None] = lambda: None
        self._on_back: Callable[[], None] = lambda: None
        self._engines: list[wire.EngineState] = []
        self._link: _ConductorLink | None = None
        self._infos: list[InstanceInfo] = []
        self._drained: list[InstanceInfo] = []
        self._coming: list[InstanceInfo] = []
        """The instances that the present Conductor has reported."""
        self._lives: dict[RequestId, _Life] = {}
        self._unsent: dict[RequestId, None] = {}
        """New requests that wait for a Conductor."""
        self._ended: deque[tuple[Tracked, wire.Closed]] = deque(maxlen=_MOST_ENDED)
        """Requests that ended while no Conductor was there."""
        self._calls: dict[int, RemoteCall] = {}
        """Requests of API keys that the Conductor has let in."""
        self._grace: asyncio.TimerHandle | None = None
        """Runs while new requests wait, after the loss of a Conductor."""
        self._absent_s = 0.0
        """The time of that loss."""
        self._patience: asyncio.TimerHandle | None = None
        """Runs while placed requests wait."""
        self._is_hopeless = False
        """Whether no Conductor was there for so long that no request waits for it any more."""
        self._settled = asyncio.Event()
        """Set while new requests need not wait: the Conductor is there, or is given up."""
        self._settled.set()
        self._url = ""
        self._limits = limits
        self._keeper: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self.has_page = False
        """See ports.Conducting."""
        self.term = 0
        """The highest term of a Conductor that this front knows of: it obeys no lower one."""
        self.sampling: SamplingRule | None = None
        """Which requests have spans, by the present Conductor or the last one; None: none has."""
        self._lost = asyncio.Event()
        self._welcomed: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()
        """What the first Conductor said, or why there can be none."""
        self._why = "nobody listens there"
        """Why the last try to connect failed."""
        self._numbers = itertools.count()

    async def start(self, within_s: float) -> wire.Welcome:
        """Connect as soon as the Conductor accepts fronts, and again whenever the connection is
        lost.

        Return what the Conductor said first. Raises ConfigError: none has accepted this front in
        time, or none ever will.
        """
        self._keeper = asyncio.create_task(self._keep(), name="link to the Conductor")
        self._follower = keep_doing("following the leader", lambda: self.road.follow(self.leads))
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(self._welcomed)
        except TimeoutError:
            raise ConfigError(
                f"no Conductor accepts fronts at {self.road.where} within {within_s:g} s:"
                f" {self._why}; start `moonserve conductor`, or wait longer with --conductor-s",
                "conductor",
            ) from None

    def attach(
        self,
        counts: Callable[[], list[Family]],
        on_engines: Callable[[list[wire.EngineState]], None],
        on_gone: Callable[[], None],
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Have these called from now on.

        counts: returns what this process has counted, for the sums over all fronts. on_engines:
        takes the external engines, now and whenever they change, before their instances are known.
        on_gone: called when the Conductor is gone or hangs. on_back: called when there is one
        again, which knows nothing of this front.
        """
        self._counts, self._on_engines, self._on_gone = counts, on_engines, on_gone
        self._on_back = on_back
        on_engines(self._engines)

    async def leave(self) -> None:
        """Leave: for the Conductor, all requests of this front have ended."""
        for task in (self._keeper, self._follower):
            if task is not None:
                task.cancel()
        self._stop_waiting()
        if self._link is not None:
            await asyncio.sleep(0)  # the messages of this turn go out
            link, self._link = self._link, None  # its end is no failure
            link.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await link.over.wait()
        await self.road.close()

    @property
    def url(self) -> str:
        """Where the Conductor's process serves HTTP. Raises NobodyAlive: it is away now."""
        if self._link is None or not self._url:
            raise NobodyAlive(_GONE)
        return self._url

    def missing(self) -> str:
        """Why no request can be decided now or soon; empty: the Conductor is there, or new requests
        wait for it."""
        return "" if self._link is not None or self._grace is not None else _GONE

    def instances(self) -> Sequence[InstanceInfo]:
        """See ports.Conducting. While requests wait for a Conductor: those that were there."""
        return self._infos

    def drained(self) -> Sequence[InstanceInfo]:
        """See ports.Conducting."""
        return self._drained

    def known(self, request: RequestId) -> bool:
        """See ports.Conducting."""
        return request in self._lives

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """See ports.Conducting."""
        assert request.id not in self._lives, "request ids are unique"
        life = self._lives[request.id] = _Life(Tracked(request, tuple(keys)), inbox)
        if self._grace is not None:
            self._unsent[request.id] = None
        elif self._link is None:
            inbox.put_nowait(Refuse(request.id, _GONE))
        else:
            self._send(self._link, life)

    def notify(self, *messages: wire.ToConductor) -> None:
        """Send messages to the Conductor; if it is away, they are dropped."""
        if self._link is not None:
            self._link.notify(*messages)

    def tell(self, *facts: DriverFact) -> None:
        """See ports.Conducting. If the Conductor is away, the next one hears facts about requests;
        those about blocks are dropped."""
        for fact in facts:
            if isinstance(fact, FactOfRequest) and (life := self._lives.get(fact.request)):
                life.tracked.told(fact)
                if self._is_hopeless:
                    self._give_up(life)
        self.notify(*facts)

    def end_all(self, why: str) -> None:
        """See ports.Conducting."""
        for request, life in self._lives.items():
            self.tell(ClientGone(request))
            life.inbox.put_nowait(GiveUp(request, why, stopping=True))

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """See ports.Conducting."""
        life = self._lives.get(request)
        if life is not None:
            life.tracked.first_token(self.now_us())
        self.notify(wire.FirstToken(request, cached_tokens))

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """See ports.Conducting."""
        self.notify(wire.Kept(tuple(keys), to, source))

    def close(
        self,
        request: RequestId,
        outcome: str,
        measured: Measured = Measured(),  # noqa: B008 - frozen
    ) -> None:
        """See ports.Conducting."""
        life = self._lives.pop(request, None)
        closed = wire.Closed(request, outcome, measured)
        if request in self._unsent:
            del self._unsent[request]  # no Conductor knows it
        elif self._link is None and life is not None and life.tracked.is_placed:
            self._ended.append((life.tracked, closed))
        else:
            self.notify(closed)

    async def enter(self, key: ApiKey) -> CountedCall:
        """See access.meter.Meter: the Conductor's process counts for all fronts. Raises NobodyAlive
        too."""
        while True:
            await self._settled.wait()
            link = self._link
            if link is None:
                raise NobodyAlive(_GONE)
            number = next(self._numbers)
            body = _encode(wire.Enter(number, key.name, key.limits))
            deadline_s = asyncio.get_running_loop().time() + _ENTER_S
            call = RemoteCall(self, number, key.name, key.limits)
            try:
                entered = _decode_entered(await link.call(wire.ENTER, body, deadline_s))
            except UpstreamError:
                if link is not self._link:
                    continue  # that Conductor is gone, and with it what it counted
                call.over()
                raise
            except BaseException:  # it may have been let in
                call.over()
                raise
            if entered.refusal:
                raise Overloaded(entered.refusal, REASON, entered.retry_after_s)
            self._calls[number] = call
            return call

    def over(self, number: int, tokens: Tokens) -> None:
        """A request of an API key has ended. RemoteCall calls it."""
        self._calls.pop(number, None)
        self.notify(wire.Metered(number, tokens, over=True))

    # While no Conductor is there.

    def _await_next(self) -> None:
        """The Conductor is gone: requests wait for the next one, each kind for its time."""
        loop = asyncio.get_running_loop()
        for request, life in self._lives.items():
            if not life.tracked.is_placed:
                self._unsent[request] = None
        if self._grace is None:
            self._settled.clear()
            self._absent_s = loop.time()
        self._let_wait_until(self._absent_s + self._absence.new_s)
        self._patience = loop.call_later(self._absence.placed_s, self._give_up_all)

    def _let_wait_until(self, time_s: float) -> None:
        """New requests wait, at most until then."""
        if self._grace is not None:
            self._grace.cancel()
        self._grace = asyncio.get_running_loop().call_at(time_s, self._refuse_unsent)

    def _stop_waiting(self) -> None:
        for timer in (self._grace, self._patience):
            if timer is not None:
                timer.cancel()
        self._grace = self._patience = None
        self._is_hopeless = False
        self._settled.set()

    def _refuse_unsent(self) -> None:
        """New requests have waited long enough: for a Conductor, or for its instances."""
        self._grace = None
        self._settled.set()
        if self._link is not None:
            self._trust(self._link)
            return
        self._infos = []
        self._drained = []
        unsent, self._unsent = self._unsent, {}
        for request in unsent:
            self._lives[request].inbox.put_nowait(Refuse(request, _GONE))

    def _give_up_all(self) -> None:
        """Placed requests have waited long enough. Those with a call that runs go on."""
        self._patience = None
        self._is_hopeless = True
        for life in list(self._lives.values()):
            self._give_up(life)

    def _give_up(self, life: _Life) -> None:
        if life.tracked.awaits:
            life.tracked.told(ClientGone(life.tracked.request.id))  # it ends for the next one too
            why = _NO_ANSWER.format(self._absence.placed_s)
            life.inbox.put_nowait(GiveUp(life.tracked.request.id, why))

    def _welcome(self, link: _ConductorLink) -> None:
        """A Conductor is there: it adopts the requests under way, and hears of those that ended.

        New requests wait until the instances that the Conductor before knew have joined it too.
        """
        self._link, self._url = link, link.url
        now_us = self.now_us()
        link.notify(self._me)
        for tracked, closed in self._ended:
            link.notify(wire.adopting(tracked, now_us), closed)
        self._ended.clear()
        for life in self._lives.values():
            if life.tracked.is_placed:
                link.notify(wire.adopting(life.tracked, now_us))
        for call in self._calls.values():
            link.notify(call.before())
        self._on_back()
        if self._grace is not None:
            self._let_wait_until(asyncio.get_running_loop().time() + self._absence.joins_s)
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None
        self._is_hopeless = False

    def _trust(self, link: _ConductorLink) -> None:
        """The Conductor knows the instances: send it the new requests."""
        if self._grace is not None:
            self._grace.cancel()
        self._grace = None
        self._settled.set()
        self._on_engines(self._engines)
        self._infos = self._coming
        unsent, self._unsent = self._unsent, {}
        for request in unsent:
            self._send(link, self._lives[request])

    def _send(self, link: _ConductorLink, life: _Life) -> None:
        tracked = life.tracked
        link.notify(wire.opened(tracked.request, tracked.keys, self.now_us()))

    async def _keep(self) -> None:
        tries = 0
        while True:
            self._lost.clear()
            try:
                url = await self.road.find()
                await self.road.connect(_ConductorLink(self, self._limits, url), url)
            except MoonserveError as error:
                if isinstance(error, ConfigError) and not self._welcomed.done():
                    self._welcomed.set_exception(error)
                    return
                self._why = str(error)
                tries += 1
                if tries == _LONG:
                    log.warning("waiting for the Conductor: %s", error)
            else:
                tries = 0
                await self._lost.wait()
            await asyncio.sleep(_AGAIN_S)

    def leads(self, term: int) -> None:
        """A Conductor leads in this term. If it is not the one of the connection, leave that one.

        The registry says so, or a worker that has refused an order of a lower term.
        """
        if term <= self.term:
            return
        self.term = term
        if self._link is not None and self._link.term < term:
            log.warning("another Conductor leads; leaving the one at %s", self._url)
            self._link.transport.abort()

    # For the link

    def answer(self, op: str, body: bytes) -> bytes:
        """Run an operation for the Conductor's process. Raises BadRequest."""
        if op != wire.COUNT:
            raise BadRequest(f"no such operation at a front: {op!r}; there is {wire.COUNT!r}")
        return msgspec.msgpack.encode(self._counts())

    def received(self, message: wire.ToFront, link: _ConductorLink) -> None:
        """Act on one message."""
        match message:
            case wire.Welcome(term=term) if term < self.term:
                self._why = "it led before another one"
                link.break_off(self._why)
            case wire.Welcome(term=term):  # not before: who hangs accepts connections too
                self.term = link.term = term
                self.has_page = message.has_page
                self.sampling = message.sampling
                self._welcome(link)
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
                else:
                    log.info(
                        "a Conductor is there again, in term %d, at %s; requests under way: %d",
                        term,
                        self.road.shown(link.url),
                        len(self._lives),
                    )
            case wire.EngineStates(engines):
                self._engines = engines
                if self._grace is None:
                    self._on_engines(engines)
            case wire.Instances(infos, drained):
                self._coming = infos
                self._drained = drained
                missing = {info.id for info in self._infos} - {info.id for info in infos}
                if self._grace is None:
                    self._infos = infos
                elif not missing:
                    self._trust(link)
            case action:
                life = self._lives.get(action.request)
                if life is not None:
                    if isinstance(action, Prefill | Decode):
                        life.tracked.acted(action, self.now_us())
                    life.inbox.put_nowait(action)

    def gone(self, link: _ConductorLink) -> None:
        """A connection has ended. If it was the Conductor's, wait for the next one."""
        self._lost.set()
        if self._link is not link:
            return
        log.warning(
            "the Conductor at %s is gone; requests under way wait for the next one", self.road.where
        )
        self._link = None
        self._url = ""
        self._await_next()
        self._on_gone()


class RemoteCall:
    """A request of an API key that the Conductor's process counts. See access.meter.CountedCall."""

    def __init__(
        self, conductor: RemoteConductor, number: int, name: str, limits: KeyLimits
    ) -> None:
        """name, limits: of the key."""
        self._conductor = conductor
        self._number = number
        self._name = name
        self._limits = limits
        self._tokens: Tokens = 0

    def before(self) -> wire.MeteredBefore:
        """What another Conductor has to know of it."""
        return wire.MeteredBefore(self._number, self._name, self._limits, self._tokens)

    def spent(self, tokens: Tokens) -> None:
        """See CountedCall."""
        if tokens > self._tokens:
            self._tokens = tokens
            self._conductor.notify(wire.Metered(self._number, tokens, over=False))

    def over(self) -> None:
        """See CountedCall."""
        self._conductor.over(self._number, self._tokens)


class _ConductorLink(RpcConnection):
    def __init__(self, owner: RemoteConductor, limits: ConnectionLimits, url: str) -> None:
        """url: of the Conductor."""
        super().__init__(
            "the Conductor",
            wire.PROTOCOL,
            answer=owner.answer,
            notices=wire.ToFront,
            limits=limits,
        )
        self._owner = owner
        self.url = url
        self.term = 0
        self.over = asyncio.Event()
        """Set once the connection has ended."""

    def noticed(self, message: wire.ToFront) -> None:
        self._owner.received(message, self)

    def lost(self) -> None:
        self.over.set()
        self._owner.gone(self)
