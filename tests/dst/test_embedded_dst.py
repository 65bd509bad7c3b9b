"""Instances of ours under seeded faults: calls fail, hang and end early; instances restart and are
lost; clients leave.

Safety while faults last: the tokens that a client gets are the greedy ones, without a gap or a
repeat; no stream that has begun ends early. Liveness after: every request has ended, nothing is
promised, no call and no lease is left.
Time is virtual. A failing seed is the test's parameter.
"""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest

from moonserve.core.errors import DeadlineExceeded, EngineFailed, NobodyAlive, Overloaded
from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.facts import Joined, Left
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, RequestId
from tests.support import virtual_time
from tests.support.cluster import info
from tests.support.scripted import NOTHING, ScriptedWire, World, expected

_NAMES = ("p0", "p1", "d0", "d1")
_REQUESTS = 120
_PREFILL_FAULTS = ("reset", "refused", "bug", "hang", "late")
_DECODE_FAULTS = ("reset", "refused", "short", "bug", "hang", "late")


class FaultyWire(ScriptedWire):
    """Calls take some time, and about a quarter of them fail while `calm` is False."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng = rng
        self.calm = False

    def _fault(self, role: str) -> tuple[str, int]:
        if self.calm or self.rng.random() < 0.75:
            return "", -1
        faults = _DECODE_FAULTS if role == "decode" else _PREFILL_FAULTS
        return self.rng.choice(faults), self.rng.randrange(4)

    async def _fail(self, what: str) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.01))
        if what == "late":
            await asyncio.sleep(0.1)
            raise DeadlineExceeded("no reply within 0.1 s")
        await super()._fail(what)


class FaultyWorld(World):
    """Two instances of each role; they restart and are lost while `trouble` runs."""

    def __init__(self, rng: Random, chunk_tokens: int, tuning: Tuning | None = None) -> None:
        super().__init__(wire=FaultyWire(rng), tuning=tuning)
        self.rng = rng
        self.chunk_tokens = chunk_tokens
        self.longest = 40 if tuning is None or tuning.cpp == 1 else 200
        self.epochs = dict.fromkeys(_NAMES, 0)
        for name in _NAMES:
            self.rejoin(name)

    def rejoin(self, name: str) -> None:
        """The instance of this name has started anew."""
        self.epochs[name] += 1
        joining = info(name, "prefill" if name[0] == "p" else "decode", self.epochs[name])
        self.loop.tell(Joined(msgspec.structs.replace(joining, chunk_tokens=self.chunk_tokens)))

    def rejoin_missing(self) -> None:
        """Start those that the Conductor does not know."""
        for name in _NAMES:
            if InstanceId(name) not in self.loop.views():
                self.rejoin(name)

    async def trouble(self) -> None:
        """Instances are lost and come back, one after the other, until cancelled."""
        while True:
            await asyncio.sleep(self.rng.uniform(0, 0.1))
            name = self.rng.choice(_NAMES)
            match self.rng.randrange(4):
                case 0:
                    self.rejoin(name)
                case 1:
                    lost = self.rng.choice(["", "it was killed"])
                    self.loop.tell(Left(InstanceId(name), self.epochs[name], lost))
                case _:
                    self.rejoin_missing()

    async def one(self, number: int) -> str:
        """Send a request and judge what comes; returns how it ended."""
        prompt = tuple(range(self.rng.randrange(1, self.longest)))
        count = self.rng.randrange(1, 12)
        request = Request(
            RequestId(f"r{number}"), "m", len(prompt), prompt, stopping=Stopping(count)
        )
        leaves_s = self.rng.choice([None, None, None, self.rng.uniform(0, 0.2)])
        got: list[int] = []
        finish = None
        outputs = self.cluster.generate(request)
        try:
            async with asyncio.timeout(leaves_s):
                async for output in outputs:
                    assert finish is None, "the piece with a finish reason is the last"
                    got += output.token_ids
                    finish = output.finish_reason
        except TimeoutError:
            assert got == expected(count, prompt)[: len(got)]
            return "left"
        except (EngineFailed, NobodyAlive, Overloaded):
            assert not got, "a stream that has begun ends right"
            return "failed"
        finally:
            await outputs.aclose()
        assert finish == "length"
        assert got == expected(count, prompt)
        return "whole"

    async def nothing_is_left(self) -> None:
        """Wait for the last turns; no promise, call, prefetch or lease is left."""
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert self.loop.promised() == NOTHING
        assert (self.wire.running, self.wire.prefetching) == (0, 0)
        prefills = sum(record.attempts for record in self.loop.account.latest())
        assert len(self.released) == len(set(self.released)) == prefills, "one lease a prefill"


TUNINGS = {
    "default": None,
    "late": Tuning(policy="late_binding"),
    "group": Tuning(cpp=2, slo=Slo(ttft_us=150), admission="none"),
}


@pytest.mark.parametrize(
    ("tuning", "chunk_tokens"), [("default", 1_000), ("default", 8), ("late", 8), ("group", 1_000)]
)
@pytest.mark.parametrize("seed", range(12))
def test_faults(seed: int, tuning: str, chunk_tokens: int) -> None:
    """Two prefill and two decode instances under any faults; prompts of one chunk and of several,
    of which decode instances fetch KV ahead; with late binding, and with groups."""

    async def main() -> None:
        rng = Random(seed)
        world = FaultyWorld(rng, chunk_tokens, TUNINGS[tuning])
        faults = asyncio.create_task(world.trouble())
        clients = []
        for number in range(_REQUESTS):
            clients.append(asyncio.create_task(world.one(number)))
            await asyncio.sleep(rng.uniform(0, 0.02))
        async with asyncio.timeout(600):
            outcomes = await asyncio.gather(*clients)
        assert not faults.done(), faults.result()
        faults.cancel()
        assert outcomes.count("whole") > _REQUESTS // 3, outcomes
        assert world.wire.calls.count(("decode", "d0")) > 10
        await world.nothing_is_left()
        world.wire.calm = True
        world.rejoin_missing()
        await asyncio.sleep(0.01)
        calm = await asyncio.gather(*(world.one(1_000 + number) for number in range(10)))
        assert set(calm) <= {"whole", "left"}
        await world.nothing_is_left()

    virtual_time.run(main())
