"""A part of a process: what it serves over HTTP, what it counts, and how it starts and stops.

The parts implement it (Control, ExternalEngines, the links between fronts and Conductor);
live.process puts them together.
"""

from __future__ import annotations

from typing import TypeAlias

from prometheus_client.registry import Collector

from moonserve.live.http.server import Handler

Routes: TypeAlias = dict[tuple[str, str], Handler]
"""Handlers by (method, path)."""


class Part:
    """A part with nothing of its own; parts override what they have."""

    def routes(self) -> Routes:
        """Handlers of exact paths. Those of a later part of the process win."""
        return {}

    def prefixes(self) -> Routes:
        """Handlers of all paths that begin so."""
        return {}

    def collectors(self) -> list[Collector]:
        """What the part counts, for /metrics."""
        return []

    async def prepare(self) -> None:
        """Called before the process listens. Raises MoonserveError: the process cannot start."""

    async def start(self, port: int) -> None:
        """Called once the process listens at `port`. Raises MoonserveError, as `prepare`."""

    async def stop(self) -> None:
        """Called when the server listens no more, also after a `prepare` or `start` that failed."""
