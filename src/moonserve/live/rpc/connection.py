"""One connection between two processes of a cluster: calls with replies, and notices.

The store's members and master use it, and fronts and their Conductor, over HTTP connections that
were switched (live.rpc.switching). Both ends are the same class. Nothing blocks here, and no
frame is sent twice.

A frame is a head (size of the body, number of the call, kind) and a body. The body of a call begins
with the name of the operation, whose length is in the kind. Replies carry the number of their call
and may come in any order. Notices of one turn of the event loop travel as one frame. The first
frame of both ends is a hello with the name and version of the protocol. The end that connected
sends its hello first; the end that accepted the connection answers with its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, cast

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, DeadlineExceeded, MoonserveError
from moonserve.core.liveness import Liveness
from moonserve.core.units import Bytes, Micros, seconds_to_us
from moonserve.live.http.client import UpstreamError
from moonserve.live.http.switch import Switched
from moonserve.live.rpc import errors

log = logging.getLogger(__name__)

HEAD: Final = struct.Struct("<IQB")
"""Size of the body, number of the call (0 for hello and notices), kind."""
DONE: Final = 0
"""Kind of a reply whose body is the operation's result."""
FAILED: Final = 1
"""Kind of a reply whose body is an error; see rpc.errors."""
NOTICES: Final = 2
"""Kind of a frame whose body is an array of messages. An empty array is a beat."""
HELLO: Final = 3
"""Kind of an end's first frame, whose body is the protocol's name."""
CALL: Final = 0x80
"""Kind of a call; its low 7 bits are the length of the operation's name."""
_MAX_NAME_BYTES: Final = 0x7F
_DEAD_S: Final = 5
"""Longest time that sent bytes may stay unacknowledged, and half the longest silence of a host."""

Answer: TypeAlias = Callable[[str, bytes], bytes | Coroutine[Any, Any, bytes]]
"""Runs an operation by name and body, and returns the reply's body, or a coroutine if it has to
wait. Both may raise MoonserveError."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one end of a connection accepts, and how long it waits."""

    frame_bytes: Bytes = 64 << 20
    """Largest body that this end reads; memory is taken as the bytes arrive."""
    unread_bytes: Bytes = 256 << 20
    """If the peer leaves more than this unread, this end drops the connection."""
    waiting_calls: int = 256
    """Calls of the peer that may wait at this end at the same time."""
    beat_s: float | None = None
    """Time between two beats of each end. None: no beats; TCP detects a lost host."""
    missed_beats: int = 5
    """After this many missed beats the peer is lost; see core.liveness."""


