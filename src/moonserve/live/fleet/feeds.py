"""The seam between an instance and the events that its engine publishes of its KV cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import msgspec

from moonserve.core.facts import BlockEvent, InstanceInfo
from moonserve.live.fleet.spec import InstanceSpec


class FeedCounts(msgspec.Struct, frozen=True):
    """What became of the events of one rank so far."""

    connected: bool = False
    trusted: bool = False
    """Whether what was told adds up to what the engine holds, as far as can be known."""
    batches: int = 0
    gaps: int = 0
    """Times that batches were missing."""
    resets: int = 0
    """Times that all that was known had to be forgotten."""
    orphans: int = 0
    """Blocks left out, since what comes before them was never told."""
    malformed: int = 0
    fault: str = ""
    """Why nothing of it can be used, such as another block size; empty: it can."""


class FeedSink(Protocol):
    """Who is told; called on the event loop."""

    def blocks(self, *facts: BlockEvent) -> None:
        """What the engine holds has changed."""

    def restarted(self) -> None:
        """Its events begin anew: it is a new process."""


class Feed(Protocol):
    """The events of one rank, being followed."""

    def counts(self) -> FeedCounts:
        """So far."""

    async def close(self) -> None:
        """Nothing is told any more."""


FeedOpener: TypeAlias = Callable[[InstanceInfo, InstanceSpec, int, FeedSink], Awaitable[Feed]]
"""Follow the events of that rank, as facts about the instance's segment in its epoch."""
