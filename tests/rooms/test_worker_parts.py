"""Parts of a prompt on several runners: right tokens, shared failures, nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.errors import BadRequest, DeadlineExceeded, EngineFailed, MoonserveError
from moonserve.core.units import LeaseId, RequestId
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.ports import Layers
from moonserve.live.worker.job import Job, Piece, PromptPart
from tests.support.kvstore import DictStore
from tests.support.tiny import VOCAB, write_folder
from tests.support.workers import BLOCK, GREEDY, Bench, Stopping, job, prompt, run

SLOW_US = 400
"""The time of one prompt token, where a test acts in the middle of a pass."""


class Group:
    """Runners that fetch KV from each other; their URLs are their numbers."""

    def __init__(self, count: int, store: DictStore | None = None, **options: Any) -> None:
        self.store = store or DictStore()
        engines = options.pop("engines", [None] * count)
        self.benches = [
            Bench(self.store, engine=engine, fetch=self._fetch, **options) for engine in engines
        ]
        self.damage = -1
        """The index of the byte that is damaged on its way; -1: none."""
        self.silent = False
        """Whether a runner sends nothing."""
        self.bug = False
        """Whether fetching raises an error of a bug."""

    @contextlib.asynccontextmanager
    async def _fetch(self, url: str, lease: LeaseId) -> AsyncIterator[AsyncIterator[bytes]]:
        parts = self.benches[int(url)].runner.parts
        assert parts is not None
        async with contextlib.aclosing(await parts.hand_on(lease)) as frames:
            yield self._cut(frames)

    async def _cut(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The frames, cut into pieces anywhere."""
        count = 0
        async for frame in frames:
            if self.silent:
                await asyncio.sleep(60)
            if self.bug:
                raise ZeroDivisionError
            whole = bytearray(frame)
            if count <= self.damage < count + len(whole):
                whole[self.damage - count] ^= 1
            count += len(whole)
            for at in range(0, len(whole), 37):
                await asyncio.sleep(0)
                yield bytes(whole[at : at + 37])

    async def piece(self, at: int, part: Job) -> Piece:
        """The only piece of a part on the at-th runner."""
        [piece] = [piece async for piece in self.benches[at].runner.generate(part)]
        return piece

    def start(self, parts: Sequence[Job], first: int = 0) -> list[asyncio.Task[Piece]]:
        """Start each part on a runner of its own."""
        return [asyncio.create_task(self.piece(first + at, part)) for at, part in enumerate(parts)]

    async def idle(self) -> None:
        """Wait until no runner holds anything."""
        for bench in self.benches:
            await bench.idle()

    async def close(self) -> None:
        """Stop the runners."""
        for bench in self.benches:
            await bench.runner.close()


def parts_of(
    name: str, tokens: tuple[int, ...], starts: Sequence[int], sources: Sequence[str], **more: Any
) -> list[Job]:
    """Jobs for the parts of a prompt, which begin at `starts`; `sources` are their runners."""
    jobs: list[Job] = []
    ends = [*starts[1:], len(tokens)]
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = PromptPart(start, sources[at - 1] if at else None, followed=end < len(tokens))
        jobs.append(
            Job(
                RequestId(f"{name}.{at}"),
                tokens[:end],
                GREEDY,
                Stopping(max_tokens=1),
                LeaseId(name),
                send_kv=True,
                part=part,
                **more,
            )
        )
    return jobs


