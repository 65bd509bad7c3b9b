"""Foreign engines found in a registry: put there by people or by whoever runs them.

For a gateway that has a fleet. What cannot be read or used is named in the log, once, and the
others are used; the registry's own absence changes nothing.
"""

from __future__ import annotations

import asyncio
import logging

from moonserve.core.errors import BadRequest, ConfigError
from moonserve.live.fleet.fleet import Fleet
from moonserve.live.fleet.keeper import Keeper
from moonserve.live.fleet.spec import InstanceSpec
from moonserve.live.http.message import decode_json
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import ENGINES

log = logging.getLogger(__name__)

SOURCE = "the registry"
_POLL_S = 0.1


class Found:
    """See the module. `follow` until it is cancelled."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet
        self._read = asyncio.Event()
        self._used: dict[str, bytes] = {}
        self._unused: dict[str, str] = {}
        """By name, why an entry is not used."""
        fleet.also = self.alarms

    def alarms(self) -> list[str]:
        """What is wrong with the registry, and with what is there."""
        return [*self._registry.alarms(), *self._unused.values()]

    async def follow(self) -> None:
        """Keep the fleet's engines from there as they are described there, for ever."""
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

    async def _use(self, name: str, value: bytes) -> None:
        try:
            spec = decode_json(value, InstanceSpec)
            if spec.name != name:
                raise ConfigError(f"is {spec.name!r}, its key says {name!r}", "name")
            await self._fleet.add(SOURCE, spec.told())
        except (ConfigError, BadRequest) as error:
            kept = "; what it was before is" if name in self._used else ""
            why = f"registry: {ENGINES}{name} is not used: {error}{kept}"
            if self._unused.get(name) != why:
                log.warning("%s", why)
            self._unused[name] = why
        else:
            self._used[name] = value
            self._unused.pop(name, None)

    async def settled(self) -> None:
        """Return once all have been asked, and those that tell events have told everything."""
        await self._read.wait()
        while True:
            if all(_standing(keeper) for _, keeper in self._fleet.keepers()):
                return
            await asyncio.sleep(_POLL_S)


def _standing(keeper: Keeper) -> bool:
    if keeper.state == "asking" and not keeper.why:
        return False
    counts = [feed.counts() for feed in keeper.feeds.values()]
    return all(it.fault or (it.connected and it.trusted) for it in counts)
