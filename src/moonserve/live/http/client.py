"""The HTTP client of every moonserve process: asyncio.Protocol, httptools and a pool.

`HttpClient.request` returns a whole reply, `HttpClient.stream` a reply piece by piece, `sse_events`
its server-sent events. It speaks http:// and https://, works on any asyncio loop, and reads no
clock but the loop's. `Connection` is one socket, its parser and the back-pressure between them; it
never retries. The pool chooses the socket of each request. A URL becomes a Target; a Target and
headers become the bytes of a request's head.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from moonserve.core.errors import ConfigError, DeadlineExceeded, MoonserveError
from moonserve.core.units import Bytes
from moonserve.invalid import without_password
from moonserve.live.clock import LoopClock
from moonserve.live.http.switch import Switched
from moonserve.live.tls.contexts import HANDSHAKE_S, STRANGER, SYSTEM, ServerTrust, Tls

Sink: TypeAlias = Callable[[bytes], bool]
"""Takes bytes of a reply's body. False: it takes no more for now."""

_NO_HEADERS: Mapping[str, str] = {}
_MAX_EVENT_BYTES = 16 << 20
_SHORT = 128
"""The most characters of a URL whose target is kept."""
_HIGH_BYTES = 256 << 10
_LOW_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing the socket resets the connection."""
_PORTS = {"http": 80, "https": 443}


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

    def __init__(self, peer: str, watch: Watch, refused: str) -> None:
        """refused: what it means if the peer closes the connection without any reply."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reply_began = False
        """Whether any byte of the current reply has come."""
        self.may_switch = False
        """Whether the client asked to switch; otherwise a reply of 101 is an error."""
        self.idle_since_s = 0.0
        self._peer = peer
        self._refused = refused
        self._watch = watch
        self._deadline_s = math.inf
        self._idle_s = math.inf
        """The longest time of a single wait."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self._head_done = True
        self._until_close = False
        self._bodiless = False
        self._keep_alive = False
        self._head_bytes = 0
        self._chunks: deque[bytes] = deque()
        self.on_body = self._chunks.append
        """The parser calls it with each piece of the body: a stream has one piece per token."""
        self._parser: httptools.HttpResponseParser
        """There while the connection is open, because it holds this object: a connection that is
        closed, or never opened, is no reference cycle."""
        self._buffered = 0
        """About the bytes that have come and are not taken; framing counts until all are taken."""
        self._paused = False
        self._error: Callable[[], MoonserveError] | None = None
        """Makes the error of a connection that has failed. The error itself would keep all frames
        that it passed, and with them this connection."""
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0
        self._sink: Sink | None = None
        """Takes the body as it comes, while `pour` waits; None: what comes is kept in `_chunks`."""

    # What the client calls.

    async def send(self, data: bytes, *, bodiless: bool = False) -> None:
        """Send one request (head and body) and return when the reply's headers are here.

        bodiless: the method is HEAD, so that the reply has no body whatever its headers say.
        """
        assert not self._busy
        self._bodiless = bodiless
        if self._error is not None or self._transport is None:
            raise self._failure(sent=False)
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
        return self._all()

    async def pour(self, sink: Sink) -> bool:
        """Give the body to `sink` as it comes: all of one read at once, without a switch of tasks.

        True: the body has ended; False: `sink` has returned False. Raises what `sink` raises.
        """
        while self._chunks or self._busy:
            if self._chunks:
                if not sink(self._all()):
                    return False
                continue
            self._sink = sink
            try:
                await self._wait()
                if self._sink is None:
                    return False
            finally:
                self._sink = None
        return True

    def _all(self) -> bytes:
        """Take all pieces that are here; there is one at least."""
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
        if not self._busy and self._chunks and self._buffered <= limit:
            return self._all()
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
            raise self._failure(sent=True)
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
        self._cut(partial(DeadlineExceeded, f"{self._peer}: {why}"))

    def abort(self) -> None:
        """Close at once and drop unsent bytes.

        Amid a reply the peer gets a reset. An ordinary end could be that of a client that sends no
        more and still reads, so that the peer would work on.
        """
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if self._busy and sock is not None and not self._transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
        closed = f"{self._peer}: this client closed the connection"
        self._fail(partial(UpstreamError, closed, sent=True))

    # Waiting: one consumer, woken by the parser's callbacks.

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error()
        self._waiter = self._loop.create_future()
        self._waiting_since_s = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _failure(self, *, sent: bool) -> MoonserveError:
        """Return the error of a connection that cannot be used."""
        if self._error is not None:
            return self._error()
        return UpstreamError(f"{self._peer}: not connected", sent=sent)

    def _fail(self, error: Callable[[], MoonserveError]) -> None:
        if self._error is None:
            self._error = error
            self._keep_alive = False
        self._wake()

    def _cut(self, error: Callable[[], MoonserveError]) -> None:
        self._fail(error)
        self.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and turn Nagle's delay off."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._watch.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Parse; the callbacks below collect what was parsed."""
        if not self._busy:
            # Bytes without a request: the next request would get them as its reply.
            why = f"{self._peer}: sent a reply without a request"
            self._cut(partial(BadReply, why, sent=False))
            return
        self.reply_began = True
        self._refused = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if not self.may_switch:
                why = f"{self._peer}: bad reply: unexpected status 101"
                self._cut(partial(BadReply, why, sent=True))
            return
        except httptools.HttpParserError as error:
            self._cut(partial(BadReply, f"{self._peer}: bad reply: {error}", sent=True))
            return
        if self._bodiless and self._head_done:
            # The parser waits for a body. Bytes that it has taken for one are no part of the reply.
            self._parser = httptools.HttpResponseParser(self)
            self._keep_alive = self._keep_alive and not self._chunks
            self._chunks.clear()
            return
        if not self._head_done:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                why = f"{self._peer}: reply head over 64 KiB"
                self._cut(partial(UpstreamError, why, sent=True))
            return
        if self._sink is not None:
            self._pour_out(self._sink)
            return
        self._buffered += len(data)
        if self._buffered > _HIGH_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._waiter is not None:
            self._wake()

    def _pour_out(self, sink: Sink) -> None:
        """Give to `sink` what has just come; `pour` goes on if it takes no more."""
        self._waiting_since_s = self._loop.time()
        chunks = self._chunks
        if not chunks:
            return
        whole = chunks.popleft()
        if chunks:
            whole += b"".join(chunks)
            chunks.clear()
        try:
            if sink(whole):
                return
        except Exception as error:  # noqa: BLE001 - `pour` raises it
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        self._sink = None
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket has ended: this ends a reply without a length, and breaks off any other."""
        self._transport = None
        self._watch.discard(self)
        if self._busy and self._until_close and exc is None:
            self._busy = False
        where = "in the middle of its reply" if self.reply_began else "before a reply"
        why = f" ({exc})" if exc is not None else ""
        what = self._refused or f"{self._peer}: closed {where}"
        self._fail(partial(UpstreamError, f"{what}{why}", sent=True))
        del self._parser

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
        if self._bodiless:
            self._busy = False
        self._wake()

    def on_message_complete(self) -> None:
        """The reply is complete."""
        if self.status < 200:
            return
        self._busy = False
        self._wake()


class ClientResponse(msgspec.Struct):
    """A whole reply. `headers` has lower-case names; of a repeated header it has the last value."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Asked(msgspec.Struct, frozen=True):
    """One request, as the caller of the client gave it."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    """The longest time until the whole reply, or for a stream until its headers, are here."""
    again: bool
    """Whether the request may reach the peer twice, see `HttpClient._exchange`."""

    def late(self) -> DeadlineExceeded:
        """The error when the time is over."""
        return DeadlineExceeded(f"{self.method} {self.url}: no reply within {self.timeout_s:g} s")


class Target(msgspec.Struct, frozen=True):
    """The address and the path of a URL."""

    host: str
    port: int
    netloc: str
    path: str
    secure: bool
    """Whether it is an https:// URL."""


