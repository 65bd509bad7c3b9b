"""The HTTP server of every moonserve process: routes, replies, and the connections that it accepts.

`App` routes and replies, `serve` listens, `Server.stop` drains and cuts. The gateway, the workers
and the store's master use it. It has no signal handlers, no access log and no threads.

`Accepted` is one connection: httptools parses its requests, and they are answered one at a time. It
knows sockets and HTTP's framing, and nothing about the content. App answers a request by `begin`,
`write` and `end` of its connection. Both event loops turn Nagle's delay off on accepted sockets.
There is no clock but the loop's, and one timer per connection, which checks how long it is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, TypeAlias, cast
from urllib.parse import unquote_to_bytes

import httptools
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moonserve.core.errors import (
    BadRequest,
    ConfigError,
    Forbidden,
    MoonserveError,
    Overloaded,
)
from moonserve.core.units import Bytes
from moonserve.invalid import shortened
from moonserve.live.http.handshakes import TlsListener, listen
from moonserve.live.http.message import (
    HttpRequest,
    MethodNotAllowed,
    Poured,
    Response,
    StreamingResponse,
    error_response,
)
from moonserve.live.http.places import PlaceLimits, Places
from moonserve.live.http.switch import Switch
from moonserve.live.http.unix import bound
from moonserve.logs import KIND

log = logging.getLogger(__name__)

Reply: TypeAlias = Response | StreamingResponse | Switch
Handler: TypeAlias = Callable[[HttpRequest], Awaitable[Reply]]
Routes: TypeAlias = dict[tuple[str, str], Handler]
"""Handlers by (method, path)."""

_NO_LIMITS: Mapping[str, Bytes] = {}
_LIST = ("GET", "/openapi.json")
_NONE_ABSENT: Mapping[str, str] = {}
_NO_HEADERS: Mapping[str, str] = {}
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0
_DISCARDED_BYTES_PER_S: Bytes = 16 << 20
"""Of all clients together: many large bodies that nobody wants must not keep the loop busy."""
_CLEANUP_S = 5.0
_FLUSH_S = 1.0
_LAST_S = 1.0
_ACCEPTING_TURNS = 3
"""Turns of the event loop in which a listener accepts all that waits for it."""
_NOTICE_S = 0.1
KEEP_ALIVE_S = 120.0
"""How long a connection may be idle. Clients' pools and most load balancers keep it for less, so
that they send no request on a connection that has just been closed."""
_HEAD_S = 60.0
"""How long a request's head may take."""
_RESERVED_HEAD_S = 5.0
"""How long it may take on a connection of the reserve."""
_RESERVED_PATHS = ("/health", "/ready", "/metrics", "/internal/", "/api/")
"""What connections of the reserve may ask for: the calls of the cluster and its operators."""
_MAX_HEAD_BYTES = 64 << 10
_MAX_LENGTH_DIGITS = 19
_MAX_REPEATED = 100
"""Headers of one request that repeat another: joining thousands would take long."""
_MAX_BEHIND = 256
"""The most pipelined requests of one connection that wait for a reply. One read has more bytes than
so many heads need, and each request takes some kilobytes."""
_FIRST_PROBE_S = 0.05
_PROBE_FACTOR = 3
_BODILESS = (204, 304)
"""Replies that have no body, and no length (RFC 9110, 8.6)."""
_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_MANY = (
    _STATUS[429] + b"content-type: text/plain\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 22\r\n\r\nToo many connections.\n"
)
_NOT_HTTP = b"Invalid HTTP request received."
_BAD = (
    _STATUS[400] + b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)
_SIZE_LINES = [b"%x\r\n" % size for size in range(1_024)]
"""The first lines of small chunks: most chunks are one token's event."""
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_CLOSED_CHUNKED = b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"


class _Wrong(Exception):
    """A request's head is not acceptable; `why` is the body of the 400."""

    def __init__(self, why: bytes) -> None:
        self.why = why


