"""Where fronts meet the Conductor: its process listens on a unix socket for them.

Each front's requests are opened at the one ConductorLoop, as if they had come here; a front that is
gone has left all of them. Decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from moonserve.core.kv.facts import BlocksRemoved
from moonserve.core.schedule.actions import Prefill, Refuse
from moonserve.core.schedule.facts import ClientGone
from moonserve.core.units import RequestId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.events import POOL
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.observed import OutgoingCall
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family, lasting, summed

_COUNT_S = 1.0
"""How long a front may take to say what it has counted; later it is what it said last."""


class Desk:
    """Listens for fronts, and reports to them which instances there are."""

    def __init__(self, conductor: ConductorLoop, url: str, fleet: Fleet | None = None) -> None:
        """`url`: where this process serves HTTP, for what fronts pass on; `fleet`: the foreign
        engines, where there may be some."""
        self._conductor = conductor
        self._url = url
        self._fleet = fleet
        self._engines: list[wire.Engine] = []
        """As fronts were told of them."""
        self._links: set[_Link] = set()
        self._listener: asyncio.Server | None = None
        self._numbers = itertools.count()
        self._gone: list[Family] = []
        """What fronts that are gone had counted."""
        conductor.watch_instances(self._tell_instances)

    async def listen(self, path: str) -> None:
        """Take fronts in at this socket."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: _Link(self), path)

    async def close(self) -> None:
        """Let no more in, and send away those who are here."""
        if self._listener is not None:
            self._listener.close()
        for link in list(self._links):
            link.transport.close()

    def look(self) -> None:
        """Tell fronts of foreign engines that have changed; to be called about twice a second."""
        if self._fleet is None:
            return
        monitors = [monitor for _, monitor in self._fleet.monitors()]
        engines = [
            wire.Engine(it.member.spec, list(it.member.infos.values()), list(it.feeds))
            for it in monitors
        ]
        if engines != self._engines:
            self._engines = engines
            for link in self._links:
                link.say(wire.Engines(engines))

    def _tell_instances(self) -> None:
        self.look()
        said = wire.Instances(self._conductor.instances())
        for link in self._links:
            link.say(said)

    async def counts(self) -> list[Family]:
        """The sums over all fronts there have been."""
        number = next(self._numbers)
        asked = {link.count(number) for link in self._links}
        if asked:
            await asyncio.wait(asked, timeout=_COUNT_S)
        return summed([self._gone, *(link.counted for link in self._links)])

    # What the links call.

    def joined(self, link: _Link) -> None:
        """A front is here."""
        self._links.add(link)
        link.say(wire.Welcome(self._url), wire.Engines(self._engines))
        link.say(wire.Instances(self._conductor.instances()))

    def left(self, link: _Link) -> None:
        """It is gone, and its clients are gone with it."""
        self._links.discard(link)
        self._gone = summed([self._gone, lasting(link.counted)])
        for call in link.calls.values():
            call.ended()
        for request in link.lives:
            self._conductor.tell(ClientGone(request))
            self._conductor.close(request, "cancelled")

    def heard(self, message: wire.ToConductor, link: _Link) -> None:
        """Pass one message on. What is said of requests that are not this front's has no effect."""
        conductor = self._conductor
        match message:
            case wire.Opened(name) if conductor.known(name):
                why = f"a request with id {name} is under way; ids must differ"
                link.say(Refuse(name, why, "duplicate_request_id"))
            case wire.Opened(name, keys=keys):
                link.lives.add(name)
                conductor.open(message.request(), keys, link)
            case wire.FirstToken(name, cached) if name in link.lives:
                conductor.first_token(name, cached)
            case wire.Kept(keys, to, source):
                conductor.keep(keys, to, source)
            case wire.Closed(name, outcome, tbt_us, cached) if name in link.lives:
                link.lives.discard(name)
                conductor.close(name, outcome, tbt_us, cached)
            case wire.Counts():
                link.take(message)
            case wire.CallBegan(number, instance, part, prompt, predicted, streams):
                if self._fleet is not None:
                    began = self._fleet.began(instance, part, prompt, predicted, streams)
                    link.calls[number] = began
            case wire.CallAnswered(number, count, cached) if number in link.calls:
                link.calls[number].count = count
                link.calls[number].answered(cached)
            case wire.CallEnded(number, count, cached) if number in link.calls:
                call = link.calls.pop(number)
                call.count = count
                call.ended(cached)
            case BlocksRemoved(segment, keys) if segment == POOL and self._fleet is not None:
                self._fleet.missed(keys)
            case wire.FirstToken() | wire.Closed() | wire.CallAnswered() | wire.CallEnded():
                pass
            case fact:
                of = getattr(fact, "request", None)  # facts about blocks have none
                if of is None or of in link.lives:
                    conductor.tell(fact)


class _Link(wire.Frames):
    """One front; the inbox of all its requests."""

    def __init__(self, desk: Desk) -> None:
        super().__init__("a front", wire.ToConductor)
        self.lives: set[RequestId] = set()
        self.calls: dict[int, OutgoingCall] = {}
        """Its calls to foreign engines that are out."""
        self.counted: list[Family] = []
        """What it has counted, as it said last."""
        self._desk = desk
        self._asked: dict[int, asyncio.Future[None]] = {}

    def put_nowait(self, action: Any, /) -> None:
        """As the inbox: send it to the front, without what only explanations need."""
        if isinstance(action, Prefill):
            action = msgspec.structs.replace(action, candidates=())
        elif isinstance(action, Refuse):
            action = msgspec.structs.replace(action, decision=None, candidates=())
        self.say(action)

    def count(self, number: int) -> asyncio.Future[None]:
        """Ask what it has counted; done when it has said so, or is gone."""
        self._asked[number] = future = self._loop.create_future()
        self.say(wire.Count(number))
        return future

    def take(self, counts: wire.Counts) -> None:
        """What it has counted."""
        self.counted = counts.families
        asked = self._asked.pop(counts.number, None)
        if asked is not None and not asked.done():
            asked.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._desk.joined(self)

    def heard(self, message: wire.ToConductor) -> None:
        self._desk.heard(message, self)

    def lost(self) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        self._desk.left(self)
