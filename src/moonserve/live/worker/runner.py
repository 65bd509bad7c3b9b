"""The runner: one loop that owns the batch and the engine's turns, and serves jobs.

    generate -> intake -> batch -> pass -> pieces, as they come

All state lives on the event loop; only the engine computes elsewhere. The wire calls it; it knows
no HTTP and no text. A pass that fails ends the jobs in it and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import msgspec

from moonserve.core.engine.batch import Batch, Pass, Progress
from moonserve.core.errors import BadRequest, DeadlineExceeded, EngineFailed, MoonserveError
from moonserve.core.request import TokenLogprobs
from moonserve.core.schedule.facts import InstanceLoad, PassSample
from moonserve.core.shares import extended
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.ports import KVStore
from moonserve.live.text.grammar import Grammar
from moonserve.live.worker.intake import Intake
from moonserve.live.worker.job import ActiveJob, Job, Ledger, Piece, PromptKeys
from moonserve.live.worker.kv import OnPut, WorkerKV
from moonserve.live.worker.metrics import KVStage
from moonserve.live.worker.parts import Fetch, Parts
from moonserve.live.worker.workbench import Workbench


class Runner:
    """Serves jobs on one engine. Made inside a running loop; `close` it."""

    def __init__(
        self,
        bench: Workbench,
        store: KVStore | None,
        fetch: Fetch | None = None,
        on_put: OnPut | None = None,
    ) -> None:
        """store: None: all KV is computed here; fetch: see Parts; on_put: see WorkerKV."""
        self._bench = bench
        self._batch = Batch(
            bench.pool,
            block_size=bench.shape.block_size,
            chunk_tokens=bench.limits.chunk_tokens,
            max_seqs=extended(bench.limits.max_seqs, 2),  # the intake lets so many in
            eos_token_ids=bench.shape.eos_token_ids,
        )
        self._kv = None if store is None else WorkerKV(bench, store, on_put)
        self._intake = Intake(bench, self._batch, self._kv)
        self.parts = None if self._kv is None else Parts(bench, self._kv, self._intake, fetch)
        """Parts of prompts; None where there is no store."""
        self._active: dict[RequestId, ActiveJob] = {}
        self._counted_preemptions = 0
        self._shaped_each = 0
        """Active jobs that have a grammar or penalties."""
        self._closing = False
        bench.broken.add_done_callback(self._break)
        self._loop_task = asyncio.create_task(self._loop())
        self._loop_task.add_done_callback(bench.check)

    async def generate(
        self, job: Job, grammar: Grammar | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Serve one job, token by token. Closing the iterator early cancels it.

        grammar: what its text must be, after the tokens that it has already; None: it is free.

        Raises BadRequest (it never fits) and Overloaded before the first piece; EngineFailed and
        DeadlineExceeded at any time.
        """
        active = self._submit(job, grammar)
        try:
            while True:
                piece = await self._next(active)
                if piece.finish is not None and job.send_kv and job.part is None:
                    times = active.times(self._bench.clock.now_us())
                    piece = msgspec.structs.replace(piece, times=times)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._end(active)

    async def prefetch(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        """A job with take_kv will come under this lease: fetch its blocks as they appear.

        Returns once it came, or at once if this cannot help. The caller cancels it if the job will
        not come.
        """
        prefetcher = self._intake.prefetcher
        if prefetcher is not None and not self._closing:
            await prefetcher.fetch(lease, keys)

    async def close(self) -> None:
        """End every job with EngineFailed and stop, after the pass in flight."""
        self._stop(EngineFailed("this worker is shutting down"))
        parts = self.parts.computing if self.parts is not None else set()
        await asyncio.wait({self._loop_task, *parts}, timeout=self._bench.limits.pass_s)
        await self._bench.cancel_tasks()

    # What others read.

    @property
    def failure(self) -> EngineFailed | None:
        """Why the worker cannot serve any more; /health reports it. None: it can."""
        broken = self._bench.broken
        return broken.result() if broken.done() else None

    @property
    def hung(self) -> bool:
        """Whether the engine did not end a pass: its thread may never end."""
        return self._bench.passes.hung

    def ledger(self) -> Ledger:
        """What is held now."""
        prefetcher = self._intake.prefetcher
        return Ledger(
            running=self._batch.running,
            waiting=self._intake.waiting + self._batch.waiting,
            streams=len(self._active),
            blocks_used=self._bench.pool.used_count,
            pending_puts=self._kv.pending_puts if self._kv else 0,
            held_leases=self._kv.held_leases if self._kv else 0,
            ahead=prefetcher.count if prefetcher else 0,
        )

    def stages(self) -> list[KVStage]:
        """What happened to KV here lately, and when."""
        return list(self._bench.samples.stages)

    def measured(self, samples: Iterable[PassSample]) -> None:
        """Report passes measured during start-up, with the next heartbeat."""
        self._bench.samples.add_passes(samples)

    def take_load(self) -> InstanceLoad:
        """The load now and the samples since the last call; for the heartbeat."""
        passes, transfers = self._bench.samples.take()
        return InstanceLoad(
            running=self._batch.running,
            waiting=self._intake.waiting + self._batch.waiting,
            free_blocks=self._bench.pool.free_count,
            passes=passes,
            transfers=transfers,
        )

    # Jobs in and out.

    def _submit(self, job: Job, grammar: Grammar | None) -> ActiveJob:
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise EngineFailed("this worker is shutting down")
        self._batch.check_fits(len(job.prompt), job.stopping.max_tokens)
        self._intake.check_room(job.party)
        if self.parts is not None and job.part is not None:
            self.parts.check(job)
        keys: PromptKeys | None = None
        wanted: tuple[BlockKey, ...] = ()
        if self._kv is not None:
            size = self._bench.shape.block_size
            keys = PromptKeys.of(self._bench.namespace.salted(job.salt), job.prompt, size)
            wanted = keys.wanted(job, size)
            if wanted or job.send_kv:
                self._kv.take_lease(job)
        active = ActiveJob(job, keys, wanted, self._bench.clock.now_us(), grammar)
        self._shaped_each += active.shapes_each
        self._active[job.request] = active
        self._intake.count(job)
        self._bench.metrics.arrived(len(job.prompt))
        if self.parts is not None and job.part is not None:
            self.parts.open(active, job.part)
        else:
            self._intake.arrive(active)
        return active

    async def _next(self, active: ActiveJob) -> Piece:
        piece_s = self._bench.limits.piece_s
        try:
            async with asyncio.timeout(piece_s):
                item = await active.pieces.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no token within {piece_s:g} s") from None
        if isinstance(item, MoonserveError):
            raise item
        return item

    def _end(self, active: ActiveJob) -> None:
        """Let go of all that a job holds, wherever it is. Once per job."""
        job = active.job
        del self._active[job.request]
        self._shaped_each -= active.shapes_each
        active.ended = True
        self._intake.drop(active)
        if self.parts is not None and job.part is not None:
            self.parts.drop(job)
        held = self._batch.held(job.request)
        if self._kv is not None and held is not None:
            self._kv.store(active, *held, last=True)  # the next turn may continue what it made
        self._batch.cancel(job.request)
        if self._kv is not None and not active.loading:  # else the intake releases it later
            self._kv.release(job)
        self._bench.changed.set()

    # Passes.

    async def _loop(self) -> None:
        while not self._closing:
            self._bench.changed.clear()
            self._intake.admit()
            self._intake.make_room()
            work = self._batch.plan()
            self._bench.metrics.preempted(self._batch.preemptions - self._counted_preemptions)
            self._counted_preemptions = self._batch.preemptions
            if work is not None:
                await self._run(work)
            else:
                await self._bench.changed.wait()

    async def _run(self, work: Pass) -> None:
        if self._kv is not None:
            for chunk in work.chunks:
                self._kv.before_pass(self._active[chunk.request].job, chunk)
        try:
            shaped = self._shaped(work) if self._shaped_each else work
            result = await self._bench.passes.run(shaped)
        except EngineFailed as error:
            if self._bench.passes.hung:
                raise
            for request in self._batch.abandon(work):
                self._bench.emit(self._active[request], error)
            return
        self._bench.samples.add_pass(work, result.elapsed_us)
        if self._kv is not None:
            for chunk in work.chunks:
                if (active := self._active.get(chunk.request)) is not None:
                    self._kv.publish(active, chunk, result.sampled.get(chunk.request))
        for progress in self._batch.apply(work, result):
            active = self._active[progress.request]
            if active.timed:
                active.computed_us += result.elapsed_us
                active.passed_us = self._bench.clock.now_us()
            logprobs = None if result.logprobs is None else result.logprobs.get(progress.request)
            self._deliver(active, progress, logprobs)

    def _shaped(self, work: Pass) -> Pass:
        """The pass, with what each text has so far: grammars say what may be sampled, and
        penalties have their counts. A job ends if its grammar fails."""
        chunks = []
        for chunk in work.chunks:
            active = self._active[chunk.request]
            if chunk.sampling is not None and active.shapes_each:
                try:
                    chunk = msgspec.structs.replace(chunk, sampling=active.next_sampling())
                except BadRequest as error:
                    self._bench.emit(active, error)
            chunks.append(chunk)
        return Pass(tuple(chunks))

    def _deliver(
        self, active: ActiveJob, progress: Progress, logprobs: TokenLogprobs | None
    ) -> None:
        """Send the job the token of a pass. A prefill's last token waits until no put is left."""
        job = active.job
        computed = min(progress.computed_after, len(job.prompt)) - progress.computed_before
        if computed > 0:
            self._bench.metrics.prompt_computed(computed)
        if progress.token is None:
            return
        try:
            active.take(progress.token)
        except (BadRequest, EngineFailed) as error:
            self._bench.emit(active, error)
            return
        piece = Piece(progress.token, progress.finish, active.cached, logprobs=logprobs)
        if active.timed and not job.send_kv:
            active.timed = False
            piece = msgspec.structs.replace(piece, entry=active.entry())
        goes_on = progress.finish is not None and progress.finish.reason == "length"
        if goes_on and job.send_kv and self._kv is not None:
            self._bench.spawn(self._kv.hand_over(active, piece), vital=True)
        else:
            self._bench.emit(active, piece)

    # The end.

    def _break(self, broken: asyncio.Future[EngineFailed]) -> None:
        """The worker cannot go on."""
        self._stop(broken.result())

    def _stop(self, error: EngineFailed) -> None:
        """Take no more jobs, and end those that are here."""
        self._closing = True
        self._intake.close()
        self._bench.changed.set()
        for active in self._active.values():
            self._bench.emit(active, error)
        if self.parts is not None:
            self.parts.fail(error)
