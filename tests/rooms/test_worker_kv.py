"""A worker's KV beside its passes: prefetched before a request, stored while it decodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonserve.core.request import Stopping
from moonserve.core.units import LeaseId, SegmentId
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.worker.job import KVDeadlines
from tests.support.kvstore import DictStore
from tests.support.workers import BLOCK, IDLE, Bench, job, prompt, run


async def until(true: Any) -> None:
    """Wait until a condition holds; fails after five seconds."""
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.002)


async def given_up(task: asyncio.Task[None]) -> None:
    """Disconnect, as the gateway does."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("length", [16, 22])
def test_blocks_come_while_others_are_computed(length: int) -> None:
    """Decode has prefill's published blocks before its call, which loads only the rest."""

    async def main() -> None:
        store = DictStore()
        prefill, decode = Bench(store), Bench(store)
        tokens, lease = prompt(length), LeaseId("x")
        full = length // BLOCK
        asked = asyncio.create_task(decode.runner.prefetch(lease, decode.keys(tokens)))
        await prefill.tokens(job("half", tokens[:9], new=1))
        await until(lambda: decode.runner.ledger().blocks_used == 2)
        assert not asked.done()
        [first] = await prefill.tokens(job("x", tokens, new=1, send_kv=True))
        await until(lambda: decode.runner.ledger().blocks_used == full)
        assert store.leases == ["x"], "a prefetch releases nothing"
        reads = store.reads
        decoding = job("x", tokens, take_kv=True, first_token=first)
        assert await decode.tokens(decoding) == decode.engine.reference(tokens, 5)
        assert store.reads - reads == (length % BLOCK > 0), "the tail at most"
        await asked
        page = decode.metrics.render().decode()
        assert f'kv_ahead_blocks_total{{engine="0",model_name="m"}} {full}.0' in page
        assert "kv_recomputed_tokens_total{" in page
        assert 'kv_recomputed_tokens_total{engine="0",model_name="m"} 0.0' in page
        await decode.idle()
        assert store.leases == []
        stages = [stage.what for stage in decode.runner.stages()]
        assert stages.count("ahead") >= 2
        assert stages.index("loaded") > stages.index("ahead")

    run(main())


def test_a_useless_prefetch_is_freed() -> None:
    """A hint whose decode never comes holds nothing after a disconnect or its deadline."""

    async def main() -> None:
        store = DictStore()
        tokens = prompt(16)
        await Bench(store).tokens(job("warm", tokens))
        decode = Bench(store, kv=KVDeadlines(ahead_s=0.1))
        keys = decode.keys(tokens)
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("x"), keys))
        await until(lambda: decode.runner.ledger().blocks_used == 4)
        await given_up(asked)
        assert decode.runner.ledger() == IDLE
        await decode.runner.prefetch(LeaseId("y"), keys)  # ends by its deadline
        assert decode.runner.ledger() == IDLE
        store.delay_s = 0.03
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("z"), keys))
        await until(lambda: decode.runner.ledger().blocks_used == 4)
        await given_up(asked)
        assert decode.runner.ledger().blocks_used == 4, "the store still writes to them"
        await decode.idle()
        await decode.runner.close()

    run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_decode_that_comes_during_a_prefetch_waits_for_it(delay_s: float) -> None:
    """Whenever decode claims the blocks, they are whole, and none is read twice or lost."""

    async def main() -> None:
        store = DictStore()
        tokens = prompt(22)
        prefill = Bench(store)
        [first] = await prefill.tokens(job("x", tokens, new=1, send_kv=True))
        store.delay_s = delay_s
        for after in range(8):
            decode = Bench(store)
            reads = store.reads
            lease = LeaseId(f"x{after}")
            hint = decode.runner.prefetch(lease, decode.keys(tokens))
            asked = asyncio.create_task(hint)
            await asyncio.sleep(after * 0.01)
            decoding = job(f"x{after}", tokens, take_kv=True, first_token=first)
            assert await decode.tokens(decoding) == decode.engine.reference(tokens, 5)
            assert store.reads - reads == 6
            await asked
            await decode.idle()
        store.leases.remove("x")
        assert store.leases == []

    run(main())