@pytest.mark.parametrize(
    ("length", "starts"),
    [(9, [0, 8]), (50, [0, 20]), (51, [0, 48]), (52, [0, 24, 40]), (61, [0, 4, 8, 60])],
)
def test_parts_are_the_whole(length: int, starts: list[int]) -> None:
    """The last part samples what one engine would, and the store has every block for decode."""

    async def main() -> None:
        group = Group(len(starts))
        tokens = prompt(length)
        names = [str(at) for at in range(len(starts))]
        pieces = await asyncio.gather(*group.start(parts_of("x", tokens, starts, names)))
        [expected] = group.benches[0].engine.reference(tokens, 1)
        assert pieces[-1].token == expected
        assert all(piece.finish and piece.finish.reason == "length" for piece in pieces)
        await group.idle()
        assert group.store.leases == ["x"], "kept for decode"
        assert group.store.puts == -(-length // BLOCK), "each block by who computed it"
        decode = Bench(group.store)
        resumed = job("x", tokens, take_kv=True, first_token=pieces[-1].token)
        assert await decode.tokens(resumed) == decode.engine.reference(tokens, 5)
        assert sum(sample.prefill_new for sample in decode.runner.take_load().passes) == 0
        for bench, start, end in zip(group.benches, starts, [*starts[1:], length], strict=True):
            [sample] = bench.runner.take_load().passes
            new, seqs = (0, 1) if end - start == 1 else (end - start, 0)
            assert (sample.prefill_new, sample.decode_seqs) == (new, seqs), "one pass"
            page = bench.metrics.render().decode()
            labels = '{engine="0",model_name="m"}'
            assert f"moonserve_kv_chained_blocks_total{labels} {start // BLOCK}.0" in page
        await group.close()

    run(main())


def test_a_reused_prefix_is_loaded_once_and_handed_on() -> None:
    """The first part loads what the store has, or computes it; the others get it from the first."""

    async def main() -> None:
        for lost in (False, True):
            store = DictStore()
            warm = Bench(store)
            await warm.tokens(job("warm", prompt(16)))
            await warm.idle()
            if lost:
                del store.data[warm.keys(prompt(16))[2]]
            store.reads = 0
            group = Group(3, store)
            jobs = parts_of("x", prompt(45), [16, 24, 36], ["0", "1"], reuse=16)
            pieces = await asyncio.gather(*group.start(jobs))
            assert pieces[-1].token == warm.engine.reference(prompt(45), 1)[0]
            assert pieces[0].cached_tokens == (8 if lost else 16)
            assert store.reads == (2 if lost else 4)
            await group.idle()
            assert store.leases == ["x"]

    run(main())


def test_the_torch_engine_gives_the_same_tokens_and_kv(tmp_path: Path) -> None:
    """In float32, a prompt in parts on three engines gives one engine's token and its KV."""
    pytest.importorskip("torch")
    import numpy as np

    from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference

    folder = write_folder(tmp_path / "tiny")
    tokens = tuple(token % VOCAB for token in prompt(101))

    def load() -> TorchEngine:
        return TorchEngine.load(folder, dtype="float32", block_size=BLOCK, num_blocks=64, threads=1)

    async def main() -> None:
        alone = load()
        expected = await asyncio.to_thread(greedy_reference, alone, tokens, 4)
        engines = [load() for _ in range(3)]
        group = Group(3, engines=engines, chunk_tokens=16)
        warm = await group.piece(1, job("warm", tokens[:20], new=1))
        assert warm.finish
        await group.idle()
        jobs = parts_of("x", tokens, [16, 48, 80], ["0", "1"], reuse=16)
        pieces = await asyncio.gather(*group.start(jobs))
        assert pieces[0].cached_tokens == 16
        assert pieces[-1].token == expected[0]
        await group.idle()
        keys = group.benches[0].keys(tokens)
        for at, key in enumerate(keys):
            stored = np.frombuffer(group.store.data[key], np.float32)
            computed = np.frombuffer(alone.block(at), np.float32)
            np.testing.assert_allclose(stored, computed, rtol=1e-4, atol=1e-4)
        resumed = job("x", tokens, new=4, take_kv=True, first_token=pieces[-1].token)
        assert await group.benches[0].tokens(resumed) == expected
        await group.close()
        for engine in (alone, *engines):
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))  # its threads know no virtual time