def parse(url: str) -> Target:
    """Return the target of a URL. Raises ConfigError if the client cannot use it."""
    return _kept(url) if len(url) <= _SHORT and "?" not in url else _parse(url)


def _parse(url: str) -> Target:
    end = len(url)
    for mark in "/?#":
        at = url.find(mark, url.find("://") + 3, end)
        end = at if at >= 0 else end
    host, port, netloc, secure = _origin(url[:end])
    path = url[end:].partition("#")[0]
    path = path if path[:1] == "/" else "/" + path
    if not (path.isascii() and path.isprintable()) or " " in path:
        what = f"{without_password(url)!r} has characters that must be percent-encoded"
        raise ConfigError(what, "url")
    return Target(host, port, netloc, path, secure)


_kept = lru_cache(maxsize=1024)(_parse)
"""Keeps the targets of repeated URLs. Long URLs and URLs with a query come from clients, and would
fill it."""


@lru_cache(maxsize=1024)
def _origin(url: str) -> tuple[str, int, str, bool]:
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigError(f"{shown!r} is no address; write it like http://10.0.0.5:8100", "url")
        if "@" in parts.netloc:
            raise ConfigError(f"{shown!r} has a name or a password; leave them out", "url")
        port = parts.port or _PORTS[parts.scheme]
        parts.hostname.encode("idna")  # the form for DNS; a UnicodeError is a ValueError
    except ValueError as error:
        raise ConfigError(f"{shown!r}: {error}", "url") from None
    if not parts.netloc.isascii() or not parts.netloc.isprintable() or " " in parts.netloc:
        raise ConfigError(f"{shown!r} has characters that must be percent-encoded", "url")
    return parts.hostname, port, parts.netloc, parts.scheme == "https"


