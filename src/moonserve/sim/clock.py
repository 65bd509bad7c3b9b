"""Virtual time: a heap of what is to happen when.

The simulator's only clock. Everything that falls on one microsecond happens before time moves on;
what is scheduled for now while now happens, happens too.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from moonserve.core.units import Micros


class Clock:
    """See the module. Simultaneous calls are made in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_us: Micros = 0
        self._heap: list[tuple[Micros, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def pending(self) -> int:
        """Calls that are still to be made."""
        return len(self._heap)

    @property
    def next_us(self) -> Micros:
        """When the next call is to be made; now, if none is."""
        return self._heap[0][0] if self._heap else self.now_us

    def at(self, time_us: Micros, call: Callable[[], None]) -> None:
        """Call at that time, or now where it has passed."""
        self._count += 1
        heappush(self._heap, (max(time_us, self.now_us), self._count, call))

    def run(self, settle: Callable[[], bool], until_us: Micros | None = None) -> bool:
        """Until nothing is left to happen, or until that time. Whether something is left.

        `settle` is called when all calls of one instant were made; it says whether it did
        anything, and is called again until it did not and nothing new fell on this instant.
        """
        heap = self._heap
        while heap and (until_us is None or heap[0][0] <= until_us):
            self.now_us = heap[0][0]
            while True:
                while heap and heap[0][0] == self.now_us:
                    heappop(heap)[2]()
                if not settle() and not (heap and heap[0][0] == self.now_us):
                    break
        return bool(heap)
