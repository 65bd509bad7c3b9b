"""Tls and ServerTrust: the contexts by which a process accepts and makes TLS connections.

The processes make a Tls from their settings. HTTP servers and clients, the transfer server and its
client, and the registry use it. All cryptography is in the ssl module of the standard library.

What never happens here: a connection without a check of the host's name; a wait for a password; an
end of the process because a new file of certificates is wrong: the old ones stay in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError

log = logging.getLogger(__name__)

ClientAuth: TypeAlias = Literal["none", "optional", "required"]
"""Whether a listener asks its clients for a certificate, and whether it refuses those without."""
HANDSHAKE_S: Final = 10.0
"""The longest handshake; a peer that is silent for longer is dropped."""

_LOOK_S = 1.0
_ANY_PROTOCOL: tuple[str, ...] = ()
"""ALPN is not used."""
_ASKS = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


class ServerTrust(msgspec.Struct, frozen=True):
    """Which servers an HTTP client trusts, and what it shows them."""

    context: Callable[[], ssl.SSLContext]
    """Returns the context for the next connection."""
    remedy: str
    """What to do if a server's certificate is not trusted."""
    certificate: str = ""
    """The file of the certificate that the client shows; empty: it has none."""
    plain: bool = True
    """Whether the client may also use http:// URLs."""

    def refusal(self, peer: str, error: ssl.SSLError) -> str:
        """Say in words why the handshake with `peer` failed, and what to do."""
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return f"certificate verify failed for {peer}: {why}; {self.remedy}"
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"{peer} does not speak TLS; write http:// instead of https://, or start it so"
        return f"{peer}: the TLS handshake failed: {error.reason or error}"

    def refused(self, peer: str) -> str:
        """Say in words why `peer` may have closed a connection right after the handshake."""
        why = "it may ask for a certificate: set --tls-cert and --tls-key, for commands such as ask"
        why += " MOONSERVE_TLS_CERT and MOONSERVE_TLS_KEY"
        if self.certificate:
            why = f"it may not accept {self.certificate}, by its authority or its dates"
        return f"{peer}: closed after the TLS handshake, before a reply; {why}"


class TlsFiles(msgspec.Struct, frozen=True):
    """The PEM files of one process."""

    cert: Path
    """Its certificate, followed by those that lead to the authority, if there are any."""
    key: Path
    ca: Path | None = None
    """Certificates of the cluster's authority; None: clients of this process trust the system's."""

    def stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return what differs once a file has changed; None for a file that cannot be read."""
        return tuple(_stamp(it) for it in (self.cert, self.key, self.ca) if it is not None)


class Tls:
    """The identity of one process, and whom it trusts. Threads may share it.

    If a file changes, handshakes that begin a second later use the new one. If the new files are
    wrong, the old ones stay in use, and one line is logged.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError: a file cannot be read, or is no certificate or key."""
        self.files = files
        self._lock = threading.Lock()
        self._stamps = files.stamps()
        self._client = _client_context(files)
        self._servers = {_ANY_PROTOCOL: _server_context(files)}
        """By what clients may choose from by ALPN."""
        self._look_s = time.monotonic() + _LOOK_S

    def client(self) -> ssl.SSLContext:
        """Return the context for the next connection to a process of the cluster."""
        self._look()
        return self._client

    def server(self) -> ssl.SSLContext:
        """Return the context for the next connection of a process of the cluster.

        It accepts peers that have a certificate of the authority only.
        """
        self._look()
        return self._servers[_ANY_PROTOCOL]

    def listener(
        self, clients: ClientAuth = "required", protocols: tuple[str, ...] = _ANY_PROTOCOL
    ) -> ssl.SSLContext:
        """Return a context for a listener's whole life; its handshakes use the newest files.

        protocols: what clients may choose from by ALPN.
        """
        self._servers[protocols] = _server_context(self.files, protocols)
        context = _server_context(self.files, protocols)
        context.verify_mode = _ASKS[clients]
        # Without a name in the client's hello, OpenSSL calls this too.
        context.sni_callback = partial(self._renew, protocols)
        return context

    @property
    def trust(self) -> ServerTrust:
        """What HTTP clients need to call other processes of the cluster."""
        remedy = "set --tls-ca to the certificate of the authority that signed it"
        return ServerTrust(self.client, remedy, str(self.files.cert), plain=False)

    def _renew(
        self,
        protocols: tuple[str, ...],
        made: ssl.SSLSocket | ssl.SSLObject,
        name: str,
        old: ssl.SSLContext,
    ) -> None:
        """Give the newest certificates to a handshake; what it asks clients for stays."""
        self._look()
        made.context = self._servers[protocols]

    def _look(self) -> None:
        """Read the files again if they have changed; at most once a second, in one thread."""
        if time.monotonic() < self._look_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._look_s = time.monotonic() + _LOOK_S
            stamps = self.files.stamps()
            if stamps == self._stamps:
                return
            self._stamps = stamps
            client = _client_context(self.files)
            self._servers = {it: _server_context(self.files, it) for it in self._servers}
            self._client = client
            log.info("TLS: new connections use the new %s", self.files.cert)
        except ConfigError as error:
            log.error("TLS: the changed files are not used, the old ones stay in use: %s", error)
        finally:
            self._lock.release()


def trusting(ca: str) -> ServerTrust:
    """Trust engines that the authority in file `ca` has signed; "": those that the system trusts.

    Raises ConfigError.
    """
    if not ca:
        return SYSTEM
    context = _trusting(Path(ca), "engine_ca")
    return ServerTrust(lambda: context, SYSTEM.remedy)


@cache
def _system() -> ssl.SSLContext:
    return ssl.create_default_context()


SYSTEM: Final = ServerTrust(
    _system, "set --engine-ca to the certificate of the authority that signed it"
)
"""Trusts what the system trusts, as clients of public servers do."""
STRANGER: Final = ServerTrust(_system, "set --tls-dir, or --tls-cert, --tls-key and --tls-ca")
"""The same, of a process that calls others of its cluster and has no certificate."""


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    """A context that shows the certificate. Raises ConfigError."""
    context = ssl.create_default_context() if files.ca is None else _trusting(files.ca, "tls_ca")
    _load(context, files)
    return context


def _server_context(files: TlsFiles, protocols: tuple[str, ...] = _ANY_PROTOCOL) -> ssl.SSLContext:
    """A context that accepts certificates of the authority only. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if protocols:
        context.set_alpn_protocols([*protocols])
    _load(context, files)
    if files.ca is not None:
        with _reading(files.ca, "tls_ca"):
            context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _trusting(ca: Path, field: str) -> ssl.SSLContext:
    with _reading(ca, field):
        return ssl.create_default_context(cafile=str(ca))


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    for path, field in ((files.cert, "tls_cert"), (files.key, "tls_key")):
        with _reading(path, field):
            path.open("rb").close()  # the errors of load_cert_chain do not name the file
    with _reading(files.cert, "tls_cert", f" with the key {files.key}"):
        context.load_cert_chain(files.cert, files.key, _no_password)


@contextmanager
def _reading(path: Path, field: str, more: str = "") -> Iterator[None]:
    """Turn errors of reading a file into a ConfigError that names the field and the file."""
    try:
        yield
    except ssl.SSLError as error:
        why = "it must be a PEM file"
        if error.reason == "KEY_VALUES_MISMATCH":
            why = "they do not belong together"
        raise ConfigError(f"cannot use {path}{more}: {why}", field) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field) from None


def _no_password() -> NoReturn:
    raise ConfigError("is encrypted; write the key without a password", "tls_key")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
