"""What HTTP handlers receive and return: HttpRequest, Response, StreamingResponse, error replies.

Handlers anywhere in `live` use it; the server makes the requests and sends the replies. Nothing
here opens a socket.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import (
    UNREADABLE,
    BadRequest,
    BodyTooLarge,
    MoonserveError,
    NobodyAlive,
    Overloaded,
    Unauthorized,
)
from moonserve.core.units import Bytes
from moonserve.invalid import in_words, integers, nearest

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

JSON = "application/json"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
_NO_HEADERS: Mapping[str, str] = {}
_NO_CACHE: Mapping[str, str] = MappingProxyType({"cache-control": "no-cache"})
_RESEMBLES = 0.8
_BOM = b"\xef\xbb\xbf"
_GOT_FLOAT = "got `float`"
_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count()
"""A random name of this process and a counter: together unique, and cheaper than a random id."""
# An id is a path's last part in /api/decisions/<id>; clients resolve "." and ".." away.
_REQUEST_ID = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._:@-]{1,128}")
_UNREAD_BYTES: Bytes = 64 << 10
"""The most bytes of a body that are received before a handler reads it."""
_SOON_S = 0.1
_LEAST_BYTES_PER_S = 4_096
"""The least rate of a body, so that bodies that never come hold their places for seconds only."""
_NOBODY_RETRY_S = "2"
"""A restarting worker, or another gateway, may be there by then."""


class Response(msgspec.Struct):
    """A whole reply. The server adds content-length when it sends it."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = _NO_HEADERS
    content_type: str = JSON


Write: TypeAlias = Callable[[bytes], bool]
"""Writes a piece of a reply's body. False: write no more for now, the client reads too slowly."""


class Poured(ABC):
    """A body whose pieces are written as they come, without a switch of tasks for each."""

    @abstractmethod
    async def pour(self, write: Write) -> bool:
        """Write the pieces. True: all are written; False: `write` has returned False.

        After False the server calls it again, once the client has read.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """The server needs no more of it; called on every path."""


class StreamingResponse(msgspec.Struct):
    """A reply that the server sends piece by piece, as `chunks` yields or writes them.

    The server closes `chunks` (aclose) in every case. If the client disconnects while the server
    waits for the next piece, the await inside `chunks` raises CancelledError.
    """

    chunks: AsyncIterator[bytes] | Poured
    status: int = 200
    headers: Mapping[str, str] = _NO_CACHE
    content_type: str = "text/event-stream; charset=utf-8"


class BodyTooSlow(BadRequest):
    """The request body did not arrive within the server's limit."""

    status = 408


class UnsupportedCoding(BadRequest):
    """The request body is compressed. The server decompresses nothing."""

    status = 415


class MethodNotAllowed(BadRequest):
    """The path exists, but accepts only the methods in `allowed`."""

    status = 405

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class ErrorBody(msgspec.Struct):
    """The content of OpenAI's error shape."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None
    """An int in answers of engines."""


class ErrorReply(msgspec.Struct):
    """OpenAI's error shape; with a type it is Anthropic's too."""

    error: ErrorBody
    type: str | UnsetType = UNSET


_MESSAGES_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> the type of an error as Anthropic names it."""


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    """Return a JSON reply with any value that msgspec can encode."""
    return Response(status, msgspec.json.encode(value), headers)


def decode_json(data: bytes | msgspec.Raw, shape: type[T]) -> T:
    """Decode JSON as `shape`. Raises BadRequest; its `param` is the path of the wrong field.

    A byte order mark at the start is skipped, as RFC 8259 allows. An integer may be written as 4.0,
    since JSON has one kind of number and some clients write all numbers so.
    """
    if isinstance(data, bytes):
        data = data.removeprefix(_BOM)
    try:
        try:
            return msgspec.json.decode(data, type=shape)
        except msgspec.ValidationError as error:
            if _GOT_FLOAT not in str(error):
                raise
            whole = integers(shape).sub(rb"\1\2", bytes(data))
            return msgspec.json.decode(whole, type=shape)
    except msgspec.ValidationError as error:
        param, what = in_words(error, shape)
        raise BadRequest(f"{param or 'request body'}: {what}", param or None) from None
    except UNREADABLE as error:
        what = str(error) if bytes(data).strip() else "is empty; send JSON"
        raise BadRequest(f"request body: {what}", None, "invalid_json") from None


def decode_query(query: Mapping[str, str], shape: type[S]) -> S:
    """The fields of a query string as a struct that forbids others. Raises BadRequest."""
    try:
        return msgspec.convert(query, shape, strict=False)
    except msgspec.ValidationError as error:
        param, what = in_words(error, shape)
        raise BadRequest(f"{param or 'query'}: {what}", param or None) from None


