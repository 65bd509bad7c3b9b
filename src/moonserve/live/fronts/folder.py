"""The folder with the sockets of one gateway's processes: made, locked, and removed at the end.

The supervisor holds a lock on it for life. The lock ends with the process, however it ends. So an
unlocked folder is one of a supervisor that was killed, and the next supervisor removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moonserve.live.transfer.region import lock_file

_PREFIX = "moonserve-link-"
_NAME = re.compile(_PREFIX + "[a-z0-9_]{8}")


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end. Raises OSError."""
    _clear()
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if lock_file(fd, path):
            break
        os.close(fd)  # a supervisor that starts just now took it for an old one
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _clear() -> None:
    """Remove this user's folders whose supervisors are dead."""
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or not accessible
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid() and lock_file(fd, path):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
