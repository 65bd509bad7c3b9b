"""Serves one region's bytes over TCP to peers that know the token.

One accepting thread and one per connection, bounded. A peer that is idle, slow or wrong is
dropped; nothing it sends reaches memory outside the region. Whether an extent is still the peer's
to use is not known here: the master's tickets and leases, and readers' checksums, see to that.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time

from moonserve.core.errors import DeadlineExceeded, MoonserveError, TransferFailed
from moonserve.core.pool import Address
from moonserve.live.transfer import frames
from moonserve.live.transfer.region import IDENTITY_BYTES, Region

log = logging.getLogger(__name__)

_GREET_S = 5.0
_CLOSE_S = 5.0


class TransferServer:
    """Listens from construction until `close`."""

    def __init__(
        self,
        region: Region,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_connections: int = 64,
        idle_s: float = 300.0,
        frame_s: float = 30.0,
    ) -> None:
        """`port` 0 takes a free one. `frame_s`: the most one frame's bytes may take."""
        self._region = region
        self._token = token
        self._idle_s = idle_s
        self._frame_s = frame_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def address(self, host: str) -> Address:
        """The region's address, as reached by `host`."""
        return Address(host, self.port, self._region.name, self._region.identity)

    def close(self) -> None:
        """Stop listening, cut every connection, and wait for the threads to end."""
        with self._lock:
            self._closing = True
            threads = [self._acceptor, *self._open.values()]
            for sock in (self._listener, *self._open):
                _cut(sock)
        self._listener.close()
        for thread in threads:
            thread.join(_CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of file descriptors: others must end first
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="kv-serve", daemon=True
            )
            with self._lock:
                if self._closing or len(self._open) >= self._max_connections:
                    sock.close()
                    continue
                # Started in here: whoever is in the table runs, and none is gone before it is in.
                try:
                    thread.start()
                except RuntimeError as error:  # out of threads: others must end first
                    log.warning("a peer was turned away: %s", error)
                    sock.close()
                    continue
                self._open[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._greet(sock):
                while self._answer(sock):
                    pass
        except (MoonserveError, OSError) as error:
            log.debug("a peer was dropped: %s", error)
        finally:
            with self._lock:
                del self._open[sock]
            sock.close()

    def _greet(self, sock: socket.socket) -> bool:
        deadline_s = time.monotonic() + _GREET_S
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        frames.send_all(sock, [frames.MAGIC, nonce], deadline_s)
        identity = frames.recv_bytes(sock, IDENTITY_BYTES, deadline_s)
        given = frames.recv_bytes(sock, frames.MAC_BYTES, deadline_s)
        known = hmac.compare_digest(given, frames.proof(self._token, nonce, identity))
        good = known and identity == self._region.identity
        frames.send_all(sock, [bytes([frames.OK if good else frames.REFUSED])], deadline_s)
        return good

    def _answer(self, sock: socket.socket) -> bool:
        """Serve one frame; False ends the connection in good order."""
        try:
            head = frames.recv_bytes(sock, frames.HEADER.size, time.monotonic() + self._idle_s)
        except (TransferFailed, DeadlineExceeded):
            return False
        op, count = frames.HEADER.unpack(head)
        if op not in (frames.READ, frames.WRITE) or not 0 < count <= frames.MAX_SLICES:
            raise TransferFailed(f"malformed frame: op {op}, {count} slices")
        deadline_s = time.monotonic() + self._frame_s
        table = frames.recv_bytes(sock, count * frames.SLICE.size, deadline_s)
        slices = list(frames.SLICE.iter_unpack(table))
        capacity = len(self._region.view)
        bounded = all(offset + length <= capacity for offset, length in slices)
        if not bounded or sum(length for _, length in slices) > frames.MAX_FRAME_BYTES:
            frames.send_all(sock, [bytes([frames.OUT_OF_BOUNDS])], deadline_s)
            return bool(op == frames.READ)  # after a refused WRITE its bytes would read as frames
        memory = [self._region.view[offset : offset + length] for offset, length in slices]
        if op == frames.READ:
            frames.send_all(sock, [bytes([frames.OK]), *memory], deadline_s)
        else:
            for piece in memory:
                frames.recv_exact(sock, piece, deadline_s)
            frames.send_all(sock, [bytes([frames.OK])], deadline_s)
        return True


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
