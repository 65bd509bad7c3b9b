"""What HTTP handlers receive and return: HttpRequest, Response, StreamingResponse, error replies.

For handlers anywhere in `live`; `server.App` makes the requests and sends the replies. Nothing here
opens a socket.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from moonserve.core.errors import BadRequest, BodyTooLarge, MoonserveError, NobodyAlive, Overloaded

T = TypeVar("T")

JSON = "application/json"
_NO_HEADERS: Mapping[str, str] = {}
_NO_CACHE: Mapping[str, str] = MappingProxyType({"cache-control": "no-cache"})
_MISSING = re.compile("missing required field `([^`]*)`")
_BOM = b"\xef\xbb\xbf"
# An id is a path's last part in /api/decisions/<id>; clients resolve "." and ".." away.
_REQUEST_ID = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._:@-]{1,128}")
_NOBODY_RETRY_S = "2"
"""A worker that restarts, or another gateway, may be there by then."""


class Response(msgspec.Struct):
    """A whole reply; content-length is added when it is sent."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = _NO_HEADERS
    content_type: str = JSON


class StreamingResponse(msgspec.Struct):
    """A reply sent chunk by chunk as `chunks` yields.

    The server closes `chunks` (aclose) on every path, also while it waits for its next chunk when
    the client disconnects: there the await inside it sees CancelledError.
    """

    chunks: AsyncIterator[bytes]
    status: int = 200
    headers: Mapping[str, str] = _NO_CACHE
    content_type: str = "text/event-stream; charset=utf-8"


class BodyTooSlow(BadRequest):
    """The request body did not arrive within the server's limit."""

    status = 408


class MethodNotAllowed(BadRequest):
    """The path exists, but takes only the methods `allowed`."""

    status = 405

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class ErrorBody(msgspec.Struct):
    """The inside of OpenAI's error shape."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """OpenAI's error shape."""

    error: ErrorBody


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    """A JSON reply of anything msgspec can encode."""
    return Response(status, msgspec.json.encode(value), headers)


def decode_json(data: bytes | msgspec.Raw, shape: type[T]) -> T:
    """JSON as `shape`. BadRequest where it is not: `param` is the path of the field at fault.

    A byte order mark before it is skipped, as RFC 8259 allows.
    """
    if isinstance(data, bytes):
        data = data.removeprefix(_BOM)
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".")
        if (missing := _MISSING.search(what)) is not None:
            param = f"{param}.{missing[1]}".lstrip(".")
        code = None if isinstance(error, msgspec.ValidationError) else "invalid_json"
        raise BadRequest(f"{param or 'request body'}: {what}", param or None, code) from None


def error_reply(error: MoonserveError) -> ErrorReply:
    """An operating error in OpenAI's shape; the reply a client sees says nothing else."""
    param = code = None
    if isinstance(error, BadRequest):
        param, code = error.param, error.code
    elif isinstance(error, Overloaded):
        code = error.reason
    return ErrorReply(ErrorBody(str(error), error.kind, param, code))


def error_response(error: MoonserveError) -> Response:
    """The reply to a failed request: the error's own status, body in OpenAI's shape."""
    headers = {}
    if isinstance(error, Overloaded):
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["x-moonserve-reject-reason"] = error.reason
    elif isinstance(error, NobodyAlive):
        headers["retry-after"] = _NOBODY_RETRY_S
    elif isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    return json_response(error_reply(error), error.status, headers)


class HttpRequest:
    """One request as a handler sees it. `headers` has lower-case names; repeated ones are
    one with commas between (RFC 9110, 5.3).

    `id` is the client's x-request-id where that is sane (1 to 128 letters, digits and ._:@-), else
    made here; the server puts it on the reply. A handler may replace it.
    """

    __slots__ = (
        "_body",
        "_body_timeout_s",
        "_complete",
        "_max_body_bytes",
        "_receive",
        "_watcher",
        "arrived_s",
        "gone",
        "headers",
        "id",
        "method",
        "path",
        "query_string",
    )

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query_string: bytes = scope["query_string"]
        self.headers: dict[str, str] = {}
        for raw_name, raw in scope["headers"]:
            name, value = raw_name.decode("latin-1"), raw.decode("latin-1")
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        self.id = _request_id(self.headers.get("x-request-id"))
        self.arrived_s: float = scope["state"]["arrived_s"]
        """When its headers were here, by the loop's clock."""
        self.gone = False
        """Whether the client was seen to leave."""
        self._receive = receive
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._body = bytearray()
        self._complete = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query string's fields; a repeated one's last wins."""
        return dict(parse_qsl(self.query_string.decode("latin-1"), keep_blank_values=True))

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge (at once where content-length says so), BodyTooSlow.

        A client that leaves half way ends the handler as `cancel_on_disconnect` does.
        """
        limit = self._max_body_bytes
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLarge(f"body of {declared} bytes is over the limit of {limit} bytes")
        if not self._complete:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    await self._read_body(limit)
            except TimeoutError:
                raise BodyTooSlow(
                    f"body did not arrive within {self._body_timeout_s:g} s"
                ) from None
        return bytes(self._body)

    async def _read_body(self, limit: int) -> None:
        while not self._complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = self._complete = True
                raise asyncio.CancelledError
            self._body += message["body"]
            self._complete = not message["more_body"]
            if len(self._body) > limit:
                self._body.clear()
                raise BodyTooLarge(f"body is over the limit of {limit} bytes")

    async def disconnected(self) -> None:
        """Return when the client is gone. One waiter per request; the body must have been read."""
        assert not self.unread(), "read the body first: both come over the same channel"
        while not self.gone:
            self.gone = (await self._receive())["type"] == "http.disconnect"

    def cancel_on_disconnect(self) -> None:
        """From now on the calling handler's task is cancelled when the client goes away.

        For handlers that wait on engines; the body must have been read. Streaming replies do it
        by themselves once they are sent.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(task))

    async def _watch(self, handler: asyncio.Task[Any]) -> None:
        await self.disconnected()
        handler.cancel()

    def stop_watching(self) -> None:
        """End `cancel_on_disconnect`; called by the server before the reply's last byte."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def unread(self) -> bool:
        """Whether some of the body may still be on its way."""
        headers = self.headers
        sent = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        return sent and not self._complete

    async def discard(self, limit: int, timeout_s: float) -> None:
        """Read and drop up to `limit` body bytes, for at most `timeout_s`.

        A client that is still sending when its connection closes would lose the reply.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._complete and limit > 0:
                    message = await self._receive()
                    limit -= len(message.get("body", b""))
                    self._complete = not message.get("more_body", False)
        except TimeoutError:
            pass


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"
