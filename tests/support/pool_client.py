"""Clients of the simulated store, and the oracle: what they may read and must not lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonserve.core.store.owners import RecentWrites
from moonserve.core.store.words import (
    ALIGN,
    Exists,
    Found,
    Full,
    OverQuota,
    PutOptions,
    Removal,
    Ticket,
    TooLarge,
)
from moonserve.core.units import LeaseId
from tests.support.pool_nodes import AGAIN, LOST, TERMS, Node, Segment, checksum, lines, tags
from tests.support.pool_world import World

KEYS = [bytes([n]) * 32 for n in range(24)]
"""Blocks: a key names its content. Key n continues key n - 1, but for every sixth."""
NAMES = [b"name/%d" % n for n in range(6)]
"""Any bytes: each put has its own content."""


@dataclass
class Oracle:
    """What was promised."""

    content: dict[int, tuple[bytes, int, int, int]] = field(default_factory=dict)
    """Ticket -> (key, content, size, replicas wanted), of everything that was ever written."""
    on: dict[int, str] = field(default_factory=dict)
    """Ticket -> segment."""
    acked: dict[int, tuple[Node, int]] = field(default_factory=dict)
    """Version -> who was told that it exists, in which epoch."""
    removed: set[bytes] = field(default_factory=set)
    """Keys that anybody asked to remove."""
    reads: int = 0
    unread: int = 0


class Client:
    """One node's client: puts, reads, removes, as the dice say."""

    def __init__(self, world: World, node: Node, oracle: Oracle) -> None:
        self.world = world
        self.node = node
        self.oracle = oracle
        self.leases = 0
        self.busy = True

    def live(self) -> None:
        """Do something, and again."""
        rng = self.world.rng
        if self.busy and self.node.alive:
            dice = rng.random()
            if dice < 0.5:
                self.put()
            elif dice < 0.9:
                self.read()
            elif dice < 0.95:
                self.remove()
            else:
                key = rng.choice(NAMES)
                self.world.call(self.node, "pin", ([key], rng.random() < 0.5), _ignore)
        if self.busy:
            self.world.at(rng.randint(1_000, 150_000), self.live)

    def _lease(self) -> LeaseId:
        self.leases += 1
        return LeaseId(f"{self.node.name}/{self.node.epoch}/{self.leases}")

    # Writing

    def put(self) -> None:
        """Put some blocks, or one object of any bytes."""
        rng = self.world.rng
        blocks = rng.random() < 0.7
        if blocks:
            first = rng.randrange(len(KEYS))
            keys = KEYS[first : first + rng.randint(1, 4)]
            parent = KEYS[first - 1] if first % 6 else None
        else:
            keys, parent = [rng.choice(NAMES)], None
        replicas = rng.choice((1, 1, 2, 3))
        tenant = rng.choice(("", "", "", "small"))
        options = PutOptions(replicas=replicas, tenant=tenant, blocks=blocks)
        items = [(key, self._size(key)) for key in keys]
        lease = self._lease() if rng.random() < 0.5 else None
        sent_us, recent = self.world.now, self.node.recent
        owner = self.node.main.name if rng.random() < 0.9 else None

        def then(outcomes: Any) -> None:
            if not isinstance(outcomes, list):
                self._release(lease)
                return
            writes = []
            before = parent
            for (key, size), outcome in zip(items, outcomes, strict=True):
                if isinstance(outcome, Ticket):
                    recent.writing(sent_us, outcome, key, size, before, options)
                    content = KEYS.index(key) + 1 if blocks else outcome.id * 64 + 1
                    self.oracle.on[outcome.id] = outcome.segment
                    self.oracle.content[outcome.id] = (key, content, size, replicas)
                    writes.append((outcome, content, size))
                else:
                    assert isinstance(outcome, (Exists, Full, OverQuota, TooLarge))
                before = key if blocks else None
            self._write(writes, 0, sent_us, lambda: self._end(recent, writes, lease))

        args = (owner, items, lease, parent, options)
        self.world.call(self.node, "put_start", args, then)

    def _size(self, key: bytes) -> int:
        return ALIGN * (1 + key[0] % 3) if key in KEYS else ALIGN * self.world.rng.randint(1, 5) - 7

    def _write(
        self,
        writes: list[tuple[Ticket, int, int]],
        start: int,
        sent_us: int,
        then: Callable[[], None],
    ) -> None:
        """Write one after another, piece by piece; what fails is aborted."""
        if not writes:
            then()
            return
        (ticket, content, size), *rest = writes
        world, node = self.world, self.node
        target = world.segment(ticket.segment)
        late = world.now - sent_us >= TERMS.put_ttl_us
        there = target.node.alive and target.node.epoch == ticket.epoch
        if late or not there or not world.reaches(node.name, target.node.name):
            for failed, *_ in writes:
                node.recent.drop(failed.id)
            world.call(node, "put_abort", ([failed.id for failed, *_ in writes],), _ignore)
            del writes[:]
            then()
            return
        bytes_ = tags(content, size)
        end = min(lines(size), start + world.rng.randint(1, 3))
        target.write(ticket.offset, start, bytes_[start:end])
        if end < lines(size):
            node.at(world.piece_us(), lambda: self._write(writes, end, sent_us, then))
        else:
            node.recent.ended(world.now, ticket.id, checksum(bytes_))
            node.at(world.piece_us(), lambda: self._write(rest, 0, sent_us, then))

    def _end(
        self, recent: RecentWrites, writes: Sequence[tuple[Ticket, int, int]], lease: LeaseId | None
    ) -> None:
        ends = [(ticket.id, checksum(tags(content, size))) for ticket, content, size in writes]
        if ends:
            self._try_end(recent, ends, lease, tries=0)
        else:
            self._release(lease)

    def _try_end(
        self, recent: RecentWrites, ends: list[tuple[int, int]], lease: LeaseId | None, tries: int
    ) -> None:
        def then(versions: Any) -> None:
            if versions is LOST or versions is AGAIN:
                if tries < 4:
                    delay_us = self.world.rng.randint(1_000, 60_000)
                    self.node.at(delay_us, lambda: self._try_end(recent, ends, lease, tries + 1))
                else:
                    self._release(lease)
                return
            for (ticket, _), version in zip(ends, versions, strict=True):
                held = recent.held(ticket)
                if version == ticket:
                    if held is not None and self.oracle.on[ticket] == self.node.main.name:
                        self.node.main.catalogue.add(held)
                    recent.acknowledged(self.world.now, ticket)
                    self.oracle.acked[ticket] = (self.node, self.node.epoch)
                elif version is not None or tries == 0:
                    recent.drop(ticket)
            self._release(lease)

        self.world.call(self.node, "put_end", (ends, lease), then)

    def _release(self, lease: LeaseId | None) -> None:
        if lease is not None and self.world.rng.random() < 0.8:
            self.world.call(self.node, "release", (lease,), _ignore)

    # Reading

    def read(self) -> None:
        """Find a chain, or get names, and read what there is."""
        rng = self.world.rng
        lease = self._lease()
        near = self.node.main.name if rng.random() < 0.7 else None
        first = rng.randrange(0, len(KEYS), 6)
        op, keys = ("find", KEYS[first : first + 6]) if rng.random() < 0.6 else ("get", NAMES)

        def then(found: Any) -> None:
            there = [it for it in found if it is not None] if isinstance(found, list) else []
            self._read_next(there, lease)

        self.world.call(self.node, op, (keys, lease, near), then)

    def _read_next(self, found: list[Found], lease: LeaseId) -> None:
        if not found:
            self._release(lease)
            return
        it, *rest = found
        self._read_piece(it, 0, [], lambda: self._read_next(rest, lease))

    def _read_piece(self, it: Found, turn: int, got: list[int], then: Callable[[], None]) -> None:
        """Read replica after replica piece by piece, until one is whole."""
        world, node = self.world, self.node
        if turn == len(it.replicas):
            self.oracle.unread += 1
            then()
            return
        at = it.replicas[turn]
        source = world.segment(at.segment)
        if not source.node.alive or not world.reaches(source.node.name, node.name):
            self._read_piece(it, turn + 1, [], then)
            return
        end = min(lines(it.size), len(got) + world.rng.randint(1, 3))
        got = got + source.read(at.offset, len(got), end)
        if end < lines(it.size):
            node.at(world.piece_us(), lambda: self._read_piece(it, turn, got, then))
        elif checksum(got) == it.checksum:
            self.check(it, got)
            then()
        else:
            world.call(node, "discard", (it.key, it.version, at.segment), _ignore)
            self._read_piece(it, turn + 1, [], then)

    def check(self, it: Found, got: list[int]) -> None:
        """What a reader takes for good is what was put under this key."""
        key, content, size, _ = self.oracle.content[it.version]
        assert (key, size) == (it.key, it.size), "another object's"
        assert got == tags(content, size), "wrong bytes"
        self.oracle.reads += 1

    # Removing

    def remove(self) -> None:
        """Remove a key or two."""
        rng = self.world.rng
        keys = rng.sample([*KEYS, *NAMES], 2)
        self.oracle.removed.update(keys)
        recent = self.node.recent

        def then(removals: Any) -> None:
            if not isinstance(removals, list):
                return
            for key, removal in zip(keys, removals, strict=True):
                assert isinstance(removal, Removal)
                if removal.version is not None:
                    recent.removed(self.world.now, key, removal.version)

        self.world.call(self.node, "remove", (keys, rng.random() < 0.2), then)


def _ignore(answer: Any) -> None:
    """Nobody waits for this answer."""


def intact(segment: Segment, offset: int, content: int, size: int) -> bool:
    """Whether these bytes lie there now."""
    return segment.node.alive and segment.read(offset, 0, lines(size)) == tags(content, size)
