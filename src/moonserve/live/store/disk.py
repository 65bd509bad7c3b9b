"""A segment on disk: a folder that outlives its owner, with all objects that are whole.

live.store.client mounts it beside the segment in memory. The folder has `data`, the segment's
bytes, mapped like memory; `journal`, which objects are where, appended to and rewritten when it has
grown; and `lock`, held while a process owns the folder.

Only this user can read the folder and its files: they have the KV of all clients.

The bytes of a copy are on the disk before the journal has the object (sync, then append). So all
objects of the journal are whole even after a power failure, except those overwritten meanwhile.
Therefore opening reads everything and keeps the objects whose checksum is right. The journal itself
is synced only when it is rewritten: what it loses in a crash is lost from the pool, and never
wrong.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.core.store.words import ALIGN, Change, Held, Key
from moonserve.core.units import Bytes
from moonserve.live.transfer.region import HEADER_BYTES, IDENTITY_BYTES, Region, lock_file

log = logging.getLogger(__name__)

_MAGIC = b"moonserve-disk-1"
_HEAD = struct.Struct("<IQ")  # length and XXH3-64 of a record
_ROOM_TO_GROW: Bytes = 1 << 20
_RETRY_S = 5.0
_TOO_LARGE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Change).decode


class DiskRegion(Region):
    """The mapped `data`. It has no name, so peers on this host reach it through its owner."""

    def __init__(self, path: Path, size: Bytes, lock_fd: int) -> None:
        """Map the file, made or resized to `size` with the header. Takes `lock_fd` over.

        Raises OSError; the file is then as it was before.
        """
        self._disk_lock_fd = lock_fd
        self._data_fd = fd = _open_own(path)
        before = os.fstat(fd)
        try:
            head = os.pread(fd, len(_MAGIC), 0)
            if any(head) and head != _MAGIC:  # an older version wrote zeros
                raise OSError(errno.EEXIST, "its file data is another program's")
            disk = os.fstatvfs(fd)
            free = disk.f_bavail * disk.f_frsize
            # asked before, since allocating fills the disk first
            if size - before.st_blocks * 512 > free:
                raise OSError(errno.ENOSPC, f"the disk has {free} free")
            if size > before.st_size:
                os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)  # else a full disk ends the process by SIGBUS later
            mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            os.ftruncate(fd, size)  # after mapping, so that nothing is lost if mapping fails
        except OSError:
            os.ftruncate(fd, before.st_size)  # give back what was taken of a disk that is too small
            os.close(fd)
            raise
        mapped[: len(_MAGIC)] = _MAGIC
        identity = secrets.token_bytes(IDENTITY_BYTES)
        super().__init__(path, identity, mapped, None)

    @property
    def name(self) -> str:
        """Empty: no other process can map it."""
        return ""

    def flush(self) -> None:
        """Return once all bytes are on the disk.

        Not by mmap.flush, which holds the interpreter's lock for as long as the disk takes.
        """
        getattr(os, "fdatasync", os.fsync)(self._data_fd)  # macOS has no fdatasync

    def close(self) -> None:
        """Unmap, and let other processes own the folder. A second call does nothing."""
        super().close()
        if self._disk_lock_fd >= 0:
            os.close(self._data_fd)
            os.close(self._disk_lock_fd)
            self._disk_lock_fd = -1


class DiskJournal:
    """The Journal of one folder; see Owner. Only one process may use it.

    A thread of its own writes, so a busy disk delays nothing else.
    """

    def __init__(self, path: Path, region: DiskRegion) -> None:
        """Read the journal, keep the objects that are whole, and rewrite it with them."""
        self._path = path
        self._region = region
        self.held: dict[Key, Held] = {}
        """The objects in the journal. After the first write, only the thread uses it."""
        for change in _records(path):
            self._apply(change)
        recorded = len(self.held)
        self.held = {key: it for key, it in self.held.items() if self._is_whole(it)}
        if recorded:
            level = logging.INFO if recorded == len(self.held) else logging.WARNING
            log.log(level, "%s: %d of %d objects are whole", path.parent, len(self.held), recorded)
        self._file: BinaryIO | None = None
        self._written = self._limit = 0
        self._retry_s = 0.0
        self._rewrite()
        self._writer = ThreadPoolExecutor(1, "kv-journal")

    def _is_whole(self, it: Held) -> bool:
        end = it.offset + it.size
        memory = self._region.view[it.offset : end]
        return len(memory) == it.size and xxhash.xxh3_64_intdigest(memory) == it.checksum

    def _apply(self, change: Change) -> None:
        known = self.held.get(change.key)
        if known is not None and known.id > change.id:
            return
        if isinstance(change, Held):
            self.held[change.key] = change
        elif known is not None:
            del self.held[change.key]

    def write(self, changes: Sequence[Change]) -> None:
        """Write changes in order, soon. If that fails, see _note."""
        with contextlib.suppress(RuntimeError):  # closed: nothing more is written
            self._writer.submit(self._note, list(changes))

    def _note(self, changes: Sequence[Change]) -> None:
        """Apply and append changes.

        If the disk is full, the journal is deleted, since an old one would bring removed objects
        back. It is rewritten once there is room again.
        """
        for change in changes:
            self._apply(change)
        try:
            if self._file is not None:
                self._append(changes)
            if self._written > self._limit or self._is_due():
                self._rewrite()
        except OSError as error:
            why = "until it can be written, a restart loses the objects of this segment"
            log.error("%s: %s: %s", self._path, error.strerror, why)
            self._forget()

    def _is_due(self) -> bool:
        return self._file is None and time.monotonic() >= self._retry_s

    def _forget(self) -> None:
        self._close_file()
        self._retry_s = time.monotonic() + _RETRY_S
        for path in (self._path, self._fresh):
            path.unlink(missing_ok=True)

    def _append(self, changes: Iterable[Change]) -> None:
        assert self._file is not None
        data = b"".join(map(_record, changes))
        self._file.write(data)
        self._file.flush()
        self._written += len(data)

    @property
    def _fresh(self) -> Path:
        return self._path.with_suffix(".new")

    def _rewrite(self) -> None:
        """Replace the journal by one of all objects held. A power failure leaves the old or the new
        one.

        May raise OSError.
        """
        self._close_file()
        self._fresh.unlink(missing_ok=True)
        self._file = os.fdopen(_open_own(self._fresh), "wb")
        self._file.write(_MAGIC)
        self._written = 0
        self._append(self.held.values())
        os.fsync(self._file.fileno())
        self._fresh.replace(self._path)
        self._limit = 2 * self._written + _ROOM_TO_GROW

    def flush(self, held: Sequence[Held]) -> None:
        """Return once the bytes of these objects are on the disk."""
        if held:
            self._region.flush()

    def close(self) -> None:
        """Write all that is waiting, and nothing after it."""
        self._retry_s = 0.0
        self._writer.submit(self._note, [])
        self._writer.shutdown()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def open_disk(folder: Path, capacity_bytes: Bytes) -> tuple[DiskRegion, DiskJournal]:
    """Own a folder, made if it does not exist, and read all that it holds.

    Raises ConfigError, and then leaves no new file behind.
    """
    size = HEADER_BYTES + -(-capacity_bytes // ALIGN) * ALIGN
    files = [folder / name for name in ("data", "journal.new", "journal", "lock")]
    absent = [it for it in (*files, folder, *folder.parents) if not os.path.lexists(it)]
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        lock_fd = _open_own(folder / "lock")
    except OSError as error:
        raise _no_folder(folder, error) from None
    if not lock_file(lock_fd, folder / "lock"):
        os.close(lock_fd)
        raise ConfigError(f"{folder} belongs to a process that runs", "disk_dir")
    try:
        region = DiskRegion(folder / "data", size, lock_fd)
    except OSError as error:
        _remove(absent)
        os.close(lock_fd)
        if error.errno not in _TOO_LARGE:
            raise _no_folder(folder, error) from None
        raise ConfigError(
            f"{folder}: no room for {size} bytes: {error.strerror}", "disk_bytes"
        ) from None
    try:
        return region, DiskJournal(folder / "journal", region)
    except OSError as error:
        _remove(absent)
        region.close()
        raise _no_folder(folder, error) from None


def _open_own(path: Path) -> int:
    """Open a file of the folder, made if it does not exist; never by a link of another user."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _no_folder(folder: Path, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    return ConfigError(f"{folder}: {why}; choose a folder that can be written", "disk_dir")


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _record(change: Change) -> bytes:
    payload = _encode(change)
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _records(path: Path) -> Iterator[Change]:
    """Read the changes in a journal, up to its first incomplete record."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            log.warning("%s is of another version: the objects of its segment are dropped", path)
            return
        size = path.stat().st_size
        whole = len(_MAGIC)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            # the length of an incomplete record may be anything
            payload = file.read(min(length, size))
            if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != checksum:
                break
            try:
                yield _decode(payload)
            except UNREADABLE:
                break
            whole = file.tell()
    if whole < size:
        log.warning(
            "%s ends with an incomplete record: its last %d bytes are dropped", path, size - whole
        )
