"""How many connections a server accepts, in all and from one address, and which one makes room.

`http.server` asks here for each connection. Nothing here opens or closes a socket.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

C = TypeVar("C", bound=Hashable)

Place: TypeAlias = Literal["own", "reserved", "none"]
"""Whether a connection has a place of its own, one of the reserve, or must be closed."""

_MOST = 16_384
_OTHER_DESCRIPTORS = 128
"""Descriptors that a process needs beside its connections."""
_RESERVE = 64


class PlaceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most connections of one server."""

    connections: int = 0
    """In all; 0: by the process's limit of open files, at most 16,384."""
    per_address: int = 0
    """From one address; 0: half of all. Loopback has no such limit."""
    files_each: int = 1
    """Descriptors that one connection with a request needs."""


def descriptors() -> int:
    """Raise this process's limit of open files as far as it may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems say "no limit" and have one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return _MOST * 4 if soft == resource.RLIM_INFINITY else soft


class _Peer(Generic[C]):
    """The connections from one address."""

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded
        self.count = 0
        self.idle: dict[C, None] = {}
        """Those without a request, the one that is idle the longest first."""


class Places(Generic[C]):
    """Counts connections in and out, and chooses the idle ones that make room.

    If all places are taken, an idle connection of the address with the most connections makes room.
    If none is idle, a few more connections get a place of the reserve: the server lets them do
    little.
    """

    def __init__(self, limits: PlaceLimits) -> None:
        by_files = min(_MOST, (descriptors() - _OTHER_DESCRIPTORS) // limits.files_each)
        self.most = limits.connections or max(1, by_files)
        self.most_per_address = limits.per_address or max(1, self.most // 2)
        self.reserve = min(_RESERVE, max(1, self.most // 4))
        self.count = 0
        self.refused = 0
        """Connections that were closed because there was no place."""
        self._peers: dict[str, _Peer[C]] = {}
        self._by: dict[C, tuple[str, _Peer[C]]] = {}

    def enter(self, connection: C, address: str) -> tuple[Place, C | None]:
        """Count a new connection, which is idle; `leave` must follow.

        Return its place, and the connection that is to be closed for it.
        """
        address = address.partition("%")[0]  # the rest names an interface
        name = _network(address)
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(bool(address) and not ip_address(address).is_loopback)
        place: Place = "own"
        out = None
        if peer.bounded and peer.count >= self.most_per_address:
            place = "none"
        elif self.count >= self.most:
            out = self._longest_idle()
            if out is not None:
                self.busy(out)
            else:
                place = "reserved" if self.count < self.most + self.reserve else "none"
        self.refused += place == "none"
        self.count += 1
        peer.count += 1
        peer.idle[connection] = None
        self._by[connection] = name, peer
        return place, out

    def leave(self, connection: C) -> None:
        """Count the end of a connection."""
        name, peer = self._by.pop(connection)
        peer.idle.pop(connection, None)
        peer.count -= 1
        self.count -= 1
        if not peer.count:
            del self._peers[name]

    def busy(self, connection: C) -> None:
        """The connection has a request: it makes no room for others."""
        self._by[connection][1].idle.pop(connection, None)

    def idle(self, connection: C) -> None:
        """The connection has no request from now on."""
        self._by[connection][1].idle[connection] = None

    def _longest_idle(self) -> C | None:
        idle = [peer for peer in self._peers.values() if peer.idle]
        if not idle:
            return None
        return next(iter(max(idle, key=lambda peer: peer.count).idle))


def _network(address: str) -> str:
    """The addresses that count as one client: of IPv6, those with one prefix of 64 bits."""
    if ":" not in address:
        return address
    return str(ip_network((address, 64), strict=False).network_address)
