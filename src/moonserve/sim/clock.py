"""Virtual time: a heap of what happens when.

The simulator has no other clock. Everything of one microsecond happens before time moves on. A call
that is scheduled for now, during now, still happens now.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from moonserve.core.units import Micros


class TimedCalls(Protocol):
    """What moves bytes needs of time; tests give it an event loop's."""

    @property
    def now_us(self) -> Micros:
        """The time."""
        ...

    def at(self, time_us: Micros, call: Callable[[], None]) -> None:
        """Call at that time."""
        ...


class VirtualClock:
    """The clock. It makes simultaneous calls in the order in which they were scheduled."""

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
        """When the next call is to be made; now, if there is none."""
        return self._heap[0][0] if self._heap else self.now_us

    def at(self, time_us: Micros, call: Callable[[], None]) -> None:
        """Call at that time, or now if it has passed."""
        self._count += 1
        heappush(self._heap, (max(time_us, self.now_us), self._count, call))

    def run(self, settle: Callable[[], bool], until_us: Micros | None = None) -> bool:
        """Run until nothing is left to happen, or until that time. Returns whether something is
        left.

        `settle` is called after all calls of one instant. It returns whether it did anything, and
        is called again until it did nothing and no new call fell on this instant.
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
