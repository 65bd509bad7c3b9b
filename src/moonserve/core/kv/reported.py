"""What workers report of a pool whose own master tells us nothing, as events for the index.

Fed by the gateway with what workers put there and what they missed there; its events go to the
Conductor. Several workers report the same block, late and in any order, so it keeps what it has
told: a block is told as stored once, and as removed once. It knows too much until somebody misses
a block. A miss that comes soon after a put is taken for one that crossed it: who waits for a block
looks for it until it is there.

What never happens here: a second copy told of one block, or more blocks kept than the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.units import BlockKey, Micros, SegmentId

_CROSSING_US: Micros = 10_000_000


class Reported:
    """The ledger of one pool, under one holder's name; least lately reported goes first."""

    def __init__(self, holder: SegmentId, max_blocks: int = 1 << 18) -> None:
        self._holder = holder
        self._max_blocks = max_blocks
        self._known: OrderedDict[BlockKey, Micros] = OrderedDict()
        """Block -> when it was last put."""

    def __len__(self) -> int:
        """How many blocks are told to be there."""
        return len(self._known)

    def stored(
        self, now_us: Micros, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> list[BlockEvent]:
        """A piece of a chain was put; `parent` is the key before it."""
        runs: list[tuple[BlockKey | None, list[BlockKey]]] = []
        run: list[BlockKey] = []
        for key in keys:
            if key in self._known:
                run = []
            else:
                if not run:
                    runs.append((parent, run))
                run.append(key)
            self._known[key] = now_us
            parent = key
        for key in reversed(keys):  # a chain loses its tail first
            self._known.move_to_end(key)
        surplus = len(self._known) - self._max_blocks
        gone = [self._known.popitem(last=False)[0] for _ in range(surplus)]
        made: list[BlockEvent] = [
            BlocksStored(self._holder, tuple(run), parent, "dram", 0) for parent, run in runs
        ]
        return made + self._removal(gone)

    def removed(self, now_us: Micros, keys: Iterable[BlockKey]) -> list[BlockEvent]:
        """Somebody looked for these blocks, and they were not there."""
        late_us = now_us - _CROSSING_US
        gone = [key for key in dict.fromkeys(keys) if self._known.get(key, now_us) <= late_us]
        for key in gone:
            del self._known[key]
        return self._removal(gone)

    def _removal(self, keys: list[BlockKey]) -> list[BlockEvent]:
        return [BlocksRemoved(self._holder, tuple(keys), "dram", 0)] if keys else []