def decode_open(data: bytes, shape: type[S]) -> S:
    """Decode JSON as a struct that forbids unknown fields, but skip unknown fields.

    Other senders may send more fields. Raises BadRequest, as decode_json does, and for an unknown
    field whose name resembles a known one: that is a typing error.
    """
    try:
        return decode_json(data, shape)
    except BadRequest:
        given = decode_json(data, dict[str, msgspec.Raw])
        known = shape.__struct_fields__
        more = [name for name in given if name not in known]
        if not more:
            raise
        for name in more:
            if difflib.get_close_matches(name, known, 1, _RESEMBLES):
                what = f"there is no such field; {nearest(name, known)}"
                raise BadRequest(f"{name}: {what}", name) from None
        less = {name: raw for name, raw in given.items() if name in known}
        return decode_json(msgspec.json.encode(less), shape)


def shaped(path: str, status: int, body: ErrorBody) -> ErrorReply:
    """Return an error as clients of this path expect it: OpenAI's shape, or Anthropic's.

    Anthropic's clients call paths below MESSAGES, also ones that are not served here.
    """
    if not f"{path}/".startswith(f"{MESSAGES}/"):
        return ErrorReply(body)
    kind = _MESSAGES_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return ErrorReply(msgspec.structs.replace(body, type=kind), "error")


def error_reply(error: MoonserveError, path: str = "") -> ErrorReply:
    """Return an operating error in the shape of its path; a client receives nothing else."""
    param = code = None
    if isinstance(error, BadRequest):
        param = error.param
        code = error.code
    elif isinstance(error, Overloaded):
        code = error.reason
    return shaped(path, error.status, ErrorBody(str(error), error.kind, param, code))


def error_response(error: MoonserveError, path: str = "") -> Response:
    """Return the reply to a failed request: the error's status, and a body in the path's shape."""
    headers = {}
    if isinstance(error, Overloaded):
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["x-moonserve-reject-reason"] = error.reason
    elif isinstance(error, NobodyAlive):
        headers["retry-after"] = _NOBODY_RETRY_S
    elif isinstance(error, UnsupportedCoding):
        headers["accept-encoding"] = "identity"
    elif isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_reply(error, path), error.status, headers)


class BodySource(Protocol):
    """The connection of a request, as HttpRequest uses it."""

    def pause(self) -> None:
        """Stop reading for now."""

    def resume(self) -> None:
        """Continue to read."""

    def go_on(self) -> None:
        """Tell the client to send its body."""


