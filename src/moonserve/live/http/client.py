"""The HTTP client of every moonserve process: asyncio.Protocol, httptools and a pool.

`HttpClient.request` returns a whole reply, `HttpClient.stream` a reply piece by piece, `sse_events`
its server-sent events. It speaks http:// only, works on any asyncio loop, and reads no clock but
the loop's. `connection.Connection` is one socket; the pool here chooses the socket of each request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping
from types import TracebackType
from typing import Any

import msgspec

from moonserve.core.errors import DeadlineExceeded
from moonserve.core.units import Bytes
from moonserve.live.http.connection import Connection, UpstreamError, Watch
from moonserve.live.http.host import Host
from moonserve.live.http.switch import Switched
from moonserve.live.http.target import Target, head_of, parse
from moonserve.live.http.target import check_url as check_url

_NO_HEADERS: Mapping[str, str] = {}
_MAX_EVENT_BYTES = 16 << 20


class ClientResponse(msgspec.Struct):
    """A whole reply. `headers` has lower-case names; of a repeated header it has the last value."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """A client with a keep-alive pool per host. A process has one per event loop.

    At most `max_per_host` connections per host are in use; further calls wait, up to their
    deadline. An idle connection is closed after `idle_s`. A whole reply larger than
    `max_reply_bytes` raises UpstreamError.
    """

    def __init__(
        self, *, max_per_host: int = 1024, idle_s: float = 30.0, max_reply_bytes: Bytes = 64 << 20
    ) -> None:
        self._max_per_host = max_per_host
        self._idle_s = idle_s
        self._max_reply_bytes = max_reply_bytes
        self._closed = False
        self._hosts: dict[tuple[str, int], Host] = {}
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
        target = parse(url)
        host = self._host(target)
        try:
            connection = await self._begin(host, method, target, headers, body, timeout_s, again)
            try:
                whole = await connection.read_all(self._max_reply_bytes)
                return ClientResponse(connection.status, connection.headers, whole)
            finally:
                self._end(host, connection)
        except (TimeoutError, DeadlineExceeded):
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
        again: bool = True,
    ) -> ClientStream:
        """Send one request and read its reply as it comes: `async with client.stream(...) as r`.

        timeout_s bounds the time until the reply's headers are here, idle_timeout_s every wait for
        the next chunk. again: as for `request`. If the block ends before the reply does, the
        connection is closed and the peer sees a disconnect.
        """
        return ClientStream(self, method, url, headers, body, timeout_s, idle_timeout_s, again)

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
        key = (target.host, target.port)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = Host(key, self._max_per_host)
        return host

    def _left(self, host: Host) -> None:
        """Free a place at a host. A host without use is forgotten, because there may be many."""
        host.leave()
        if host.unused:
            del self._hosts[host.key]

    async def _begin(
        self,
        host: Host,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float,
        again: bool,
    ) -> Connection:
        """Take a place at the host, send, and return when the reply's headers are here.

        The caller calls `_end` later. The deadline stays set on the connection. Raises TimeoutError
        or DeadlineExceeded.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        await host.enter(deadline_s)
        try:
            data = head_of(method, target, headers, len(body)) + body
            return await self._exchange(host, target, data, deadline_s, again)
        except BaseException:
            self._left(host)
            raise

    def _end(self, host: Host, connection: Connection) -> None:
        connection.watch_until(math.inf)
        self._give_back(host, connection)
        self._left(host)

    async def _exchange(
        self, host: Host, target: Target, data: bytes, deadline_s: float, again: bool
    ) -> Connection:
        """Send on a pooled or new connection and wait for the reply's headers.

        The peer may have just closed a pooled connection. If it ends before any byte of a reply,
        and `again` is true, the client sends the request once more on a new connection.
        """
        connection = self._pick(host)
        if connection is not None:
            connection.watch_until(deadline_s)
            try:
                await connection.send(data)
                return connection
            except UpstreamError:
                if connection.reply_began or not again:
                    raise
            except BaseException:
                connection.abort()
                raise
        async with asyncio.timeout_at(deadline_s):
            connection = await self._connect(target)
        connection.watch_until(deadline_s)
        try:
            await connection.send(data)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, target: Target) -> Connection:
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
        if self._closed:  # closed while it connected
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
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        host.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close connections that are idle for too long; run again while any are left."""
        loop = asyncio.get_running_loop()
        expired_s = loop.time() - self._idle_s
        for host in list(self._hosts.values()):
            while host.idle and host.idle[0].idle_since_s <= expired_s:
                host.idle.popleft().abort()
            if host.unused:
                del self._hosts[host.key]
        left = any(host.idle for host in self._hosts.values())
        self._sweeper = loop.call_later(self._idle_s, self._sweep) if left else None


class ClientStream:
    """A reply read piece by piece: an async context manager, made by `HttpClient.stream`.

    Iteration gives body chunks in order. It raises UpstreamError if the reply breaks off, and
    DeadlineExceeded if the peer is silent for idle_timeout_s. If the consumer is slow, the socket
    stops reading: at most about 256 KiB wait here.
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
        again: bool,
    ) -> None:
        self._client = client
        self._method = method
        self._url = url
        self._request_headers = headers
        self._request_body = body
        self._timeout_s = timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._again = again
        self._connection: Connection | None = None
        self._host: Host | None = None
        self.status = 0
        self.headers: Mapping[str, str] = _NO_HEADERS

    async def __aenter__(self) -> ClientStream:
        target = parse(self._url)
        self._host = host = self._client._host(target)
        headers = self._request_headers
        body = self._request_body
        try:
            self._connection = connection = await self._client._begin(
                host, self._method, target, headers, body, self._timeout_s, self._again
            )
        except (TimeoutError, DeadlineExceeded):
            raise DeadlineExceeded(
                f"{self._method} {self._url}: no reply within {self._timeout_s:g} s"
            ) from None
        connection.watch_until(math.inf)
        connection.watch_idle(self._idle_timeout_s)
        self.status = connection.status
        self.headers = connection.headers
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """End the stream as the end of the block does, for callers without an `async with`."""
        assert self._connection is not None
        assert self._host is not None
        self._connection.watch_idle(None)
        self._client._end(self._host, self._connection)

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> bytes:
        assert self._connection is not None, "use it inside `async with`"
        chunk = await self._connection.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def take(self) -> Coroutine[Any, Any, bytes | None]:
        """Return all body bytes that are here, waiting for the first; None at the body's end.

        Raises as iteration does.
        """
        assert self._connection is not None, "use it inside `async with`"
        return self._connection.take()

    def idle(self, timeout_s: float) -> None:
        """Set idle_timeout_s from now on."""
        assert self._connection is not None, "use it inside `async with`"
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
