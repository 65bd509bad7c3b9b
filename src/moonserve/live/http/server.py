"""The HTTP server of every moonserve process: routes and replies, on connections of `accepted`.

`App` routes and replies, `serve` listens, `Server.stop` drains and cuts. The gateway, the workers
and the store's master use it. It has no signal handlers, no access log and no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import TypeAlias

from prometheus_client.registry import Collector

from moonserve.core.errors import BadRequest, ConfigError, MoonserveError
from moonserve.core.units import Bytes
from moonserve.live.http.accepted import Accepted, Connections
from moonserve.live.http.message import (
    HttpRequest,
    MethodNotAllowed,
    Response,
    StreamingResponse,
    error_response,
)
from moonserve.live.http.switch import Switch

log = logging.getLogger(__name__)

Reply: TypeAlias = Response | StreamingResponse | Switch
Handler: TypeAlias = Callable[[HttpRequest], Awaitable[Reply]]
Routes: TypeAlias = dict[tuple[str, str], Handler]
"""Handlers by (method, path)."""

_NO_LIMITS: Mapping[str, Bytes] = {}
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0
_CLEANUP_S = 5.0
_FLUSH_S = 1.0
_NOTICE_S = 0.1


class NotFound(BadRequest):
    """No such path."""

    status = 404


class App:
    """Routes requests to handlers and sends what they return; for `serve`.

    routes: (method, path) -> handler. prefixes: (method, path prefix) -> handler; the longest
    prefix wins. The caller may add to both before `serve`. HEAD goes to the handler of GET.
    body_limits: path prefix -> bytes, instead of max_body_bytes; the longest prefix wins. fallback:
    serves all other paths, with any method. A handler's MoonserveError becomes a reply with its
    status in OpenAI's error shape; any other exception becomes a 500 without details.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Handler],
        prefixes: Mapping[tuple[str, str], Handler] | None = None,
        *,
        max_body_bytes: Bytes = 8 << 20,
        body_limits: Mapping[str, Bytes] = _NO_LIMITS,
        body_timeout_s: float = 60.0,
        stall_timeout_s: float = 60.0,
        fallback: Handler | None = None,
        name: str = "moonserve",
    ) -> None:
        self.routes = dict(routes)
        self.prefixes = dict(prefixes or {})
        self._fallback = fallback
        self.name = name
        limits = {**body_limits, "": max_body_bytes}
        self._body_limits = sorted(limits.items(), key=lambda item: len(item[0]), reverse=True)
        self._body_timeout_s = body_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._date = (0, "")

    async def serve(self, request: HttpRequest, connection: Accepted) -> None:
        """Answer one request; it ends by itself when the client disconnects."""
        request.max_body_bytes = self._body_limit(request.path)
        request.body_timeout_s = self._body_timeout_s
        try:
            reply = await self._answer(request)
            if isinstance(reply, StreamingResponse):
                await self._send_stream(request, reply, connection)
            elif isinstance(reply, Switch):
                await request.discard(_DISCARD_BYTES, _DISCARD_S)
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

    async def _answer(self, request: HttpRequest) -> Reply:
        try:
            method = "GET" if request.method == "HEAD" else request.method
            return await self._handler(method, request.path)(request)
        except MoonserveError as error:
            if error.status >= 500:
                log.warning("%s: %s: %s: %s", self.name, request.id, type(error).__name__, error)
            return error_response(error)
        except Exception:
            log.exception("%s: %s: bug while serving %s", self.name, request.id, request.path)
            return error_response(
                MoonserveError(f"internal error; look for request id {request.id} in the log")
            )

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
        found = {m for m, known in self.routes if known == path}
        found |= {m for m, prefix in self.prefixes if path.startswith(prefix)}
        if found:
            allowed = sorted(found | {"HEAD"} if "GET" in found else found)
            raise MethodNotAllowed(f"{path} accepts {', '.join(allowed)}, not {method}", allowed)
        if self._fallback is not None:
            return self._fallback
        raise NotFound(f"there is no path {path} for {method}")

    def _head(self, request: HttpRequest, reply: Response | StreamingResponse) -> bytes:
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True))
        head = (
            f"content-type: {reply.content_type}\r\nx-request-id: {request.id}\r\n"
            f"date: {self._date[1]}\r\n"
        )
        for name, value in reply.headers.items():
            head += f"{name}: {value}\r\n"
        assert head.count("\n") == 3 + len(reply.headers), "no header has a line break"
        return head.encode("latin-1")

    async def _send_whole(
        self, request: HttpRequest, reply: Response, connection: Accepted
    ) -> None:
        request.stop_watching()
        body = reply.body if request.method != "HEAD" else b""
        connection.begin(reply.status, self._head(request, reply), request, len(reply.body), body)
        if request.unread():
            await request.discard(_DISCARD_BYTES, _DISCARD_S)

    async def _send_stream(
        self, request: HttpRequest, reply: StreamingResponse, connection: Accepted
    ) -> None:
        try:
            if request.unread():
                await request.discard(_DISCARD_BYTES, _DISCARD_S)
            request.cancel_on_disconnect()
            connection.begin(reply.status, self._head(request, reply), request, None)
            async for chunk in reply.chunks:
                if request.method == "HEAD":
                    return
                if chunk:
                    connection.write(chunk)
                if connection.full:
                    await connection.drained(self._stall_timeout_s)
        except TimeoutError:
            log.warning("%s: the client read nothing for %g s", request.id, self._stall_timeout_s)
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

    def __init__(self, connections: Connections, listener: asyncio.Server) -> None:
        self._connections = connections
        self._listener = listener
        self.port: int = listener.sockets[0].getsockname()[1]
        """The port it listens on, also if the caller asked for port 0."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them.

        Returns once every handler has ended, or 5 s after the cut at the latest.
        """
        connections = self._connections
        self._listener.close()
        for connection in list(connections.open):
            connection.shutdown()
        if connections.tasks:
            await asyncio.wait(set(connections.tasks), timeout=drain_s)
        running = {task for task in connections.tasks if not task.done()}
        if not running:
            await self._flush()
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

    async def _flush(self) -> None:
        """Give the last replies a second to leave their socket buffers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                while self._connections.open:
                    self._connections.lost.clear()
                    await self._connections.lost.wait()


async def serve(
    app: App, host: str, port: int, setting: str = "port", *, shared: bool = False
) -> Server:
    """Listen on host:port (0: any free one) and serve `app` on the running loop.

    Raises ConfigError if it cannot listen there; `setting` is the name of the port's setting.
    shared: other processes listen there too, and each new connection goes to one of them.
    """
    connections = Connections(app.serve)
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(
            lambda: Accepted(connections), host, port, backlog=2048, reuse_port=shared or None
        )
    except OSError as error:
        raise bind_error(error, host, port, setting) from None
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


class Part:
    """A part of a process: what it serves over HTTP, what it counts, and how it starts and stops.

    The parts override what they have (Control, ExternalEngines, the links between fronts and
    Conductor); live.process puts them together.
    """

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

    async def stop(self) -> None:
        """Called when the server listens no more, also after a `prepare` or `start` that failed."""
