"""The Conductor's end of the connections to the fronts.

The Conductor's process makes one FrontServer. It serves the route at its port and its unix socket,
and its guard has found the cluster's token before. FrontServer opens the requests of all fronts at
the one ConductorLoop, takes over those that another Conductor has placed, and ends those of a front
that is gone. It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError, NobodyAlive, Overloaded
from moonserve.core.kv.facts import BlocksRemoved
from moonserve.core.schedule.actions import Prefill, Refuse
from moonserve.core.schedule.facts import ClientGone
from moonserve.core.units import RequestId
from moonserve.live.access.meter import LocalMeter, MeteredCall
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.fleet import Fleet, WatchedCall
from moonserve.live.external.monitor import POOL
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family, lasting, summed
from moonserve.live.http.message import HttpRequest
from moonserve.live.http.server import Routes
from moonserve.live.http.switch import Switch
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection

log = logging.getLogger(__name__)

_COUNT_S = 1.0
"""Longest time a front may take to report its counts; after it, its last report is used."""
_PARTED = 64
"""Fronts without a connection whose counts are kept apart, since they may connect again."""
_SAME_ID = "a request with id {} is under way; ids must differ"
_encode = msgspec.msgpack.Encoder().encode
_decode_enter = msgspec.msgpack.Decoder(wire.Enter).decode
_decode_counts = msgspec.msgpack.Decoder(list[Family]).decode


class FrontServer:
    """Accepts the connections of fronts, and reports instances and external engines to them."""

    def __init__(
        self,
        conductor: ConductorLoop,
        welcome: wire.Welcome,
        fleet: Fleet | None = None,
        limits: ConnectionLimits = wire.LIMITS,
        leadership: Leadership | None = None,
    ) -> None:
        """welcome: what fronts hear first. fleet: the external engines, None: there are workers.
        leadership: of this process; None: no other one can lead."""
        self._leadership = leadership or Leadership()
        self._leadership.watch(self._step_down)
        self._ending: set[asyncio.Task[None]] = set()
        self._conductor = conductor
        self._welcome = welcome
        self._fleet = fleet
        self._limits = limits
        self._engines: list[wire.EngineState] = []
        """The external engines as fronts know them."""
        self._links: set[_FrontLink] = set()
        self._accepts = False
        self._meter = LocalMeter(conductor.now_us)
        self._parted: OrderedDict[str, list[Family]] = OrderedDict()
        """The counters and histograms of fronts without a connection, by front. A front reports all
        that it ever counted, so these are no longer added once it is connected again."""
        self._gone: list[Family] = []
        """The sums over fronts that are longer gone than those."""
        conductor.watch_instances(self._send_instances)

    def routes(self) -> Routes:
        """Where fronts connect."""
        return {("GET", wire.PATH): self._channel}

    def open(self) -> None:
        """Accept fronts from now on."""
        self._accepts = True

    def close(self) -> None:
        """Accept no more fronts, and leave all of them. Their requests go on at another Conductor:
        nothing is released."""
        self._accepts = False
        for link in list(self._links):
            link.leave()
            self._disconnect(link)

    async def _channel(self, request: HttpRequest) -> Switch:
        asked = request.headers.get("upgrade", "")
        if asked != wire.PROTOCOL:
            raise BadRequest(
                f"a front has to speak {wire.PROTOCOL} here, not {asked[:100]!r}; run one version"
                " of moonserve in the cluster",
                "upgrade",
            )
        if why := self.closed():
            raise NobodyAlive(why)
        return Switch(wire.PROTOCOL, _FrontLink(self, self._limits))

    def closed(self) -> str:
        """Why it accepts no fronts now; empty: it does."""
        if not self._accepts:
            return "it does not know yet what its instances hold"
        return self._leadership.standing_by()

    @property
    def fronts(self) -> int:
        """Number of fronts that are connected."""
        return len(self._links)

    def look(self) -> None:
        """Report external engines that have changed; to be called about twice a second."""
        if self._fleet is None:
            return
        monitors = [monitor for _, monitor in self._fleet.monitors()]
        engines = [
            wire.EngineState(
                it.member.spec,
                list(it.member.infos.values()),
                list(it.feeds),
                it.member.version,
            )
            for it in monitors
        ]
        if engines != self._engines:
            self._engines = engines
            for link in self._links:
                link.notify(wire.EngineStates(engines))

    def _send_instances(self) -> None:
        self.look()
        message = self._instances()
        for link in self._links:
            link.notify(message)

    def _instances(self) -> wire.Instances:
        return wire.Instances([*self._conductor.instances()], [*self._conductor.drained()])

    async def counts(self) -> list[Family]:
        """The sums over all fronts since the start."""
        await asyncio.gather(*(link.count() for link in list(self._links)))
        linked = [link.counted for link in self._links]
        return summed([self._gone, *self._parted.values(), *linked])

    # For the links

    def joined(self, link: _FrontLink) -> None:
        """A front has connected."""
        self._links.add(link)
        welcome = msgspec.structs.replace(self._welcome, term=self._leadership.term)
        link.notify(welcome, wire.EngineStates(self._engines))
        link.notify(self._instances())

    def _left(self, link: _FrontLink) -> None:
        """A front is gone, and its clients with it: end its requests and calls."""
        self._disconnect(link)
        self._end(link.lives)

    def lost(self, link: _FrontLink) -> None:
        """As if it had left, unless it has gone to another Conductor, which has its requests.

        So it may be if this process has slept, and others did not wait for it.
        """
        self._disconnect(link)
        if link.lives:
            task = asyncio.create_task(self._end_if_leading(link.lives), name="a front is gone")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end_if_leading(self, lives: set[RequestId]) -> None:
        if await self._leadership.confirm():
            self._end(lives)

    def _disconnect(self, link: _FrontLink) -> None:
        self._links.discard(link)
        self._parted[link.front] = summed([self._parted.get(link.front, []), lasting(link.counted)])
        while len(self._parted) > _PARTED:
            _, longest_gone = self._parted.popitem(last=False)
            self._gone = summed([self._gone, longest_gone])
        for call in link.outgoing.values():
            call.ended()
        for metered in link.metered.values():
            metered.over()

    def _end(self, lives: set[RequestId]) -> None:
        for request in lives:
            self._conductor.tell(ClientGone(request))
            self._conductor.close(request, "cancelled")

    def _step_down(self) -> None:
        """The term of all connections is over: another Conductor leads, or this one anew."""
        for link in list(self._links):
            link.replace("another term has begun")
            self._disconnect(link)
        self._parted.clear()  # the other Conductor has the counts of all fronts
        self._gone = []
        self._conductor.abandon()

    def _hello(self, front: str, link: _FrontLink) -> None:
        """A front says who it is: its earlier connection is over, and its requests come anew."""
        link.front = front
        for old in [it for it in self._links if it is not link and it.front == front]:
            old.replace("the front has connected again")
            self._left(old)
            self._conductor.settle()  # they end before they come anew
        link.counted = self._parted.pop(front, [])

    def _adopt(self, message: wire.Adopting, link: _FrontLink) -> None:
        """Go on with a request of this front. It precedes a later one of the same id."""
        name = message.opened.id
        if self._conductor.known(name):
            self._conductor.settle()  # the other one has arrived, perhaps just now
        for other in self._links:
            if other is not link and name in other.lives:
                other.lives.discard(name)
                other.notify(Refuse(name, _SAME_ID.format(name), "duplicate_request_id"))
        link.lives.add(name)
        adopted = message.adopted(self._conductor.now_us())
        self._conductor.adopt(adopted, message.facts, link)

    def received(self, message: wire.ToConductor, link: _FrontLink) -> None:
        """Hand one message to the Conductor. A message about another front's request is dropped."""
        conductor = self._conductor
        match message:
            case wire.Hello(front):
                self._hello(front, link)
            case wire.Adopting():
                self._adopt(message, link)
            case wire.MeteredBefore(number, name, limits, tokens):
                link.metered[number] = self._meter.take_over(name, limits, tokens)
            case wire.Opened(name) if conductor.known(name):
                link.notify(Refuse(name, _SAME_ID.format(name), "duplicate_request_id"))
            case wire.Opened(name, keys=keys):
                link.lives.add(name)
                conductor.open(message.request(conductor.now_us()), keys, link)
            case wire.FirstToken(name, cached) if name in link.lives:
                conductor.first_token(name, cached)
            case wire.Kept(keys, to, source):
                conductor.keep(keys, to, source)
            case wire.Closed(name, outcome, measured) if name in link.lives:
                link.lives.discard(name)
                conductor.close(name, outcome, measured)
            case wire.CallBegan(number, instance, part, prompt, predicted, streams):
                if self._fleet is not None:
                    began = self._fleet.began(instance, part, prompt, predicted, streams)
                    link.outgoing[number] = began
            case wire.CallAnswered(number, count, cached, after_us) if number in link.outgoing:
                link.outgoing[number].count = count
                link.outgoing[number].answered_after(after_us, cached)
            case wire.CallEnded(number, count, cached) if number in link.outgoing:
                call = link.outgoing.pop(number)
                call.count = count
                call.ended(cached)
            case wire.Metered(number, tokens, over) if number in link.metered:
                link.metered[number].spent(tokens)
                if over:
                    link.metered.pop(number).over()
            case BlocksRemoved(segment, keys) if segment == POOL and self._fleet is not None:
                self._fleet.missed(keys)
            case (
                wire.FirstToken()
                | wire.Closed()
                | wire.CallAnswered()
                | wire.CallEnded()
                | wire.Metered()
            ):
                pass
            case fact:
                of = getattr(fact, "request", None)  # facts about blocks have none
                if of is None or of in link.lives:
                    conductor.tell(fact)

    def enter(self, body: bytes, link: _FrontLink) -> bytes:
        """Let a request of an API key in, or refuse it. Raises BadRequest: a malformed body."""
        try:
            asked = _decode_enter(body)
        except UNREADABLE as error:
            raise BadRequest(f"{wire.ENTER} cannot be decoded: {error}") from None
        try:
            link.metered[asked.number] = self._meter.let_in(asked.name, asked.limits)
        except Overloaded as error:
            return _encode(wire.Entered(str(error), error.retry_after_s))
        return _encode(wire.Entered())


