"""A made-up network: links of given bandwidth, shared fairly by the flows that cross them.

Every node sends and receives at up to its link's rate. A flow gets the smaller of its shares of the
sender's and the receiver's link, so a node that many fetch from is slow for all of them. What a
flow leaves of its share goes to no other flow: shares are equal, not max-min.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import msgspec

from moonserve.core.units import Bytes, Micros
from moonserve.sim.clock import TimedCalls


class _Flow(msgspec.Struct):
    source: str
    target: str
    left: float
    """Bytes that have not moved yet."""
    done: Callable[[], None]
    rate: float = 0.0


class Network:
    """All current flows. `bytes_per_s`: rate of each node's link, in each direction. A flow begins
    to move `base_us` after it was sent.

    `wide` names nodes without a limit of their own, such as a pool that spreads over all nodes.
    """

    def __init__(
        self,
        clock: TimedCalls,
        bytes_per_s: float,
        wide: frozenset[str] = frozenset(),
        base_us: Micros = 0,
    ) -> None:
        self._clock = clock
        self._per_us = bytes_per_s / 1e6
        self._base_us = base_us
        self._wide = wide
        self._flows: list[_Flow] = []
        self._out: dict[str, int] = {}
        self._in: dict[str, int] = {}
        self._moved_us: Micros = 0
        self._plan = 0
        self.transfers = 0
        self.bytes = 0

    def send(self, source: str, target: str, size: Bytes, done: Callable[[], None]) -> None:
        """Move `size` bytes; `done` is called when the last one has arrived."""
        self.transfers += 1
        self.bytes += size
        flow = _Flow(source, target, float(size), done)
        if self._base_us:
            self._clock.at(self._clock.now_us + self._base_us, partial(self._begin, flow))
        else:
            self._begin(flow)

    def _begin(self, flow: _Flow) -> None:
        self._move()
        self._flows.append(flow)
        self._out[flow.source] = self._out.get(flow.source, 0) + 1
        self._in[flow.target] = self._in.get(flow.target, 0) + 1
        self._share()

    def _move(self) -> None:
        """Move the bytes that have flowed since the last update."""
        passed = self._clock.now_us - self._moved_us
        self._moved_us = self._clock.now_us
        if passed:
            for flow in self._flows:
                flow.left -= flow.rate * passed

    def _share(self) -> None:
        """Compute new rates, and schedule the next update for when the first flow ends."""
        soonest = None
        for flow in self._flows:
            senders = 1 if flow.source in self._wide else self._out[flow.source]
            flow.rate = self._per_us / max(senders, self._in[flow.target])
            ends = flow.left / flow.rate
            soonest = ends if soonest is None else min(soonest, ends)
        self._plan += 1
        if soonest is not None:
            plan = self._plan
            at_us = self._clock.now_us + max(0, ceil(soonest))
            self._clock.at(at_us, lambda: self._look(plan))

    def _look(self, plan: int) -> None:
        if plan != self._plan:
            return  # flows came or went meanwhile; a newer update is scheduled
        self._move()
        ended = [flow for flow in self._flows if flow.left <= 1e-6]
        self._flows = [flow for flow in self._flows if flow.left > 1e-6]
        for flow in ended:
            self._out[flow.source] -= 1
            self._in[flow.target] -= 1
        self._share()
        for flow in ended:
            flow.done()
