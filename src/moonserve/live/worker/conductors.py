"""The Conductors that a worker joins: the one of its settings, or all that a registry has.

The worker's process makes one Conductors. Each Conductor is joined and beaten at its own pace, and
gets all measurements. One that is away, or refuses this worker, does not disturb the others. If
all refuse a worker that none has ever let in, it ends with their reason.
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
    CONDUCTORS,
    INSTANCES,
    ConductorEntry,
    decoded,
    find_master,
    follow_master,
)
from moonserve.live.worker.join import BeatTimes, ConductorClient, ConductorMember, with_unsent

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_REFUSED_S = 10.0
_MASTER_S = 120.0


class Conductors:
    """See the module. `run` until it is cancelled, then `leave`."""

    def __init__(
        self,
        http: HttpClient,
        token: str,
        url: str,
        registry: Registry | None,
        times: BeatTimes = BeatTimes(),  # noqa: B008 - frozen
        heard: Callable[[int], None] = lambda term: None,
    ) -> None:
        """url: of the only one, if there is no registry. heard: called with the term of a Conductor
        that leads."""
        self._heard = heard
        self._times = times
        self._http = http
        self._token = token
        self._registry = registry
        self._only = ConductorClient(http, url, token, heard)
        self._entry: Registration | None = None
        self._moving: asyncio.Task[None] | None = None
        self._members: dict[ConductorEntry, ConductorMember] = {}
        self._tasks: dict[ConductorEntry, asyncio.Task[None]] = {}
        self._controls: dict[ConductorEntry, ConductorClient] = {}
        self._refusals: dict[ConductorEntry, ConfigError] = {}
        """Why Conductors refuse this worker now."""
        self._was_let_in = False
        """Whether any Conductor ever let it in."""

    async def master(self, store_url: str) -> str:
        """Return the URL of the store's master. Raises ConfigError."""
        if store_url or self._registry is None:
            return store_url or self._only.url
        return await find_master(self._registry, _MASTER_S)

    def follow_master(self, move: Callable[[str], None]) -> None:
        """Call `move` with the URL of the store's master whenever it comes up elsewhere."""
        if self._registry is not None:
            self._moving = asyncio.create_task(follow_master(self._registry, move))

    async def ping(self) -> None:
        """Return if any Conductor answers at all. Raises MoonserveError."""
        for control in await self._all():
            await control.ping()
            return
        raise NobodyAlive("no Conductor is in the registry yet")

    async def blocks(self, events: Sequence[BlockEvent]) -> None:
        """Report blocks of Mooncake's pool to all Conductors.

        Raises MoonserveError unless all have received them; the call may be repeated then.
        """
        for control in await self._all():
            await control.blocks(events)

    async def _all(self) -> list[ConductorClient]:
        if self._registry is None:
            return [self._only]
        if self._tasks:
            return list(self._controls.values())
        found = decoded(await self._registry.read(CONDUCTORS), CONDUCTORS, ConductorEntry)
        return [self._client(entry.url) for entry in found.values()]

    def _client(self, url: str) -> ConductorClient:
        return ConductorClient(self._http, url, self._token, self._heard)

    async def run(
        self, info: InstanceInfo, load: Callable[[], InstanceLoad], joined: Callable[[str], None]
    ) -> None:
        """Stay joined to all Conductors for ever; `joined` is called with the URL at every join.

        Raises what `load` raises, and ConfigError if the only one refuses this worker, or all of a
        registry do and none has ever let it in.
        """
        if self._registry is None:
            only = ConductorEntry("", 0, self._only.url)
            self._members[only] = member = ConductorMember(self._only, info, load, self._times)
            await member.run(lambda: joined(self._only.url))
            return
        self._entry = await self._registry.register(INSTANCES + info.id, msgspec.json.encode(info))
        loads = Loads(load)
        following = asyncio.create_task(self._follow(self._registry, info, loads, joined))
        try:
            while True:
                # memberships that begin meanwhile are included in a second
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
        """Join Conductors that appear; leave one that has disappeared once it does not answer."""
        async for entries in registry.watch(CONDUCTORS):
            found = set(decoded(entries, CONDUCTORS, ConductorEntry).values())
            for entry, member in self._members.items():
                member.wanted = entry in found
            for entry in sorted(found - self._tasks.keys(), key=lambda it: it.name):
                control = self._client(entry.url)
                member = ConductorMember(control, info, loads.of(entry), self._times)
                self._controls[entry], self._members[entry] = control, member
                self._tasks[entry] = asyncio.create_task(self._belong(entry, member, loads, joined))

    async def _belong(
        self,
        entry: ConductorEntry,
        member: ConductorMember,
        loads: Loads,
        joined: Callable[[str], None],
    ) -> None:
        def let_in() -> None:
            self._was_let_in = True
            self._refusals.pop(entry, None)
            joined(entry.url)

        said = ""
        try:
            while member.wanted:
                try:
                    await member.run(let_in)
                except ConfigError as error:
                    self._refusals[entry] = error
                    if not self._was_let_in and self._refusals.keys() >= self._tasks.keys():
                        raise
                    if said != str(error):
                        log.warning("%s", error)
                    said = str(error)
                    await asyncio.sleep(_REFUSED_S)
        finally:
            self._refusals.pop(entry, None)
            loads.over(entry)

    async def leave(self) -> None:
        """Leave all Conductors. One that is away notices by the missing beats."""
        if self._moving is not None:
            self._moving.cancel()
        await asyncio.gather(*(member.leave() for member in self._members.values()))
        if self._entry is not None:
            await self._entry.close()


class Loads:
    """One worker's load for several Conductors: each gets every sample once.

    A Conductor that appears later gets the newest ones, so that it knows the worker's costs.
    """

    def __init__(self, load: Callable[[], InstanceLoad]) -> None:
        self._load = load
        self._newest = InstanceLoad()
        self._unsent: dict[ConductorEntry, InstanceLoad] = {}

    def of(self, entry: ConductorEntry) -> Callable[[], InstanceLoad]:
        """Return the function that makes the content of that Conductor's beats."""
        self._unsent[entry] = self._newest

        def load() -> InstanceLoad:
            now = self._load()
            self._newest = with_unsent(now, self._newest)
            for other, unsent in self._unsent.items():
                self._unsent[other] = with_unsent(now, unsent)
            mine, self._unsent[entry] = self._unsent[entry], InstanceLoad()
            return mine

        return load

    def over(self, entry: ConductorEntry) -> None:
        """Keep nothing for that Conductor any more."""
        self._unsent.pop(entry, None)
