"""The Conductor's word for one request, heard also while an engine is awaited.

Actions are read in turn, but one that ends the call which is out ends the wait for it at once: by a
cancel of the request's own task, that is caught where it waits and goes no further. So a request
needs no second task, and a client that leaves is told from a call that was ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from moonserve.core.schedule.actions import Abort, Action, GiveUp, Refuse
from moonserve.live.drive.lost import CallLost

T = TypeVar("T")


class Inbox:
    """Actions for the request of the task that made it; read by that task alone. A ports.Inbox."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._waiter: asyncio.Future[None] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._awaiting = False
        """Whether the task waits for an instance, and for nothing else."""
        self.number = 0
        """Of the call that is out; 0 when none is."""
        self.lost: str | None = None
        """Why that call is to be ended."""
        self._early: dict[int, str] = {}
        """Why calls are to be ended that are not out yet: both may come at once."""

    def out(self, number: int) -> None:
        """A call of this number goes out; 0: it is over."""
        self.number, self.lost = number, self._early.pop(number, None)

    async def get(self) -> Action:
        """The next action, when there is one."""
        await self.peek()
        return self._actions.popleft()

    async def peek(self) -> Action:
        """The action that `get` will return next, when there is one."""
        while not self._actions:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._actions[0]

    def put_nowait(self, item: Action, /) -> None:
        """As any queue; an Abort says nothing but what it ends."""
        if isinstance(item, Abort):
            if item.number == self.number:
                self._break(item.why)
            elif any(getattr(it, "number", 0) == item.number for it in self._actions):
                self._early[item.number] = item.why
            return
        self._actions.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if isinstance(item, (GiveUp, Refuse)) and self.number:
            self._break(item.why)

    async def until_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to an instance. Raises CallLost if the Conductor ends the call."""
        if self.lost is not None:
            call.close()
            raise CallLost(self.lost)
        self._awaiting = True
        try:
            return await call
        except asyncio.CancelledError:
            # Our own cancel ended the call only; any other ends the request.
            if self.lost is not None and not self._task.uncancel():
                raise CallLost(self.lost) from None
            raise
        finally:
            self._awaiting = False

    def _break(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            if self._awaiting:
                self._task.cancel()
