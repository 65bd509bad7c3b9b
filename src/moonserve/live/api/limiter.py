"""How many generations a gateway takes on at once, and the counts of its answers.

`Front` calls it for every backend.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from moonserve.core.errors import MoonserveError, NobodyAlive, Overloaded
from moonserve.core.units import Bytes, RequestId
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    error_response,
    json_response,
)
from moonserve.live.http.server import Handler

SHUTTING_DOWN = "this gateway is shutting down"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499


class Limits(msgspec.Struct, frozen=True):
    """The limits of one gateway. The HTTP server has the limit of a body's size."""

    max_in_flight: int = 1_024
    """Generations at once; more are answered 429. Tenants below their equal share may use up to 1/8
    more."""
    max_messages: int = 4_096
    offload_bytes: Bytes = 16 << 10
    """Longer prompts are tokenized in a thread of their own, so that other streams go on."""
    max_tokenising_bytes: Bytes = 16 << 20
    """Text that may wait for that thread, which does about 1 MB/s; more is answered 429."""
    shares_ids: bool = False
    """Whether other processes with the same Conductor or engines may get requests with the same
    ids."""


class Limiter:
    """Counts requests in and out, and refuses those over the limits."""

    def __init__(self, limits: Limits, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.draining = False
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        """Generations under way, by tenant."""
        self._left = asyncio.Event()

    def readiness(self, alive: Sequence[str], hindrance: str, lack: str) -> Response:
        """The answer of /ready. alive: models that can be served; hindrance: why clients should use
        another gateway, empty if they need not; lack: what is missing if no model is alive.

        It is returned and not raised, because a client that polls /ready is no warning in the log.
        """
        if self.draining:
            return error_response(NobodyAlive(SHUTTING_DOWN))
        if hindrance:
            return error_response(NobodyAlive(f"this gateway is not ready: {hindrance}"))
        if not alive:
            return error_response(NobodyAlive(lack))
        return json_response({"status": "ready", "models": alive})

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no generation is under way, streams included. False: `timeout_s` is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.metrics.in_flight:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    def counted(
        self, route: str, handler: Callable[[HttpRequest], Awaitable[Response | StreamingResponse]]
    ) -> Handler:
        """The handler, with its answers counted by route and status."""
        requests = self.metrics.requests

        async def counted(request: HttpRequest) -> Response | StreamingResponse:
            status = 500
            try:
                reply = await handler(request)
                status = reply.status
                return reply
            except MoonserveError as error:
                status = error.status
                if isinstance(error, Overloaded):
                    self.metrics.rejected[error.reason] += 1
                raise
            except asyncio.CancelledError:
                status = _CLIENT_GONE
                raise
            finally:
                requests[route, status] += 1

        return counted

    def enter(self, tenant: str) -> None:
        """Count one more generation; `leave` must follow. Raises NobodyAlive, Overloaded."""
        if self.draining:
            raise NobodyAlive(SHUTTING_DOWN)
        most, all_now = self._limits.max_in_flight, self.metrics.in_flight
        if self._in_flight[tenant] * len(self._in_flight) < all_now:
            most += most // 8
        if all_now >= most:
            raise Overloaded(
                f"{all_now} requests are being served, the limit of this gateway",
                "gateway_in_flight",
                1.0,
            )
        self.metrics.in_flight += 1
        self._in_flight[tenant] += 1

    def named(self, http: HttpRequest, taken: bool) -> RequestId:
        """The id of a request. taken: another request under way has the id that the client sent.

        Two requests with one id would share leases and ledgers. The reply has the new id, by which
        decisions are found.
        """
        if taken or self._limits.shares_ids:
            http.id = f"{http.id}-{secrets.token_hex(4)}"
        return RequestId(http.id)

    def leave(self, http: HttpRequest, tenant: str) -> None:
        """Count the end of a generation, however it ended."""
        self.metrics.in_flight -= 1
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        self.metrics.disconnects += http.gone
        self._left.set()

    async def metrics_text(self, request: HttpRequest) -> Response:
        """GET /metrics."""
        return Response(body=self.metrics.text(), content_type=METRICS_TYPE)
