"""One request's life under each fault, with each connector: workers of ours, and external engines.

The rules are the driver's, whatever its calls are: a failed call is made elsewhere, one whose
instance is lost is ended, a client that leaves ends all, and nothing stays promised.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec
import pytest

from moonserve.core.errors import MoonserveError
from moonserve.core.schedule.facts import Connector, Joined, Role
from moonserve.core.schedule.tuning import Tuning
from moonserve.live.drive.calls import Caller
from tests.support.cluster import info
from tests.support.external_site import SHORT, Site
from tests.support.fake_vllm import FakeVllm, spoken
from tests.support.scripted import NOTHING, World, expected

_PROMPT = "the quick brown fox jumps over the lazy dog, and then once more. "
_COUNT = 6


class Outcome(msgspec.Struct):
    """What one client got."""

    tokens: list[Any]
    right: list[Any]
    """What one instance alone would have given."""
    failed: bool = False
    """Whether an error came after the first token."""


class Road(Protocol):
    """A gateway with two instances of each role, whose faults the test makes."""

    async def ask(self) -> Outcome:
        """Stream one request."""

    def calls(self, role: Role) -> list[str]:
        """The instances of a role that were called, in the order of the calls."""

    def fail_next(self, role: Role) -> None:
        """The next call of a role ends in an error that another instance may not give."""

    def bug_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next call meets a bug of the gateway's own."""

    def hang(self, role: Role) -> None:
        """Calls of a role hang from now on."""

    async def hanging(self, role: Role) -> str:
        """Wait for the next call that hangs; its instance. Later calls do not hang."""

    def aborted(self) -> int:
        """How many calls that hung were broken off."""

    def restarted(self, name: str) -> None:
        """The Conductor learns that the instance is another start."""

    async def refuse(self, role: Role) -> None:
        """Nothing listens at the next instance of this role that is called."""

    def alive(self) -> int:
        """How many instances the Conductor knows."""

    def break_stream(self) -> None:
        """The next stream ends early, after two tokens."""

    async def settled(self) -> None:
        """Wait until nothing is promised and no call is out."""


class WorkerRoad:
    """Workers of ours, played by a script."""

    def __init__(self) -> None:
        self._world = World("p0", "p1", "d0", "d1")

    async def ask(self) -> Outcome:
        """See Road."""
        outcome = Outcome([], expected(_COUNT))
        with contextlib.suppress(MoonserveError):
            async for piece in self._world.request(count=_COUNT):
                outcome.tokens += piece.token_ids
            return outcome
        outcome.failed = True
        return outcome

    def calls(self, role: Role) -> list[str]:
        """See Road."""
        return [name for called, name in self._world.wire.calls if called == role]

    def fail_next(self, role: Role) -> None:
        """See Road."""
        self._world.wire.faults.append((role, "reset", 0))

    def bug_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See Road."""
        self._world.wire.faults.append(("prefill", "bug", 0))

    def hang(self, role: Role) -> None:
        """See Road."""
        self._world.wire.faults.append((role, "hang", 0))

    async def hanging(self, role: Role) -> str:
        """See Road."""
        while not self._world.wire.hanging:
            await asyncio.sleep(0)
        return self.calls(role)[-1]

    def aborted(self) -> int:
        """See Road."""
        return self._world.wire.cancelled

    def restarted(self, name: str) -> None:
        """See Road."""
        role: Role = "prefill" if name[0] == "p" else "decode"
        self._world.loop.tell(Joined(info(name, role, epoch=2)))

    async def refuse(self, role: Role) -> None:
        """See Road."""
        self._world.wire.faults.append((role, "refused", 0))

    def alive(self) -> int:
        """See Road."""
        return len(self._world.loop.instances())

    def break_stream(self) -> None:
        """See Road."""
        self._world.wire.faults.append(("decode", "short", 2))

    async def settled(self) -> None:
        """See Road."""
        assert await self._world.settled() == NOTHING
        assert self._world.wire.running == 0


class EngineRoad:
    """External engines on sockets."""

    def __init__(self, site: Site, whole: bool) -> None:
        self._site = site
        self._whole = whole
        self._number = 0

    def _of(self, role: Role) -> list[FakeVllm]:
        engines = self._site.engines
        return [engines[name] for name in engines if self._whole or name[0] == role[0]]

    async def ask(self) -> Outcome:
        """See Road."""
        self._number += 1
        prompt = f"{self._number} {_PROMPT * 3}"
        outcome = Outcome([], spoken(list(prompt.encode()), _COUNT))
        async with self._site.stream({"prompt": prompt, "max_tokens": _COUNT}) as events:
            async for event in events:
                outcome.failed = outcome.failed or "error" in event
                outcome.tokens += [choice["text"] for choice in event.get("choices", [])]
        return outcome

    def calls(self, role: Role) -> list[str]:
        """See Road."""
        names = [engine.name for engine in self._of(role)]
        return [name for name in self._site.calls if name in names]

    def fail_next(self, role: Role) -> None:
        """See Road."""
        statuses = deque([500])
        for engine in self._of(role):
            engine.statuses = statuses

    def bug_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See Road."""
        target = Caller._target
        bugs = [KeyError("no such thing")]

        def breaks(*args: Any) -> Any:
            if bugs:
                raise bugs.pop()
            return target(*args)

        monkeypatch.setattr(Caller, "_target", breaks)

    def hang(self, role: Role) -> None:
        """See Road."""
        for engine in self._of(role):
            engine.hold = asyncio.Event()

    async def hanging(self, role: Role) -> str:
        """See Road."""
        while not any(engine.running for engine in self._of(role)):
            await asyncio.sleep(0.001)
        [at] = [engine for engine in self._of(role) if engine.running]
        for engine in self._of(role):
            engine.hold = None
        return at.name

    def aborted(self) -> int:
        """See Road."""
        return sum(engine.aborted for engine in self._site.engines.values())

    def restarted(self, name: str) -> None:
        """See Road."""
        self._site.rejoin(name)

    async def refuse(self, role: Role) -> None:
        """See Road."""
        await self._of(role)[0].stop()

    def alive(self) -> int:
        """See Road."""
        return len(self._site.conductor.instances())

    def break_stream(self) -> None:
        """See Road."""
        for engine in self._of("decode"):
            engine.cut_after = 2

    async def settled(self) -> None:
        """See Road."""
        await self._site.settled()


