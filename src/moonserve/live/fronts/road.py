"""How a front reaches its Conductor: a unix socket, a URL, or whatever leads in a registry.

`road_of` makes one from the setting `conductor`. RemoteConductor connects by it, and Forward sends
requests by it. All of them speak HTTP; a connection of a front is one that was switched
(live.rpc.switching). Nothing here tries again.
"""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.errors import NobodyAlive, RegistryError
from moonserve.live.fronts import wire
from moonserve.live.http.client import HttpClient, check_url, client_of
from moonserve.live.http.unix import check_socket_path
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import (
    CONDUCTORS,
    LEADER,
    ConductorEntry,
    decoded,
    leader_of,
)
from moonserve.live.rpc.connection import RpcConnection
from moonserve.live.rpc.switching import Callee, switched
from moonserve.live.tls.contexts import Tls

_FIELD = "conductor"
_CONDUCTOR = Callee(
    "Conductor that takes fronts", _FIELD, NobodyAlive, "run `moonserve conductor` there"
)
_CALL_S = 5.0
_SCHEMES = ("http://", "https://")
IN_REGISTRY = ("etcd://", "etcds://")
"""How the address of a registry begins."""


class Road:
    """The way to one Conductor, wherever that is now."""

    def __init__(
        self, where: str, client: Callable[[], HttpClient], token: str, url: str = ""
    ) -> None:
        """where: the setting, for logs and errors. client: makes an HttpClient that can call it.
        url: of the Conductor; empty: `find` is overridden."""
        self.where = where
        self.client = client
        self.token = token
        self._url = url
        self._http = client()

    async def find(self) -> str:
        """The URL of the Conductor now. Raises NobodyAlive: there is none."""
        return self._url

    async def follow(self, leads: Callable[[int], None]) -> None:
        """Call `leads` with the term of the Conductor that leads, whenever that is another one.

        It never returns if the registry has it; else at once.
        """

    async def connect(self, link: RpcConnection, url: str) -> None:
        """Connect `link` to the Conductor at this URL.

        Raises ConfigError: trying again cannot help; another MoonserveError: it may.
        """
        shown = self.shown(url)
        await switched(self._http, url, wire.PATH, link, self.token, _CONDUCTOR, _CALL_S, shown)

    def shown(self, url: str) -> str:
        """The address of the Conductor at this URL, for logs and errors."""
        return self.where if is_socket(self.where) else url

    async def close(self) -> None:
        """Cut all connections that were made by this road."""
        await self._http.close()


class LeaderRoad(Road):
    """The way to the Conductor that leads in a registry."""

    def __init__(
        self, where: str, client: Callable[[], HttpClient], token: str, registry: Registry
    ) -> None:
        super().__init__(where, client, token)
        self._registry = registry
        self._known: list[str] = []
        """The URLs of all Conductors, the leader's first, as the registry had them last."""

    async def find(self) -> str:
        """See Road. While the registry is away: all that were known, in turn."""
        try:
            leaders = await self._registry.read(LEADER)
            entries = await self._registry.read(CONDUCTORS)
        except RegistryError as error:
            if not self._known:
                raise NobodyAlive(f"the registry does not answer: {error}") from None
            self._known = [*self._known[1:], self._known[0]]
            return self._known[-1]
        found = decoded(entries, CONDUCTORS, ConductorEntry)
        leader = found.get(leader_of(leaders.get(LEADER, b"")).name)
        if leader is None:
            raise NobodyAlive("no Conductor leads in the registry")
        others = [it.url for it in found.values() if it is not leader]
        self._known = [leader.url, *others]
        return leader.url

    async def follow(self, leads: Callable[[int], None]) -> None:
        """See Road."""
        async for entries in self._registry.watch(LEADER):
            if LEADER in entries:
                leads(leader_of(entries[LEADER]).term)


def is_socket(where: str) -> bool:
    """Whether this address is the path of a unix socket."""
    return "/" in where and "://" not in where


def road_of(where: str, token: str, tls: Tls | None, registry: Registry | None) -> Road:
    """The way to the Conductor at this address: a path with a slash, host:port or a URL, or a
    registry, which is open then. Raises ConfigError: it is no address."""
    if where.startswith(IN_REGISTRY):
        assert registry is not None, "opened by the caller"
        return LeaderRoad(where, lambda: client_of(tls), token, registry)
    if not where.startswith(_SCHEMES):
        if is_socket(where):
            check_socket_path(where, _FIELD)
            return Road(where, lambda: HttpClient(path=where), token, "http://localhost")
        where = f"{'http' if tls is None else 'https'}://{where}"
    check_url(where, _FIELD)
    return Road(where, lambda: client_of(tls), token, where.rstrip("/"))
