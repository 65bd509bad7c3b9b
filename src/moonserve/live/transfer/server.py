"""Serves one region's bytes over TCP to peers that know the token.

There is one accepting thread per address and one thread per connection, up to a bound. A peer that
has not proved yet that it knows the token is a stranger. If there are too many strangers, the
oldest is dropped; strangers never take a member's place. A peer that is idle, slow or sends a wrong
frame is dropped, and nothing it sends reaches memory outside the region. This server does not know
which extents a peer may use: the master's tickets and leases, and readers' checksums, protect them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from moonserve.core.errors import MoonserveError, TransferFailed
from moonserve.core.store.words import Address
from moonserve.live.transfer import frames
from moonserve.live.transfer.region import IDENTITY_BYTES, Region

log = logging.getLogger(__name__)

_GREET_S = 5.0
_STALL_S = 10.0  # for a peer that neither sends nor receives a byte
_CLOSE_S = 5.0
_CUT_S = 1.0
"""A connection that was cut ends within this time."""
_MAX_STRANGERS = 64
_PORTS_TRIED = 8


class TransferServer:
    """Listens from construction until `close`."""

    def __init__(
        self,
        region: Region,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        also: Sequence[str] = (),
        max_connections: int = 256,
        idle_s: float = 300.0,
        frame_s: float = 30.0,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`port` 0 takes a free port. `also`: further addresses to listen on at the same port.

        `frame_s`: the longest time for the bytes of one frame. `tls`: returns a server's context;
        with it all bytes but those in shared memory are encrypted. Raises OSError if it cannot
        listen; the error's filename is the address.
        """
        self._region = region
        self._token = token
        self._idle_s = idle_s
        self._frame_s = frame_s
        self._max_connections = max_connections
        self._tls = tls
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        """Notified whenever a connection has ended."""
        self._open: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, None] = {}
        """Connections that have not proved the token; the oldest is first."""
        self._members: dict[threading.Thread, None] = {}
        self._closing = False
        self._listeners = _listen([host, *also], port)
        self.port: int = self._listeners[0].getsockname()[1]
        self._acceptors = [
            threading.Thread(target=self._accept, args=(it,), name="kv-accept", daemon=True)
            for it in self._listeners
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    def address(self, host: str) -> Address:
        """Return the region's address for peers that reach this server at `host`."""
        return Address(host, self.port, self._region.name, self._region.identity)

    def close(self) -> None:
        """Stop listening, cut every connection, and wait for the threads to end."""
        with self._lock:
            self._closing = True
            threads = [*self._acceptors, *self._open]
            for sock in (*self._listeners, *self._open.values()):
                _cut(sock)
        for listener in self._listeners:
            listener.close()
        for thread in threads:
            thread.join(_CLOSE_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of file descriptors: wait until other connections end
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="kv-serve", daemon=True
            )
            with self._lock:
                if not self._has_room() or self._closing:  # it may have waited
                    sock.close()
                    continue
                # Started under the lock: a thread is in the table while it runs, and only then.
                try:
                    thread.start()
                except RuntimeError as error:  # out of threads
                    log.warning("transfer server: refused a connection: %s", error)
                    sock.close()
                    continue
                self._open[thread] = sock
                self._strangers[thread] = None

    def _has_room(self) -> bool:
        """Whether one more stranger may connect, in place of the oldest if there are too many.

        It runs under the lock, and waits until those that were cut have ended: else a burst of
        strangers would keep members out.
        """
        if len(self._strangers) >= _MAX_STRANGERS:
            longest = next(iter(self._strangers))
            del self._strangers[longest]
            _cut(self._open[longest])
        most = self._max_connections + _MAX_STRANGERS
        return self._ended.wait_for(lambda: len(self._open) < most, _CUT_S)

    def _serve(self, sock: socket.socket) -> None:
        try:
            if self._tls is not None:
                sock = self._encrypt(sock, self._tls())
            channel = frames.prepare(sock)
            if self._greet(channel):
                while self._answer(channel):
                    pass
        except (MoonserveError, OSError) as error:
            log.debug("transfer server: dropped a connection: %s", error)
        finally:
            with self._lock:
                me = threading.current_thread()
                del self._open[me]
                self._strangers.pop(me, None)
                self._members.pop(me, None)
                self._ended.notify_all()
            sock.close()

    def _encrypt(self, sock: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        sock.settimeout(_GREET_S)
        made = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        me = threading.current_thread()
        with self._lock:  # other threads must cut the new socket from now on
            self._open[me] = made
            if self._closing or me not in self._strangers:
                _cut(made)
        try:
            made.do_handshake()
        except OSError:
            made.close()
            raise
        return made

    def _greet(self, channel: frames.Channel) -> bool:
        deadline_s = time.monotonic() + _GREET_S
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        channel.send_all([frames.MAGIC, nonce], deadline_s, _GREET_S)
        identity = channel.recv_bytes(IDENTITY_BYTES, deadline_s, _GREET_S)
        given = channel.recv_bytes(frames.MAC_BYTES, deadline_s, _GREET_S)
        known = hmac.compare_digest(given, frames.proof(self._token, nonce, identity))
        good = known and identity == self._region.identity and self._admit()
        size = len(self._region.view) if good else 0
        welcome = frames.WELCOME.pack(frames.OK if good else frames.REFUSED, size)
        channel.send_all([welcome], deadline_s, _GREET_S)
        return good

    def _admit(self) -> bool:
        """Make this thread's peer a member, if the bound allows one more; return whether it did."""
        me = threading.current_thread()
        with self._lock:
            if len(self._members) >= self._max_connections:
                return False
            self._strangers.pop(me, None)
            self._members[me] = None
            return True

    def _answer(self, channel: frames.Channel) -> bool:
        """Serve one frame; False: the connection ends."""
        try:
            head = channel.recv_bytes(frames.LEAST, math.inf, self._idle_s)
        except TransferFailed:
            return False
        op, count = frames.HEADER.unpack_from(head)
        if op not in (frames.READ, frames.WRITE) or not 0 < count <= frames.MAX_SLICES:
            raise TransferFailed(f"malformed frame with op {op} and {count} slices")
        deadline_s = time.monotonic() + self._frame_s
        more = frames.request_bytes(count) - len(head)
        if more:
            head += channel.recv_bytes(more, deadline_s, _STALL_S)
        table = memoryview(head)[frames.HEADER.size :][: count * frames.SLICE.size]
        slices = list(frames.SLICE.iter_unpack(table))
        capacity = len(self._region.view)
        bounded = all(offset + length <= capacity for offset, length in slices)
        if not bounded or sum(length for _, length in slices) > frames.MAX_FRAME_BYTES:
            channel.send_all([frames.STATUS.pack(frames.OUT_OF_BOUNDS)], deadline_s, _STALL_S)
            return False  # the bytes of a refused WRITE would be read as frames
        memory = [self._region.view[offset : offset + length] for offset, length in slices]
        parts: list[bytes | memoryview] = [frames.STATUS.pack(frames.OK)]
        if op == frames.READ:
            parts += memory
        else:
            # After a client has given up a write, the master may reuse its extents.
            channel.recv_all(memory, deadline_s, _STALL_S, until_cut=True)
        channel.send_all(parts, deadline_s, _STALL_S)
        return True


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return a listener at each host, all at one port.

    Raises OSError if one host fails; the error's filename is that host.
    """
    for _ in range(_PORTS_TRIED):
        made: list[socket.socket] = []
        try:
            for host in hosts:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                at = made[0].getsockname()[1] if made else port
                made.append(socket.create_server((host, at), family=family, backlog=64))
            return made
        except OSError as error:
            error.filename = hosts[len(made)]
            for listener in made:
                listener.close()
            if port or not made or error.errno != errno.EADDRINUSE:
                raise
            taken = error  # the port is free at the first host, but taken at a later one
    raise taken


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
