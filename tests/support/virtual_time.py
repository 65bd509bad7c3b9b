"""An event loop whose time jumps: tests of deadlines do not wait, and do not depend on the load.

No threads and no sockets: a loop that waits for nothing but those fails at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jump(selectors.SelectSelector):
    """Where a selector would wait, it moves the loop's time on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("every task waits, and no timer is set")
        if timeout and not ready:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while any task can run."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
