"""The Conductor's port, in this process and at the other end of a unix socket or of TCP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Abort, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    Draining,
    InstanceInfo,
    Joined,
    Left,
    PrefillEnded,
)
from moonserve.core.schedule.record import Measured, PrefillTimes
from moonserve.core.units import BlockKey, InstanceId, LeaseId, RequestId, SegmentId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.fronts.server import FrontServer
from moonserve.live.ports import Conducting
from tests.support.cluster import exact, info
from tests.support.fronts import WELCOME, served
from tests.support.records import record_of

R = RequestId("r")
KEYS = (BlockKey(b"a" * 32), BlockKey(b"b" * 32))
MEASURED = Measured(tokens=5, tbt_us=7, handover_us=8, prefill=PrefillTimes(1, 2, 3, 4))


class Rig:
    """A Conductor with two instances, and the port to it."""

    def __init__(self) -> None:
        self.released: list[LeaseId] = []
        self.copied: list[tuple[Sequence[BlockKey], SegmentId, SegmentId | None]] = []
        self.loop = ConductorLoop(Conductor(cost_of=exact), self.released.append, self._copy)
        self.port: Conducting = self.loop

    async def _copy(self, *call: Any) -> int:
        self.copied.append(call)
        return len(call[0])

    def join(self, *infos: InstanceInfo) -> None:
        self.loop.tell(*map(Joined, infos))

    async def until(self, true: Callable[[], object]) -> None:
        """Poll until it is true."""
        while not true():
            await asyncio.sleep(0.002)

    async def open(self, name: RequestId = R, **more: Any) -> asyncio.Queue[Any]:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.port.open(Request(name, "m", 9, tuple(range(9)), **more), KEYS, inbox)
        return inbox

    def leave(self, outcome: str, name: RequestId = R) -> None:
        self.port.tell(ClientGone(name))
        self.port.close(name, outcome, MEASURED)


@contextlib.asynccontextmanager
async def rig_of(kind: str, folder: Path) -> AsyncIterator[Rig]:
    """A rig with this kind of port, connected."""
    rig = Rig()
    if kind == "here":
        yield rig
        return
    desk = FrontServer(rig.loop, WELCOME)
    desk.open()
    async with served(lambda: desk, str(folder / "link")) as at:
        rig.port = remote = RemoteConductor(at.road(kind))
        await remote.start(5)
        yield rig
        await remote.leave()
        desk.close()


Use = Callable[[Rig], Awaitable[None]]


@pytest.fixture(params=["here", "socket", "tcp"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Use], None]:
    """Runs a test over each implementation, within a time limit."""

    async def main(use: Use) -> None:
        async with asyncio.timeout(10), rig_of(request.param, tmp_path) as rig:
            await use(rig)

    return lambda use: asyncio.run(main(use))


def test_a_request_from_its_arrival_to_its_end(run: Callable[[Use], None]) -> None:
    """Prefill, Decode and the end. The record has outcome and times, and the ledger is zero."""

    async def use(rig: Rig) -> None:
        rig.join(info("p0", "prefill"), info("d0", "decode"))
        await rig.until(lambda: len(rig.port.instances()) == 2)
        assert list(rig.port.instances()) == [info("d0", "decode"), info("p0", "prefill")]
        inbox = await rig.open()
        assert rig.port.known(R)
        prefill = await inbox.get()
        assert isinstance(prefill, Prefill)
        assert (prefill.number, prefill.to) == (1, info("p0", "prefill"))
        assert prefill.decode == info("d0", "decode")
        decision = prefill.decision
        assert (decision.prefill, decision.prompt_tokens) == ("p0", 9)
        assert decision.chosen.instance == "p0"
        assert [share.instance for share in decision.shares] == ["p0"]
        assert rig.loop.core.promised().requests == 1
        rig.port.first_token(R, 4)
        rig.port.tell(PrefillEnded(R, 1, final=False))
        decode = await inbox.get()
        assert decode == Decode(R, 2, info("d0", "decode"))
        rig.port.tell(DecodeEnded(R, 2, 5))
        rig.leave("stop")
        assert not rig.port.known(R)
        await rig.until(lambda: rig.released)
        assert rig.released == ["r/1"]
        record = record_of(rig.loop, R)
        await rig.until(lambda: record.outcome == "stop")
        assert record.measured == msgspec.structs.replace(MEASURED, cached_tokens=4)
        assert not any(getattr(rig.loop.core.promised(), f) for f in ("requests", "decodes"))

    run(use)


def test_drained_instances_are_apart(run: Callable[[Use], None]) -> None:
    """They get no new work, so they stand in a list of their own until they are resumed."""

    async def use(rig: Rig) -> None:
        both = [info("d0", "decode"), info("p0", "prefill")]
        rig.join(*both)
        rig.loop.tell(Draining(InstanceId("d0"), both[0].epoch))
        await rig.until(rig.port.drained)
        assert (list(rig.port.drained()), list(rig.port.instances())) == (both[:1], both[1:])
        rig.loop.tell(Draining(InstanceId("d0"), both[0].epoch, drains=False))
        await rig.until(lambda: not rig.port.drained())
        assert list(rig.port.instances()) == both

    run(use)


def test_what_was_cached_may_be_said_at_the_end(run: Callable[[Use], None]) -> None:
    """An engine's stream reports it in its last event; then the record has it."""

    async def use(rig: Rig) -> None:
        rig.join(info("e", "both"))
        await rig.until(rig.port.instances)
        await (await rig.open()).get()
        rig.port.first_token(R, None)
        rig.port.tell(ClientGone(R))
        rig.port.close(R, "stop", Measured(cached_tokens=4))
        record = record_of(rig.loop, R)
        await rig.until(lambda: record.outcome == "stop")
        assert record.measured.cached_tokens == 4

    run(use)


