"""KV between the engine's blocks and the store: loaded before a job runs, published after a pass.

The runner, the intake and the parts of prompts call it, on the event loop. The store is an
optimisation: whatever is missing, late or broken there costs recomputation, never a wrong token and
never a request. Blocks that the store still reads or writes stay held in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.engine.batch import Chunk
from moonserve.core.errors import MoonserveError
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import finish_of
from moonserve.core.units import BlockKey, LeaseId, RequestId, Tokens
from moonserve.live.ports import Found, KVStore
from moonserve.live.worker.job import ActiveJob, Job, Piece
from moonserve.live.worker.workbench import Workbench

log = logging.getLogger(__name__)

OnPut: TypeAlias = Callable[[Sequence[BlockKey], Sequence[int], str], None]
"""Called with keys that are about to be put, from the prompt's first, its tokens and its salt."""
_MAX_PENDING_BLOCKS = 128


class _Put(msgspec.Struct, frozen=True):
    job: Job
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    blocks: tuple[int, ...]
    lease: LeaseId | None


class WorkerKV:
    """Loads and publishes blocks, and keeps account of jobs' leases."""

    def __init__(self, bench: Workbench, store: KVStore, on_put: OnPut | None = None) -> None:
        self._bench = bench
        self._engine = bench.engine
        self._store = store
        self._on_put = on_put
        self._deadlines = bench.limits.kv
        self._decode_kv = bench.limits.decode_kv
        self._block_size = bench.shape.block_size
        self._puts: deque[_Put] = deque()  # bounded by the pool: every put holds its blocks
        self._unfinished: Counter[RequestId] = Counter()
        self._pending_blocks = 0
        self._leases: dict[RequestId, LeaseId] = {}
        self._releasing = 0
        self._work = asyncio.Event()
        self._progress = asyncio.Condition()
        bench.spawn(self._publish_all(), vital=True)

    @property
    def pending_puts(self) -> int:
        """Puts that are queued or running."""
        return self._unfinished.total()

    @property
    def held_leases(self) -> int:
        """Leases that this worker still has to release or to hand over."""
        return len(self._leases) + self._releasing

    # Leases.

    def take_lease(self, job: Job) -> None:
        """This worker is responsible for the job's lease from now on: `release` or `hand_over` must
        follow."""
        self._leases[job.request] = job.lease

    def release(self, job: Job) -> None:
        """Release the job's lease in the background, if it is still this worker's."""
        lease = self._leases.pop(job.request, None)
        if lease is not None:
            self._releasing += 1
            self._bench.spawn(self._release(job.request, lease))

    async def hand_over(self, active: ActiveJob, last: Piece) -> None:
        """Leave the KV to the decode worker: send the last piece once no put is left.

        A put may have failed or been dropped; the decode worker then recomputes its blocks.
        """
        bench = self._bench
        job = active.job
        ended_us = bench.clock.now_us()
        await self._flushed(job.request)
        if active.ended:
            return
        bench.metrics.handed_over(bench.clock.now_us() - ended_us)
        bench.samples.add_stage("handed_over", job.lease, ended_us)
        self._leases.pop(job.request, None)
        bench.emit(active, last)

    async def _release(self, request: RequestId, lease: LeaseId) -> None:
        try:
            if self._unfinished[request]:  # a later put would take the lease again
                await self._flushed(request)
                async with self._progress:  # the put under way ends by its own deadline
                    await self._progress.wait_for(lambda: not self._unfinished[request])
            async with asyncio.timeout(self._deadlines.release_s):
                await self._store.release(lease)
        except (MoonserveError, OSError) as error:
            self._failed("release", request, error)
        finally:
            self._releasing -= 1

    # From the store into blocks.

    async def load(self, active: ActiveJob) -> Tokens | None:
        """Fill the job's first blocks with the leading run of wanted keys that the store has.

        Returns how many prompt tokens have their KV now. None: the time is over, but the
        store may still write to the blocks. They are freed when it has ended; do not use them.
        """
        bench = self._bench
        job = active.job
        wanted = active.wanted
        blocks = active.blocks[: len(wanted)]
        began_us = bench.clock.now_us()
        task = bench.spawn(self._load(active, blocks))
        done, _ = await asyncio.wait({task}, timeout=self._deadlines.load_s)
        if not done:
            log.warning("%s: load ran past its deadline; computing instead", job.request)
            bench.metrics.kv_errors.inc()
            task.add_done_callback(lambda _: bench.free(blocks))
            return None
        bench.samples.add_stage("loaded", job.lease, began_us, task.result())
        computed = min(task.result() * self._block_size, len(job.prompt))
        asked = min(len(wanted) * self._block_size, len(job.prompt))
        bench.metrics.loaded(bench.clock.now_us() - began_us, asked, computed)
        return computed

    async def _load(self, active: ActiveJob, blocks: Sequence[int]) -> int:
        job = active.job
        wanted = active.wanted
        prefetch = active.prefetch
        good = 0
        if prefetch is not None:
            await prefetch.idle.wait()
            good = prefetch.loaded
            self._bench.metrics.kv_ahead.inc(good)
        if good < len(wanted):
            found = await self.find(job.request, wanted[good:], job.lease)
            good += await self.read(job.request, found, blocks[good : good + len(found)], job.lease)
        if not job.send_kv:
            self.release(job)  # the worker has the bytes: the store need not keep its own
        return good

    async def find(
        self, request: RequestId, keys: Sequence[BlockKey], lease: LeaseId
    ) -> list[Found]:
        """The leading run of `keys` that the store has; none where it fails."""
        size = self._bench.shape.block_bytes
        try:
            found = await self._store.find(keys, lease)
        except (MoonserveError, OSError) as error:
            self._failed("find", request, error)
            return []
        return found if all(item.size == size for item in found) else []

    async def read(
        self,
        request: RequestId,
        found: Sequence[Found],
        blocks: Sequence[int],
        lease: LeaseId,
        what: Literal["read", "ahead"] = "read",
    ) -> int:
        """Copy what was found into `blocks`, one each; returns how many of the first are right."""
        if not found:
            return 0
        began_us = self._bench.clock.now_us()
        try:
            good = await self._store.read(found, [self._engine.block(block) for block in blocks])
        except (MoonserveError, OSError) as error:
            self._failed("read", request, error)
            return 0
        if good:
            self._bench.samples.add_transfer(good * self._bench.shape.block_bytes, began_us)
            self._bench.samples.add_stage(what, lease, began_us, good)
        return good

    # From blocks into the store.

    def before_pass(self, job: Job, chunk: Chunk) -> None:
        """Zero a tail block that `chunk` begins and that will be handed over.

        Its unused slots travel too, and must not carry what another request left there.
        """
        tail_start = len(job.prompt) // self._block_size * self._block_size
        end = chunk.start + len(chunk.tokens)
        if job.send_kv and tail_start < len(job.prompt) and chunk.start <= tail_start < end:
            block = chunk.blocks[tail_start // self._block_size]
            self._engine.block(block)[:] = bytes(self._bench.shape.block_bytes)

    def publish(self, active: ActiveJob, chunk: Chunk, token: int | None) -> None:
        """Put what a finished chunk completed, in the background; never waits.

        Blocks of the prompt are put at once, those of generated tokens as decode_kv says. token:
        what the pass sampled. Call it before `batch.apply`: `apply` may free the blocks, and this
        call holds them.
        """
        job = active.job
        end = chunk.start + len(chunk.tokens)
        last = token is not None and bool(
            finish_of(token, len(active.made) + 1, job.stopping, self._bench.shape.eos_token_ids)
        )
        self.store(active, end, chunk.blocks, last)
        keys = active.keys
        if keys is None or keys.tail is None or not job.send_kv:
            return
        if chunk.start < len(job.prompt) <= end:
            parent = keys.full[-1] if keys.full else None
            self._put(job, (keys.tail,), parent, (chunk.blocks[len(keys.full)],))

    def store(self, active: ActiveJob, computed: Tokens, blocks: Sequence[int], last: bool) -> None:
        """Queue the computed full blocks that may be stored now.

        computed: how many tokens have their KV; last: this request computes no more.
        """
        job = active.job
        size = self._block_size
        keys = active.keys
        assert keys is not None, "made where there is a store"
        full = computed // size
        prompt = len(job.prompt) // size
        if full > prompt and not self._due(full - max(prompt, active.published), last):
            full = prompt
        first = active.published
        off = self._decode_kv == "off" and job.take_kv
        if off or full <= first:
            return
        if not job.send_kv and self._pending_blocks > _MAX_PENDING_BLOCKS:
            # The store is behind: skip. A later chunk stores them; if not, they are only
            # recomputed.
            return
        grown = active.grown
        parent = grown[first - 1] if first else None
        if full > len(grown):
            more = [*job.prompt, *active.made][len(grown) * size : full * size]
            grown += chain_keys(grown[-1] if grown else keys.root, more, size)
        if self._on_put is not None:
            self._on_put(grown[:full], [*job.prompt, *active.made], job.salt)
        self._put(job, tuple(grown[first:full]), parent, tuple(blocks[first:full]))
        active.published = full

    def _due(self, generated: int, last: bool) -> bool:
        """Whether that many full blocks of generated tokens are to be stored now."""
        if isinstance(self._decode_kv, int):
            return last or generated >= self._decode_kv
        return last and self._decode_kv == "end"

    def _put(
        self,
        job: Job,
        keys: tuple[BlockKey, ...],
        parent: BlockKey | None,
        blocks: tuple[int, ...],
    ) -> None:
        self._bench.pool.hold(blocks)
        lease = job.lease if job.send_kv else None
        self._puts.append(_Put(job, keys, parent, blocks, lease))
        self._unfinished[job.request] += 1
        self._pending_blocks += len(blocks)
        self._work.set()

    async def _flushed(self, request: RequestId) -> None:
        """Return when no put of `request` is left.

        Past the deadline, puts that have not begun are dropped: their blocks are needed.
        """
        try:
            async with asyncio.timeout(self._deadlines.flush_s), self._progress:
                await self._progress.wait_for(lambda: not self._unfinished[request])
        except TimeoutError:
            log.warning("%s: publishing is behind by %d blocks", request, self._pending_blocks)
            for put in [put for put in self._puts if put.job.request == request]:
                self._puts.remove(put)
                self._done(put)

    async def _publish_all(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._puts:
                await self._publish(self._puts.popleft())

    async def _publish(self, put: _Put) -> None:
        began_us = self._bench.clock.now_us()
        items = [
            (key, self._engine.block(block))
            for key, block in zip(put.keys, put.blocks, strict=True)
        ]
        try:
            async with asyncio.timeout(self._deadlines.put_s):
                # Put them on the segment that has the prompt, where the next turn looks.
                await self._store.put(items, put.lease, put.parent, put.job.near)
            self._bench.samples.add_stage("put", put.job.lease, began_us, len(items))
        except (MoonserveError, OSError) as error:  # TimeoutError is an OSError
            self._failed("put", put.job.request, error)
        finally:
            self._done(put)
        async with self._progress:
            self._progress.notify_all()

    def _done(self, put: _Put) -> None:
        request = put.job.request
        self._unfinished[request] -= 1
        if not self._unfinished[request]:
            del self._unfinished[request]
        self._pending_blocks -= len(put.blocks)
        self._bench.free(put.blocks)

    def _failed(self, what: str, request: RequestId, error: Exception) -> None:
        self._bench.metrics.kv_errors.inc()
        log.warning("%s: store %s failed: %s: %s", request, what, type(error).__name__, error)
