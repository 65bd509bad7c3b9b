"""Tells the gateway what a worker saw of a pool that has a master of its own.

Used by stores on their event loop. In the background and in order; bounded, so that what a gateway
that stays away is never told is the oldest. Nothing here waits for the gateway but its own task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.facts import BlockEvent, merged
from moonserve.core.units import SegmentId

log = logging.getLogger(__name__)

POOL = SegmentId("mooncake")
"""The one such pool there is, as the holder of all that lies in it."""

Tell = Callable[[Sequence[BlockEvent]], Awaitable[None]]
"""Brings events to the gateway. May raise MoonserveError."""

_MAX_UNTOLD = 1_024
_MAX_AT_ONCE = 64
_PAUSE_S = 1.0
_GAP_S = 0.005  # who waits for blocks looks for them often; what it misses is told together


class Reports:
    """A queue of events and the task that tells them. Made inside a running loop; `close` it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._untold: deque[BlockEvent] = deque(maxlen=_MAX_UNTOLD)
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, event: BlockEvent) -> None:
        """To be told soon."""
        self._untold.append(event)
        self._wake.set()

    async def close(self) -> None:
        """Tell no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._untold:
                count = min(_MAX_AT_ONCE, len(self._untold))
                await self._deliver(merged([self._untold.popleft() for _ in range(count)]))
                await asyncio.sleep(_GAP_S)

    async def _deliver(self, events: Sequence[BlockEvent]) -> None:
        failures = 0
        while True:
            try:
                await self._tell(events)
            except MoonserveError as error:
                if not failures:
                    log.warning("the gateway is not told of stored blocks: %s", error)
                failures += 1
                await asyncio.sleep(_PAUSE_S)
            else:
                return