@contextlib.asynccontextmanager
async def road_of(connector: Connector) -> AsyncIterator[Road]:
    """Two instances of each role with this connector, or two that serve whole requests."""
    if connector == "embedded":
        yield WorkerRoad()
        return
    site = Site(Tuning(), msgspec.structs.replace(SHORT, again_s=0.01))
    await site.start()
    try:
        if connector == "none":
            for name in ("a", "b"):
                await site.add(name, "both", "none")
        else:
            for name in ("p0", "p1", "d0", "d1"):
                await site.add(name, "prefill" if name[0] == "p" else "decode", connector)
        await asyncio.sleep(0)
        yield EngineRoad(site, whole=connector == "none")
    finally:
        await site.stop()


def run(connector: Connector, use: Callable[[Road], Awaitable[None]]) -> None:
    """Run a test with this connector; at its end nothing may be left."""

    async def main() -> None:
        async with asyncio.timeout(20), road_of(connector) as road:
            await use(road)
            await road.settled()

    asyncio.run(main())


CONNECTORS: list[Connector] = ["embedded", "none", "nixl", "mooncake", "sglang"]
PAIRS: list[tuple[Connector, Role]] = [
    (connector, role)
    for connector in CONNECTORS
    for role in (("both",) if connector == "none" else ("prefill", "decode"))
]
every_call = pytest.mark.parametrize(("connector", "role"), PAIRS)
every_connector = pytest.mark.parametrize("connector", CONNECTORS)


@every_connector
def test_the_reply_is_that_of_one_instance(connector: Connector) -> None:
    """Two requests in a row; nothing fails."""

    async def use(road: Road) -> None:
        for _ in range(2):
            outcome = await road.ask()
            assert (outcome.tokens, outcome.failed) == (outcome.right, False)

    run(connector, use)


@every_call
def test_a_failed_call_is_made_elsewhere(connector: Connector, role: Role) -> None:
    """An error before the client has anything: another instance of the role is called."""

    async def use(road: Road) -> None:
        road.fail_next(role)
        outcome = await road.ask()
        assert (outcome.tokens, outcome.failed) == (outcome.right, False)
        first, second = road.calls(role)[:2]
        assert first != second

    run(connector, use)


@every_connector
def test_a_bug_in_a_call_is_a_failed_call(
    connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even then the request is tried again, and never waits for ever."""

    async def use(road: Road) -> None:
        road.bug_next(monkeypatch)
        outcome = await road.ask()
        assert (outcome.tokens, outcome.failed) == (outcome.right, False)

    run(connector, use)


@pytest.mark.parametrize(("connector", "role"), [it for it in PAIRS if it != ("sglang", "decode")])
def test_a_call_ends_when_its_instance_is_lost(connector: Connector, role: Role) -> None:
    """The instance restarts while its call hangs: the call is cut, and made again.

    Not for SGLang's decode: the Conductor counts that call as prefill's until both have met.
    """

    async def use(road: Road) -> None:
        road.hang(role)
        asking = asyncio.create_task(road.ask())
        road.restarted(await road.hanging(role))
        outcome = await asking
        assert (outcome.tokens, outcome.failed) == (outcome.right, False)
        assert road.aborted() >= 1

    run(connector, use)


@every_call
def test_a_client_that_leaves_ends_its_calls(connector: Connector, role: Role) -> None:
    """Each instance that works for it sees the end of its connection."""

    async def use(road: Road) -> None:
        road.hang(role)
        asking = asyncio.create_task(road.ask())
        await road.hanging(role)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(5):
            while not road.aborted():
                await asyncio.sleep(0.001)

    run(connector, use)


@pytest.mark.parametrize(
    ("connector", "role"), [it for it in PAIRS if it != ("mooncake", "prefill")]
)
def test_an_instance_where_nothing_listens_is_forgotten(connector: Connector, role: Role) -> None:
    """It is called once at most, and others serve.

    Not for Mooncake's prefill: where its engine id is not known, its bootstrap server is asked
    first, which may be gone alone.
    """

    async def use(road: Road) -> None:
        alive = road.alive()
        await road.refuse(role)
        for _ in range(3):
            outcome = await road.ask()
            assert (outcome.tokens, outcome.failed) == (outcome.right, False)
        assert road.alive() == alive - 1

    run(connector, use)


@every_connector
def test_a_stream_that_breaks_off(connector: Connector) -> None:
    """Workers of ours resume it by its tokens; the client of an external engine gets an error."""

    async def use(road: Road) -> None:
        road.break_stream()
        outcome = await road.ask()
        if connector == "embedded":
            assert (outcome.tokens, outcome.failed) == (outcome.right, False)
        else:
            assert (outcome.tokens, outcome.failed) == (outcome.right[:2], True)
            assert len(road.calls("decode")) == 1, "what came is not sent again"

    run(connector, use)
