"""Parts of long prompts: chunked pipeline parallelism, in the form of core.schedule.pipeline.

    worker before --frames--> PartProgress: what is here of each layer --frames--> worker after
                                   ^                       |
                                   '-- engine's pass, layer by layer

A part is one pass of its own. It begins when the first layer of all earlier parts is here, and
waits before each layer for the earlier parts' KV of that layer. A worker fetches from the worker
before it, and gets all KV before its own part: what that worker has loaded, fetched and computed.

A part takes blocks when the part before it has its own, and the engine when that part has run or
runs: a worker with an engine waits only for a worker that has one and waits for less. Blocks are
kept until the worker after has their KV, and that worker waits for blocks too. Where groups cross
in full pools, they could wait for each other. So a part that follows another waits for its blocks
for a short time only.

The runner uses it, on its event loop. Any failure, on any worker, ends the part here: its streams
break off, so the failure reaches all parts of the prompt, and the gateway sees it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import xxhash

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    MoonserveError,
    Overloaded,
)
from moonserve.core.request import Finish, finish_of
from moonserve.core.units import Bytes, LeaseId, Micros, Tokens
from moonserve.live.ports import Engine
from moonserve.live.worker.intake import Intake
from moonserve.live.worker.job import ActiveJob, Job, Piece, PromptPart
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.workbench import Workbench

Fetch: TypeAlias = Callable[[str, LeaseId], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens the frames of a part, by the URL of its worker and its lease, once it has its blocks."""

log = logging.getLogger(__name__)
_HEAD = struct.Struct("<IIIQ")
"""Of a frame: layer, first block, number of blocks, checksum (XXH3-64) of the bytes that follow."""
_FRAME_BYTES: Bytes = 1 << 20
_MAX_PARTS = 256


class PartProgress:
    """How much of each layer's KV is here, in blocks from the prompt's start. A ports.Layers."""

    def __init__(self, layers: int, first: int, total: int, wait_s: float) -> None:
        """first: blocks that come from elsewhere; total: those and the part's own."""
        self.first = first
        self.total = total
        self.here = [0] * layers
        """Blocks from elsewhere that are here, by layer."""
        self.written = [False] * layers
        """Whether the part's own blocks are here, by layer."""
        self.waited_us: Micros = 0
        """The time its own pass waited for other parts."""
        self.served = False
        """Whether the worker after has asked for its KV."""
        self.taken = False
        """Whether the worker after has all of it."""
        self.failure: MoonserveError | None = None
        self._wait_s = wait_s
        self._pass_by_s: float | None = None
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Something changed: everything that waits looks again."""
        moved = self._moved
        self._moved = asyncio.Event()
        moved.set()

    def fail(self, error: MoonserveError) -> None:
        """The part has failed; the first reason counts."""
        self.failure = self.failure or error
        self.moved()

    async def until(
        self, ready: Callable[[], bool], what: str, wait_s: float | None = None
    ) -> None:
        """Wait, for so long at most. Raises the part's failure, or DeadlineExceeded."""
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            async with asyncio.timeout(wait_s):
                while self.failure is None and not ready():
                    await self._moved.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"a part of a prompt waited too long for {what}") from None
        if self.failure is not None:
            raise self.failure

    def loaded(self, blocks: int) -> None:
        """So many whole blocks are here; the part's own follow them."""
        self.first = blocks
        self.here = [blocks] * len(self.here)
        self.moved()

    def came(self, layer: int, blocks: int) -> None:
        """So many more blocks from elsewhere have this layer's KV."""
        self.here[layer] += blocks
        self.moved()

    async def reached(self, layer: int) -> None:
        """See ports.Layers."""
        self.written[layer] = True
        self.moved()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if self._pass_by_s is None:
            self._pass_by_s = began_s + self._wait_s  # for all layers together
        left_s = self._pass_by_s - began_s
        await self.until(lambda: self.here[layer] >= self.first, f"layer {layer}", left_s)
        self.waited_us += round((loop.time() - began_s) * 1e6)

    def count(self, layer: int) -> int:
        """How many blocks from the start have this layer's KV."""
        here = self.here[layer]
        return self.total if here >= self.first and self.written[layer] else here

    async def news(self, sent: list[int]) -> int | None:
        """The first layer that has more blocks than were sent; None once all were sent."""
        while True:
            for layer, count in enumerate(sent):
                if self.count(layer) > count:
                    return layer
            if min(sent) == self.total:
                return None
            await self.until(
                lambda: any(self.count(layer) > count for layer, count in enumerate(sent)),
                "its pass",
            )


class _OpenPart:
    """One part on this worker."""

    def __init__(self, active: ActiveJob, part: PromptPart, progress: PartProgress) -> None:
        self.active = active
        self.part = part
        self.progress = progress
        self.receiving: asyncio.Task[None] | None = None
        """What fetches the KV of earlier parts."""


