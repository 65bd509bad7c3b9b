"""Turns at something that serves one at a time, in an order that is fair to all clients.

The gateway's API uses it for large bodies, and for the thread that tokenizes long prompts. Nothing
here does the work, and nothing here refuses.
"""

from __future__ import annotations

import asyncio

from moonserve.core.shares import Party, Waiting


class Turns:
    """One turn at a time: `await begin`, work, `end`."""

    def __init__(self) -> None:
        self._waiting = Waiting()
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._taken = False

    async def begin(self, party: Party, size: int) -> None:
        """Return when it is this one's turn; `end` must follow. size: of the work.

        If it is cancelled, it has no turn.
        """
        ticket = self._waiting.add(party, size)
        if not self._taken:
            self._taken = True
            self._waiting.next()
            return
        future = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.end()  # its turn came in the moment in which it was cancelled
            self._waiting.remove(ticket)
            self._futures.pop(ticket, None)
            raise

    def end(self) -> None:
        """The turn is over: the next one begins."""
        ticket = self._waiting.next()
        if ticket is None:
            self._taken = False
        else:
            self._futures.pop(ticket).set_result(None)
