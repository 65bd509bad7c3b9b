"""Calls to the members of a group: begun at once, all of them broken off when one fails.

Called by `embedded` for a prefill whose parts several instances compute: see
core.schedule.pipeline.
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
from moonserve.live.http.connection import UpstreamError

log = logging.getLogger(__name__)

_ALSO_S = 0.1
"""How long the others may take to fail too: an instance that is lost takes them along, and its own
call may be the last to fail."""


async def gather_group(
    calls: Mapping[InstanceId, Coroutine[Any, Any, Prefilled]], ended: Callable[[InstanceId], None]
) -> list[Prefilled]:
    """All replies, in the order of calls; `ended` is called as each comes.

    Raises CallLost that names the member to blame; the next try is without that one, and so may
    succeed whatever it refused.
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
    """The failure of the member that others failed because of: one that is gone, or else the
    first, since the others get its KV.
    """
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
    unreachable = CallLost.of(error).unreachable
    return CallLost(plain(error, member), member=member, unreachable=unreachable)
