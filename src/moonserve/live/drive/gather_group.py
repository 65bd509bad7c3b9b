"""Calls to the members of a group: begun at once, all of them broken off when one fails.

Called by dispatch for a prefill whose parts several instances compute; see core.schedule.pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from moonserve.core.errors import MoonserveError
from moonserve.core.units import InstanceId
from moonserve.live.drive.wire import Prefilled
from moonserve.live.http.connection import UpstreamError

_ALSO_S = 0.1
"""How long the others may take to fail too: who is lost takes them along, and may be heard last."""


class MemberFailed(MoonserveError):
    """One of a group, which all of it failed of."""

    def __init__(self, member: InstanceId, error: BaseException) -> None:
        super().__init__(f"{member}: {error}")
        self.member = member
        self.error = error


async def together(
    calls: Mapping[InstanceId, Coroutine[Any, Any, Prefilled]], ended: Callable[[InstanceId], None]
) -> list[Prefilled]:
    """All replies, in the order of calls; `ended` is told of each. Raises MemberFailed."""
    tasks = {
        asyncio.create_task(call, name=f"part on {member}"): member
        for member, call in calls.items()
    }
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done):
                if pending:
                    await asyncio.wait(pending, timeout=_ALSO_S)
                raise _blame(tasks)
            for task in tasks:
                if task in done:
                    ended(tasks[task])
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _blame(tasks: Mapping[asyncio.Task[Prefilled], InstanceId]) -> MemberFailed:
    """Who failed the others: one that is gone, or else the first, from whom the others' KV came."""
    failed = [
        MemberFailed(member, error)
        for task, member in tasks.items()
        if task.done() and (error := task.exception()) is not None
    ]
    return next((it for it in failed if isinstance(it.error, UpstreamError)), failed[0])
