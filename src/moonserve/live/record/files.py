"""The files of a recording: gzip members of JSON lines, begun anew by size and age, within a bound.

One thread of the recorder writes. Every batch of rows is one gzip member and one write, so a file
can be read at any time, also after its process was killed. A folder may have the files of several
processes. Only files with the names of recordings are ever deleted.
"""

from __future__ import annotations

import gzip
import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

from moonserve.core.errors import ConfigError
from moonserve.core.schedule.recorded import CLUSTER_FILE
from moonserve.core.units import Bytes

SUFFIX = ".jsonl.gz"
_PREFIX = "requests-"
_FILE_BYTES: Bytes = 64 << 20
_FILE_S = 3_600.0
_FILE_SHARE = 8
"""A file has at most this part of the bound, so that the oldest rows go in small portions."""


def folder_of(setting: str) -> Path:
    """The folder that the setting `record` names."""
    return Path(setting).expanduser()


def make_folder(folder: Path, what: str = "recordings", setting: str = "record") -> None:
    """Make sure that such files can be written there. Raises ConfigError with the setting."""
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have the same id in its container
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{folder}: {what} cannot be written there: {why}; name another folder", setting
        ) from None


class RecordingFiles:
    """Appends rows to the newest file of a folder."""

    def __init__(self, folder: Path, most_bytes: Bytes) -> None:
        """most_bytes: of all recordings in the folder; the oldest are deleted."""
        self.folder = folder
        self.path: Path | None = None
        """The file that is written now."""
        self.written_bytes: Bytes = 0
        """In all files, since the start."""
        self._most_bytes = most_bytes
        self._file_bytes = min(_FILE_BYTES, most_bytes // _FILE_SHARE)
        self._fd: int | None = None
        self._size: Bytes = 0
        self._began_s = 0.0
        self._count = itertools.count()

    def append(self, lines: bytes) -> None:
        """Write whole lines. Raises OSError; then none of them is in the file."""
        member = gzip.compress(lines, 6)
        if self._fd is not None and (self._is_full(len(member)) or self._is_deleted(self._fd)):
            self.close()
        if self._fd is None:
            self._open()
            self._drop_oldest(len(member))
        fd, left = self._fd, memoryview(member)
        assert fd is not None
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            with suppress(OSError):  # a broken member would make the rest of the file unreadable
                os.ftruncate(fd, self._size)
            if not self._size and self.path is not None:
                self.path.unlink(missing_ok=True)
            self.close()
            raise
        self._size += len(member)
        self.written_bytes += len(member)

    def put_cluster(self, text: bytes) -> None:
        """Replace what the recording says of the cluster. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.folder / f".{os.getpid()}.cluster"
        new.write_bytes(text)
        new.replace(self.folder / CLUSTER_FILE)

    def close(self) -> None:
        """The next rows go to another file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _is_full(self, more: Bytes) -> bool:
        too_large = self._size > 0 and self._size + more > self._file_bytes
        return too_large or time.monotonic() - self._began_s > _FILE_S

    @staticmethod
    def _is_deleted(fd: int) -> bool:
        """Whether somebody has deleted the file: another process whose bound it went over, or an
        operator."""
        return os.fstat(fd).st_nlink == 0

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{_PREFIX}{at}-{os.getpid()}-{next(self._count):04}{SUFFIX}"
        path = self.folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self.path = path
        self._size = 0
        self._began_s = time.monotonic()

    def _drop_oldest(self, coming: Bytes) -> None:
        """Delete the oldest files, so that a file of the largest size fits."""
        files = sorted(self.folder.glob(f"{_PREFIX}*{SUFFIX}"))
        sizes = {path: path.stat().st_size for path in files if path != self.path}
        total = sum(sizes.values()) + max(self._file_bytes, coming)
        for path, size in sizes.items():
            if total <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
