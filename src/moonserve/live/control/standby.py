"""A standby beside the Conductor that leads: it notices when that one is lost, and takes over.

It keeps a connection with beats to the leader. A killed leader closes it at once; one that hangs
misses its beats. Then the standby tries to connect once more, and deposes the leader in the
registry if that fails. A leader that lives after all is no danger: its term is over (ADR 25), and
it is told so. Nothing here decides where a request goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError, NobodyAlive, RegistryError
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Routes
from moonserve.live.http.switch import Switch
from moonserve.live.ports import Candidacy, Registry
from moonserve.live.registry.entries import (
    CONDUCTORS,
    LEADER,
    ConductorEntry,
    LeaderEntry,
    decoded,
    leader_of,
)
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection
from moonserve.live.rpc.switching import Callee, switched

log = logging.getLogger(__name__)

_PROTOCOL = "moonserve-standby/1"
_PATH = "/internal/standby"
_TERM_PATH = "/internal/term"
_LIMITS = ConnectionLimits(beat_s=0.25, missed_beats=5)
"""A leader that hangs is noticed in less than one and a half seconds."""
_CONNECT_S = 0.5
_AGAIN_S = 0.2
_TOLD_S = 2.0
_MOST_LED = 8
_LEADER = Callee("Conductor", "registry", NobodyAlive, "run one version in the cluster")


class TermBody(msgspec.Struct, frozen=True):
    """A Conductor leads in this term."""

    term: int


async def leader_in(registry: Registry) -> tuple[LeaderEntry, ConductorEntry | None]:
    """Who leads, and its entry. Raises RegistryError."""
    value = (await registry.read(LEADER)).get(LEADER)
    leader = LeaderEntry("", 0) if value is None else leader_of(value)
    entries = decoded(await registry.read(CONDUCTORS), CONDUCTORS, ConductorEntry)
    return leader, entries.get(leader.name)


class Standby:
    """See the module. Both roles of a Conductor that may be replaced: `run` for ever."""

    def __init__(
        self,
        registry: Registry,
        http: HttpClient,
        token: str,
        deposed: Callable[[int], None],
        led_by: Callable[[str], None],
    ) -> None:
        """deposed: called with the term of another Conductor that leads. led_by: called with the
        URL of the leader, whenever it is another one."""
        self._registry = registry
        self._http = http
        self._token = token
        self._deposed = deposed
        self._led_by = led_by
        self._led: deque[ConductorEntry] = deque(maxlen=_MOST_LED)
        """Those that this one has stood beside: the registry may have no entry of them any more."""

    def routes(self) -> Routes:
        """Where standbys connect, and report that they lead."""
        return {("GET", _PATH): self._channel, ("POST", _TERM_PATH): self._term}

    async def run(self, me: str, candidacy: Candidacy) -> None:
        """Stay beside whatever Conductor leads; take over when it is lost."""
        while True:
            try:
                leader, entry = await leader_in(self._registry)
                if leader.term and leader.name != me:
                    await self._stay_beside(leader, entry, candidacy)
            except RegistryError as error:
                log.debug("standby: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _stay_beside(
        self, leader: LeaderEntry, entry: ConductorEntry | None, candidacy: Candidacy
    ) -> None:
        """Return once another one leads. Raises RegistryError."""
        if entry is not None:
            self._led_by(entry.url)
            self._led.append(entry)
            link = _Link(accepted=False)
            try:
                await switched(self._http, entry.url, _PATH, link, self._token, _LEADER, _CONNECT_S)
            except MoonserveError as error:
                log.warning("the Conductor at %s leads and is lost: %s", entry.url, error)
            else:
                await link.over.wait()
                return  # look again: it may be there, or another one leads
        await candidacy.depose(leader.term)

    async def tell_others(self, me: str, term: int, leads: Callable[[], int]) -> None:
        """Tell all other Conductors that `me` leads in this term, until they know or it is over.

        The one that led may be cut off from the registry, or may have slept.
        """
        told: set[ConductorEntry] = set()
        while leads() == term:
            others = set(self._led)
            with contextlib.suppress(RegistryError):
                found = await self._registry.read(CONDUCTORS)
                others |= set(decoded(found, CONDUCTORS, ConductorEntry).values())
            for entry in sorted(others - told, key=lambda it: it.name):
                if entry.name == me or await self._tell(entry, term):
                    told.add(entry)
            await asyncio.sleep(_AGAIN_S * 5)

    async def _tell(self, entry: ConductorEntry, term: int) -> bool:
        body = msgspec.json.encode(TermBody(term))
        try:
            reply = await self._http.request(
                "POST",
                entry.url + _TERM_PATH,
                headers=bearer(self._token),
                body=body,
                timeout_s=_TOLD_S,
            )
        except MoonserveError as error:
            log.debug("%s does not know of term %d: %s", entry.name, term, error)
            return False
        return reply.status == 200

    async def _channel(self, request: HttpRequest) -> Switch:
        if request.headers.get("upgrade") != _PROTOCOL:
            raise BadRequest(
                f"a standby has to speak {_PROTOCOL} here; run one version of moonserve in the"
                " cluster",
                "upgrade",
            )
        return Switch(_PROTOCOL, _Link(accepted=True))

    async def _term(self, request: HttpRequest) -> Response:
        try:
            said = msgspec.json.decode(await request.body(), type=TermBody)
        except UNREADABLE as error:
            raise BadRequest(f"body is no term: {error}", "body") from None
        self._deposed(said.term)
        return json_response({})


class _Link(RpcConnection):
    """A connection that carries beats only."""

    def __init__(self, accepted: bool) -> None:
        peer = "a standby" if accepted else "the Conductor that leads"
        super().__init__(peer, _PROTOCOL, limits=_LIMITS, accepted=accepted)
        self.over = asyncio.Event()
        """Set once the connection has ended."""

    def noticed(self, message: Any) -> None:
        """There are no notices."""

    def lost(self) -> None:
        self.over.set()