class HttpRequest:
    """One request as a handler sees it.

    `headers` has lower-case names; repeated headers are joined by commas (RFC 9110, 5.3). `id` is
    the client's x-request-id if that is valid (1 to 128 letters, digits and ._:@-), otherwise a new
    one; a handler may replace it, and the server sends it with the reply. The connection calls
    `feed`, `complete`, `spoil` and `lost`.
    """

    def __init__(
        self,
        method: str,
        target: str,
        path: str,
        query_string: bytes,
        headers: dict[str, str],
        source: BodySource,
    ) -> None:
        self.method = method
        self.target = target
        """Path and query as the client sent them."""
        self.path = path
        """Percent-decoded."""
        self.query_string = query_string
        self.headers = headers
        self.address = ""
        """The IP address of the connection's other end, as text; empty for a unix socket."""
        self.id = request_id(headers.get("x-request-id"))
        self.arrived_s = 0.0
        """The loop's time when the headers were complete. From then on the client waits for the
        server, also while other handlers run."""
        self.gone = False
        """Whether the client has disconnected."""
        self.http_1_0 = False
        self.keep_alive = True
        """Whether the client wants to keep the connection."""
        self.max_body_bytes: Bytes = 0
        self.body_timeout_s = 0.0
        self.body_grace_s = 0.0
        """Limits on the body; the server sets them."""
        self.reserved = False
        """Whether its connection has a place of the reserve, which serves no clients."""
        self._source = source
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._taken = False
        """Whether a handler has read the body."""
        self._wrong = ""
        """Why the body cannot be read; empty: it can."""
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._watched: asyncio.Task[Any] | None = None

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query string; of a repeated field, the last value."""
        return dict(parse_qsl(self.query_string.decode("latin-1"), keep_blank_values=True))

    async def body(self) -> bytes:
        """Return the whole body, once: afterwards only the caller holds it.

        Raises BodyTooLarge, at once if content-length is too large, UnsupportedCoding, BodyTooSlow,
        and BadRequest if its chunks are not HTTP. If the client disconnects before the end, the
        handler is cancelled, as by `cancel_on_disconnect`.
        """
        assert not self._taken, "a handler reads the body once"
        self._taken = True
        limit = self.max_body_bytes
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLarge(f"body of {declared} bytes is over the limit of {limit} bytes")
        coding = self.headers.get("content-encoding", "identity")
        if coding.lower() != "identity" and (self._size or not self._complete):
            raise UnsupportedCoding(
                f"content-encoding: the body is compressed with {coding[:20]!r}; send it as it is,"
                " without this header",
                "content-encoding",
            )
        if not self._complete:
            if self.headers.get("expect", "").lower() == "100-continue" and not self._chunks:
                self._source.go_on()
            await self._arrived(limit)
        if self._size > limit:
            self._chunks.clear()
            raise BodyTooLarge(f"body is over the limit of {limit} bytes")
        if self.gone:
            raise asyncio.CancelledError
        self.check()
        chunks = self._chunks
        self._chunks = []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def soon(self) -> None:
        """Return when the body is whole or large, at the latest after a moment.

        Many clients send a small body just after its head. For them this is no wait for a client.
        """
        if self._complete or "expect" in self.headers:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_SOON_S):
                while not self._complete and self._size < _UNREAD_BYTES:
                    await self._more()

    async def _arrived(self, limit: Bytes) -> None:
        """Return when the body is whole, or larger than `limit`. Raises BodyTooSlow."""
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as allowed:
                while not self._complete and self._size <= limit:
                    due_s = self.body_grace_s + self._size / _LEAST_BYTES_PER_S
                    allowed.reschedule(begun_s + min(due_s, self.body_timeout_s))
                    await self._more()
        except TimeoutError:
            raise BodyTooSlow(
                f"the body arrives too slowly: after {self.body_grace_s:g} s it must come with"
                f" {_LEAST_BYTES_PER_S} bytes a second, and all of it within"
                f" {self.body_timeout_s:g} s"
            ) from None

    def check(self) -> None:
        """Raise BadRequest if what has come of the body is not HTTP."""
        if self._wrong:
            raise BadRequest(f"the request body is not valid HTTP: {self._wrong}")

    async def disconnected(self) -> None:
        """Return when the client has disconnected. One waiter per request.

        The handler must have read the body.
        """
        assert not self.unread(), "read the body first: before its end no disconnect is seen"
        while not self.gone:
            await self._more()

    def cancel_on_disconnect(self) -> None:
        """From now on cancel the calling handler's task when the client disconnects.

        Handlers that wait for engines call it, after they have read the body. A streaming reply is
        cancelled without this call.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._watched is None:
            self._watched = task
            if self.gone:
                task.cancel()

    def stop_watching(self) -> None:
        """End `cancel_on_disconnect`. The server calls it before the reply's last byte."""
        self._watched = None

    def unread(self) -> bool:
        """Whether a part of the body may still arrive."""
        return not self._complete

    async def discard(
        self, limit: Bytes, timeout_s: float, pace: Callable[[Bytes], Awaitable[None]]
    ) -> None:
        """Read and drop up to `limit` body bytes, for at most `timeout_s`.

        If the connection closed while the client is still sending, the client would lose the reply.
        pace: awaited after each piece, with its size, while nothing is read.
        """
        seen = self._size
        end = seen + limit
        try:
            async with asyncio.timeout(timeout_s):
                while not self._complete and self._size < end:
                    self._chunks.clear()
                    await self._more()
                    await pace(self._size - seen)
                    seen = self._size
        except TimeoutError:
            pass

    async def _more(self) -> None:
        """Wait for the next piece of the body, its end, or the client's disconnect."""
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
        """A piece of the body has arrived."""
        self._chunks.append(data)
        self._size += len(data)
        if self._waiter is not None:
            self._wake()
        elif self._size > _UNREAD_BYTES and not self._paused:
            self._paused = True
            self._source.pause()

    def complete(self) -> None:
        """The body is complete; the connection may read what comes after it."""
        self._complete = True
        if self._paused:
            self._paused = False
            self._source.resume()
        self._wake()

    def spoil(self, why: str) -> None:
        """The rest of the body cannot be read, nor what comes after it."""
        self._wrong = why
        self._chunks.clear()
        self.keep_alive = False
        self.complete()

    def lost(self) -> None:
        """The client has disconnected; what came of its body is dropped."""
        self.gone = self._complete = True
        self._chunks.clear()
        self._wake()
        if self._watched is not None:
            self._watched.cancel()


def request_id(given: str | None) -> str:
    """The id that a client has given its request, if it is valid; else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{_PROCESS}{next(_NUMBERS):08x}"
