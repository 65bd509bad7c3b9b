"""The TCP transport: blocking sockets on threads, without the interpreter lock while bytes move.

A peer accepts a connection that proves the shared token (frames.proof); TLS is optional. The
Transfer Engine makes one link per lane.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import msgspec

from moonserve.core.errors import DeadlineExceeded, TransferFailed
from moonserve.core.store.words import Address
from moonserve.core.units import Bytes
from moonserve.live.tls.contexts import ServerTrust
from moonserve.live.transfer import frames
from moonserve.live.transfer.ports import Op, Path, Slice

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_CUT = "the engine cut the transfer off"
_RESET = struct.pack("ii", 1, 0)  # linger 0: `close` drops the bytes that are not sent yet
_Found: TypeAlias = Sequence[tuple[socket.AddressFamily, object, int, str, tuple[object, ...]]]


class TcpTransport(msgspec.Struct, frozen=True, eq=False):
    """Reads and writes segments that a TransferServer serves."""

    token: bytes
    stall_s: float = 3.0
    """A run ends if the peer is silent for longer."""
    trust: ServerTrust | None = None
    """Which peers it trusts, and what it shows them; None: without TLS."""

    def open(self, path: Path) -> TcpLink:
        """See Transport.open."""
        return TcpLink(self, path)

    def most_lanes(self, path: Path) -> int:
        """See Transport.most_lanes.

        Over loopback each lane keeps two threads of this host copying. Measured on two cores: a
        second lane costs two thirds of the speed.
        """
        if path.address.host in ("localhost", "::1") or path.address.host.startswith("127."):
            return max(1, (os.cpu_count() or 1) // 4)
        return 8


class TcpLink:
    """One connection. It is made at first use, and again if it was lost between two runs."""

    def __init__(self, transport: TcpTransport, path: Path) -> None:
        self._transport = transport
        self._path = path
        self._sock: socket.socket | None = None
        """Set before it connects, so that `cut` finds it."""
        self._channel: frames.Channel | None = None
        self._capacity: Bytes = 0
        self._cut = False
        self._lookup: Future[_Found] | None = None
        """The resolver's answer, or a pending call: at most one thread per link."""
        self._wake = threading.Event()
        """Set by the resolver's answer, and by `cut`."""

    def arm(self) -> None:
        """See Link.arm."""
        self._cut = False
        self._wake.clear()

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """See Link.run."""
        try:
            if self._channel is not None:
                try:
                    self._exchange(self._channel, op, slices, deadline_s, done)
                    return
                except (TransferFailed, OSError) as error:
                    if self._cut or isinstance(error, frames.Stalled):
                        raise
                    # The peer may have dropped an idle connection, or restarted: no failure yet.
                    log.debug("%s: connecting again after: %s", self._path.address.host, error)
                    self._reset()
            self._exchange(self._connect(deadline_s), op, slices, deadline_s, done)
        except BaseException:
            self._reset()
            raise

    def cut(self) -> None:
        """See Link.cut."""
        self._cut = True
        self._wake.set()
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # not connected yet, or not any more
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See Link.close."""
        sock = self._sock
        self._sock = None
        self._channel = None
        if sock is not None:
            sock.close()

    def _reset(self) -> None:
        """Close and drop unsent bytes: they must not arrive after the extent was reused."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def _exchange(
        self,
        channel: frames.Channel,
        op: Op,
        slices: Sequence[Slice],
        deadline_s: float,
        done: list[bool],
    ) -> None:
        """Send one frame, receive its answer, and mark the slices that arrived."""
        capacity = self._capacity
        stall_s = self._transport.stall_s
        head = [b""]
        into = [memoryview(bytearray(frames.STATUS.size))]
        asked: list[int] = []
        for index, (offset, memory) in enumerate(slices):
            size = len(memory)
            if not done[index] and 0 <= offset <= capacity - size:
                asked.append(index)
                head.append(frames.SLICE.pack(offset, size))
                into.append(memory)
        if not asked:
            return
        head[0] = frames.HEADER.pack(frames.READ if op == "read" else frames.WRITE, len(asked))
        request = b"".join(head).ljust(frames.request_bytes(len(asked)), b"\0")
        status, *memories = into
        if op == "write":
            channel.send_all([request, *memories], deadline_s, stall_s)
            into = [status]
        else:
            channel.send_all([request], deadline_s, stall_s)
        at = marked = 0
        while at < len(into):
            at = channel.recv_some(into, at, deadline_s, stall_s)
            if status[0] != frames.OK:
                raise TransferFailed("the peer refused the slices as out of bounds")
            while op == "read" and marked < at - 1:
                done[asked[marked]] = True
                marked += 1
        for index in asked if op == "write" else ():
            done[index] = True

    def _connect(self, deadline_s: float) -> frames.Channel:
        address = self._path.address
        found = self._resolve(address, deadline_s)
        *others, last = found
        for family, _, _, _, target in others:
            try:
                return self._connect_to(family, target, deadline_s)
            except OSError as error:
                if self._cut:
                    raise
                log.debug("%s: trying its next address after: %s", address.host, error)
                self.close()
        return self._connect_to(last[0], last[4], deadline_s)

    def _resolve(self, address: Address, deadline_s: float) -> _Found:
        """Resolve the host's name in a thread of its own: the system's resolver has no deadline."""
        with contextlib.suppress(OSError):  # a numeric address needs no resolver
            return _ask(address, socket.AI_NUMERICHOST)
        lookup = self._lookup
        if lookup is None or lookup.done():
            lookup = self._lookup = Future()
            lookup.add_done_callback(lambda _: self._wake.set())
            thread = threading.Thread(
                target=_answer, args=(lookup, address), name="kv-resolve", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # out of threads
                lookup.set_exception(TransferFailed(str(error)))
        self._wake.wait(max(0.0, min(deadline_s - time.monotonic(), _CONNECT_S)))
        if self._cut:
            raise TransferFailed(_CUT)
        if lookup.done():
            return lookup.result()
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(f"{address.host} was not resolved before the deadline")
        raise TransferFailed(f"{address.host} was not resolved within {_CONNECT_S:g} s")

    def _connect_to(
        self, family: socket.AddressFamily, target: tuple[object, ...], deadline_s: float
    ) -> frames.Channel:
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        if self._cut:
            raise TransferFailed(_CUT)
        if self._path.source:
            sock.bind((self._path.source, 0))
        wait_s = min(deadline_s - time.monotonic(), _CONNECT_S)
        if wait_s <= 0:
            raise DeadlineExceeded("there is no time left to connect")
        sock.settimeout(wait_s)
        sock.connect(target)
        if self._transport.trust is not None:
            sock = self._encrypt(sock, self._transport.trust)
        channel = frames.prepare(sock)
        self._greet(channel, deadline_s)
        self._channel = channel
        return channel

    def _encrypt(self, sock: socket.socket, trust: ServerTrust) -> ssl.SSLSocket:
        host = self._path.address.host
        made = self._sock = trust.context().wrap_socket(
            sock, server_hostname=host, do_handshake_on_connect=False
        )
        if self._cut:
            raise TransferFailed(_CUT)
        try:
            made.do_handshake()
        except ssl.SSLError as error:
            raise TransferFailed(trust.refusal(host, error)) from None
        return made

    def _greet(self, channel: frames.Channel, deadline_s: float) -> None:
        identity = self._path.address.identity
        stall_s = self._transport.stall_s
        size = len(frames.MAGIC) + frames.NONCE_BYTES
        greeting = channel.recv_bytes(size, deadline_s, stall_s)
        if not greeting.startswith(frames.MAGIC):
            raise TransferFailed("a server with another protocol listens there")
        proof = frames.proof(self._transport.token, greeting[len(frames.MAGIC) :], identity)
        channel.send_all([identity, proof], deadline_s, stall_s)
        welcome = channel.recv_bytes(frames.WELCOME.size, deadline_s, stall_s)
        status, self._capacity = frames.WELCOME.unpack(welcome)
        if status != frames.OK:
            raise TransferFailed(
                "the segment's owner refused the connection: the token is wrong, the owner has"
                " restarted, or it has too many connections"
            )


def _ask(address: Address, flags: int = 0) -> _Found:
    try:
        return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise TransferFailed(f"{address.host!r} is no host name") from None


def _answer(lookup: Future[_Found], address: Address) -> None:
    try:
        lookup.set_result(_ask(address))
    except (TransferFailed, OSError) as error:
        lookup.set_exception(error)
