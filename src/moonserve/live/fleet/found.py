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
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import ENGINES, decoded

log = logging.getLogger(__name__)

SOURCE = "the registry"
_POLL_S = 0.1


class Found:
    """See the module. `follow` until it is cancelled."""

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet
        self._read = asyncio.Event()
        self._used: dict[str, InstanceSpec] = {}

    async def follow(self) -> None:
        """Keep the fleet's engines from there as they are described there, for ever."""
        used = self._used
        async for entries in self._registry.watch(ENGINES):
            found = decoded(entries, ENGINES, InstanceSpec)
            for name in [name for name in used if name not in found]:
                del used[name]
                await self._fleet.remove(SOURCE, name)
            for name, spec in found.items():
                if used.get(name) != spec:
                    await self._use(name, spec)
            self._read.set()

    async def _use(self, name: str, spec: InstanceSpec) -> None:
        try:
            if spec.name != name:
                raise ConfigError(f"is {spec.name!r}, its key says {name!r}", "name")
            await self._fleet.add(SOURCE, spec.told())
        except (ConfigError, BadRequest) as error:
            log.warning("registry: %s%s is not used: %s", ENGINES, name, error)
        else:
            self._used[name] = spec

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
