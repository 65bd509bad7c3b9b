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
from typing import Any, Literal, TypeVar

import msgspec

from moonserve.core.engine.batch import Chunk
from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import MoonserveError
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import finish_of
from moonserve.core.schedule.facts import TransferSample
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, Tokens
from moonserve.live.ports import Clock, Engine, Found, KVStore
from moonserve.live.worker.job import Ahead, DecodeKV, Job, KVDeadlines, Live, Stage
from moonserve.live.worker.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_PENDING_BLOCKS = 128
_MAX_SAMPLES = 64
_MAX_STAGES = 2_000


class _Put(msgspec.Struct, frozen=True):
    job: Job
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
        decode_kv: DecodeKV,
        deadlines: KVDeadlines = KVDeadlines(),  # noqa: B008 - frozen
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._deadlines = deadlines
        self._decode_kv = decode_kv
        self._block_size = engine.shape.block_size
        self._puts: deque[_Put] = deque()  # bounded by the pool: every put holds its blocks
        self._unfinished: Tally[RequestId] = Tally()
        self._pending_blocks = 0
        self._leases: dict[RequestId, LeaseId] = {}
        self._releasing = 0
        self._work = asyncio.Event()
        self._progress = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.learned: Callable[[Sequence[BlockKey], Sequence[int], str], None] | None = None
        """Told of chains that are about to be put, with their tokens and salt."""
        self.publisher = asyncio.create_task(self._publish_all())
        """Ends only by `close`, or by a bug."""
        self.transfers: deque[TransferSample] = deque(maxlen=_MAX_SAMPLES)
        """Loads measured; taken by the heartbeat."""
        self.stages: deque[Stage] = deque(maxlen=_MAX_STAGES)
        """The latest; for who asks where the time of a hand-over went."""

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
            self.spawn(self._release(job.request, lease))

    async def load(
        self, job: Job, wanted: Sequence[BlockKey], blocks: Sequence[int], ahead: Ahead | None
    ) -> Tokens | None:
        """Fill `blocks` with the leading run of `wanted` that the store has.

        The first of them may be `ahead`'s, which the caller has claimed. Returns how many prompt
        tokens have their KV now. None: the deadline passed while the store may still be writing;
        the blocks are no longer the caller's, and let go when it is done.
        """
        began_us = self._clock.now_us()
        task = self.spawn(self._load(job, wanted, blocks, ahead))
        done, _ = await asyncio.wait({task}, timeout=self._deadlines.load_s)
        if not done:
            log.warning("%s: load ran past its deadline; computing instead", job.request)
            self._metrics.kv_errors.inc()
            task.add_done_callback(lambda _: self.let_go(blocks))
            return None
        self.note("loaded", job.lease, began_us, task.result())
        self._metrics.loaded(self._clock.now_us() - began_us)
        computed = min(task.result() * self._block_size, len(job.prompt))
        asked = min(len(wanted) * self._block_size, len(job.prompt))
        self._metrics.external_queries.inc(asked)
        self._metrics.external_hits.inc(computed)
        return computed

    async def _load(
        self, job: Job, wanted: Sequence[BlockKey], blocks: Sequence[int], ahead: Ahead | None
    ) -> int:
        good = 0
        if ahead is not None:
            await ahead.idle.wait()
            good = ahead.loaded
            self._metrics.kv_ahead.inc(good)
        if good < len(wanted):
            found = await self.find(job.request, wanted[good:], job.lease)
            good += await self.read(job.request, found, blocks[good : good + len(found)], job.lease)
        if not job.send_kv:
            self.settle(job)  # the bytes are ours: the store need not keep its own
        return good

    async def find(
        self, request: RequestId, keys: Sequence[BlockKey], lease: LeaseId
    ) -> list[Found]:
        """The leading run of `keys` that the store has; none where it fails."""
        size = self._engine.shape.block_bytes
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
        """Copy what was found into `blocks`, one each; how many of the first are right."""
        if not found:
            return 0
        began_us = self._clock.now_us()
        try:
            good = await self._store.read(found, [self._engine.block(block) for block in blocks])
        except (MoonserveError, OSError) as error:
            self._failed("read", request, error)
            return 0
        if good:
            elapsed_us = self._clock.now_us() - began_us
            size = good * self._engine.shape.block_bytes
            self.transfers.append(TransferSample(size, elapsed_us))
            self.note(what, lease, began_us, good)
        return good

    def note(self, what: Any, lease: LeaseId, began_us: Micros | None, blocks: int = 0) -> None:
        """A stage ends now, which began then; None: now."""
        now_us = self._clock.now_us()
        began_us = now_us if began_us is None else began_us
        self.stages.append(Stage(what, lease, began_us, now_us, blocks))

    def before_pass(self, job: Job, chunk: Chunk) -> None:
        """Zero a tail block that `chunk` begins and that will be handed over.

        Its unused slots travel too, and must not carry what another request left there.
        """
        tail_start = len(job.prompt) // self._block_size * self._block_size
        end = chunk.start + len(chunk.tokens)
        if job.send_kv and tail_start < len(job.prompt) and chunk.start <= tail_start < end:
            block = chunk.blocks[tail_start // self._block_size]
            self._engine.block(block)[:] = bytes(self._engine.shape.block_bytes)

    def publish(self, live: Live, chunk: Chunk, token: int | None) -> None:
        """Put what a finished chunk completed, in the background; never waits.

        Of the prompt at once, of what was generated as decode_kv says; token: what the pass
        sampled. To be called before the batch accounts for the pass, since the blocks are held
        from here on.
        """
        job, end = live.job, chunk.start + len(chunk.tokens)
        last = token is not None and bool(
            finish_of(token, len(live.made) + 1, job.stopping, self._engine.shape.eos_token_ids)
        )
        self.store(live, end, chunk.blocks, last)
        if live.keys is None or live.keys.tail is None or not job.send_kv:
            return
        if chunk.start < len(job.prompt) <= end:
            full = live.keys.full
            parent = full[-1] if full else None
            self._put(job, (live.keys.tail,), parent, (chunk.blocks[len(full)],))

    def store(self, live: Live, computed: Tokens, blocks: Sequence[int], last: bool) -> None:
        """Put the full blocks among the first `computed` tokens that are due; last: none follow."""
        job, size, keys = live.job, self._block_size, live.keys
        assert keys is not None, "made where there is a store"
        full, prompt = computed // size, len(job.prompt) // size
        if full > prompt and not self._due(full - max(prompt, live.published), last):
            full = prompt
        first = live.published
        off = self._decode_kv == "off" and job.take_kv
        if off or full <= first:
            return
        if not job.send_kv and self._pending_blocks > _MAX_PENDING_BLOCKS:
            return  # the store is slow: a later chunk makes up for it, or nobody misses it
        parent = live.grown[first - 1] if first else None
        if full > len(live.grown):
            more = [*job.prompt, *live.made][len(live.grown) * size : full * size]
            live.grown += chain_keys(live.grown[-1] if live.grown else keys.root, more, size)
        if self.learned is not None:
            self.learned(live.grown[:full], [*job.prompt, *live.made], job.salt)
        self._put(job, tuple(live.grown[first:full]), parent, tuple(blocks[first:full]))
        live.published = full

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
        self._pool.hold(blocks)
        lease = job.lease if job.send_kv else None
        self._puts.append(_Put(job, keys, parent, blocks, lease))
        self._unfinished[job.request] += 1
        self._pending_blocks += len(blocks)
        self._work.set()

    async def flushed(self, request: RequestId) -> None:
        """Return when nothing of `request` is being published.

        Past the deadline, what was not begun is given up: its blocks are needed.
        """
        try:
            async with asyncio.timeout(self._deadlines.flush_s), self._progress:
                await self._progress.wait_for(lambda: not self._unfinished[request])
        except TimeoutError:
            log.warning("%s: publishing is behind by %d blocks", request, self._pending_blocks)
            for put in [put for put in self._puts if put.job.request == request]:
                self._puts.remove(put)
                self._done(put)

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
        began_us = self._clock.now_us()
        items = [
            (key, self._engine.block(block))
            for key, block in zip(put.keys, put.blocks, strict=True)
        ]
        try:
            async with asyncio.timeout(self._deadlines.put_s):
                # Beside the prompt: there it outlives this worker, and the next turn looks for it.
                await self._store.put(items, put.lease, put.parent, put.job.near)
            self.note("put", put.job.lease, began_us, len(items))
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
        self.let_go(put.blocks)

    async def _release(self, request: RequestId, lease: LeaseId) -> None:
        try:
            if self._unfinished[request]:  # a later put would take the lease again
                await self.flushed(request)
                async with self._progress:  # the one under way ends by its own deadline
                    await self._progress.wait_for(lambda: not self._unfinished[request])
            async with asyncio.timeout(self._deadlines.release_s):
                await self._store.release(lease)
        except (MoonserveError, OSError) as error:
            self._failed("release", request, error)
        finally:
            self._releasing -= 1

    def _failed(self, what: str, request: RequestId, error: Exception) -> None:
        self._metrics.kv_errors.inc()
        log.warning("%s: store %s failed: %s: %s", request, what, type(error).__name__, error)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Nobody touches the blocks on our behalf any more."""
        self._pool.free(blocks)
        self._changed()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run in the background, until `close` at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
