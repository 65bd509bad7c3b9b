"""What one process has in etcd: the entries that it keeps up, and the duties that it stands for.

Made and kept by EtcdRegistry; handed to who asked for them, to be closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonserve.live.registry.etcd import EtcdRegistry


class Entry:
    """A value under a key, for as long as its process lives."""

    def __init__(self, registry: EtcdRegistry, key: str, value: bytes) -> None:
        self._registry = registry
        self.key = key
        self.value = value

    async def close(self) -> None:
        """See ports.Registration."""
        await self._registry.withdraw(self)


class Candidate:
    """Who stands for a duty."""

    def __init__(
        self, registry: EtcdRegistry, duty: str, who: str, changed: Callable[[bool], None]
    ) -> None:
        self._registry = registry
        self.duty = duty
        self.key = f"leaders/{duty}"
        self.who = who
        self._changed = changed
        self.leads = False

    def told(self, leads: bool) -> None:
        """Say so where it changed."""
        if leads != self.leads:
            self.leads = leads
            self._changed(leads)

    async def close(self) -> None:
        """See ports.Registration."""
        await self._registry.stand_down(self)
