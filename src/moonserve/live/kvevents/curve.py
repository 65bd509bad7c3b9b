"""CURVE for KV events: ZMQ's own encryption, with keys of both sides.

`moonserve tls init` makes the keys, in the form of pyzmq. Publisher and subscriber read them here.
A folder has publisher.key and publisher.key_secret, subscriber.key and subscriber.key_secret. A
publisher also accepts the public keys of further subscribers, as NAME.key. ZMQ does the rest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.auth import load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from moonserve.core.errors import ConfigError


class CurveKeys(msgspec.Struct, frozen=True):
    """The key pair of one side."""

    folder: Path
    public: bytes
    secret: bytes

    def listen(self, context: zmq.asyncio.Context) -> AsyncioAuthenticator:
        """Let sockets of this context accept only subscribers whose keys are in the folder.

        The caller stops the authenticator before it ends the context.
        """
        made = AsyncioAuthenticator(context)
        made.start()
        made.configure_curve(domain="*", location=self.folder)
        return made

    def serve(self, socket: zmq.asyncio.Socket) -> None:
        """Encrypt a socket that is about to listen."""
        self._pair(socket)
        socket.curve_server = True

    def call(self, socket: zmq.asyncio.Socket) -> None:
        """Encrypt a socket that is about to connect to the folder's publisher."""
        self._pair(socket)
        socket.curve_serverkey, _ = _load(self.folder / "publisher.key")

    def _pair(self, socket: zmq.asyncio.Socket) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def keys_of(folder: str, side: str) -> CurveKeys:
    """Read the keys of `side`: publisher or subscriber. Raises ConfigError."""
    path = Path(folder) / f"{side}.key_secret"
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} has no secret key in it", "kv_events_curve")
    return CurveKeys(Path(folder), public, secret)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        remedy = "make the keys with `moonserve tls init`"
        raise ConfigError(f"cannot read {path}: {error}; {remedy}", "kv_events_curve") from None
    return public, secret
