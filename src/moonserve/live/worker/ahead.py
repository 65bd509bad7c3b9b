"""KV that comes ahead of its request: decode pulls a prompt's blocks while prefill computes others.

    pull (the gateway's hint) --look, read, look, ...--> claimed by the decode call
                                                    `--> dropped: nobody waits any more, or no room

Used by the runner, on its event loop. A hint costs nobody anything: it takes free blocks only,
gives them up to whoever runs or waits here, and never releases the lease, which is prefill's until
the request is here. What did not come ahead is loaded then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from moonserve.core.engine.blocks import BlockPool
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.worker.job import Ahead
from moonserve.live.worker.kv import WorkerKV

log = logging.getLogger(__name__)

_SHORTEST_S = 0.02
_LONGEST_S = 0.5
_SECOND_S = 0.1
_SLOWER = 1.5
_LOOKS = 8


class Puller:
    """All prompts whose KV comes ahead; at most `most` at a time.

    spare: how many blocks of the pool nobody here needs, by what is known now.
    """

    def __init__(
        self,
        kv: WorkerKV,
        pool: BlockPool,
        spare: Callable[[], int],
        most: int,
        deadline_s: float,
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._spare = spare
        self._most = most
        self._deadline_s = deadline_s
        self._open: dict[LeaseId, Ahead] = {}
        self._leaving = 0
        """Dropped ones to whose blocks the store still writes."""

    @property
    def count(self) -> int:
        """How many there are, those that are let go included."""
        return len(self._open) + self._leaving

    async def pull(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        """Pull blocks as they appear; returns when the request came, or it was no use.

        Cancelled: nobody will come.
        """
        if lease in self._open or len(self._open) >= self._most or not keys:
            return
        ahead = self._open[lease] = Ahead(lease, keys)
        self._kv.spawn(self._run(ahead))
        try:
            async with asyncio.timeout(self._deadline_s):
                await ahead.closed.wait()
        except TimeoutError:
            log.warning("%s: KV came ahead of a request that never came", lease)
        finally:
            if self._open.get(lease) is ahead:
                self._drop(ahead)

    def of(self, lease: LeaseId, wanted: tuple[BlockKey, ...]) -> Ahead | None:
        """What came ahead for a request that wants these keys."""
        ahead = self._open.get(lease)
        return ahead if ahead is not None and wanted[: len(ahead.keys)] == ahead.keys else None

    def claim(self, ahead: Ahead) -> list[int]:
        """Give its blocks over to the request, which waits until it is idle."""
        del self._open[ahead.lease]
        ahead.closed.set()
        return ahead.blocks

    def give_up(self) -> bool:
        """Let the newest one's blocks go. False: there are none, or some that are still written."""
        newest = next((it for it in reversed(self._open.values()) if it.blocks), None)
        if self._leaving or newest is None:
            return False
        self._drop(newest)
        return not self._leaving

    def _drop(self, ahead: Ahead) -> None:
        """Nobody wants it any more: let its blocks go, once idle."""
        del self._open[ahead.lease]
        ahead.closed.set()
        if ahead.idle.is_set():
            self._kv.let_go(ahead.blocks)
        else:
            ahead.unwanted = True
            self._leaving += 1

    async def _run(self, ahead: Ahead) -> None:
        loop = asyncio.get_running_loop()
        pause_s, longest_s = _SHORTEST_S, _LONGEST_S
        last_s: float | None = None
        try:
            # A block that was lost on the way ends it: what comes after is loaded by the request.
            while not ahead.closed.is_set() and ahead.loaded == len(ahead.blocks):
                came = await self._look(ahead) if self._spare() > 0 else 0
                if ahead.loaded == len(ahead.keys):
                    return
                if came:  # look again at once, and then some times as long as a chunk may take
                    now_s = loop.time()
                    gap_s = _LOOKS * _SECOND_S if last_s is None else now_s - last_s
                    longest_s = min(max(gap_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
                    pause_s, last_s = _SHORTEST_S, now_s
                    continue
                await _or_timeout(ahead.closed, pause_s)
                pause_s = min(pause_s * _SLOWER, longest_s)
        finally:
            ahead.idle.set()
            if ahead.unwanted:
                self._leaving -= 1
                self._kv.let_go(ahead.blocks)

    async def _look(self, ahead: Ahead) -> int:
        """Read what appeared since the last look; how many blocks."""
        request = RequestId(ahead.lease)  # as good a name
        found = await self._kv.find(request, ahead.keys[ahead.loaded :], ahead.lease)
        if ahead.closed.is_set():
            return 0
        found = found[: max(0, self._spare())]
        blocks = self._pool.allocate(len(found))
        assert blocks is not None, "spare blocks are free"
        ahead.blocks += blocks
        good = await self._kv.read(request, found, blocks, ahead.lease, "ahead")
        ahead.loaded += good
        return good


async def _or_timeout(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
