"""The parts of a process that serves HTTP.

`live.process` puts parts together; Control, the external engines, records and the like derive from
`ProcessPart`. A part opens no socket by itself.
"""

from __future__ import annotations

from prometheus_client.registry import Collector

from moonserve.live.http.server import Routes


class ProcessPart:
    """A part of a process: what it serves over HTTP, what it counts, and how it starts and stops.

    The parts override what they have (Control, ExternalEngines, the links between fronts and
    Conductor); live.process puts them together.
    """

    proxies_at = ""
    """Where the part listens for proxies, once it has started; empty: it does not."""

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