def test_a_lost_block_ends_the_prefetch_and_costs_only_time() -> None:
    """A block that could not be prefetched is looked for again, then computed."""

    async def main() -> None:
        store = DictStore()
        tokens = prompt(22)
        [first] = await Bench(store).tokens(job("x", tokens, new=1, send_kv=True))
        decode = Bench(store)
        keys = decode.keys(tokens)
        store.lost = lambda key: key == keys[2]
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("x"), keys))
        await until(lambda: decode.runner.ledger().blocks_used == 5)
        decoding = job("x", tokens, take_kv=True, first_token=first)
        assert await decode.tokens(decoding) == decode.engine.reference(tokens, 5)
        await asked
        await decode.idle()
        other = job("y", prompt(22, 2), take_kv=True, first_token=7, lease=LeaseId("z"))
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("z"), keys[:2]))
        await until(lambda: decode.runner.ledger().blocks_used == 2)
        assert len(await decode.tokens(other)) == 5, "another prompt takes none of it"
        await given_up(asked)
        await decode.idle()

    run(main())


def test_jobs_go_before_prefetched_blocks() -> None:
    """Prefetched blocks preempt no job, and a job that needs them gets them."""

    async def main() -> None:
        store = DictStore()
        tokens = prompt(32)
        await Bench(store).tokens(job("warm", tokens))
        engine = FakeEngine(block_size=BLOCK, num_blocks=10, cost=fake_cost(0, 0, 2_000))
        decode = Bench(store, engine=engine)
        keys = decode.keys(tokens)
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("x"), keys))
        await until(lambda: decode.runner.ledger().blocks_used == 8)
        mine = job("a", prompt(14, 2), new=24)
        assert await decode.tokens(mine) == decode.engine.reference(mine.prompt, 24)
        assert decode.preemptions() == 0
        await asked  # it gave its blocks away, and ended
        running = asyncio.create_task(decode.tokens(job("b", prompt(30, 3), new=10)))
        await until(lambda: decode.runner.ledger().running == 1)
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("y"), keys))
        await running
        assert decode.preemptions() == 0
        await given_up(asked)
        await decode.idle()

    run(main())


def test_a_growing_job_takes_prefetched_blocks() -> None:
    """A decode that needs its next block gets a prefetched one, without a preemption."""

    async def main() -> None:
        store = DictStore()
        tokens = prompt(16)
        await Bench(store).tokens(job("warm", tokens))
        decode = Bench(store, blocks=12)
        stream = decode.runner.generate(job("a", prompt(8, 2), new=30))
        got = [(await anext(stream)).token]
        asked = asyncio.create_task(decode.runner.prefetch(LeaseId("x"), decode.keys(tokens)))
        got += [piece.token async for piece in stream]
        assert got == decode.engine.reference(prompt(8, 2), 30)
        assert decode.preemptions() == 0
        await given_up(asked)
        await decode.idle()

    run(main())


def test_hints_are_bounded_and_repeated_ones_refused() -> None:
    """No more prompts are prefetched than may run; a second hint under one lease ends at once."""

    async def main() -> None:
        decode = Bench(DictStore(), max_seqs=2)
        keys = decode.keys(prompt(16))
        hints = [
            asyncio.create_task(decode.runner.prefetch(LeaseId(name), keys))
            for name in ("a", "a", "b", "c")
        ]
        await asyncio.sleep(0.01)
        assert [hint.done() for hint in hints] == [False, True, False, True]
        assert decode.runner.ledger().ahead == 2
        await asyncio.gather(*(given_up(hint) for hint in hints))
        await decode.idle()
        without = Bench(None)
        await without.runner.prefetch(LeaseId("a"), keys)

    run(main())


def test_a_slow_store_does_not_hold_up_the_next_chunk() -> None:
    """All passes of a prompt end before the first of its puts, which are done later."""

    async def main() -> None:
        store = DictStore()
        store.delay_s = 1.0
        bench = Bench(store, blocks=512)
        tokens = prompt(800)
        assert await bench.tokens(job("x", tokens, new=1)) == bench.engine.reference(tokens, 1)
        assert store.puts == 0, "the passes waited for no put"
        store.delay_s = 0.0
        await bench.idle()
        assert 128 <= store.puts <= 200

    run(main())


def test_a_hand_over_does_not_wait_for_a_store_for_ever() -> None:
    """After the flush deadline the prefill is handed over, and remaining puts are dropped."""

    async def main() -> None:
        store = DictStore()
        store.delay_s = 0.1
        bench = Bench(store, kv=KVDeadlines(flush_s=0.15))
        await bench.tokens(job("x", prompt(64), new=1, send_kv=True))
        assert store.puts < 16
        await bench.idle()
        assert store.puts < 16

    run(main())


