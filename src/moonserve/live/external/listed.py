"""ListedEngines: external engines that something else lists, such as a registry or Kubernetes.

Each time that the list has changed, its follower calls `take`, and the fleet then has these engines
under the name of the source. An entry that cannot be used is logged once, and the others are used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from moonserve.core.errors import BadRequest, ConfigError
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import EngineMonitor
from moonserve.live.external.spec import InstanceSpec

log = logging.getLogger(__name__)
V = TypeVar("V")

_POLL_S = 0.1


class ListedEngines(Generic[V]):
    """See the module."""

    def __init__(
        self,
        fleet: Fleet,
        source: str,
        described: Callable[[str, V], InstanceSpec],
        where: Callable[[str], str],
    ) -> None:
        """described: makes the description of an entry, by its name and value, and raises
        ConfigError or BadRequest. where: the place of an entry, for people."""
        self.source = source
        self.read = asyncio.Event()
        """Whether the list has been read once."""
        self.news = asyncio.Event()
        """Set, and replaced by a new event, each time that the list was read."""
        self.used: dict[str, V] = {}
        """The entries that the fleet uses."""
        self.unused: dict[str, str] = {}
        """Name -> why its entry is not used."""
        self._fleet = fleet
        self._described = described
        self._where = where

    def alarms(self) -> list[str]:
        """What is wrong with entries."""
        return list(self.unused.values())

    async def take(self, found: Mapping[str, V]) -> None:
        """Let these be all engines of the source."""
        used = self.used
        for name in [name for name in used if name not in found]:
            del used[name]
            await self._fleet.remove(self.source, name)
        self.unused = {name: why for name, why in self.unused.items() if name in found}
        for name, value in found.items():
            if used.get(name) != value:
                await self._use(name, value)
        self.read.set()
        news = self.news
        self.news = asyncio.Event()
        news.set()

    async def _use(self, name: str, value: V) -> None:
        try:
            await self._fleet.add(self.source, self._described(name, value))
        except (ConfigError, BadRequest) as error:
            kept = "; the earlier entry is still used" if name in self.used else ""
            why = f"{self._where(name)} is not used: {error}{kept}"
            if self.unused.get(name) != why:
                log.warning("%s", why)
            self.unused[name] = why
        else:
            self.used[name] = value
            self.unused.pop(name, None)


async def settled(fleet: Fleet, read: Sequence[asyncio.Event]) -> None:
    """Return once all lists were `read`, every engine of the fleet was asked, and all events of
    those that publish are known."""
    for one in read:
        await one.wait()
    while True:
        if all(_standing(monitor) for _, monitor in fleet.monitors()):
            return
        await asyncio.sleep(_POLL_S)


def _standing(monitor: EngineMonitor) -> bool:
    if monitor.state == "asking" and not monitor.why:
        return False
    counts = [feed.counts() for feed in monitor.feeds.values()]
    return all(it.fault or (it.connected and it.trusted) for it in counts)
