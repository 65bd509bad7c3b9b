"""Connections that go on in another protocol once an HTTP request has asked for it (RFC 9110, 7.8).

A server's handler answers with a Switch, `HttpClient.upgrade` asks for one: one port, one check of
the token. What is spoken then is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec


class Switched(asyncio.Protocol):
    """A protocol that takes a connection over from HTTP, at either end."""

    transport: asyncio.Transport

    def take_over(
        self, transport: asyncio.Transport, lost: Callable[[Exception | None], None]
    ) -> None:
        """Speak on this connection from now on; `lost` ends what HTTP knows of it."""
        self.transport = transport
        self._http_lost = lost
        transport.set_protocol(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._http_lost(exc)


class Switch(msgspec.Struct):
    """A reply after which `protocol`, called `name` in the Upgrade header, has the connection."""

    name: str
    protocol: Switched
