"""What is kept in a registry, under which key, and who is looked for there. JSON, for etcdctl too.

instances/NAME   InstanceInfo: our own workers, each for as long as it lives
engines/NAME     fleet.spec.InstanceSpec: foreign engines, put there by whoever runs them
gateways/NAME    GatewayEntry
store/master     MasterEntry
leaders/DUTY     the gateway that has a duty, such as conductor/MODEL
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.live.ports import Registry
from moonserve.live.registry.address import parse
from moonserve.live.registry.etcd import EtcdRegistry

log = logging.getLogger(__name__)
T = TypeVar("T")

INSTANCES, ENGINES, GATEWAYS, MASTER = "instances/", "engines/", "gateways/", "store/master"


class GatewayEntry(msgspec.Struct, frozen=True):
    """One gateway."""

    name: str
    epoch: int
    """Differs at every start."""
    url: str


class MasterEntry(msgspec.Struct, frozen=True):
    """The store's master, where it is a process of its own."""

    url: str


async def open_registry(url: str) -> Registry | None:
    """The registry of that address; None where it is empty. Raises ConfigError."""
    return await EtcdRegistry.open(parse(url)) if url else None


def decoded(entries: Mapping[str, bytes], prefix: str, shape: type[T]) -> dict[str, T]:
    """Entries by name, without those that cannot be read: these are named in the log."""
    found = {}
    for key, value in entries.items():
        try:
            found[key.removeprefix(prefix)] = msgspec.json.decode(value, type=shape)
        except msgspec.DecodeError as error:
            log.warning("registry: %s is no %s: %s", key, shape.__name__, error)
    return found


async def find_master(registry: Registry, within_s: float) -> str:
    """The URL of the store's master. Raises ConfigError if none registers in time."""
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
    """Tell where the store's master is whenever that is said anew, for ever."""
    async for entries in registry.watch(MASTER):
        for entry in decoded(entries, "", MasterEntry).values():
            move(entry.url)
