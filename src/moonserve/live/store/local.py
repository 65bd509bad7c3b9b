"""The store's master in this process: its operations, people's questions, and its events.

A gateway's process or a master's own process has one. Its process lets in who has the
cluster's token only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.metrics_core import Metric

from moonserve.core.errors import BadRequest
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Handler
from moonserve.live.http.switch import Switch
from moonserve.live.rpc.connection import Answer, ConnectionLimits, RpcConnection
from moonserve.live.store import admin, operations, wire
from moonserve.live.store.metrics import master_metrics
from moonserve.live.store.pool import Pool
from moonserve.live.store.server import MasterService
from moonserve.live.store.wire import PATH, PROTOCOL

_LIMITS = ConnectionLimits(unread_bytes=2 * wire.MAX_REPLY_BYTES)
_encode = msgspec.msgpack.Encoder().encode


class MemberConnection(RpcConnection):
    """The master's end of one member's connection. It reads no calls while the member does not
    read replies."""

    def __init__(
        self,
        answer: Answer,
        members: set[MemberConnection],
        peer: str = "store master: a member",
        limits: ConnectionLimits = _LIMITS,
    ) -> None:
        """members: those that can be notified; this one is among them while it is open."""
        super().__init__(
            peer, PROTOCOL, answer=answer, limits=limits, accepted=True, holds_back=True
        )
        self._members = members

    def opened(self) -> None:
        """See RpcConnection."""
        self._members.add(self)

    def lost(self) -> None:
        """See RpcConnection."""
        self._members.discard(self)


class LocalPool(Pool):
    """The pool whose master is in this process."""

    def __init__(
        self,
        service: MasterService,
        on_events: Callable[[Sequence[BlockEvent]], None],
        events: EventLog | None = None,
    ) -> None:
        """
        on_events: called with the master's events, in order, right after what caused them. events:
        keeps them for other processes; None: no other process may ask for them.
        """
        self.service = service
        self._on_events = on_events
        self._events = events
        self._members: set[MemberConnection] = set()
        self._new_copies: dict[SegmentId, asyncio.Event] = {}
        """By mounted segment that has beaten: set when there are new copies to make to it."""

    def routes(self) -> dict[tuple[str, str], Handler]:
        """HTTP handlers by (method, path)."""
        return {("GET", "/api/segments"): self._segments, ("GET", PATH): self._channel}

    async def lookup(self, query: Mapping[str, str]) -> Any:
        """See admin.lookup."""
        return admin.lookup(self.service.master, query)

    def metrics(self) -> Iterable[Metric]:
        """See Pool.metrics."""
        return master_metrics(self.service.master.stats())

    def release(self, lease: LeaseId) -> None:
        """End a lease."""
        self.service.master.release(lease)

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """See Pool.copy and Master.copy."""
        count = self.service.run(operations.COPY, wire.CopyCall(keys[: wire.MAX_BATCH], to, source))
        self._pass_events()
        return count

    async def drain(self, segment: SegmentId, drains: bool) -> bool:
        """See Pool.drain and Master.drain."""
        known = self.service.run(operations.DRAIN, wire.DrainCall(segment, drains))
        self._pass_events()
        return known

    def ends(self) -> None:
        """See Pool.ends."""
        for connection in self._members:
            connection.notify(wire.Ending())

    def tick(self) -> None:
        """Let time pass at the master; see Pool.tick."""
        self.service.reap()
        self._pass_events()
        mounted = self.service.master.addresses()
        self._new_copies = {name: it for name, it in self._new_copies.items() if name in mounted}

    async def close(self) -> None:
        """Nothing to do: owners know what is stored."""

    async def _segments(self, request: HttpRequest) -> Response:
        return json_response(await self.lookup(request.query))

    async def _channel(self, request: HttpRequest) -> Switch:
        if request.headers.get("upgrade") != PROTOCOL:
            raise BadRequest(f"{PATH} is for members of the store that speak {PROTOCOL}", "upgrade")
        return Switch(PROTOCOL, MemberConnection(self.answer, self._members))

    def answer(self, op: str, body: bytes) -> bytes | Coroutine[Any, Any, bytes]:
        """Run one operation of a member. Raises BadRequest."""
        if op == "beat":
            return self._beat(body)
        if op == "events" and self._events is not None:
            return self._events.handle(body)
        return self._run(op, body)

    def _run(self, op: str, body: bytes) -> bytes:
        try:
            return self.service.handle(op, body)
        finally:
            self._pass_events()

    async def _beat(self, body: bytes) -> bytes:
        await self._wait_for_copies(operations.BEAT.request(body))
        return self._run("beat", body)

    async def _wait_for_copies(self, call: wire.BeatCall) -> None:
        """Hold a beat back while there is nothing to copy, for at most its `wait_s`."""
        # first, since the answer may be lost with its connection
        if not self.service.keep_alive(call):
            return  # the owner has to mount again, at once
        wanted = self._new_copies.setdefault(call.segment, asyncio.Event())
        try:
            async with asyncio.timeout(call.wait_s):
                await wanted.wait()
        except TimeoutError:
            pass
        wanted.clear()

    def _pass_events(self) -> None:
        for segment in self.service.master.drain_new_targets():
            if segment in self._new_copies:
                self._new_copies[segment].set()
        events = self.service.master.drain_events()
        if events:
            self._on_events(events)


class EventLog:
    """The latest events of a master, for listeners in other processes.

    A listener that is further behind than the log reaches receives the whole inventory.
    """

    def __init__(self, start: int, inventory: Callable[[], list[BlockEvent]], most: int) -> None:
        """start: differs at each start of the master. inventory: returns all that is stored, as
        events. most: number of events that are kept."""
        self._start = start
        self._inventory = inventory
        self._events: deque[BlockEvent] = deque(maxlen=most)
        self._at = 0
        self._news = asyncio.Event()

    def add(self, events: Sequence[BlockEvent]) -> None:
        """Add events of the master."""
        self._events.extend(events)
        self._at += len(events)
        news = self._news
        self._news = asyncio.Event()
        news.set()

    async def answer(self, call: wire.EventsCall) -> wire.EventsReply:
        """Return the events after `call.after`, and wait for one if there is none yet.

        Raises Recovering.
        """
        behind = self._at - call.after
        if call.start != self._start or not 0 <= behind <= len(self._events):
            return wire.EventsReply(self._start, self._at, True, self._inventory())
        if not behind:
            try:
                async with asyncio.timeout(call.wait_s):
                    await self._news.wait()
            except TimeoutError:
                return wire.EventsReply(self._start, self._at, False, [])
            return await self.answer(call)
        missed = [self._events[i] for i in range(len(self._events) - behind, len(self._events))]
        return wire.EventsReply(self._start, self._at, False, missed)

    async def handle(self, body: bytes) -> bytes:
        """Run the operation `events`. Raises BadRequest: a malformed body; Recovering."""
        return _encode(await self.answer(operations.EVENTS.request(body)))
