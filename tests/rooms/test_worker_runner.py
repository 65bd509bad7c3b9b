"""The runner: it gives right tokens and holds nothing afterwards; tests/e2e covers the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import UNSET, UnsetType

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.errors import BadRequest, EngineFailed, Overloaded, TransferFailed
from moonserve.core.request import Stopping
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.record import DecodeTimes
from moonserve.core.shares import Party
from moonserve.core.units import LeaseId, RequestId
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.ports import Layers
from moonserve.live.worker.job import Job, KVDeadlines
from tests.support.kvstore import DictStore
from tests.support.workers import BLOCK, GREEDY, Bench, job, prompt, run


def test_many_jobs_get_their_own_tokens() -> None:
    """Jobs of all lengths at once give the reference's tokens, and nothing stays held."""

    async def main() -> None:
        bench = Bench()
        jobs = [job(f"r{i}", prompt(1 + 3 * i, i), new=1 + i % 7) for i in range(12)]
        got = await asyncio.gather(*(bench.tokens(each) for each in jobs))
        for each, tokens in zip(jobs, got, strict=True):
            assert tokens == bench.engine.reference(each.prompt, each.stopping.max_tokens)
        await bench.idle()
        await bench.runner.close()

    run(main())


def test_a_tiny_pool_preempts_and_stays_right() -> None:
    """With blocks for barely one job, preempted jobs are computed again to equal tokens."""

    async def main() -> None:
        for store in (None, DictStore()):
            bench = Bench(store, blocks=8)
            jobs = [job(f"r{i}", prompt(7, i), new=20) for i in range(6)]
            got = await asyncio.gather(*(bench.tokens(each) for each in jobs))
            assert [bench.engine.reference(each.prompt, 20) for each in jobs] == got
            assert bench.preemptions() > 0, "the test must preempt to say anything"
            await bench.idle()
            await bench.runner.close()

    run(main())


def test_warm_prefix_is_loaded_not_computed() -> None:
    """A second job computes only what the store does not have, at least its last token."""

    async def main() -> None:
        store = DictStore()
        first, second = Bench(store), Bench(store)
        tokens = prompt(16)
        await first.tokens(job("a", tokens))
        await first.idle()
        pieces = [p async for p in second.runner.generate(job("b", tokens))]
        assert [p.cached_tokens for p in pieces] == [12] * 5
        assert [p.token for p in pieces] == second.engine.reference(tokens, 5)
        load = second.runner.take_load()
        assert sum(sample.prefill_new for sample in load.passes) == 4
        assert load.transfers[0].size_bytes == 3 * second.engine.shape.block_bytes
        assert second.runner.take_load().passes == ()
        await second.idle()
        assert store.leases == []

    run(main())


@pytest.mark.parametrize("length", [3, 4, 8, 13])
def test_decode_continues_from_handed_over_kv(length: int) -> None:
    """Decode computes nothing of the prompt, repeats the first token, and frees the lease."""

    async def main() -> None:
        store = DictStore()
        prefill, decode = Bench(store), Bench(store)
        tokens = prompt(length)
        [first] = await prefill.tokens(job("x", tokens, new=1, send_kv=True))
        await prefill.idle()
        assert store.leases == ["x"], "kept for decode"
        got = []
        async for piece in decode.runner.generate(
            job("x", tokens, take_kv=True, first_token=first)
        ):
            got.append(piece.token)
            await asyncio.sleep(0)
            assert store.leases == [], "released after the load, not at the end"
        assert got == decode.engine.reference(tokens, 5)
        load = decode.runner.take_load()
        assert sum(s.prefill_new for s in load.passes) == 0
        assert sum(s.decode_seqs for s in load.passes) == 4
        await decode.idle()
        assert store.leases == []

    run(main())


def test_a_decode_reports_its_time_until_its_first_token() -> None:
    """Once, with the first token that it makes itself. Where there is one place, the second decode
    waits until the first one has ended."""

    async def main() -> None:
        cost = Cost((0, 0, 0, 0, 10_000, 0, 0), learns=False)
        engine = FakeEngine(block_size=BLOCK, num_blocks=64, cost=cost)
        prefill, decode = Bench(store := DictStore()), Bench(store, engine=engine, max_seqs=1)

        async def entries(name: str) -> list[DecodeTimes | UnsetType]:
            tokens = prompt(8)
            [first] = await prefill.tokens(job(name, tokens, new=1, send_kv=True))
            decoding = job(name, tokens, take_kv=True, first_token=first)
            return [piece.entry async for piece in decode.runner.generate(decoding)]

        first, second = await asyncio.gather(entries("x"), entries("y"))
        assert first == [UNSET, DecodeTimes(0, 0, 10_000), UNSET, UNSET, UNSET]
        assert second == [UNSET, DecodeTimes(40_000, 0, 10_000), UNSET, UNSET, UNSET]
        await decode.idle()

    run(main())


