"""What HTTP handlers receive and return: HttpRequest, Response, StreamingResponse, error replies.

For handlers anywhere in `live`; `server.App` makes the requests and sends the replies. Nothing here
opens a socket.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from moonserve.core.errors import BadRequest, BodyTooLarge, MoonserveError, NobodyAlive, Overloaded
from moonserve.core.units import Bytes
from moonserve.invalid import in_words, nearest

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

JSON = "application/json"
_NO_HEADERS: Mapping[str, str] = {}
_NO_CACHE: Mapping[str, str] = MappingProxyType({"cache-control": "no-cache"})
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""
_RESEMBLES = 0.8
_BOM = b"\xef\xbb\xbf"
_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count()
"""Together they are nobody else's, and cost less than a draw for each request."""
# An id is a path's last part in /api/decisions/<id>; clients resolve "." and ".." away.
_REQUEST_ID = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._:@-]{1,128}")
_UNREAD_BYTES: Bytes = 64 << 10
"""A body that nobody reads is taken in so far."""
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
    except msgspec.ValidationError as error:
        param, what = in_words(error, shape)
        raise BadRequest(f"{param or 'request body'}: {what}", param or None) from None
    except UNREADABLE as error:
        raise BadRequest(f"request body: {error}", None, "invalid_json") from None


def decode_open(data: bytes, shape: type[S]) -> S:
    """As decode_json, a struct that forbids unknown fields; but those are skipped, as others say
    more, unless they resemble one that it has: that is a slip."""
    try:
        return decode_json(data, shape)
    except BadRequest:
        given, known = decode_json(data, dict[str, msgspec.Raw]), shape.__struct_fields__
        more = [name for name in given if name not in known]
        if not more:
            raise
        for name in more:
            if difflib.get_close_matches(name, known, 1, _RESEMBLES):
                what = f"there is no such field; {nearest(name, known)}"
                raise BadRequest(f"{name}: {what}", name) from None
        less = {name: raw for name, raw in given.items() if name in known}
        return decode_json(msgspec.json.encode(less), shape)


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


class Source(Protocol):
    """The connection that a request came on, as its reader sees it."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read on."""

    def go_on(self) -> None:
        """Tell the client to send its body."""


class HttpRequest:
    """One request as a handler sees it. `headers` has lower-case names; repeated ones are
    one with commas between (RFC 9110, 5.3).

    `id` is the client's x-request-id where that is sane (1 to 128 letters, digits and ._:@-), else
    made here; the server puts it on the reply. A handler may replace it. The connection calls
    `feed`, `complete` and `lost`.
    """

    __slots__ = (
        "_chunks",
        "_complete",
        "_paused",
        "_size",
        "_source",
        "_waiter",
        "_watched",
        "arrived_s",
        "body_timeout_s",
        "gone",
        "headers",
        "http_1_0",
        "id",
        "keep_alive",
        "max_body_bytes",
        "method",
        "path",
        "query_string",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: str,
        path: str,
        query_string: bytes,
        headers: dict[str, str],
        source: Source,
    ) -> None:
        self.method = method
        self.target = target
        """Path and query as they came."""
        self.path = path
        """Percent-decoded."""
        self.query_string = query_string
        self.headers = headers
        self.id = _request_id(headers.get("x-request-id"))
        self.arrived_s = 0.0
        """When its headers were here, by the loop's clock: from here on the client waits for us,
        also while others' handlers run."""
        self.gone = False
        """Whether the client was seen to leave."""
        self.http_1_0 = False
        self.keep_alive = True
        """Whether the client wants the connection kept."""
        self.max_body_bytes: Bytes = 0
        self.body_timeout_s = 0.0
        """Limits on the body; the server's."""
        self._source = source
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._watched: asyncio.Task[Any] | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query string's fields; a repeated one's last wins."""
        return dict(parse_qsl(self.query_string.decode("latin-1"), keep_blank_values=True))

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge (at once where content-length says so), BodyTooSlow.

        A client that leaves half way ends the handler as `cancel_on_disconnect` does.
        """
        limit = self.max_body_bytes
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLarge(f"body of {declared} bytes is over the limit of {limit} bytes")
        if not self._complete:
            if self.headers.get("expect", "").lower() == "100-continue" and not self._chunks:
                self._source.go_on()
            try:
                async with asyncio.timeout(self.body_timeout_s):
                    while not self._complete and self._size <= limit:
                        await self._more()
            except TimeoutError:
                raise BodyTooSlow(f"body did not arrive within {self.body_timeout_s:g} s") from None
        if self._size > limit:
            self._chunks.clear()
            raise BodyTooLarge(f"body is over the limit of {limit} bytes")
        if self.gone:
            raise asyncio.CancelledError
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    async def disconnected(self) -> None:
        """Return when the client is gone. One waiter per request; the body must have been read."""
        assert not self.unread(), "read the body first: who sends one is not seen to leave"
        while not self.gone:
            await self._more()

    def cancel_on_disconnect(self) -> None:
        """From now on the calling handler's task is cancelled when the client goes away.

        For handlers that wait on engines; the body must have been read. Streaming replies do it
        by themselves once they are sent.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._watched is None:
            self._watched = task
            if self.gone:
                task.cancel()

    def stop_watching(self) -> None:
        """End `cancel_on_disconnect`; called by the server before the reply's last byte."""
        self._watched = None

    def unread(self) -> bool:
        """Whether some of the body may still be on its way."""
        return not self._complete

    async def discard(self, limit: Bytes, timeout_s: float) -> None:
        """Read and drop up to `limit` body bytes, for at most `timeout_s`.

        A client that is still sending when its connection closes would lose the reply.
        """
        end = self._size + limit
        try:
            async with asyncio.timeout(timeout_s):
                while not self._complete and self._size < end:
                    self._chunks.clear()
                    await self._more()
        except TimeoutError:
            pass

    async def _more(self) -> None:
        """Wait until something has happened: a piece of the body, its end, the client's."""
        if self._paused:
            self._paused = False
            self._source.resume()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def feed(self, data: bytes) -> None:
        """A piece of the body is here."""
        self._chunks.append(data)
        self._size += len(data)
        if self._waiter is not None:
            self._wake()
        elif self._size > _UNREAD_BYTES and not self._paused:
            self._paused = True
            self._source.pause()

    def complete(self) -> None:
        """The body is whole; what comes behind it may be read."""
        self._complete = True
        if self._paused:
            self._paused = False
            self._source.resume()
        self._wake()

    def lost(self) -> None:
        """The client has left."""
        self.gone = self._complete = True
        self._wake()
        if self._watched is not None:
            self._watched.cancel()


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{_PROCESS}{next(_NUMBERS):08x}"
