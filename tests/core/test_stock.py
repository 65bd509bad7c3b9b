"""What a block costs the gateway in memory: the prefix index and the master's catalog together."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.store.master import Master
from moonserve.core.store.words import UNSEEN, Address, Mount, Seen, Terms, Ticket
from moonserve.core.units import BlockKey, LeaseId, SegmentId

CHAIN = 160
SHARED = 64
ROUNDED = 15
"""A bytes object of 32 takes 65 bytes, and the allocator gives it 80."""


class Gateway:
    """A master with some segments, and the index that follows it."""

    def __init__(self, segments: int) -> None:
        self.master = Master(Terms(), 1)
        self.index = PrefixIndex()
        self.seen: dict[SegmentId, Seen] = {SegmentId(f"s{n}"): UNSEEN for n in range(segments)}
        for name in self.seen:
            self.master.mount(0, Mount(name, 1, 1 << 40, Address("", 0, "", b"")))

    def put(self, owner: SegmentId, keys: list[BlockKey], parent: BlockKey | None) -> None:
        """One pass of a prefill, under a lease that ends."""
        lease = LeaseId("l")
        tickets = self.master.put_start(0, owner, [(key, 1 << 20) for key in keys], lease, parent)
        ends = [(it.id, (1 << 64) - it.id) for it in tickets if isinstance(it, Ticket)]
        assert len(ends) == len(keys)
        self.master.put_end(0, ends, lease)
        self.master.release(lease)
        self.feed(owner)

    def feed(self, owner: SegmentId) -> None:
        """The owner beats and makes its copies, and the index takes the master's events."""
        more = True
        while more:
            orders = self.master.beat(0, owner, 1, self.seen[owner])
            assert orders is not None
            self.seen[owner] = orders.seen
            self.master.copied(0, owner, 1, [(it.held.id, True) for it in orders.copies])
            more = bool(orders.copies or orders.changes)
        for event in self.master.drain_events():
            if isinstance(event, BlocksStored):
                self.index.stored(event.segment, event.keys, event.parent, event.tier, event.epoch)
            elif isinstance(event, BlocksRemoved):
                self.index.removed(event.segment, event.keys, event.tier, event.epoch)


def bytes_per_block(blocks: int, copies: int) -> float:
    """Fill a gateway by chains that share heads; return the bytes that each block has cost."""
    random = Random(5)
    gateway = Gateway(4)
    names = list(gateway.seen)
    heads = [[BlockKey(random.randbytes(32)) for _ in range(SHARED)] for _ in range(16)]
    for number, head in enumerate(heads):
        gateway.put(names[number % 4], head, None)
    gc.collect()
    began = len(gateway.index)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range((blocks - began) // CHAIN):
            keys = [BlockKey(random.randbytes(32)) for _ in range(CHAIN)]
            gateway.put(names[number % 4], keys, heads[number % 16][-1])
            for other in range(1, copies):
                to = names[(number + other) % 4]
                for at in range(0, CHAIN, 32):
                    assert gateway.master.copy(0, keys[at : at + 32], to, None) == 32
                    gateway.feed(to)
        del keys
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gateway.index.entries == began + copies * (len(gateway.index) - began)
    assert gateway.index.match([*heads[0]]).pool == SHARED
    return (after - before) / (len(gateway.index) - began) + ROUNDED


@pytest.mark.parametrize(("blocks", "copies", "most"), [(42_000, 1, 185), (21_000, 2, 280)])
def test_a_block_costs_few_bytes(blocks: int, copies: int, most: int) -> None:
    """Index, catalog and the key that both share: at most so many bytes a block.

    The numbers of blocks are just below those at which a dict grows, as 10 million is.
    """
    assert bytes_per_block(blocks, copies) <= most