def slow() -> FakeEngine:
    """An engine whose passes take some time."""
    return FakeEngine(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, SLOW_US, 0))


def test_a_part_follows_one_layer_behind() -> None:
    """Two equal parts overlap: the second begins its pass before the first has ended its own."""

    async def main() -> None:
        group = Group(2, engines=[slow(), slow()])
        jobs = parts_of("x", prompt(200), [0, 100], ["0"])
        await asyncio.gather(*group.start(jobs))
        [first], [second] = (
            [stage for stage in bench.runner.stages() if stage.what == "computed"]
            for bench in group.benches
        )
        assert second.began_us < first.ended_us < second.ended_us
        await group.idle()

    run(main())


def test_others_are_served_while_a_part_waits() -> None:
    """Until the part before begins, a part holds neither blocks nor the engine."""

    async def main() -> None:
        group = Group(2)
        first, second = parts_of("x", prompt(200), [0, 100], ["0"])
        [waiting] = group.start([second], first=1)
        others = [job(f"o{i}", prompt(100, i)) for i in range(4)]
        got = await asyncio.gather(*(group.benches[1].tokens(each) for each in others))
        reference = group.benches[1].engine.reference
        assert got == [reference(each.prompt, 5) for each in others]
        assert group.benches[1].runner.ledger().blocks_used == 0
        await asyncio.gather(waiting, *group.start([first]))
        await group.idle()

    run(main())


def test_crossing_groups_in_full_pools_end() -> None:
    """Prompts whose parts cross on the same runners soon stop to wait for each other's blocks.

    Those that are served get the right tokens.
    """

    async def main() -> None:
        group = Group(2, blocks=40, room_s=0.1)  # a whole prompt needs 38
        crossing = []
        for at in range(6):
            jobs = parts_of(f"x{at}", prompt(150, at), [0, 76], [str(at % 2)])
            crossing += group.start(jobs) if at % 2 == 0 else group.start(jobs[::-1])
        ends = await asyncio.gather(*crossing, return_exceptions=True)
        for at in range(6):
            last = ends[2 * at + 1 - at % 2]
            if isinstance(last, Piece):
                assert [last.token] == group.benches[0].engine.reference(prompt(150, at), 1)
            else:
                assert isinstance(last, MoonserveError)
        await group.idle()
        jobs = parts_of("after", prompt(150), [0, 76], ["0"])
        pieces = await asyncio.gather(*group.start(jobs))
        assert [pieces[-1].token] == group.benches[0].engine.reference(prompt(150), 1)
        await group.idle()

    run(main())


async def both_fail(group: Group, tasks: list[asyncio.Task[Piece]]) -> list[MoonserveError]:
    """Check that every part fails and nothing is held; returns the errors."""
    errors = []
    for task in tasks:
        with pytest.raises(MoonserveError) as caught:
            await task
        errors.append(caught.value)
    await group.idle()
    assert group.store.leases == []
    return errors


def test_damage_on_the_way_fails_both() -> None:
    """A flipped bit anywhere in the frames fails the part that receives them and the sender."""

    async def main() -> None:
        for at in (0, 5, 9, 14, 30, 400):
            group = Group(2)
            group.damage = at
            await both_fail(group, group.start(parts_of("x", prompt(60), [0, 32], ["0"])))

    run(main())


