"""One client connection: a socket, a reply parser, and the back-pressure between them.

Only `client` uses this. It never chooses the connection of a request and never retries.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from typing import cast

import httptools

from moonserve.core.errors import DeadlineExceeded, MoonserveError
from moonserve.core.units import Bytes
from moonserve.live.http.switch import Switched

_HIGH_BYTES = 256 << 10
_LOW_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10


class UpstreamError(MoonserveError):
    """A peer sent no whole reply: it refused, reset or broke off, or did not speak HTTP.

    `sent`: whether the request may have reached the peer, so that a repeat may do its work twice.
    """

    status = 502
    kind = "upstream_error"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class BadReply(UpstreamError):
    """The peer's bytes are not an HTTP reply."""


class Watch(set["Connection"]):
    """The open connections of one client, and one timer for all their waits.

    The timer checks which waits are too long. This is cheaper than one timer per wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._look_s = math.inf
        """The time of the next check; it is never after the end of a wait."""
        self._timer: asyncio.TimerHandle | None = None

    def by(self, time_s: float) -> None:
        """A wait may end at this time of the loop's clock."""
        if time_s < self._look_s:
            self.stop()
            self._look_s = time_s
            self._timer = asyncio.get_running_loop().call_at(time_s, self._look)

    def stop(self) -> None:
        """Check no more until the next `by`."""
        self._look_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Fail the waits that are too long, and set the next check."""
        now_s = asyncio.get_running_loop().time()
        self.stop()
        for connection in list(self):
            if (due_s := connection.due_s(now_s)) <= now_s:
                connection.late()
            elif due_s < math.inf:
                self.by(due_s)


class Connection(asyncio.Protocol):
    """One connection: one exchange at a time, `send` then `next_chunk` or `read_all` to the end."""

    def __init__(self, peer: str, watch: Watch) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reply_began = False
        """Whether any byte of the current reply has come."""
        self.may_switch = False
        """Whether the client asked to switch; otherwise a reply of 101 is an error."""
        self.idle_since_s = 0.0
        self._peer = peer
        self._watch = watch
        self._deadline_s = math.inf
        self._idle_s = math.inf
        """The longest time of a single wait."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self._head_done = True
        self._until_close = False
        self._keep_alive = False
        self._head_bytes = 0
        self._chunks: deque[bytes] = deque()
        self.on_body = self._chunks.append
        """The parser calls it with each piece of the body: a stream has one piece per token."""
        self._parser = httptools.HttpResponseParser(self)
        self._buffered = 0
        """About the bytes that have come and are not taken; framing counts until all are taken."""
        self._paused = False
        self._error: MoonserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0

    # What the client calls.

    async def send(self, data: bytes) -> None:
        """Send one request (head and body) and return when the reply's headers are here."""
        assert not self._busy
        if self._error is not None or self._transport is None:
            raise self._error or UpstreamError(f"{self._peer}: not connected", sent=False)
        self._busy = True
        self._head_done = self.reply_began = self._until_close = False
        self.headers = {}
        self._head_bytes = self._buffered = 0
        self._transport.write(data)
        while not self._head_done:
            await self._wait()

    async def next_chunk(self) -> bytes | None:
        """Return the next piece of the body; None at its end."""
        while not self._chunks:
            if not self._busy:
                return None
            await self._wait()
        chunk = self._chunks.popleft()
        self._taken(self._buffered - len(chunk) if self._chunks else 0)
        return chunk

    async def take(self) -> bytes | None:
        """Return all pieces that are here, waiting for the first; None at the body's end."""
        while not self._chunks:
            if not self._busy:
                return None
            await self._wait()
        chunks = self._chunks
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._taken(0)
        return whole

    def _taken(self, left: Bytes) -> None:
        self._buffered = left
        if self._paused and self._buffered < _LOW_BYTES:
            self._paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    async def read_all(self, limit: Bytes) -> bytes:
        """Return the rest of the body. Raises UpstreamError if it is larger than `limit`."""
        whole: list[bytes] = []
        size = 0
        while (chunk := await self.next_chunk()) is not None:
            whole.append(chunk)
            size += len(chunk)
            if size > limit:
                raise UpstreamError(f"{self._peer}: reply over {limit} bytes", sent=True)
        return whole[0] if len(whole) == 1 else b"".join(whole)

    def reusable(self) -> bool:
        """Whether this connection can take another request."""
        return not self._busy and not self._chunks and self._keep_alive and self._error is None

    def switch(self, to: Switched) -> None:
        """After a reply of 101: `to` has the connection from now on. Raises UpstreamError."""
        if self._transport is None:
            raise self._error or UpstreamError(f"{self._peer}: not connected", sent=True)
        to.take_over(self._transport, self.connection_lost)

    def watch_until(self, time_s: float) -> None:
        """Fail any wait for the peer at this time of the loop's clock; inf: never."""
        self._deadline_s = time_s
        self._watch.by(time_s)

    def watch_idle(self, timeout_s: float | None) -> None:
        """From now on fail a wait for the peer after `timeout_s`; None: no such limit."""
        self._idle_s = math.inf if timeout_s is None else timeout_s
        if timeout_s is not None:
            self._watch.by(self._loop.time() + timeout_s)

    def due_s(self, now_s: float) -> float:
        """Return when the present wait, or one that begins now, is too long."""
        since_s = now_s if self._waiter is None else self._waiting_since_s
        return min(self._deadline_s, since_s + self._idle_s)

    def late(self) -> None:
        """The present wait is too long: fail it and close the connection."""
        why = "no reply before the deadline"
        if self._idle_s < math.inf:
            why = f"silent for {self._idle_s:g} s in the middle of its reply"
        self._cut(DeadlineExceeded(f"{self._peer}: {why}"))

    def abort(self) -> None:
        """Close at once and drop unsent bytes."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(UpstreamError(f"{self._peer}: this client closed the connection", sent=True))

    # Waiting: one consumer, woken by the parser's callbacks.

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._waiting_since_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: MoonserveError) -> None:
        if self._error is None:
            self._error = error
            self._keep_alive = False
        self._wake()

    def _cut(self, error: MoonserveError) -> None:
        self._fail(error)
        self.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and turn Nagle's delay off."""
        self._transport = cast(asyncio.Transport, transport)
        self._watch.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Parse; the callbacks below collect what was parsed."""
        if not self._busy:
            # Bytes without a request: the next request would get them as its reply.
            self._cut(BadReply(f"{self._peer}: sent a reply without a request", sent=False))
            return
        self.reply_began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if not self.may_switch:
                self._cut(BadReply(f"{self._peer}: bad reply: unexpected status 101", sent=True))
            return
        except httptools.HttpParserError as error:
            self._cut(BadReply(f"{self._peer}: bad reply: {error}", sent=True))
            return
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._cut(UpstreamError(f"{self._peer}: reply head over 64 KiB", sent=True))
            return
        self._buffered += len(data)
        if self._buffered > _HIGH_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._waiter is not None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket has ended: this ends a reply without a length, and breaks off any other."""
        self._transport = None
        self._watch.discard(self)
        if self._busy and self._until_close and exc is None:
            self._busy = False
        where = "in the middle of its reply" if self.reply_began else "before a reply"
        why = f" ({exc})" if exc is not None else ""
        self._fail(UpstreamError(f"{self._peer}: closed {where}{why}", sent=True))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the reply."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is complete; interim heads (1xx) are dropped."""
        self.status = self._parser.get_status_code()
        if self.status < 200 and not (self.status == 101 and self.may_switch):
            self.headers = {}
            return
        headers = self.headers
        self._keep_alive = self._parser.should_keep_alive()
        self._until_close = "content-length" not in headers and "transfer-encoding" not in headers
        self._head_done = True
        self._wake()

    def on_message_complete(self) -> None:
        """The reply is complete."""
        if self.status < 200:
            return
        self._busy = False
        self._wake()
