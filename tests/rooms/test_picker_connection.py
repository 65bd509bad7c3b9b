"""gRPC over HTTP/2 as a picker serves it: framing, windows, resets, limits, silent peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.live.picker import connection as picker_connection
from moonserve.live.picker.connection import (
    CallBounds,
    CallRefused,
    CallServing,
    GrpcCall,
    GrpcConnection,
    Handler,
)

MOST = 3 << 20
LIMITS = CallBounds(message=MOST, streams=200, calls=4)
TURNS = 20


class Wire(asyncio.Transport):
    """What the connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False
        self.aborted = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True


class Peer:
    """A client with one connection, which shares the loop with the server's end."""

    def __init__(self, handlers: Mapping[bytes, Handler], window: int | None = None) -> None:
        """window: what the server may send on one stream; None: HTTP/2's default."""
        self.shared = CallServing(handlers, LIMITS)
        self.wire = Wire()
        self.end = GrpcConnection(self.shared)
        self.end.connection_made(self.wire)
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.initiate_connection()
        if window is not None:
            self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.events: list[Event] = []
        self.writes = 0

    def call(self, path: str = "/a") -> int:
        """Begin a call; its stream."""
        stream = self.h2.get_next_available_stream_id()
        head = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "a"}
        self.h2.send_headers(stream, [*head.items(), ("te", "trailers")])
        return stream

    def say(self, stream: int, *pieces: bytes, ends: bool = False) -> None:
        """Send bytes, as far as the server's windows have room."""
        for piece in pieces:
            self.h2.send_data(stream, piece)
        if ends:
            self.h2.end_stream(stream)

    async def turns(self) -> None:
        """Exchange bytes until both sides have nothing to say."""
        for _ in range(TURNS):
            if data := self.h2.data_to_send():
                self.end.data_received(data)
            await asyncio.sleep(0)
            for written in self.wire.written:
                self.writes += 1
                self.events += self.h2.receive_data(written)
            self.wire.written.clear()

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of this kind so far."""
        return [it for it in self.events if isinstance(it, kind)]

    def status(self, stream: int) -> tuple[int, str]:
        """How a call ended."""
        heads = [*self.of(TrailersReceived), *self.of(ResponseReceived)]
        [fields] = [
            found
            for it in heads
            if it.stream_id == stream and "grpc-status" in (found := _text(it.headers))
        ]
        return int(fields["grpc-status"]), fields.get("grpc-message", "")

    def received(self, stream: int) -> bytes:
        """The bytes of a call so far."""
        return b"".join(it.data for it in self.of(DataReceived) if it.stream_id == stream)


def _text(headers: Any) -> dict[str, str]:
    return {
        name.decode() if isinstance(name, bytes) else name: (
            value.decode() if isinstance(value, bytes) else value
        )
        for name, value in headers
    }


def framed(message: bytes, size: int | None = None, compressed: int = 0) -> bytes:
    """A message as gRPC frames it."""
    return bytes([compressed]) + (len(message) if size is None else size).to_bytes(4) + message


async def echo(call: GrpcCall) -> None:
    """Send every message back."""
    while (message := await call.read()) is not None:
        await call.write(message)


def run(
    use: Callable[[Peer], Awaitable[None]], handler: Handler = echo, window: int | None = None
) -> None:
    """Run a test with a peer; no task may be left at its end."""

    async def main() -> None:
        peer = Peer({b"/a": handler}, window)
        await peer.turns()
        await use(peer)
        peer.end.connection_lost(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not peer.shared.calls
        assert not peer.shared.open

    asyncio.run(main())


def test_a_call_from_its_head_to_its_status() -> None:
    """Head and answers of one turn are one write; the trailers have the status."""

    async def use(peer: Peer) -> None:
        stream = peer.call()
        peer.say(stream, framed(b"one") + framed(b""), framed(b"three"))
        peer.writes = 0
        await peer.turns()
        assert peer.received(stream) == framed(b"one") + framed(b"") + framed(b"three")
        assert peer.writes == 1
        peer.say(stream, ends=True)
        await peer.turns()
        assert peer.status(stream) == (0, "")
        assert not peer.of(StreamReset)

    run(use)


@pytest.mark.parametrize("size", [1, 3, 7, 1_000])
def test_messages_come_in_pieces(size: int) -> None:
    """However the bytes are cut, the messages are the same."""
    messages = [b"", b"a", b"b" * 700, b"c"]
    data = b"".join(map(framed, messages))
    seen = []

    async def handler(call: GrpcCall) -> None:
        while (message := await call.read()) is not None:
            seen.append(message)

    async def use(peer: Peer) -> None:
        stream = peer.call()
        for at in range(0, len(data), size):
            peer.say(stream, data[at : at + size])
            peer.end.data_received(peer.h2.data_to_send())
        peer.say(stream, ends=True)
        await peer.turns()
        assert seen == messages
        assert peer.status(stream) == (0, "")

    run(use, handler)


def test_a_message_may_be_larger_than_the_window() -> None:
    """The window opens while such a message comes, also for the whole connection."""
    large = b"x" * (MOST - 5)

    async def use(peer: Peer) -> None:
        for _ in range(8):
            stream, rest = peer.call(), framed(large)
            while rest:
                size = min(
                    peer.h2.local_flow_control_window(stream), peer.h2.max_outbound_frame_size
                )
                assert size, "the window stays closed"
                peer.say(stream, rest[:size])
                rest = rest[size:]
                peer.end.data_received(peer.h2.data_to_send())
                for written in peer.wire.written:
                    peer.h2.receive_data(written)
                peer.wire.written.clear()
            peer.h2.reset_stream(stream)
            await peer.turns()

    async def handler(call: GrpcCall) -> None:
        assert await call.read() == large
        await asyncio.Event().wait()

    run(use, handler)


def test_what_is_not_read_is_bounded_by_the_window() -> None:
    """A handler that reads nothing keeps the window closed, and opens it by reading."""
    go = asyncio.Event()

    async def handler(call: GrpcCall) -> None:
        await go.wait()
        while await call.read() is not None:
            pass

    async def use(peer: Peer) -> None:
        stream, sent = peer.call(), 0
        while size := min(peer.h2.local_flow_control_window(stream), 10_000):
            peer.say(stream, framed(b"x" * (size - 5)) if size > 5 else b"\0" * size)
            sent += size
            await peer.turns()
        assert sent <= (1 << 20) + (1 << 19)
        go.set()
        await peer.turns()
        assert peer.h2.local_flow_control_window(stream)

    run(use, handler)


def test_a_peer_that_reads_slowly_is_waited_for() -> None:
    """Writes end when the peer's window has room, and everything comes whole."""
    written = []

    async def handler(call: GrpcCall) -> None:
        for number in range(3):
            await call.write(bytes([number]) * 100)
            written.append(number)

    async def use(peer: Peer) -> None:
        stream = peer.call()
        await peer.turns()
        assert written == []
        while len(peer.received(stream)) < 315:
            before = len(peer.received(stream))
            peer.h2.increment_flow_control_window(50, stream)
            await peer.turns()
            assert len(peer.received(stream)) == min(315, before + 50)
        assert peer.received(stream) == b"".join(framed(bytes([it]) * 100) for it in range(3))
        assert peer.status(stream) == (0, "")

    run(use, handler, window=50)