def _check_head(version: str, headers: Mapping[str, str]) -> None:
    """Raise _Wrong if the head breaks a rule of RFC 9112 that the parser does not check."""
    if version not in ("1.0", "1.1"):
        raise _Wrong(b"Only HTTP/1.0 and HTTP/1.1 are served here.")
    if (version == "1.1" and "host" not in headers) or "," in headers.get("host", ""):
        raise _Wrong(b"A request of HTTP/1.1 must have one Host header.")
    if len(headers.get("content-length", "")) > _MAX_LENGTH_DIGITS:
        raise _Wrong(b"Content-Length has too many digits.")


def _own_part(path: str) -> str:
    """The path behind its last /v1, if it has one, without slashes too many."""
    parts = "/".join(part for part in path.split("/") if part)
    return f"/{parts}/".rpartition("/v1/")[2].strip("/")


def address_of(peer: object) -> str:
    """Return the IP address in a socket's peer name as text; empty for a unix socket.

    An IPv4 client of an IPv6 socket has its IPv4 address, so that it is one client at both.
    """
    address = peer[0] if isinstance(peer, tuple) else ""
    return str(address).removeprefix("::ffff:")


class Connections:
    """What the connections of one server share."""

    def __init__(self, app: App, private: bool = False) -> None:
        """private: only this user's processes can connect."""
        self.app = app
        self.private = private
        self.places: Places[Accepted] = Places(app.place_limits)
        self.open: set[Accepted] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """The tasks that answer requests. A task leaves this set as its last step."""
        self.lost = asyncio.Event()
        """Set whenever a connection has ended."""


