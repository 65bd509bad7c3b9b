"""What one process keeps in etcd: its entries, and its candidacies for duties.

EtcdRegistry makes and keeps them. The caller that asked for one closes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Entry:
    """A value under a key, for as long as its process lives."""

    def __init__(
        self, key: str, value: bytes, withdraw: Callable[[Entry], Awaitable[None]]
    ) -> None:
        """withdraw: removes the entry from the registry."""
        self._withdraw = withdraw
        self.key = key
        self.value = value

    async def close(self) -> None:
        """See ports.Registration."""
        await self._withdraw(self)


class Candidate:
    """One process as a candidate for a duty; at most one candidate has the duty."""

    def __init__(
        self,
        duty: str,
        who: str,
        changed: Callable[[bool], None],
        stand_down: Callable[[Candidate], Awaitable[None]],
    ) -> None:
        """changed: called with whether it leads; stand_down: gives up duty and candidacy."""
        self._stand_down = stand_down
        self.duty = duty
        self.key = f"leaders/{duty}"
        self.who = who
        self._changed = changed
        self.leads = False

    def set_leads(self, leads: bool) -> None:
        """Set whether this process has the duty, and report a change."""
        if leads != self.leads:
            self.leads = leads
            self._changed(leads)

    async def close(self) -> None:
        """See ports.Registration."""
        await self._stand_down(self)
