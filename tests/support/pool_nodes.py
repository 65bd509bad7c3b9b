"""Nodes of the simulated store: segments and their owners, with the real SegmentContents.

Bytes are modelled as one tag per cache line, read and written piece by piece, so that torn writes
and reused extents show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moonserve.core.store.owners import CopyQueue, RecentWrites, SegmentContents
from moonserve.core.store.words import ALIGN, Address, Change, Copy, Held, Mount, Orders, Terms
from moonserve.core.units import SegmentId

if TYPE_CHECKING:
    from tests.support.pool_world import World

TERMS = Terms(
    lease_ttl_us=600_000,
    put_ttl_us=300_000,
    segment_ttl_us=400_000,
    high=0.9,
    low=0.7,
    quotas={"small": 12 * ALIGN},
)
RECOVER_US = 250_000
BEAT_US = 60_000
CALL_US = 80_000
LOST = object()
"""No answer came in time."""
AGAIN = object()
"""The master recovers."""
MASTER = "master"


def lines(size: int) -> int:
    """Cache lines of an object."""
    return -(-size // ALIGN)


def tags(content: int, size: int) -> list[int]:
    """The bytes of a content."""
    return [content * 64 + at for at in range(lines(size))]


def checksum(bytes_: Sequence[int]) -> int:
    """Differs wherever the bytes do."""
    return hash(tuple(bytes_)) & (1 << 60) - 1


class Segment:
    """One segment of a node: memory that dies with it, or a disk that does not."""

    def __init__(self, node: Node, name: str, tier: str, capacity: int) -> None:
        self.node = node
        self.name = SegmentId(name)
        self.tier = tier
        self.capacity = capacity
        self.memory: dict[int, int] = {}
        self.headers: dict[int, Held] = {}
        """On disk: by offset."""

    def start(self) -> None:
        """The node's process is up: a disk keeps what is whole."""
        held: list[Held] = []
        if self.tier == "dram":
            self.memory = {}
        else:
            held = [it for it in self.headers.values() if self.is_whole(it)]
        self.catalogue = SegmentContents(sorted(held, key=lambda it: it.id))
        self.tasks = CopyQueue(at_once=2)
        self.stopped: set[int] = set()

    def is_whole(self, held: Held) -> bool:
        """Whether the bytes are there."""
        return checksum(self.read(held.offset, 0, lines(held.size))) == held.checksum

    def read(self, offset: int, start: int, end: int) -> list[int]:
        """Lines start to end of an extent."""
        first = offset // ALIGN
        return [self.memory.get(first + at, 0) for at in range(start, end)]

    def write(self, offset: int, start: int, piece: Sequence[int]) -> None:
        """Write lines of an extent, from `start` on."""
        first = offset // ALIGN + start
        for at, tag in enumerate(piece):
            self.memory[first + at] = tag

    def begin(self, held: Held) -> None:
        """On disk, what is about to be overwritten is no object any more."""
        if self.tier == "disk":
            end = held.offset + held.size
            for offset, old in list(self.headers.items()):
                if offset < end and held.offset < offset + old.size:
                    del self.headers[offset]

    def finish(self, held: Held) -> None:
        """On disk, the header comes last."""
        if self.tier == "disk":
            self.headers[held.offset] = held

    @property
    def mount(self) -> Mount:
        """As it is offered."""
        address = Address("", 0, "", b"")
        node, tier = self.node.name, self.tier
        return Mount(self.name, self.node.epoch, self.capacity, address, node, tier)  # type: ignore[arg-type]


class Node:
    """A process with its segments and the recent writes of its client."""

    def __init__(self, world: World, name: str, capacity: int, disk: int) -> None:
        self.world = world
        self.name = name
        self.epoch = 0
        self.alive = False
        self.segments = [Segment(self, name, "dram", capacity)]
        if disk:
            self.segments.append(Segment(self, name + "d", "disk", disk))

    @property
    def main(self) -> Segment:
        """Its segment in memory."""
        return self.segments[0]

    def start(self) -> None:
        """Come up, with nothing but what is on disk."""
        self.alive = True
        self.epoch += 1
        self.recent = RecentWrites()
        for segment in self.segments:
            segment.start()
            self.world.owner.mount(segment, self.epoch, 0)

    def crash(self) -> None:
        """Be gone at once."""
        self.alive = False

    def at(self, delay_us: int, then: Callable[[], None]) -> None:
        """Run later, unless this process is gone by then."""
        epoch = self.epoch
        self.world.at(delay_us, lambda: then() if self.alive and self.epoch == epoch else None)