class Accepted(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        """Bytes of the present head, or of trailers, so far."""
        self._passed_over = False
        """Whether the parser treats the body of `_parsed` as another protocol."""
        self._reads_on = False
        """Whether the next head is not of a new request; see `_read_on`."""
        self._parsed: HttpRequest | None = None
        """The request whose body is arriving."""
        self._request: HttpRequest | None = None
        """The request that is being answered."""
        self._behind: deque[HttpRequest] = deque()
        """Pipelined requests; while there are any, nothing more is read."""
        self._task: asyncio.Task[None] | None = None
        self._since_s = self._loop.time()
        """The loop's time since which no request is being answered, or a head is arriving."""
        self._in_head = False
        self._repeated = 0
        """Headers of the present message that repeat another one."""
        self._reserved = False
        """Whether this connection has a place of the reserve: it gets one reply."""
        self._closing = False
        """Whether the reply under way is the last."""
        self._parting = False
        """Whether the reply to the next request is the last."""
        self._refused = False
        """Whether the client has sent what is not HTTP; all that it sends later is dropped."""
        self._wrong: bytes | None = None
        """Why what came after the requests is not HTTP; it is sent after their replies."""
        self._half_closed = False
        """Whether the client sends no more, but may still read."""
        self._probe_s = _FIRST_PROBE_S
        """The time until the next interim reply to a client that is half-closed."""
        self._begun = False
        """Whether the reply under way has begun."""
        self._chunked = False
        self._switched = False
        self._client_reads: asyncio.Future[None] | None = None
        """Pending while the client does not read fast enough; None: it does."""

    # What the answering side calls.

    def begin(
        self,
        status: int,
        head: bytes,
        request: HttpRequest,
        length: int | None,
        body: bytes = b"",
    ) -> None:
        """Write the status line, the headers and `body`.

        head: the reply's headers, each with its line end. length: of the whole body; None: it is
        unknown, and `write` frames its pieces.
        """
        self._begun = True
        self._closing = self._closing or not request.keep_alive or request.unread()
        if self._half_closed and not self._behind:
            self._closing = True
        if status in _BODILESS:
            end = b"connection: close\r\n\r\n" if self._closing else b"\r\n"
        elif length is not None:
            end = b"connection: close\r\n\r\n" if self._closing else b"\r\n"
            end = b"content-length: %d\r\n%b" % (length, end)
        elif request.http_1_0:
            end = b"connection: close\r\n\r\n"
        else:
            self._chunked = True
            end = _CLOSED_CHUNKED if self._closing else _CHUNKED
        line = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
        self.send(b"".join((line, head, end, body)))

    def write(self, chunk: bytes) -> bool:
        """Write a piece of the body. False: the caller awaits `drained` before the next."""
        if self._chunked:
            size = len(chunk)
            line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            chunk = b"".join((line, chunk, b"\r\n"))
        if not self.transport.is_closing():
            self.transport.write(chunk)
        return self._client_reads is None

    def send(self, data: bytes) -> None:
        """Write bytes without framing."""
        if not self.transport.is_closing():
            self.transport.write(data)

    @property
    def certified(self) -> bool:
        """Whether the client has shown a certificate that this server trusts, or came over a unix
        socket, which only this user may use."""
        return self._shared.private or bool(self.transport.get_extra_info("peercert"))

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than the server writes."""
        return self._client_reads is not None

    async def drained(self, timeout_s: float) -> None:
        """Return when the client has read enough.

        Raises TimeoutError if the client reads nothing for that time.
        """
        while self._client_reads is not None:
            unsent = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self._client_reads)
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= unsent:
                    raise

    def end(self) -> None:
        """End the reply: it is complete."""
        if self._chunked:
            self.send(b"0\r\n\r\n")

    def break_off(self) -> None:
        """Break the reply off: the client sees the connection end before the reply does."""
        self.transport.close()

    def switch(self, to: Switch) -> None:
        """Send 101 and hand the connection over; the request lasts until the connection ends."""
        if self.transport.is_closing():
            to.protocol.unused()
            return
        self._switched = True
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
            b"upgrade: %s\r\n\r\n" % to.name.encode()
        )
        to.protocol.take_over(self.transport, self.connection_lost)

    # What HttpRequest calls, as message.Source.

    def pause(self) -> None:
        """Stop reading: the handler does not read the body now."""
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read again: the handler waits for the body."""
        if not self._behind and not self.transport.is_closing():
            self.transport.resume_reading()

    def go_on(self) -> None:
        """Send 100 Continue to a client that waits for it before it sends the body."""
        self.send(_CONTINUE)

    # What the server calls.

    def shutdown(self) -> None:
        """Take no further request: close now, or after the reply under way."""
        self._closing = True
        self._behind.clear()
        if self._request is None or self._switched:
            self.transport.close()

    def part(self) -> None:
        """Take one more request, whose reply says that it is the last."""
        self._parting = True

    def abort(self) -> None:
        """Close at once and drop unsent bytes."""
        self.transport.abort()

    def make_room(self) -> None:
        """Close this connection, which is idle: a new one gets its place."""
        self.transport.abort() if self.transport.get_write_buffer_size() else self.transport.close()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and start its timer."""
        self.transport = cast(asyncio.Transport, transport)
        self._address = address_of(transport.get_extra_info("peername"))
        shared = self._shared
        shared.open.add(self)
        place, out = shared.places.enter(self, self._address)
        if out is not None:
            out.make_room()
        self._reserved = place == "reserved"
        first_s = min(self._head_s(), shared.app.keep_alive_s)
        self._timer = self._loop.call_later(first_s, self._look)
        if place != "own":
            log.warning(
                "%s: one more connection from %s, with %d open and %d at most: %s",
                shared.app.name,
                self._address,
                len(shared.open),
                shared.places.most,
                "it may ask for health and admin paths only" if self._reserved else "it is closed",
            )
        if place == "none":
            self._refused = True
            self.send(_TOO_MANY)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse; the callbacks below collect what was parsed."""
        if self._refused:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The handler either switches, or answers as if the client had not asked for it.
            if self._passed_over:
                self._read_on(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.why if isinstance(cause, _Wrong) else _NOT_HTTP)
            return
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(b"Request head too large.")

    def eof_received(self) -> bool:
        """The client sends no more. True: it may still read, and gets the replies to its requests.

        A client that has left looks the same, until something is sent to it: see `_look`. If the
        reply has begun, the client has left. TLS has no half-closed connections.
        """
        if self._request is None or self._parsed is not None or self._begun:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._timer.cancel()
            self._timer = self._loop.call_later(self._probe_s, self._look)
        return True

    def pause_writing(self) -> None:
        """The client does not read fast enough."""
        self._client_reads = self._loop.create_future()

    def resume_writing(self) -> None:
        """The client has read enough."""
        if self._client_reads is not None:
            self._client_reads.set_result(None)
            self._client_reads = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake all that wait for this client.

        A closed connection is no reference cycle: its memory is free as soon as its handler ends.
        """
        self._shared.open.discard(self)
        self._shared.places.leave(self)
        self._shared.lost.set()
        self._timer.cancel()
        self.resume_writing()
        for request in (self._request, self._parsed):
            if request is not None:
                request.lost()
        self._behind.clear()
        self._request = self._parsed = None
        del self._parser

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = b""
        self._headers = {}
        self._in_head = True
        self._repeated = 0
        if self._request is None:
            self._since_s = self._loop.time()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header or trailer. Repeated headers are joined by commas (RFC 9110, 5.3)."""
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        headers = self._headers
        if key in headers:
            self._repeated += 1
            if self._repeated > _MAX_REPEATED:
                raise _Wrong(b"Too many repeated headers.")
            text = f"{headers[key]}, {text}"
        headers[key] = text

    def on_headers_complete(self) -> None:
        """The head is complete: answer the request now, or after the requests before it."""
        self._head_bytes = 0
        if self._reads_on:
            self._reads_on = False
            return
        parser = self._parser
        url = self._url
        headers = self._headers
        self._headers = {}  # trailers come into it, and are dropped
        self._in_head = False
        version = parser.get_http_version()
        _check_head(version, headers)
        if len(self._behind) == _MAX_BEHIND:
            raise _Wrong(b"Too many requests before the first reply.")
        if not url.startswith(b"/"):  # a proxy's absolute form, or OPTIONS *
            parts = httptools.parse_url(url) if url != b"*" else None
            url = b"*" if parts is None else (parts.path or b"/") + b"?" + (parts.query or b"")
        path, _, query = url.partition(b"?")
        if b"%" in path:
            path = unquote_to_bytes(path)
        old = version == "1.0"
        method = parser.get_method().decode()
        target = url.decode("latin-1")
        text = path.decode("utf-8", "replace")
        request = HttpRequest(method, target, text, query, headers, self)
        request.address = self._address
        request.arrived_s = self._loop.time()
        request.http_1_0 = old
        lasts = not (old or self._reserved or self._parting)
        request.keep_alive = lasts and parser.should_keep_alive()
        request.reserved = self._reserved
        self._parsed = request
        has_body = "transfer-encoding" in headers or headers.get("content-length", "").strip("0 ")
        self._passed_over = bool(has_body) and parser.should_upgrade()
        if self._request is None:
            self._start(request)
        else:
            self._behind.append(request)
            self.transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._head_bytes = 0
        if self._parsed is not None:
            self._parsed.feed(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._head_bytes = 0
        if self._parsed is not None and not self._passed_over:
            self._parsed.complete()
            self._parsed = None

    # Within.

    def _read_on(self, rest: bytes) -> None:
        """Read a request's body that its parser treats as another protocol; `rest` begins it.

        Some clients, such as Java's, ask to switch and send a body too. A second parser reads it,
        after a head with the same length.
        """
        assert self._parsed is not None, "the parser has just read its head"
        headers = self._parsed.headers
        name = "transfer-encoding" if "transfer-encoding" in headers else "content-length"
        head = f"POST / HTTP/1.1\r\n{name}: {headers[name]}\r\n\r\n".encode("latin-1")
        self._passed_over = False
        self._reads_on = True
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _start(self, request: HttpRequest) -> None:
        if self._closing:
            return
        self._request = request
        self._shared.places.busy(self)
        self._chunked = self._begun = False
        self._task = task = self._loop.create_task(self._answer(request))
        self._shared.tasks.add(task)

    async def _answer(self, request: HttpRequest) -> None:
        app = self._shared.app
        try:
            await app.serve(request, self)
        except Exception:
            log.exception("%s: %s: bug while sending a reply", app.name, request.id)
            self.transport.abort()
        finally:
            if self._task is not None:
                self._shared.tasks.discard(self._task)
                self._task = None
        if self.full:
            try:
                await self.drained(app.stall_timeout_s)
            except TimeoutError:
                log.warning("%s: client read nothing for %g s", request.id, app.stall_timeout_s)
                self.transport.abort()
        self._over()

    def _over(self) -> None:
        """A reply has ended: close the connection, or answer the next request."""
        self._request = None
        self._since_s = self._loop.time()
        if self.transport.is_closing():
            return
        if self._closing:
            self.transport.close()
        elif self._behind:
            self._start(self._behind.popleft())
            if not self._behind:
                self.transport.resume_reading()
        elif self._wrong is not None:
            self._end_with(self._wrong)
        elif self._half_closed:
            self.transport.close()
        else:
            self._shared.places.idle(self)

    def _refuse(self, why: bytes) -> None:
        """What the client sent is not HTTP: send a 400, and then close.

        Requests that came before it are answered first.
        """
        self._refused = True
        if self._parsed is not None:  # its handler finds out, and may have begun its reply
            self._parsed.spoil(why.decode())
            self._parsed = None
        elif self._request is not None:
            self._wrong = why
        else:
            self._end_with(why)

    def _end_with(self, why: bytes) -> None:
        self._closing = True
        self.send(_BAD % (len(why), why))
        self.transport.close()

    def _look(self) -> None:
        """Close a connection that has been idle, or has not completed a head, for too long.

        A client that is half-closed gets interim replies, at longer and longer intervals, until its
        reply begins (RFC 9110, 15.2: clients drop them). If it has left, the second one fails.
        """
        left_s = head_s = self._head_s()
        if self._half_closed and self._request is not None:
            if not self._begun and not self._request.http_1_0:
                self.send(_CONTINUE)
            self._probe_s *= _PROBE_FACTOR
            left_s = min(self._probe_s, left_s)
        elif self._request is None:
            hurries = self._in_head or self._reserved or self.transport.is_closing()
            allowed_s = head_s if hurries else self._shared.app.keep_alive_s
            left_s = allowed_s + self._since_s - self._loop.time()
            if left_s <= 0:
                self.make_room()
                return
        left_s = min(left_s, head_s, self._shared.app.keep_alive_s)
        self._timer = self._loop.call_later(left_s, self._look)

    def _head_s(self) -> float:
        return _RESERVED_HEAD_S if self._reserved else self._shared.app.head_timeout_s


class Gate(Protocol):
    """Decides which requests an App serves. live.access.guard has the one of all processes."""

    def admit(self, request: HttpRequest) -> None:
        """Raise MoonserveError if the request may not be served; called before its body is read."""

    def headers(self, request: HttpRequest) -> Mapping[str, str]:
        """Return what to add to the headers of its reply."""


class NotFound(BadRequest):
    """No such path."""

    status = 404


class App:
    """Routes requests to handlers and sends what they return; for `serve`.

    routes: (method, path) -> handler. prefixes: (method, path prefix) -> handler; the longest
    prefix wins. The caller may add to both before `serve`. HEAD goes to the handler of GET.
    body_limits: path prefix -> bytes, instead of max_body_bytes; the longest prefix wins. fallback:
    serves all other paths, with any method. absent: paths that clients may expect here -> why they
    are not here, and what to use instead; `fallback` gets none of them. gate: refuses requests;
    None: all are served. certified: only clients with a TLS certificate may call paths that begin
    so. A handler's
    MoonserveError becomes a reply with its status in OpenAI's error shape; any other exception
    becomes a 500 without details.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        prefixes: Mapping[tuple[str, str], Handler] | None = None,
        *,
        max_body_bytes: Bytes = 8 << 20,
        body_limits: Mapping[str, Bytes] = _NO_LIMITS,
        body_timeout_s: float = 60.0,
        body_grace_s: float = 5.0,
        head_timeout_s: float = _HEAD_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        place_limits: PlaceLimits = PlaceLimits(),  # noqa: B008 - frozen
        stall_timeout_s: float = 60.0,
        fallback: Handler | None = None,
        absent: Mapping[str, str] = _NONE_ABSENT,
        gate: Gate | None = None,
        certified: Sequence[str] = (),
        name: str = "moonserve",
    ) -> None:
        self.routes = dict(routes)
        self.prefixes = dict(prefixes or {})
        self._fallback = fallback
        self._absent = absent
        self._gate = gate
        self._certified = tuple(certified)
        self.name = name
        limits = {**body_limits, "": max_body_bytes}
        self._body_limits = sorted(limits.items(), key=lambda item: len(item[0]), reverse=True)
        self._body_timeout_s = body_timeout_s
        self._body_grace_s = body_grace_s
        self.head_timeout_s = head_timeout_s
        """The longest time that a request's head may take."""
        self.keep_alive_s = keep_alive_s
        """The longest time for which a connection may be idle."""
        self.place_limits = place_limits
        self.stall_timeout_s = stall_timeout_s
        """The longest time for which a client may read nothing of its reply."""
        self._date = (0, "")
        self._discarding = asyncio.Lock()

    async def serve(self, request: HttpRequest, connection: Accepted) -> None:
        """Answer one request; it ends by itself when the client disconnects."""
        request.max_body_bytes = self._body_limit(request.path)
        request.body_timeout_s = self._body_timeout_s
        request.body_grace_s = self._body_grace_s
        try:
            reply = await self._answer(request, connection)
            if isinstance(reply, StreamingResponse):
                await self._send_stream(request, reply, connection)
            elif isinstance(reply, Switch):
                await request.discard(_DISCARD_BYTES, _DISCARD_S, self._pace)
                connection.switch(reply)
                await request.disconnected()
            else:
                await self._send_whole(request, reply, connection)
        except asyncio.CancelledError:
            # Cancelled by the client's disconnect, by a stalled client, or by Server.stop.
            why = "client disconnected" if request.gone else "cut by the server"
            log.info("%s: %s %s (%s): %s", self.name, request.method, request.path, request.id, why)
            connection.abort()
        finally:
            request.stop_watching()

    async def _answer(self, request: HttpRequest, connection: Accepted) -> Reply:
        try:
            request.check()
            if request.path.startswith(self._certified) and not connection.certified:
                raise Forbidden(f"{request.path} needs a client certificate of the cluster")
            if request.reserved and not request.path.startswith(_RESERVED_PATHS):
                raise Overloaded(
                    "all connections of this process are in use; send the request again later",
                    "gateway_connections",
                    1.0,
                )
            method = "GET" if request.method == "HEAD" else request.method
            handler = self._handler(method, request.path)
            if self._gate is not None:
                self._gate.admit(request)
            return await handler(request)
        except MoonserveError as error:
            if error.status >= 500:
                kind = type(error).__name__
                args = (self.name, request.id, kind, error)
                log.warning("%s: %s: %s: %s", *args, extra={KIND: kind})
            return error_response(error, request.path)
        except Exception:
            log.exception("%s: %s: bug while serving %s", self.name, request.id, request.path)
            return error_response(
                MoonserveError(f"internal error; look for request id {request.id} in the log"),
                request.path,
            )

    async def _pace(self, size: Bytes) -> None:
        """Wait until the next piece of an unwanted body may be read."""
        async with self._discarding:
            await asyncio.sleep(size / _DISCARDED_BYTES_PER_S)

    def _body_limit(self, path: str) -> Bytes:
        for prefix, limit in self._body_limits:
            if path.startswith(prefix):
                return limit
        raise AssertionError("the empty prefix matches every path")

    def _handler(self, method: str, path: str) -> Handler:
        handler = self.routes.get((method, path))
        if handler is not None:
            return handler
        best = ""
        for prefix_method, prefix in self.prefixes:
            if prefix_method == method and path.startswith(prefix) and len(prefix) > len(best):
                best = prefix
        if best:
            return self.prefixes[method, best]
        shown = shortened(path)
        found = {m for m, known in self.routes if known == path}
        found |= {m for m, prefix in self.prefixes if path.startswith(prefix) and m != "OPTIONS"}
        if found:
            allowed = sorted(found | {"HEAD"} if "GET" in found else found)
            raise MethodNotAllowed(f"{shown} accepts {', '.join(allowed)}, not {method}", allowed)
        if path in self._absent:
            raise NotFound(f"there is no path {path} here: {self._absent[path]}")
        meant = self._meant(method, path)
        if self._fallback is not None and not meant:
            return self._fallback
        if not meant and _LIST in self.routes:
            meant = "; GET /openapi.json lists all paths"
        raise NotFound(f"there is no path {shown} for {method}{meant}")

    def _meant(self, method: str, path: str) -> str:
        """What to say of the path that a client meant; empty: there is no such path here.

        Clients leave out /v1, add it twice, add slashes, or have another host's path before it.
        """
        end = _own_part(path)
        near = [route for route in self.routes if end and _own_part(route[1]) == end]
        for known_method, known in sorted(near, key=lambda route: route[0] != method):
            other = "" if known_method == method else f"{known_method} "
            return f"; did you mean {other}{known}?"
        for known, why in self._absent.items():
            if _own_part(known) == end:
                return f"; nor is {known} here: {why}"
        return ""

    def _head(self, request: HttpRequest, reply: Response | StreamingResponse) -> bytes:
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True))
        head = (
            f"content-type: {reply.content_type}\r\nx-request-id: {request.id}\r\n"
            f"date: {self._date[1]}\r\n"
        )
        more = _NO_HEADERS if self._gate is None else self._gate.headers(request)
        for name, value in (*reply.headers.items(), *more.items()):
            head += f"{name}: {value}\r\n"
        lines = 3 + len(reply.headers) + len(more)
        assert head.count("\n") == lines, "no header has a line break"
        return head.encode("latin-1")

    async def _send_whole(
        self, request: HttpRequest, reply: Response, connection: Accepted
    ) -> None:
        request.stop_watching()
        bodiless = request.method == "HEAD" or reply.status in _BODILESS
        body = b"" if bodiless else reply.body
        connection.begin(reply.status, self._head(request, reply), request, len(reply.body), body)
        if request.unread():
            await request.discard(_DISCARD_BYTES, _DISCARD_S, self._pace)

    async def _send_stream(
        self, request: HttpRequest, reply: StreamingResponse, connection: Accepted
    ) -> None:
        try:
            if request.unread():
                await request.discard(_DISCARD_BYTES, _DISCARD_S, self._pace)
            request.cancel_on_disconnect()
            connection.begin(reply.status, self._head(request, reply), request, None)
            chunks = reply.chunks
            if isinstance(chunks, Poured):
                if request.method == "HEAD":
                    return
                while not await chunks.pour(connection.write):
                    await connection.drained(self.stall_timeout_s)
            else:
                async for chunk in chunks:
                    if request.method == "HEAD":
                        return
                    if chunk and not connection.write(chunk):
                        await connection.drained(self.stall_timeout_s)
        except TimeoutError:
            log.warning("%s: client read nothing for %g s", request.id, self.stall_timeout_s)
            connection.abort()
        except Exception:
            # The status line is sent already, so the server can only end the connection early.
            log.exception("%s: %s: the reply's stream broke off", self.name, request.id)
            connection.break_off()
        else:
            connection.end()
        finally:
            request.stop_watching()
            close = getattr(reply.chunks, "aclose", None)
            if close is not None:
                await close()


