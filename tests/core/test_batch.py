"""Batch: what a pass holds, by example; the laws are in tests/law/test_batch_law.py."""

from __future__ import annotations

import pytest

from moonserve.core.engine.batch import Batch, Pass, PassResult, Progress
from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import BadRequest
from moonserve.core.request import Finish, Sampling, Stopping, finish_of
from moonserve.core.units import RequestId

GREEDY = Sampling(temperature=0)


def make(blocks: int = 8, block_size: int = 4, chunk: int = 8, seqs: int = 4) -> Batch:
    """A batch over its own pool."""
    return Batch(BlockPool(blocks), block_size=block_size, chunk_tokens=chunk, max_seqs=seqs)


def add(batch: Batch, name: str, length: int, new: int = 4) -> RequestId:
    """Add a request of `length` tokens."""
    request = RequestId(name)
    batch.add(
        request,
        range(length),
        prompt_len=length,
        sampling=GREEDY,
        stopping=Stopping(max_tokens=new),
    )
    return request


def run(batch: Batch) -> tuple[Pass, list[Progress]]:
    """One pass that samples 99 everywhere."""
    work = batch.plan()
    assert work is not None
    sampled = {chunk.request: 99 for chunk in work.chunks if chunk.sampling is not None}
    return work, batch.apply(work, PassResult(sampled, 1))


def shape(work: Pass) -> list[tuple[str, int, int]]:
    """The pass as (request, start, count)."""
    return [(chunk.request, chunk.start, len(chunk.tokens)) for chunk in work.chunks]


def test_prompts_run_in_chunks_within_the_budget() -> None:
    """A prompt longer than chunk_tokens takes several passes; only the last one samples."""
    batch = make()
    a = add(batch, "a", 11)
    work, progress = run(batch)
    assert shape(work) == [("a", 0, 8)]
    assert work.chunks[0].sampling is None
    assert progress == [Progress(a, None, 0, 8)]
    work, progress = run(batch)
    assert shape(work) == [("a", 8, 3)]
    assert work.chunks[0].sampling == GREEDY
    assert progress == [Progress(a, 99, 8, 11)]


def test_decodes_come_before_prompts() -> None:
    """A decoding request keeps its place in every pass; prompts share what budget is left."""
    batch = make(blocks=16)
    add(batch, "long", 30)
    run(batch)
    add(batch, "b", 3)
    batch.cancel(RequestId("long"))
    run(batch)
    add(batch, "c", 20)
    add(batch, "d", 5)
    work, _ = run(batch)
    assert shape(work) == [("b", 3, 1), ("c", 0, 7)]


def test_newest_is_preempted_and_comes_back_first() -> None:
    """Out of blocks, the newest request is recomputed later, with the tokens it has made."""
    batch = make(blocks=4, chunk=16)
    add(batch, "a", 8, new=8)
    add(batch, "b", 7, new=8)
    run(batch)
    assert batch.pool.free_count == 0
    add(batch, "c", 4)
    work, _ = run(batch)
    assert shape(work) == [("a", 8, 1)]
    assert (batch.preemptions, batch.running, batch.waiting) == (1, 1, 2)
    while batch.running + batch.waiting == 3:
        work, _ = run(batch)
    work, _ = run(batch)
    assert shape(work) == [("b", 0, 8), ("c", 0, 4)]
    assert work.chunks[0].tokens == (0, 1, 2, 3, 4, 5, 6, 99)


def test_who_was_preempted_does_not_come_back_in_the_same_pass() -> None:
    """What a preempted request gave up is not handed back to it at once."""
    batch = make(blocks=5, chunk=4)
    add(batch, "a", 8, new=8)
    add(batch, "b", 11)
    seen = [shape(run(batch)[0]) for _ in range(7)]
    assert seen[3] == [("a", 9, 1), ("b", 3, 3)]
    assert seen[4] == [("a", 10, 1)], "b waits for a block, and keeps what it has"
    assert seen[6] == [("a", 12, 1)]
    assert (batch.preemptions, batch.running, batch.pool.free_count) == (1, 1, 1)


