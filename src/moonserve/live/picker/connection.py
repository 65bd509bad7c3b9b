"""GrpcConnection: one HTTP/2 connection of a proxy or a kubelet, with gRPC calls as its streams.

`server` makes one for each connection that it accepts, and has the handlers of calls. The package
h2 keeps the rules of HTTP/2: frames, header compression, windows, the states of streams. Here are
gRPC's framing, and one task for each call. All that is written in one turn of the event loop goes
out at once: each packet wakes the proxy.

What never happens here: a call that waits for another one; more kept of a call than one message and
a window; a wait for a peer that reads nothing, or is silent, without an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeAlias, cast
from urllib.parse import quote

import msgspec
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from moonserve.core.units import Bytes

log = logging.getLogger(__name__)

OK, INVALID, NOT_FOUND, EXHAUSTED, UNIMPLEMENTED = 0, 3, 5, 8, 12
INTERNAL, UNAVAILABLE = 13, 14
"""Statuses of gRPC."""
_PREFIX: Bytes = 5
"""Of a message: one byte that says whether it is compressed, and its length in four."""
_WINDOW: Bytes = 1 << 20
"""What a peer may send on one stream before it is read."""
_CONNECTION_WINDOW: Bytes = 16 << 20
"""The same, of all streams together."""
_FRAME: Bytes = 1 << 18
_SILENT_S = 30.0
"""A peer that is silent for so long is asked for a sign of life."""
_ANSWER_S = 10.0
"""How long that may take."""
_STALLED_S = 60.0
"""The longest time for which a peer may read nothing of a call."""
_HEAD = [(":status", "200"), ("content-type", "application/grpc")]


class CallRefused(Exception):
    """A call ends with a status of gRPC, and with words for it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class CallBounds(msgspec.Struct, frozen=True):
    """Bounds of a server's connections."""

    message: Bytes
    """The longest message."""
    streams: int
    """Calls of one connection at once."""
    calls: int
    """Calls of all connections at once."""


class GrpcCall:
    """One call: whole messages in, messages out. Its handler gets it."""

    def __init__(self, connection: GrpcConnection, stream: int) -> None:
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.pending = bytearray()
        """What the peer's window has no room for yet."""
        self.begun = False
        """Whether the reply's head has been sent."""
        self.ended = False
        """Whether the peer sends no more."""
        self.unseen: Bytes = 0
        """Bytes for which the stream's window was not opened again."""
        self._connection = connection
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        """Of the handler: for a message, or for room."""

    async def read(self) -> bytes | None:
        """The next message; None: there are no more. Only one task may wait."""
        while not self._messages:
            if self.ended:
                return None
            await self._wait()
        message = self._messages.popleft()
        self._connection.widen(self)
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the peer has room for it. Raises TimeoutError: it has read
        nothing for a minute."""
        self._connection.send(self, b"\0%b%b" % (len(message).to_bytes(4), message))
        if not self.has_room():
            async with asyncio.timeout(_STALLED_S):
                while not self.has_room():
                    await self._wait()

    def has_room(self) -> bool:
        """Whether all that was written could be sent."""
        return not self.pending and not self._connection.is_paused

    def reads(self) -> bool:
        """Whether the handler has read all whole messages."""
        return not self._messages

    def take(self, data: bytes, most: Bytes) -> None:
        """Bytes have come. Raises CallRefused: their message is not accepted."""
        if self._partial:
            self._partial += data
            data = bytes(self._partial) if len(self._partial) >= self._wanted() else b""
            if not data:
                self._check(self._partial, most)
                return
            self._partial.clear()
        at = 0
        while len(data) - at >= _PREFIX:
            self._check(data[at : at + _PREFIX], most)
            end = at + _PREFIX + int.from_bytes(data[at + 1 : at + _PREFIX])
            if end > len(data):
                break
            self._messages.append(data[at + _PREFIX : end])
            at = end
        self._partial += data[at:]
        if self._messages:
            self.wake()

    def _wanted(self) -> int:
        """How many bytes the present message has, its prefix included, as far as is known."""
        if len(self._partial) < _PREFIX:
            return _PREFIX
        return _PREFIX + int.from_bytes(self._partial[1:_PREFIX])

    def _check(self, prefix: bytes | bytearray, most: Bytes) -> None:
        if prefix[0]:
            raise CallRefused(UNIMPLEMENTED, "compressed messages are not read here")
        if len(prefix) >= _PREFIX and (size := int.from_bytes(prefix[1:_PREFIX])) > most:
            raise CallRefused(EXHAUSTED, f"a message of {size} bytes is over the limit of {most}")

    def wake(self) -> None:
        """Something has changed for the handler."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None


