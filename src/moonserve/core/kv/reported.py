"""Reported: the blocks of a pool whose master publishes nothing, from what its users report.

The gateway feeds it with the blocks that workers or engines put there, and those that they missed
there. It returns facts for the Conductor. Several workers report the same block, late and in any
order, so it returns each block once as stored and once as removed. It knows too much until a block
is missed. A miss soon after a put is ignored, since a worker looks for a block until it is there.

What never happens here: a second copy of one block; more blocks kept than the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.units import BlockKey, Micros, SegmentId

_CROSSING_US: Micros = 10_000_000


class Reported:
    """The blocks of one pool, under one holder. If there are too many, the oldest reports go."""

    def __init__(self, holder: SegmentId, max_blocks: int = 1 << 18) -> None:
        self._holder = holder
        self._max_blocks = max_blocks
        self._known: OrderedDict[BlockKey, Micros] = OrderedDict()
        """Block -> when it was last put there."""

    def __len__(self) -> int:
        """How many blocks are there, by the reports."""
        return len(self._known)

    def stored(
        self, now_us: Micros, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> list[BlockEvent]:
        """A run of a chain was put there; `parent` is the key before it. Returns the facts."""
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
        """These blocks were looked for, and were not there. Returns the facts."""
        late_us = now_us - _CROSSING_US
        gone = [key for key in dict.fromkeys(keys) if self._known.get(key, now_us) <= late_us]
        for key in gone:
            del self._known[key]
        return self._removal(gone)

    def _removal(self, keys: list[BlockKey]) -> list[BlockEvent]:
        return [BlocksRemoved(self._holder, tuple(keys), "dram", 0)] if keys else []
