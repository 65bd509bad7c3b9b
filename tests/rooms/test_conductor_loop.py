"""The Conductor's loop: one timer, and a record of every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from moonserve.core.errors import StoreError
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Action, Decode, GiveUp, Prefill, Refuse, Spread
from moonserve.core.schedule.adoption import Tracked
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    ClientGone,
    DecodeEnded,
    Fact,
    Joined,
    PrefillEnded,
    SpreadUpTo,
)
from moonserve.core.schedule.record import Measured
from moonserve.core.schedule.shown import explained
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import (
    MICROS_PER_SECOND,
    BlockKey,
    LeaseId,
    Micros,
    RequestId,
    SegmentId,
    lease_of,
)
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.views import Figures, conductor_metrics
from tests.support import virtual_time
from tests.support.cluster import exact, info
from tests.support.records import record_of

R = RequestId("r")


class Sleeper(Conductor):
    """A Conductor that asks for a timer `naps` times, and notes its steps."""

    def __init__(self, naps: list[Micros]) -> None:
        super().__init__()
        self.naps = naps
        self.steps: list[tuple[Micros, list[Fact]]] = []

    def step(self, now_us: Micros, facts: Iterable[Fact]) -> list[Action]:
        """Note the step."""
        self.steps.append((now_us, list(facts)))
        return []

    def wake_us(self, now_us: Micros) -> Micros | None:
        """The next time, a fixed pause from now; None after the last one."""
        return now_us + self.naps.pop(0) if self.naps else None


def run(test: Callable[[], Any]) -> None:
    """Run in virtual time, with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(10):
            await test()

    virtual_time.run(main())


def fact(name: str = "x") -> Fact:
    """Some fact about a request."""
    return PrefillEnded(RequestId(name), 1, final=True)


@pytest.mark.python_core
def test_the_loop_steps_when_the_conductor_asked_for_it() -> None:
    """The timer steps without facts, not before its time, and as often as it is asked for."""

    async def test() -> None:
        core = Sleeper([20_000, 10_000])
        loop = ConductorLoop(core, lambda lease: None)
        loop.tell(fact())
        await asyncio.sleep(0.2)
        (t0, first), (t1, second), (t2, third) = core.steps
        assert [len(first), len(second), len(third)] == [1, 0, 0]
        slack_us = 2_000  # a loop may fire a timer early by its clock's resolution
        assert t1 >= t0 + 20_000 - slack_us
        assert t2 >= t1 + 10_000 - slack_us

    run(test)


@pytest.mark.python_core
def test_there_is_one_timer_and_stop_cancels_it() -> None:
    """A later time replaces the earlier one; after `stop` no timer fires."""

    async def test() -> None:
        core = Sleeper([30_000, 60 * MICROS_PER_SECOND])
        loop = ConductorLoop(core, lambda lease: None)
        loop.tell(fact())
        await asyncio.sleep(0.01)
        loop.tell(fact())
        await asyncio.sleep(0.1)
        assert len(core.steps) == 2  # the first timer is gone
        core.naps = [10_000]
        loop.tell(fact())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop.stop()
        await asyncio.sleep(0.05)
        assert len(core.steps) == 3

    run(test)


def loop_of(**tuning: Any) -> tuple[ConductorLoop, list[LeaseId]]:
    """A loop with one prefill and one decode instance."""
    released: list[LeaseId] = []
    core = Conductor(Tuning(**tuning), cost_of=exact)
    loop = ConductorLoop(core, released.append)
    loop.core.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
    return loop, released


