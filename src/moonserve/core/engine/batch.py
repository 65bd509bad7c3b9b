"""Continuous batching: which tokens of which request run in the engine's next pass.

There is no prefill phase and no decode phase. Every request has known tokens and computed tokens,
and each pass brings computed closer to known, as in vLLM v1. `plan` decides, an Engine runs the
pass, and `apply` accounts for it. The worker's serving loop and the simulator call it. It computes
no tokens itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import BadRequest
from moonserve.core.frozen import Frozen
from moonserve.core.request import Finish, Sampling, Stopping, TokenLogprobs, finish_of
from moonserve.core.units import Micros, RequestId, Tokens


class Counted:
    """A number of token ids that no engine reads: for simulation."""

    __slots__ = ("_count",)

    def __init__(self, count: Tokens) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class Chunk(Frozen, frozen=True):
    """Some tokens of one request to run in one pass.

    tokens[i] is at sequence position start + i. Its KV goes to slot (start + i) % block_size of
    block blocks[(start + i) // block_size]. `blocks` covers positions 0 .. start + len(tokens) - 1.
    With `sampling`, the token at position start + len(tokens) is sampled from the last logits.
    Counted tokens are a range, without blocks: no engine reads them.
    """

    request: RequestId
    tokens: Sequence[int]
    start: int
    blocks: tuple[int, ...]
    sampling: Sampling | None = None


class Pass(Frozen, frozen=True):
    """One engine pass: chunks of different requests, no request twice."""

    chunks: tuple[Chunk, ...]


class PassResult(Frozen, frozen=True):
    """The result of a pass: the sampled token of each chunk with `sampling`, and the time taken."""

    sampled: dict[RequestId, int]
    elapsed_us: Micros
    logprobs: dict[RequestId, TokenLogprobs] | None = None
    """Of the chunks that want them; None: no chunk does."""


class Progress(Frozen, frozen=True):
    """One request after one pass: tokens [computed_before, computed_after) have KV now."""

    request: RequestId
    token: int | None
    """The new token, if computed has caught up with known."""
    computed_before: Tokens
    computed_after: Tokens
    finish: Finish | None = None
    """Set with the last token: the request has left the batch, and its blocks are free."""


class _Seq:
    """One request inside the batch."""

    __slots__ = (
        "blocks", "cancelled", "computed", "id", "in_pass", "known", "most_known", "prompt_len",
        "sampling", "stopping", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: RequestId,
        tokens: Sequence[int] | Counted,
        prompt_len: Tokens,
        sampling: Sampling,
        stopping: Stopping,
    ) -> None:
        self.id = id
        self.tokens: list[int] | None = None if isinstance(tokens, Counted) else list(tokens)
        """The known tokens; None: they are only counted."""
        self.known: Tokens = len(tokens)
        """How many there are."""
        self.most_known: Tokens = prompt_len + stopping.max_tokens
        """With so many it has ended."""
        self.prompt_len = prompt_len
        self.computed: Tokens = 0
        self.blocks: list[int] = []
        self.sampling = sampling
        self.stopping = stopping
        self.in_pass = False
        """Whether the pass in flight, which is no DecodeStep, has a chunk of it."""
        self.cancelled = False


class DecodeStep(Frozen, frozen=True):
    """A pass without chunks, for simulation: every running request decodes one token."""

    seqs: int
    context: Tokens
    """Known tokens of all of them."""
    joined: Sequence[RequestId]
    """Those for which it is the first pass here, in order of arrival."""


class Batch:
    """Continuous batching over a block pool; one pass in flight at most.

    Requests keep their order of arrival: `running` first, then `waiting`. When blocks run out, the
    newest request loses its blocks and is computed again later from its known tokens. So the oldest
    request always continues, and every accepted request ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: Tokens,
        chunk_tokens: Tokens,
        max_seqs: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        assert min(block_size, chunk_tokens, max_seqs) > 0
        self.pool = pool
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self.max_seqs = max_seqs
        self.preemptions = 0
        self._eos = tuple(eos_token_ids)
        self._running: list[_Seq] = []
        self._waiting: deque[_Seq] = deque()
        self._by_id: dict[RequestId, _Seq] = {}
        self._in_flight: Pass | DecodeStep | None = None
        self._spent: Tokens = 0  # the part of chunk_tokens that the pass being planned uses

    @property
    def running(self) -> int:
        """Number of requests that take part in passes."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place or for blocks."""
        return len(self._waiting)

    def blocks_for(self, tokens: Tokens) -> int:
        """Number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def demand(self) -> int:
        """Number of blocks that the known tokens of all requests still need."""
        size = self.block_size
        needs = [
            need
            for seqs in (self._running, self._waiting)
            for seq in seqs
            if (need := -(-seq.known // size) - len(seq.blocks)) > 0
        ]
        return sum(needs)

    def has_room(
        self, known: Tokens, entering: int, promised: int, most_seqs: int | None = None
    ) -> bool:
        """Whether a prompt of `known` tokens fits beside the blocks that earlier requests need.

        entering: requests whose KV is being loaded; they will take `promised` more blocks.
        most_seqs: the most requests at once; None: max_seqs. The first request is always accepted.
        """
        before = len(self._running) + len(self._waiting) + entering
        if before == 0:
            return True
        if before >= (self.max_seqs if most_seqs is None else most_seqs):
            return False
        return self.blocks_for(known) <= self.pool.free_count - self.demand() - promised

    def check_fits(self, prompt_len: Tokens, max_tokens: Tokens) -> None:
        """Raise BadRequest if such a request cannot run even alone in the pool."""
        need = self.blocks_for(prompt_len + max_tokens - 1)  # the last token needs no KV
        if need > self.pool.num_blocks:
            room = self.pool.num_blocks * self.block_size
            raise BadRequest(
                f"prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) need {need} KV blocks,"
                f" but the pool has {self.pool.num_blocks} ({room} tokens); shorten one of them",
                param="prompt" if prompt_len > room else "max_tokens",
                code="context_length_exceeded",
            )

    def add(
        self,
        request: RequestId,
        known: Sequence[int] | Counted,
        *,
        prompt_len: Tokens,
        computed: Tokens = 0,
        blocks: Sequence[int] = (),
        sampling: Sampling,
        stopping: Stopping,
    ) -> None:
        """Add a request at the end of the queue.

        known: the prompt and any tokens generated elsewhere, at least one more than `computed`.
        blocks: allocated from this pool, with the KV of the first `computed` tokens; they are the
        batch's from now on. Raises BadRequest, and takes nothing, if it can never fit the pool.
        """
        assert request not in self._by_id, f"{request} is in the batch already"
        assert 0 < prompt_len <= len(known)
        assert 0 <= computed < len(known)
        assert len(blocks) >= self.blocks_for(computed)
        self.check_fits(prompt_len, stopping.max_tokens)
        seq = _Seq(request, known, prompt_len, sampling, stopping)
        seq.computed = computed
        seq.blocks.extend(blocks)
        self._by_id[request] = seq
        self._waiting.append(seq)

    def cancel(self, request: RequestId) -> bool:
        """Drop a request; its blocks stay held while a pass in flight writes to them.

        False: it is not here, because it has ended or was never added.
        """
        seq = self._by_id.get(request)
        if seq is None or seq.cancelled:
            return False
        if seq.in_pass or (isinstance(self._in_flight, DecodeStep) and seq in self._running):
            seq.cancelled = True
        else:
            self._drop(seq)
        return True

    def held(self, request: RequestId) -> tuple[Tokens, Sequence[int]] | None:
        """Return how many of its tokens have KV, and its blocks; None: it is not here."""
        seq = self._by_id.get(request)
        return None if seq is None else (seq.computed, tuple(seq.blocks))

    def plan(self) -> Pass | None:
        """Return the next pass; None: nothing can run now.

        It takes decodes first, then started prompts, then new requests in order of arrival, at most
        chunk_tokens tokens together. The caller ends it by `apply` or `abandon` before the next
        `plan`.
        """
        assert self._in_flight is None, "one pass at a time"
        preemptions = self.preemptions
        self._spent = 0
        planned: dict[_Seq, Tokens] = {}
        decodes = [seq for seq in self._running if seq.known - seq.computed == 1]
        if len(decodes) < len(self._running):
            decodes += [seq for seq in self._running if seq.known - seq.computed > 1]
        for seq in decodes:
            if seq.blocks:  # otherwise an earlier request in this loop has preempted it
                self._schedule(seq, planned)
        # A request preempted in this plan must not return in it: it would take its blocks back.
        while self._waiting and self.preemptions == preemptions:
            if len(self._running) >= self.max_seqs or not self._schedule(self._waiting[0], planned):
                break
            self._running.append(self._waiting.popleft())
        if not planned:
            return None
        work = Pass(tuple([self._chunk(seq, count) for seq, count in planned.items()]))
        self._in_flight = work
        return work

    def apply(self, work: Pass, result: PassResult) -> list[Progress]:
        """Account for a pass that ran; return a Progress per chunk of a request not cancelled."""
        progress: list[Progress] = []
        for seq, chunk in self._land(work):
            before = seq.computed
            seq.computed += len(chunk.tokens)
            token = finish = None
            if chunk.sampling is not None:
                token = result.sampled[seq.id]
                if seq.tokens is not None:
                    seq.tokens.append(token)
                seq.known += 1
                generated = seq.known - seq.prompt_len
                finish = finish_of(token, generated, seq.stopping, self._eos)
            progress.append(Progress(seq.id, token, before, seq.computed, finish))
            if finish is not None:
                self._drop(seq)
        return progress

    def abandon(self, work: Pass) -> list[RequestId]:
        """Drop every request of a pass that failed; return the ids of those not cancelled."""
        failed = [seq for seq, _ in self._land(work)]
        for seq in failed:
            self._drop(seq)
        return [seq.id for seq in failed]

    # For simulation: passes whose tokens are counted, not known, and end only by max_tokens.

    @property
    def context(self) -> Tokens:
        """Known tokens of all running requests."""
        return sum([seq.known for seq in self._running])

    def members(self) -> list[RequestId]:
        """The running requests, in order of arrival."""
        return [seq.id for seq in self._running]

    def wanted(self) -> list[RequestId]:
        """The running requests that were not cancelled, in order of arrival."""
        return [seq.id for seq in self._running if not seq.cancelled]

    def steady(self) -> int:
        """Return how many of the next passes are alike, so that `skip` may take them at once.

        In each of them every running request decodes one token, and none ends. No request may join
        meanwhile: a driver with a request to add skips only the passes before it, then adds it.
        """
        assert self._in_flight is None, "one pass at a time"
        running = self._running
        if not running or len(running) > self.chunk_tokens:
            return 0
        if self._waiting and len(running) < self.max_seqs:
            return 0
        passes = running[0].most_known
        for seq in running:
            if seq.known - seq.computed != 1:
                return 0
            left = seq.most_known - seq.known
            if left < passes:
                passes = left
        passes -= 1
        free = self.pool.free_count
        if len(running) * self.blocks_for(passes) <= free:
            return max(0, passes)
        while passes > 0 and self._new_blocks(passes) > free:
            passes //= 2
        return max(0, passes)

    def skip(self, passes: int) -> None:
        """Account for this many steady passes."""
        size = self.block_size
        for seq in self._running:
            seq.computed += passes
            seq.known += passes
            if seq.computed > len(seq.blocks) * size:
                grown = -(-seq.computed // size) - len(seq.blocks)
                taken = self.pool.allocate(grown)
                assert taken is not None
                seq.blocks += taken

    def plan_step(self) -> DecodeStep | None:
        """The next pass, if each of its requests decodes one token; None: ask `plan`.

        It is the pass that `plan` would return. The caller ends it by `apply_step`.
        """
        assert self._in_flight is None, "one pass at a time"
        running = self._running
        room = min(self.max_seqs, self.chunk_tokens) - len(running)
        if room < 0:
            return None
        joining = list(islice(self._waiting, room))
        members = running + joining
        size = self.block_size
        context = 0
        growing: list[_Seq] = []
        for seq in members:
            if seq.known - seq.computed != 1:
                return None
            context += seq.known
            if seq.known > len(seq.blocks) * size:  # by one token, so they need one block
                growing.append(seq)
        if not members or len(growing) > self.pool.free_count:
            return None
        for seq in growing:
            seq.blocks += self.pool.allocate(1) or ()
        for _ in joining:
            self._waiting.popleft()
        self._running = members
        step = DecodeStep(len(members), context, [seq.id for seq in joining])
        self._in_flight = step
        return step

    def apply_step(self, step: DecodeStep) -> list[Progress]:
        """Account for a pass of `plan_step`: each running request that was not cancelled has one
        token more. Returns the last Progress of those that have ended, in order of arrival."""
        assert step is self._in_flight, "not the pass in flight"
        self._in_flight = None
        ended: list[Progress] = []
        for seq in self._running[:]:
            if seq.cancelled:
                self._drop(seq)
                continue
            seq.computed += 1
            seq.known += 1
            if seq.known >= seq.most_known:
                computed = seq.computed
                ended.append(Progress(seq.id, 0, computed - 1, computed, Finish("length")))
                self._drop(seq)
        return ended

    def _new_blocks(self, passes: int) -> int:
        size = self.block_size
        return sum(
            [
                grown
                for seq in self._running
                if (grown := -(-(seq.computed + passes) // size) - len(seq.blocks)) > 0
            ]
        )

    def _land(self, work: Pass) -> list[tuple[_Seq, Chunk]]:
        """End the pass in flight, drop the requests cancelled meanwhile, and return the others."""
        assert work is self._in_flight, "not the pass in flight"
        self._in_flight = None
        wanted: list[tuple[_Seq, Chunk]] = []
        for chunk in work.chunks:
            seq = self._by_id[chunk.request]
            seq.in_pass = False
            if seq.cancelled:
                self._drop(seq)
            else:
                wanted.append((seq, chunk))
        return wanted

    def _schedule(self, seq: _Seq, planned: dict[_Seq, Tokens]) -> bool:
        """Plan as many tokens of `seq` as the budget allows, if there are blocks for them."""
        count = min(self.chunk_tokens - self._spent, seq.known - seq.computed)
        if count == 0 or not self._cover(seq, seq.computed + count, planned):
            return False
        planned[seq] = count
        self._spent += count
        return True

    def _cover(self, seq: _Seq, tokens: Tokens, planned: dict[_Seq, Tokens]) -> bool:
        """Give `seq` blocks for its first `tokens` tokens, from newer requests if necessary.

        False: even that is not enough now, because holders outside the batch have the rest.
        """
        need = -(-tokens // self.block_size) - len(seq.blocks)
        if need <= 0:
            return True
        while self.pool.free_count < need:
            victim = self._newest_holder_behind(seq)
            if victim is None:
                return False
            self._preempt(victim, planned)
        seq.blocks.extend(self.pool.allocate(need) or ())
        return True

    def _newest_holder_behind(self, seq: _Seq) -> _Seq | None:
        """Return the newest request with blocks, if it arrived after `seq`."""
        for other in chain(reversed(self._waiting), reversed(self._running)):
            if other is seq:
                return None
            if other.blocks:
                return other
        return None

    def _preempt(self, seq: _Seq, planned: dict[_Seq, Tokens]) -> None:
        """Free all blocks of `seq`: it will be computed again from its known tokens."""
        self.preemptions += 1
        self._spent -= planned.pop(seq, 0)
        self.pool.free(seq.blocks)
        seq.blocks.clear()
        seq.computed = 0
        if self._running and self._running[-1] is seq:
            self._waiting.appendleft(self._running.pop())

    def _chunk(self, seq: _Seq, count: Tokens) -> Chunk:
        start = seq.computed
        end = start + count
        seq.in_pass = True
        tokens = seq.tokens
        return Chunk(
            seq.id,
            range(count) if tokens is None else tuple(tokens[start:end]),
            start,
            () if tokens is None else tuple(seq.blocks[: self.blocks_for(end)]),
            seq.sampling if end == seq.known else None,
        )

    def _drop(self, seq: _Seq) -> None:
        del self._by_id[seq.id]
        (self._running if seq in self._running else self._waiting).remove(seq)
        self.pool.free(seq.blocks)