def test_a_lease_is_released_after_the_last_put_under_it() -> None:
    """A put that outlasts the flush deadline does not take a lease that nothing would release."""

    async def main() -> None:
        store = DictStore()
        store.delay_s = 0.2
        bench = Bench(store, kv=KVDeadlines(flush_s=0.02))
        pieces = bench.runner.generate(job("x", prompt(64), new=5, send_kv=True))
        await anext(pieces)
        await pieces.aclose()
        await bench.idle()
        await asyncio.sleep(0.3)
        assert store.puts
        assert store.leases == []

    run(main())


@pytest.mark.parametrize(
    ("decode_kv", "midway", "at_end"), [("off", 0, 0), ("end", 0, 4), (2, 2, 4), (1, 3, 4)]
)
def test_decode_stores_what_it_generates(decode_kv: Any, midway: int, at_end: int) -> None:
    """Blocks of generated tokens continue the prompt's chain, as decode_kv says."""

    async def main() -> None:
        store = DictStore()
        prefill = Bench(store)
        engine = FakeEngine(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, 0, 5_000))
        decode = Bench(store, engine=engine, decode_kv=decode_kv)
        tokens = prompt(10)
        answer = decode.engine.reference(tokens, 18)
        chain = decode.keys([*tokens, *answer[:-1]])[2:]  # the last token has no KV
        [first] = await prefill.tokens(job("x", tokens, new=1, send_kv=True))
        await prefill.idle()
        mine = job("x", tokens, 18, take_kv=True, first_token=first, near=SegmentId("p0"))
        stream = decode.runner.generate(mine)
        got = []
        async for piece in stream:
            got.append(piece.token)
            if len(got) == 11:  # 20 tokens have KV
                await asyncio.sleep(0.002)
                assert sum(key in store.data for key in chain) == midway
        assert got == answer
        await decode.idle()
        assert sum(key in store.data for key in chain) == at_end
        assert store.near.count(SegmentId("p0")) == {"off": 0, "end": 1, 2: 2, 1: 4}[decode_kv]
        assert store.leases == []
        again = Bench(store)
        longer = (*tokens, *answer, *prompt(3, 5))
        pieces = [piece async for piece in again.runner.generate(job("next", longer))]
        assert [piece.token for piece in pieces] == again.engine.reference(longer, 5)
        assert pieces[0].cached_tokens == (24 if at_end else 8)

    run(main())


def test_a_cancelled_generation_is_stored_up_to_its_end() -> None:
    """If a client stops reading, the blocks generated by then are stored."""

    async def main() -> None:
        store = DictStore()
        bench = Bench(store)
        stream = bench.runner.generate(job("x", prompt(10), 100))
        got = [(await anext(stream)).token for _ in range(9)]
        await stream.aclose()
        await bench.idle()
        chain = bench.keys([*prompt(10), *got])
        assert len(chain) == 4
        assert all(key in store.data for key in chain)

    run(main())


def test_a_preempted_decode_stores_its_own_blocks() -> None:
    """A preempted job's stored blocks are right: a later prompt continues them."""

    async def main() -> None:
        store = DictStore()
        bench = Bench(store, blocks=12, decode_kv=1)
        jobs = [job(f"r{i}", prompt(7, i), new=25) for i in range(5)]
        await asyncio.gather(*(bench.tokens(each) for each in jobs))
        assert bench.preemptions() > 0, "the test must preempt to say anything"
        await bench.idle()
        for each in jobs:
            other = Bench(store)
            longer = (*each.prompt, *other.engine.reference(each.prompt, 25), 5, 6)
            pieces = [p async for p in other.runner.generate(job("next", longer, 3))]
            assert [p.token for p in pieces] == other.engine.reference(longer, 3)
            assert pieces[0].cached_tokens == 28

    run(main())


def test_a_stop_ends_like_a_length() -> None:
    """A generation that a stop token ends is stored like one that reaches its length."""

    async def main() -> None:
        store = DictStore()
        bench = Bench(store)
        answer = bench.engine.reference(prompt(10), 12)
        stopping = Stopping(max_tokens=50, stop_token_ids=(answer[-1],))
        assert await bench.tokens(job("x", prompt(10), stopping=stopping)) == answer
        await bench.idle()
        assert set(bench.keys([*prompt(10), *answer])) <= set(store.data)

    run(main())
