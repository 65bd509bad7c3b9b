"""The pool whose master is another process: its events for a gateway, and mounting for members.

It runs on the event loop. While the master is away, the last known events stay in use; a read then
finds out if an object is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from moonserve.core.errors import (
    UNREADABLE,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    MoonserveError,
    Recovering,
    StoreError,
)
from moonserve.core.kv.facts import BlockEvent, BlocksCleared
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient, UpstreamError, check_url
from moonserve.live.http.message import ErrorReply, HttpRequest, Response, json_response
from moonserve.live.http.server import Handler
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection
from moonserve.live.rpc.switching import Callee, switched
from moonserve.live.store import operations, wire
from moonserve.live.store.link import FAILURES, MasterEnded, MasterLink, text
from moonserve.live.store.pool import Pool
from moonserve.live.store.wire import PATH, PROTOCOL

log = logging.getLogger(__name__)
T = TypeVar("T")

_URL = "store_url"
_CALL_S = 5.0
_SAY_S = 5.0
_MOUNT_PAUSE_S = 0.5
_MOUNT_DEADLINE_S = 120.0
_WAIT_S = 20.0
_PAUSE_S = 0.5
_MAX_LEASES = 10_000
_MASTER = Callee("store's master", _URL, StoreError)
_LIMITS = ConnectionLimits(frame_bytes=wire.MAX_REPLY_BYTES)


class _MasterConnection(RpcConnection):
    """The member's end of a connection to the master."""

    peer_ends = False
    """Whether the master has said that its process ends."""

    def noticed(self, message: wire.Ending) -> None:
        """See RpcConnection."""
        self.peer_ends = True


class HttpRpc:
    """The rpc of a Link: one connection to the master, made again when it is lost."""

    def __init__(self, http: HttpClient, url: str, token: str) -> None:
        """http: makes the connection, and ends it when it is closed. Raises ConfigError: the URL is
        invalid."""
        check_url(url, _URL)
        self._http = http
        self.url = url.rstrip("/")
        self._token = token
        self._connection: _MasterConnection | None = None
        """The latest; it may have ended."""
        self._connecting = asyncio.Lock()

    async def __call__(self, op: str, body: bytes, deadline_s: float) -> bytes:
        """Run one operation. Raises what `connect` and RpcConnection.call do; MasterEnded."""
        try:
            return await self._call(op, body, deadline_s)
        except UpstreamError as error:
            if self._connection is not None and self._connection.peer_ends:
                raise MasterEnded(str(error)) from None
            raise

    async def _call(self, op: str, body: bytes, deadline_s: float) -> bytes:
        connection = self._connection
        if connection is None or not connection.is_open:
            try:
                async with asyncio.timeout_at(deadline_s):
                    connection = await self.connect()
            except TimeoutError:
                raise DeadlineExceeded(f"{self.url} accepted no connection in time") from None
        return await connection.call(op, body, deadline_s)

    async def connect(self) -> _MasterConnection:
        """Connect, unless there is a connection. Raises MoonserveError.

        ConfigError: trying again cannot help, since the token is wrong or no store's master is
        there.
        """
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                connection = _MasterConnection(
                    f"store master {self.url}", PROTOCOL, notices=wire.Ending, limits=_LIMITS
                )
                await switched(
                    self._http, self.url, PATH, connection, self._token, _MASTER, _CALL_S
                )
                self._connection = connection
            return self._connection

    def move(self, url: str) -> None:
        """Use the master at this URL from the next call on."""
        if url.rstrip("/") != self.url:
            log.warning("the store's master is at %s now, not at %s", url, self.url)
            self.url = url.rstrip("/")
            if self._connection is not None and self._connection.is_open:
                self._connection.transport.abort()


