"""The time of the running event loop: the Clock of every live process.

Under a virtual-time loop it gives virtual time. Only `live` may use it.
"""

from __future__ import annotations

import asyncio

from moonserve.core.units import MICROS_PER_SECOND, Micros


class LoopClock:
    """The Clock of the running loop; usable from coroutines and callbacks only."""

    def now_us(self) -> Micros:
        """The loop's monotonic time."""
        return round(asyncio.get_running_loop().time() * MICROS_PER_SECOND)

    async def sleep_us(self, us: Micros) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(us / MICROS_PER_SECOND)
