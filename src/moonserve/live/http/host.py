"""One host as `client` sees it: how many may be in conversation with it, and what is kept for them.

Opens and closes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque

from moonserve.live.http.connection import Connection


class Host:
    """The connections to one host: idle ones (last used is first reused) and free places."""

    __slots__ = ("_free", "_places", "_waiting", "idle", "key")

    def __init__(self, key: tuple[str, int], max_connections: int) -> None:
        self.key = key
        self.idle: deque[Connection] = deque()
        self._places = self._free = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def unused(self) -> bool:
        """Whether nobody is in, and no connection is kept."""
        return not self.idle and self._free == self._places

    async def enter(self, deadline_s: float) -> None:
        """Take a place, or wait for one until then. Raises TimeoutError; `leave` follows."""
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            async with asyncio.timeout_at(deadline_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():
                self.leave()  # it had come just then
            raise

    def leave(self) -> None:
        """The place is the first's who waits, if anybody does."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
