"""The pool whose master is another process: its events for a gateway, mounting for its members.

On the event loop. While the master is away, the events told last stay true as far as
anybody knows; what is not there any more is then missed when it is read.
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

from moonserve.core.errors import BadRequest, ConfigError, MoonserveError, StoreError
from moonserve.core.facts import BlockEvent, BlocksCleared
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Handler
from moonserve.live.store import wire
from moonserve.live.store.link import Link
from moonserve.live.store.local import STORE_PREFIX

log = logging.getLogger(__name__)
T = TypeVar("T")

_CALL_S = 5.0
_MOUNT_PAUSE_S = 0.5
_MOUNT_DEADLINE_S = 120.0
_WAIT_S = 20.0
_PAUSE_S = 0.5
_MAX_LEASES = 10_000


class HttpRpc:
    """The rpc of a Link, by HTTP to wherever a master is."""

    def __init__(self, http: HttpClient, url: str, token: str) -> None:
        self._http = http
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/msgpack"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    async def ping(self) -> None:
        """Return if the master answers at all. Raises MoonserveError."""
        await self._http.request("GET", self.url + "/health", timeout_s=_CALL_S)

    async def __call__(self, op: str, body: bytes, timeout_s: float = _CALL_S) -> bytes:
        """POST one operation. Raises MoonserveError; ConfigError where the token is wrong."""
        reply = await self._http.request(
            "POST",
            self.url + STORE_PREFIX + op,
            headers=self._headers,
            body=body,
            timeout_s=timeout_s,
        )
        if reply.status == 401:
            raise ConfigError(f"{self.url} does not accept it; set MOONSERVE_TOKEN", "token")
        if reply.status != 200:
            text = reply.body[:300].decode("utf-8", "replace")
            raise StoreError(f"{op}: {self.url} answers {reply.status} {text}")
        return reply.body


class RemotePool:
    """The same as LocalPool towards the gateway. Made inside a running loop; `close` it."""

    def __init__(
        self,
        http: HttpClient,
        url: str,
        token: str,
        tell: Callable[[Sequence[BlockEvent]], None],
    ) -> None:
        """`tell` gets the master's events, in order."""
        self._http = http
        self._rpc = HttpRpc(http, url, token)
        self._link = Link(self._rpc, _CALL_S)
        self._tell = tell
        self._epochs: dict[tuple[SegmentId, str], BlocksCleared] = {}
        """What clears each segment's tier of all that was told of it."""
        self._leases: deque[LeaseId] = deque(maxlen=_MAX_LEASES)
        self._released = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(self._release_forever()),
        ]

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {("GET", "/api/segments"): self._segments}

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes."""
        return {("POST", STORE_PREFIX): self._operation}

    async def lookup(self, query: Mapping[str, str]) -> Any:
        """What the master answers to GET /api/segments. Raises MoonserveError."""
        url = f"{self._rpc.url}/api/segments?{urlencode(query)}"
        reply = await self._http.request("GET", url, timeout_s=_CALL_S)
        if reply.status not in (200, 400):
            raise StoreError(f"{url} answers {reply.status}")
        try:
            told = msgspec.json.decode(reply.body, type=dict[str, Any])
        except msgspec.DecodeError:
            raise StoreError(f"{self._rpc.url} answers, but is no store's master") from None
        if reply.status == 400:
            raise BadRequest(told["error"]["message"])
        return told

    def release(self, lease: LeaseId) -> None:
        """End a lease soon; should that fail, it ends by its time to live."""
        self._leases.append(lease)
        self._released.set()

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """See Master.copy; of very many only the first. May raise MoonserveError or OSError."""
        call = wire.CopyCall(keys[: wire.MAX_BATCH], to, source)
        return (await self._link.call("copy", call, wire.Copying)).count

    def tick(self) -> None:
        """Nothing to do: the master has its own clock."""

    async def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _segments(self, request: HttpRequest) -> Response:
        return json_response(await self.lookup(request.query))

    async def _operation(self, request: HttpRequest) -> Response:
        raise BadRequest(f"the store's master is at {self._rpc.url}: set store_url", "store_url")

    async def _release_forever(self) -> None:
        while True:
            await self._released.wait()
            self._released.clear()
            while self._leases:
                await self._link.tell("release", wire.ReleaseCall(self._leases.popleft()))

    async def _follow(self) -> None:
        start, at, heard = 0, 0, True
        while True:
            body = msgspec.msgpack.encode(wire.EventsCall(start, at, _WAIT_S))
            try:
                answer = await self._rpc("events", body, _WAIT_S + _CALL_S)
                reply = msgspec.msgpack.decode(answer, type=wire.EventsReply | None)
            except (MoonserveError, msgspec.DecodeError) as error:
                if heard:
                    log.warning("store master %s: %s; still trying", self._rpc.url, error)
                heard = False
                await asyncio.sleep(_PAUSE_S)
                continue
            heard = True
            if reply is None:
                await asyncio.sleep(_PAUSE_S)
                continue
            if reply.anew:
                self._pass(list(self._epochs.values()))
                self._epochs.clear()
            self._pass(reply.events)
            start, at = reply.start, reply.at

    def _pass(self, events: Sequence[BlockEvent]) -> None:
        for event in events:
            cleared = BlocksCleared(event.segment, event.tier, event.epoch)
            self._epochs[event.segment, event.tier] = cleared
        if events:
            self._tell(events)


async def mounted(rpc: HttpRpc, opens: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T | None:
    """What `opens` makes of the pool, waiting for the master to be there; None: stopped before.

    Raises ConfigError at once, other MoonserveErrors after two minutes.
    """
    deadline_s = time.monotonic() + _MOUNT_DEADLINE_S
    while not stop.is_set():
        try:
            await rpc.ping()  # a segment reserves its memory before it mounts
            return await opens()
        except ConfigError:
            raise
        except MoonserveError as error:
            if time.monotonic() > deadline_s:
                raise
            log.info("waiting to mount: %s", error)
        await within(stop, _MOUNT_PAUSE_S)
    return None


async def within(stop: asyncio.Event, seconds: float) -> bool:
    """Whether a stop was asked for, or is within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await stop.wait()
    except TimeoutError:
        return False
