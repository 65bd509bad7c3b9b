"""The folder in which the processes of one gateway meet: made, held, and cleared away.

Its supervisor holds a lock on it for life. The lock goes with the process, however it dies, so a
folder that nobody locks is one of a supervisor that was killed: the next one removes it.
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
    """A folder that only this user may enter, and that is gone at the end. Raises OSError."""
    _clear()
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if lock_file(fd, path):
            break
        os.close(fd)  # another supervisor, which starts just now, took it for one left behind
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
        except OSError:  # gone meanwhile, or not ours to open
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid() and lock_file(fd, path):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
