"""A master for tests: segments with a number of blocks, complete puts and copies."""

from __future__ import annotations

from moonserve.core.store.master import Master
from moonserve.core.store.words import (
    Address,
    Copy,
    Key,
    Medium,
    Mount,
    Outcome,
    PutOptions,
    Terms,
    Ticket,
)
from moonserve.core.units import LeaseId, SegmentId

TERMS = Terms(lease_ttl_us=100, put_ttl_us=50, segment_ttl_us=200, high=1.0)
A, B, C = SegmentId("a"), SegmentId("b"), SegmentId("c")
LEASE = LeaseId("r1")
BLOCK = 128


def key(number: int) -> Key:
    """Return a key with this number."""
    return number.to_bytes(32, "big")


def mount(
    name: SegmentId, blocks: int, epoch: int = 1, node: str = "", tier: Medium = "dram"
) -> Mount:
    """Return a segment with room for `blocks` blocks."""
    address = Address("127.0.0.1", 1, "", bytes(16))
    return Mount(name, epoch, blocks * BLOCK, address, node, tier)


def master(terms: Terms = TERMS, **blocks: int) -> Master:
    """Return a master with these segments, each on a node of its own."""
    made = Master(terms, first_id=1)
    for name, count in blocks.items():
        assert made.mount(0, mount(SegmentId(name), count))
    return made


def start(
    it: Master,
    number: int,
    owner: SegmentId = A,
    options: PutOptions = PutOptions(),  # noqa: B008 - frozen
    parent: Key | None = None,
) -> Outcome:
    """Start the put of one block."""
    (outcome,) = it.put_start(0, owner, [(key(number), BLOCK)], None, parent, options)
    return outcome


def store(
    it: Master,
    number: int,
    owner: SegmentId = A,
    options: PutOptions = PutOptions(),  # noqa: B008 - frozen
    parent: Key | None = None,
    lease: LeaseId | None = None,
) -> Ticket:
    """Start and end the put of one block."""
    ticket = start(it, number, owner, options, parent)
    assert isinstance(ticket, Ticket)
    assert it.put_end(0, [(ticket.id, number)], lease) == [ticket.id]
    return ticket


def copies(it: Master, segment: SegmentId, now_us: int = 0) -> list[Copy]:
    """Return the copies that a segment's owner has to make."""
    orders = it.beat(now_us, segment, 1)
    assert orders is not None
    return list(orders.copies)


def copy_all(it: Master, segment: SegmentId, done: bool = True) -> list[bool]:
    """Report all copies to a segment as done, or as failed."""
    results = [(copy.held.id, done) for copy in copies(it, segment)]
    return it.copied(0, segment, 1, results)


def where(it: Master, number: int) -> list[SegmentId]:
    """Return the segments with a replica of a block."""
    found = it.locate(key(number))
    return [] if found is None else [replica.segment for replica in found.replicas]
