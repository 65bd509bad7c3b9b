"""One host of the HTTP client's pool: its idle connections and its free places.

Only `client` uses this. It opens and closes no connection.
"""

from __future__ import annotations

import asyncio
from collections import deque

from moonserve.live.http.connection import Connection


class Host:
    """The idle connections to one host (the last used is reused first) and its free places."""

    __slots__ = ("_free", "_places", "_waiting", "idle", "key")

    def __init__(self, key: tuple[str, int], max_connections: int) -> None:
        self.key = key
        self.idle: deque[Connection] = deque()
        self._places = self._free = max_connections
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def unused(self) -> bool:
        """Whether no call has a place, and no connection is idle."""
        return not self.idle and self._free == self._places

    async def enter(self, deadline_s: float) -> None:
        """Take a place, waiting for one until `deadline_s`; the caller calls `leave` later.

        Raises TimeoutError.
        """
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
                self.leave()  # the place came at the same time as the error
            raise

    def leave(self) -> None:
        """Give the place to the first waiting call, or free it."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
