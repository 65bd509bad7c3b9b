"""The pool of KV blocks as a gateway uses it, wherever its master is.

LocalPool (the master is in this process), RemotePool (in another) and ExternalPool (Mooncake's, or
none) implement it; live.control uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.metrics_core import Metric

from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.server import Handler


class Pool(Protocol):
    """See the module. Made inside a running loop, ended by `close`."""

    def routes(self) -> dict[tuple[str, str], Handler]:
        """HTTP handlers by (method, path)."""

    async def lookup(self, query: Mapping[str, str]) -> Any:
        """What GET /api/segments answers to this query, for JSON. Raises MoonserveError."""

    def metrics(self) -> Iterable[Metric]:
        """The ledgers of a master in this process, for /metrics; nothing if it is elsewhere."""
        return ()

    def release(self, lease: LeaseId) -> None:
        """End a lease soon. If that fails, it ends by its time to live."""

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """Make replicas of the first wire.MAX_BATCH blocks on `to`; returns how many will exist.

        See Master.copy. May raise MoonserveError or OSError.
        """

    async def drain(self, segment: SegmentId, drains: bool) -> bool:
        """Move everything off a segment, or use it again. False: the pool has none of that name.

        May raise MoonserveError or OSError.
        """

    def ends(self) -> None:
        """The process begins to end: a master in it says so to its members."""
        return

    def tick(self) -> None:
        """Let time pass at a master in this process; to be called about twice a second."""

    async def close(self) -> None:
        """Stop all tasks."""
