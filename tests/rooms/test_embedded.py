"""Requests on our own workers: resume, refusals, prefetch and keys, with workers played by a
script.

The faults that all connectors share are in test_driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest, EngineFailed, NobodyAlive, Overloaded
from moonserve.core.kv import keys
from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.facts import Joined
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import RequestId
from tests.support.cluster import info
from tests.support.records import record_of
from tests.support.scripted import NOTHING, PROMPT, World, collect, expected


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run a test's coroutine with a deadline."""
    asyncio.run(asyncio.wait_for(test(), 10))  # type: ignore[arg-type]


def test_tokens_of_prefill_and_decode_are_joined_once() -> None:
    """The first token comes from prefill, and the same token of decode's reply is skipped."""

    async def test() -> None:
        world = World("p0", "d0")
        tokens, pieces = await collect(world.request())
        assert tokens == expected(8)
        assert pieces[0].token_ids == tuple(expected(1))
        assert pieces[0].cached_tokens == 4
        assert [p.finish_reason for p in pieces][-1] == "length"
        assert world.wire.calls == [("prefill", "p0"), ("decode", "d0")]
        assert await world.settled() == NOTHING
        assert world.released == ["r/1"]
        record = record_of(world.loop, "r")
        assert (record.attempts, record.measured.cached_tokens, record.outcome) == (1, 4, "length")
        assert record.ttft_us is not None
        assert record.measured.tbt_us is not None
        errors = world.loop.core.errors.output
        assert errors.count == 1
        assert abs(errors.bias or 0.0) < 0.5  # the driver reports the whole length, max_tokens

    run(test)


def test_the_last_piece_decides_the_outcome() -> None:
    """A consumer that closes at the last piece has not cancelled; one that closes before it has."""

    async def test() -> None:
        world = World("p0", "d0")
        for name, last in (("whole", True), ("left", False)):
            outputs = world.request(name)
            async with aclosing(outputs):
                async for piece in outputs:
                    if (piece.finish_reason is not None) or not last:
                        break
            assert await world.settled() == NOTHING
        assert record_of(world.loop, "whole").outcome == "length"
        assert record_of(world.loop, "left").outcome == "cancelled"

    run(test)


def test_a_single_token_never_reaches_decode() -> None:
    """A request with max_tokens 1 ends with prefill."""

    async def test() -> None:
        world = World("p0", "d0")
        tokens, pieces = await collect(world.request(count=1))
        assert tokens == expected(1)
        assert pieces[-1].finish_reason == "length"
        assert world.wire.calls == [("prefill", "p0")]
        assert await world.settled() == NOTHING

    run(test)


@pytest.mark.parametrize("what", ["reset", "short"])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_lost_decode_resumes_without_a_gap_or_a_repeat(what: str, after: int) -> None:
    """Wherever decode breaks off, the client gets every token once."""

    async def test() -> None:
        world = World("p0", "d0", "d1")
        world.wire.faults = [("decode", what, after)]
        tokens, _ = await collect(world.request())
        assert tokens == expected(8)
        assert [who for role, who in world.wire.calls if role == "decode"] == ["d0", "d1"]
        assert await world.settled() == NOTHING
        assert world.released == ["r/1", "r/4"]  # one lease per prefill call

    run(test)


def test_every_call_has_the_salt() -> None:
    """Every call has it, retried ones too. A request without a salt sends none."""

    async def test() -> None:
        world = World("p0", "p1", "d0", "d1")
        world.wire.faults = [("prefill", "reset", 0), ("decode", "reset", 4)]
        request = Request(
            RequestId("r"), "m", len(PROMPT), PROMPT, stopping=Stopping(8), cache_salt="A"
        )
        assert (await collect(world.cluster.generate(request)))[0] == expected(8)
        assert world.wire.salts == ["A"] * len(world.wire.calls)
        assert len(world.wire.calls) == 5
        await collect(world.request("s"))
        assert world.wire.salts[5:] == [None, None]

    run(test)


