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

from moonserve.core.engine.batch import Batch, Counted, Pass, PassResult, Progress
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


SIZES = {
    "blocks": st.integers(1, 12),
    "block_size": st.integers(1, 4),
    "chunk": st.integers(1, 9),
    "seqs": st.integers(1, 4),
}
"""Of an engine."""


class BatchMachine(RuleBasedStateMachine):
    """An engine whose memory is a dict, beside one plain token list per request."""

    @initialize(**SIZES)
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


class CountedMachine(RuleBasedStateMachine):
    """Two batches of counted tokens: one by single passes of chunks, one in as few as it can."""

    @initialize(**SIZES)
    def start(self, blocks: int, block_size: int, chunk: int, seqs: int) -> None:
        self.slow, self.quick = (
            Batch(BlockPool(blocks), block_size=block_size, chunk_tokens=chunk, max_seqs=seqs)
            for _ in range(2)
        )
        self.count = 0

    @rule(prompt=st.integers(1, 14), new=st.integers(1, 9), lacks=st.integers(1, 3))
    def add(self, prompt: int, new: int, lacks: int) -> None:
        """Mostly with all KV loaded, as behind prefill instances."""
        self.count += 1
        for batch in (self.slow, self.quick):
            load = max(0, prompt - lacks)
            blocks = batch.pool.allocate(batch.blocks_for(load))
            if blocks is None:
                load, blocks = 0, ()
            try:
                batch.add(
                    RequestId(f"r{self.count}"),
                    Counted(prompt),
                    prompt_len=prompt,
                    computed=load,
                    blocks=blocks,
                    sampling=Sampling(),
                    stopping=Stopping(max_tokens=new),
                )
            except BadRequest:
                batch.pool.free(blocks)

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        name = RequestId(f"r{pick % (self.count + 1)}")
        assert self.slow.cancel(name) == self.quick.cancel(name)

    @rule(gone=st.integers(0, 99), pick=st.integers(0, 99))
    def run(self, gone: int, pick: int) -> None:
        """A run of equal passes, of which `gone` are over when it is broken off; or one pass, in
        which a request is cancelled."""
        steady = self.quick.steady()
        if steady > 1:
            passes = 1 + gone % steady
            self.quick.skip(passes)
            assert all(self._chunks(None) == [] for _ in range(passes))
            return
        cancelled = RequestId(f"r{pick % (self.count + 1)}")
        step = self.quick.plan_step()
        if step is not None:
            context = self.slow.context
            self.quick.cancel(cancelled)
            assert len(self.quick.members()) == step.seqs
            assert self._chunks(cancelled) == self.quick.apply_step(step)
            assert step.context >= context, "those that joined count as well"
            return
        work = self.quick.plan()
        if work is not None:
            self.quick.cancel(cancelled)
            ended = self.quick.apply(work, sampled(work))
            assert self._chunks(cancelled) == [one for one in ended if one.finish is not None]

    def _chunks(self, cancelled: RequestId | None) -> list[Progress]:
        """A pass of the slow one: what ended with it."""
        work = self.slow.plan()
        assert work is not None
        if cancelled is not None:
            self.slow.cancel(cancelled)
        return [it for it in self.slow.apply(work, sampled(work)) if it.finish is not None]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "slow"):
            return
        slow, quick = self.slow, self.quick
        assert slow.members() == quick.members()
        assert (slow.waiting, slow.preemptions) == (quick.waiting, quick.preemptions)
        assert slow.pool.free_count == quick.pool.free_count
        assert slow.demand() == quick.demand()
        for at in range(self.count):
            held = [batch.held(RequestId(f"r{at + 1}")) for batch in (slow, quick)]
            first, second = [it and (it[0], len(it[1])) for it in held]
            assert first == second, "tokens with KV, and blocks"


def sampled(work: Pass) -> PassResult:
    """Token 0 for each chunk that samples."""
    return PassResult({c.request: 0 for c in work.chunks if c.sampling is not None}, 1)


TestCounted = CountedMachine.TestCase
TestCounted.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
