"""How many generations a gateway takes on at once, and how many bodies; the counts of its answers.

`Front` calls it for every backend. Tenants and addresses share both limits (core.shares). A request
whose body has not arrived takes no place of a generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from moonserve.core.errors import MoonserveError, NobodyAlive, Overloaded
from moonserve.core.shares import Party, Shares
from moonserve.core.units import Bytes, Micros, RequestId, Tokens, whole_number
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.exposition import Turn
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    error_response,
    json_response,
)
from moonserve.live.http.server import Handler
from moonserve.live.openai.structure import check_structure
from moonserve.live.turns import Turns

SHUTTING_DOWN = "this server is shutting down"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499
SMALL_BODY_BYTES: Bytes = 64 << 10
"""A body up to this size is decoded at once."""
_STRUCTURE_BYTES_PER_S: Bytes = 16 << 20
"""Of large bodies, what is outside strings; to decode it takes an eighth of that time or less."""
_TEXT_BYTES_PER_S: Bytes = 64 << 20
"""Of large bodies; about what one gateway makes keys of and sends on."""
_STRUCTURE_BYTES: Bytes = 1 << 20
_ID_BYTES: Bytes = 16
"""Room for a token id in JSON, with its comma and spaces."""
_PAUSES = 9
"""After /metrics has been rendered, it is not rendered again for so many times as long."""


@lru_cache(1_024)
def network(address: str) -> str:
    """The address of a client; of IPv6, the network of 64 bits that one client gets at least."""
    if ":" not in address:
        return address
    try:
        bits = int(ipaddress.IPv6Address(address.partition("%")[0]))
    except ValueError:
        return address
    return f"{ipaddress.IPv6Address(bits >> 64 << 64)}/64"


class Limits(msgspec.Struct, frozen=True):
    """The limits of one gateway. The HTTP server has the limit of a body's size."""

    max_in_flight: int = 1_024
    """Generations at once; more are answered 429. Clients below their equal share may use up to 1/4
    more: see core.shares."""
    max_bodies: int = 256
    """Bodies that may be on their way at once; more are answered 429, with the same exception."""
    max_bodies_bytes: Bytes = 64 << 20
    """Bytes of these bodies, as their heads announce them."""
    max_messages: int = 4_096
    offload_bytes: Bytes = 16 << 10
    """Longer prompts are tokenized in a thread of their own, so that other streams go on."""
    max_tokenising_bytes: Bytes = 16 << 20
    """Text that may wait for that thread, which does about 1 MB/s; more is answered 429."""
    wait_ready_us: Micros = 0
    """How long a request waits until instances that serve its model are up."""
    shares_ids: bool = False
    """Whether other processes with the same Conductor or engines may get requests with the same
    ids."""


class Limiter:
    """Counts requests in and out, and refuses those over the limits."""

    def __init__(self, limits: Limits, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.draining = False
        self._limits = limits
        self._in_flight = Shares()
        """Generations under way."""
        self._bodies = Shares()
        """Bodies on their way."""
        self._bodies_bytes = Shares()
        self._decoding = Turns()
        self._rendering = Turns()
        self._left = asyncio.Event()

    def readiness(self, alive: Sequence[str], hindrance: str, lack: str) -> Response:
        """The answer of /ready. alive: models that can be served; hindrance: why clients should use
        another gateway, empty if they need not; lack: what is missing if no model is alive.

        It is returned and not raised, because a client that polls /ready is no warning in the log.
        """
        if self.draining:
            return error_response(NobodyAlive(SHUTTING_DOWN))
        if hindrance:
            return error_response(NobodyAlive(f"this server is not ready: {hindrance}"))
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

    def check(self, party: Party) -> None:
        """Raise NobodyAlive or Overloaded if `enter` would do it now: before a body is received."""
        if self.draining:
            raise NobodyAlive(SHUTTING_DOWN)
        all_now = self.metrics.in_flight
        if all_now >= self._in_flight.limit(self._limits.max_in_flight, party):
            raise Overloaded(
                f"{all_now} requests are being served, the limit of this gateway",
                "gateway_in_flight",
                1.0,
            )

    def enter(self, party: Party) -> None:
        """Count one more generation; `leave` must follow. Raises NobodyAlive, Overloaded."""
        self.check(party)
        self.metrics.in_flight += 1
        self._in_flight.take(party)

    @contextlib.contextmanager
    def body(self, headers: Mapping[str, str], most: Bytes, party: Party) -> Iterator[None]:
        """Count a body while the block receives and decodes it. Raises Overloaded.

        Call it for a body that has not arrived with its head: small ones find room always. headers:
        of its request; most: its largest size.
        """
        limits = self._limits
        declared = whole_number(headers.get("content-length", ""))
        size = most
        if declared is not None:
            size = max(1, min(size, declared))
        count_limit = self._bodies.limit(limits.max_bodies, party)
        bytes_limit = self._bodies_bytes.limit(limits.max_bodies_bytes, party)
        bytes_used = self._bodies_bytes.used
        if self._bodies.used >= count_limit or (bytes_used and bytes_used + size > bytes_limit):
            raise Overloaded(
                f"{self._bodies.used} request bodies with {bytes_used} bytes are on their way, the"
                " limit of this gateway; send the request again later",
                "gateway_bodies",
                1.0,
            )
        self._bodies.take(party)
        self._bodies_bytes.take(party, size)
        try:
            yield
        finally:
            self._bodies.give(party)
            self._bodies_bytes.give(party, size)

    async def decoding_turn(self, party: Party, body: bytes, longest: Tokens) -> None:
        """Return when this body may be decoded, which stops all streams meanwhile.

        It is for bodies over SMALL_BODY_BYTES. After one of them the streams have the loop for
        themselves for a while, and then another client's body is next. longest: the longest context
        of any model. Raises BadRequest if it would take too long to decode.
        """
        await self._decoding.begin(party, len(body))
        turn_s = len(body) / _TEXT_BYTES_PER_S
        try:
            structure = await check_structure(body, _STRUCTURE_BYTES + _ID_BYTES * longest)
            turn_s += structure / _STRUCTURE_BYTES_PER_S
        finally:
            asyncio.get_running_loop().call_later(turn_s, self._decoding.end)

    def named(self, given: str, taken: bool) -> RequestId:
        """The id of a request. given: by its client, or made for it; taken: another request under
        way has that id.

        Two requests with one id would share leases and ledgers. The reply has the new id, by which
        decisions are found.
        """
        if taken or self._limits.shares_ids:
            given = f"{given}-{secrets.token_hex(4)}"
        return RequestId(given)

    def leave(self, gone: bool, party: Party) -> None:
        """Count the end of a generation, however it ended. gone: whether its client has
        disconnected."""
        self.metrics.in_flight -= 1
        self._in_flight.give(party)
        self.metrics.disconnects += gone
        self._left.set()

    async def metrics_text(self, request: HttpRequest) -> Response:
        """GET /metrics. Clients take turns, and most of the time belongs to other requests."""
        await self._rendering.begin(Party("", network(request.address)), 1)
        turn = Turn()
        try:
            return Response(body=await self.metrics.text(turn), content_type=METRICS_TYPE)
        finally:
            pause_s = _PAUSES * turn.worked_s
            asyncio.get_running_loop().call_later(pause_s, self._rendering.end)
