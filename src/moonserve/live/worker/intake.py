"""Jobs before they run: they wait for blocks, then for their KV, and enter the batch.

    arrive -> queue (bounded) -> blocks -> load KV -> batch

The runner and the parts of prompts call it, on the event loop. Jobs get their blocks in order of
arrival; those of clients below their equal share go first, and may be some more than all others
may (core.shares). A part of a prompt passes no other part, since parts wait for each other. Nothing
here computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moonserve.core.engine.batch import Batch
from moonserve.core.errors import Overloaded
from moonserve.core.request import finish_of
from moonserve.core.shares import Party, Shares
from moonserve.core.units import Tokens
from moonserve.live.worker.job import ActiveJob, Job, Piece
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.prefetch import Prefetcher
from moonserve.live.worker.workbench import Workbench


class _InQueue(NamedTuple):
    active: ActiveJob
    start: Callable[[], None] | None
    """Of a part of a prompt: what to do once it has its blocks."""


class Intake:
    """The queue in front of a batch, and the jobs whose KV is being loaded."""

    def __init__(self, bench: Workbench, batch: Batch, kv: WorkerKV | None) -> None:
        self._bench = bench
        self._batch = batch
        self._kv = kv
        self._queue: deque[_InQueue] = deque()
        self._first: _InQueue | None = None
        """The next of the queue; None: it must be looked for."""
        self._shares = Shares()
        """All jobs of this worker, from `count` to `drop`."""
        self._loading: list[ActiveJob] = []
        self._closed = False
        self.prefetcher = None if kv is None else Prefetcher(bench, kv, self._spare)

    @property
    def waiting(self) -> int:
        """Jobs that have not entered the batch."""
        return len(self._queue) + len(self._loading)

    def check_room(self, party: Party) -> None:
        """Raise Overloaded if the queue is full for this party."""
        if len(self._queue) >= self._shares.limit(self._bench.limits.max_waiting, party):
            raise Overloaded(
                f"{len(self._queue)} requests wait here already", "worker_queue_full", 1.0
            )

    def count(self, job: Job) -> None:
        """A job is here; `drop` must follow."""
        self._shares.take(job.party)
        self._first = None

    def arrive(self, active: ActiveJob, start: Callable[[], None] | None = None) -> None:
        """Queue a job, which enters the batch when it has its blocks and its KV.

        start: for a part of a prompt, which never enters. It is called once the part has its
        blocks; `leave` must follow.
        """
        self._queue.append(_InQueue(active, start))
        self._first = None
        self.admit()  # at once: its KV may be loaded while a pass runs
        self._bench.changed.set()

    def leave(self, active: ActiveJob) -> None:
        """The job is not loaded any more: it enters the batch, or its blocks are free."""
        self._loading.remove(active)
        active.loading = False
        if active.ended and self._kv is not None:
            self._kv.release(active.job)

    def drop(self, active: ActiveJob) -> None:
        """The job has ended: forget it, also if it is still queued."""
        self._shares.give(active.job.party)
        self._first = None
        for queued in self._queue:
            if queued.active is active:
                self._queue.remove(queued)
                return

    def close(self) -> None:
        """Let no more jobs in."""
        self._closed = True

    def admit(self) -> None:
        """Let jobs in, in their order, as long as there are blocks for their prompts."""
        while self._queue and not self._closed:
            first = self._next()
            active, start = first
            prefetcher = None if start is not None else self.prefetcher
            prefetch = None
            if prefetcher is not None:
                prefetch = prefetcher.find(active.job.lease, active.wanted)
            held = 0 if prefetch is None else len(prefetch.blocks)
            needed = len(active.wanted)
            if start is not None:  # no older job can take blocks from a part later
                needed = self._batch.blocks_for(len(active.known))
            most_seqs = self._shares.limit(self._bench.limits.max_seqs, active.job.party)
            room = self._batch.has_room(
                len(active.known), len(self._loading), self._promised() - held, most_seqs
            )
            blocks = self._bench.pool.allocate(needed - held) if room else None
            if blocks is None:
                entered = self._batch.running + self._batch.waiting + len(self._loading)
                if entered < self._bench.limits.max_seqs and self._take_prefetched():
                    continue
                return
            self._queue.remove(first)
            self._first = None
            if prefetcher is not None and prefetch is not None:
                blocks = (*prefetcher.claim(prefetch), *blocks)
            active.prefetch = prefetch
            active.blocks = blocks
            active.admitted_us = self._bench.clock.now_us()
            if start is not None:
                self._begin_loading(active)
                start()
            elif self._kv is not None and active.wanted:
                self._begin_loading(active)
                self._bench.spawn(self._load(active, self._kv), vital=True)
            else:
                self._enter(active, 0)

    def _next(self) -> _InQueue:
        """The job of the queue that goes next."""
        if self._first is None:
            part = next((one for one in self._queue if one.start is not None), None)
            able = (one for one in self._queue if one.start is None or one is part)
            self._first = max(able, key=lambda one: self._shares.rank(one.active.job.party))
        return self._first

    def make_room(self) -> None:
        """Free prefetched blocks that running jobs need now."""
        while self._bench.pool.free_count < self._batch.demand() and self._take_prefetched():
            pass

    def _take_prefetched(self) -> bool:
        """Whether prefetched blocks became free."""
        return self.prefetcher is not None and self.prefetcher.give_up()

    def _promised(self) -> int:
        """Blocks that the jobs that load now will take."""
        return sum(self._batch.blocks_for(len(it.known)) - len(it.blocks) for it in self._loading)

    def _spare(self) -> int:
        """Free blocks that no job needs now or for its next token."""
        if self._queue:
            return 0
        needed = self._batch.demand() + self._promised() + self._batch.running + 1
        return self._bench.pool.free_count - needed

    def _begin_loading(self, active: ActiveJob) -> None:
        active.loading = True
        self._loading.append(active)

    async def _load(self, active: ActiveJob, kv: WorkerKV) -> None:
        computed = await kv.load(active)
        self.leave(active)
        if computed is None:
            active.blocks = ()
        if active.ended:
            self._bench.free(active.blocks)
        else:
            self._enter(active, computed or 0)
        self._bench.changed.set()

    def _enter(self, active: ActiveJob, computed: Tokens) -> None:
        """Give the job and its blocks to the batch; the KV of its first tokens is in them."""
        bench = self._bench
        job = active.job
        known = active.known
        active.entered_us = bench.clock.now_us()
        active.cached = computed
        active.published = computed // bench.shape.block_size
        bench.metrics.entered(len(job.prompt), computed, job.take_kv)
        if job.first_token is not None:
            finish = finish_of(job.first_token, 1, job.stopping, bench.shape.eos_token_ids)
            bench.emit(active, Piece(job.first_token, finish, computed))
            if finish is not None:
                bench.pool.free(active.blocks)
                return
        self._batch.add(
            job.request,
            known,
            prompt_len=len(job.prompt),
            computed=min(computed, len(known) - 1),  # logits need one token computed here
            blocks=active.blocks,
            sampling=job.sampling,
            stopping=job.stopping,
        )
