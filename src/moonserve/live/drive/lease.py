"""A watch over KV that waits at a prefill engine while decode's reply shows nothing.

A reply that does not stream shows nothing before its end. If the decode engine keeps the call in
its queue longer than the KV is held, it reads blocks that were already reused for another request:
a vLLM whose NIXL connector does not renew leases then answers 200 with wrong text.

So after half of that time the gateway reads the engine's counts, until they show that the call has
begun. If they show at the end that it may still wait, the gateway cancels the call, and prefills
again. `external` uses it for replies that do not stream.
"""

from __future__ import annotations

import asyncio

from moonserve.core.errors import MoonserveError
from moonserve.core.schedule.actions import Abort
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import RequestId
from moonserve.live.drive.inbox import ActionInbox
from moonserve.live.external.member import Member, RankPage

_LOOK_S = 1.0


class Queue:
    """Whether a call that was sent before the first look may still wait. Queues are first come,
    first served. Requests that come later may keep a queue from ever being empty."""

    def __init__(self) -> None:
        self._ahead: int | None = None
        """How many requests waited at the first look; the call may be one of them."""
        self._entered = 0

    def holds(self, seen: RankPage) -> bool:
        """Whether the call may still wait, by the next look at the engine's counts."""
        entered = seen.running + seen.finished
        if self._ahead is None:
            self._ahead, self._entered = seen.waiting, entered
        return seen.waiting > 0 and entered - self._entered < self._ahead


class LeaseWatch:
    """Watches one call. Enter it when the call goes out."""

    def __init__(
        self,
        member: Member,
        to: InstanceInfo,
        request: RequestId,
        inbox: ActionInbox,
        left_s: float,
    ) -> None:
        """`inbox` is that of `request`, whose call goes to `to`; its KV is held for `left_s`
        seconds."""
        self._member = member
        self._to = to
        self._request = request
        self._inbox = inbox
        self._number = inbox.number
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + left_s
        self._timer = self._loop.call_later(left_s / 2, self._begin)
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        """The watch began when it was made."""

    def __exit__(self, *_: object) -> None:
        """End the watch."""
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
                pass  # without counts, the last look stays valid
            else:
                waits = seen is not None and queue.holds(seen)
                if not waits:
                    return
            left_s = self._until_s - self._loop.time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(_LOOK_S, left_s))
        if waits:
            why = f"{self._to.id} kept the call waiting until its KV was held no longer"
            self._inbox.put_nowait(Abort(self._request, self._number, why))
