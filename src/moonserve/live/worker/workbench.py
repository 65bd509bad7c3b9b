"""What all parts of one worker share: engine, block pool, limits, clock, metrics, background tasks.

The worker process makes it, inside a running loop; runner, intake, kv, prefetch and parts use it.
It knows none of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from moonserve.core.engine.blocks import BlockPool
from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.kv.keys import Namespace
from moonserve.live.ports import Clock, Engine
from moonserve.live.worker.job import ActiveJob, Piece, WorkerLimits
from moonserve.live.worker.metrics import Metrics, Samples
from moonserve.live.worker.passes import Passes

log = logging.getLogger(__name__)

T = TypeVar("T")


class Workbench:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        namespace: Namespace,
        limits: WorkerLimits,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.engine = engine
        self.shape = engine.shape
        self.namespace = namespace
        self.limits = limits
        self.metrics = metrics
        self.samples = Samples(clock)
        self.clock = clock
        self.pool = BlockPool(engine.shape.num_blocks)
        self.passes = Passes(engine, limits.pass_s)
        self.changed = asyncio.Event()
        """Set when a job came or left, or blocks became free: the runner looks again."""
        self.broken: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        """Has a result once this worker cannot serve any more."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], *, vital: bool = False) -> asyncio.Task[T]:
        """Run in the background, until `cancel_tasks` at the latest.

        vital: an error that leaves it ends the worker, see `check`.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if vital:
            task.add_done_callback(self.check)
        return task

    def check(self, task: asyncio.Task[Any]) -> None:
        """End the worker if this task, which has ended, has failed."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.critical("the worker cannot go on", exc_info=error)
        if not self.broken.done():
            self.broken.set_result(EngineFailed(f"this worker is broken: {error}"))

    async def cancel_tasks(self) -> None:
        """Cancel what was spawned, and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks: no part of the worker touches them on the caller's behalf any more."""
        self.pool.free(blocks)
        self.changed.set()

    def emit(self, active: ActiveJob, item: Piece | MoonserveError) -> None:
        """Send a job its next piece, or the error that ends it."""
        active.pieces.put_nowait(item)
        if isinstance(item, Piece):
            now_us = self.clock.now_us()
            first = active.last_us is None
            since_us = active.arrived_us if active.last_us is None else active.last_us
            self.metrics.token(now_us - since_us, first)
            active.last_us = now_us
