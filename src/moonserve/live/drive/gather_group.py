"""Calls to the members of a group: all begin at once, and all are cancelled when one fails.

`embedded` calls it for a prefill whose parts several instances compute: see core.schedule.pipeline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from moonserve.core.errors import MoonserveError
from moonserve.core.units import InstanceId
from moonserve.live.drive.lost import CallLost, plain
from moonserve.live.drive.wire import Prefilled
from moonserve.live.http.client import UpstreamError

log = logging.getLogger(__name__)

_ALSO_S = 0.1
"""How long to wait for further failures after the first. A lost instance makes the others fail, and
its own call may fail last."""


async def gather_group(
    calls: Mapping[InstanceId, Coroutine[Any, Any, Prefilled]], ended: Callable[[InstanceId], None]
) -> list[Prefilled]:
    """Await all calls; their replies, in the order of `calls`. `ended` is called as each reply
    comes.

    Raises CallLost, which names the member to blame. The next attempt does not use that member, so
    it may succeed whatever the member refused.
    """
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


def _blame(tasks: Mapping[asyncio.Task[Prefilled], InstanceId]) -> CallLost:
    """The failure to report. A member that cannot be reached is to blame; otherwise the first
    failed member, because the later ones need its KV."""
    failed = [
        (member, error)
        for task, member in tasks.items()
        if task.done() and (error := task.exception()) is not None
    ]
    gone = [it for it in failed if isinstance(it[1], UpstreamError)]
    member, error = (gone or failed)[0]
    if not isinstance(error, MoonserveError):
        log.error("the call to %s failed", member, exc_info=error)
        return CallLost("internal error", member=member)
    lost = CallLost.of(error)
    return CallLost(
        plain(lost, member),
        member=member,
        detail=lost.in_full,
        unreachable=lost.unreachable,
        broke=lost.broke,
    )
