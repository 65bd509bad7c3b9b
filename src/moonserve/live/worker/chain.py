"""Parts of long prompts: chunked pipeline parallelism, in the form of core.schedule.pipeline.

    worker before --frames--> Chain: what is here of each layer --frames--> worker after
                                ^                    |
                                '---- engine's pass, layer by layer

A part is one pass of its own, begun when the first layer of all earlier parts is here; it is told
of each layer, and waits for the earlier parts' KV of that layer. A worker pulls from the one before
it, and gets all that comes before its own part: what that one has loaded, was sent and computes.

A part takes blocks when the part before it has its own, and the engine when that one has run or
runs: whoever has an engine waits for somebody who has one and waits for less. Blocks are kept until
the worker after has their KV, which waits for blocks too: where groups cross in full pools, that
could be for each other. So a part with one before it waits for its blocks for a short time only.

Used by the runner, on its event loop. Whatever fails, on any worker, ends the part here: streams
break off, so the failure reaches all of the chain, and the router hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import xxhash

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    MoonserveError,
    Overloaded,
)
from moonserve.core.request import Finish, finish_of
from moonserve.core.units import Bytes, LeaseId, Micros
from moonserve.live.ports import Clock, Engine
from moonserve.live.worker.job import Job, Live, Part, Piece
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.metrics import Metrics
from moonserve.live.worker.passes import Passes
from moonserve.live.worker.replies import Replies

Fetch: TypeAlias = Callable[[str, LeaseId], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens the frames of the part of this lease at the worker of this URL, once it has its blocks."""

log = logging.getLogger(__name__)
_HEAD = struct.Struct("<IIIQ")
"""Of a frame: layer, first block, how many, checksum (XXH3-64) of the bytes that follow."""
_FRAME_BYTES: Bytes = 1 << 20
_MAX_PARTS = 256


class Chain:
    """How much of each layer's KV is here, in blocks from the prompt's start. A ports.Layers."""

    def __init__(self, layers: int, first: int, total: int, wait_s: float) -> None:
        """first: blocks that come from elsewhere; total: those with the part's own."""
        self.first = first
        self.total = total
        self.here = [0] * layers
        """Of those that come from elsewhere."""
        self.written = [False] * layers
        """Whether its own are here."""
        self.waited_us: Micros = 0
        """For other parts, in its own pass."""
        self.served = False
        """Whether the worker after has come for it."""
        self.taken = False
        """Whether that one got all."""
        self.failure: MoonserveError | None = None
        self.feeding: asyncio.Task[None] | None = None
        self._wait_s = wait_s
        self._pass_by_s: float | None = None
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Something changed: whoever waits looks again."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def fail(self, error: MoonserveError) -> None:
        """Nothing more will come of it; the first reason counts."""
        self.failure = self.failure or error
        self.moved()

    async def until(
        self, ready: Callable[[], bool], what: str, wait_s: float | None = None
    ) -> None:
        """Wait, for so long at most. Raises what it failed of, or DeadlineExceeded."""
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
        """These many are here, whole; its own follow."""
        self.first = blocks
        self.here = [blocks] * len(self.here)
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

    def upto(self, layer: int) -> int:
        """How many blocks from the start have this layer's KV."""
        here = self.here[layer]
        return self.total if here >= self.first and self.written[layer] else here

    async def news(self, sent: list[int]) -> int | None:
        """The first layer of which more is here than was sent; None when all was."""
        while True:
            for layer, count in enumerate(sent):
                if self.upto(layer) > count:
                    return layer
            if min(sent) == self.total:
                return None
            await self.until(
                lambda: any(self.upto(layer) > count for layer, count in enumerate(sent)),
                "its pass",
            )


