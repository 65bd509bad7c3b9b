"""The TCP transport's frames and its deadline-bound socket calls.

    server -> client   MAGIC, 32-byte nonce
    client -> server   16-byte identity of the region, HMAC-SHA256(token, nonce + identity)
    server -> client   status, the region's size in bytes
    then, any number of times:
    client -> server   op, count, then count x (offset, length); for WRITE the bytes follow
    server -> client   status; for READ the bytes follow

Every header before bytes is padded to a multiple of 64, so that the kernel copies whole cache
lines. After a status other than OK the server sends nothing more. Integers are little-endian. With
TLS the same frames go through the encrypted stream. Only this room's server and client use it.
"""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

from moonserve.core.errors import DeadlineExceeded, TransferFailed
from moonserve.core.units import Bytes

MAGIC: Final = b"MSKVTCP2"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
MAX_SLICES: Final = 256
"""Slices per frame. It is below every system's limit of buffers per call."""
MAX_FRAME_BYTES: Final = 1 << 30
READ: Final = 1
WRITE: Final = 2
OK: Final = 0
REFUSED: Final = 1
"""The token is wrong, or another region is served here now."""
OUT_OF_BOUNDS: Final = 2
WELCOME: Final = struct.Struct("<BQ")
STATUS: Final = struct.Struct("<B63x")
HEADER: Final = struct.Struct("<BH13x")
SLICE: Final = struct.Struct("<QQ")
LEAST: Final = 64
"""The size of the smallest request, which has up to three slices."""
_TIMEVAL: Final = struct.Struct("@ll")
_SAME_HOST_BUFFER: Final = 256 << 10


class Stalled(TransferFailed):
    """The peer has neither sent nor received a byte for too long."""


def request_bytes(count: int) -> Bytes:
    """Return the size of a request for `count` slices, with its padding."""
    return -(-(HEADER.size + count * SLICE.size) // LEAST) * LEAST


def proof(token: bytes, nonce: bytes, identity: bytes) -> bytes:
    """Return the proof that the client knows the token, for this region and connection."""
    return hmac.digest(token, nonce + identity, "sha256")


class Channel:
    """A connected socket whose calls end by a deadline (time.monotonic). `prepare` makes it.

    It uses kernel timeouts and MSG_WAITALL instead of settimeout. So one call receives everything
    and releases the interpreter's lock once, in however many packets the bytes come.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._timeouts = {socket.SO_RCVTIMEO: 0, socket.SO_SNDTIMEO: 0}
        self._cut = select.poll()
        self._cut.register(sock, 0)  # poll reports errors and hang-ups in any case

    def recv_some(self, into: list[memoryview], at: int, deadline_s: float, stall_s: float) -> int:
        """Fill `into` from its `at`-th buffer on; return the index of the first that is not full.

        In `into`, that buffer is replaced by its unfilled rest. Raises DeadlineExceeded; Stalled if
        no byte came for `stall_s`; TransferFailed at the end of the stream.
        """
        self._limit(socket.SO_RCVTIMEO, deadline_s, stall_s)
        try:
            count = self._recv(into, at)
        except (BlockingIOError, TimeoutError):
            raise _overdue("sent", deadline_s) from None
        if count == 0:
            raise TransferFailed("the peer closed the connection")
        end = len(into)
        while at < end and count >= len(into[at]):
            count -= len(into[at])
            at += 1
        if count:
            into[at] = into[at][count:]
        return at

    def recv_all(
        self,
        into: Sequence[memoryview],
        deadline_s: float,
        stall_s: float,
        *,
        until_cut: bool = False,
    ) -> None:
        """Fill all of `into`.

        `until_cut`: stop as soon as the peer has cut the connection, and raise TransferFailed.
        Without it, the system would first deliver the bytes that came before the cut.
        """
        rest = [part for part in into if len(part)]
        at = 0
        while at < len(rest):
            if until_cut and self._cut.poll(0):
                raise TransferFailed("the peer cut the connection")
            at = self.recv_some(rest, at, deadline_s, stall_s)

    def recv_bytes(self, count: int, deadline_s: float, stall_s: float) -> bytes:
        """Return the next `count` bytes."""
        got = bytearray(count)
        self.recv_all([memoryview(got)], deadline_s, stall_s)
        return bytes(got)

    def send_all(
        self, parts: Sequence[bytes | memoryview], deadline_s: float, stall_s: float
    ) -> None:
        """Send all parts, gathered."""
        rest: list[bytes | memoryview] = list(parts)
        while rest:
            self._limit(socket.SO_SNDTIMEO, deadline_s, stall_s)
            try:
                sent = self._send(rest)
            except (BlockingIOError, TimeoutError):
                raise _overdue("received", deadline_s) from None
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = memoryview(rest[0])[sent:]

    def _recv(self, into: list[memoryview], at: int) -> int:
        return self.sock.recvmsg_into(into[at:] if at else into, 0, socket.MSG_WAITALL)[0]

    def _send(self, rest: list[bytes | memoryview]) -> int:
        return self.sock.sendmsg(rest)

    def _limit(self, option: int, deadline_s: float, stall_s: float) -> None:
        left_us = int(min(deadline_s - time.monotonic(), stall_s) * 1e6)
        if left_us <= 0:
            raise DeadlineExceeded("transfer ran past its deadline")
        if self._timeouts[option] != left_us:
            self._set_timeout(option, left_us)

    def _set_timeout(self, option: int, left_us: int) -> None:
        value = _TIMEVAL.pack(*divmod(left_us, 1_000_000))
        self.sock.setsockopt(socket.SOL_SOCKET, option, value)
        self._timeouts[option] = left_us


class TlsChannel(Channel):
    """An encrypted Channel: the TLS library reads and writes records, and waits by settimeout."""

    def _recv(self, into: list[memoryview], at: int) -> int:
        return self.sock.recv_into(into[at])

    def _send(self, rest: list[bytes | memoryview]) -> int:
        return self.sock.send(rest[0])

    def _set_timeout(self, option: int, left_us: int) -> None:
        self.sock.settimeout(left_us / 1e6)
        self._timeouts = {socket.SO_RCVTIMEO: left_us, socket.SO_SNDTIMEO: left_us}


def prepare(sock: socket.socket) -> Channel:
    """Set up a connected socket; both ends call it.

    Between processes of one host the bytes go from cache to cache if the socket's buffers fit into
    the cache (measured: two to three times the speed). Between hosts the system sizes the buffers.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getpeername()[0] == sock.getsockname()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SAME_HOST_BUFFER)
    if isinstance(sock, ssl.SSLSocket):
        return TlsChannel(sock)
    sock.settimeout(None)
    return Channel(sock)


def _overdue(what: str, deadline_s: float) -> DeadlineExceeded | Stalled:
    if time.monotonic() >= deadline_s - 0.001:
        return DeadlineExceeded(f"the peer {what} nothing before the deadline")
    return Stalled(f"the peer {what} nothing for too long")
