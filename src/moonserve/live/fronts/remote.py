"""The Conductor as a front sees it: in another process, at the end of a unix socket.

Implements ports.Conducting. While nobody is there, or it hangs, no instance is known and requests
are refused as where nobody is alive; what was under way has failed. It connects again by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from moonserve.core.errors import NobodyAlive
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, Micros, RequestId, SegmentId, Tokens
from moonserve.live.clock import LoopClock
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family
from moonserve.live.ports import Inbox, Told

log = logging.getLogger(__name__)

_AGAIN_S = 0.1
_LONG = 100
"""Tries after which it takes longer than a start."""
_GONE = (
    "this gateway's Conductor does not answer; if it died it is started again at once, if it hangs "
    "after 30 seconds"
)


class RemoteConductor:
    """See the module. All fronts and the Conductor are on one machine, and so on one clock."""

    def __init__(self, path: str, counts: Callable[[], list[Family]]) -> None:
        """`path` of the socket; `counts`: what this process has counted, for the sums of all."""
        self.now_us = LoopClock().now_us
        self._path = path
        self._counts = counts
        self._link: _Link | None = None
        self._infos: list[InstanceInfo] = []
        self._inboxes: dict[RequestId, Inbox] = {}
        self._url = ""
        self.on_engines: Callable[[list[wire.Engine]], None] | None = None
        """Told of the foreign engines, before their instances are."""
        self.on_gone: Callable[[], None] | None = None
        """Told that nobody is there any more, or answers."""
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    async def start(self) -> None:
        """Connect as soon as somebody listens there, and again whenever the connection is lost."""
        self._keeper = asyncio.create_task(self._keep(), name="link to the Conductor")

    async def leave(self) -> None:
        """Leave: what is still open has ended for the Conductor."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._link is not None:
            await asyncio.sleep(0)  # what was said in this turn goes out
            link, self._link = self._link, None  # that it ends is no news
            link.transport.close()

    @property
    def url(self) -> str:
        """Where the Conductor's process serves HTTP. Raises NobodyAlive: it is not there now."""
        if self._link is None or not self._url:
            raise NobodyAlive(_GONE)
        return self._url

    def missing(self) -> str:
        """Why nothing can be decided now; empty: somebody is there."""
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
            self._link.say(wire.opened(request, keys))

    def say(self, *messages: wire.ToConductor) -> None:
        """To nobody, where nobody is there."""
        if self._link is not None:
            self._link.say(*messages)

    def tell(self, *facts: Told) -> None:
        """See ports.Conducting."""
        self.say(*facts)

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """See ports.Conducting."""
        self.say(wire.FirstToken(request, cached_tokens))

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """See ports.Conducting."""
        self.say(wire.Kept(tuple(keys), to, source))

    def close(
        self,
        request: RequestId,
        outcome: str,
        tbt_us: Micros | None = None,
        cached_tokens: Tokens | None = None,
    ) -> None:
        """See ports.Conducting."""
        self._inboxes.pop(request, None)
        self.say(wire.Closed(request, outcome, tbt_us, cached_tokens))

    async def _keep(self) -> None:
        loop, tries = asyncio.get_running_loop(), 0
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(lambda: _Link(self), self._path)
            except OSError as error:
                tries += 1
                if tries == _LONG:
                    log.warning("waiting for the Conductor: %s", error.strerror or error)
            else:
                tries = 0
                await self._lost.wait()
            await asyncio.sleep(_AGAIN_S)

    # What the link says.

    def heard(self, message: wire.ToFront, link: _Link) -> None:
        """Act on one message."""
        match message:
            case wire.Welcome(url):  # not before: a process that hangs can be connected to
                self._link, self._url = link, url
            case wire.Engines(engines):
                if self.on_engines is not None:
                    self.on_engines(engines)
            case wire.Instances(infos):
                self._infos = infos
            case wire.Count(number):
                link.say(wire.Counts(number, self._counts()))
            case action:
                inbox = self._inboxes.get(action.request)
                if inbox is not None:
                    inbox.put_nowait(action)

    def gone(self) -> None:
        """Nobody there knows of what is under way here."""
        if self._link is not None:
            log.warning("the Conductor is gone; requests under way have failed")
            if self.on_gone is not None:
                self.on_gone()
        self._link, self._infos, self._url = None, [], ""
        for request, inbox in self._inboxes.items():
            inbox.put_nowait(Refuse(request, _GONE))
        self._lost.set()


class _Link(wire.Frames):
    def __init__(self, owner: RemoteConductor) -> None:
        super().__init__("the Conductor", wire.ToFront)
        self._owner = owner

    def heard(self, message: wire.ToFront) -> None:
        self._owner.heard(message, self)

    def lost(self) -> None:
        self._owner.gone()
