"""One runner on a fake engine, with what it needs: for tests of the worker without its wire."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.request import Sampling, Stopping
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.clock import LoopClock
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.worker.job import Job, Ledger, WorkerLimits
from moonserve.live.worker.metrics import Metrics
from moonserve.live.worker.parts import Fetch
from moonserve.live.worker.runner import Runner
from moonserve.live.worker.workbench import Workbench
from tests.support import virtual_time
from tests.support.kvstore import DictStore

BLOCK = 4
IDLE = Ledger(0, 0, 0, 0, 0, 0)
GREEDY = Sampling(temperature=0.0)


class Bench:
    """One runner with what it needs."""

    def __init__(
        self,
        store: DictStore | None = None,
        blocks: int = 64,
        engine: Any = None,
        fetch: Fetch | None = None,
        **limits: Any,
    ) -> None:
        self.engine = engine or FakeEngine(
            block_size=BLOCK, num_blocks=blocks, cost=fake_cost(0, 0, 0)
        )
        shape = self.engine.shape
        self.metrics = Metrics("m")
        self.namespace = Namespace("m", shape.revision, shape.layout, BLOCK)
        bench = Workbench(
            self.engine,
            self.namespace,
            WorkerLimits(**{"chunk_tokens": 8, "max_seqs": 4, **limits}),
            self.metrics,
            LoopClock(),
        )
        self.runner = Runner(bench, store, fetch)

    def keys(self, tokens: tuple[int, ...] | list[int]) -> tuple[BlockKey, ...]:
        """The keys of the full blocks of `tokens`."""
        return tuple(chain_keys(self.namespace.root(), tokens, BLOCK))

    async def tokens(self, job: Job) -> list[int]:
        """The tokens that the job generates."""
        return [piece.token async for piece in self.runner.generate(job)]

    def preemptions(self) -> int:
        """How often the batch took a job's blocks."""
        page = self.metrics.render().decode()
        found = re.search(r"^vllm:num_preemptions_total\{.*\} (\d+)", page, re.MULTILINE)
        assert found is not None
        return int(found[1])

    async def idle(self) -> None:
        """Wait until nothing is held; fails with the ledger that is left."""
        for _ in range(300):
            if self.runner.ledger() == IDLE:
                return
            await asyncio.sleep(0.01)
        assert self.runner.ledger() == IDLE


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    """Some tokens; other seeds share no block."""
    return tuple((seed * 7919 + i * 104729) % 40000 for i in range(length))


def job(name: str, tokens: tuple[int, ...], new: int = 5, **options: Any) -> Job:
    """A greedy job whose lease is its name."""
    stopping = options.pop("stopping", Stopping(max_tokens=new))
    options = {"lease": LeaseId(name), **options}
    return Job(RequestId(name), tokens, GREEDY, stopping, **options)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test in virtual time, with a deadline."""
    virtual_time.run(asyncio.wait_for(main, 600))
