"""The Conductor as a front uses it: in another process, over a unix socket.

Implements ports.Conducting. While the Conductor's process is away or hangs, no instance is known
and requests are refused. Requests that were under way have failed. It connects again by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import BadRequest, NobodyAlive, Overloaded
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, Micros, RequestId, SegmentId, Tokens
from moonserve.live.access.keys import ApiKey
from moonserve.live.access.meter import REASON, CountedCall
from moonserve.live.clock import LoopClock
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family
from moonserve.live.ports import DriverFact, Inbox
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection

log = logging.getLogger(__name__)

_AGAIN_S = 0.1
_LONG = 100
"""After this many tries, the wait is longer than a start of the Conductor takes."""
_GONE = (
    "this gateway's Conductor does not answer; if it died it is started again at once, if it hangs "
    "after 30 seconds"
)


_ENTER_S = 5.0
_encode = msgspec.msgpack.Encoder().encode
_decode_entered = msgspec.msgpack.Decoder(wire.Entered).decode


class RemoteConductor:
    """See the module. All fronts and the Conductor are on one machine, and so on one clock."""

    def __init__(
        self,
        path: str,
        counts: Callable[[], list[Family]],
        on_engines: Callable[[list[wire.EngineState]], None] = lambda engines: None,
        on_gone: Callable[[], None] = lambda: None,
        limits: ConnectionLimits = wire.LIMITS,
    ) -> None:
        """
        path: of the unix socket. counts: returns what this process has counted, for the sums over
        all fronts. on_engines: called with the external engines whenever they change, before their
        instances are known. on_gone: called when the Conductor's process is gone or hangs.
        """
        self.now_us = LoopClock().now_us
        self._path = path
        self._counts = counts
        self._link: _ConductorLink | None = None
        self._infos: list[InstanceInfo] = []
        self._inboxes: dict[RequestId, Inbox] = {}
        self._url = ""
        self._on_engines = on_engines
        self._on_gone = on_gone
        self._limits = limits
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Connect as soon as the Conductor listens, and again whenever the connection is lost."""
        self._keeper = asyncio.create_task(self._keep(), name="link to the Conductor")

    async def leave(self) -> None:
        """Leave: for the Conductor, all requests of this front have ended."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._link is not None:
            await asyncio.sleep(0)  # the messages of this turn go out
            link, self._link = self._link, None  # its end is no failure
            link.close()

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
            self._link.notify(wire.opened(request, keys))

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
        loop, tries = asyncio.get_running_loop(), 0
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(
                    lambda: _ConductorLink(self, self._limits), self._path
                )
            except OSError as error:
                tries += 1
                if tries == _LONG:
                    log.warning("waiting for the Conductor: %s", error.strerror or error)
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
            case wire.Welcome(url):  # not before: a process that hangs accepts connections too
                self._link, self._url = link, url
            case wire.EngineStates(engines):
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
            log.warning("the Conductor is gone; requests under way have failed")
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
    def __init__(self, owner: RemoteConductor, limits: ConnectionLimits) -> None:
        super().__init__(
            "the Conductor",
            wire.PROTOCOL,
            answer=owner.answer,
            notices=wire.ToFront,
            limits=limits,
        )
        self._owner = owner

    def noticed(self, message: wire.ToFront) -> None:
        self._owner.received(message, self)

    def lost(self) -> None:
        self._owner.gone()
