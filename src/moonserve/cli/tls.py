"""`moonserve tls`: the cluster's private authority; and the TLS files of all other commands."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moonserve.config import Settings, load
from moonserve.core.errors import ConfigError

if TYPE_CHECKING:
    from moonserve.live.tls.contexts import ServerTrust, Tls

_REMEDY = "set MOONSERVE_TLS_CA to the certificate of the authority that signed it"


@click.group()
def tls() -> None:
    """Make the certificates of a cluster."""


@tls.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="Name or address at which a process of the cluster is reached, besides this machine's"
    " own; repeatable.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="How long the certificates are valid; the authority is for ten years.",
)
@click.option("--renew", is_flag=True, help="Make new certificates by the authority in FOLDER.")
@click.option("--force", is_flag=True, help="Replace all that is in FOLDER, the authority too.")
def init(folder: Path, hosts: tuple[str, ...], days: int, renew: bool, force: bool) -> None:
    """Make a private authority, and a certificate and a key for each role, in FOLDER.

    Every process that gets --tls-dir FOLDER speaks TLS only, and accepts other processes only by a
    certificate of this authority. Needs the extra `tls`.
    """
    from moonserve.live.tls.authority import ROLES
    from moonserve.live.tls.authority import init as make

    for path in make(folder, hosts, days=days, renew=renew, force=force):
        click.echo(f"wrote {path}")
    click.echo(
        f"\nOn this machine:     moonserve up --tls-dir {folder}\n"
        f"On other machines:   copy ca.crt and the .crt and .key of a role ({', '.join(ROLES)}),\n"
        "                     and give that folder as --tls-dir. Never copy ca.key.\n"
        f"For clients:         export MOONSERVE_TLS_CA={folder / 'ca.crt'}\n"
        f"                     curl --cacert {folder / 'ca.crt'} https://..."
    )


def scheme_of(settings: Settings) -> str:
    """The scheme of the URL of a process with these settings."""
    return "https" if settings.tls_dir or settings.tls_cert else "http"


def tls_of(settings: Settings, role: str) -> Tls | None:
    """The certificate of a process with this role, and whom it trusts; None: it has no TLS.

    Raises ConfigError.
    """
    from moonserve.live.tls.authority import CA, cert_of, key_of
    from moonserve.live.tls.contexts import Tls, TlsFiles

    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_ca
    if settings.tls_dir:
        folder = Path(settings.tls_dir)
        if not cert:
            cert, key = str(cert_of(folder, role)), str(key_of(folder, role))
        ca = ca or str(cert_of(folder, CA))
    if not cert:
        return None
    return Tls(TlsFiles(Path(cert), Path(key), Path(ca) if ca else None))


def curve_of(settings: Settings) -> str:
    """The folder with the keys of encrypted KV events; empty: there is none."""
    from moonserve.live.tls.authority import EVENTS

    by_folder = str(Path(settings.tls_dir) / EVENTS) if settings.tls_dir else ""
    return settings.kv_events_curve or by_folder


def member_tls(settings: Settings, role: str) -> Tls | None:
    """As `tls_of`, for a process that other processes of the cluster call. Raises ConfigError."""
    found = tls_of(settings, role)
    if found is None and settings.tls_ca:
        raise ConfigError("needs a certificate: set tls_cert and tls_key too", "tls_ca")
    if found is not None and found.files.ca is None:
        why = "processes of a cluster accept each other by their authority: set tls_ca too"
        raise ConfigError(why, "tls_cert")
    return found


def client_trust(url: str) -> ServerTrust:
    """Which servers a command trusts at this URL: those of the authority that the environment
    names, or those that the system trusts.

    Raises ConfigError.
    """
    from moonserve.live.tls.contexts import SYSTEM, ServerTrust

    if not url.startswith("https:"):
        return SYSTEM
    settings = load(None, os.environ, {})
    found = tls_of(settings, "client")
    if found is not None:
        return ServerTrust(found.client, _REMEDY, str(found.files.cert))
    context = ssl.create_default_context(cafile=settings.tls_ca or None)
    return ServerTrust(lambda: context, _REMEDY)
