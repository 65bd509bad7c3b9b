"""The registry's entries: their keys and shapes. Values are JSON, so that etcdctl can read them.

instances/NAME   InstanceInfo: a moonserve worker, while it lives
engines/NAME     InstanceSpec: an external engine, put there by its operator
conductors/NAME  ConductorEntry
store/master     MasterEntry
drains/NAME      DrainEntry: an operator wants this instance to get no new work
leaders/DUTY     LeaderEntry: the process that has a duty, such as conductor, and its term
terms/DUTY       the highest term so far, as a decimal number
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.live.ports import Registry
from moonserve.live.registry.etcd import EtcdRegistry, LeaderEntry, leader_of, parse
from moonserve.live.tls.contexts import Tls

__all__ = ["LeaderEntry", "leader_of"]
log = logging.getLogger(__name__)
T = TypeVar("T")

INSTANCES = "instances/"
ENGINES = "engines/"
CONDUCTORS = "conductors/"
DRAINS = "drains/"
MASTER = "store/master"
DUTY = "conductor"
"""The duty of the Conductor that decides,"""
LEADER = f"leaders/{DUTY}"
"""and where its LeaderEntry is."""


class ConductorEntry(msgspec.Struct, frozen=True):
    """One process with a Conductor."""

    name: str
    epoch: int
    """It differs at every start of the process."""
    url: str
    model: str = ""
    """What its workers serve; empty: it has external engines."""
    takes_fronts: bool = False
    """Whether it decides for fronts anywhere, so that another one can replace it; else it belongs
    to one gateway."""


class MasterEntry(msgspec.Struct, frozen=True):
    """The store's master, if it is a process of its own."""

    url: str


class DrainEntry(msgspec.Struct, frozen=True):
    """One start of an instance gets no new work."""

    epoch: int


async def open_registry(url: str, tls: Tls | None) -> Registry | None:
    """Open the registry at this address; None: the address is empty. Raises ConfigError.

    tls: of this process, for an address etcds://….
    """
    if not url:
        return None
    return await EtcdRegistry.open(parse(url), files=None if tls is None else tls.files)


def decoded(entries: Mapping[str, bytes], prefix: str, shape: type[T]) -> dict[str, T]:
    """Return entries by name. An entry that cannot be decoded is left out and logged once."""
    found = {}
    for key, value in entries.items():
        try:
            found[key.removeprefix(prefix)] = msgspec.json.decode(value, type=shape)
        except UNREADABLE as error:
            _log_once(f"registry: entry {key} is no {shape.__name__}: {error}")
    return found


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    log.warning("%s", text)


async def find_master(registry: Registry, within_s: float) -> str:
    """Return the URL of the store's master. Raises ConfigError if none registers in time."""
    try:
        async with asyncio.timeout(within_s):
            async for entries in registry.watch(MASTER):
                for entry in decoded(entries, "", MasterEntry).values():
                    return entry.url
                log.info("waiting %g s for a store's master to register", within_s)
    except TimeoutError:
        pass
    raise ConfigError(
        f"no store's master has registered within {within_s:g} s; start `moonserve store serve`"
        " with the same --registry, or give --store-url",
        "registry",
    )


async def follow_master(registry: Registry, move: Callable[[str], None]) -> None:
    """Call `move` with the master's URL at every change of its entry. It never returns."""
    async for entries in registry.watch(MASTER):
        for entry in decoded(entries, "", MasterEntry).values():
            move(entry.url)
