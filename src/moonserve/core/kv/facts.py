"""What a segment reports of the KV blocks that it holds: stored, removed, cleared.

Plain frozen structs; the same ones travel as msgpack between stores, engines and the Conductor.
The store, the KV event streams and the prefix index all use them. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias, get_args

import msgspec

from moonserve.core.units import BlockKey, SegmentId

Tier: TypeAlias = Literal["device", "dram", "disk"]
"""G1, G2 and G3 of KV events: the engine's own pool, host memory, local disk."""
TIERS: tuple[Tier, ...] = get_args(Tier)
"""All tiers, the fastest first."""


class OfBlocks(msgspec.Struct, frozen=True):
    """A fact about blocks on one tier of one segment, in one epoch of its owner."""

    rank: ClassVar[int] = 3
    """When the Conductor takes such facts, among all facts of one instant."""
    subject: ClassVar[str] = ""  # the sender's own order is kept
    segment: SegmentId


class BlocksStored(OfBlocks, frozen=True, tag=True):
    """A segment now holds a piece of a chain, complete and readable."""

    keys: tuple[BlockKey, ...]
    """In chain order."""
    parent: BlockKey | None
    """The key before keys[0], held or not; None where keys[0] heads its chain."""
    tier: Tier
    epoch: int


class BlocksRemoved(OfBlocks, frozen=True, tag=True):
    """A segment holds one copy less of each of these blocks, in any order."""

    keys: tuple[BlockKey, ...]
    tier: Tier
    epoch: int


class BlocksCleared(OfBlocks, frozen=True, tag=True):
    """A segment emptied a tier."""

    tier: Tier
    epoch: int


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


def merged(events: Sequence[BlockEvent]) -> list[BlockEvent]:
    """The same events in fewer: stores along one chain become one, and so do removals in a row.

    The order is kept. All events must be of one tier.
    """
    short: list[tuple[BlockEvent, list[BlockKey]]] = []
    for event in events:
        keys = [] if isinstance(event, BlocksCleared) else list(event.keys)
        if short and _goes_on(event, *short[-1]):
            short[-1][1].extend(keys)
        else:
            short.append((event, keys))
    return [
        event
        if isinstance(event, BlocksCleared)
        else msgspec.structs.replace(event, keys=tuple(keys))
        for event, keys in short
    ]


def _goes_on(event: BlockEvent, last: BlockEvent, keys: Sequence[BlockKey]) -> bool:
    """Whether `event` can be one event together with `last`, which has `keys` by now."""
    if (event.segment, event.epoch) != (last.segment, last.epoch):
        return False
    if isinstance(event, BlocksStored):
        return isinstance(last, BlocksStored) and event.parent == keys[-1]
    return isinstance(event, BlocksRemoved) and isinstance(last, BlocksRemoved)