class Parts:
    """The parts on this worker, by the lease that all parts of a prompt share."""

    def __init__(self, bench: Workbench, kv: WorkerKV, intake: Intake, fetch: Fetch | None) -> None:
        """fetch: how to get the KV of other workers' parts; None: this worker takes no parts."""
        self._bench = bench
        self._kv = kv
        self._intake = intake
        self._fetch = fetch
        self._frames = Frames(bench.engine)
        self.computing: set[asyncio.Task[None]] = set()
        """One for each part that has blocks. Never cancelled: a pass may write to them."""
        self._open: dict[LeaseId, _OpenPart] = {}
        self._arrived = asyncio.Event()

    def check(self, job: Job) -> None:
        """Raise BadRequest or Overloaded if `open` cannot take the job."""
        if self._fetch is None or self._bench.shape.layers == 1:
            raise BadRequest("this worker takes no part in pipelines", "kv_transfer_params")
        if job.lease in self._open:
            raise BadRequest("a part of this prefill is here already", "kv_transfer_params")
        if len(self._open) >= _MAX_PARTS:
            raise Overloaded(f"{_MAX_PARTS} parts of prompts are here", "worker_queue_full", 1.0)

    def open(self, active: ActiveJob, part: PromptPart) -> None:
        """Take a part, which is queued now or when the part before it has its blocks."""
        size = self._bench.shape.block_size
        total = -(-len(active.job.prompt) // size)
        progress = PartProgress(
            self._bench.shape.layers, part.start // size, total, self._bench.limits.chain_s
        )
        it = self._open[active.job.lease] = _OpenPart(active, part, progress)
        if part.source is None:
            self._enqueue(it)
        else:
            source = part.source
            it.receiving = self._bench.spawn(self._receive(it, source))
            it.receiving.add_done_callback(lambda task: self._received(it, source, task))

    def drop(self, job: Job) -> None:
        """The job of this part has ended."""
        it = self._open.pop(job.lease)
        it.progress.fail(EngineFailed("the request is over"))
        if it.receiving is not None:
            it.receiving.cancel()

    def fail(self, error: EngineFailed) -> None:
        """No part here can be computed any more."""
        for it in self._open.values():
            it.progress.fail(error)

    async def hand_on(self, lease: LeaseId) -> AsyncGenerator[bytes, None]:
        """The frames of a part that is here or will come, once it has its blocks.

        Raises DeadlineExceeded if it does not come, BadRequest if they were asked for before.
        """
        wait_s = self._bench.limits.chain_s
        try:
            async with asyncio.timeout(wait_s):
                while (it := self._open.get(lease)) is None or not it.active.blocks:
                    await self._arrived.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no part of {lease} came within {wait_s:g} s") from None
        if it.progress.served:
            raise BadRequest(f"the frames of {lease} were asked for before")
        it.progress.served = True
        frames = self._send(it)
        await anext(frames)  # only a generator that has begun notices that it is closed
        return frames

    # From the queue to the end.

    def _enqueue(self, it: _OpenPart) -> None:
        self._intake.arrive(it.active, lambda: self._start(it))

    def _start(self, it: _OpenPart) -> None:
        """The part has its blocks."""
        it.progress.moved()
        arrived = self._arrived
        self._arrived = asyncio.Event()
        arrived.set()
        task = asyncio.create_task(self._run(it))
        self.computing.add(task)
        task.add_done_callback(self.computing.discard)
        task.add_done_callback(self._bench.check)

    async def _run(self, it: _OpenPart) -> None:
        """Compute the part, and free its blocks when all is done."""
        active = it.active
        try:
            piece = await self._compute(it)
            if it.part.followed:
                await it.progress.until(lambda: it.progress.taken, "the worker after")
            if piece.finish is not None and piece.finish.reason == "length":
                await self._kv.hand_over(active, piece)
            else:
                self._bench.emit(active, piece)
        except MoonserveError as error:
            it.progress.fail(error)
            self._bench.emit(active, error)
            if self._bench.passes.hung:
                raise
        finally:
            if it.receiving is not None:
                it.receiving.cancel()
            self._intake.leave(active)
            self._bench.free(active.blocks)

    async def _compute(self, it: _OpenPart) -> Piece:
        bench = self._bench
        active = it.active
        progress = it.progress
        job = active.job
        if it.part.source is None:
            active.cached = await self._load(active)
            bench.metrics.entered(len(job.prompt), active.cached, take_kv=False)
            progress.loaded(active.cached // bench.shape.block_size)
        await progress.until(lambda: progress.here[0] >= progress.first, "the part before")
        start = progress.first * bench.shape.block_size
        chunk = Chunk(job.request, job.prompt[start:], start, active.blocks, active.next_sampling())
        self._kv.before_pass(job, chunk)
        work = Pass((chunk,))
        began_us = bench.clock.now_us()
        result = await bench.passes.run(work, progress)
        bench.samples.add_pass(work, result.elapsed_us - progress.waited_us)
        bench.samples.add_stage("computed", job.lease, began_us, progress.total - progress.first)
        bench.metrics.prompt_computed(len(chunk.tokens))
        bench.metrics.chain_wait(progress.waited_us)
        token = result.sampled[job.request]
        active.published = progress.first
        self._kv.publish(active, chunk, token)
        finish = finish_of(token, 1, job.stopping, bench.shape.eos_token_ids)
        # A token that is sampled amid a prompt has no meaning, and ends nothing.
        logprobs = None if result.logprobs is None else result.logprobs.get(job.request)
        ended = Finish("length") if it.part.followed else finish
        return Piece(token, ended, active.cached, logprobs=logprobs)

    async def _load(self, active: ActiveJob) -> Tokens:
        """Load what the store has for the first part; returns the tokens it need not compute."""
        count = len(active.wanted)
        if not count:
            return 0
        computed = await self._kv.load(active)
        if computed is None:
            active.blocks = active.blocks[count:]  # the store still writes to the others
            raise DeadlineExceeded("the store did not answer in time")
        return computed

    # From the worker before, to the worker after.

    async def _receive(self, it: _OpenPart, source: str) -> None:
        assert self._fetch is not None
        active = it.active
        progress = it.progress
        async with self._fetch(source, active.job.lease) as data:
            self._enqueue(it)
            room_s = self._bench.limits.room_s
            await progress.until(lambda: bool(active.blocks), "its blocks", room_s)
            began_us = self._bench.clock.now_us()
            await self._frames.receive(data, active.blocks, progress)
        self._bench.metrics.kv_chained.inc(progress.first)
        self._bench.samples.add_stage("chained", active.job.lease, began_us, progress.first)

    def _received(self, it: _OpenPart, source: str, task: asyncio.Task[None]) -> None:
        """However receiving failed, nothing waits for the rest of it."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, MoonserveError):
            log.error("%s: receiving KV failed", it.active.job.request, exc_info=error)
            error = EngineFailed("internal error")
        it.progress.fail(EngineFailed(f"no KV of the part before from {source}: {error}"))
        if not it.active.blocks:  # else `_run` reports it
            self._bench.emit(it.active, error)

    async def _send(self, it: _OpenPart) -> AsyncGenerator[bytes, None]:
        blocks = it.active.blocks
        progress = it.progress
        sent = [0] * len(progress.here)
        self._bench.pool.hold(blocks)
        try:
            yield b""
            while (layer := await progress.news(sent)) is not None:
                first = sent[layer]
                sent[layer] = min(progress.count(layer), first + self._frames.most_blocks)
                yield self._frames.frame(layer, first, blocks[first : sent[layer]])
            progress.taken = True
            progress.moved()
        except MoonserveError:
            return  # the worker after sees that not all came
        finally:
            if not progress.taken:
                progress.fail(EngineFailed("the worker of the next part went away"))
            self._bench.free(blocks)


class Frames:
    """How KV travels between parts: frames of one layer's bytes of some blocks that follow."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layer_bytes: Bytes = engine.shape.block_bytes // engine.shape.layers
        self.most_blocks = max(1, _FRAME_BYTES // self._layer_bytes)
        """How many blocks one frame carries at most."""

    def frame(self, layer: int, first: int, blocks: Sequence[int]) -> bytes:
        """One layer's bytes of these blocks; `first` is the place of the first in the prompt."""
        body = b"".join([self._slice(block, layer) for block in blocks])
        return _HEAD.pack(layer, first, len(blocks), xxhash.xxh3_64_intdigest(body)) + body

    async def receive(
        self, data: AsyncIterator[bytes], blocks: Sequence[int], progress: PartProgress
    ) -> None:
        """Copy frames into their blocks as they come, until all are here.

        Raises EngineFailed for a frame that is damaged or out of place, and where the data ends
        before all blocks are here.
        """
        buffer = bytearray()
        async for piece in data:
            buffer += piece
            while len(buffer) >= _HEAD.size:
                layer, first, count, checksum = _HEAD.unpack_from(buffer)
                if layer >= len(progress.here) or first != progress.here[layer]:
                    raise EngineFailed("a frame does not follow the one before")
                if not 0 < count <= progress.first - first:
                    raise EngineFailed("a frame goes beyond the blocks before this part")
                end = _HEAD.size + count * self._layer_bytes
                if len(buffer) < end:
                    break
                with memoryview(buffer)[_HEAD.size : end] as body:
                    if xxhash.xxh3_64_intdigest(body) != checksum:
                        raise EngineFailed("a frame was damaged on its way")
                    self._write(body, blocks[first : first + count], layer)
                del buffer[:end]
                progress.came(layer, count)
        if min(progress.here) < progress.first:
            raise EngineFailed("the stream ended before all KV had come")

    def _write(self, body: memoryview, blocks: Sequence[int], layer: int) -> None:
        for at, block in enumerate(blocks):
            with body[at * self._layer_bytes : (at + 1) * self._layer_bytes] as part:
                self._slice(block, layer)[:] = part

    def _slice(self, block: int, layer: int) -> memoryview:
        """One layer's bytes of a block."""
        return self._engine.block(block)[
            layer * self._layer_bytes : (layer + 1) * self._layer_bytes
        ]
