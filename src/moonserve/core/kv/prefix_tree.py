"""A summary of the prefixes that were asked for lately, and of who holds them now: a tree.

live.control.prefixes makes one when an operator looks at it. It is bounded in its work: so many
chains, and so many nodes, the largest first. It changes nothing in the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import msgspec

from moonserve.core.kv.index import PendingPrefixes, PrefixIndex, PromisedRun
from moonserve.core.units import BlockKey, SegmentId, Tokens

_ASKED = SegmentId("")
"""The one holder of the tree of requests: it has no holders."""


class PrefixNode(msgspec.Struct):
    """Blocks that the same requests share."""

    id: int
    parent: int | None
    """The node before it; None: it heads a chain."""
    key: BlockKey
    """Of its first block."""
    tokens: Tokens
    requests: int
    """How many of the requests had these blocks."""
    held_tokens: Tokens
    """Of its tokens, the leading ones that some instance holds now."""
    holders: int
    """Instances that hold all of it, and all before it."""
    devices: int
    """Those that hold it in the memory of their device."""
    on_disk: int
    """Those that hold it on disk."""


class PrefixTree:
    """The tree of some chains of one block size."""

    def __init__(self, block_tokens: Tokens) -> None:
        self._block_tokens = block_tokens
        self._asked = PendingPrefixes()
        self.requests = 0

    def add(self, keys: Sequence[BlockKey]) -> None:
        """A request has asked for this chain."""
        self._asked.add(_ASKED, keys)
        self.requests += 1

    def nodes(self, index: PrefixIndex, most: int) -> Iterable[PrefixNode]:
        """Yield up to `most` nodes, each after its parent; those that save most work come first."""
        heap: list[tuple[int, int, int | None, int, PromisedRun]] = []
        number = 0
        for run in self._asked.heads():
            heappush(heap, (-run.stop * run.counts[_ASKED], number, None, 0, run))
            number += 1
        found = 0
        while heap and found < most:
            _, _, parent, start, run = heappop(heap)
            yield self._node(found, parent, start, run, index)
            for after in run.after.values():
                weight = (after.stop - run.stop) * after.counts[_ASKED]
                heappush(heap, (-weight, number, found, run.stop, after))
                number += 1
            found += 1

    def _node(
        self, number: int, parent: int | None, start: int, run: PromisedRun, index: PrefixIndex
    ) -> PrefixNode:
        stop, block = run.stop, self._block_tokens
        match = index.match(run.keys[:stop])
        holders = [name for name, blocks in match.by_holder.items() if blocks >= stop]
        tiers = [index.tiers(run.keys[stop - 1], name) for name in holders]
        return PrefixNode(
            id=number,
            parent=parent,
            key=run.keys[start],
            tokens=(stop - start) * block,
            requests=run.counts[_ASKED],
            held_tokens=max(0, min(stop, match.pool) - start) * block,
            holders=len(holders),
            devices=sum("device" in it for it in tiers),
            on_disk=sum("disk" in it for it in tiers),
        )
