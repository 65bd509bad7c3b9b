"""The runner: one loop that owns the batch, the block pool and the engine, and serves jobs.

    submit -> intake (bounded) -> load KV -> batch -> passes -> pieces, as they come

All state lives on the event-loop thread; only `engine.run` computes elsewhere. Called by the wire;
knows no HTTP and no text. One failure of a pass fails the requests in it and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any

from moonserve.core.engine.batch import Batch, Pass, PassResult, Progress
from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import DeadlineExceeded, EngineFailed, MoonserveError, Overloaded
from moonserve.core.kv.keys import Namespace
from moonserve.core.request import finish_of
from moonserve.core.schedule.facts import InstanceLoad, PassSample
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.ports import Clock, Engine, KVStore
from moonserve.live.worker.ahead import Puller
from moonserve.live.worker.chain import Chains, Fetch
from moonserve.live.worker.job import Job, KeyPlan, Ledger, Limits, Live, Piece, Stage
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.metrics import Metrics
from moonserve.live.worker.passes import Passes, taken
from moonserve.live.worker.replies import Replies

log = logging.getLogger(__name__)


class Runner:
    """Serves jobs on one engine. Made inside a running loop; `close` it."""

    def __init__(
        self,
        engine: Engine,
        store: KVStore | None,
        namespace: Namespace,
        limits: Limits,
        metrics: Metrics,
        clock: Clock,
        fetch: Fetch | None = None,
    ) -> None:
        """fetch: how it gets KV of other workers' parts of a prompt."""
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._namespace = namespace
        shape = engine.shape
        self._pool = BlockPool(shape.num_blocks)
        self._batch = Batch(
            self._pool,
            block_size=shape.block_size,
            chunk_tokens=limits.chunk_tokens,
            max_seqs=limits.max_seqs,
            eos_token_ids=shape.eos_token_ids,
        )
        self._intake: deque[Live] = deque()
        self._loading: list[Live] = []
        self._live: dict[RequestId, Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False
        self.passes = Passes(engine, limits.pass_s)
        self._replies = Replies(metrics, clock)
        self._counted_preemptions = 0
        self.failure: EngineFailed | None = None
        """Set once the worker cannot serve any more; /health tells."""
        self.kv: WorkerKV | None = None
        self._puller: Puller | None = None
        self.chains: Chains | None = None
        """Parts of prompts; with a store only."""
        if store is not None:
            self.kv = kv = WorkerKV(
                engine, self._pool, store, metrics, clock, self._wake.set,
                limits.decode_kv, limits.kv,
            )  # fmt: skip
            kv.publisher.add_done_callback(self._stopped)
            seqs, deadline_s = limits.max_seqs, limits.kv.ahead_s
            self._puller = Puller(kv, self._pool, self._spare, seqs, deadline_s)
            self.chains = Chains(
                engine, self._pool, kv, self.passes, metrics, clock, fetch, limits.chain_s,
                limits.room_s, self._replies, self._arrive, self._part_over, self._stopped,
            )  # fmt: skip
        self._loop_task = asyncio.create_task(self._loop())
        self._loop_task.add_done_callback(self._stopped)
        pool, batch = self._pool, self._batch
        metrics.watch(
            lambda: batch.running, self._waiting, lambda: pool.used_count / pool.num_blocks
        )

    async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Serve one job, token by token. Closing the iterator early cancels it.

        Raises BadRequest (never fits), Overloaded before the first piece; EngineFailed and
        DeadlineExceeded at any time.
        """
        live = self._submit(job)
        try:
            while True:
                piece = await self._next(live)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._end(live)

    async def prefetch(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        """A job with take_kv will come under this lease: pull its blocks as they appear.

        Returns once it came, or at once if this cannot be; to be cancelled if it will not come.
        """
        if self._puller is not None and self.failure is None and not self._closing:
            await self._puller.pull(lease, keys)

    def stages(self) -> list[Stage]:
        """What happened to KV here lately, and when."""
        return list(self.kv.stages) if self.kv else []

    def ledger(self) -> Ledger:
        """What is held now."""
        return Ledger(
            running=self._batch.running,
            waiting=self._waiting(),
            streams=len(self._live),
            blocks_used=self._pool.used_count,
            pending_puts=self.kv.pending_puts if self.kv else 0,
            held_leases=self.kv.held_leases if self.kv else 0,
            ahead=self._puller.count if self._puller else 0,
        )

    def measured(self, samples: Iterable[PassSample]) -> None:
        """Passes that were run before this runner had the engine; told with the next heartbeat."""
        self.passes.samples.extend(samples)

    def take_load(self) -> InstanceLoad:
        """The load now and the samples since the last call; for the heartbeat."""
        return InstanceLoad(
            running=self._batch.running,
            waiting=self._waiting(),
            free_blocks=self._pool.free_count,
            passes=taken(self.passes.samples),
            transfers=taken(self.kv.transfers) if self.kv else (),
        )

    async def close(self) -> None:
        """End every request with EngineFailed and stop, after the pass in flight."""
        self._closing = True
        self._wake.set()
        self._fail_all(EngineFailed("this worker is shutting down"))
        parts = self.chains.running if self.chains else set()
        await asyncio.wait({self._loop_task, *parts}, timeout=self._limits.pass_s)
        for task in list(self._tasks):
            task.cancel()
        if self.kv is not None:
            await self.kv.close()

    # Requests in and out.

    def _submit(self, job: Job) -> Live:
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise EngineFailed("this worker is shutting down")
        self._batch.check_fits(len(job.prompt), job.stopping.max_tokens)
        if len(self._intake) >= self._limits.max_waiting:
            raise Overloaded(
                f"{len(self._intake)} requests wait here already", "worker_queue_full", 1.0
            )
        if self.chains is not None and job.part is not None:
            self.chains.check(job)
        keys: KeyPlan | None = None
        wanted: tuple[BlockKey, ...] = ()
        if self.kv is not None:
            size = self._engine.shape.block_size
            keys = KeyPlan.of(self._namespace.salted(job.salt), job.prompt, size)
            wanted = keys.wanted(job, size)
            if wanted or job.send_kv:
                self.kv.begin(job)
        live = Live(job, keys, wanted, self._clock.now_us())
        self._live[job.request] = live
        self._metrics.prefix_queries.inc(len(job.prompt))
        if self.chains is not None and job.part is not None:
            self.chains.open(live, job.part)
        else:
            self._arrive(live)
        return live

    def _arrive(self, live: Live) -> None:
        self._intake.append(live)
        self._admit()  # at once: its KV may be loaded while a pass runs
        self._wake.set()

    async def _next(self, live: Live) -> Piece:
        try:
            async with asyncio.timeout(self._limits.piece_s):
                item = await live.pieces.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no token within {self._limits.piece_s:g} s") from None
        if isinstance(item, MoonserveError):
            raise item
        return item

    def _end(self, live: Live) -> None:
        """Let go of all that a request holds, wherever it is. Once per request."""
        job = live.job
        del self._live[job.request]
        live.ended = True
        if live in self._intake:
            self._intake.remove(live)
        if self.chains is not None and live.chain is not None:
            self.chains.drop(live, live.chain)
        if self.kv is not None and (held := self._batch.held(job.request)) is not None:
            self.kv.store(live, *held, last=True)  # what it said so far may be gone on from
        self._batch.cancel(job.request)
        if self.kv is not None and not live.loading:  # else when the load is over
            self.kv.settle(job)
        self._wake.set()

    def _waiting(self) -> int:
        return len(self._intake) + len(self._loading) + self._batch.waiting

    # From the intake into the batch.

    def _admit(self) -> None:
        """Let requests in, in order of arrival, as long as there is room for their prompts."""
        while self._intake and not self._closing:
            live = self._intake[0]
            part, needed = live.chain, len(live.wanted)
            if part is not None:  # no older request can take blocks from it later
                needed = self._batch.blocks_for(len(live.known))
            pulls = self._puller if part is None else None
            ahead = pulls.of(live.job.lease, live.wanted) if pulls else None
            held = len(ahead.blocks) if ahead is not None else 0
            room = self._batch.has_room(
                len(live.known), len(self._loading), self._promised() - held
            )
            blocks = self._pool.allocate(needed - held) if room else None
            if blocks is None:
                entered = self._batch.running + self._waiting() - len(self._intake)
                if entered < self._limits.max_seqs and self._gives_way():
                    continue
                return
            self._intake.popleft()
            if pulls is not None and ahead is not None:
                blocks = (*pulls.claim(ahead), *blocks)
            live.ahead, live.blocks = ahead, blocks
            if self.chains is not None and part is not None:
                live.loading = True
                self._loading.append(live)
                self.chains.start(live, part)
            elif self.kv is not None and live.wanted:
                live.loading = True
                self._loading.append(live)
                self._spawn(self._load(live, self.kv))
            else:
                self._enter(live, 0)

    def _promised(self) -> int:
        """Blocks that the requests that load now will take."""
        return sum(self._batch.blocks_for(len(x.known)) - len(x.blocks) for x in self._loading)

    def _spare(self) -> int:
        """Blocks that nobody who is here needs, nor will at once."""
        if self._intake:
            return 0
        needed = self._batch.demand() + self._promised() + self._batch.running + 1
        return self._pool.free_count - needed

    def _gives_way(self) -> bool:
        """Whether KV that came ahead could be dropped for who is here."""
        return self._puller is not None and self._puller.give_up()

    def _part_over(self, live: Live) -> None:
        self._loading.remove(live)
        live.loading = False
        if live.ended and self.kv is not None:
            self.kv.settle(live.job)

    async def _load(self, live: Live, kv: WorkerKV) -> None:
        computed = await kv.load(live.job, live.wanted, live.blocks, live.ahead)
        self._loading.remove(live)
        live.loading = False
        if computed is None:
            live.blocks, computed = (), 0
        if live.ended:
            self._pool.free(live.blocks)
            kv.settle(live.job)
        else:
            self._enter(live, computed)
        self._wake.set()

    def _enter(self, live: Live, computed: int) -> None:
        """Give the request and its blocks to the batch."""
        job = live.job
        live.cached = computed
        live.published = computed // self._engine.shape.block_size
        known = live.known
        self._metrics.prompt_loaded(computed)
        if job.take_kv:
            self._metrics.kv_recomputed.inc(len(job.prompt) - computed)
        if job.first_token is not None:
            finish = finish_of(job.first_token, 1, job.stopping, self._engine.shape.eos_token_ids)
            self._replies.emit(live, Piece(job.first_token, finish, computed))
            if finish is not None:
                self._pool.free(live.blocks)
                return
        self._batch.add(
            job.request,
            known,
            prompt_len=len(job.prompt),
            computed=min(computed, len(known) - 1),  # logits need one token computed here
            blocks=live.blocks,
            sampling=job.sampling,
            stopping=job.stopping,
        )

    # Passes.

    async def _loop(self) -> None:
        while not self._closing:
            self._wake.clear()
            self._admit()
            while self._pool.free_count < self._batch.demand() and self._gives_way():
                pass
            work = self._batch.plan()
            self._metrics.preemptions.inc(self._batch.preemptions - self._counted_preemptions)
            self._counted_preemptions = self._batch.preemptions
            if work is not None:
                await self._run(work)
            else:
                await self._wake.wait()

    async def _run(self, work: Pass) -> None:
        if self.kv is not None:
            for chunk in work.chunks:
                self.kv.before_pass(self._live[chunk.request].job, chunk)
        try:
            result = await self.passes.run(work)
        except EngineFailed as error:
            if self.passes.hung:
                raise
            for request in self._batch.abandon(work):
                self._replies.emit(self._live[request], error)
            return
        self.passes.measured(work, result.elapsed_us)
        self._publish(work, result)
        for step in self._batch.apply(work, result):
            self._deliver(self._live[step.request], step)

    def _publish(self, work: Pass, result: PassResult) -> None:
        for chunk in work.chunks:
            live = self._live.get(chunk.request)
            if self.kv is not None and live is not None:
                self.kv.publish(live, chunk, result.sampled.get(chunk.request))

    def _deliver(self, live: Live, step: Progress) -> None:
        prompt = len(live.job.prompt)
        computed = min(step.computed_after, prompt) - step.computed_before
        self._metrics.prompt_computed(max(0, computed))
        if step.token is None:
            return
        live.made.append(step.token)
        piece = Piece(step.token, step.finish, live.cached)
        goes_on = step.finish is not None and step.finish.reason == "length"
        if goes_on and live.job.send_kv and self.kv is not None:
            self._spawn(self._replies.hand_over(live, piece, self.kv))
        else:
            self._replies.emit(live, piece)

    # When things end.

    def _fail_all(self, error: EngineFailed) -> None:
        for live in self._live.values():
            self._replies.emit(live, error)
            if live.chain is not None:
                live.chain.fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A task of the runner is over: fine, or the end of this worker."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("the worker cannot go on", exc_info=error)
            if self.failure is None:
                self.failure = EngineFailed(f"this worker is broken: {error}")
            self._closing = True
            self._wake.set()
            self._fail_all(self.failure)
