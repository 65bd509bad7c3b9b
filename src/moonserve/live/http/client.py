"""The HTTP client every moonserve process calls others with: asyncio.Protocol, httptools, a pool.

`HttpClient.request` for whole replies, `HttpClient.stream` for replies read as they come,
`sse_events` for server-sent events. http:// only. Works on any asyncio loop; reads no clock but the
loop's. Pieces: `connection.Connection` is one socket, the pool here decides which one to use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import ConfigError, DeadlineExceeded
from moonserve.core.units import Bytes
from moonserve.live.http.connection import Connection, UpstreamError
from moonserve.live.http.switch import Switched

_NO_HEADERS: Mapping[str, str] = {}
_MAX_EVENT_BYTES = 16 << 20


class ClientResponse(msgspec.Struct):
    """A whole reply. `headers` has lower-case names; a repeated one's last wins."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Target(msgspec.Struct, frozen=True):
    host: str
    port: int
    netloc: str
    path: str


@lru_cache(maxsize=4096)
def _parse(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is no address; write it like http://10.0.0.5:8100", "url")
        port = parts.port or 80
        parts.hostname.encode("idna")  # as it is looked up; a UnicodeError is a ValueError
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}", "url") from None
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    if not (path + parts.netloc).isascii() or any(c <= " " for c in path + parts.netloc):
        raise ConfigError(f"{url!r} has characters that must be percent-encoded", "url")
    return _Target(parts.hostname, port, parts.netloc, path)


def check_url(url: str, setting: str) -> None:
    """Raises ConfigError that names the setting: the client cannot use this address."""
    try:
        _parse(url)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("url: "), setting) from None