def check_url(url: str, setting: str) -> None:
    """Raise ConfigError with the setting's name if the client cannot use this URL."""
    try:
        parse(url)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("url: "), setting) from None


def head_of(method: str, target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """Return a request's head; `length`: of its body. Raises ConfigError for invalid headers."""
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if length or method not in ("GET", "HEAD", "DELETE"):
        lines.append(f"content-length: {length}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1:
        raise ConfigError("a header name or value has a line break", "headers")
    try:
        return f"{text}\r\n".encode("latin-1")
    except UnicodeEncodeError:
        raise ConfigError("a header has a character that is not in latin-1", "headers") from None


class Host:
    """The idle connections to one host (the last used is reused first) and its free places."""

    def __init__(self, key: tuple[str, int, bool], max_connections: int) -> None:
        self.key = key
        self.idle: deque[Connection] = deque()
        self._places = self._free = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def unused(self) -> bool:
        """Whether no call has a place, and no connection is idle."""
        return not self.idle and self._free == self._places

    async def enter(self, deadline_s: float) -> None:
        """Take a place, waiting for one until `deadline_s`; the caller calls `leave` later.

        Raises TimeoutError.
        """
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout_at(deadline_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():
                self.leave()  # the place came at the same time as the error
            raise

    def leave(self) -> None:
        """Give the place to the first waiting call, or free it."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


class HttpClient:
    """A client with a keep-alive pool per host. A process has one per event loop.

    At most `max_per_host` connections per host are in use; further calls wait, up to their
    deadline. An idle connection is closed after `idle_s`. A whole reply larger than
    `max_reply_bytes` raises UpstreamError.
    """

    def __init__(
        self,
        trust: ServerTrust = SYSTEM,
        *,
        max_per_host: int = 1024,
        idle_s: float = 30.0,
        max_reply_bytes: Bytes = 64 << 20,
        path: str = "",
    ) -> None:
        """trust: which servers of https:// URLs it trusts. path: of a unix socket, to which all
        connections go, whatever host and port a URL has; empty: they go by TCP."""
        self._trust = trust
        self._path = path
        self._max_per_host = max_per_host
        self._idle_s = idle_s
        self._max_reply_bytes = max_reply_bytes
        self._closed = False
        self._clock = LoopClock()
        self._hosts: dict[tuple[str, int, bool], Host] = {}
        self._open = Watch()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: bytes = b"",
        timeout_s: float,
        again: bool = True,
    ) -> ClientResponse:
        """Send one request and return the whole reply, whatever its status.

        again: the request may reach the peer twice, see `_exchange`.
        Raises UpstreamError if no whole reply comes, DeadlineExceeded after `timeout_s`.
        """
        asked = Asked(method, url, headers, body, timeout_s, again)
        try:
            host, connection = await self._begin(asked)
            try:
                whole = await connection.read_all(self._max_reply_bytes)
                return ClientResponse(connection.status, connection.headers, whole)
            finally:
                self._end(host, connection)
        except (TimeoutError, DeadlineExceeded):
            raise asked.late() from None

    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: bytes = b"",
        timeout_s: float,
        idle_timeout_s: float,
        again: bool = True,
    ) -> ClientStream:
        """Send one request and read its reply as it comes: `async with client.stream(...) as r`.

        timeout_s bounds the time until the reply's headers are here, idle_timeout_s every wait for
        the next chunk. again: as for `request`. If the block ends before the reply does, the
        connection is closed and the peer sees a disconnect.
        """
        asked = Asked(method, url, headers, body, timeout_s, again)
        return ClientStream(self, asked, idle_timeout_s)

    async def upgrade(
        self, url: str, name: str, to: Switched, *, headers: Mapping[str, str], timeout_s: float
    ) -> ClientResponse | None:
        """Ask for protocol `name` on a connection of its own; None: `to` has the connection now.

        If the peer does not switch, its reply is returned. Raises as `request` does. `close` also
        cuts a switched connection.
        """
        target = parse(url)
        asked = {**headers, "connection": "upgrade", "upgrade": name}
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(target)
                switched = False
                try:
                    connection.may_switch = True
                    await connection.send(head_of("GET", target, asked, 0))
                    if connection.status == 101:
                        connection.switch(to)
                        switched = True
                        return None
                    whole = await connection.read_all(self._max_reply_bytes)
                    return ClientResponse(connection.status, connection.headers, whole)
                finally:
                    if not switched:  # also if a cancel came just after the 101
                        connection.abort()
        except TimeoutError:
            raise DeadlineExceeded(f"GET {url}: no reply within {timeout_s:g} s") from None

    async def refuses(self, url: str, within_s: float = 0.5) -> bool:
        """Whether the address of this URL refuses connections, so that no process listens there.

        False: it accepts them, or that cannot be learned in this time.
        """
        target = parse(url)
        try:
            async with asyncio.timeout(within_s):
                _, writer = await asyncio.open_connection(target.host, target.port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def close(self) -> None:
        """Call `cut`, and let the waiting calls see it."""
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Cut every connection; calls under way and later ones raise UpstreamError."""
        self._closed = True
        self._open.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.abort()

    def _host(self, target: Target) -> Host:
        key = (target.host, target.port, target.secure)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = Host(key, self._max_per_host)
        return host

    def _left(self, host: Host) -> None:
        """Free a place at a host. A host without use is forgotten, because there may be many."""
        host.leave()
        if host.unused:
            del self._hosts[host.key]

    async def _begin(self, asked: Asked) -> tuple[Host, Connection]:
        """Take a place at the host, send, and return when the reply's headers are here.

        The caller calls `_end` later. The deadline stays set on the connection. Raises TimeoutError
        or DeadlineExceeded.
        """
        target = parse(asked.url)
        host = self._host(target)
        deadline_s = self._clock.loop.time() + asked.timeout_s
        await host.enter(deadline_s)
        try:
            data = head_of(asked.method, target, asked.headers, len(asked.body)) + asked.body
            return host, await self._exchange(host, target, data, deadline_s, asked)
        except BaseException:
            self._left(host)
            raise

    def _end(self, host: Host, connection: Connection) -> None:
        connection.watch_until(math.inf)
        self._give_back(host, connection)
        self._left(host)

    async def _exchange(
        self, host: Host, target: Target, data: bytes, deadline_s: float, asked: Asked
    ) -> Connection:
        """Send on a pooled or new connection and wait for the reply's headers.

        The peer may have just closed a pooled connection. If it ends before any byte of a reply,
        and `asked.again` is true, the client sends the request once more on a new connection.
        """
        bodiless = asked.method == "HEAD"
        connection = self._pick(host)
        sent = connection is not None
        if connection is not None:
            connection.watch_until(deadline_s)
            try:
                await connection.send(data, bodiless=bodiless)
                return connection
            except UpstreamError:
                if connection.reply_began or not asked.again:
                    raise
            except BaseException:
                connection.abort()
                raise
        async with asyncio.timeout_at(deadline_s):
            try:
                connection = await self._connect(target)
            except UpstreamError as error:
                raise UpstreamError(str(error), sent=sent) from None
        connection.watch_until(deadline_s)
        try:
            await connection.send(data, bodiless=bodiless)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, target: Target) -> Connection:
        if self._closed:
            raise UpstreamError("this client is closed", sent=False)
        loop = asyncio.get_running_loop()
        peer = target.netloc
        if target.secure:
            context = self._trust.context()
            refused = self._trust.refused(peer)
        elif self._trust.plain:
            context = None
            refused = f"{peer}: closed before a reply; if it speaks TLS, write https://"
        else:
            raise ConfigError(f"http://{peer}: this process uses TLS; write https://", "url")
        try:
            if self._path:
                peer = self._path
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(peer, self._open, refused), self._path
                )
                return self._ready(connection)
            _, connection = await loop.create_connection(
                lambda: Connection(peer, self._open, refused),
                target.host,
                target.port,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context else None,
            )
        except ssl.SSLError as error:
            raise UpstreamError(self._trust.refusal(peer, error), sent=False) from None
        except OSError as error:
            why = error.strerror or str(error)
            raise UpstreamError(f"{peer}: cannot connect: {why}", sent=False) from None
        return self._ready(connection)

    def _ready(self, connection: Connection) -> Connection:
        """A new connection; it is cut if this client was closed while it connected."""
        if self._closed:
            connection.abort()
        return connection

    def _pick(self, host: Host) -> Connection | None:
        while host.idle:
            connection = host.idle.pop()
            if connection.reusable():
                return connection
        return None

    def _give_back(self, host: Host, connection: Connection) -> None:
        """Keep a connection whose reply was read completely; close any other."""
        if not connection.reusable():
            connection.abort()
            return
        loop = self._clock.loop
        connection.idle_since_s = loop.time()
        host.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close connections that are idle for too long; run again while any are left."""
        loop = self._clock.loop
        expired_s = loop.time() - self._idle_s
        for host in list(self._hosts.values()):
            while host.idle and host.idle[0].idle_since_s <= expired_s:
                host.idle.popleft().abort()
            if host.unused:
                del self._hosts[host.key]
        left = any(host.idle for host in self._hosts.values())
        self._sweeper = loop.call_later(self._idle_s, self._sweep) if left else None


def client_of(tls: Tls | None) -> HttpClient:
    """Return a client for calls to other processes of the cluster. tls: of this process."""
    return HttpClient(STRANGER if tls is None else tls.trust)


class ClientStream:
    """A reply read piece by piece: an async context manager, made by `HttpClient.stream`.

    Iteration gives body chunks in order. It raises UpstreamError if the reply breaks off, and
    DeadlineExceeded if the peer is silent for idle_timeout_s. If the consumer is slow, the socket
    stops reading: at most about 256 KiB wait here.
    """

    _host: Host
    _connection: Connection
    """Both are set when the reply's headers are here."""

    def __init__(self, client: HttpClient, asked: Asked, idle_timeout_s: float) -> None:
        self._client = client
        self._asked = asked
        self._idle_timeout_s = idle_timeout_s
        self.status = 0
        self.headers: Mapping[str, str] = _NO_HEADERS

    async def __aenter__(self) -> ClientStream:
        try:
            self._host, connection = await self._client._begin(self._asked)
        except (TimeoutError, DeadlineExceeded):
            raise self._asked.late() from None
        self._connection = connection
        connection.watch_until(math.inf)
        connection.watch_idle(self._idle_timeout_s)
        self.status = connection.status
        self.headers = connection.headers
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """End the stream as the end of the block does, for callers without an `async with`."""
        self._connection.watch_idle(None)
        self._client._end(self._host, self._connection)

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._connection.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def take(self) -> Coroutine[Any, Any, bytes | None]:
        """Return all body bytes that are here, waiting for the first; None at the body's end.

        Raises as iteration does.
        """
        return self._connection.take()

    def pour(self, sink: Sink) -> Coroutine[Any, Any, bool]:
        """Give the body to `sink` as it comes. True: it has ended; False: `sink` takes no more.

        Raises as iteration does, and what `sink` raises.
        """
        return self._connection.pour(sink)

    def idle(self, timeout_s: float) -> None:
        """Set idle_timeout_s from now on."""
        self._connection.watch_idle(timeout_s)

    async def read(self) -> bytes:
        """Return the rest of the body at once; for error replies."""
        return b"".join([chunk async for chunk in self])


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event in body chunks, up to `[DONE]` or their end.

    Comments and other fields are skipped; line feeds join the data lines of one event. Raises
    UpstreamError if an event is larger than 16 MiB. It does not close `chunks`.
    """
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        lines = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        rest = lines.pop()
        if len(rest) > _MAX_EVENT_BYTES:
            raise UpstreamError("server-sent event over 16 MiB", sent=True)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and data:
                event = data[0] if len(data) == 1 else b"\n".join(data)
                data.clear()
                if event == b"[DONE]":
                    return
                yield event
