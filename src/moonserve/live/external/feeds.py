"""The seam between an instance and the events that its engine publishes of its KV cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import msgspec

from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.kv.reported import Reported
from moonserve.core.schedule.facts import Fact, InstanceInfo
from moonserve.core.units import Micros, SegmentId
from moonserve.live.external.spec import InstanceSpec

POOL = SegmentId("shared-store")
"""Holds what engines put into a store that they share."""


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


class Hearer(Protocol):
    """The Conductor, as far as a monitor needs it."""

    def now_us(self) -> Micros:
        """Its clock."""

    def tell(self, *facts: Fact) -> None:
        """Facts for its next step."""


class Hearing:
    """The Conductor as monitors tell it: of a store that engines share, each block is told once.

    Nobody tells what that store evicts, so of many blocks the longest unheard of go.
    """

    def __init__(self, conductor: Hearer) -> None:
        self._conductor = conductor
        self._pool = Reported(POOL)
        self.now_us = conductor.now_us

    def tell(self, *facts: Fact) -> None:
        """Facts for its next step."""
        told: list[Fact] = []
        for fact in facts:
            if isinstance(fact, BlocksStored) and fact.segment == POOL:
                told += self._pool.stored(self.now_us(), fact.keys, fact.parent)
            elif isinstance(fact, BlocksRemoved) and fact.segment == POOL:
                told += self._pool.removed(self.now_us(), fact.keys)
            else:
                told.append(fact)
        if told:
            self._conductor.tell(*told)