async def inbox_of(loop: ConductorLoop, slo: Slo, name: RequestId = R) -> list[Action]:
    """The actions for a request of nine tokens, after some turns of the loop."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    loop.open(Request(name, "m", len(tuple(range(9))), tuple(range(9)), slo=slo), (), inbox)
    await asyncio.sleep(0.01)
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


def test_a_refused_request_has_a_record() -> None:
    """A refusal records its reason and the refused decision, and no attempt."""

    async def test() -> None:
        loop, released = loop_of(policy="kvcache_centric")
        [refuse] = await inbox_of(loop, Slo(ttft_us=1))
        assert isinstance(refuse, Refuse)
        loop.close(R, "refused")
        record = record_of(loop, R)
        assert (record.outcome, record.reason, record.attempts) == ("refused", "ttft_slo", 0)
        assert record.error == refuse.why
        assert record.decision is not None
        assert record.decision.predicted_ttft_us == 90
        assert released == []

    run(test)


def test_a_served_request_has_a_record_with_both_times() -> None:
    """A record has the decision at once, and measured values as they come."""

    async def test() -> None:
        loop, _ = loop_of(policy="late_binding")
        [prefill] = await inbox_of(loop, Slo())
        assert isinstance(prefill, Prefill)
        record = record_of(loop, R)
        assert (record.outcome, record.attempts) == ("running", 1)
        assert (loop.placed, loop.account.waited_us) == (1, prefill.decision.waited_us)
        loop.first_token(R, 4)
        loop.close(R, "length", Measured(tbt_us=1_234))
        assert record.ttft_us is not None
        assert record.ttft_us > 0
        assert record.measured == Measured(cached_tokens=4, tbt_us=1_234)
        assert record.outcome == "length"

    run(test)


def test_an_adopted_request_has_a_record_and_its_actions_go_to_its_inbox() -> None:
    """As if this loop had placed it; the leases of its earlier calls are released at the end."""

    async def test() -> None:
        first, _ = loop_of()
        kept = Tracked(Request(R, "m", 41), ())
        [prefill] = await inbox_of(first, Slo())
        assert isinstance(prefill, Prefill)
        kept.acted(prefill, first.now_us())
        kept.told(PrefillEnded(R, 1, final=False))
        second, released = loop_of()
        inbox: asyncio.Queue[Action] = asyncio.Queue()
        second.adopt(kept.adopted(), kept.facts, inbox)
        assert second.known(R)
        decode = await inbox.get()
        assert isinstance(decode, Decode)
        record = record_of(second, R)
        assert (record.outcome, record.attempts, record.decision) == (
            "running",
            1,
            prefill.decision,
        )
        second.tell(DecodeEnded(R, decode.number, 7))
        await asyncio.sleep(0.01)
        assert [str(it) for it in released] == [str(lease_of(R, 1))]
        assert second.promised() == Promised(0, 0, 0, 0)
        assert second.account.good == 1

    run(test)


def test_watchers_hear_of_each_request_once_it_is_over() -> None:
    """After its driver has closed it and the Conductor has released it, with its keys."""

    async def test() -> None:
        loop, _ = loop_of()
        over: list[tuple[str, str, int]] = []
        loop.watch_ended(lambda it: over.append((it.id, it.outcome, len(it.keys))))
        for name in ("a", "b"):
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            loop.open(Request(RequestId(name), "m", 40), (BlockKey(b"k"),), inbox)
        await asyncio.sleep(0)
        loop.tell(ClientGone(RequestId("a")))
        loop.close(RequestId("b"), "cancelled")
        await asyncio.sleep(0)
        assert over == []
        loop.close(RequestId("a"), "cancelled")
        assert over == [("a", "cancelled", 1)]
        loop.tell(ClientGone(RequestId("b")))
        await asyncio.sleep(0)
        assert over[1:] == [("b", "cancelled", 1)]
        assert record_of(loop, "b").keys == ()

    run(test)


def test_a_client_that_leaves_in_the_turn_of_its_arrival_has_a_record() -> None:
    """Its driver closes it before the Conductor has heard of it."""

    async def test() -> None:
        loop, _ = loop_of()
        loop.open(Request(R, "m", 40), (), asyncio.Queue())
        loop.tell(ClientGone(R))
        loop.close(R, "cancelled")
        record = record_of(loop, R)
        assert (record.outcome, record.ended_us is not None) == ("cancelled", True)

    run(test)


@pytest.mark.python_core
def test_a_bug_in_the_conductor_leaves_nobody_waiting() -> None:
    """If a step fails, every open request gets GiveUp."""

    async def test() -> None:
        class Broken(Conductor):
            def step(self, now_us: Micros, facts: Iterable[Fact]) -> list[Action]:
                raise AssertionError("a bug")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        loop = ConductorLoop(Broken(), lambda lease: None)
        [given_up] = await inbox_of(loop, Slo())
        assert isinstance(given_up, GiveUp)

    run(test)


@pytest.mark.python_core
def test_copies_are_asked_for_and_told_of() -> None:
    """The store copies in the background; the Conductor learns at once what will not come."""

    async def test() -> None:
        asked: list[tuple[int, str, str | None]] = []

        async def copy(keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
            asked.append((len(keys), to, source))
            if to == "lost":
                raise StoreError("no such segment")
            return 2

        keys = tuple(BlockKey(bytes([n])) for n in range(5))
        order = Spread(
            request=R,
            number=7,
            keys=keys,
            first=1,
            source=SegmentId("p0"),
            to=SegmentId("p1"),
            tokens=20,
            count=9.0,
            missed=False,
            holder_us=2_000_000,
            mean_us=900_000,
            target_us=0,
        )
        core = Sleeper([])
        loop = ConductorLoop(core, lambda lease: None, copy)
        loop.open(Request(R, "m", len((1,)), (1,)), (), asyncio.Queue())
        loop._act(order)
        loop._act(msgspec.structs.replace(order, number=8, to=SegmentId("lost")))
        loop._act(msgspec.structs.replace(order, number=9, first=3))
        await asyncio.sleep(0.01)
        assert asked == [(4, "p1", "p0"), (4, "lost", "p0"), (2, "p1", "p0")]
        told = [fact for _, facts in core.steps for fact in facts if isinstance(fact, SpreadUpTo)]
        assert told == [SpreadUpTo(7, 2), SpreadUpTo(8, 0)], "of the third all will come"
        loop.account.take(0, [], [order])
        assert explained(record_of(loop, R), lambda us: us).spread == (
            "Its first 20 tokens are copied from p0 to p1, in the background: about 9 requests "
            "asked for them lately, and the least loaded instance that has them has 2,000 ms of "
            "work, the mean is 900 ms, p1 has 0 ms."
        )
        loop.keep(keys, SegmentId("p1"), None)
        await asyncio.sleep(0.01)
        assert (asked[-1], loop.kept_blocks) == ((5, "p1", None), 2)
        page = generate_latest(Figures(partial(conductor_metrics, loop)))  # type: ignore[arg-type]
        assert b"moonserve_kept_blocks_total 2.0" in page
        assert b'moonserve_spread_skipped_total{reason="short"} 0.0' in page
        loop.stop()

    run(test)


def test_metrics_show_how_full_the_index_is() -> None:
    """The bound is the setting's; what it makes the index forget is counted."""
    core = Conductor(Tuning(max_indexed_blocks=4))
    keys = tuple(BlockKey(bytes([n])) for n in range(6))
    core.step(0, [BlocksStored(SegmentId("p0"), keys[:4], None, "dram", 1)])
    core.step(1, [BlocksStored(SegmentId("p1"), keys[:1], None, "dram", 1)])
    core.step(2, [BlocksRemoved(SegmentId("p0"), keys[3:4], "dram", 1)])
    loop = ConductorLoop(core, lambda lease: None)
    page = generate_latest(Figures(partial(conductor_metrics, loop))).decode()  # type: ignore[arg-type]
    assert "moonserve_index_blocks 4.0" in page
    assert "moonserve_index_limit_blocks 4.0" in page
    assert "moonserve_index_evicted_blocks_total 1.0" in page
    assert core.index.match(keys).by_holder == {"p0": 3, "p1": 1}