class Server:
    """A listening server; made by `serve`."""

    def __init__(self, connections: Connections, listener: asyncio.Server | TlsListener) -> None:
        self._connections = connections
        self._listener = listener
        name = listener.sockets[0].getsockname()
        self._path = name if isinstance(name, str) else ""
        self.port: int = 0 if self._path else name[1]
        """The port it listens on, also if the caller asked for port 0; 0 at a unix socket."""

    def metrics(self) -> Iterable[Metric]:
        """The connections that are open, and those that were refused, for /metrics."""
        places = self._connections.places
        yield GaugeMetricFamily("moonserve_connections", "Clients' open connections.", places.count)
        text = "The most connections that there may be."
        yield GaugeMetricFamily("moonserve_connections_limit", text, places.most)
        yield CounterMetricFamily(
            "moonserve_connections_refused",
            "Connections that were closed because there was no place for them.",
            places.refused,
        )

    async def stop(
        self, drain_s: float, part_s: float = 0.0, last: Callable[[], None] | None = None
    ) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them.

        last: is called a second before the cut, so that they can end by themselves. part_s: for so
        long, open connections get one more reply each, before idle ones are closed: a client may
        send its next request just then. Returns once every handler has ended, or 5 s after the cut
        at the latest.
        """
        connections = self._connections
        for _ in range(_ACCEPTING_TURNS if part_s else 0):
            await asyncio.sleep(0)  # accept what has connected: closing would reset it
        self._listener.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if part_s:
            for connection in connections.open:
                connection.part()
            await self._until_closed(part_s)
        for connection in list(connections.open):
            connection.shutdown()
        if connections.tasks:
            await asyncio.wait(set(connections.tasks), timeout=drain_s)
        if connections.tasks and last is not None:
            last()
            await asyncio.wait(set(connections.tasks), timeout=_LAST_S)
        running = {task for task in connections.tasks if not task.done()}
        if not running:
            await self._until_closed(_FLUSH_S)
        for connection in list(connections.open):
            connection.abort()
        if running:
            # The lost connection cancels the tasks that watch it; a second cancel would interrupt
            # their clean-up.
            _, running = await asyncio.wait(running, timeout=_NOTICE_S)
            for task in running:
                if not task.cancelling():
                    task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLEANUP_S)
        await self._listener.wait_closed()

    async def _until_closed(self, most_s: float) -> None:
        """Give clients time to read their last replies, and to close."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self._connections.open:
                    self._connections.lost.clear()
                    await self._connections.lost.wait()


