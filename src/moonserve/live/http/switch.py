"""Connections that switch to another protocol after an HTTP request for it (RFC 9110, 7.8).

A server's handler answers with a Switch, and `HttpClient.upgrade` asks for one: so one port and one
check of the token serve both. This module knows nothing of the other protocol.
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
        """Use this connection from now on; call `lost` when it ends, for HTTP's own records."""
        self.transport = transport
        self._http_lost = lost
        transport.set_protocol(self)

    def unused(self) -> None:
        """The connection ended before this protocol could take it over."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._http_lost(exc)
        del self._http_lost  # it belongs to the connection: a closed one is no reference cycle


class Switch(msgspec.Struct):
    """A reply that hands the connection to `protocol`, called `name` in the Upgrade header."""

    name: str
    protocol: Switched