def _head(method: str, target: _Target, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if length or method not in ("GET", "DELETE"):
        lines.append(f"content-length: {length}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1:
        raise ConfigError("a header name or value has a line break in it", "headers")
    return f"{text}\r\n".encode("latin-1")


class _Host:
    """The connections to one host: idle ones (last used is first reused) and free places."""

    __slots__ = ("idle", "places")

    def __init__(self, max_connections: int) -> None:
        self.idle: deque[Connection] = deque()
        self.places = asyncio.Semaphore(max_connections)


class HttpClient:
    """A client with a keep-alive pool per host; one per process and event loop, shared by all.

    At most `max_per_host` connections are in use per host (further calls wait, within their
    deadline); an unused one is closed after `idle_s`. A whole reply over `max_reply_bytes` is an
    UpstreamError.
    """

    def __init__(
        self, *, max_per_host: int = 1024, idle_s: float = 30.0, max_reply_bytes: Bytes = 64 << 20
    ) -> None:
        self._max_per_host = max_per_host
        self._idle_s = idle_s
        self._max_reply_bytes = max_reply_bytes
        self._closed = False
        self._hosts: dict[tuple[str, int], _Host] = {}
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: bytes = b"",
        timeout_s: float,
    ) -> ClientResponse:
        """Send one request and return the whole reply, whatever its status.

        Raises UpstreamError (no whole reply came) or DeadlineExceeded after `timeout_s`.
        """
        target = _parse(url)
        host = self._host(target)
        try:
            async with asyncio.timeout(timeout_s), host.places:
                connection = await self._exchange(host, method, target, headers, body)
                try:
                    whole = await connection.read_all(self._max_reply_bytes)
                    return ClientResponse(connection.status, connection.headers, whole)
                finally:
                    self._give_back(host, connection)
        except TimeoutError:
            raise DeadlineExceeded(f"{method} {url}: no reply within {timeout_s:g} s") from None

    def stream(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: bytes = b"",
        timeout_s: float,
        idle_timeout_s: float,
    ) -> ClientStream:
        """Send one request and read its reply as it comes: `async with client.stream(...) as r`.

        timeout_s bounds connecting and the reply's headers, idle_timeout_s every wait for the next
        chunk. Leaving the block before the reply's end closes the connection: the peer sees a
        disconnect.
        """
        return ClientStream(self, method, url, headers, body, timeout_s, idle_timeout_s)

    async def upgrade(
        self, url: str, name: str, to: Switched, *, headers: Mapping[str, str], timeout_s: float
    ) -> ClientResponse | None:
        """Ask for protocol `name` on a connection of its own; None: `to` has it from now on.

        Else the reply of who does not speak it there. Raises as `request` does. `close` cuts the
        connection too.
        """
        target = _parse(url)
        asked = {**headers, "connection": "upgrade", "upgrade": name}
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect(target)
                switched = False
                try:
                    connection.may_switch = True
                    await connection.send(_head("GET", target, asked, 0))
                    if connection.status == 101:
                        connection.switch(to)
                        switched = True
                        return None
                    whole = await connection.read_all(self._max_reply_bytes)
                    return ClientResponse(connection.status, connection.headers, whole)
                finally:
                    if not switched:  # also where a cancel came just after the 101
                        connection.abort()
        except TimeoutError:
            raise DeadlineExceeded(f"GET {url}: no reply within {timeout_s:g} s") from None

    async def close(self) -> None:
        """Cut every connection; calls under way and later ones raise UpstreamError."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)

    def _host(self, target: _Target) -> _Host:
        key = (target.host, target.port)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = _Host(self._max_per_host)
        return host

    async def _exchange(
        self, host: _Host, method: str, target: _Target, headers: Mapping[str, str], body: bytes
    ) -> Connection:
        """Send on a pooled or fresh connection and wait for the reply's headers.

        A pooled connection may have been closed by the peer just now: if it ends before any byte
        of a reply, the request goes out once more, on a fresh one.
        """
        data = _head(method, target, headers, len(body)) + body
        connection = self._pick(host)
        if connection is not None:
            try:
                await connection.send(data)
                return connection
            except UpstreamError:
                if connection.reply_began:
                    raise
            except BaseException:
                connection.abort()
                raise
        connection = await self._connect(target)
        try:
            await connection.send(data)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, target: _Target) -> Connection:
        if self._closed:
            raise UpstreamError("this client is closed", sent=False)
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(target.netloc, self._open), target.host, target.port
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise UpstreamError(f"{target.netloc}: cannot connect: {why}", sent=False) from None
        return connection

    def _pick(self, host: _Host) -> Connection | None:
        while host.idle:
            connection = host.idle.pop()
            if connection.reusable():
                return connection
        return None

    def _give_back(self, host: _Host, connection: Connection) -> None:
        """Keep a connection whose reply was read to its end; close any other."""
        if not connection.reusable():
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        host.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close connections idle for too long; comes again while any are left."""
        loop = asyncio.get_running_loop()
        expired_s = loop.time() - self._idle_s
        for host in self._hosts.values():
            while host.idle and host.idle[0].idle_since_s <= expired_s:
                host.idle.popleft().abort()
        left = any(host.idle for host in self._hosts.values())
        self._sweeper = loop.call_later(self._idle_s, self._sweep) if left else None


class ClientStream:
    """A reply read as it comes; made by `HttpClient.stream`, used as an async context manager.

    Iterating gives body chunks (bytes, in order) and raises UpstreamError when the reply breaks
    off, DeadlineExceeded when the peer is silent for idle_timeout_s. A slow consumer makes the
    socket stop reading: at most about 256 KiB wait here.
    """

    def __init__(
        self,
        client: HttpClient,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._client = client
        self._method = method
        self._url = url
        self._request_headers = headers
        self._request_body = body
        self._timeout_s = timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._connection: Connection | None = None
        self._host: _Host | None = None
        self.status = 0
        self.headers: Mapping[str, str] = _NO_HEADERS

    async def __aenter__(self) -> ClientStream:
        target = _parse(self._url)
        host = self._client._host(target)
        try:
            async with asyncio.timeout(self._timeout_s):
                await host.places.acquire()
                self._host = host
                self._connection = await self._client._exchange(
                    host, self._method, target, self._request_headers, self._request_body
                )
        except BaseException as error:
            if self._host is not None:
                host.places.release()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{self._method} {self._url}: no reply within {self._timeout_s:g} s"
                ) from None
            raise
        self._connection.watch_idle(self._idle_timeout_s)
        self.status = self._connection.status
        self.headers = self._connection.headers
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """What the end of the block does, for who entered it without one."""
        assert self._connection is not None
        assert self._host is not None
        self._connection.watch_idle(None)
        self._client._give_back(self._host, self._connection)
        self._host.places.release()

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> bytes:
        assert self._connection is not None, "use it inside `async with`"
        chunk = await self._connection.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def take(self) -> bytes | None:
        """All that has come of the body, a piece at least; None at its end. Raises as iterating."""
        assert self._connection is not None, "use it inside `async with`"
        return await self._connection.take()

    def idle(self, timeout_s: float) -> None:
        """From now on this is idle_timeout_s."""
        assert self._connection is not None, "use it inside `async with`"
        self._connection.watch_idle(timeout_s)

    async def read(self) -> bytes:
        """The rest of the body at once; for error replies."""
        return b"".join([chunk async for chunk in self])


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event in a stream of body chunks, up to `[DONE]` or its end.

    Comments and other fields are skipped, the data lines of one event joined by line feeds.
    Raises UpstreamError on an event over 16 MiB. Does not close `chunks`.
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