def stuck_behind_a_hold() -> tuple[Batch, tuple[int, ...]]:
    """An older prompt "a" that lacked blocks others held, and "b" that went on to decode."""
    batch = make(blocks=6)
    add(batch, "a", 16)
    run(batch)
    held = batch.pool.allocate(3)
    assert held is not None
    add(batch, "b", 3)
    assert shape(run(batch)[0]) == [("b", 0, 3)]
    return batch, held


def test_a_newer_decode_comes_before_an_older_prompt() -> None:
    """Decodes are planned first also when a prompt in front of them catches up."""
    batch, held = stuck_behind_a_hold()
    batch.pool.free(held)
    assert shape(run(batch)[0]) == [("b", 3, 1), ("a", 8, 7)]


def test_preempting_takes_a_request_out_of_the_pass() -> None:
    """A decode already planned leaves the pass when an older prompt takes its blocks."""
    batch, held = stuck_behind_a_hold()
    batch.pool.free(held[:1])
    assert shape(run(batch)[0]) == [("a", 8, 7)]
    assert (batch.running, batch.waiting) == (1, 1)


def test_a_request_that_never_fits_is_refused() -> None:
    """A prompt and output larger than the whole pool is a 400 that names the field."""
    batch = make(blocks=2)
    with pytest.raises(BadRequest, match="need 3 KV blocks") as caught:
        add(batch, "a", 4, new=6)
    assert caught.value.param == "max_tokens"
    with pytest.raises(BadRequest) as caught:
        add(batch, "a", 9, new=1)
    assert caught.value.param == "prompt"
    add(batch, "a", 4, new=5)


def test_cancel_in_flight_frees_after_the_pass() -> None:
    """Blocks that a running pass writes are let go only when it has been applied."""
    batch = make()
    a = add(batch, "a", 8)
    work = batch.plan()
    assert work is not None
    assert batch.cancel(a)
    assert batch.pool.used_count == 2
    assert batch.apply(work, PassResult({a: 5}, 1)) == []
    assert batch.pool.used_count == 0


@pytest.mark.parametrize(
    ("token", "generated", "stopping", "expected"),
    [
        (2, 1, Stopping(max_tokens=5), Finish("stop")),
        (2, 1, Stopping(max_tokens=5, ignore_eos=True), None),
        (2, 5, Stopping(max_tokens=5, ignore_eos=True), Finish("length")),
        (2, 1, Stopping(max_tokens=5, ignore_eos=True, stop_token_ids=(2,)), Finish("stop", 2)),
        (7, 5, Stopping(max_tokens=5, stop_token_ids=(7,)), Finish("stop", 7)),
        (8, 4, Stopping(max_tokens=5, stop_token_ids=(7,)), None),
    ],
)
def test_reasons_to_stop(
    token: int, generated: int, stopping: Stopping, expected: Finish | None
) -> None:
    """EOS unless ignored, then stop tokens, then length."""
    assert finish_of(token, generated, stopping, (2,)) == expected


def test_room_is_what_those_before_do_not_still_need() -> None:
    """Alone anybody may come; beside others a prompt needs blocks that nobody was promised."""
    batch = make(blocks=10, seqs=2)
    assert batch.has_room(400, entering=0, promised=0)
    assert batch.has_room(40, entering=1, promised=0)
    assert not batch.has_room(41, entering=1, promised=0)
    assert not batch.has_room(37, entering=1, promised=1)
    assert not batch.has_room(1, entering=2, promised=0)
    assert batch.has_room(1, entering=2, promised=0, most_seqs=3)
    add(batch, "a", 9)
    assert batch.has_room(28, entering=0, promised=0)
    assert not batch.has_room(29, entering=0, promised=0), "three blocks are spoken for"