def test_a_stalled_peer_loses_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler does not wait for ever for a peer that reads nothing."""
    monkeypatch.setattr(picker_connection, "_STALLED_S", 0.0)

    async def use(peer: Peer) -> None:
        stream = peer.call()
        peer.say(stream, framed(b"x" * 100))
        await peer.turns()
        assert [it.stream_id for it in peer.of(StreamReset)] == [stream]
        assert not peer.shared.calls

    run(use, window=50)


def test_a_paused_transport_holds_writes_back() -> None:
    """While the socket is full, handlers wait."""
    written = []

    async def handler(call: GrpcCall) -> None:
        await call.read()
        peer_end.append(call)
        for number in range(2):
            await call.write(b"x")
            written.append(number)

    peer_end: list[GrpcCall] = []

    async def use(peer: Peer) -> None:
        stream = peer.call()
        peer.end.pause_writing()
        peer.say(stream, framed(b""))
        await peer.turns()
        assert written == []
        peer.end.resume_writing()
        await peer.turns()
        assert written == [0, 1]

    run(use, handler)


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (framed(b"x", compressed=1), 12, "compressed"),
        (framed(b"", size=MOST + 1), 8, f"a message of {MOST + 1} bytes is over the limit"),
        (framed(b"ok") + framed(b"", size=2**32 - 1)[:5], 8, "over the limit"),
    ],
)
def test_messages_that_are_not_accepted(data: bytes, status: int, says: str) -> None:
    """The call ends with a status that says why; others go on."""

    async def use(peer: Peer) -> None:
        other, stream = peer.call(), peer.call()
        peer.say(stream, data[:3])
        await peer.turns()
        peer.say(stream, data[3:])
        await peer.turns()
        found = peer.status(stream)
        assert found[0] == status
        assert says in found[1]
        peer.say(other, framed(b"on"), ends=True)
        await peer.turns()
        assert peer.received(other) == framed(b"on")
        assert peer.status(other) == (0, "")

    run(use)


def test_handlers_may_end_calls() -> None:
    """By a status of their own; a bug is an internal error without details."""

    async def handler(call: GrpcCall) -> None:
        if await call.read() == b"bug":
            raise ValueError("secret")
        raise CallRefused(5, "no such: 100%")

    async def use(peer: Peer) -> None:
        streams = [peer.call(), peer.call(), peer.call("/b")]
        peer.say(streams[0], framed(b"bug"))
        peer.say(streams[1], framed(b""))
        await peer.turns()
        assert peer.status(streams[0]) == (13, "internal error; the log says more")
        assert peer.status(streams[1]) == (5, "no such: 100%25")
        assert peer.status(streams[2]) == (12, "there is no method /b here")
        assert {it.error_code for it in peer.of(StreamReset)} == {ErrorCodes.NO_ERROR}

    run(use, handler)


def test_a_whole_call_in_one_packet_may_be_refused() -> None:
    """Its stream is closed by then, and the connection goes on."""

    async def use(peer: Peer) -> None:
        unknown, compressed = peer.call("/b"), peer.call()
        peer.say(unknown, framed(b"x"), ends=True)
        peer.say(compressed, framed(b"x", compressed=1), ends=True)
        await peer.turns()
        assert (peer.status(unknown)[0], peer.status(compressed)[0]) == (12, 12)
        assert not peer.of(StreamReset)
        stream = peer.call()
        peer.say(stream, framed(b"on"), ends=True)
        await peer.turns()
        assert peer.received(stream) == framed(b"on")

    run(use)


def test_calls_are_bounded() -> None:
    """A call too many is refused, until another has ended."""

    async def use(peer: Peer) -> None:
        streams = [peer.call() for _ in range(LIMITS.calls)]
        await peer.turns()
        over = peer.call()
        await peer.turns()
        assert peer.status(over) == (8, "too many calls are under way")
        peer.say(streams[0], ends=True)
        await peer.turns()
        again = peer.call()
        peer.say(again, ends=True)
        await peer.turns()
        assert peer.status(again) == (0, "")

    run(use)


def test_a_reset_ends_the_handler() -> None:
    """Also one that comes in one packet with its call, with any method."""
    ended = []

    async def handler(call: GrpcCall) -> None:
        try:
            await echo(call)
        finally:
            ended.append(call.stream)

    async def use(peer: Peer) -> None:
        stream = peer.call()
        await peer.turns()
        peer.say(stream, framed(b"x"))
        peer.h2.reset_stream(stream)
        for path in ("/a", "/b"):
            quick = peer.call(path)
            peer.say(quick, framed(b"x", compressed=1))
            peer.h2.reset_stream(quick)
        await peer.turns()
        assert ended == [stream]
        assert not peer.shared.calls
        assert not peer.wire.closed

    run(use, handler)


def test_a_server_that_leaves_lets_calls_end() -> None:
    """New calls are refused so that the peer makes them elsewhere; old ones go on."""

    async def use(peer: Peer) -> None:
        stream = peer.call()
        await peer.turns()
        late = peer.call()
        peer.end.leave()
        peer.say(stream, framed(b"on"), ends=True)
        data = peer.h2.data_to_send()
        peer.end.data_received(data)
        raw = H2Connection(H2Configuration(client_side=True))
        raw.initiate_connection()
        goaway, *rest = peer.wire.written
        [told] = [it for it in raw.receive_data(goaway) if isinstance(it, ConnectionTerminated)]
        assert (told.last_stream_id, told.error_code) == (stream, ErrorCodes.NO_ERROR)
        peer.wire.written = rest  # h2's client would forget its calls
        await peer.turns()
        assert peer.received(stream) == framed(b"on")
        assert peer.status(stream) == (0, "")
        refused = [it for it in peer.of(StreamReset) if it.stream_id == late]
        assert [it.error_code for it in refused] == [ErrorCodes.REFUSED_STREAM]

    run(use)


def test_a_server_that_stops_ends_answered_calls_well() -> None:
    """The proxy lets the stream of such a client go on; a call without an answer fails."""

    async def use(peer: Peer) -> None:
        answered, waits = peer.call(), peer.call()
        peer.say(answered, framed(b"x"))
        await peer.turns()
        peer.end.finish()
        await peer.turns()
        assert peer.wire.closed
        assert peer.status(answered) == (0, "")
        assert peer.status(waits) == (14, "this picker ends")

    run(use)


@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_that_ends_ends_its_calls(
    broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose peer says so, or breaks HTTP/2, while a handler has something to write."""
    go = asyncio.Event()

    async def handler(call: GrpcCall) -> None:
        try:
            await go.wait()
        finally:
            await call.write(b"late")

    async def use(peer: Peer) -> None:
        peer.call()
        await peer.turns()
        if not broken:
            peer.h2.close_connection()
        peer.end.data_received(b"\0" * 9 if broken else peer.h2.data_to_send())
        go.set()
        await asyncio.sleep(0)
        assert peer.wire.closed
        assert "bug" not in caplog.text

    run(use, handler)


