"""Laws of Batch and BlockPool: any mix of arrivals, cancels, failures and holds, a naive model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from moonserve.core.engine.batch import Batch, Pass, PassResult
from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import BadRequest
from moonserve.core.request import Sampling, Stopping
from moonserve.core.units import RequestId


def next_token(known: list[int]) -> int:
    """What the model says after `known`: any function of the whole prefix will do."""
    value = 7
    for token in known:
        value = (value * 31 + token + 1) % 1009
    return value


class BatchMachine(RuleBasedStateMachine):
    """An engine whose memory is a dict, beside one plain token list per request."""

    @initialize(
        blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        chunk=st.integers(1, 9),
        seqs=st.integers(1, 4),
    )
    def start(self, blocks: int, block_size: int, chunk: int, seqs: int) -> None:
        self.pool = BlockPool(blocks)
        self.batch = Batch(self.pool, block_size=block_size, chunk_tokens=chunk, max_seqs=seqs)
        self.block_size = block_size
        self.memory: dict[tuple[int, int], int] = {}
        self.known: dict[RequestId, list[int]] = {}
        self.left: dict[RequestId, int] = {}
        self.computed: dict[RequestId, int] = {}
        self.held: list[tuple[int, ...]] = []
        self.work: Pass | None = None
        self.count = 0

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14), new=st.integers(1, 9),
          load=st.integers(0, 14))  # fmt: skip
    def add(self, prompt: list[int], new: int, load: int) -> None:
        self.count += 1
        request = RequestId(f"r{self.count}")
        load = min(load, len(prompt) - 1)
        blocks = self.pool.allocate(-(-load // self.block_size))
        if blocks is None:
            load, blocks = 0, ()
        for at in range(load):
            self.memory[blocks[at // self.block_size], at % self.block_size] = prompt[at]
        fits = -(-(len(prompt) + new - 1) // self.block_size) <= self.pool.num_blocks
        try:
            self.batch.add(
                request,
                prompt,
                prompt_len=len(prompt),
                computed=load,
                blocks=blocks,
                sampling=Sampling(),
                stopping=Stopping(max_tokens=new),
            )
        except BadRequest:
            assert not fits
            self.pool.free(blocks)
            return
        assert fits
        self.known[request] = list(prompt)
        self.left[request] = new
        self.computed[request] = load

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.known:
            request = list(self.known)[pick % len(self.known)]
            assert self.batch.cancel(request)
            assert not self.batch.cancel(request), "a second cancel finds nothing"
            del self.known[request]

    @precondition(lambda self: self.work is None)
    @rule()
    def plan(self) -> None:
        self.work = self.batch.plan()
        if self.work is None:
            return
        chunks = self.work.chunks
        assert chunks
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.batch.chunk_tokens
        assert len({chunk.request for chunk in chunks}) == len(chunks) <= self.batch.max_seqs
        taken = [block for chunk in chunks for block in chunk.blocks]
        assert len(set(taken)) == len(taken), "a block in two requests"
        assert not {b for held in self.held for b in held} & set(self.written_blocks()), (
            "a held block is written"
        )

    def written_blocks(self) -> list[int]:
        """Blocks that the pass in flight writes."""
        size = self.block_size
        return [
            block
            for chunk in (self.work.chunks if self.work else ())
            for block in chunk.blocks[chunk.start // size :]
        ]

    @precondition(lambda self: self.work is not None)
    @rule(keep=st.booleans())
    def finish_pass(self, keep: bool) -> None:
        """Run the pass: write slots, read the whole context back, sample, account."""
        assert self.work is not None
        work, self.work = self.work, None
        sampled: dict[RequestId, int] = {}
        for chunk in work.chunks:
            end = chunk.start + len(chunk.tokens)
            for at, token in enumerate(chunk.tokens, chunk.start):
                slot = chunk.blocks[at // self.block_size], at % self.block_size
                self.memory[slot] = token
            context = [
                self.memory[chunk.blocks[at // self.block_size], at % self.block_size]
                for at in range(end)
            ]
            if chunk.request in self.known:
                known = self.known[chunk.request]
                assert context == known[:end], "KV read back is not the request's own"
                assert (chunk.sampling is not None) == (end == len(known))
            if chunk.sampling is not None:
                sampled[chunk.request] = next_token(context)
            full = chunk.blocks[: end // self.block_size]
            if keep and full:
                self.pool.hold(full)
                self.held.append(full)
        starts = {chunk.request: chunk for chunk in work.chunks}
        progress = self.batch.apply(work, PassResult(sampled, 1))
        assert [p.request for p in progress] == [
            c.request for c in work.chunks if c.request in self.known
        ]
        for step in progress:
            chunk = starts[step.request]
            assert step.computed_before == chunk.start
            assert step.computed_after == chunk.start + len(chunk.tokens)
            assert chunk.start in (0, self.computed[step.request]), "a gap in what was computed"
            self.computed[step.request] = step.computed_after
            if step.token is not None:
                assert step.token == next_token(self.known[step.request])
                self.known[step.request].append(step.token)
                self.left[step.request] -= 1
            assert (step.finish is not None) == (self.left[step.request] == 0)
            if step.finish is not None:
                del self.known[step.request]

    @precondition(lambda self: self.work is not None)
    @rule()
    def fail_pass(self) -> None:
        assert self.work is not None
        work, self.work = self.work, None
        failed = self.batch.abandon(work)
        assert failed == [c.request for c in work.chunks if c.request in self.known]
        for request in failed:
            del self.known[request]

    @precondition(lambda self: bool(self.held))
    @rule()
    def let_go(self) -> None:
        self.pool.free(self.held.pop(0))

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "batch"):
            in_flight = 0 if self.work is None else len(self.work.chunks)
            live = self.batch.running + self.batch.waiting
            assert len(self.known) <= live <= len(self.known) + in_flight
            assert self.pool.free_count + self.pool.used_count == self.pool.num_blocks

    def teardown(self) -> None:
        """Without new arrivals everything ends, and every block comes home."""
        if not hasattr(self, "batch"):
            return
        while self.held:
            self.let_go()
        for _ in range(5_000):
            if self.work is None:
                self.plan()
            if self.work is None:
                break
            self.finish_pass(keep=False)
        assert not self.known, "a request never ended"
        assert self.batch.running == self.batch.waiting == 0
        assert self.pool.free_count == self.pool.num_blocks


TestBatchLaw = BatchMachine.TestCase
TestBatchLaw.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
