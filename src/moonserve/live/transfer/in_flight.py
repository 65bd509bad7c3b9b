"""Back-pressure: how many bytes may be in flight at once, and who waits for their turn."""

from __future__ import annotations

import threading
import time
from collections import deque

from moonserve.core.units import Bytes


class Room:
    """A bound on bytes, given out first come, first served. Every method runs under `lock`."""

    def __init__(self, lock: threading.Lock, most: Bytes) -> None:
        """What alone is over `most` gets in when nothing else is."""
        self.taken: Bytes = 0
        self._most = most
        self._freed = threading.Condition(lock)
        self._queue: deque[object] = deque()
        self._closed = False

    def take_at_once(self, size: Bytes) -> bool:
        """Take `size` bytes if they are there and nobody waits."""
        if self._closed or self._queue or self.taken > max(self._most - size, 0):
            return False
        self.taken += size
        return True

    def take(self, size: Bytes, deadline_s: float) -> bool:
        """Wait in turn for `size` bytes; False: none by the deadline (time.monotonic), or closed.

        Lets go of the lock meanwhile.
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
        self._freed.notify_all()  # whoever is first now
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
        """From now on nobody gets any."""
        self._closed = True
        self._freed.notify_all()
