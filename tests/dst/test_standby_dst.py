"""A front and Conductors that come and go, under the faults of instances and of connections.

The front's driver, its connection and both ends of the wire are real; transports are in memory and
time is virtual. Conductors are killed, deposed and replaced by ones that know all, some or no
instances; connections are cut and delayed. Safety and liveness are those of test_embedded_dst. A
failing seed is the test's parameter.
"""

from __future__ import annotations

import asyncio
import socket
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import NobodyAlive
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Joined, Left, Tick
from moonserve.core.units import InstanceId
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.embedded import EmbeddedServing
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.fronts.server import FrontServer, _FrontLink
from moonserve.live.rpc.connection import RpcConnection
from tests.dst.test_embedded_dst import _NAMES, TUNINGS, FaultyWire, FaultyWorld
from tests.support import virtual_time
from tests.support.cluster import exact, info
from tests.support.fronts import WELCOME
from tests.support.scripted import NOTHING

_REQUESTS = 120


class Pipe(asyncio.Transport):
    """One end of a connection in memory; what is written arrives in order, some time later."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng = rng
        self.end: RpcConnection
        self.other: Pipe
        self.closed = False
        self._busy_s = 0.0

    def write(self, data: Any) -> None:
        """Deliver it later, unless the connection is cut before."""
        loop = asyncio.get_running_loop()
        self._busy_s = max(self._busy_s, loop.time() + self.rng.choice([0, 0, 0.001, 0.02]))
        loop.call_at(self._busy_s, self.other.deliver, bytes(data))

    def deliver(self, data: bytes) -> None:
        """Hand bytes to this end."""
        if not self.closed:
            self.end.data_received(data)

    def abort(self) -> None:
        """Both ends are lost."""
        for one in (self, self.other):
            if not one.closed:
                one.closed = True
                asyncio.get_running_loop().call_soon(one.end.connection_lost, None)

    close = abort

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """It has its end already."""

    def is_closing(self) -> bool:
        """Whether it is over."""
        return self.closed

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """It is like a unix socket."""
        return UNIX


class _Unix:
    family = socket.AF_UNIX


UNIX = _Unix()


class MemoryRoad:
    """The way to the Conductor that leads now, if any does. See road.Road."""

    where = "memory"

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.server: FrontServer | None = None
        self.pipes: list[Pipe] = []

    async def find(self) -> str:
        """There is no URL."""
        return "http://memory"

    async def follow(self, leads: Any) -> None:
        """The front hears of a new term when it connects."""

    async def connect(self, link: RpcConnection, url: str) -> None:
        """Connect both ends."""
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        if self.server is None or self.server.closed():
            raise NobodyAlive("no Conductor leads")
        here, there = Pipe(self.rng), Pipe(self.rng)
        here.other, there.other = there, here
        here.end, there.end = link, _FrontLink(self.server, self.server._limits)
        there.end.connection_made(there)
        here.end.connection_made(here)
        self.pipes = [here]

    def cut(self) -> None:
        """The connection is lost."""
        for pipe in self.pipes:
            pipe.abort()

    async def close(self) -> None:
        """Cut it."""
        self.cut()


class FailoverWorld(FaultyWorld):
    """A front, and the Conductor that leads; `switch` replaces it."""

    def __init__(self, rng: Random, chunk_tokens: int, tuning: str) -> None:
        self.chosen = TUNINGS[tuning]
        super().__init__(rng, chunk_tokens, self.chosen)
        self.road = MemoryRoad(rng)
        self.term = 0
        self.leadership: Leadership
        self.lead()
        self.front = RemoteConductor(self.road)  # type: ignore[arg-type]
        self.cluster = EmbeddedServing(self.front, self.wire, {"m": 100})  # type: ignore[arg-type]

    def lead(self) -> None:
        """The present loop's Conductor leads, in a new term."""
        self.term += 1
        self.leadership = Leadership(confirm=_leads)
        self.leadership.set_term(self.term)
        server = FrontServer(self.loop, WELCOME, leadership=self.leadership)
        server.open()
        self.road.server = server

    async def switch(self) -> None:
        """Another Conductor leads, at once or after a time without any."""
        old, known = self.loop, list(self.loop.views().values())
        self.road.server = None
        if self.rng.random() < 0.5:
            self.leadership.set_term(0)  # it is deposed, and lives on
            assert old.promised() == NOTHING
        else:
            self.leadership._confirm = _leads_no_more
            self.road.cut()
        await asyncio.sleep(self.rng.choice([0, 0.05, 1.0]))
        old.stop()
        share = self.rng.choice([0.0, 0.5, 1.0])
        made = Conductor(self.chosen, cost_of=exact) if self.chosen else Conductor()
        self.released = []
        self.loop = ConductorLoop(made, self.released.append)
        self.loop.tell(Tick())
        for view in known:
            if self.rng.random() < share:
                self.loop.tell(Joined(view.info))
        self.lead()
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        for name in _NAMES:  # those that it did not know join, with the same start
            if InstanceId(name) not in self.loop.views() and self.epochs[name]:
                self.loop.tell(Joined(self.described(name)))

    def described(self, name: str) -> Any:
        """An instance as it joins."""
        role = "prefill" if name[0] == "p" else "decode"
        joining = info(name, role, self.epochs[name])
        return msgspec.structs.replace(joining, chunk_tokens=self.chunk_tokens)

    async def trouble(self) -> None:
        """As before; Conductors are lost too, and the connection."""
        while True:
            await asyncio.sleep(self.rng.uniform(0, 0.2))
            match self.rng.randrange(6):
                case 0:
                    await self.switch()
                case 1:
                    self.road.cut()
                case 2:
                    self.rejoin(self.rng.choice(_NAMES))
                case 3:
                    name = self.rng.choice(_NAMES)
                    self.loop.tell(Left(InstanceId(name), self.epochs[name], "it was killed"))
                case _:
                    self.rejoin_missing()

    async def beats(self) -> None:
        """Time passes for the Conductor that leads."""
        while True:
            await asyncio.sleep(0.5)
            for view in self.loop.views().values():
                self.loop.tell(Joined(view.info))  # counts as a heartbeat
            self.loop.tell(Tick())

    async def nothing_is_left(self) -> None:
        """No promise, call or prefetch is left."""
        async with asyncio.timeout(60):
            while self.loop.promised() != NOTHING:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        assert (self.wire.running, self.wire.prefetching) == (0, 0)
        assert not self.front._lives
        assert not self.loop._inboxes
        for view in self.loop.views().values():
            view.check()


