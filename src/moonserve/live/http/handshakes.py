"""TlsListener: accepts connections, and gives them to the server once their handshake has ended.

asyncio's own server counts no connection before its TLS handshake has ended, and reports no failed
handshake. This one bounds handshakes, in all and by address, and logs why one failed. The server
uses it for TLS only.

What never happens here: a handshake that is longer than HANDSHAKE_S; a new client that waits for
others that are silent: the oldest handshake of the address with the most is dropped instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence

from moonserve.live.tls.contexts import HANDSHAKE_S

log = logging.getLogger(__name__)

_MOST = 512
"""Handshakes at one time."""
_MOST_OF_ONE = 64
"""The same, of one address."""
_BACKLOG = 2048
_PAUSE_S = 0.1  # out of file descriptors: wait until other connections end


class TlsListener:
    """Listens at sockets until `close`; made by `listen`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        address_of: Callable[[object], str],
    ) -> None:
        self.sockets = sockets
        self._context = context
        self._make = make
        self._address_of = address_of
        self._under_way: dict[asyncio.Task[None], str] = {}
        """Handshakes, the oldest first, with the addresses of their clients."""
        self._counts: Counter[str] = Counter()
        self._accepting = [asyncio.create_task(self._accept(it)) for it in sockets]

    def close(self) -> None:
        """Accept no more connections, and drop those whose handshake has not ended."""
        for task in (*self._accepting, *self._under_way):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing listens any more."""
        await asyncio.gather(*self._accepting, *self._under_way, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, peer = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("cannot accept connections: %s", error.strerror or error)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                address = self._address_of(peer)
                self._make_room(address)
                task = asyncio.create_task(self._shake_hands(sock, address))
                self._under_way[task] = address
                self._counts[address] += 1
                task.add_done_callback(self._forget)

    def _make_room(self, address: str) -> None:
        """Drop a handshake if this address, or all together, have too many."""
        whose = address
        if self._counts[address] < _MOST_OF_ONE:
            if len(self._under_way) < _MOST:
                return
            whose = max(self._counts, key=self._counts.__getitem__)
        oldest = next(task for task, it in self._under_way.items() if it == whose)
        oldest.cancel()
        self._forget(oldest)

    def _forget(self, task: asyncio.Task[None]) -> None:
        address = self._under_way.pop(task, None)
        if address is None:  # dropped before
            return
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    async def _shake_hands(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                self._make, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            log.debug("%s left in its TLS handshake: %s", address, error)
        except ssl.SSLError as error:
            log.warning("%s: TLS handshake failed: %s", address, _in_words(error))
        except OSError as error:
            log.debug("%s: TLS handshake broke off: %s", address, error)


def _in_words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if error.reason == "HTTP_REQUEST":
        return "it does not speak TLS; it must use https://"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has shown no certificate, which is needed here"
    return error.reason or str(error)


async def listen(
    context: ssl.SSLContext,
    host: str,
    port: int,
    make: Callable[[], asyncio.Protocol],
    address_of: Callable[[object], str],
    *,
    shared: bool,
) -> TlsListener:
    """Listen at all addresses of a host. port: 0 takes a free one. Raises OSError.

    make: makes the protocol of a connection. address_of: names a client by its socket's name.
    shared: other processes listen there too.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        made: list[socket.socket] = []
        for family, name in dict.fromkeys((it[0], it[4]) for it in found):
            at = made[0].getsockname()[1] if made else port
            sock = socket.create_server(
                (name[0], at), family=family, backlog=_BACKLOG, reuse_port=shared
            )
            stack.enter_context(sock)
            sock.setblocking(False)
            made.append(sock)
        stack.pop_all()
    return TlsListener(made, context, make, address_of)
