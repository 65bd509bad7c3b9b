"""Where API keys are kept: a file with one key in JSON on each line, or the registry.

A gateway's process has one source as a part, which replaces its `Keys` whenever they change there.
If the source cannot be read any more, or is wrong, the keys of before stay, with an alarm.
`moonserve key` writes. The file has mode 600 and is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.live.access.keys import ApiKey, Keys, read_key
from moonserve.live.http.server import ProcessPart
from moonserve.live.ports import Registry
from moonserve.live.tasks import keep_doing

log = logging.getLogger(__name__)

ENTRIES = "keys/"
"""The registry's keys of API keys begin so."""
_LOOK_S = 1.0
_ALARM = "not all API keys can be read where they are kept; the log says why"
_EMPTY = "there is no API key, so no client is served; make one with `moonserve key create`"


def read_file(path: Path) -> list[ApiKey]:
    """Return the keys of a file. Raises ConfigError with the line, or if there is no file."""
    try:
        found_stat = path.stat()
        text = path.read_bytes()
    except OSError as error:
        remedy = "" if path.exists() else "; make the first key with `moonserve key create`"
        raise ConfigError(f"cannot read {path}: {error.strerror}{remedy}", "keys") from None
    if found_stat.st_mode & 0o022 or found_stat.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"{path} can be changed by other users, who could add keys; make it this user's, and"
            " `chmod 600` it",
            "keys",
        )
    found: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(read_key(line))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}", "keys") from None
    _check_apart(found, str(path))
    return found


@contextmanager
def changed_file(path: Path) -> Iterator[list[ApiKey]]:
    """Yield the keys of a file, which need not exist, and write what the block makes of them.

    Only one process changes a file at a time. Raises ConfigError.
    """
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "keys") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = read_file(path) if path.exists() else []
        yield keys
        _check_apart(keys, str(path))
        _write(path, keys)
    finally:
        os.close(folder)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    lines = b"".join(msgspec.json.encode(key) + b"\n" for key in keys)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".keys-", delete=False) as new:
            new.write(lines)
            new.flush()
            os.fsync(new.fileno())
        os.replace(new.name, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "keys") from None


def _check_apart(keys: Sequence[ApiKey], where: str) -> None:
    for field, values in (
        ("name", [key.name for key in keys]),
        ("hash", [key.hash for key in keys]),
    ):
        value, count = max(Counter(values).items(), key=lambda it: it[1], default=("", 0))
        if count > 1:
            raise ConfigError(f"{where}: two keys have the {field} {value}", "keys")


class KeySource(ProcessPart):
    """What keeps the `Keys` of a process as their source has them."""

    def __init__(self, keys: Keys) -> None:
        self._wrong = ""
        """What is wrong at the source, for the log; empty: nothing."""
        self._keys = keys
        self._following: asyncio.Task[None] | None = None

    def alarms(self) -> list[str]:
        """Return that something is wrong, without names or paths: clients can read it."""
        return [_ALARM] * bool(self._wrong) + [_EMPTY] * (not len(self._keys))

    async def start(self, port: int) -> None:
        """Follow the source."""
        self._following = keep_doing("following the API keys", self._follow)

    async def stop(self) -> None:
        """Follow it no more."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        raise NotImplementedError

    def _take(self, read: Callable[[], Sequence[ApiKey]]) -> None:
        try:
            keys = read()
        except ConfigError as error:
            if self._wrong != str(error):
                log.error("the API keys of before are still used: %s", error)
            self._wrong = str(error)
            return
        if self._wrong:
            log.info("the API keys can be read again")
        self._wrong = ""
        self._keys.use(keys)


class FileSource(KeySource):
    """Keys in a file; a change is noticed within a second."""

    def __init__(self, keys: Keys, path: Path) -> None:
        super().__init__(keys)
        self._path = path
        self._seen: tuple[int, ...] | None = None

    async def prepare(self) -> None:
        """Read the file. Raises ConfigError."""
        self._seen = self._now()
        self._keys.use(read_file(self._path))
        log.info("%d API keys are in %s", len(self._keys), self._path)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._now()
            if now != self._seen:
                self._seen = now
                self._take(lambda: read_file(self._path))

    def _now(self) -> tuple[int, ...] | None:
        """What changes with the file; None: there is no file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class RegistrySource(KeySource):
    """Keys in the registry, for all fronts."""

    def __init__(self, keys: Keys, registry: Registry) -> None:
        super().__init__(keys)
        self._registry = registry

    async def prepare(self) -> None:
        """Read the keys. Raises RegistryError."""
        self._take_entries(await self._registry.read(ENTRIES))

    async def _follow(self) -> None:
        watched: AsyncIterator[Mapping[str, bytes]] = self._registry.watch(ENTRIES)
        async for entries in watched:
            self._take_entries(entries)

    def _take_entries(self, entries: Mapping[str, bytes]) -> None:
        """Use all entries that can be read; only the client of a wrong one is refused."""
        found, wrong = [], ""
        for name, text in entries.items():
            try:
                found.append(read_key(text))
            except ConfigError as error:
                wrong = f"registry: {name} is not used: {error}"
        if wrong and wrong != self._wrong:
            log.error("%s", wrong)
        self._wrong = wrong
        self._keys.use(found)