async def _leads() -> bool:
    return True


async def _leads_no_more() -> bool:
    return False


@pytest.mark.parametrize("tuning", ["default", "late", "group"])
@pytest.mark.parametrize("seed", range(8))
def test_conductors_come_and_go(seed: int, tuning: str) -> None:
    """Every stream is whole and right; at the end no Conductor has a promise."""

    async def main() -> None:
        rng = Random(seed)
        world = FailoverWorld(rng, rng.choice([8, 1_000]), tuning)
        beats = asyncio.create_task(world.beats())
        await world.front.start(5)
        faults = asyncio.create_task(world.trouble())
        clients = []
        for number in range(_REQUESTS):
            clients.append(asyncio.create_task(world.one(number)))
            await asyncio.sleep(rng.uniform(0, 0.1))
        async with asyncio.timeout(600):
            outcomes = await asyncio.gather(*clients)
        assert not faults.done(), faults.result()
        faults.cancel()
        assert world.term > 3
        assert outcomes.count("whole") > _REQUESTS // 3, outcomes
        if world.road.server is None:
            world.lead()
        assert isinstance(world.wire, FaultyWire)
        world.wire.calm = True
        world.rejoin_missing()
        await world.nothing_is_left()
        calm = await asyncio.gather(*(world.one(1_000 + number) for number in range(10)))
        assert set(calm) <= {"whole", "left"}
        await world.nothing_is_left()
        beats.cancel()
        await world.front.leave()

    virtual_time.run(main())
