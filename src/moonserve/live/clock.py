"""The time of the running event loop: the Clock of every live process.

Under a virtual-time loop it gives virtual time. Only `live` may use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from moonserve.core.units import MICROS_PER_SECOND, Micros


class LoopClock:
    """The Clock of the loop on which it is read first; usable from coroutines and callbacks only.

    It keeps the loop: on Python 3.11 to ask for the running loop is a system call.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def now_us(self) -> Micros:
        """The loop's monotonic time."""
        return round(self.loop.time() * MICROS_PER_SECOND)

    async def sleep_us(self, us: Micros) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(us / MICROS_PER_SECOND)


def since_1970_us(now_us: Micros) -> Micros:
    """What to add to a time of a clock that shows `now_us`, so that it counts from 1970."""
    return time.time_ns() // 1_000 - now_us


def wall_ms(since_us: Micros) -> Callable[[Micros], int]:
    """Turns times of a clock into milliseconds since 1970; since_us: what `since_1970_us`
    returned."""
    return lambda us: (since_us + us) // 1_000
