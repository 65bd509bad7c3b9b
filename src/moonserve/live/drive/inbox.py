"""The Conductor's actions for one request, received also while the request waits for an instance.

The driver reads actions in turn. An action that ends the current call also ends the wait for it at
once: the inbox cancels the request's own task, and catches that where it waits. So a request needs
no second task, and a client's disconnect is told from a call that was ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from moonserve.core.schedule.actions import Abort, Action, GiveUp, Refuse
from moonserve.live.drive.lost import CallLost

T = TypeVar("T")


class ActionInbox:
    """Actions for the request of the task that made the inbox. Only that task reads it. Implements
    ports.Inbox."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the one that runs now."""
        self._loop = loop
        self._actions: deque[Action] = deque()
        self._waiter: asyncio.Future[None] | None = None
        task = asyncio.current_task(loop)
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._awaiting = False
        """Whether the task waits for an instance, and for nothing else."""
        self.number = 0
        """Number of the call that is out; 0 if none is."""
        self.lost: str | None = None
        """Why that call has to end; None: it has not."""
        self._early: dict[int, str] = {}
        """Why calls have to end that are not out yet: an Abort may come in the same step as its
        call."""

    @property
    def is_over(self) -> bool:
        """Whether an action that waits here ends the request."""
        return any(isinstance(it, (GiveUp, Refuse)) for it in self._actions)

    def out(self, number: int) -> None:
        """Note that a call of this number goes out; 0: the call is over."""
        self.number, self.lost = number, self._early.pop(number, None)

    async def get(self) -> Action:
        """The next action, when there is one."""
        await self.peek()
        return self._actions.popleft()

    async def peek(self) -> Action:
        """The action that `get` will return next, when there is one."""
        while not self._actions:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._actions[0]

    def put_nowait(self, item: Action, /) -> None:
        """Take an action. An Abort is not queued: it only ends its call."""
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
