"""Work that goes on as long as its process does, though a bug may end it.

For tasks nobody waits for: following a registry, renewing a lease, telling others. One that fails
says so in the log and starts anew; it never ends silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


def keep_doing(what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Do it until it returns, or is cancelled; `what` it is, for the log."""
    return asyncio.create_task(_doing(what, work), name=what)


async def _doing(what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        task = asyncio.create_task(work())
        try:
            await asyncio.wait({task})
        finally:
            if task.cancel():  # so were we: what it holds is let go of before we end
                await asyncio.wait({task})
        if (error := task.exception()) is None:
            return
        log.error("%s failed, and is started again", what, exc_info=error)
        await asyncio.sleep(_AGAIN_S)