def test_a_bug_in_fetching_fails_both_parts(caplog: pytest.LogCaptureFixture) -> None:
    """Both parts fail at once, and the log has the traceback."""

    async def main() -> None:
        group = Group(2)
        group.bug = True
        async with asyncio.timeout(5):
            await both_fail(group, group.start(parts_of("x", prompt(60), [0, 32], ["0"])))

    run(main())
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("leaves", [0, 1, 2])
@pytest.mark.parametrize("when_s", [0.0, 0.01, 0.03])
def test_a_cancelled_part_fails_the_others(leaves: int, when_s: float) -> None:
    """A part that is cancelled, at any time, fails the others, and no runner holds anything."""

    async def main() -> None:
        group = Group(3, engines=[slow(), slow(), slow()])
        tasks = group.start(parts_of("x", prompt(240), [0, 80, 160], ["0", "1"]))
        await asyncio.sleep(when_s)
        tasks[leaves].cancel()
        left = [task for at, task in enumerate(tasks) if at != leaves]
        if when_s == 0.0 and leaves == 0:  # it never came: the next parts wait in vain
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await group.idle()
        else:
            await both_fail(group, left[:1] if leaves == 2 else left)
            await asyncio.gather(*tasks, return_exceptions=True)
        await group.idle()

    run(main())


def test_a_failed_pass_fails_all_parts() -> None:
    """An engine's error in one part reaches every other part, and no later request."""

    class Moody(FakeEngine):
        async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
            if layers is not None:
                await layers.reached(0)
                raise RuntimeError("out of luck")
            return await super().run(work, layers)

    async def main() -> None:
        for bad, at in itertools.product(range(3), range(2)):
            engines: list[FakeEngine] = [slow() for _ in range(3)]
            engines[bad] = Moody(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, 0, 0))
            group = Group(3, engines=engines)
            jobs = parts_of("x", prompt(120), [0, 40, 80], ["0", "1"])
            errors = await both_fail(group, group.start(jobs))
            assert "out of luck" in str(errors[bad])
            other = job("o", prompt(9))
            assert await group.benches[at].tokens(other) == engines[0].reference(prompt(9), 5)

    run(main())


def test_waits_end_by_their_deadlines() -> None:
    """A part that waits in vain for another part fails and frees its blocks."""

    async def main() -> None:
        first, second = parts_of("x", prompt(60), [0, 32], ["0"])
        group = Group(2, chain_s=0.05)
        [error] = await both_fail(group, group.start([second], first=1))
        assert isinstance(error, DeadlineExceeded)
        [error] = await both_fail(group, group.start([first]))
        assert isinstance(error, DeadlineExceeded)
        group.silent = True
        await both_fail(group, group.start([first, second]))
        assert group.benches[1].runner.failure is None, "the engine does not hang"

    run(main())


def test_a_long_pass_is_no_hung_engine_while_its_layers_come() -> None:
    """The deadline of a pass holds for each layer of a part; the whole pass may take longer."""

    async def main() -> None:
        engines = [
            FakeEngine(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, 4_000, 0))
            for _ in range(2)
        ]
        group = Group(2, engines=engines, pass_s=0.2)
        pieces = await asyncio.gather(*group.start(parts_of("x", prompt(200), [0, 100], ["0"])))
        assert [pieces[-1].token] == engines[0].reference(prompt(200), 1)
        assert all(bench.runner.failure is None for bench in group.benches)
        await group.idle()

    run(main())


def test_an_engine_that_hangs_amid_its_layers_ends_its_worker() -> None:
    """Its worker reports a failure; the other worker's part fails, and that worker still serves."""

    class Hung(FakeEngine):
        async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
            assert layers is not None
            await layers.reached(0)
            await asyncio.sleep(60)
            raise AssertionError

    async def main() -> None:
        hung = Hung(block_size=BLOCK, num_blocks=64)
        group = Group(2, engines=[hung, slow()], pass_s=0.2, chain_s=1.0)
        first, second = group.start(parts_of("x", prompt(200), [0, 100], ["0"]))
        with pytest.raises(EngineFailed, match="did not end a pass"):
            await first
        first_runner = group.benches[0].runner
        assert first_runner.hung
        assert first_runner.failure is not None
        with pytest.raises(MoonserveError):
            await second
        await group.benches[1].idle()
        assert await group.benches[1].tokens(job("o", prompt(9))) == slow().reference(prompt(9), 5)

    run(main())


