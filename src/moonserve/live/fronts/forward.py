"""Forwards HTTP requests of a front to the Conductor's process: joins, beats, store, admin API.

A long reply passes as it comes. A connection that switches to another protocol is piped through,
end to end. When the Conductor is gone or hangs, RemoteConductor calls `cut` in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from moonserve.core.errors import NobodyAlive
from moonserve.core.units import Bytes
from moonserve.live.access.scopes import scope_of
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientStream, UpstreamError
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, error_response
from moonserve.live.http.switch import Switch, Switched

_TIMEOUT_S = 300.0
"""Longest call of a Conductor that answers at all."""
_WHOLE_BYTES: Bytes = 1 << 20
"""Shorter replies are forwarded whole."""
_OURS = {"connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding"}
_ITS = {*_OURS, "content-type", "date", "x-request-id"}
_JUDGED = {"authorization", "origin", "sec-fetch-site", "upgrade", "x-api-key"}
"""Headers of a request that this front has judged. The Conductor's process knows no API keys, and
has another address."""


class Forward:
    """The handler of all requests that a front does not serve itself."""

    def __init__(self, conductor: RemoteConductor) -> None:
        """Requests go by the Conductor's road, with its token: this front has admitted them."""
        self._conductor = conductor
        self._token = conductor.road.token
        self._client = conductor.road.client
        self._http = self._client()

    async def close(self) -> None:
        """End all requests under way."""
        await self._http.close()

    def cut(self) -> None:
        """End all requests under way: the Conductor is gone. None of them may be sent again."""
        self._http.cut()
        self._http = self._client()

    async def __call__(self, request: HttpRequest) -> Response | StreamingResponse | Switch:
        """The Conductor's reply; 503 while its process is away."""
        try:
            return await self._passed_on(request)
        except NobodyAlive as error:  # RemoteConductor has logged it once
            return error_response(error)

    async def _passed_on(self, request: HttpRequest) -> Response | StreamingResponse | Switch:
        body = await request.body()
        # The HTTP server drops the body of a reply to HEAD, and keeps its length.
        method = "GET" if request.method == "HEAD" else request.method
        request.cancel_on_disconnect()
        url = self._conductor.url + request.target
        name = request.headers.get("upgrade")
        headers = {k: v for k, v in request.headers.items() if k not in _OURS | _JUDGED}
        headers["x-request-id"] = request.id
        if scope_of(request.path) in ("admin", "metrics"):
            headers |= bearer(self._token)
        try:
            if name is not None:
                there = _Pipe()
                reply = await self._http.upgrade(
                    url, name, there, headers=headers, timeout_s=_TIMEOUT_S
                )
                if reply is None:
                    request.stop_watching()
                    return Switch(name, _Pipe(there))
            else:
                stream = self._http.stream(
                    method,
                    url,
                    headers=headers,
                    body=body,
                    timeout_s=_TIMEOUT_S,
                    idle_timeout_s=_TIMEOUT_S,
                )
                async with contextlib.AsyncExitStack() as stack:
                    await stack.enter_async_context(stream)
                    kept, kind = _forwarded(stream.headers)
                    if int(stream.headers.get("content-length", _WHOLE_BYTES)) < _WHOLE_BYTES:
                        return Response(stream.status, await stream.read(), kept, kind)
                    chunks = _Chunks(stream, stack.pop_all())
                    return StreamingResponse(chunks, stream.status, kept, kind)
        except UpstreamError as error:
            raise NobodyAlive(f"the Conductor's process does not answer: {error}") from None
        kept, kind = _forwarded(reply.headers)
        return Response(reply.status, reply.body, kept, kind)


def _forwarded(headers: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The headers that are forwarded, and the content type."""
    kept = {k: v for k, v in headers.items() if k not in _ITS}
    return kept, headers.get("content-type", "application/octet-stream")


class _Chunks:
    """The rest of a reply; `aclose` ends it, also before its first piece was read."""

    def __init__(self, stream: ClientStream, left: contextlib.AsyncExitStack) -> None:
        self._stream, self.aclose = stream, left.aclose

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._stream)


class _Pipe(Switched):
    """One of two connections that are piped into each other. The second is made with the first."""

    def __init__(self, other: _Pipe | None = None) -> None:
        self._other = other

    def take_over(
        self, transport: asyncio.Transport, lost: Callable[[Exception | None], None]
    ) -> None:
        """See Switched: the first pauses until the second is there."""
        super().take_over(transport, lost)
        if self._other is None:
            transport.pause_reading()
        elif self._other.transport.is_closing():
            self._other = None
            transport.close()
        else:
            self._other._other = self
            self._other.transport.resume_reading()

    def unused(self) -> None:
        """The second has no connection: close the first."""
        if self._other is not None:
            self._other.transport.close()

    def data_received(self, data: bytes) -> None:
        """Write to the other connection."""
        if self._other is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        """This end does not read: stop reading from the other."""
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        """This end reads again: read from the other."""
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close both, and separate them: a closed connection is no reference cycle."""
        if self._other is not None:
            self._other.transport.close()
            self._other._other = None
            self._other = None
        super().connection_lost(exc)
