"""RegistryEngines: the external engines that are in a registry, for its Conductor.

Operators, or whatever starts the engines, put entries there (`moonserve register`), and so does a
Conductor that gets a description over HTTP. While the registry is away, nothing changes here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.invalid import without_password
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.listed import ListedEngines
from moonserve.live.external.spec import InstanceSpec, normal
from moonserve.live.http.message import decode_json
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import ENGINES

SOURCE = "the registry"
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
        self._listed = ListedEngines(
            fleet, SOURCE, _described, lambda name: f"registry: {ENGINES}{name}"
        )

    @property
    def read(self) -> asyncio.Event:
        """Whether the registry has been read once."""
        return self._listed.read

    def alarms(self) -> list[str]:
        """What is wrong with the entries of the registry."""
        return self._listed.alarms()

    async def follow(self) -> None:
        """Keep the fleet's engines as the registry describes them. Never returns."""
        async for entries in self._registry.watch(ENGINES):
            found = {key.removeprefix(ENGINES): value for key, value in entries.items()}
            await self._listed.take(found)

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
        found = found or name in self._listed.used  # the registry had lost it
        await self._until(lambda: name not in self._listed.used)
        return found

    def _is_read(self, name: str, value: bytes) -> bool:
        return self._listed.used.get(name) == value or name in self._listed.unused

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until this gateway has read its own change; not long, the registry may be away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_USED_S):
                while not true():
                    await self._listed.news.wait()


def _described(name: str, value: bytes) -> InstanceSpec:
    """The description in an entry of the registry. Raises ConfigError, BadRequest."""
    spec = decode_json(value, InstanceSpec)
    if spec.name != name:
        raise ConfigError(f"is {spec.name!r}, its key says {name!r}", "name")
    return spec.untrusted()