def test_a_worker_that_stops_ends_its_part_and_the_others() -> None:
    """Closing one runner during its pass fails the parts everywhere with one error each."""

    async def main() -> None:
        group = Group(2, engines=[slow(), slow()])
        tasks = group.start(parts_of("x", prompt(240), [0, 120], ["0"]))
        await asyncio.sleep(0.02)
        await group.benches[1].runner.close()
        for task in tasks:
            with pytest.raises(MoonserveError):
                await task
        await group.benches[0].idle()

    run(main())


def test_a_repeated_part_and_a_second_reader_are_refused() -> None:
    """A lease has one part on a runner, and one other worker reads its frames."""

    async def main() -> None:
        group = Group(2, engines=[slow(), slow()])
        first, second = parts_of("x", prompt(120), [0, 60], ["0"])
        tasks = group.start([first, second])
        await asyncio.sleep(0.01)
        again = Job(RequestId("y"), first.prompt, GREEDY, first.stopping, first.lease, True)
        with pytest.raises(BadRequest, match="here already"):
            await group.piece(0, Job(**{**fields(again), "part": first.part}))
        parts = group.benches[0].runner.parts
        assert parts is not None
        with pytest.raises(BadRequest, match="asked for before"):
            await parts.hand_on(first.lease)
        await asyncio.gather(*tasks)
        await group.idle()

    run(main())


def fields(of: Job) -> dict[str, Any]:
    """The fields of a struct."""
    return {name: getattr(of, name) for name in of.__struct_fields__}


def test_a_runner_without_peers_takes_no_part() -> None:
    """The runner refuses the part at once and holds nothing."""

    async def main() -> None:
        bench = Bench(DictStore())
        [part] = parts_of("x", prompt(20), [0], [])
        with pytest.raises(BadRequest, match="no part"):
            await bench.tokens(part)
        await bench.idle()

    run(main())


def test_samples_leave_waiting_out() -> None:
    """The time that a part's pass waits for others does not count as its engine's."""

    async def main() -> None:
        quick = FakeEngine(block_size=BLOCK, num_blocks=64, cost=fake_cost(0, 0, 0))
        group = Group(2, engines=[slow(), quick])
        await asyncio.gather(*group.start(parts_of("x", prompt(200), [0, 160], ["0"])))
        [sample] = group.benches[1].runner.take_load().passes
        assert sample.prefill_new == 40
        assert sample.elapsed_us < 160 * SLOW_US / 2
        await group.idle()

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_groups_and_cancels(seed: int) -> None:
    """Groups cross and are cancelled at random: all end, and those that are served are right."""

    async def main() -> None:
        draw = random.Random(seed)
        count = draw.randint(2, 4)
        group = Group(count, engines=[slow() for _ in range(count)], room_s=0.05, chain_s=2.0)
        tasks: list[asyncio.Task[Piece]] = []
        lasts: list[tuple[asyncio.Task[Piece], tuple[int, ...]]] = []
        for number in range(draw.randint(1, 4)):
            tokens = prompt(draw.randint(40, 200), number)
            order = draw.sample(range(count), draw.randint(2, count))
            cuts = sorted(draw.sample(range(BLOCK, len(tokens), BLOCK), len(order) - 1))
            jobs = parts_of(f"x{number}", tokens, [0, *cuts], [str(at) for at in order])
            pairs = zip(order, jobs, strict=True)
            tasks += [asyncio.create_task(group.piece(at, part)) for at, part in pairs]
            lasts.append((tasks[-1], tokens))
        for _ in range(draw.randint(0, 3)):
            await asyncio.sleep(draw.random() * 0.1)
            draw.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for last, tokens in lasts:
            if not last.cancelled() and last.exception() is None:
                assert [last.result().token] == group.benches[0].engine.reference(tokens, 1)
            else:
                assert last.cancelled() or isinstance(last.exception(), MoonserveError)
        await group.idle()
        await group.close()

    run(main())