def test_lost_blocks_are_computed_again() -> None:
    """Whatever the store loses between find and read costs time, never a wrong token."""

    async def main() -> None:
        tokens = prompt(22)
        for bad in range(6):
            store = DictStore()
            prefill, decode = Bench(store), Bench(store)
            [first] = await prefill.tokens(job("x", tokens, new=1, send_kv=True))
            doomed = list(store.data)[bad]
            store.lost = lambda key, doomed=doomed: key == doomed  # type: ignore[misc]
            got = await decode.tokens(job("x", tokens, take_kv=True, first_token=first))
            assert got == decode.engine.reference(tokens, 5)
            labels = '{engine="0",model_name="m"}'
            page = decode.metrics.render().decode()
            assert f"kv_recomputed_tokens_total{labels} {22 - 4 * bad}.0" in page
            await decode.idle()

    run(main())


def test_a_tail_block_has_no_bytes_of_other_jobs() -> None:
    """The unused slots of a handed-over tail block are zero, whoever used the block before."""

    async def main() -> None:
        store = DictStore()
        bench = Bench(store, blocks=4)
        await bench.tokens(job("before", prompt(8, 9), new=8))
        await bench.tokens(job("x", prompt(6), new=1, send_kv=True))
        await bench.idle()
        [tail] = [data for data in store.data.values() if data[2 * 8 :] == bytes(2 * 8)]
        assert tail[: 2 * 8] != bytes(2 * 8)

    run(main())


def test_store_errors_and_delays_cost_no_request() -> None:
    """The runner serves without a store that fails or hangs; blocks it still writes stay held."""

    class Broken(DictStore):
        async def find(self, keys: Any, lease: Any) -> Any:
            raise TransferFailed("no")

        async def put(self, items: Any, lease: Any, parent: Any, near: Any) -> Any:
            raise ConnectionResetError("no")

        async def release(self, lease: Any) -> None:
            raise TransferFailed("no")

    async def main() -> None:
        bench = Bench(Broken())
        assert await bench.tokens(job("a", prompt(9))) == bench.engine.reference(prompt(9), 5)
        await bench.idle()
        store = DictStore()
        await Bench(store).tokens(job("a", prompt(9)))
        store.delay_s = 0.2
        deadlines = KVDeadlines(load_s=0.05)
        bench = Bench(store, kv=deadlines)
        assert await bench.tokens(job("a", prompt(9))) == bench.engine.reference(prompt(9), 5)
        assert bench.runner.ledger().blocks_used == 5, "two loading, three publishing"
        await bench.idle()

    run(main())


def test_cancel_at_any_moment_frees_all() -> None:
    """Jobs closed while queued, loading, prefilling, handing over or decoding hold nothing."""

    async def main() -> None:
        store = DictStore()
        await Bench(store).tokens(job("warm", prompt(30)))
        store.delay_s = 0.003
        engine = FakeEngine(block_size=BLOCK, num_blocks=40, cost=fake_cost(200, 20, 100))
        bench = Bench(store, engine=engine, max_seqs=2)
        kinds: list[dict[str, Any]] = [{}, {"send_kv": True}, {"take_kv": True, "first_token": 7}]
        for after in (0, 0.001, 0.004, 0.008, 0.02, 0.05):
            tasks = [
                asyncio.create_task(
                    bench.tokens(
                        job(f"{after}-{i}", prompt(30, i % 2), new=1 if i % 3 == 1 else 20,
                            **kinds[i % 3])
                    )
                )
                for i in range(9)
            ]  # fmt: skip
            await asyncio.sleep(after)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await bench.idle()
            handed_over = [t for t in tasks if not t.cancelled()]
            assert len(store.leases) <= len(handed_over)
            store.leases.clear()
        assert await bench.tokens(job("z", prompt(30))) == bench.engine.reference(prompt(30), 5)

    run(main())


def test_a_failed_pass_fails_its_requests_only() -> None:
    """An engine error reaches every request of the pass; later ones are served."""

    class Moody(FakeEngine):
        fails = True

        async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
            if self.fails:
                raise RuntimeError("out of luck")
            return await super().run(work, layers)

    async def main() -> None:
        engine = Moody(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, 0, 0))
        bench = Bench(engine=engine)
        with pytest.raises(EngineFailed, match="out of luck"):
            await bench.tokens(job("a", prompt(5)))
        engine.fails = False
        assert await bench.tokens(job("b", prompt(5))) == engine.reference(prompt(5), 5)
        assert bench.runner.failure is None
        await bench.idle()

    run(main())


