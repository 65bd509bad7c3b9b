"""Background work that must run as long as its process, even after a bug.

For tasks that no other task awaits: following a registry, renewing a lease, reporting to peers. A
task that fails is logged and started again; it never ends silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


def keep_doing(what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Run `work` until it returns or is cancelled; `what` names it in the log."""
    return asyncio.create_task(_doing(what, work), name=what)


async def _doing(what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        task = asyncio.create_task(work())
        try:
            await asyncio.wait({task})
        finally:
            if task.cancel():  # we are cancelled: wait until it has released what it holds
                await asyncio.wait({task})
        if (error := task.exception()) is None:
            return
        log.error("%s failed, and is started again", what, exc_info=error)
        await asyncio.sleep(_AGAIN_S)
