"""The private authority of a cluster: makes its certificate, and one per role.

It also makes the keys of encrypted KV events. `moonserve tls init` calls it, and so do tests. The
package cryptography, the extra `tls`, makes the keys and signs. Keys are elliptic (P-256), files
are PEM, and only their owner may read keys.

What never happens here: an existing file is overwritten unless the caller asks for it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonserve.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName, KeyUsage, Name

ROLES: Final = ("gateway", "worker", "store", "etcd", "client")
"""Each has a certificate of its own. A client never listens: its certificate is none of a server.
"""
CA: Final = "ca"
"""The authority's own certificate and key are in files of this name."""
EVENTS: Final = "events"
"""The folder of the keys of KV events; live.kvevents.curve reads them."""
LOCAL: Final = ("localhost", "127.0.0.1", "::1")
"""The names of this machine, which every certificate has."""
_AUTHORITY_DAYS = 3650
_BEFORE = datetime.timedelta(hours=1)  # for clocks that are late


def cert_of(folder: Path, role: str) -> Path:
    """The file of a role's certificate, or of the authority's."""
    return folder / f"{role}.crt"


def key_of(folder: Path, role: str) -> Path:
    """The file of a role's key, or of the authority's."""
    return folder / f"{role}.key"


def init(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    days: int = 365,
    renew: bool = False,
    force: bool = False,
) -> list[Path]:
    """Make the authority and the certificates of all roles; return the files.

    hosts: names and addresses of servers, beside those of this machine. renew: keep the authority
    that is there. force: replace everything that is there. Raises ConfigError.
    """
    _require()
    names = _names(hosts)
    files = [at for role in (CA, *ROLES) for at in (cert_of(folder, role), key_of(folder, role))]
    there = [it for it in files if it.exists()]
    if there and not (renew or force):
        raise ConfigError(
            f"{there[0]} exists; --renew makes new certificates by the same authority, --force a"
            " new authority too",
            "folder",
        )
    _make_folder(folder)
    if renew and not force:
        authority, authority_key = _read_authority(folder)
    else:
        authority, authority_key = _make_authority()
        _write(folder, CA, authority, authority_key)
    for role in ROLES:
        key = _new_key()
        made = _sign(role, names, days, key, authority, authority_key)
        _write(folder, role, made, key)
    return files + _make_event_keys(folder / EVENTS, force)


def _make_event_keys(folder: Path, force: bool) -> list[Path]:
    """Make the keys of publisher and subscriber, unless they are there; return the files.

    Raises ConfigError.
    """
    from zmq.auth import create_certificates

    _make_folder(folder)
    files: list[Path] = []
    for side in ("publisher", "subscriber"):
        secret = folder / f"{side}.key_secret"
        if not secret.exists() or force:
            secret.touch(mode=0o600)
            files += map(Path, create_certificates(folder, side))
    return files


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "making certificates needs the package cryptography: pip install 'moonserve[tls]'",
            "tls",
        ) from None


def _names(hosts: Sequence[str]) -> list[GeneralName]:
    """The subject alternative names: each is an address or a DNS name. Raises ConfigError."""
    from cryptography import x509

    names: list[GeneralName] = []
    for host in dict.fromkeys((*LOCAL, *hosts)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        except ValueError:
            pass
        if not host.isascii() or not host or any(it in host for it in " :/@"):
            raise ConfigError(f"write a name or an address, such as 10.0.0.5, not {host!r}", "host")
        names.append(x509.DNSName(host))
    return names


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _named(name: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"moonserve {name}")])


def _make_authority() -> tuple[Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    now = datetime.datetime.now(datetime.UTC)
    public = key.public_key()
    made = (
        x509.CertificateBuilder()
        .subject_name(_named("authority"))
        .issuer_name(_named("authority"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return made, key


def _sign(
    role: str,
    names: Sequence[GeneralName],
    days: int,
    key: EllipticCurvePrivateKey,
    authority: Certificate,
    authority_key: EllipticCurvePrivateKey,
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.UTC)
    end = min(now + datetime.timedelta(days=days), authority.not_valid_after_utc)
    public = key.public_key()
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role != "client":
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_named(role))
        .issuer_name(authority.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now - _BEFORE, end - _BEFORE))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(signer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _usage(signs: bool) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _read_authority(folder: Path) -> tuple[Certificate, EllipticCurvePrivateKey]:
    """Raises ConfigError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        made = x509.load_pem_x509_certificate(cert_of(folder, CA).read_bytes())
        key = serialization.load_pem_private_key(key_of(folder, CA).read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}", "folder") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder} has no authority that can sign: {error}", "folder") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_of(folder, CA)} is no key of `moonserve tls init`", "folder")
    return made, key


def _make_folder(folder: Path) -> None:
    """Only its owner may enter it. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}", "folder") from None


def _write(folder: Path, role: str, made: Certificate, key: EllipticCurvePrivateKey) -> None:
    """Write key and certificate, each as a whole. Raises ConfigError."""
    from cryptography.hazmat.primitives import serialization

    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _replace(key_of(folder, role), secret, 0o600)
    _replace(cert_of(folder, role), made.public_bytes(serialization.Encoding.PEM), 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "folder") from None
