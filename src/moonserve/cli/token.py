"""The cluster's token, as commands find it: MOONSERVE_TOKEN, or a file of this user.

The first process that needs a token and finds none draws one and writes it to the file, which only
this user may read. So all commands and processes of one user on one machine have the same token
without a setting. Processes on other machines, or of other users, need MOONSERVE_TOKEN. The token
is no setting, so that no settings file and no argv contains it; no command prints it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from moonserve.config import ENV_PREFIX
from moonserve.core.errors import ConfigError

TOKEN = ENV_PREFIX + "TOKEN"
"""The environment variable with the token."""
API_KEY = ENV_PREFIX + "API_KEY"
"""The environment variable with an API key, for users who do not have the token."""
_SHORT = 16
"""A token with fewer characters may be guessed."""


def read_token() -> str:
    """Return MOONSERVE_TOKEN; "": it is not set.

    Raises ConfigError if no HTTP header can carry it.
    """
    token = os.environ.get(TOKEN, "")
    if not token.isprintable() or any(ord(it) > 255 for it in token):
        raise ConfigError(f"{TOKEN} has characters beyond Latin-1 or unprintable ones", "token")
    return token


def token_file() -> Path:
    """Return the file with this user's token: moonserve/token in the user's state folder."""
    xdg = os.environ.get("XDG_STATE_HOME", "")
    root = Path(xdg) if xdg.startswith("/") else Path.home() / ".local" / "state"
    return root / "moonserve" / "token"


def member_token(tell: Callable[[str], None], host: str, *calls: str) -> str:
    """Return the token of a worker, segment or master that listens on `host`.

    calls: URLs that it will call with the token. Raises ConfigError if other machines take part and
    MOONSERVE_TOKEN is not set: it must be the same there.
    """
    from moonserve.live.http.auth import is_loopback

    if not read_token():
        if not is_loopback(host):
            raise ConfigError(f"bound to {host}, so other machines call it: set {TOKEN}", "token")
        for url in calls:
            if not _is_here(url):
                raise ConfigError(
                    f"set {TOKEN} to the token of {url}, which is on another machine", "token"
                )
    return own_token(tell)


def own_token(tell: Callable[[str], None]) -> str:
    """Return the token of a process that starts now: MOONSERVE_TOKEN, or this user's.

    tell: called with one line that says where the token comes from. Raises ConfigError if the file
    cannot be trusted.
    """
    if token := read_token():
        if len(token) < _SHORT:
            tell(
                f"{TOKEN} has only {len(token)} characters and may be guessed; take a random one,"
                " for example from `openssl rand -hex 32`"
            )
        return token
    file = token_file()
    try:
        found = _read(file)
        if found is None:
            _draw(file)
            found = _read(file)
    except OSError as error:
        tell(
            f"{TOKEN} is not set, and {file} cannot be written ({error.strerror}): no other process"
            f" knows the token of this one; set {TOKEN}"
        )
        return secrets.token_urlsafe(32)
    assert found is not None, "it was just written"
    tell(
        f"{TOKEN} is not set: using the token in {file}; commands of this user on this machine find"
        f" it there, all others need it as {TOKEN}"
    )
    return found


def token_for(url: str) -> str:
    """Return the token to send to a URL; "": none. This user's token stays on this machine."""
    if token := read_token():
        return token
    try:
        return (_read(token_file()) if _is_here(url) else None) or ""
    except OSError:
        return ""


def credential_for(url: str) -> str:
    """Return what a command sends to a gateway: the token, or MOONSERVE_API_KEY; "": nothing."""
    return token_for(url) or os.environ.get(API_KEY, "")


def _is_here(url: str) -> bool:
    from moonserve.live.http.auth import is_loopback

    try:
        return is_loopback(urlsplit(url if "//" in url else f"//{url}").hostname or "")
    except ValueError:
        return True  # it is no URL, which will be reported when it is used


def _read(file: Path) -> str | None:
    """Return the token in the file; None: there is no file. Raises ConfigError, OSError."""
    try:
        with file.open() as opened:
            found = os.fstat(opened.fileno())
            token = opened.read().strip()
    except FileNotFoundError:
        return None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{file} must belong to this user alone: chmod 600 it, or remove it and a new token is"
            " drawn",
            "token",
        )
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{file} has no token in it: remove it, and one is drawn", "token")
    return token


def _draw(file: Path) -> None:
    """Write a new token, unless another process has just done so. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".token-") as new:  # of mode 600
        new.write(secrets.token_urlsafe(32) + "\n")
        new.flush()
        with contextlib.suppress(FileExistsError):
            os.link(new.name, file)