class Chains:
    """The parts on this worker, by the lease that all parts of a prefill share."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        kv: WorkerKV,
        passes: Passes,
        metrics: Metrics,
        clock: Clock,
        fetch: Fetch | None,
        wait_s: float,
        room_s: float,
        replies: Replies,
        enter: Callable[[Live], None],
        over: Callable[[Live], None],
        stopped: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """enter: a part may have its blocks; `start` follows. over: it has let go of them. stopped:
        a task ended, maybe by a bug.
        """
        self._engine = engine
        self._pool = pool
        self._kv = kv
        self._passes = passes
        self._metrics = metrics
        self._clock = clock
        self._fetch = fetch
        self._wait_s = wait_s
        self._room_s = room_s
        self._enter = enter
        self._replies = replies
        self._over = over
        self._stopped = stopped
        self.running: set[asyncio.Task[None]] = set()
        """One for each part that has blocks; not to be cancelled: a pass may write to them."""
        self._open: dict[LeaseId, Live] = {}
        self._arrived = asyncio.Event()
        self._layer_bytes = engine.shape.block_bytes // engine.shape.layers

    def check(self, job: Job) -> None:
        """Raises BadRequest or Overloaded where `open` cannot be."""
        if self._fetch is None or self._engine.shape.layers == 1:
            raise BadRequest("this worker takes no part in pipelines", "kv_transfer_params")
        if job.lease in self._open:
            raise BadRequest("a part of this prefill is here already", "kv_transfer_params")
        if len(self._open) >= _MAX_PARTS:
            raise Overloaded(f"{_MAX_PARTS} parts of prompts are here", "worker_queue_full", 1.0)

    def open(self, live: Live, part: Part) -> None:
        """Take on a part, which enters now or when the part before it has its blocks."""
        shape = self._engine.shape
        size = shape.block_size
        total = -(-len(live.job.prompt) // size)
        live.chain = Chain(shape.layers, part.start // size, total, self._wait_s)
        self._open[live.job.lease] = live
        if part.source is None:
            self._enter(live)
        else:
            chain, source = live.chain, part.source
            chain.feeding = self._kv.spawn(self._feed(live, chain, source))
            chain.feeding.add_done_callback(lambda task: self._fed(live, chain, source, task))

    def drop(self, live: Live, chain: Chain) -> None:
        """The request of this part is over."""
        del self._open[live.job.lease]
        chain.fail(EngineFailed("the request is over"))
        if chain.feeding is not None:
            chain.feeding.cancel()

    def start(self, live: Live, chain: Chain) -> None:
        """The part has its blocks."""
        chain.moved()
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()
        task = asyncio.create_task(self._run(live, chain))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        task.add_done_callback(self._stopped)

    async def _run(self, live: Live, chain: Chain) -> None:
        """Compute the part, and let go of its blocks when all is done."""
        try:
            piece = await self._compute(live, chain)
            if live.job.part is not None and live.job.part.followed:
                await chain.until(lambda: chain.taken, "the worker after")
            if piece.finish is not None and piece.finish.reason == "length":
                await self._replies.hand_over(live, piece, self._kv)
            else:
                self._replies.emit(live, piece)
        except MoonserveError as error:
            chain.fail(error)
            self._replies.emit(live, error)
            if self._passes.hung:
                raise
        finally:
            if chain.feeding is not None:
                chain.feeding.cancel()
            self._over(live)
            self._kv.let_go(live.blocks)

    async def hand_on(self, lease: LeaseId) -> AsyncGenerator[bytes, None]:
        """The frames of a part that is here or will be, once it has its blocks.

        Raises DeadlineExceeded if it does not come, BadRequest if they were asked for before.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while (live := self._open.get(lease)) is None or not live.blocks:
                    await self._arrived.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no part of {lease} came within {self._wait_s:g} s") from None
        chain = live.chain
        assert chain is not None
        if chain.served:
            raise BadRequest(f"the frames of {lease} were asked for before")
        chain.served = True
        frames = self._frames(live, chain)
        await anext(frames)  # only a generator that has begun notices that it is closed
        return frames

    # What comes in

    async def _feed(self, live: Live, chain: Chain, source: str) -> None:
        assert self._fetch is not None
        async with self._fetch(source, live.job.lease) as data:
            self._enter(live)
            await chain.until(lambda: bool(live.blocks), "its blocks", self._room_s)
            began_us = self._clock.now_us()
            await self._take(live.blocks, chain, data)
        self._metrics.kv_chained.inc(chain.first)
        self._kv.note("chained", live.job.lease, began_us, chain.first)

    def _fed(self, live: Live, chain: Chain, source: str, task: asyncio.Task[None]) -> None:
        """However the feeding failed, nobody waits for the rest of it."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, MoonserveError):
            log.error("%s: feeding it failed", live.job.request, exc_info=error)
            error = EngineFailed("internal error")
        chain.fail(EngineFailed(f"no KV of the part before from {source}: {error}"))
        if not live.blocks:  # else `_run` tells
            self._replies.emit(live, error)

    async def _take(
        self, blocks: tuple[int, ...], chain: Chain, data: AsyncIterator[bytes]
    ) -> None:
        """Copy frames into their blocks as they come, until all are here."""
        buffer = bytearray()
        async for piece in data:
            buffer += piece
            while len(buffer) >= _HEAD.size:
                layer, first, count, checksum = _HEAD.unpack_from(buffer)
                if layer >= len(chain.here) or first != chain.here[layer]:
                    raise EngineFailed("a frame that does not follow the one before")
                if not 0 < count <= chain.first - first:
                    raise EngineFailed("a frame beyond what comes before this part")
                end = _HEAD.size + count * self._layer_bytes
                if len(buffer) < end:
                    break
                with memoryview(buffer)[_HEAD.size : end] as body:
                    if xxhash.xxh3_64_intdigest(body) != checksum:
                        raise EngineFailed("a frame was damaged on its way")
                    for at in range(count):
                        part = body[at * self._layer_bytes : (at + 1) * self._layer_bytes]
                        self._slice(blocks[first + at], layer)[:] = part
                        part.release()
                del buffer[:end]
                chain.here[layer] += count
                chain.moved()
        if min(chain.here) < chain.first:
            raise EngineFailed("it broke off")

    def _slice(self, block: int, layer: int) -> memoryview:
        """One layer's bytes of a block."""
        return self._engine.block(block)[
            layer * self._layer_bytes : (layer + 1) * self._layer_bytes
        ]

    # What goes on

    async def _frames(self, live: Live, chain: Chain) -> AsyncGenerator[bytes, None]:
        blocks, most = live.blocks, max(1, _FRAME_BYTES // self._layer_bytes)
        sent = [0] * len(chain.here)
        self._pool.hold(blocks)
        try:
            yield b""
            while (layer := await chain.news(sent)) is not None:
                first = sent[layer]
                sent[layer] = min(chain.upto(layer), first + most)
                mine = blocks[first : sent[layer]]
                body = b"".join([self._slice(block, layer) for block in mine])
                checksum = xxhash.xxh3_64_intdigest(body)
                yield _HEAD.pack(layer, first, len(mine), checksum) + body
            chain.taken = True
            chain.moved()
        except MoonserveError:
            return  # the worker after sees that not all came
        finally:
            if not chain.taken:
                chain.fail(EngineFailed("the worker of the next part went away"))
            self._kv.let_go(blocks)

    # What is computed

    async def _compute(self, live: Live, chain: Chain) -> Piece:
        job, size = live.job, self._engine.shape.block_size
        assert job.part is not None
        if job.part.source is None:
            live.cached = await self._load(live)
            self._metrics.prompt_loaded(live.cached)
            chain.loaded(live.cached // size)
        await chain.until(lambda: chain.here[0] >= chain.first, "the part before")
        start = chain.first * size
        chunk = Chunk(job.request, job.prompt[start:], start, live.blocks, job.sampling)
        self._kv.before_pass(job, chunk)
        work = Pass((chunk,))
        began_us = self._clock.now_us()
        result = await self._passes.run(work, chain)
        self._passes.measured(work, result.elapsed_us - chain.waited_us)
        self._kv.note("computed", job.lease, began_us, chain.total - chain.first)
        self._metrics.prompt_computed(len(chunk.tokens))
        self._metrics.chain_wait(chain.waited_us)
        token = result.sampled[job.request]
        live.published = chain.first
        self._kv.publish(live, chunk, token)
        finish = finish_of(token, 1, job.stopping, self._engine.shape.eos_token_ids)
        # What a part samples amid a prompt is of no meaning, and ends nothing.
        return Piece(token, Finish("length") if job.part.followed else finish, live.cached)

    async def _load(self, live: Live) -> int:
        """Get what the store has for the first part; how many tokens it now need not compute."""
        count = len(live.wanted)
        if not count:
            return 0
        computed = await self._kv.load(live.job, live.wanted, live.blocks[:count], None)
        if computed is None:
            live.blocks = live.blocks[count:]  # the store still writes to the others
            raise DeadlineExceeded("the store did not answer in time")
        return computed