def test_a_silent_peer_is_asked_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers a ping is kept; one that does not is cut, and its calls end."""
    monkeypatch.setattr(picker_connection, "_SILENT_S", 0.05)
    monkeypatch.setattr(picker_connection, "_ANSWER_S", 0.05)

    async def use(peer: Peer) -> None:
        peer.call()
        await peer.turns()
        async with asyncio.timeout(10):
            while len(peer.of(PingReceived)) < 3:
                await peer.turns()
                await asyncio.sleep(0.001)
            assert not peer.wire.closed
            while not peer.wire.aborted:
                await asyncio.sleep(0.001)

    run(use)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 200))
def test_arbitrary_bytes_end_a_connection_at_most(data: bytes, at: int) -> None:
    """Whatever comes after or within a call, the connection goes on or closes, without an error."""

    async def use(peer: Peer) -> None:
        stream = peer.call()
        peer.say(stream, framed(b"x" * 50))
        sent = peer.h2.data_to_send()
        peer.end.data_received(sent[:at] + data + sent[at:])
        await asyncio.sleep(0)
        if not peer.wire.closed:
            peer.end.data_received(data)

    run(use)


def test_a_peer_may_open_streams_before_it_has_read_how_many_are_wanted() -> None:
    """So many are served as the server bears; the others end with an error, not the connection."""

    async def use(peer: Peer) -> None:
        peer.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2 * LIMITS.streams
        peer.h2.remote_settings.acknowledge()  # as if it had not read them
        streams = [peer.call() for _ in range(LIMITS.streams + 50)]
        for stream in streams:
            peer.say(stream, framed(b"a"), ends=True)
        await peer.turns()
        served = [stream for stream in streams if peer.received(stream)]
        assert served == streams[: LIMITS.calls]
        assert {peer.status(it) for it in served} == {(0, "")}
        refused = {peer.status(it) for it in streams if it not in served}
        assert refused == {(8, "too many calls are under way")}
        assert not peer.wire.closed

    run(use)