class RemotePool(Pool):
    """A Pool. Made inside a running loop; `close` it."""

    def __init__(
        self,
        http: HttpClient,
        url: str,
        token: str,
        on_events: Callable[[Sequence[BlockEvent]], None],
    ) -> None:
        """on_events: called with the master's events, in order."""
        self._http = http
        self._token = token
        self._rpc = HttpRpc(http, url, token)
        self._link = MasterLink(self._rpc, _CALL_S)
        self._on_events = on_events
        self._epochs: dict[tuple[SegmentId, str], BlocksCleared] = {}
        """By segment and tier: the event that removes all that was reported of it."""
        self._leases: deque[LeaseId] = deque(maxlen=_MAX_LEASES)
        self._released = asyncio.Event()
        self.known = asyncio.Event()
        """Set once the master has reported everything it has."""
        self._tasks = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(self._release_forever()),
        ]

    def routes(self) -> dict[tuple[str, str], Handler]:
        """HTTP handlers by (method, path)."""
        return {("GET", "/api/segments"): self._segments, ("GET", PATH): self._elsewhere}

    async def lookup(self, query: Mapping[str, str]) -> Any:
        """Return what the master answers to GET /api/segments. Raises MoonserveError."""
        url = f"{self._rpc.url}/api/segments?{urlencode(query)}"
        headers = bearer(self._token)
        reply = await self._http.request("GET", url, headers=headers, timeout_s=_CALL_S)
        if reply.status not in (200, 400):
            raise StoreError(f"{url} answers {reply.status}")
        try:
            if reply.status == 400:
                raise BadRequest(msgspec.json.decode(reply.body, type=ErrorReply).error.message)
            return msgspec.json.decode(reply.body, type=dict[str, Any])
        except UNREADABLE:
            raise StoreError(f"{self._rpc.url} answers, but is no store's master") from None

    def release(self, lease: LeaseId) -> None:
        """See Pool.release."""
        self._leases.append(lease)
        self._released.set()

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """See Pool.copy and Master.copy."""
        call = wire.CopyCall(keys[: wire.MAX_BATCH], to, source)
        return await self._link.call(operations.COPY, call)

    async def drain(self, segment: SegmentId, drains: bool) -> bool:
        """See Pool.drain and Master.drain."""
        return await self._link.call(operations.DRAIN, wire.DrainCall(segment, drains))

    def move(self, url: str) -> None:
        """Use the master at this URL from now on."""
        self._rpc.move(url)

    def tick(self) -> None:
        """Nothing to do: the master has its own clock."""

    async def close(self) -> None:
        """Stop following the events."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _segments(self, request: HttpRequest) -> Response:
        return json_response(await self.lookup(request.query))

    async def _elsewhere(self, request: HttpRequest) -> Response:
        raise BadRequest(f"the store's master is at {self._rpc.url}, not here", _URL)

    async def _release_forever(self) -> None:
        while True:
            await self._released.wait()
            self._released.clear()
            while self._leases:
                await self._link.attempt(
                    operations.RELEASE, wire.ReleaseCall(self._leases.popleft())
                )

    async def _follow(self) -> None:
        start = 0
        at = 0
        reached = True
        while True:
            call = wire.EventsCall(start, at, _WAIT_S)
            try:
                reply = await self._link.call(operations.EVENTS, call, _WAIT_S + _CALL_S)
            except FAILURES as error:
                if reached and not isinstance(error, Recovering):
                    log.warning("store master %s: %s; still trying", self._rpc.url, text(error))
                    reached = False
                await asyncio.sleep(_PAUSE_S)
                continue
            reached = True
            if reply.anew:
                self._pass(list(self._epochs.values()))
                self._epochs.clear()
            self._pass(reply.events)
            start, at = reply.start, reply.at
            self.known.set()

    def _pass(self, events: Sequence[BlockEvent]) -> None:
        for event in events:
            cleared = BlocksCleared(event.segment, event.tier, event.epoch)
            self._epochs[event.segment, event.tier] = cleared
        if events:
            self._on_events(events)


async def mounted(
    reach: Callable[[], Awaitable[object]],
    opens: Callable[[], Awaitable[T]],
    stop: asyncio.Event,
) -> T | None:
    """Return what `opens` makes, once `reach` has reached the master; None: stopped before.

    reach: connects to the master. opens: mounts. Raises ConfigError and BadRequest at once, other
    MoonserveErrors after two minutes.
    """
    deadline_s = time.monotonic() + _MOUNT_DEADLINE_S
    say_s = 0.0
    while not stop.is_set():
        try:
            await reach()  # a segment reserves its memory before it mounts
            return await opens()
        except (ConfigError, BadRequest):
            raise
        except MoonserveError as error:
            if time.monotonic() > deadline_s:
                raise
            if time.monotonic() > say_s:
                log.info("waiting to mount: %s; still trying", error)
                say_s = time.monotonic() + _SAY_S
        await within(stop, _MOUNT_PAUSE_S)
    return None


async def within(stop: asyncio.Event, seconds: float) -> bool:
    """Return whether a stop is asked for within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await stop.wait()
    except TimeoutError:
        return False
