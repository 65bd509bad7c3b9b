"""The Conductor as a front uses it: in another process, on this host or another one.

Implements ports.Conducting. While the Conductor's process is away or hangs, no instance is known
and requests are refused. Requests that were under way have failed. It connects again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import (
    BadRequest,
    ConfigError,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, Micros, RequestId, SegmentId, Tokens
from moonserve.live.access.keys import ApiKey
from moonserve.live.access.meter import REASON, CountedCall
from moonserve.live.clock import LoopClock
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family
from moonserve.live.fronts.road import Road
from moonserve.live.ports import DriverFact, Inbox
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection

log = logging.getLogger(__name__)

_AGAIN_S = 0.1
_LONG = 20
"""After this many tries in a row, the wait is logged once."""

_GONE = (
    "this gateway's Conductor does not answer; the gateway connects to it again as soon as it runs"
)
_ENTER_S = 5.0
_LEAVE_S = 1.0
"""Longest wait until the last messages have gone out."""
_encode = msgspec.msgpack.Encoder().encode
_decode_entered = msgspec.msgpack.Decoder(wire.Entered).decode


class RemoteConductor:
    """See the module. Its clock is this host's; the Conductor may have another one."""

    def __init__(self, road: Road, limits: ConnectionLimits = wire.LIMITS) -> None:
        """road: the way to the Conductor; `leave` closes it."""
        self.now_us = LoopClock().now_us
        self.road = road
        self._counts: Callable[[], list[Family]] = list
        self._on_engines: Callable[[list[wire.EngineState]], None] = lambda engines: None
        self._on_gone: Callable[[], None] = lambda: None
        self._engines: list[wire.EngineState] = []
        self._link: _ConductorLink | None = None
        self._infos: list[InstanceInfo] = []
        self._inboxes: dict[RequestId, Inbox] = {}
        self._url = ""
        self._limits = limits
        self._keeper: asyncio.Task[None] | None = None
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
    ) -> None:
        """Have these called from now on.

        counts: returns what this process has counted, for the sums over all fronts. on_engines:
        takes the external engines, now and whenever they change, before their instances are known.
        on_gone: called when the Conductor is gone or hangs.
        """
        self._counts, self._on_engines, self._on_gone = counts, on_engines, on_gone
        on_engines(self._engines)

    async def leave(self) -> None:
        """Leave: for the Conductor, all requests of this front have ended."""
        if self._keeper is not None:
            self._keeper.cancel()
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
        """Why no request can be decided now; empty: the Conductor is there."""
        return "" if self._link is not None else _GONE

    def instances(self) -> Sequence[InstanceInfo]:
        """See ports.Conducting."""
        return self._infos

    def known(self, request: RequestId) -> bool:
        """See ports.Conducting."""
        return request in self._inboxes

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """See ports.Conducting."""
        assert request.id not in self._inboxes, "request ids are unique"
        self._inboxes[request.id] = inbox
        if self._link is None:
            inbox.put_nowait(Refuse(request.id, _GONE))
        else:
            self._link.notify(wire.opened(request, keys, self.now_us()))

    def notify(self, *messages: wire.ToConductor) -> None:
        """Send messages to the Conductor; if it is away, they are dropped."""
        if self._link is not None:
            self._link.notify(*messages)

    def tell(self, *facts: DriverFact) -> None:
        """See ports.Conducting."""
        self.notify(*facts)

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """See ports.Conducting."""
        self.notify(wire.FirstToken(request, cached_tokens))

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """See ports.Conducting."""
        self.notify(wire.Kept(tuple(keys), to, source))

    def close(
        self,
        request: RequestId,
        outcome: str,
        tbt_us: Micros | None = None,
        cached_tokens: Tokens | None = None,
    ) -> None:
        """See ports.Conducting."""
        self._inboxes.pop(request, None)
        self.notify(wire.Closed(request, outcome, tbt_us, cached_tokens))

    async def enter(self, key: ApiKey) -> CountedCall:
        """See access.meter.Meter: the Conductor's process counts for all fronts. Raises NobodyAlive
        too."""
        if self._link is None:
            raise NobodyAlive(_GONE)
        number = next(self._numbers)
        body = _encode(wire.Enter(number, key.name, key.limits))
        deadline_s = asyncio.get_running_loop().time() + _ENTER_S
        call = RemoteCall(self, number)
        try:
            entered = _decode_entered(await self._link.call(wire.ENTER, body, deadline_s))
        except BaseException:  # it may have been let in
            call.over()
            raise
        if entered.refusal:
            raise Overloaded(entered.refusal, REASON, entered.retry_after_s)
        return call

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

    # For the link

    def answer(self, op: str, body: bytes) -> bytes:
        """Run an operation for the Conductor's process. Raises BadRequest."""
        if op != wire.COUNT:
            raise BadRequest(f"no such operation at a front: {op!r}; there is {wire.COUNT!r}")
        return msgspec.msgpack.encode(self._counts())

    def received(self, message: wire.ToFront, link: _ConductorLink) -> None:
        """Act on one message."""
        match message:
            case wire.Welcome():  # not before: a process that hangs accepts connections too
                self._link, self._url = link, link.url
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
            case wire.EngineStates(engines):
                self._engines = engines
                self._on_engines(engines)
            case wire.Instances(infos):
                self._infos = infos
            case action:
                inbox = self._inboxes.get(action.request)
                if inbox is not None:
                    inbox.put_nowait(action)

    def gone(self) -> None:
        """The Conductor does not know the requests of this front any more."""
        if self._link is not None:
            log.warning(
                "the Conductor at %s is gone; requests under way have failed", self.road.where
            )
            self._on_gone()
        self._link = None
        self._infos = []
        self._url = ""
        for request, inbox in self._inboxes.items():
            inbox.put_nowait(Refuse(request, _GONE))
        self._lost.set()


class RemoteCall:
    """A request of an API key that the Conductor's process counts. See access.meter.CountedCall."""

    def __init__(self, conductor: RemoteConductor, number: int) -> None:
        self._conductor = conductor
        self._number = number
        self._tokens: Tokens = 0

    def spent(self, tokens: Tokens) -> None:
        """See CountedCall."""
        if tokens > self._tokens:
            self._tokens = tokens
            self._conductor.notify(wire.Metered(self._number, tokens, over=False))

    def over(self) -> None:
        """See CountedCall."""
        self._conductor.notify(wire.Metered(self._number, self._tokens, over=True))


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
        self.over = asyncio.Event()
        """Set once the connection has ended."""

    def noticed(self, message: wire.ToFront) -> None:
        self._owner.received(message, self)

    def lost(self) -> None:
        self.over.set()
        self._owner.gone()
