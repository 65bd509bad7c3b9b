"""A worker process whose engine hangs in a thread at its first request; argv: gateway's URL, token.

Prints what a worker prints. The pass deadline is short, and there is no model.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.units import SegmentId
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.ports import Layers
from moonserve.live.process.worker import Loaded, run_worker
from moonserve.live.store.settings import StoreSettings
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.job import WorkerLimits


class Hung(FakeEngine):
    """Warms up well; then a pass blocks a thread of the default executor for ever."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        if not work.chunks[0].request.startswith("warm-up"):
            await asyncio.to_thread(threading.Event().wait)
        return await super().run(work, layers)


if __name__ == "__main__":
    config = WorkerConfig(
        name="h0",
        role="both",
        model="m",
        engine="fake",
        gateway=sys.argv[1],
        token=sys.argv[2],
    )
    share = StoreSettings(
        segment=SegmentId("h0"),
        epoch=time.time_ns(),
        capacity_bytes=1 << 20,
        token=sys.argv[2].encode(),
    )
    asyncio.run(
        run_worker(
            config,
            share,
            load=lambda config, say: Loaded(Hung(), None, "m"),
            limits=WorkerLimits(pass_s=0.1),
        )
    )