class RpcConnection(Switched):
    """One end of a connection. A subclass may handle notices and both ends of its life."""

    def __init__(
        self,
        peer: str,
        protocol: str,
        *,
        answer: Answer | None = None,
        notices: Any = None,
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
        accepted: bool = False,
        holds_back: bool = False,
    ) -> None:
        """
        peer: the other end's name, for logs and errors. accepted: the peer has connected to this
        end, and not this end to the peer. answer: runs the peer's calls; None: it
        may make none. notices: type of the peer's notices, a tagged union; None: it may send none.
        holds_back: read no further calls while the peer does not read replies. At most one of two
        ends may do so, or both could wait for each other.
        """
        self.peer = peer
        self.protocol = protocol
        """Its name and version, as both ends say it."""
        self._protocol = protocol.encode()
        self._answer = answer
        self._decode = None if notices is None else msgspec.msgpack.Decoder(list[notices]).decode
        self._limits = limits
        self._accepted = accepted
        self._holds_back = holds_back
        self._loop = asyncio.get_running_loop()
        self._rest = bytearray()
        self._need = HEAD.size
        self._greeted = False
        self._said: list[Any] = []
        self._heard = False
        self._heard_us: Micros = 0
        self._beats: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._last = 0
        self._calls: dict[int, tuple[asyncio.Future[bytes], float]] = {}
        """Calls to the peer: the reply, and its deadline on the loop's clock."""
        self._clock: asyncio.TimerHandle | None = None
        self._clock_s = math.inf
        """When `_clock` fires: not after the deadline of any call."""
        self._writable = asyncio.Event()
        self._writable.set()

    # For subclasses

    def noticed(self, message: Any) -> None:
        """Called with each notice of the peer, in order."""
        raise NotImplementedError

    def opened(self) -> None:
        """Called once the peer has sent a hello with the same protocol."""

    def lost(self) -> None:
        """Called once the connection has ended."""

    # The connection's life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start, on a socket that nothing else has used before."""
        self.take_over(cast(asyncio.Transport, transport), lambda error: None)

    def take_over(
        self, transport: asyncio.Transport, lost: Callable[[Exception | None], None]
    ) -> None:
        """See Switched. The end that connected sends its hello."""
        super().take_over(transport, lost)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_S * 1_000)
        if not self._accepted:
            self._send(0, HELLO, self._protocol)
        if self._limits.beat_s is not None:
            self._heard = True
            beat_us = seconds_to_us(self._limits.beat_s)
            # The half allows for timers that are not exact.
            silent_us = self._limits.missed_beats * beat_us + beat_us // 2
            liveness = Liveness(silent_us, pause_us=2 * beat_us, grace_us=silent_us)
            self._beat(liveness, self._limits.beat_s)

    @property
    def is_open(self) -> bool:
        """Whether calls can be made. False before it has taken a connection over."""
        return not self.transport.is_closing()

    @property
    def calls(self) -> int:
        """Number of calls to the peer that have not ended."""
        return len(self._calls)

    def close(self) -> None:
        """End the connection, after what was sent has gone out."""
        self.transport.close()

    def break_off(self, why: str) -> None:
        """End the connection at once, because of a fault of the peer."""
        log.warning("%s: connection dropped: %s", self.peer, why)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls to the peer; stop all calls of the peer."""
        if self._beats is not None:
            self._beats.cancel()
        if self._clock is not None:
            self._clock.cancel()
        for task in self._waiting:
            task.cancel()
        why = "" if exc is None else f" ({exc})"
        for future, _ in self._calls.values():
            if not future.done():
                lost = f"{self.peer}: connection lost amid a call{why}"
                future.set_exception(UpstreamError(lost, sent=True))
        self._writable.set()
        self._rest.clear()
        super().connection_lost(exc)
        self.lost()

    def _beat(self, liveness: Liveness, beat_s: float) -> None:
        """Send a beat if nothing else goes out, and drop a peer that is lost."""
        self._beats = self._loop.call_later(beat_s, self._beat, liveness, beat_s)
        now_us = seconds_to_us(self._loop.time())
        if self._heard:
            self._heard = False
            self._heard_us = now_us
        if liveness.silent(now_us, [(self.peer, self._heard_us)]):
            self.break_off(f"no beat in {self._limits.missed_beats * beat_s:g} s")
        elif not self._said and self._greeted:
            self._flush()

    # Sending

    def notify(self, *messages: Any) -> None:
        """Send messages, together with all others of this turn of the loop.

        If the connection has ended, they are dropped.
        """
        if not self._said:
            self._loop.call_soon(self._flush)
        self._said.extend(messages)

    async def call(self, op: str, body: bytes, deadline_s: float) -> bytes:
        """Run one operation at the peer and return the reply's body.

        deadline_s: on the loop's clock. Raises the peer's error (see rpc.errors); DeadlineExceeded;
        UpstreamError: the connection was lost, and the peer may have run the call.
        """
        if not self._writable.is_set():
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._writable.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"{self.peer} took no calls in time") from None
        if not self.is_open:
            raise UpstreamError(f"{self.peer}: connection lost before {op!r}", sent=False)
        name = op.encode()
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise BadRequest(f"an operation's name has 1 to {_MAX_NAME_BYTES} bytes, not {op!r}")
        self._last = number = self._last + 1
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[number] = future, deadline_s
        if deadline_s < self._clock_s:  # one timer for all calls is lighter than one for each
            self._set_clock(deadline_s)
        self._send(number, CALL | len(name), name + body)
        try:
            return await future
        finally:
            del self._calls[number]
            del future  # it holds the error, and the error's traceback holds this frame

    def _send(self, number: int, kind: int, body: bytes) -> None:
        """Send one frame. The peer refuses a body over its limit."""
        self.transport.write(HEAD.pack(len(body), number, kind) + body)
        if self.transport.get_write_buffer_size() > self._limits.unread_bytes:
            self.break_off("peer does not read; write buffer over limit")

    def _flush(self) -> None:
        said, self._said = self._said, []
        if self.transport.is_closing():
            return
        try:
            body = _encode(said)
        except (OverflowError, TypeError, ValueError) as error:
            # Without the message, its receiver would wait for ever.
            self.break_off(f"cannot encode message: {error}")
            return
        self._send(0, NOTICES, body)

    def _set_clock(self, time_s: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock_s = time_s
        self._clock = (
            self._loop.call_at(time_s, self._end_late_calls) if time_s < math.inf else None
        )

    def _end_late_calls(self) -> None:
        """Fail the calls that are past their deadlines, and set the clock for the next one."""
        now_s = self._loop.time()
        for future, deadline_s in self._calls.values():
            if deadline_s <= now_s and not future.done():
                future.set_exception(DeadlineExceeded(f"{self.peer} did not answer in time"))
        self._clock = None
        left = (deadline_s for _, deadline_s in self._calls.values() if deadline_s > now_s)
        self._set_clock(min(left, default=math.inf))

    def pause_writing(self) -> None:
        """The peer does not read now: calls to it wait."""
        self._writable.clear()
        if self._holds_back:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._writable.set()
        if self._holds_back and not self.transport.is_closing():
            self.transport.resume_reading()

    # Receiving

    def data_received(self, data: bytes) -> None:
        """Cut the bytes into frames, and keep an unfinished one."""
        self._heard = True
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
        at = 0
        self._need = HEAD.size
        while len(data) - at >= HEAD.size and not self.transport.is_closing():
            size, number, kind = HEAD.unpack_from(data, at)
            if size > self._limits.frame_bytes:
                limit = self._limits.frame_bytes
                self.break_off(f"a frame of {size} bytes is over the limit of {limit}")
                return
            start = at + HEAD.size
            if start + size > len(data):
                self._need = HEAD.size + size
                break
            at = start + size
            self._received(number, kind, data[start:at])
        self._rest = bytearray(data[at:])

    def _received(self, number: int, kind: int, body: bytes) -> None:
        if not self._greeted:
            self._greet(kind, body)
        elif kind >= CALL:
            self._run(number, kind & _MAX_NAME_BYTES, body)
        elif kind in (DONE, FAILED):
            self._replied(number, kind, body)
        elif kind == NOTICES:
            self._receive_notices(body)
        else:
            self.break_off(f"a frame of unknown kind {kind}")

    def _greet(self, kind: int, body: bytes) -> None:
        if kind != HELLO:
            self.break_off("its first frame is no hello")
        elif body != self._protocol:
            said = body[:100].decode("utf-8", "replace")
            mine = self._protocol.decode()
            self.break_off(f"it speaks {said!r}, not {mine!r}; run one version in the cluster")
        else:
            self._greeted = True
            if self._accepted:
                self._send(0, HELLO, self._protocol)
            self.opened()

    def _replied(self, number: int, kind: int, body: bytes) -> None:
        """One reply. Its caller may have stopped waiting."""
        future, _ = self._calls.get(number, (None, 0.0))
        if future is None or future.done():
            return
        if kind == DONE:
            future.set_result(body)
        else:
            future.set_exception(errors.decoded(body))

    def _receive_notices(self, body: bytes) -> None:
        if self._decode is None:
            if body != _BEAT:
                self.break_off("it sends notices, which are not accepted here")
            return
        try:
            messages = self._decode(body)
        except UNREADABLE as error:
            self.break_off(f"its notices cannot be decoded: {error}")
            return
        for message in messages:
            self.noticed(message)

    def _run(self, number: int, length: int, body: bytes) -> None:
        """Answer one call, now or by a task. A bug in it ends the connection, with its trace."""
        if not 0 < length <= len(body):
            self.break_off("a call without an operation")
            return
        op = body[:length].decode("latin-1")
        try:
            if self._answer is None:
                raise BadRequest(f"no operations here; the call was {op!r}")
            reply = self._answer(op, body[length:])
        except MoonserveError as error:
            self._send(number, FAILED, errors.encoded(error))
            return
        if isinstance(reply, bytes):
            self._send(number, DONE, reply)
        elif len(self._waiting) < self._limits.waiting_calls:
            task = asyncio.create_task(self._reply_later(number, reply))
            self._waiting.add(task)
            task.add_done_callback(self._reply_ended)
        else:
            reply.close()
            why = f"{self._limits.waiting_calls} calls of this connection wait already"
            self._send(number, FAILED, errors.encoded(MoonserveError(why)))

    async def _reply_later(self, number: int, reply: Coroutine[Any, Any, bytes]) -> None:
        try:
            self._send(number, DONE, await reply)
        except MoonserveError as error:
            self._send(number, FAILED, errors.encoded(error))

    def _reply_ended(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("%s: bug in a call that waited", self.peer, exc_info=bug)
            self.transport.abort()


_encode = msgspec.msgpack.Encoder().encode
_BEAT: Final = _encode([])
