"""Reports to the gateway what a worker saw of a pool that has a master of its own.

Stores use it on their event loop. Events are sent in the background and in order. The queue is
bounded: if the gateway stays away, the oldest are dropped. Only its own task waits.
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
"""Mooncake's pool, as the segment that holds all its blocks."""

Tell = Callable[[Sequence[BlockEvent]], Awaitable[None]]
"""Sends events to the gateway. May raise MoonserveError."""

_MAX_UNSENT = 1_024
_MAX_AT_ONCE = 64
_PAUSE_S = 1.0
_GAP_S = 0.005  # blocks are looked for often; those missed meanwhile are reported together


class Reports:
    """A queue of events and the task that sends them. Made inside a running loop; `close` it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._unsent: deque[BlockEvent] = deque(maxlen=_MAX_UNSENT)
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, event: BlockEvent) -> None:
        """Report this event soon."""
        self._unsent.append(event)
        self._wake.set()

    async def close(self) -> None:
        """Report nothing more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent:
                count = min(_MAX_AT_ONCE, len(self._unsent))
                await self._deliver(merged([self._unsent.popleft() for _ in range(count)]))
                await asyncio.sleep(_GAP_S)

    async def _deliver(self, events: Sequence[BlockEvent]) -> None:
        failures = 0
        while True:
            try:
                await self._tell(events)
            except MoonserveError as error:
                if not failures:
                    log.warning("stored blocks cannot be reported to the gateway: %s", error)
                failures += 1
                await asyncio.sleep(_PAUSE_S)
            else:
                return
