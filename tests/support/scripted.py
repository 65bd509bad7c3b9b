"""Workers that follow a script, and a gateway's serving over them: no sockets, real Conductor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import InstanceInfo, Joined
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.embedded import EmbeddedServing
from moonserve.live.drive.lost import CallLost
from moonserve.live.drive.wire import Decoded, Prefilled
from moonserve.live.http.client import UpstreamError
from moonserve.live.ports import Output
from tests.support.cluster import exact, info

ANY = Slo()
NOTHING = Promised(0, 0, 0, 0)
PROMPT = tuple(range(9))


def next_token(tokens: list[int]) -> int:
    """The scripted model: a function of all tokens so far."""
    return (sum(tokens) * 31 + len(tokens)) % 1_000


def expected(count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens that one process would generate after the prompt."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


class ScriptedWire:
    """Workers that compute the scripted model, except where `faults` says otherwise, call by
    call."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, str, int]] = []
        """(role, what, after how many decode tokens); the next call of that role takes it."""
        self.calls: list[tuple[str, str]] = []
        self.salts: list[str | None] = []
        """The cache salt of each call."""
        self.cancelled = 0
        self.hanging = 0
        self.prefetches: list[tuple[str, str, int]] = []
        """(instance, lease, number of blocks) of each prefetch."""
        self.prefetching = 0
        self.running = 0
        """Prefill and decode calls that are out."""
        self.dead: set[str] = set()
        """Instances that do not listen any more."""
        self.gates: dict[str, asyncio.Event] = {}
        """Faults that end when these events are set."""

    def _fault(self, role: str) -> tuple[str, int]:
        for fault in self.faults:
            if fault[0] == role:
                self.faults.remove(fault)
                return fault[1], fault[2]
        return "", -1

    async def _fail(self, what: str) -> None:
        if what == "hang":
            self.hanging += 1
            try:
                await asyncio.sleep(3_600)
            finally:
                self.cancelled += 1
        if what in self.gates:
            await self.gates[what].wait()
        if what == "crash":
            raise UpstreamError("connection reset", sent=True)
        if what == "reset":
            raise CallLost("connection reset", retry=True)
        if what == "refused":
            raise UpstreamError("connection refused", sent=False)
        if what == "bug":
            raise KeyError("no such thing")
        if what == "bad":
            raise CallLost("answered 400", retry=False)

    async def died(self, to: InstanceInfo) -> bool:
        """Whether it listens no more."""
        return to.id in self.dead

    async def prefill(self, to: InstanceInfo, request: Request, body: bytes) -> Prefilled:
        """Returns one token after the prompt."""
        self.calls.append(("prefill", to.id))
        asked = msgspec.json.decode(body)
        self.salts.append(asked.get("cache_salt"))
        assert asked["max_tokens"] == 1
        self.running += 1
        try:
            await asyncio.sleep(0)  # as any call does
            await self._fail(self._fault("prefill")[0])
        finally:
            self.running -= 1
        token = next_token(asked["prompt"])
        return Prefilled((token,), "length", 4, {"first_token_id": token})

    async def prefetch(
        self, to: InstanceInfo, request: Request, lease: LeaseId, keys: Sequence[BlockKey]
    ) -> None:
        """Returns when it is cancelled, as after the decode call has come."""
        self.prefetches.append((to.id, lease, len(keys)))
        self.prefetching += 1
        try:
            await self._fail(self._fault("prefetch")[0])
            await asyncio.sleep(3_600)
        finally:
            self.prefetching -= 1

    async def decode(
        self, to: InstanceInfo, request: Request, body: bytes
    ) -> AsyncGenerator[Decoded, None]:
        """Yields the whole completion, first token included, two tokens a piece."""
        self.calls.append(("decode", to.id))
        asked = msgspec.json.decode(body)
        self.salts.append(asked.get("cache_salt"))
        known = list(asked["prompt"])
        what, after = self._fault("decode")
        tokens = []
        self.running += 1
        try:
            for count in range(asked["max_tokens"]):
                if count == after:
                    await self._fail(what)
                    if what == "short":
                        return
                known.append(next_token(known))
                tokens.append(known[-1])
                last = count == asked["max_tokens"] - 1
                if len(tokens) == 2 or last:
                    yield Decoded(tuple(tokens), "length" if last else None)
                    tokens = []
                    await asyncio.sleep(0)
        finally:
            self.running -= 1


class World:
    """Serving over scripted workers, and the leases that were released."""

    def __init__(
        self, *names: str, tuning: Tuning | None = None, wire: ScriptedWire | None = None
    ) -> None:
        self.wire = wire or ScriptedWire()
        self.released: list[LeaseId] = []
        made = Conductor(tuning, cost_of=exact) if tuning else Conductor()
        self.loop = ConductorLoop(made, self.released.append)
        self.cluster = EmbeddedServing(self.loop, self.wire, {"m": 100})  # type: ignore[arg-type]
        joins = [Joined(info(n, "prefill" if n[0] == "p" else "decode")) for n in names]
        self.loop.core.step(0, joins)

    def request(
        self, name: str = "r", count: int = 8, slo: Slo = ANY
    ) -> AsyncGenerator[Output, None]:
        """Ask for `count` tokens."""
        stopping = Stopping(max_tokens=count)
        return self.cluster.generate(
            Request(RequestId(name), "m", len(PROMPT), PROMPT, stopping=stopping, slo=slo)
        )

    async def settled(self) -> Promised:
        """The ledger after the loop has had its turns."""
        for _ in range(5):
            await asyncio.sleep(0)
        return self.loop.core.promised()


async def collect(outputs: AsyncGenerator[Output, None]) -> tuple[list[int], list[Output]]:
    """All tokens, and the pieces they came in."""
    pieces = [piece async for piece in outputs]
    return [token for piece in pieces for token in piece.token_ids], pieces
