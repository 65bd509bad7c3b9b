"""A request that kills whichever worker computes it, among others that share workers with it.

Safety: it takes no more workers with it than the Conductor allows, and the others get the greedy
tokens without a gap or a repeat. Liveness: nothing is promised in the end. Time is virtual; a
failing seed is the test's parameter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random

import msgspec
import pytest

from moonserve.core.errors import EngineFailed
from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.facts import InstanceInfo, Joined
from moonserve.core.schedule.handoff import MAX_DEATHS
from moonserve.core.units import RequestId
from moonserve.live.drive.wire import Decoded, Prefilled
from moonserve.live.http.client import UpstreamError
from tests.support import virtual_time
from tests.support.cluster import info
from tests.support.scripted import NOTHING, ScriptedWire, World, collect, expected

_POISON = 999_999
"""A token that no worker of one role survives."""
_NAMES = ("p0", "p1", "p2", "p3", "d0", "d1", "d2", "d3")
_RESTART_S = 0.5


class MortalWire(ScriptedWire):
    """Calls take some time. A worker that dies ends all its calls, and is started anew."""

    def __init__(self, rng: Random, deadly: str) -> None:
        super().__init__()
        self.deaths: Counter[str] = Counter()
        self._rng = rng
        self._deadly = deadly

    async def _begin(self, to: InstanceInfo, role: str, body: bytes) -> int:
        """The start of a call that takes a while; how often the worker had died before it."""
        if to.id in self.dead:
            raise UpstreamError("connection refused", sent=False)
        deaths = self.deaths[to.id]
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        self._go_on(to, deaths)
        if role == self._deadly and _POISON in msgspec.json.decode(body)["prompt"]:
            self.deaths[to.id] += 1
            self.dead.add(to.id)
            asyncio.get_running_loop().call_later(_RESTART_S, self.dead.discard, to.id)
            raise UpstreamError("connection reset", sent=True)
        return deaths

    def _go_on(self, to: InstanceInfo, deaths: int) -> None:
        """Raise UpstreamError if the worker has died since its death of this number."""
        if self.deaths[to.id] > deaths:
            raise UpstreamError("connection reset", sent=True)

    async def prefill(self, to: InstanceInfo, request: Request, body: bytes) -> Prefilled:
        """See ScriptedWire."""
        deaths = await self._begin(to, "prefill", body)
        given = await super().prefill(to, request, body)
        self._go_on(to, deaths)
        return given

    async def decode(
        self, to: InstanceInfo, request: Request, body: bytes
    ) -> AsyncGenerator[Decoded, None]:
        """See ScriptedWire."""
        deaths = await self._begin(to, "decode", body)
        async for piece in super().decode(to, request, body):
            await asyncio.sleep(self._rng.uniform(0, 0.02))
            self._go_on(to, deaths)
            yield piece


@pytest.mark.parametrize("deadly", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(8))
def test_a_poisoned_request_takes_two_workers_with_it(seed: int, deadly: str) -> None:
    """Its client gets the reason. The others go on elsewhere; only those that were beside it each
    time may be given up with it."""

    async def main() -> None:
        rng = Random(seed)
        wire = MortalWire(rng, deadly)
        world = World(*_NAMES, wire=wire)

        async def beat() -> None:
            """Workers that were started anew join with their next heartbeat."""
            while True:
                await asyncio.sleep(0.1)
                for name in _NAMES:
                    if name not in world.loop.views() and name not in wire.dead:
                        role = "prefill" if name[0] == "p" else "decode"
                        world.loop.tell(Joined(info(name, role, 1 + wire.deaths[name])))

        async def one(number: int) -> str:
            await asyncio.sleep(number * 0.01)
            prompt = tuple(range(rng.randrange(1, 40))) + (_POISON,) * (number == 20)
            request = Request(
                RequestId(f"r{number}"), "m", len(prompt), prompt, stopping=Stopping(12)
            )
            try:
                got, _ = await collect(world.cluster.generate(request))
            except EngineFailed as error:
                return str(error)
            assert got == expected(12, prompt)
            return ""

        beating = asyncio.create_task(beat())
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*(one(number) for number in range(60)))
        beating.cancel()
        assert f"{MAX_DEATHS} instances died while they had this request" in ends[20]
        assert sum(wire.deaths.values()) == MAX_DEATHS
        assert len([end for end in ends if end]) <= 3
        assert await world.settled() == NOTHING

    virtual_time.run(main())