async def serve(
    app: App,
    host: str,
    port: int,
    setting: str = "port",
    *,
    shared: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen on host:port (0: any free one) and serve `app` on the running loop.

    Raises ConfigError if it cannot listen there; `setting` is the name of the port's setting.
    shared: other processes listen there too, and each new connection goes to one of them.
    tls: accept connections by TLS only, in this context.
    """
    connections = Connections(app)
    listener = await listening(
        lambda: Accepted(connections), host, port, setting, shared=shared, tls=tls
    )
    return Server(connections, listener)


async def listening(
    make: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    setting: str,
    *,
    shared: bool,
    tls: ssl.SSLContext | None,
) -> asyncio.Server | TlsListener:
    """Listen as `serve` does. make: makes the protocol of a connection."""
    loop = asyncio.get_running_loop()
    try:
        if tls is not None:
            return await listen(tls, host, port, make, address_of, shared=shared)
        return await loop.create_server(make, host, port, backlog=2048, reuse_port=shared or None)
    except OSError as error:
        raise bind_error(error, host, port, setting) from None


async def serve_socket(app: App, path: str, setting: str) -> Server:
    """Listen at a unix socket that only this user may use, and serve `app` on the running loop.

    Raises ConfigError: see `bound`; `setting` is the name of the path's setting.
    """
    held = bound(path, setting)
    connections = Connections(app, private=True)
    loop = asyncio.get_running_loop()
    listener = await loop.create_unix_server(lambda: Accepted(connections), sock=held, backlog=2048)
    return Server(connections, listener)


def bind_error(error: OSError, host: str, port: int, setting: str) -> ConfigError:
    """What to say when no socket can listen at host:port; `setting`: the port's name."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{host}:{port} is in use; stop the process that uses it, or choose another port"
            " (0: any)",
            setting,
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs privileges; choose a port above 1023", setting)
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", "host")


class ProcessPart:
    """A part of a process: what it serves over HTTP, what it counts, and how it starts and stops.

    The parts override what they have (Control, ExternalEngines, the links between fronts and
    Conductor); live.process puts them together.
    """

    proxies_at = ""
    """Where the part listens for proxies, once it has started; empty: it does not."""

    def routes(self) -> Routes:
        """Handlers of exact paths. Those of a later part of the process win."""
        return {}

    def prefixes(self) -> Routes:
        """Handlers of all paths that begin so."""
        return {}

    def collectors(self) -> list[Collector]:
        """What the part counts, for /metrics."""
        return []

    async def prepare(self) -> None:
        """Called before the process listens. Raises MoonserveError: the process cannot start."""

    async def start(self, port: int) -> None:
        """Called once the process listens at `port`. Raises MoonserveError, as `prepare`."""

    def ends(self) -> None:
        """Called when the process begins to end; it still serves until `stop`."""

    async def stop(self) -> None:
        """Called when the server listens no more, also after a `prepare` or `start` that failed."""