Handler: TypeAlias = Callable[[GrpcCall], Awaitable[None]]
"""Serves one call. It is cancelled when the peer ends the call, or has gone."""


class CallServing:
    """What the connections of one server share."""

    def __init__(self, handlers: Mapping[bytes, Handler], limits: CallBounds) -> None:
        """handlers: by the path of a call."""
        self.handlers = handlers
        self.limits = limits
        self.open: set[GrpcConnection] = set()
        self.calls: set[asyncio.Task[None]] = set()


class _Http2(H2Connection):
    """h2, which would end a connection for one stream too many.

    A proxy may open streams before it has read how many are wanted. So none is too many here:
    CallBounds says how many are served.
    """

    @property
    def open_inbound_streams(self) -> int:
        """What h2 compares with the limit; asking also lets it forget streams that are over."""
        return min(0, super().open_inbound_streams)


class GrpcConnection(asyncio.Protocol):
    """See the module."""

    def __init__(self, shared: CallServing) -> None:
        self.is_paused = False
        """Whether the peer reads more slowly than this side writes."""
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, GrpcCall] = {}
        self._h2 = _Http2(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._unseen: Bytes = 0
        """Bytes for which the connection's window was not opened again."""
        self._stalled: dict[int, GrpcCall] = {}
        """Calls with bytes for which the peer's windows have no room."""
        self._flushing = False
        """Whether `_flush` is about to be called."""
        self._leaves = False
        """Whether new calls are refused."""
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The peer has connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's classes are not asyncio's
        self._shared.open.add(self)
        self._h2.initiate_connection()
        self._h2.update_settings(
            {
                SettingCodes.MAX_CONCURRENT_STREAMS: self._shared.limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_FRAME_SIZE: _FRAME,
            }
        )
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW)
        self._timer = self._loop.call_later(_SILENT_S, self._look)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._heard_s = self._loop.time()
        try:
            events = self._h2.receive_data(data)
        except ProtocolError as error:
            log.warning("a connection to the picker ends, since its HTTP/2 is wrong: %s", error)
            self._flush()
            self.close()
            return
        if any(isinstance(it, ConnectionTerminated) for it in events):
            self.close()  # h2 sends nothing more
            return
        reset = {it.stream_id for it in events if isinstance(it, StreamReset)}
        for event in events:
            self._happened(event, reset)
        self._flush()

    def pause_writing(self) -> None:
        """The peer reads too slowly."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self.is_paused = False
        for call in self._calls.values():
            call.wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The peer has gone."""
        self._shared.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._forget_all()

    # What calls and the server use.

    def send(self, call: GrpcCall, data: bytes) -> None:
        """Send bytes of a call, as far as the peer's windows have room."""
        if self._calls.get(call.stream) is not call:
            return  # the peer has ended it; its task is being cancelled
        if not call.begun:
            call.begun = True
            self._h2.send_headers(call.stream, _HEAD)
        call.pending += data
        self._pump(call)
        self._flush_soon()

    def widen(self, call: GrpcCall) -> None:
        """Let the peer send more of a call, if the handler has read what it has sent."""
        if call.unseen < _WINDOW // 2 or call.ended or not call.reads():
            return
        if self._calls.get(call.stream) is call:
            self._h2.increment_flow_control_window(call.unseen, call.stream)
            call.unseen = 0
            self._flush_soon()

    def leave(self) -> None:
        """Refuse further calls, and say so; those that are under way go on."""
        self._leaves = True
        last = self._h2.highest_inbound_stream_id
        if self._transport is not None and not self._transport.is_closing():
            # h2 could send it too, but would end the connection for calls that are under way.
            self._transport.write(GoAwayFrame(last_stream_id=last).serialize())

    def finish(self) -> None:
        """End all calls, and close it. A call that was answered ends well: a proxy would break its
        client's stream off otherwise."""
        for call in list(self._calls.values()):
            if call.begun:
                self._end(call, OK, "")
            else:
                self._end(call, UNAVAILABLE, "this picker ends")
        self._flush()
        self.close()

    def close(self) -> None:
        """Close it, and with it all calls."""
        self._forget_all()
        if self._transport is not None:
            self._transport.close()

    # One turn.

    def _happened(self, event: Event, reset: Collection[int]) -> None:
        """reset: the streams that are over by now, also for events before that."""
        match event:
            case DataReceived():
                self._received(event, reset)
            case RequestReceived() if event.stream_id not in reset:
                self._begin(event)
            case StreamEnded():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.ended = True
                    call.wake()
            case StreamReset():
                if (call := self._calls.get(event.stream_id)) is not None:
                    self._forget(call)
            case WindowUpdated() | RemoteSettingsChanged():
                for call in list(self._stalled.values()):
                    if call.stream not in reset:
                        self._pump(call)

    def _begin(self, event: RequestReceived) -> None:
        stream = event.stream_id
        if self._leaves:
            self._h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            return
        path = dict(event.headers).get(b":path", b"")
        handler = self._shared.handlers.get(path)
        call = self._calls[stream] = GrpcCall(self, stream)
        if handler is None:
            self._end(
                call, UNIMPLEMENTED, f"there is no method {path[:200].decode('latin-1')} here"
            )
        elif len(self._shared.calls) >= self._shared.limits.calls:
            self._end(call, EXHAUSTED, "too many calls are under way")
        else:
            task = call.task = self._loop.create_task(self._serve(call, handler))
            self._shared.calls.add(task)
            task.add_done_callback(self._shared.calls.discard)

    def _received(self, event: DataReceived, reset: Collection[int]) -> None:
        size = event.flow_controlled_length
        self._unseen += size
        if self._unseen >= _CONNECTION_WINDOW // 2:
            self._h2.increment_flow_control_window(self._unseen)
            self._unseen = 0
        call = self._calls.get(event.stream_id)
        if call is None or event.stream_id in reset:
            return
        call.unseen += size
        try:
            call.take(event.data, self._shared.limits.message)
        except CallRefused as refused:
            self._end(call, refused.status, str(refused))
            return
        self.widen(call)

    async def _serve(self, call: GrpcCall, handler: Handler) -> None:
        try:
            await handler(call)
        except CallRefused as refused:
            self._end(call, refused.status, str(refused))
        except TimeoutError:
            self._end(call, EXHAUSTED, f"nothing was read for {_STALLED_S:g} s")
        except Exception:
            log.exception("a bug in serving a call to the picker")
            self._end(call, INTERNAL, "internal error; the log says more")
        else:
            self._end(call, OK, "")

    def _end(self, call: GrpcCall, status: int, why: str) -> None:
        """End a call with a status of gRPC, unless its peer has ended it."""
        if self._calls.get(call.stream) is not call:
            return
        trailers = [("grpc-status", str(status))]
        if why:
            trailers.append(("grpc-message", quote(why, safe=" ,;:/()'=-")))
        head = [] if call.begun else _HEAD
        if call.pending:  # the peer has not read all, so it learns nothing from the end
            self._h2.reset_stream(call.stream, ErrorCodes.CANCEL)
        else:
            self._h2.send_headers(call.stream, [*head, *trailers], end_stream=True)
            with contextlib.suppress(StreamClosedError):  # the peer has sent all
                self._h2.reset_stream(call.stream, ErrorCodes.NO_ERROR)
        self._forget(call)
        self._flush_soon()

    def _forget(self, call: GrpcCall) -> None:
        """A call has ended, and so does its handler."""
        del self._calls[call.stream]
        self._stalled.pop(call.stream, None)
        if call.task is not None and call.task is not asyncio.current_task():
            call.task.cancel()

    def _forget_all(self) -> None:
        for call in list(self._calls.values()):
            self._forget(call)

    def _pump(self, call: GrpcCall) -> None:
        """Send what a call has written, as far as the peer's windows have room."""
        pending = call.pending
        while pending:
            room = self._h2.local_flow_control_window(call.stream)
            size = min(room, len(pending), self._h2.max_outbound_frame_size)
            if size <= 0:
                self._stalled[call.stream] = call
                return
            self._h2.send_data(call.stream, bytes(pending[:size]))
            del pending[:size]
        if self._stalled.pop(call.stream, None) is not None:
            call.wake()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self._h2.data_to_send()
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _look(self) -> None:
        """Ask a silent peer for a sign of life; leave one that gives none."""
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= _SILENT_S + _ANSWER_S:
            if self._transport is not None:
                self._transport.abort()
            return
        left_s = _SILENT_S - silent_s
        if left_s <= 0:
            left_s = _ANSWER_S
            self._h2.ping(bytes(8))
            self._flush()
        self._timer = self._loop.call_later(left_s, self._look)
