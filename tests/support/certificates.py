"""Certificates for tests, made by the code of `moonserve tls init`."""

from __future__ import annotations

from pathlib import Path

from moonserve.live.tls.authority import CA, cert_of, key_of
from moonserve.live.tls.contexts import Tls, TlsFiles


def tls_of(folder: Path, role: str) -> Tls:
    """The TLS of a process with this role, by the files in the folder."""
    return Tls(TlsFiles(cert_of(folder, role), key_of(folder, role), cert_of(folder, CA)))
