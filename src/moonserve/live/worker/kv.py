"""KV between the engine's blocks and the store: loading before a request runs, publishing after.

Used by the runner, on its event loop. The store is an optimisation: whatever is missing, late or
broken there costs recomputation, never a wrong token and never a request. Blocks that the store
still reads or writes are held in the pool until it has let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from moonserve.core.batch import Chunk
from moonserve.core.blocks import BlockPool
from moonserve.core.errors import MoonserveError
from moonserve.core.facts import TransferSample
from moonserve.core.units import BlockKey, LeaseId, RequestId, Tokens
from moonserve.live.ports import Clock, Engine, KVStore
from moonserve.live.worker.job import Job, KeyPlan, KVDeadlines
from moonserve.live.worker.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_PENDING_BLOCKS = 128
_MAX_SAMPLES = 64


class _Put(msgspec.Struct, frozen=True):
    request: RequestId
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    blocks: tuple[int, ...]
    lease: LeaseId | None


class WorkerKV:
    """Loads, publishes and keeps count; `changed` is called when blocks were let go."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        store: KVStore,
        metrics: Metrics,
        clock: Clock,
        changed: Callable[[], None],
        deadlines: KVDeadlines = KVDeadlines(),  # noqa: B008 - frozen
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._deadlines = deadlines
        self._block_size = engine.shape.block_size
        self._puts: deque[_Put] = deque()  # bounded by the pool: every put holds its blocks
        self._unfinished: Tally[RequestId] = Tally()
        self._pending_blocks = 0
        self._leases: dict[RequestId, LeaseId] = {}
        self._releasing = 0
        self._work = asyncio.Event()
        self._progress = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.publisher = asyncio.create_task(self._publish_all())
        """Ends only by `close`, or by a bug."""
        self.transfers: deque[TransferSample] = deque(maxlen=_MAX_SAMPLES)
        """Loads measured; taken by the heartbeat."""

    @property
    def pending_puts(self) -> int:
        """Publishes that were begun and have not ended."""
        return self._unfinished.total()

    @property
    def held_leases(self) -> int:
        """Leases that this worker still has to release or to hand over."""
        return len(self._leases) + self._releasing

    def begin(self, job: Job) -> None:
        """The request may take the lease from now on: `settle` or `hand_over` must follow."""
        self._leases[job.request] = job.lease

    def hand_over(self, job: Job) -> None:
        """The lease is the decode worker's now."""
        self._leases.pop(job.request, None)

    def settle(self, job: Job) -> None:
        """Release the request's lease in the background, if it is still ours."""
        lease = self._leases.pop(job.request, None)
        if lease is not None:
            self._releasing += 1
            self._spawn(self._release(job.request, lease))

    async def load(
        self, job: Job, wanted: Sequence[BlockKey], blocks: Sequence[int]
    ) -> Tokens | None:
        """Fill `blocks` with the leading run of `wanted` that the store has.

        Returns how many prompt tokens have their KV now. None: the deadline passed while the store
        may still be writing; the blocks are no longer the caller's, and let go when it is done.
        """
        task = self._spawn(self._load(job, wanted, blocks))
        done, _ = await asyncio.wait({task}, timeout=self._deadlines.load_s)
        if not done:
            log.warning("%s: load ran past its deadline; computing instead", job.request)
            self._metrics.kv_errors.inc()
            task.add_done_callback(lambda _: self._let_go(blocks))
            return None
        computed = min(task.result() * self._block_size, len(job.prompt))
        asked = min(len(wanted) * self._block_size, len(job.prompt))
        self._metrics.external_queries.inc(asked)
        self._metrics.external_hits.inc(computed)
        return computed

    async def _load(self, job: Job, wanted: Sequence[BlockKey], blocks: Sequence[int]) -> int:
        size = self._engine.shape.block_bytes
        good = 0
        try:
            found = await self._store.find(wanted, job.lease)
            began_us = self._clock.now_us()
            if found and all(item.size == size for item in found):
                good = await self._store.read(
                    found, [self._engine.block(block) for block in blocks[: len(found)]]
                )
        except (MoonserveError, OSError) as error:
            self._failed("load", job.request, error)
        if good:
            elapsed_us = self._clock.now_us() - began_us
            self.transfers.append(TransferSample(good * size, elapsed_us))
        if not job.send_kv:
            self.settle(job)  # the bytes are ours: the store need not keep its own
        return good

    def before_pass(self, job: Job, chunk: Chunk) -> None:
        """Zero a tail block that `chunk` begins and that will be handed over.

        Its unused slots travel too, and must not carry what another request left there.
        """
        tail_start = len(job.prompt) // self._block_size * self._block_size
        end = chunk.start + len(chunk.tokens)
        if job.send_kv and tail_start < len(job.prompt) and chunk.start <= tail_start < end:
            block = chunk.blocks[tail_start // self._block_size]
            self._engine.block(block)[:] = bytes(self._engine.shape.block_bytes)

    def publish(self, job: Job, keys: KeyPlan, chunk: Chunk) -> None:
        """Put what a finished chunk completed of the prompt, in the background.

        To be called before the batch accounts for the pass: the blocks are held from here on.
        """
        size = self._block_size
        end = chunk.start + len(chunk.tokens)
        first, last = chunk.start // size, min(end // size, len(keys.full))
        names = list(keys.full[first:last])
        blocks = list(chunk.blocks[first:last])
        if job.send_kv and keys.tail is not None and chunk.start < len(job.prompt) <= end:
            names.append(keys.tail)
            blocks.append(chunk.blocks[len(keys.full)])
        if not names:
            return
        self._pool.hold(blocks)
        lease = job.lease if job.send_kv else None
        parent = keys.full[first - 1] if first else None
        self._puts.append(_Put(job.request, tuple(names), parent, tuple(blocks), lease))
        self._unfinished[job.request] += 1
        self._pending_blocks += len(blocks)
        self._work.set()

    async def room(self) -> None:
        """Return when few enough publishes are pending to run another pass."""
        if self._pending_blocks > _MAX_PENDING_BLOCKS:
            await self._until(
                lambda: self._pending_blocks <= _MAX_PENDING_BLOCKS, self._deadlines.put_s
            )

    async def flushed(self, request: RequestId) -> None:
        """Return when nothing of `request` is being published, or the deadline passed."""
        await self._until(lambda: not self._unfinished[request], self._deadlines.flush_s)

    async def close(self) -> None:
        """Stop publishing; what is pending is dropped, leases are left to their time to live."""
        tasks = [self.publisher, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish_all(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._puts:
                await self._publish(self._puts.popleft())

    async def _publish(self, put: _Put) -> None:
        items = [
            (key, self._engine.block(block))
            for key, block in zip(put.keys, put.blocks, strict=True)
        ]
        try:
            async with asyncio.timeout(self._deadlines.put_s):
                await self._store.put(items, put.lease, put.parent)
        except (MoonserveError, OSError) as error:  # TimeoutError is an OSError
            self._failed("put", put.request, error)
        finally:
            self._unfinished[put.request] -= 1
            if not self._unfinished[put.request]:
                del self._unfinished[put.request]
            self._pending_blocks -= len(put.blocks)
            self._let_go(put.blocks)
        async with self._progress:
            self._progress.notify_all()

    async def _release(self, request: RequestId, lease: LeaseId) -> None:
        try:
            if self._unfinished[request]:  # a later put would take the lease again
                await self.flushed(request)
            async with asyncio.timeout(self._deadlines.release_s):
                await self._store.release(lease)
        except (MoonserveError, OSError) as error:
            self._failed("release", request, error)
        finally:
            self._releasing -= 1

    def _failed(self, what: str, request: RequestId, error: Exception) -> None:
        self._metrics.kv_errors.inc()
        log.warning("%s: store %s failed: %s: %s", request, what, type(error).__name__, error)

    def _let_go(self, blocks: Sequence[int]) -> None:
        self._pool.free(blocks)
        self._changed()

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._progress:
                await self._progress.wait_for(true)
        except TimeoutError:
            log.warning("publishing is behind by %d blocks", self._pending_blocks)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