def test_a_hung_engine_ends_the_worker() -> None:
    """A pass that misses its deadline fails every job, and `failure` reports it."""

    class Hung(FakeEngine):
        async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
            await asyncio.sleep(60)
            raise AssertionError

    async def main() -> None:
        bench = Bench(engine=Hung(block_size=BLOCK, num_blocks=64), pass_s=0.05)
        for _ in range(2):
            with pytest.raises(EngineFailed, match="did not end a pass"):
                await bench.tokens(job("a", prompt(5)))
        assert bench.runner.failure is not None

    run(main())


def test_reuse_is_capped_and_a_stopped_prefill_is_not_handed_over() -> None:
    """No more than job.reuse is loaded; a prefill that ended with a stop keeps no lease."""

    async def main() -> None:
        store = DictStore()
        bench = Bench(store)
        await bench.tokens(job("a", prompt(17)))
        await bench.idle()
        for reuse, loaded in ((0, 0), (3, 0), (9, 8), (400, 16)):
            [piece] = [
                p
                async for p in bench.runner.generate(
                    job(f"b{reuse}", prompt(17), new=1, send_kv=True, reuse=reuse)
                )
            ]
            assert piece.cached_tokens == loaded
        await bench.idle()
        assert store.leases == ["b0", "b3", "b9", "b400"]
        [token] = bench.engine.reference(prompt(17), 1)
        stopping = Stopping(max_tokens=1, stop_token_ids=(token,))
        stopped = Job(RequestId("s"), prompt(17), GREEDY, stopping, LeaseId("s"), send_kv=True)
        assert await bench.tokens(stopped) == [token]
        await bench.idle()
        assert "s" not in store.leases

    run(main())


def test_refusals() -> None:
    """A job that never fits, or finds the queue full, is refused at once and holds nothing."""

    async def main() -> None:
        bench = Bench(blocks=4, max_seqs=1, max_waiting=1)
        with pytest.raises(BadRequest):
            await bench.tokens(job("big", prompt(16), new=2))
        running = [asyncio.create_task(bench.tokens(job(f"r{i}", prompt(4), 9))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.tokens(job("late", prompt(4)))
        await asyncio.gather(*running)
        await bench.idle()

    run(main())


def test_close_ends_what_runs() -> None:
    """Closing fails the running requests instead of leaving them to wait."""

    async def main() -> None:
        bench = Bench(engine=FakeEngine(block_size=BLOCK, num_blocks=64))
        task = asyncio.create_task(bench.tokens(job("a", prompt(5), 100)))
        await asyncio.sleep(0.02)
        await bench.runner.close()
        with pytest.raises(EngineFailed, match="shutting down"):
            await task
        with pytest.raises(EngineFailed):
            await bench.tokens(job("b", prompt(5)))

    run(main())


def test_a_flood_leaves_places_for_others() -> None:
    """Jobs of one client fill the batch and the queue; another's job is next, and beside them."""

    async def main() -> None:
        bench = Bench(max_seqs=8, max_waiting=8, blocks=512, chunk_tokens=32)
        ended: list[str] = []

        async def serve(name: str, party: Party, new: int) -> None:
            await bench.tokens(job(name, prompt(3, len(name)), new=new, party=party))
            ended.append(name)

        flood = [asyncio.create_task(serve(f"f{i}", Party("", "a"), 200)) for i in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await bench.tokens(job("more", prompt(3), party=Party("", "a")))
        await serve("calm", Party("", "b"), 5)
        assert ended == ["calm"]
        await asyncio.gather(*flood)
        await bench.idle()
        assert bench.runner._intake._shares.used == 0
        await bench.runner.close()

    run(main())


def test_jobs_of_clients_with_little_go_first() -> None:
    """Where all places are taken, the next one is for the client that has less than its share."""

    async def main() -> None:
        bench = Bench(max_seqs=1, max_waiting=64)
        ended: list[str] = []

        async def serve(name: str, party: Party) -> None:
            await bench.tokens(job(name, prompt(3), party=party))
            ended.append(name)

        asked = [asyncio.create_task(serve(f"f{i}", Party(f"t{i}", "a"))) for i in range(3)] + [
            asyncio.create_task(serve("calm", Party("c", "b")))
        ]
        await asyncio.gather(*asked)
        assert ended == ["f0", "calm", "f1", "f2"]
        await bench.idle()
        await bench.runner.close()

    run(main())
