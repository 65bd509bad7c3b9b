"""Paths of unix sockets: both ends check them, and the server's end binds them.

`http.server` and fronts call it. Nothing here accepts a connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys

from moonserve.core.errors import ConfigError

_MOST_BYTES = 103 if sys.platform == "darwin" else 107
"""Of a path; the kernel keeps no longer one."""


def check_socket_path(path: str, setting: str) -> None:
    """Raise ConfigError if no socket can be at this path, now or later."""
    size = len(os.fsencode(path))
    if size > _MOST_BYTES:
        raise ConfigError(
            f"has {size} bytes, and the path of a unix socket has at most {_MOST_BYTES}; choose a"
            " shorter path",
            setting,
        )
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(
                f"{path} is there and is no socket; remove it, or choose another path", setting
            )


def bound(path: str, setting: str) -> socket.socket:
    """A socket that is bound to this path, which only this user may use.

    A socket that a killed process has left is replaced. Raises ConfigError, also if another process
    listens there; `setting` is the name of the path's setting.
    """
    check_socket_path(path, setting)
    held = socket.socket(socket.AF_UNIX)
    try:
        if _listens(path):
            raise ConfigError(
                f"another process listens at {path}; stop it, or choose another path", setting
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        held.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before it listens
    except OSError as error:
        held.close()
        raise ConfigError(
            f"cannot listen at {path}: {error.strerror or error}; choose a path in a folder that"
            " is there and that this user may change",
            setting,
        ) from None
    except ConfigError:
        held.close()
        raise
    return held


def _listens(path: str) -> bool:
    """Whether a process accepts connections at this unix socket. Raises OSError: it cannot be."""
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
