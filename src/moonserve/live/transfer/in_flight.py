"""Back-pressure of the Transfer Engine: a bound on the bytes in flight, and a queue for it.

Only live.transfer.engine uses it.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from moonserve.core.units import Bytes


class InFlightBudget:
    """A bound on bytes in flight, given out first come, first served.

    Every method runs under `lock`.
    """

    def __init__(self, lock: threading.Lock, most: Bytes) -> None:
        """A batch larger than `most` starts when nothing else is in flight."""
        self.taken: Bytes = 0
        self._most = most
        self._freed = threading.Condition(lock)
        self._queue: deque[object] = deque()
        self._closed = False

    def take_at_once(self, size: Bytes) -> bool:
        """Take `size` bytes if they are free and no other caller waits."""
        if self._closed or self._queue or self.taken > max(self._most - size, 0):
            return False
        self.taken += size
        return True

    def take(self, size: Bytes, deadline_s: float) -> bool:
        """Wait in turn for `size` bytes; the lock is released meanwhile.

        False: they were not free by the deadline (time.monotonic), or the budget is closed.
        """
        if self.take_at_once(size):
            return True
        me = object()
        self._queue.append(me)
        free = self._freed.wait_for(
            lambda: (
                self._closed or (self._queue[0] is me and self.taken <= max(self._most - size, 0))
            ),
            deadline_s - time.monotonic(),
        )
        self._queue.remove(me)
        self._freed.notify_all()  # the next in the queue may have its turn
        if free and not self._closed:
            self.taken += size
            return True
        return False

    def free(self, size: Bytes) -> None:
        """Give bytes back."""
        self.taken -= size
        if self._queue:
            self._freed.notify_all()

    def close(self) -> None:
        """Refuse every waiting and every later caller."""
        self._closed = True
        self._freed.notify_all()
