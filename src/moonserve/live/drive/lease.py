"""A watch over KV that waits on a prefill engine while its decode says nothing.

A reply that does not stream shows nothing before its end. If the decode engine kept the call in its
queue beyond the time for which the KV is held, it fetched what was somebody else's by then: a vLLM
whose NIXL connector does not renew leases answers 200 with wrong text. So from half of that time
on the engine's counts are read, until they say that the call has begun; where they say at the end
that it may be waiting still, it is broken off, and prefilled again. By Life, for calls that are out
for so long only.
"""

from __future__ import annotations

import asyncio

from moonserve.core.errors import MoonserveError
from moonserve.core.schedule.actions import Abort
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import RequestId
from moonserve.live.drive.inbox import Inbox
from moonserve.live.external.member import Member
from moonserve.live.external.pages import RankPage

_LOOK_S = 1.0


class Queue:
    """Whether a call that was sent before the first look may wait still. Queues are first come,
    first served; what others sent after it may keep one from ever being empty."""

    def __init__(self) -> None:
        self._ahead: int | None = None
        """Who waited at the first look, it among them or not."""
        self._entered = 0

    def holds(self, seen: RankPage) -> bool:
        """By the next look at the engine's counts."""
        entered = seen.running + seen.finished
        if self._ahead is None:
            self._ahead, self._entered = seen.waiting, entered
        return seen.waiting > 0 and entered - self._entered < self._ahead


class Watch:
    """See the module; entered while the call is out."""

    def __init__(
        self, member: Member, to: InstanceInfo, request: RequestId, inbox: Inbox, left_s: float
    ) -> None:
        """The call of `request` that is out in `inbox` goes to `to`; its KV is held so long."""
        self._member, self._to, self._request, self._inbox = member, to, request, inbox
        self._number = inbox.number
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + left_s
        self._timer = self._loop.call_later(left_s / 2, self._begin)
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        """It is made as the call goes out."""

    def __exit__(self, *_: object) -> None:
        """It is over."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"KV of {self._request}")

    async def _run(self) -> None:
        queue, waits = Queue(), False
        while True:
            left_s = self._until_s - self._loop.time()
            try:
                async with asyncio.timeout(max(_LOOK_S, left_s)):
                    seen = (await self._member.load()).rank(self._to.dp_rank or 0)
            except (MoonserveError, TimeoutError):
                pass  # as it was at the last look
            else:
                waits = seen is not None and queue.holds(seen)
                if not waits:
                    return
            left_s = self._until_s - self._loop.time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(_LOOK_S, left_s))
        if waits:
            why = f"{self._to.id} kept it waiting for as long as the KV for it was held"
            self._inbox.put_nowait(Abort(self._request, self._number, why))
