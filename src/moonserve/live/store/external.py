"""The pool of another product as a gateway sees it: Mooncake's, or none.

External engines keep their KV themselves. Which blocks Mooncake's pool holds, the gateway knows by
the reports of workers (store.reports); on which segments, only mooncake_master knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moonserve.core.errors import BadRequest
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import Handler
from moonserve.live.store.pool import Pool
from moonserve.live.store.wire import PATH

_MOONCAKE = (
    "the KV of this cluster is in Mooncake's pool, and only mooncake_master knows where: ask it"
    " at /metrics and /metrics/summary of its --metrics_port (9003 unless set; `moonserve up` gives"
    " the one it starts none, so start one yourself and name it with --mooncake-master)."
    " See index_blocks of /api/stats for the number of blocks that are known to be there"
)
_NONE = (
    "external engines keep their KV themselves; see index_blocks of /api/stats for the number of"
    " blocks that they are known to hold"
)


class ExternalPool(Pool):
    """A Pool that has nothing to do, and refers questions to the other product."""

    def __init__(self, backend: Literal["mooncake", "none"] = "mooncake") -> None:
        self._backend = backend

    def routes(self) -> dict[tuple[str, str], Handler]:
        """HTTP handlers by (method, path)."""
        return {("GET", "/api/segments"): self._refuse, ("GET", PATH): self._refuse}

    async def lookup(self, query: Mapping[str, str]) -> Any:
        """Return the store's part of /api/stats."""
        return {"backend": self._backend}

    def release(self, lease: LeaseId) -> None:
        """Nothing to do: Mooncake's leases end by their time."""

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """Return 0: Mooncake places its replicas itself."""
        return 0

    async def drain(self, segment: SegmentId, drains: bool) -> bool:
        """Return False: the pool has no segment that this process knows."""
        return False

    def tick(self) -> None:
        """Nothing to do: Mooncake's master has its own clock."""

    async def close(self) -> None:
        """Nothing to do."""

    async def _refuse(self, request: HttpRequest) -> Response:
        raise BadRequest(_MOONCAKE if self._backend == "mooncake" else _NONE, "store")
