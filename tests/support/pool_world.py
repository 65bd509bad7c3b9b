"""A simulated store cluster: the real Master, simulated nodes, a fake network, virtual time.

There is one seeded source of random numbers. Nodes and the master crash and come back. Links are
cut or slow, and lose or repeat messages. The master's clock jumps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from moonserve.core.errors import Recovering, UnknownSegment
from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.store.master import Master
from moonserve.core.store.words import ALIGN
from moonserve.core.units import SegmentId
from tests.support.pool_nodes import (
    AGAIN,
    BEAT_US,
    CALL_US,
    LOST,
    MASTER,
    RECOVER_US,
    TERMS,
    Node,
    Owner,
    Segment,
)


class World:
    """The cluster, its network and its clock."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 1
        self.skew = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.cut: set[tuple[str, str]] = set()
        self.slow: set[tuple[str, str]] = set()
        self.loss = self.repeats = 0.0
        self.master: Master | None = None
        self.lives = 0
        self.evicted = 0
        self.replayed: dict[tuple[SegmentId, bytes], int] = {}
        self.given: set[tuple[str, int | None]] = set()
        self.owner = Owner(self)
        count = self.rng.choice((2, 3, 3, 4))
        self.roomy = self.rng.random() < 0.5
        room = ALIGN * (400 if self.roomy else self.rng.choice((12, 20, 40)))
        disk = self.rng.random() < 0.5
        self.nodes = [Node(self, f"n{at}", room, room * 2 if disk else 0) for at in range(count)]
        self.restart_master(fresh=True)
        for node in self.nodes:
            node.start()

    # Time

    def at(self, delay_us: int, then: Callable[[], None]) -> None:
        """Run `then` later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_us, self._count, then))

    def run(self, until_us: int) -> None:
        """Let everything happen until then."""
        while self._heap and self._heap[0][0] <= until_us:
            self.now, _, then = heapq.heappop(self._heap)
            then()
        self.now = until_us

    def piece_us(self) -> int:
        """Return the time that one piece of bytes takes; sometimes it is very long."""
        return (
            self.rng.randint(50, 500) if self.rng.random() < 0.95 else self.rng.randint(0, 200_000)
        )

    # Network

    def segment(self, name: SegmentId) -> Segment:
        """By name."""
        for node in self.nodes:
            for segment in node.segments:
                if segment.name == name:
                    return segment
        raise KeyError(name)

    def reaches(self, one: str, other: str) -> bool:
        """Whether a link is up."""
        return (min(one, other), max(one, other)) not in self.cut

    def send(self, one: str, other: str, then: Callable[[], None]) -> None:
        """A message: it may come late, twice or never."""
        if not self.reaches(one, other) or self.rng.random() < self.loss:
            return
        slow = (min(one, other), max(one, other)) in self.slow
        for _ in range(1 + (self.rng.random() < self.repeats)):
            self.at(self.rng.randint(20, 60_000 if slow else 400), then)

    def call(self, node: Node, op: str, args: Sequence[Any], then: Callable[[Any], None]) -> None:
        """Call the master; `then` gets its answer, AGAIN or LOST, unless the node is gone."""
        answered = False
        epoch = node.epoch

        def answer(value: Any) -> None:
            nonlocal answered
            if not answered and node.alive and node.epoch == epoch:
                answered = True
                then(value)

        def arrive() -> None:
            if self.master is not None:
                value = self._run(self.master, op, args)
                self.send(MASTER, node.name, lambda: answer(value))

        self.send(node.name, MASTER, arrive)
        self.at(CALL_US, lambda: answer(LOST))

    # The master

    def _run(self, master: Master, op: str, args: Sequence[Any]) -> Any:
        method = getattr(master, op)
        untimed = ("put_abort", "release", "discard", "pin", "exists", "scan", "unmount")
        try:
            value = method(*args) if op in untimed else method(self.now + self.skew, *args)
        except Recovering:
            value = AGAIN
        except UnknownSegment:
            value = None
        self._replay(master)
        return value

    def _replay(self, master: Master) -> None:
        for event in master.drain_events():
            if isinstance(event, BlocksCleared):
                for at in [at for at in self.replayed if at[0] == event.segment]:
                    del self.replayed[at]
                continue
            for key in event.keys:
                if isinstance(event, BlocksStored):
                    assert (event.segment, key) not in self.replayed
                    self.replayed[event.segment, key] = event.epoch
                else:
                    assert self.replayed.pop((event.segment, key)) == event.epoch

    def restart_master(self, fresh: bool = False) -> None:
        """Start a new master, in place of the old one if there is one."""
        self.stop_master()
        self.replayed.clear()
        until_us = None if fresh else self.now + self.skew + RECOVER_US
        self.lives += 1
        self.master = Master(TERMS, self.lives << 32, until_us)
        self._watch(self.master)
        self._reap(self.master)

    def _watch(self, master: Master) -> None:
        """Note the extents that the master freed: the bytes there belong to no object."""
        stock = master._catalog
        take, reserve, give = stock.take, stock.reserve, stock.give

        def taking(shelf: Any, size: int, tenant: str) -> int | None:
            offset = take(shelf, size, tenant)
            self.given.discard((shelf.name, offset))
            return offset

        def reserving(shelf: Any, offset: int, size: int, tenant: str) -> bool:
            self.given.discard((shelf.name, offset))
            return reserve(shelf, offset, size, tenant)

        def giving(shelf: Any, offset: int, size: int, tenant: str) -> None:
            self.given.add((shelf.name, offset))
            give(shelf, offset, size, tenant)

        stock.take, stock.reserve, stock.give = taking, reserving, giving  # type: ignore[method-assign]

    def stop_master(self) -> None:
        """The master is gone at once."""
        if self.master is not None:
            self.evicted += self.master.stats().evicted
        self.master = None

    def _reap(self, master: Master) -> None:
        if master is self.master:
            master.reap(self.now + self.skew)
            self._replay(master)
            self.at(BEAT_US, lambda: self._reap(master))
