"""The gateways that a worker is a member of: the one it was told, or all that a registry has.

Each has a membership of its own, with joins and beats at its own pace; what is measured goes to
every one of them. One that is away, or refuses us, keeps nobody from the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import ConfigError, NobodyAlive
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad
from moonserve.live.http.client import HttpClient
from moonserve.live.ports import Registration, Registry
from moonserve.live.registry.entries import (
    GATEWAYS,
    INSTANCES,
    GatewayEntry,
    decoded,
    find_master,
    follow_master,
)
from moonserve.live.worker.join import Control, Membership, with_untold

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_REFUSED_S = 10.0
_MASTER_S = 120.0


class Gateways:
    """See the module. `run` until it is cancelled, then `leave`."""

    def __init__(self, http: HttpClient, token: str, url: str, registry: Registry | None) -> None:
        """url: the only gateway, where there is no registry."""
        self._http = http
        self._token = token
        self._registry = registry
        self._only = Control(http, url, token)
        self._entry: Registration | None = None
        self._moving: asyncio.Task[None] | None = None
        self._members: dict[GatewayEntry, Membership] = {}
        self._tasks: dict[GatewayEntry, asyncio.Task[None]] = {}
        self._controls: dict[GatewayEntry, Control] = {}

    async def master(self, store_url: str) -> str:
        """Where the store's master is. Raises ConfigError."""
        if store_url or self._registry is None:
            return store_url or self._only.gateway
        return await find_master(self._registry, _MASTER_S)

    def follow_master(self, move: Callable[[str], None]) -> None:
        """`move` is told where the store's master is, if it comes up elsewhere."""
        if self._registry is not None:
            self._moving = asyncio.create_task(follow_master(self._registry, move))

    async def ping(self) -> None:
        """Return if somebody answers at all. Raises MoonserveError."""
        for control in await self._all():
            await control.ping()
            return
        raise NobodyAlive("no gateway is in the registry yet")

    async def blocks(self, events: Sequence[BlockEvent]) -> None:
        """Tell all what this worker saw of a pool whose master does not tell.

        Raises MoonserveError unless all have it; to be told again they take.
        """
        for control in await self._all():
            await control.blocks(events)

    async def _all(self) -> list[Control]:
        if self._registry is None:
            return [self._only]
        if self._tasks:
            return list(self._controls.values())
        found = decoded(await self._registry.read(GATEWAYS), GATEWAYS, GatewayEntry)
        return [Control(self._http, entry.url, self._token) for entry in found.values()]

    async def run(
        self, info: InstanceInfo, load: Callable[[], InstanceLoad], joined: Callable[[str], None]
    ) -> None:
        """Belong to all of them for ever; `joined` is told the gateway at every join.

        Raises what `load` does, and ConfigError where the only gateway refuses this worker.
        """
        if self._registry is None:
            only = GatewayEntry("", 0, self._only.gateway)
            self._members[only] = member = Membership(self._only, info, load)
            await member.run(lambda: joined(self._only.gateway))
            return
        self._entry = await self._registry.register(INSTANCES + info.id, msgspec.json.encode(info))
        loads = Loads(load)
        following = asyncio.create_task(self._follow(self._registry, info, loads, joined))
        try:
            while True:
                # Those that begin meanwhile are looked at in a second.
                running = {following, *self._tasks.values()}
                await asyncio.wait(running, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
                for entry in [it for it, task in self._tasks.items() if task.done()]:
                    del self._members[entry], self._controls[entry]
                    self._tasks.pop(entry).result()
        finally:
            for task in (following, *self._tasks.values()):
                task.cancel()

    async def _follow(
        self, registry: Registry, info: InstanceInfo, loads: Loads, joined: Callable[[str], None]
    ) -> None:
        """Begin a membership with whoever appears; end it once who disappeared answers no more."""
        async for entries in registry.watch(GATEWAYS):
            found = set(decoded(entries, GATEWAYS, GatewayEntry).values())
            for entry, member in self._members.items():
                member.wanted = entry in found
            for entry in sorted(found - self._tasks.keys(), key=lambda it: it.name):
                control = Control(self._http, entry.url, self._token)
                member = Membership(control, info, loads.of(entry))
                self._controls[entry], self._members[entry] = control, member
                self._tasks[entry] = asyncio.create_task(self._belong(entry, member, loads, joined))

    async def _belong(
        self,
        entry: GatewayEntry,
        member: Membership,
        loads: Loads,
        joined: Callable[[str], None],
    ) -> None:
        said = ""
        try:
            while member.wanted:
                try:
                    await member.run(lambda: joined(entry.url))
                except ConfigError as error:  # it may serve another model
                    if said != str(error):
                        log.warning("%s", error)
                    said = str(error)
                    await asyncio.sleep(_REFUSED_S)
        finally:
            loads.over(entry)

    async def leave(self) -> None:
        """Say goodbye to all; who is away will find out by itself."""
        if self._moving is not None:
            self._moving.cancel()
        await asyncio.gather(*(member.leave() for member in self._members.values()))
        if self._entry is not None:
            await self._entry.close()


class Loads:
    """One worker's load for several gateways: each gets every sample once."""

    def __init__(self, load: Callable[[], InstanceLoad]) -> None:
        self._load = load
        self._untold: dict[GatewayEntry, InstanceLoad] = {}

    def of(self, entry: GatewayEntry) -> Callable[[], InstanceLoad]:
        """What gives that gateway's beats their content."""
        self._untold[entry] = InstanceLoad()

        def load() -> InstanceLoad:
            now = self._load()
            for other, untold in self._untold.items():
                self._untold[other] = with_untold(now, untold)
            mine, self._untold[entry] = self._untold[entry], InstanceLoad()
            return mine

        return load

    def over(self, entry: GatewayEntry) -> None:
        """That gateway is told nothing any more."""
        self._untold.pop(entry, None)