class _FrontLink(RpcConnection):
    """The connection to one front, and the inbox of all its requests."""

    def __init__(self, server: FrontServer, limits: ConnectionLimits) -> None:
        super().__init__(
            "a front",
            wire.PROTOCOL,
            answer=self._answer,
            notices=wire.ToConductor,
            limits=limits,
            accepted=True,
        )
        self.metered: dict[int, MeteredCall] = {}
        """Requests of API keys with limits that have not ended."""
        self.lives: set[RequestId] = set()
        """Requests that the front opened and has not closed."""
        self.outgoing: dict[int, WatchedCall] = {}
        """Calls of the front to external engines that have not ended."""
        self.counted: list[Family] = []
        """What the front counted, by its last report."""
        self.front = ""
        """The front's id; empty: it has not said it."""
        self._server = server
        self._is_front = False

    def put_nowait(self, action: Any, /) -> None:
        """Send an action to the front: this is the inbox of its requests.

        What only explanations need does not travel.
        """
        if isinstance(action, Prefill):
            action = msgspec.structs.replace(action, candidates=())
        elif isinstance(action, Refuse):
            action = msgspec.structs.replace(action, decision=None, candidates=())
        self.notify(action)

    def leave(self) -> None:
        """This process ends, and the front has another Conductor soon."""
        self._is_front = False
        self.close()

    def replace(self, why: str) -> None:
        """This connection is over, for a reason that is no fault of the front."""
        self._is_front = False
        log.info("a connection to a front ends: %s", why)
        self.transport.abort()

    async def count(self) -> None:
        """Ask the front for its counts. If it does not answer, the last report stays."""
        deadline_s = asyncio.get_running_loop().time() + _COUNT_S
        try:
            self.counted = _decode_counts(await self.call(wire.COUNT, b"", deadline_s))
        except MoonserveError:
            return
        except UNREADABLE as error:
            self.break_off(f"its counts cannot be decoded: {error}")

    def _answer(self, op: str, body: bytes) -> bytes:
        if op != wire.ENTER:
            raise BadRequest(f"no such operation here: {op!r}; there is {wire.ENTER!r}")
        return self._server.enter(body, self)

    def opened(self) -> None:
        self._is_front = True
        self._server.joined(self)

    def noticed(self, message: wire.ToConductor) -> None:
        self._server.received(message, self)

    def lost(self) -> None:
        if self._is_front:
            self._server.lost(self)
