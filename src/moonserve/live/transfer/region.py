"""Regions: the shared memory of one segment. Its owner creates it; other processes attach to it.

A region is a file in memory (in /dev/shm, or in the temporary folder if that is missing or too
small): one page of header, then the segment's bytes. The header has the region's random identity.

The owner holds an exclusive flock on the file while it lives. However the process dies, the lock
ends with it, so a region without a lock has no owner. Every start runs `clean_stale`, which removes
such regions. (Process ids cannot do this: containers may share /dev/shm but not process ids.)
multiprocessing.shared_memory is not used: before Python 3.13 its tracker unlinks the segments of
other processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import ALIGN
from moonserve.core.units import Bytes

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
"""One page, so that the data also starts on a page."""
IDENTITY_BYTES = 16
_MAGIC = b"moonserve-kv-1\0\0"
_ROOT = 0
_PREFIX = "moonserve-kv-"
_NAME = re.compile(r"moonserve-kv-[0-9]+-[0-9a-f]{16}")
_MAP_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)  # Linux: no page faults during copies


def folders() -> list[Path]:
    """Return the folders for regions, best first."""
    candidates = [Path("/dev/shm")]
    with contextlib.suppress(FileNotFoundError):  # its file system has no room for any file
        candidates.append(Path(tempfile.gettempdir()))
    return [folder for folder in candidates if folder.is_dir()]


class Region:
    """A mapped region; `view` is the segment's bytes (format "B"). Use `create` or `attach`."""

    def __init__(self, path: Path, identity: bytes, mapped: mmap.mmap, lock_fd: int | None) -> None:
        self.path = path
        self.identity = identity
        self.view = memoryview(mapped)[HEADER_BYTES:]
        self._mapped = mapped
        self._lock_fd = lock_fd

    @staticmethod
    def header(identity: bytes) -> bytes:
        """Return the first bytes of the page before the data."""
        return _MAGIC + identity

    @property
    def name(self) -> str:
        """The name of the file, which an Address carries."""
        return self.path.name

    @classmethod
    def create(cls, capacity_bytes: Bytes) -> Region:
        """Make a region and reserve its memory now. Raises ConfigError if there is not enough."""
        clean_stale()
        size = HEADER_BYTES + -(-capacity_bytes // ALIGN) * ALIGN
        tried: list[str] = []
        for folder in folders():
            free = os.statvfs(folder)
            if free.f_bavail * free.f_frsize < size:
                tried.append(f"{folder} has {free.f_bavail * free.f_frsize} bytes free")
                continue
            try:
                region = cls._create_in(folder, size)
            except OSError as error:
                tried.append(f"{folder}: {error.strerror}")
                continue
            if tried:
                log.warning(
                    "a segment of %d MiB is in %s, with that folder's speed, since %s; give the"
                    " machine or container more shared memory (docker run --shm-size)",
                    size >> 20,
                    folder,
                    "; ".join(tried),
                )
            return region
        raise ConfigError(
            f"there are no {size} bytes of shared memory ({'; '.join(tried)}); use a smaller "
            "segment, or give the machine or container more (docker run --shm-size)",
            "segment_bytes",
        )

    @classmethod
    def _create_in(cls, folder: Path, size: Bytes) -> Region:
        while True:
            path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if lock_file(fd, path):
                break
            os.close(fd)  # another process removed the file as stale before it was locked
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)  # otherwise a full tmpfs causes SIGBUS later
            else:  # pragma: no cover - macOS
                os.ftruncate(fd, size)
            mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | _MAP_POPULATE)
        except OSError:
            os.unlink(path)
            os.close(fd)
            raise
        identity = secrets.token_bytes(IDENTITY_BYTES)
        mapped[: len(_MAGIC) + IDENTITY_BYTES] = cls.header(identity)
        return cls(path, identity, mapped, fd)

    @classmethod
    def attach(cls, name: str, identity: bytes) -> Region | None:
        """Map another process's region; None: it is not on this host, its identity differs, or it
        is of another user, who could shorten the file while it is mapped here."""
        if not _NAME.fullmatch(name):
            return None
        for folder in folders():
            try:
                fd = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.fstat(fd).st_uid not in (os.geteuid(), _ROOT):
                    continue
                if os.pread(fd, len(_MAGIC) + IDENTITY_BYTES, 0) != cls.header(identity):
                    continue
                mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _MAP_POPULATE)
            except (OSError, ValueError):  # ValueError: the file is still empty
                continue
            finally:
                os.close(fd)
            return cls(folder / name, identity, mapped, None)
        return None

    def close(self) -> None:
        """Unlink the file if this process owns it, and unmap it; a second call does nothing.

        The mapping stays as long as a slice of `view` exists.
        """
        if self._lock_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None
        self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()


def clean_stale() -> int:
    """Remove this user's regions whose owners are dead; return how many."""
    removed = 0
    for path in _ours():
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            if lock_file(fd, path):
                path.unlink(missing_ok=True)
                removed += 1
        finally:
            os.close(fd)
    if removed:
        log.info("removed the shared memory of %d dead segment owners", removed)
    return removed


def _ours() -> Iterator[Path]:
    for folder in folders():
        with contextlib.suppress(OSError):  # no descriptor is left to read the folder
            yield from (folder / name for name in os.listdir(folder) if _NAME.fullmatch(name))


def lock_file(fd: int, path: Path) -> bool:
    """Lock the file; False: another process has the lock, or `path` names another file now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False