class Owner:
    """What the owner of a segment does: mount, beat, copy."""

    def __init__(self, world: World) -> None:
        self.world = world

    def mount(self, segment: Segment, epoch: int, page: int) -> None:
        """Mount page by page, then claim the recent writes, then beat."""
        node = segment.node
        if not node.alive or node.epoch != epoch:
            return
        if page == 0:
            segment.catalogue.restart()
            segment.pages = segment.catalogue.pages(3)  # type: ignore[attr-defined]
        pages: list[tuple[Change, ...]] = segment.pages  # type: ignore[attr-defined]
        last = page == len(pages) - 1

        def then(taken: Any) -> None:
            if taken is LOST or (not taken and page == 0):
                node.at(BEAT_US, lambda: self.mount(segment, epoch, page))
            elif not taken:
                self.mount(segment, epoch, 0)
            elif not last:
                self.mount(segment, epoch, page + 1)
            else:
                self.claim(segment)
                self.beat(segment)

        self.world.call(node, "mount", (segment.mount, pages[page], page, last), then)

    def claim(self, segment: Segment) -> None:
        """Claim the recent writes until there is an answer."""
        node = segment.node

        def then(answer: Any) -> None:
            if answer is LOST:
                node.at(BEAT_US, lambda: self.claim(segment))

        self.world.call(node, "claim", node.recent.claims(self.world.now, TERMS.put_ttl_us), then)

    def beat(self, segment: Segment) -> None:
        """Beat once, and again later."""
        node, world, sent_us = segment.node, self.world, self.world.now

        def then(orders: Any) -> None:
            if orders is None:
                segment.stopped |= {it.held.id for it in segment.tasks.forget()}
                self.mount(segment, node.epoch, 0)
                return
            wait_us = BEAT_US
            if isinstance(orders, Orders):
                node.recent.forget(world.now - TERMS.segment_ttl_us - TERMS.put_ttl_us)
                segment.catalogue.apply(orders)
                segment.tasks.take(sent_us, orders.copies)
                self.work(segment)
                if orders.more:
                    wait_us = 0
            self.report(segment)
            node.at(wait_us, lambda: self.beat(segment))

        args = (segment.name, node.epoch, segment.catalogue.seen)
        world.call(node, "beat", args, then)

    def work(self, segment: Segment) -> None:
        """Start what may be started."""
        while (copy := segment.tasks.next(self.world.now)) is not None:
            segment.begin(copy.held)
            self.piece(segment, copy, 0, self.world.now + copy.left_us)

    def piece(self, segment: Segment, copy: Copy, start: int, until_us: int) -> None:
        """Copy the next piece of an object, until it is whole or time is up."""
        held, world = copy.held, self.world
        if held.id in segment.stopped:
            return
        if world.now >= until_us:
            self.end(segment, copy, False)
            return
        source = world.segment(copy.source.segment)
        if not source.node.alive or not world.reaches(source.node.name, segment.node.name):
            self.end(segment, copy, False)
            return
        end = min(lines(held.size), start + world.rng.randint(1, 3))
        segment.write(held.offset, start, source.read(copy.source.offset, start, end))
        if end < lines(held.size):
            segment.node.at(world.piece_us(), lambda: self.piece(segment, copy, end, until_us))
            return
        whole = segment.is_whole(held)
        if not whole:
            args = (held.key, held.version, copy.source.segment)
            world.call(segment.node, "discard", args, lambda answer: None)
        self.end(segment, copy, whole)

    def end(self, segment: Segment, copy: Copy, done: bool) -> None:
        """A copy is made or not: note it, tell it, go on."""
        if done:
            segment.finish(copy.held)
            segment.catalogue.add(copy.held)
        segment.tasks.end(copy.held.id, done)
        self.report(segment)
        self.work(segment)

    def report(self, segment: Segment) -> None:
        """Tell the master what ended; again with the next beat if no answer comes."""
        results = segment.tasks.results()
        if not results:
            return
        keys = {it.id: it.key for it in segment.catalogue.held.values()}

        def then(became: Any) -> None:
            if became is LOST:
                return
            segment.tasks.reported([id for id, _ in results])
            for (id, _), is_replica in zip(results, became, strict=True):
                if not is_replica and id in keys:
                    segment.catalogue.drop(keys[id], id)

        args = (segment.name, segment.node.epoch, results)
        self.world.call(segment.node, "copied", args, then)
