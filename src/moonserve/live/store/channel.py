"""Calls to the store's master as frames on one connection, which HTTP was switched to.

A frame is a head (the body's size, the call's number, a kind) and a body. A call's kind is the
length of its operation's name, which its body starts with; a reply's says how the call went. Many
calls may be under way, and are answered in any order. On event loops; whoever speaks otherwise is
cut off.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from moonserve.core.errors import BadRequest, DeadlineExceeded, MoonserveError, StoreError
from moonserve.core.units import Bytes
from moonserve.live.http.connection import UpstreamError
from moonserve.live.http.switch import Switched

log = logging.getLogger(__name__)

PATH = "/internal/store"
PROTOCOL = "moonserve-store/1"
MAX_FRAME_BYTES: Bytes = 64 << 20
_MAX_REPLY_BYTES: Bytes = 1 << 30
"""All there is in a pool of many millions of blocks is told a gateway as one."""
_HEAD = struct.Struct("<IQB")
_DONE, _REFUSED, _FAILED = 0, 1, 2
_MAX_WAITING = 256
"""Calls of one connection that wait for something to happen at the master."""
_DEAD_S = 5
"""How long what was sent may stay unacknowledged; a silent connection is lost after two of it."""

Answer: TypeAlias = Callable[[str, bytes], bytes | Coroutine[Any, Any, bytes]]
"""Runs an operation; what may have to wait is a coroutine. Both may raise MoonserveError."""


class _Frames(Switched):
    """Cuts what arrives into frames."""

    most: Bytes = MAX_FRAME_BYTES
    """In one; memory is taken as the bytes arrive."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._rest = bytearray()
        self._need = _HEAD.size

    def take_over(
        self, transport: asyncio.Transport, lost: Callable[[Exception | None], None]
    ) -> None:
        """See Switched: notice a peer whose machine is gone."""
        super().take_over(transport, lost)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_S * 1_000)

    def send(self, number: int, kind: int, body: bytes) -> None:
        """Send one frame. A body over the limit is for the peer to refuse."""
        self.transport.write(_HEAD.pack(len(body), number, kind) + body)

    def got(self, number: int, kind: int, body: bytes) -> None:
        """One frame is here."""
        raise NotImplementedError

    def break_off(self, why: str) -> None:
        """End a connection on which something else is spoken."""
        log.warning("%s: cut off: %s", self.peer, why)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Cut, and keep what is not whole yet."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
        at, self._need = 0, _HEAD.size
        while len(data) - at >= _HEAD.size and not self.transport.is_closing():
            size, number, kind = _HEAD.unpack_from(data, at)
            if size > self.most:
                self.break_off(f"a frame of {size} bytes is over the limit of {self.most}")
                return
            start = at + _HEAD.size
            if start + size > len(data):
                self._need = _HEAD.size + size
                break
            at = start + size
            self.got(number, kind, data[start:at])
        self._rest = bytearray(data[at:])


class Served(_Frames):
    """The master's end of one connection."""

    def __init__(self, answer: Answer, peer: str = "store master: a member") -> None:
        """What `answer` can say at once is answered in the order of the calls."""
        super().__init__(peer)
        self._answer = answer
        self._waiting: set[asyncio.Task[None]] = set()

    def got(self, number: int, kind: int, body: bytes) -> None:
        """Answer one call, now or by a task. A bug in it ends the connection, with its trace."""
        if not 0 < kind <= len(body):
            self.break_off("a frame without an operation")
            return
        op = body[:kind].decode("latin-1")
        try:
            answer = self._answer(op, body[kind:])
        except MoonserveError as error:
            self._fail(number, error)
            return
        if isinstance(answer, bytes):
            self.send(number, _DONE, answer)
        elif len(self._waiting) < _MAX_WAITING:
            task = asyncio.create_task(self._wait(number, answer))
            self._waiting.add(task)
            task.add_done_callback(self._waited)
        else:
            answer.close()
            self._fail(number, StoreError(f"{_MAX_WAITING} calls wait already"))

    async def _wait(self, number: int, answer: Coroutine[Any, Any, bytes]) -> None:
        try:
            self.send(number, _DONE, await answer)
        except MoonserveError as error:
            self._fail(number, error)

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("%s: bug in a call that waited", self.peer, exc_info=bug)
            self.transport.abort()

    def _fail(self, number: int, error: MoonserveError) -> None:
        self.send(
            number, _REFUSED if isinstance(error, BadRequest) else _FAILED, str(error).encode()
        )

    def pause_writing(self) -> None:
        """The member does not take its replies: take no more calls meanwhile."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """It takes them again."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody wants to know any more."""
        for task in self._waiting:
            task.cancel()
        super().connection_lost(exc)


class Channel(_Frames):
    """A member's end."""

    most = _MAX_REPLY_BYTES

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._last = 0
        self._calls: dict[int, tuple[asyncio.Future[bytes], float]] = {}
        """With the deadline of each, on the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._clock: asyncio.TimerHandle | None = None
        self._look_s = math.inf
        """When the clock strikes: not after any call's deadline."""
        self._room = asyncio.Event()
        self._room.set()

    def is_open(self) -> bool:
        """Whether calls may be made; not before it has taken a connection over."""
        return not self.transport.is_closing()

    async def call(self, op: str, body: bytes, deadline_s: float) -> bytes:
        """Run one operation at the master; what it answers by `deadline_s` of the loop's clock.

        Raises BadRequest: it never will; StoreError: it could not; DeadlineExceeded; UpstreamError:
        the connection is lost, and the call may have been run.
        """
        if not self._room.is_set():
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._room.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"{self.peer} took no calls in time") from None
        if not self.is_open():
            raise UpstreamError(f"{self.peer}: connection lost before {op!r}", sent=False)
        self._last = number = self._last + 1
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[number] = future, deadline_s
        if deadline_s < self._look_s:  # one timer for all calls is lighter than one for each
            self._look_at(deadline_s)
        name = op.encode()
        self.send(number, len(name), name + body)
        try:
            return await future
        finally:
            del self._calls[number]

    def got(self, number: int, kind: int, body: bytes) -> None:
        """One reply; the caller may have stopped waiting for it."""
        future, _ = self._calls.get(number, (None, 0.0))
        if future is None or future.done():
            return
        if kind == _DONE:
            future.set_result(body)
            return
        text = body.decode("utf-8", "replace")
        future.set_exception(BadRequest(text) if kind == _REFUSED else StoreError(text))

    def _look_at(self, time_s: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._look_s = time_s
        self._clock = self._loop.call_at(time_s, self._look) if time_s < math.inf else None

    def _look(self) -> None:
        """Fail the calls that are late, and come again when the next one may be."""
        now_s = self._loop.time()
        for future, deadline_s in self._calls.values():
            if deadline_s <= now_s and not future.done():
                future.set_exception(DeadlineExceeded(f"{self.peer} did not answer in time"))
        self._clock = None
        left = (deadline_s for _, deadline_s in self._calls.values() if deadline_s > now_s)
        self._look_at(min(left, default=math.inf))

    def pause_writing(self) -> None:
        """The master does not take more calls now: the next ones wait."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It takes them again."""
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """What is under way has failed."""
        why = f" ({exc})" if exc is not None else ""
        if self._clock is not None:
            self._clock.cancel()
        for future, _ in self._calls.values():
            if not future.done():
                lost = f"{self.peer}: connection lost amid a call{why}"
                future.set_exception(UpstreamError(lost, sent=True))
        self._room.set()
        super().connection_lost(exc)
