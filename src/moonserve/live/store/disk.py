"""A segment on disk: a folder that outlives its owner, with what lay there whole.

For live.store.client, which mounts it beside the segment in memory. In the folder are `data`, the
segment's bytes, mapped as memory is; `journal`, what lies where, appended to and rewritten when it
has grown; and `lock`, held while somebody owns it.

A copy's bytes are on the disk before the journal tells of it (sync, then append), so that what the
journal tells is whole even after a power failure, but for what was overwritten meanwhile. Hence
opening it reads everything and keeps what still has its checksum. The journal itself is not synced,
but at the start: what it loses with the machine is lost from the pool, never wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from moonserve.core.errors import ConfigError
from moonserve.core.pool import Change, Held, Key
from moonserve.core.segments import ALIGN
from moonserve.core.units import Bytes
from moonserve.live.transfer.region import HEADER_BYTES, IDENTITY_BYTES, Region

log = logging.getLogger(__name__)

_MAGIC = b"moonserve-disk-1"
_HEAD = struct.Struct("<IQ")  # length and XXH3-64 of a record
_ROOM_TO_GROW: Bytes = 1 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Change).decode


class DiskRegion(Region):
    """The mapped `data`. It has no name: peers on this host reach it by its owner as others do."""

    def __init__(self, path: Path, size: Bytes, lock_fd: int) -> None:
        """Map the file, made or resized to `size` with the header. Takes `lock_fd` over."""
        self._disk_lock_fd = lock_fd
        self._data_fd = fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        before = os.fstat(fd).st_size
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)  # else a full disk is a SIGBUS later
            mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except OSError:
            os.ftruncate(fd, before)  # what was taken of a disk that is too small
            os.close(fd)
            raise
        identity = secrets.token_bytes(IDENTITY_BYTES)
        super().__init__(path, identity, mapped, None)

    @property
    def name(self) -> str:
        """None that others could map it by."""
        return ""

    def flush(self) -> None:
        """Return once all bytes are on the disk.

        Not by mmap.flush, which holds the interpreter's lock for as long as the disk takes.
        """
        getattr(os, "fdatasync", os.fsync)(self._data_fd)  # macOS has the latter only

    def close(self) -> None:
        """Unmap, and let others own the folder; a second call does nothing."""
        super().close()
        if self._disk_lock_fd >= 0:
            os.close(self._data_fd)
            os.close(self._disk_lock_fd)
            self._disk_lock_fd = -1


class DiskJournal:
    """The Journal of one folder; see Owner. Not to be used by two."""

    def __init__(self, path: Path, region: DiskRegion) -> None:
        """Read what the journal tells, keep what is whole, and write that anew."""
        self._path = path
        self._region = region
        self.held: dict[Key, Held] = {}
        for change in _records(path):
            self._apply(change)
        told = len(self.held)
        self.held = {key: it for key, it in self.held.items() if self._is_whole(it)}
        if told:
            log.info("%s: %d of %d objects are whole", path.parent, len(self.held), told)
        self._file: BinaryIO | None = None
        self._written = self._limit = 0
        self._rewrite(sync=True)

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
        """Note what changed, in order. What cannot be noted is not kept, and that is logged."""
        for change in changes:
            self._apply(change)
        if self._file is None:
            return
        try:
            self._append(changes)
            if self._written > self._limit:
                self._rewrite()
        except OSError as error:
            log.error("%s: no more is noted: %s", self._path, error)
            self.close()

    def _append(self, changes: Sequence[Change]) -> None:
        assert self._file is not None
        data = b"".join(map(_record, changes))
        self._file.write(data)
        self._file.flush()
        self._written += len(data)

    def _rewrite(self, *, sync: bool = False) -> None:
        """Begin the journal anew with what is held.

        `sync`, which blocks: a power failure soon after leaves it or the old one whole.
        """
        fresh = self._path.with_suffix(".new")
        self.close()
        self._file = fresh.open("wb")
        self._file.write(_MAGIC)
        self._written = 0
        self._append(list(self.held.values()))
        if sync:
            os.fsync(self._file.fileno())
        fresh.replace(self._path)
        self._limit = 2 * self._written + _ROOM_TO_GROW

    def flush(self, held: Sequence[Held]) -> None:
        """Return once the bytes of these are on the disk."""
        if held:
            self._region.flush()

    def close(self) -> None:
        """Note no more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def open_disk(folder: Path, capacity_bytes: Bytes) -> tuple[DiskRegion, DiskJournal]:
    """Own a folder, made if need be. Reads all that it holds. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", "disk_dir") from None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise ConfigError(f"{folder} belongs to a process that runs", "disk_dir") from None
    size = HEADER_BYTES + -(-capacity_bytes // ALIGN) * ALIGN
    try:
        region = DiskRegion(folder / "data", size, lock_fd)
    except OSError as error:
        os.close(lock_fd)
        raise ConfigError(
            f"{folder}: no room for {size} bytes: {error.strerror}", "disk_bytes"
        ) from None
    try:
        return region, DiskJournal(folder / "journal", region)
    except OSError as error:
        region.close()
        raise ConfigError(f"{folder}: {error.strerror}", "disk_dir") from None


def _record(change: Change) -> bytes:
    payload = _encode(change)
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _records(path: Path) -> Iterator[Change]:
    """What a journal tells, up to its first torn record."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            log.warning("%s is not one of this version's: what lies beside it is forgotten", path)
            return
        size = path.stat().st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            payload = file.read(min(length, size))  # a torn length may be any
            if len(payload) != length or xxhash.xxh3_64_intdigest(payload) != checksum:
                return
            try:
                yield _decode(payload)
            except msgspec.DecodeError:
                return
