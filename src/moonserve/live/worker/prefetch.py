"""KV that comes before its request: decode fetches a prompt's blocks while prefill computes others.

    fetch (the gateway's hint) --look, read, look, ...--> claimed by the decode call
                                                     `--> dropped: the gateway left, or no room

The intake makes it, and the runner passes the gateway's hints on. A hint costs other requests
nothing: it takes only free blocks, gives them back to requests that need them, and never releases
the lease, which belongs to prefill until the decode call comes. That call loads what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.worker.job import Prefetch
from moonserve.live.worker.kv import WorkerKV
from moonserve.live.worker.workbench import Workbench

log = logging.getLogger(__name__)

_SHORTEST_S = 0.02
_LONGEST_S = 0.5
_FIRST_GAP_S = 0.8
"""The time between two chunks of a prefill that is assumed before the second came."""
_SLOWER = 1.5
_LOOKS = 8
"""At the slowest, so many looks in the time between the last two chunks."""


class Prefetcher:
    """All prompts whose KV is fetched ahead; at most max_seqs at a time."""

    def __init__(self, bench: Workbench, kv: WorkerKV, spare: Callable[[], int]) -> None:
        """spare: returns the number of free blocks that no request here needs."""
        self._bench = bench
        self._kv = kv
        self._spare = spare
        self._open: dict[LeaseId, Prefetch] = {}
        self._leaving = 0
        """Dropped ones to whose blocks the store still writes."""

    @property
    def count(self) -> int:
        """How many there are, with those that are being dropped."""
        return len(self._open) + self._leaving

    async def fetch(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        """Fetch blocks as they appear; returns when the decode call came, or if this cannot help.

        The caller cancels it if the decode call will not come.
        """
        limits = self._bench.limits
        if lease in self._open or len(self._open) >= limits.max_seqs or not keys:
            return
        prefetch = self._open[lease] = Prefetch(lease, keys)
        self._bench.spawn(self._run(prefetch))
        try:
            async with asyncio.timeout(limits.kv.ahead_s):
                await prefetch.closed.wait()
        except TimeoutError:
            log.warning("%s: KV was prefetched for a request that never came", lease)
        finally:
            if self._open.get(lease) is prefetch:
                self._drop(prefetch)

    def find(self, lease: LeaseId, wanted: tuple[BlockKey, ...]) -> Prefetch | None:
        """What was fetched for a request that wants these keys."""
        prefetch = self._open.get(lease)
        if prefetch is None:
            return None
        return prefetch if wanted[: len(prefetch.keys)] == prefetch.keys else None

    def claim(self, prefetch: Prefetch) -> list[int]:
        """Give its blocks to the request, which waits until it is idle."""
        del self._open[prefetch.lease]
        prefetch.closed.set()
        return prefetch.blocks

    def give_up(self) -> bool:
        """Free the newest one's blocks. False: there are none, or the store writes to some."""
        newest = next((it for it in reversed(self._open.values()) if it.blocks), None)
        if self._leaving or newest is None:
            return False
        self._drop(newest)
        return not self._leaving

    def _drop(self, prefetch: Prefetch) -> None:
        """No request wants it any more: free its blocks, once it is idle."""
        del self._open[prefetch.lease]
        prefetch.closed.set()
        if prefetch.idle.is_set():
            self._bench.free(prefetch.blocks)
        else:
            prefetch.unwanted = True
            self._leaving += 1

    async def _run(self, prefetch: Prefetch) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _SHORTEST_S
        longest_s = _LONGEST_S
        last_s: float | None = None
        try:
            # A block that was lost on the way ends it: the request loads what comes after.
            while not prefetch.closed.is_set() and prefetch.loaded == len(prefetch.blocks):
                came = await self._look(prefetch) if self._spare() > 0 else 0
                if prefetch.loaded == len(prefetch.keys):
                    return
                if came:  # look again at once, then at times that follow prefill's chunks
                    now_s = loop.time()
                    gap_s = _FIRST_GAP_S if last_s is None else now_s - last_s
                    longest_s = min(max(gap_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
                    pause_s = _SHORTEST_S
                    last_s = now_s
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(prefetch.closed.wait(), pause_s)
                pause_s = min(pause_s * _SLOWER, longest_s)
        finally:
            prefetch.idle.set()
            if prefetch.unwanted:
                self._leaving -= 1
                self._bench.free(prefetch.blocks)

    async def _look(self, prefetch: Prefetch) -> int:
        """Read what appeared since the last look; returns the number of blocks."""
        request = RequestId(prefetch.lease)  # only a name for the log
        found = await self._kv.find(request, prefetch.keys[prefetch.loaded :], prefetch.lease)
        if prefetch.closed.is_set():
            return 0
        found = found[: max(0, self._spare())]
        blocks = self._bench.pool.allocate(len(found))
        assert blocks is not None, "spare blocks are free"
        prefetch.blocks += blocks
        good = await self._kv.read(request, found, blocks, prefetch.lease, "ahead")
        prefetch.loaded += good
        return good
