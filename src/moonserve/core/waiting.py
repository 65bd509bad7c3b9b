"""Who waits at the Conductor, and who goes next: the order of late binding.

Requests wait here rather than in the queue of one instance, so that a long prompt delays nobody
who could have gone elsewhere, and the order may still be chosen. Pure; called by the Conductor.
"""

from __future__ import annotations

from bisect import insort

import msgspec

from moonserve.core.units import Micros, RequestId


class Waiter(msgspec.Struct, frozen=True):
    """One request that waits."""

    request: RequestId
    priority: int
    arrived_us: Micros
    work_us: Micros
    """Prefill time it will take, as predicted when it came."""
    due_us: Micros | None
    """Its prefill must begin by then to meet its TTFT objective; None: it has none."""

    @property
    def order(self) -> tuple[int, Micros, RequestId]:
        """Priority first, then first come."""
        return (-self.priority, self.arrived_us, self.request)


class WaitingRoom:
    """The requests of one model that wait for a prefill instance."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        """By `order`."""

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def work_us(self) -> Micros:
        """Prefill time of all that wait."""
        return sum(waiter.work_us for waiter in self._waiters)

    def add(self, waiter: Waiter) -> None:
        """Let one in."""
        insort(self._waiters, waiter, key=lambda w: w.order)

    def remove(self, request: RequestId) -> Waiter | None:
        """Take one out; None if it does not wait here."""
        for at, waiter in enumerate(self._waiters):
            if waiter.request == request:
                return self._waiters.pop(at)
        return None

    def hopeless(self, now_us: Micros) -> list[Waiter]:
        """Those that can no longer meet their objective, in order."""
        return [w for w in self._waiters if w.due_us is not None and w.due_us < now_us]

    def first_due_us(self, now_us: Micros) -> Micros | None:
        """When the next one becomes hopeless; those that are by now do not count."""
        due = (w.due_us for w in self._waiters if w.due_us is not None and w.due_us >= now_us)
        return min(due, default=None)

    def next(self, now_us: Micros, servers: int) -> Waiter | None:
        """Who goes next when one of `servers` instances is free; it is not taken out."""
        return self._waiters[0] if self._waiters else None
