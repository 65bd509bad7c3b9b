"""RegistryEngines: the external engines that are in a registry, for its Conductor.

Operators, or whatever starts the engines, put entries there (`moonserve register`), and so does a
Conductor that gets a description over HTTP. An entry that cannot be used is logged once, and the
others are used. While the registry is away, nothing changes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, ConfigError
from moonserve.invalid import without_password
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import EngineMonitor
from moonserve.live.external.spec import InstanceSpec, normal
from moonserve.live.http.message import decode_json
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import ENGINES

log = logging.getLogger(__name__)

SOURCE = "the registry"
_POLL_S = 0.1
_USED_S = 2.0
"""How long a gateway waits until it uses what it put there itself."""


async def register(registry: Registry, specs: Sequence[InstanceSpec]) -> dict[str, str | None]:
    """Put these engines into the registry until somebody removes them.

    Returns those that are new or have changed, each with the URL that its name had before. Raises
    ConfigError if one is there under another name, and RegistryError.
    """
    entries = await registry.read(ENGINES)
    before = {key.removeprefix(ENGINES): value for key, value in entries.items()}
    urls = {name: _url(value) for name, value in before.items()}
    after = {name: normal(url) for name, url in urls.items()} | {
        it.name: it.place() for it in specs
    }
    for it in specs:
        if twins := [name for name in after if after[name] == it.place() and name != it.name]:
            remedy = "remove that first, or describe it anew under that name"
            raise ConfigError(f"{it.url} is registered as {twins[0]}; {remedy}", "url")
    changed: dict[str, str | None] = {}
    for it in specs:
        value = msgspec.json.encode(it)
        if before.get(it.name) != value:
            await registry.put(ENGINES + it.name, value)
            changed[it.name] = urls.get(it.name)
    return changed


def _url(entry: bytes) -> str:
    """The URL in an entry that anybody may have written."""
    try:
        return without_password(msgspec.json.decode(entry, type=_Addressed).url)
    except UNREADABLE:
        return "an address that cannot be read"


class _Addressed(msgspec.Struct):
    url: str


class RegistryEngines:
    """See the module. `follow` until it is cancelled."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet
        self._read = asyncio.Event()
        self._news = asyncio.Event()
        """Set, and replaced by a new event, each time that entries were read."""
        self._used: dict[str, bytes] = {}
        self._unused: dict[str, str] = {}
        """Name -> why its entry is not used."""

    def alarms(self) -> list[str]:
        """What is wrong with the entries of the registry."""
        return list(self._unused.values())

    async def follow(self) -> None:
        """Keep the fleet's engines as the registry describes them. Never returns."""
        used = self._used
        async for entries in self._registry.watch(ENGINES):
            found = {key.removeprefix(ENGINES): value for key, value in entries.items()}
            for name in [name for name in used if name not in found]:
                del used[name]
                await self._fleet.remove(SOURCE, name)
            self._unused = {name: why for name, why in self._unused.items() if name in found}
            for name, value in found.items():
                if used.get(name) != value:
                    await self._use(name, value)
            self._read.set()
            news = self._news
            self._news = asyncio.Event()
            news.set()

    async def _use(self, name: str, value: bytes) -> None:
        try:
            spec = decode_json(value, InstanceSpec)
            if spec.name != name:
                raise ConfigError(f"is {spec.name!r}, its key says {name!r}", "name")
            await self._fleet.add(SOURCE, spec.untrusted())
        except (ConfigError, BadRequest) as error:
            kept = "; the earlier entry is still used" if name in self._used else ""
            why = f"registry: {ENGINES}{name} is not used: {error}{kept}"
            if self._unused.get(name) != why:
                log.warning("%s", why)
            self._unused[name] = why
        else:
            self._used[name] = value
            self._unused.pop(name, None)

    async def put(self, specs: Sequence[InstanceSpec]) -> list[str]:
        """Put these engines into the registry, and wait until they are used here.

        Returns the names of those that changed. Raises as Fleet.add, and RegistryError; then none
        of them is put there.
        """
        for spec in specs:
            with spec.named():
                await self._fleet.check(SOURCE, spec.untrusted())
        changed = list(await register(self._registry, specs))
        entries = {it.name: msgspec.json.encode(it) for it in specs}
        await self._until(lambda: all(self._is_read(*entry) for entry in entries.items()))
        return changed

    async def remove(self, name: str) -> bool:
        """Let no gateway use the engine any more. Returns whether it was there. Raises Taken,
        RegistryError."""
        self._fleet.removable(SOURCE, name)
        found = await self._registry.remove(ENGINES + name)
        found = found or name in self._used  # the registry had lost it
        await self._until(lambda: name not in self._used)
        return found

    def _is_read(self, name: str, value: bytes) -> bool:
        return self._used.get(name) == value or name in self._unused

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until this gateway has read its own change; not long, the registry may be away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_USED_S):
                while not true():
                    await self._news.wait()

    async def settled(self) -> None:
        """Return once every engine was asked, and all events of those that publish are known."""
        await self._read.wait()
        while True:
            if all(_standing(monitor) for _, monitor in self._fleet.monitors()):
                return
            await asyncio.sleep(_POLL_S)


def _standing(monitor: EngineMonitor) -> bool:
    if monitor.state == "asking" and not monitor.why:
        return False
    counts = [feed.counts() for feed in monitor.feeds.values()]
    return all(it.fault or (it.connected and it.trusted) for it in counts)