def test_each_block_of_a_request_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's blocks and those of new tokens, whichever calls fail and however often."""
    hashed: list[bytes] = []

    def counting(data: bytes) -> Any:
        hashed.append(data)
        return sha256(data)

    async def test() -> None:
        world = Chunked("p0", "p1", "d0", "d1")
        world.wire.faults = [("prefill", "reset", 0), ("decode", "reset", 4)]
        namespace = info("p0", "prefill").namespace
        monkeypatch.setattr(keys, "sha256", counting)
        tokens, _ = await collect(world.request())
        assert tokens == expected(8)
        roots = hashed.count(hashed[0])
        known = len(PROMPT) + 5  # when the last call failed
        assert (roots, len(hashed) - roots) == (1, known // namespace.block_size)
        assert hashed[-1][:32] == keys.chain_keys(namespace.root(), [*PROMPT, *tokens], 4)[-3]

    run(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_closing_the_stream_cancels_everywhere(role: str) -> None:
    """A client that leaves in either phase cancels the call, and everything is released."""

    async def test() -> None:
        world = World("p0", "d0")
        world.wire.faults = [(role, "hang", 2)]
        stream = world.request()
        task = asyncio.ensure_future(collect(stream))
        async with asyncio.timeout(5):
            while not world.wire.hanging:
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        assert await world.settled() == NOTHING
        assert world.wire.cancelled == 1
        assert world.released == ["r/1"]

    run(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_outlives_the_restart_of_its_only_worker(role: str) -> None:
    """If the only instance of a role refuses, the request goes on when it is back."""

    async def test() -> None:
        world = World("p0", "d0")
        world.wire.faults = [(role, "refused", 0)]
        task = asyncio.ensure_future(collect(world.request()))
        await asyncio.sleep(0.01)
        lost = "p0" if role == "prefill" else "d0"
        assert lost not in world.loop.core.view.instances
        assert not task.done()
        world.loop.tell(Joined(info(lost, role, epoch=2)))  # type: ignore[arg-type]
        tokens, _ = await task
        assert tokens == expected(8)
        assert await world.settled() == NOTHING

    run(test)


def test_a_full_cluster_refuses_with_a_time_to_come_back() -> None:
    """Overloaded carries a reason and a Retry-After."""

    async def test() -> None:
        world = World("p0")
        tiny = msgspec.structs.replace(info("d0", "decode"), max_requests=1)
        world.loop.core.step(0, [Joined(tiny)])
        world.wire.faults = [("prefill", "hang", 0)]
        first = asyncio.ensure_future(collect(world.request("first")))
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded) as refused:
            await collect(world.request("second"))
        assert refused.value.reason == "instances_full"
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s >= 1
        first.cancel()
        assert await world.settled() == NOTHING

    run(test)


def test_a_refused_request_costs_no_prefill() -> None:
    """No call goes out for it. There is no Retry-After if an idle cluster would refuse it too."""

    async def test() -> None:
        tuning = Tuning(admission="predictive", slo=Slo(tbt_us=1), held_share=0.0)
        world = World("p0", "d0", tuning=tuning)
        with pytest.raises(Overloaded) as refused:
            await collect(world.request("a"))
        assert refused.value.reason == "tbt_slo"
        assert refused.value.retry_after_s is None
        assert world.wire.calls == []
        assert await world.settled() == NOTHING

    run(test)


@pytest.mark.parametrize("has_page", [True, False])
def test_a_refusal_and_each_line_of_the_log_name_the_page_where_there_is_one(
    has_page: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused, a late and a failed request: each says where the page shows it, or nothing."""

    async def test() -> None:
        caplog.set_level("DEBUG", "moonserve")
        world = World("p0", "d0", tuning=Tuning(admission="ttft"))
        world.loop.has_page = has_page
        world.wire.gates = {"computes": asyncio.Event()}
        world.wire.faults = [("prefill", "computes", 0), ("decode", "short", 2)]
        late = asyncio.ensure_future(collect(world.request("late", slo=Slo(ttft_us=100))))
        await asyncio.sleep(0.01)
        world.wire.gates["computes"].set()
        assert (await late)[0] == expected(8)
        with pytest.raises(Overloaded) as refused:
            await collect(world.request("refused", slo=Slo(ttft_us=1)))
        why = str(refused.value)
        assert why.startswith("predicted TTFT of 0.09 ms misses the objective of 0.001 ms")
        assert (
            why.endswith("; the page for operators shows it at /ui#/requests/refused") is has_page
        )
        assert ("/ui" in why) is has_page
        world.wire.faults = [("prefill", "reset", 0)] * 3
        with pytest.raises(EngineFailed) as failed:
            await collect(world.request("failed"))
        assert str(failed.value).endswith("shows it at /ui#/requests/failed") is has_page
        assert await world.settled() == NOTHING

    run(test)
    for said in (
        "late: the call to d0 failed: ",
        "late: missed its objectives",
        "refused: predicted TTFT of 0.09 ms misses",
        "failed: the call to p0 failed: ",
    ):
        line = next(it for it in caplog.messages if it.startswith(said))
        link = f"; the page for operators shows it at /ui#/requests/{said.partition(':')[0]}"
        assert line.endswith(link) is has_page, line
        assert ("/ui" in line) is has_page


@pytest.mark.parametrize("mode", ["ttft", "early"])
def test_one_dropped_when_its_prefill_has_ended_leaves_nothing(mode: str) -> None:
    """Its client sees no token, its lease is released, and its places are free again."""

    async def test() -> None:
        tuning = Tuning(admission=mode, slo=Slo(tbt_us=125))  # type: ignore[arg-type]
        world = World("p0", "d0", tuning=tuning)
        world.wire.gates = {"computes": asyncio.Event(), "decodes": asyncio.Event()}
        world.wire.faults = [("prefill", "computes", 0), ("decode", "decodes", 2)]
        late = asyncio.ensure_future(collect(world.request("late")))
        await asyncio.sleep(0.01)
        other = asyncio.ensure_future(collect(world.request("other")))
        await asyncio.sleep(0.01)
        assert world.loop.core.promised().decodes == 2
        world.wire.gates["computes"].set()
        with pytest.raises(Overloaded) as refused:
            await late
        assert refused.value.reason == "tbt_slo_late"
        assert world.loop.core.promised().requests == 1
        assert world.released == ["late/1"]
        world.wire.gates["decodes"].set()
        assert (await other)[0] == expected(8)
        assert [role for role, _ in world.wire.calls] == ["prefill", "prefill", "decode"]
        assert await world.settled() == NOTHING

    run(test)


def test_what_the_client_is_told() -> None:
    """No instance alive, a call without a retry and a duplicate id each raise their own error."""

    async def test() -> None:
        with pytest.raises(NobodyAlive):
            await collect(World().request())
        with pytest.raises(NobodyAlive):
            await collect(World("p0").request())
        world = World("p0", "d0")
        world.wire.faults = [("prefill", "bad", 0)]
        with pytest.raises(EngineFailed, match="answered 400"):
            await collect(world.request())
        assert await world.settled() == NOTHING
        world.wire.faults = [("prefill", "hang", 0)]
        first = asyncio.ensure_future(collect(world.request("same")))
        await asyncio.sleep(0.01)
        with pytest.raises(BadRequest):
            await collect(world.request("same"))
        first.cancel()
        assert await world.settled() == NOTHING

    run(test)


class Chunked(World):
    """A world whose workers prefill a prompt in several chunks."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            joining = info(name, "prefill" if name[0] == "p" else "decode")
            small = msgspec.structs.replace(joining, chunk_tokens=4)
            self.loop.core.step(0, [Joined(small)])


@pytest.mark.parametrize("what", ["", "reset", "refused", "bug"])
def test_decode_is_told_at_assignment(what: str) -> None:
    """It may pull under prefill's lease. The prefetch ends with the first token, whatever it
    did."""

    async def test() -> None:
        world = Chunked("p0", "d0")
        if what:
            world.wire.faults = [("prefetch", what, 0)]
        tokens, _ = await collect(world.request())
        assert tokens == expected(8)
        assert world.wire.prefetches == [("d0", "r/1", 2)]
        assert await world.settled() == NOTHING
        assert world.wire.prefetching == 0

    run(test)


def test_a_prompt_of_one_chunk_is_not_told_of() -> None:
    """There is nothing to pull before prefill ends."""

    async def test() -> None:
        world = World("p0", "d0")
        await collect(world.request())
        assert world.wire.prefetches == []

    run(test)


def test_a_hint_is_taken_back_with_its_call() -> None:
    """A failed or cancelled prefill ends the prefetch. The next attempt sends one under its own
    lease."""

    async def test() -> None:
        world = Chunked("p0", "p1", "d0")
        world.wire.faults = [("prefill", "reset", 0), ("decode", "reset", 3)]
        tokens, _ = await collect(world.request())
        assert tokens == expected(8)
        leases = [lease for _, lease, _ in world.wire.prefetches]
        assert leases == ["r/1", "r/3", "r/6"]
        await world.settled()
        assert world.wire.prefetching == 0
        world.wire.faults = [("prefill", "hang", 0)]
        task = asyncio.ensure_future(collect(world.request("s")))
        await asyncio.sleep(0.01)
        assert world.wire.prefetching == 1
        task.cancel()
        assert await world.settled() == NOTHING
        assert world.wire.prefetching == 0

    run(test)
