"""The HTTP server of every moonserve process: a bare ASGI callable under uvicorn's protocol.

`App` routes and replies, `serve` listens, `Server.stop` drains and cuts. Used by the gateway, the
workers and the store master. No signal handlers, no access log, no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import Any, TypeAlias

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from moonserve.core.errors import BadRequest, ConfigError, MoonserveError
from moonserve.core.units import Bytes
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
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

_NO_LIMITS: Mapping[str, Bytes] = {}
KEEP_ALIVE_S = 75
"""How long a connection may idle; longer than the client's pool keeps one."""
_MAX_HEAD_BYTES = 64 << 10
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0
_CLEANUP_S = 5.0
_FLUSH_S = 1.0
_NOTICE_S = 0.1


class NotFound(BadRequest):
    """No such path."""

    status = 404


class App:
    """Routes requests to handlers and sends what they return; the ASGI callable for `serve`.

    routes: (method, path) -> handler. prefixes: (method, path prefix) -> handler, the longest
    prefix wins. Both may be added to before `serve`. HEAD goes where GET does. body_limits: path
    prefix -> bytes that go before max_body_bytes, the longest prefix wins. A MoonserveError from a
    handler becomes its status in OpenAI's error shape, anything else a 500 that tells the client
    nothing.
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
        name: str = "moonserve",
    ) -> None:
        self.routes = dict(routes)
        self.prefixes = dict(prefixes or {})
        self.name = name
        limits = {**body_limits, "": max_body_bytes}
        self._body_limits = sorted(limits.items(), key=lambda item: len(item[0]), reverse=True)
        self._body_timeout_s = body_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._date = (0, b"")

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send
    ) -> None:
        """Serve one request; ends by itself when the client is gone."""
        limit = self._body_limit(scope["path"])
        request = HttpRequest(scope, receive, limit, self._body_timeout_s)
        try:
            reply = await self._answer(request)
            if isinstance(reply, StreamingResponse):
                await self._send_stream(request, reply, send)
            elif isinstance(reply, Switch):
                await request.discard(_DISCARD_BYTES, _DISCARD_S)
                scope["state"]["connection"].switch(reply)
                await request.disconnected()
            else:
                await self._send_whole(request, reply, send)
        except asyncio.CancelledError:
            # Cancelled by the watcher (client gone), a stalled client, or Server.stop.
            why = "client gone" if request.gone else "cut short"
            log.info("%s: %s %s (%s): %s", self.name, request.method, request.path, request.id, why)
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
                MoonserveError(f"internal error; request id {request.id} finds it in the log")
            )

    def _body_limit(self, path: str) -> Bytes:
        return next(limit for prefix, limit in self._body_limits if path.startswith(prefix))

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
            raise MethodNotAllowed(f"{path} takes {', '.join(allowed)}, not {method}", allowed)
        raise NotFound(f"no such path: {method} {path}")

    def _start(self, request: HttpRequest, reply: Response | StreamingResponse) -> dict[str, Any]:
        second = int(time.time())
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True).encode())
        headers = [
            (b"content-type", reply.content_type.encode()),
            (b"x-request-id", request.id.encode()),
            (b"date", self._date[1]),
        ]
        headers += [
            (name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()
        ]
        if isinstance(reply, Response):
            headers.append((b"content-length", b"%d" % len(reply.body)))
        return {"type": "http.response.start", "status": reply.status, "headers": headers}

    async def _send_whole(self, request: HttpRequest, reply: Response, send: Send) -> None:
        request.stop_watching()
        start = self._start(request, reply)
        body = {"type": "http.response.body", "body": reply.body, "more_body": False}
        if request.unread():
            start["headers"].append((b"connection", b"close"))
            await send(start)
            await send({**body, "more_body": True})
            await request.discard(_DISCARD_BYTES, _DISCARD_S)
            body["body"] = b""
        else:
            await send(start)
        await send(body)

    async def _send_stream(
        self, request: HttpRequest, reply: StreamingResponse, send: Send
    ) -> None:
        stall = _StallGuard(request, self._stall_timeout_s)
        try:
            if request.unread():
                await request.discard(_DISCARD_BYTES, _DISCARD_S)
            request.cancel_on_disconnect()
            await send(self._start(request, reply))
            async for chunk in reply.chunks:
                if request.method == "HEAD":
                    break
                if chunk:
                    stall.sending = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    stall.sending = False
                    stall.sent += 1
        except Exception:
            # The status line is out: all that is left is to end the connection unfinished.
            log.exception("%s: %s: stream broke off", self.name, request.id)
            return
        finally:
            stall.stop()
            request.stop_watching()
            close = getattr(reply.chunks, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _StallGuard:
    """Cancels the calling task when one send makes no progress for a whole period."""

    __slots__ = ("_period_s", "_request", "_seen", "_task", "_timer", "sending", "sent")

    def __init__(self, request: HttpRequest, period_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.sending = False
        self.sent = 0
        self._seen = -1
        self._request = request
        self._task = task
        self._period_s = period_s
        self._timer = task.get_loop().call_later(period_s, self._check)

    def _check(self) -> None:
        if self.sending and self.sent == self._seen:
            log.warning("%s: client read nothing for %g s", self._request.id, self._period_s)
            self._task.cancel()
            return
        self._seen = self.sent
        self._timer = self._task.get_loop().call_later(self._period_s, self._check)

    def stop(self) -> None:
        self._timer.cancel()


class _State(ServerState):
    """uvicorn's shared state, with an event set whenever a connection ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = asyncio.Event()


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, with bounds on request heads: size, and time until the first byte."""

    server_state: _State
    _head_bytes = 0
    _switched = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state["connection"] = self
        self._await_head()

    def switch(self, to: Switch) -> None:
        """Say so, and hand the connection over; its request lasts until the connection ends."""
        if not self.transport.is_closing():
            self._switched = True
            self.transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
                b"upgrade: %s\r\n\r\n" % to.name.encode()
            )
            to.protocol.take_over(self.transport, self.connection_lost)

    def shutdown(self) -> None:
        if self._switched:
            self.transport.close()
        else:
            super().shutdown()

    def on_headers_complete(self) -> None:
        """From here on the client waits for us, also while others' handlers run."""
        self.scope["state"]["arrived_s"] = self.loop.time()
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a handler may switch, and else answers as if it was not asked to."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.lost.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response("Request head too large.")
        elif self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._await_head()

    def _await_head(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


class Server:
    """A listening server; made by `serve`."""

    def __init__(self, state: _State, listener: asyncio.Server) -> None:
        self._state = state
        self._listener = listener
        self.port: int = listener.sockets[0].getsockname()[1]
        """The port it listens on, also where 0 was asked for."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them.

        Returns once every handler has ended, or 5 s after the cut at the latest.
        """
        self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=drain_s)
        running = set(self._state.tasks)
        if not running:
            await self._flush()
        for connection in list(self._state.connections):
            connection.transport.abort()
        if running:
            # Losing the connection cancels those that watch it; a second cancel would interrupt
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
                while self._state.connections:
                    self._state.lost.clear()
                    await self._state.lost.wait()


async def serve(app: App, host: str, port: int, setting: str = "port") -> Server:
    """Listen on host:port (0: any free one) and serve `app` on the running loop.

    Raises ConfigError where the address cannot be bound; `setting` is what the port's is called.
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    state = _State()
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(
            lambda: _Protocol(config, state, {}, loop), host, port, backlog=2048
        )
    except OSError as error:
        raise _bind_error(error, host, port, setting) from None
    return Server(state, listener)


def _bind_error(error: OSError, host: str, port: int, setting: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{host}:{port} is in use; stop its owner or choose another", setting)
    if error.errno == errno.EACCES:
        return ConfigError(f"{port} needs privileges; choose one above 1023", setting)
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", "host")
