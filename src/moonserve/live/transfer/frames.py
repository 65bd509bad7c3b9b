"""The TCP transport's frames and its deadline-bound socket calls.

    server -> client   MAGIC, 32-byte nonce
    client -> server   16-byte identity of the region meant, HMAC-SHA256(token, nonce + identity)
    server -> client   status
    then, any number of times:
    client -> server   op, count, then count x (offset, length); for WRITE the bytes follow
    server -> client   status; for READ, if OK, the bytes follow

Integers are little-endian. Used by the server and the client of this room only.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from moonserve.core.errors import DeadlineExceeded, TransferFailed

MAGIC: Final = b"MSKVTCP1"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
MAX_SLICES: Final = 256
"""Slices per frame; also below every system's limit of buffers per sendmsg."""
MAX_FRAME_BYTES: Final = 1 << 30
READ: Final = 1
WRITE: Final = 2
OK: Final = 0
REFUSED: Final = 1
"""Wrong token, or another region listens here now."""
OUT_OF_BOUNDS: Final = 2
HEADER: Final = struct.Struct("<BH")
SLICE: Final = struct.Struct("<QQ")
_TIMEVAL: Final = struct.Struct("@ll")


def proof(token: bytes, nonce: bytes, identity: bytes) -> bytes:
    """What shows that we know the token and which region we mean."""
    return hmac.digest(token, nonce + identity, "sha256")


def recv_exact(sock: socket.socket, into: memoryview, deadline_s: float) -> None:
    """Fill `into` from a blocking socket, by a monotonic deadline.

    Kernel timeouts and MSG_WAITALL instead of settimeout: one call, and the interpreter lock is
    let go once, however many segments the bytes come in.
    """
    while len(into):
        _set_timeout(sock, socket.SO_RCVTIMEO, deadline_s)
        try:
            count = sock.recv_into(into, len(into), socket.MSG_WAITALL)
        except BlockingIOError:
            raise DeadlineExceeded("peer sent nothing in time") from None
        if count == 0:
            raise TransferFailed("peer closed the connection")
        into = into[count:]


def recv_bytes(sock: socket.socket, count: int, deadline_s: float) -> bytes:
    """The next `count` bytes."""
    got = bytearray(count)
    recv_exact(sock, memoryview(got), deadline_s)
    return bytes(got)


def send_all(sock: socket.socket, parts: Sequence[bytes | memoryview], deadline_s: float) -> None:
    """Send all parts from a blocking socket, gathered, by a monotonic deadline."""
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        _set_timeout(sock, socket.SO_SNDTIMEO, deadline_s)
        try:
            sent = sock.sendmsg(rest)
        except BlockingIOError:
            raise DeadlineExceeded("peer took nothing in time") from None
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if sent:
            rest[0] = rest[0][sent:]


def _set_timeout(sock: socket.socket, option: int, deadline_s: float) -> None:
    left_us = int((deadline_s - time.monotonic()) * 1e6)
    if left_us <= 0:
        raise DeadlineExceeded("transfer ran past its deadline")
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
