"""Copies of hot prefixes in the simulator: they cross the same links as everything else.

What the live gateway asks the store's master for. Used by sim.cluster.
"""

from __future__ import annotations

from moonserve.core.actions import Spread
from moonserve.core.facts import Fact, SpreadUpTo
from moonserve.sim.network import Network
from moonserve.sim.node import Node
from moonserve.sim.segments import Segments


class Spreading:
    """Copies under way; none of a node that dies arrives."""

    def __init__(self, network: Network, segments: Segments, facts: list[Fact]) -> None:
        """`facts` takes what there is to tell."""
        self._network = network
        self._segments = segments
        self._facts = facts

    def begin(self, order: Spread, to: Node) -> None:
        """Move what the source has now; then it is stored and told, the copy's end last."""
        there = self._segments.held(order.source, order.keys)
        count = max(0, there - order.first)

        def came() -> None:
            if not to.dead and count:
                keys, first = order.keys[:there], order.first
                self._facts += self._segments.store(to, keys, first, there, copies=True)
            self._facts.append(SpreadUpTo(order.number, 0))

        size = count * to.info.block_bytes
        self._network.send(order.source, to.name, size, came)
