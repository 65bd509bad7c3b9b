"""Endpoints: the addresses of instances in the form ip:port, by which proxies know them.

`front` asks for them. An engine that is described by a name in DNS is looked up, and looked up
again after a while. Nothing here opens a connection to an engine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from moonserve.core.schedule.facts import InstanceInfo

log = logging.getLogger(__name__)

_FRESH_S = 30.0
_LOOK_UP_S = 2.0
_MOST_KEPT = 16_384
_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}
        """URL -> endpoint, and until when it is used, by the loop's clock."""

    async def of(self, info: InstanceInfo) -> str:
        """The endpoint of an instance; empty: its host's name cannot be resolved."""
        now_s = asyncio.get_running_loop().time()
        known = self._known.get(info.url)
        if known is not None and now_s < known[1]:
            return known[0]
        found = await _look_up(info.url)
        while len(self._known) >= _MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[info.url] = found, now_s + _FRESH_S
        return found

    async def among(
        self, infos: Iterable[InstanceInfo], names: Iterable[str]
    ) -> list[InstanceInfo]:
        """Those of these instances that have one of these endpoints."""
        wanted = frozenset(normal(name) for name in names)
        return [info for info in infos if await self.of(info) in wanted]


def normal(endpoint: str) -> str:
    """An endpoint in one spelling; text that is none is returned as it is."""
    host, _, port = endpoint.strip().rpartition(":")
    try:
        return _joined(ipaddress.ip_address(host.strip("[]")), int(port))
    except ValueError:
        return endpoint


def _joined(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


async def _look_up(url: str) -> str:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80)
    try:
        return _joined(ipaddress.ip_address(host), port)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _joined(ipaddress.ip_address(found[0][4][0]), port)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("%s: its host has no address, so no proxy can be sent there: %s", url, error)
        return ""