def test_what_is_said_of_a_request_that_fails(run: Callable[[Use], None]) -> None:
    """Refuse if no instance is alive; Abort and a second Prefill if one is lost; GiveUp at the
    end."""

    async def use(rig: Rig) -> None:
        refuse = await (await rig.open()).get()
        assert isinstance(refuse, Refuse)
        assert refuse.reason == "nobody_alive"
        rig.leave("refused")
        rig.join(info("p0", "prefill"), info("p1", "prefill"), info("d0", "decode"))
        await rig.until(lambda: len(rig.port.instances()) == 3)
        inbox = await rig.open(slo=Slo(ttft_us=10**9), priority=1, tenant="t")
        first = await inbox.get()
        rig.join(info(first.to.id, "prefill", epoch=2))
        abort = await inbox.get()
        assert isinstance(abort, Abort)
        failed = {"length": 9, "keys": KEYS}
        rig.port.tell(CallFailed(R, 1, abort.why, retry=True, **failed))
        second = await inbox.get()
        assert isinstance(second, Prefill)
        assert second.to.id != first.to.id
        rig.port.tell(CallFailed(R, second.number, "broken", retry=False, **failed))
        assert await inbox.get() == GiveUp(R, "broken")
        rig.leave("failed")
        await rig.until(lambda: len(rig.released) == 2)

    run(use)


def test_who_leaves_frees_all(run: Callable[[Use], None]) -> None:
    """ClientGone ends a life in every state. Its id may be used again at once."""

    async def use(rig: Rig) -> None:
        rig.join(info("p0", "prefill"), info("d0", "decode"))
        await rig.until(lambda: rig.port.instances())
        for _ in range(3):  # the end of one and the arrival of the next are facts of one step
            inbox = await rig.open()
            assert isinstance(await inbox.get(), Prefill)
            rig.leave("cancelled")
        await rig.until(lambda: len(rig.released) == 3)
        assert rig.loop.core.promised().requests == 0

    run(use)


def test_copies_that_are_kept_are_asked_for(run: Callable[[Use], None]) -> None:
    """`keep` reaches the store with keys, target and source. An instance that has left is not
    listed."""

    async def use(rig: Rig) -> None:
        rig.port.keep(KEYS, SegmentId("p0"), None)
        await rig.until(lambda: rig.copied)
        assert rig.copied == [(KEYS, "p0", None)]
        rig.join(info("p0", "prefill"))
        await rig.until(lambda: rig.port.instances())
        rig.loop.tell(Left(InstanceId("p0"), 1))
        await rig.until(lambda: not rig.port.instances())

    run(use)


def test_a_refused_client_is_recognised_when_it_returns(run: Callable[[Use], None]) -> None:
    """It is recognised by model, tenant, last block key and length; its token ids are not
    needed."""

    async def use(rig: Rig) -> None:
        full = msgspec.structs.replace(info("p0", "prefill"), max_requests=1)
        rig.join(full, info("d0", "decode"))
        await rig.until(lambda: len(rig.port.instances()) == 2)
        await (await rig.open()).get()
        retries = rig.loop.core.retries
        for name in (RequestId("first"), RequestId("again")):
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            rig.port.open(Request(name, "m", 9), KEYS, inbox)
            refuse = await inbox.get()
            assert isinstance(refuse, Refuse)
            assert refuse.reason == "instances_full"
            rig.leave("refused", name)
            assert len(retries) == 1, "the same client keeps its time"
        rig.port.open(Request(RequestId("other"), "m", 10), KEYS, asyncio.Queue())
        await rig.until(lambda: len(retries) == 2)
        rig.leave("refused", RequestId("other"))
        rig.leave("cancelled")

    run(use)
