"""What a KV block costs the gateway: bytes and time of the prefix index and of the store's master.

    python bench/stock.py [--quick] [--index-only] [--copies N]

One process has a PrefixIndex and a Master, as a gateway has. Chains are of a template, a document
of it (both by Zipf) and a tail of their own; one in ten goes on for up to eight turns of 256
blocks. The owner puts the blocks that the pool lacks, as a prefill pass does, under a lease. The
events of the master go to the index. With --copies, each block is copied to more segments.

Bytes are of the process's resident memory, before and after the fill, divided by blocks; every key
was made for its message. Each size runs in a process of its own. Times are CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also when imported as bench.stock

from common import machine_line
from moonserve.core.kv.facts import BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.store.master import Master
from moonserve.core.store.words import Address, Mount, Terms, Ticket
from moonserve.core.units import BlockKey, LeaseId, SegmentId

BLOCK_BYTES = 1 << 20
PASS = 512
"""Blocks that are put at a time: a prefill pass of 8,192 tokens."""
LENGTHS = (64, 512, 2_048)
QUERIES = 200

Chain = list[BlockKey]


class Gateway:
    """The part of a gateway that knows blocks."""

    def __init__(self, instances: int, blocks: int, copies: int, store: bool) -> None:
        self.index = PrefixIndex(max_entries=2 * blocks * copies)
        self.store = store
        self.copies = copies
        self.now_us = 0
        self.leases = 0
        self.master = Master(Terms(), 1)
        self.segments = [SegmentId(f"i{at:04}") for at in range(instances)]
        self.seen = dict.fromkeys(self.segments, (0, 0))
        room = (3 * blocks * copies // instances + 65_536) * BLOCK_BYTES
        if store:
            for segment in self.segments:
                address = Address("127.0.0.1", 1, segment, b"")
                self.master.mount(0, Mount(segment, 1, room, address))
        self.held: dict[tuple[SegmentId, BlockKey], None] = {}

    def put(self, segment: SegmentId, chain: Chain, at: int) -> None:
        """The owner has computed the chain from block `at` on, and publishes it."""
        if not self.store:
            parent = chain[at - 1] if at else None
            self.index.stored(segment, chain[at:], parent, "device", 1)
            return
        lease = self.lease()
        for start in range(at, len(chain), PASS):
            items = [(key, BLOCK_BYTES) for key in chain[start : start + PASS]]
            parent = chain[start - 1] if start else None
            tickets = self.master.put_start(self.now_us, segment, items, lease, parent)
            ends = [(it.id, hash(it)) for it in tickets if isinstance(it, Ticket)]
            self.master.put_end(self.now_us, [(id, sum & _U64) for id, sum in ends], lease)
            self.feed()
        self.master.release(lease)

    def lease(self) -> LeaseId:
        """A new name."""
        self.leases += 1
        return LeaseId(f"lease{self.leases}")

    def feed(self) -> None:
        """The index takes what the master reports."""
        for event in self.master.drain_events():
            match event:
                case BlocksStored(segment, keys, parent, tier, epoch):
                    self.index.stored(segment, keys, parent, tier, epoch)
                case BlocksRemoved(segment, keys, tier, epoch):
                    self.index.removed(segment, keys, tier, epoch)
                case BlocksCleared(segment, tier, epoch):
                    self.index.cleared(segment, tier, epoch)

    def copy(self, keys: Chain, to: SegmentId) -> None:
        """The pool copies blocks to one more segment."""
        if not self.store:
            self.index.stored(to, keys, None, "device", 1)
            return
        for start in range(0, len(keys), 64):
            self.master.copy(self.now_us, keys[start : start + 64], to, None)
            self.beat(to)
        self.feed()

    def beat(self, segment: SegmentId) -> None:
        """The owner receives its changes, and makes its copies."""
        while True:
            orders = self.master.beat(self.now_us, segment, 1, self.seen[segment])
            assert orders is not None, "it is mounted"
            self.seen[segment] = orders.seen
            done = [(it.held.id, True) for it in orders.copies]
            if done:
                self.master.copied(self.now_us, segment, 1, done)
            elif not orders.more:
                return

    def beats(self) -> None:
        """All owners beat, and receive all changes."""
        if self.store:
            for segment in self.segments:
                self.beat(segment)
                self.beat(segment)


_U64 = (1 << 64) - 1


class Chains:
    """Chains as they come; heads are known, tails are new."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.heads = [self.fresh(64) for _ in range(200)]
        self.documents: dict[tuple[int, int], Chain] = {}

    def fresh(self, count: int) -> Chain:
        """New keys."""
        return [BlockKey(self.random.randbytes(32)) for _ in range(count)]

    def zipf(self, count: int) -> int:
        """A rank below `count`, by Zipf's law with exponent 1.1."""
        sums = _SUMS.setdefault(count, list(accumulate(n**-1.1 for n in range(1, count + 1))))
        return bisect(sums, self.random.random() * sums[-1])

    def next(self) -> Iterator[tuple[int, Chain, int]]:
        """(number of the session, chain, blocks that the pool may have), turn by turn."""
        number = 0
        while True:
            number += 1
            at = self.zipf(200), self.zipf(40)
            known = at in self.documents
            document = self.documents.setdefault(at, self.fresh(96) if not known else [])
            chain = self.heads[at[0]] + document + self.fresh(96)
            yield number, chain, 160 if known else 0
            if self.random.random() < 0.1:
                for _ in range(self.random.randint(1, 8)):
                    before = len(chain)
                    chain = chain + self.fresh(256)
                    yield number, chain, before


_SUMS: dict[int, list[float]] = {}


def copied(chain: Chain) -> Chain:
    """The same keys as other objects, as another message brings them."""
    return [BlockKey(bytes(bytearray(key))) for key in chain]


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_us(call: Callable[[], object]) -> float:
    """CPU microseconds of one call."""
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1_000


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def serve(instances: int, blocks: int, copies: int, store: bool) -> dict[str, Any]:
    """Fill and measure one size."""
    chains = Chains(7)
    kept: list[tuple[SegmentId, Chain]] = []
    spent = 0.0
    put = 0
    random = Random(3)
    gateway = Gateway(instances, blocks, copies, store)
    before = resident()
    for number, chain, known in chains.next():
        segment = gateway.segments[number * 7 % instances]
        fresh = copied(chain)
        if not store and known and known < 200:
            known = 0  # each engine has blocks of its own
        began = time.process_time_ns()
        gateway.put(segment, fresh, known)
        spent += time.process_time_ns() - began
        put += len(fresh) - known
        for other in range(1, copies):
            to = gateway.segments[(number * 7 + other) % instances]
            gateway.copy(copied(chain), to)
        if number % (blocks // 256 // 400 + 1) == 0 or (len(chain) > 1_500 and len(kept) < 2_000):
            kept.append((segment, copied(chain)))
        if number % 256 == 0:
            gateway.beats()
            gateway.now_us += 100_000
        if len(gateway.index) >= blocks:
            break
    gateway.beats()
    own = sum(len(chain) for _, chain in kept) + sum(map(len, chains.documents.values()))
    after = resident() - own * 88  # what the harness keeps itself
    told: dict[str, Any] = {
        "blocks": len(gateway.index),
        "entries": gateway.index.entries,
        "bytes": (after - before) / len(gateway.index),
        "mib": (after - before) / (1 << 20),
        "put": spent / 1_000 / put,
    }
    for length in LENGTHS:
        long = [chain for _, chain in kept if len(chain) >= length] or [kept[0][1]]
        asks = [copied(random.choice(long)[:length]) for _ in range(QUERIES)]
        took = [cpu_us(lambda ask=ask: gateway.index.match(ask).by_holder) for ask in asks]
        told[f"match {length}"] = median(took)
        took = [cpu_us(lambda ask=ask: gateway.index.touch(ask)) for ask in asks]
        told[f"touch {length}"] = median(took)
        if store:
            took = []
            for ask in asks:
                lease = gateway.lease()
                took.append(
                    cpu_us(
                        lambda ask=ask, lease=lease: (
                            gateway.master.find(gateway.now_us, ask, lease),
                            gateway.master.release(lease),
                        )
                    )
                    / len(ask)
                )
            told[f"find {length}"] = median(took)
    took = []
    for segment, chain in kept[:QUERIES]:
        tail = copied(chain[-96:])
        if store:
            us = cpu_us(lambda tail=tail: (gateway.master.remove(0, tail[::-1]), gateway.feed()))
        else:
            us = cpu_us(
                lambda tail=tail, segment=segment: gateway.index.removed(
                    segment, tail[::-1], "device", 1
                )
            )
        took.append(us / len(tail))
    told["remove"] = median(took)
    return told


def main() -> None:
    """Run both sizes, and print their ratio."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the blocks")
    parser.add_argument("--index-only", action="store_true", help="no store: engines report blocks")
    parser.add_argument("--copies", type=int, default=1, help="segments that hold each block")
    parser.add_argument("--small", action="store_true", help="the smaller size only")
    options = parser.parse_args()
    print(machine_line())
    sizes = [(64, 1_000_000), (1_000, 10_000_000)]
    if options.quick:
        sizes = [(64, 50_000), (1_000, 500_000)]
    if options.small:
        sizes = sizes[:1]
    rows = []
    for instances, blocks in sizes:
        args = [instances, blocks, options.copies, int(not options.index_only)]
        command = [sys.executable, __file__, "--serve", *map(str, args)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        row = rows[-1]
        print(f"{instances} instances, {row['blocks']:,} blocks, {row['entries']:,} entries")
        print(f"  {row['mib']:,.0f} MiB: {row['bytes']:.0f} bytes a block")
        print("  CPU us a block: " + _cells(row, ("put", "find", "remove")))
        print("  CPU us a call: " + _cells(row, ("match", "touch")))
    if len(rows) == 2:
        ratios = {name: rows[1][name] / rows[0][name] for name in rows[0] if rows[0][name]}
        print("larger : smaller: " + _cells(ratios, ("bytes", "put", "find", "remove", "match")))


def _cells(row: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {row[name]:.2f}" for name in row if name.split()[0] in names)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        at = list(map(int, sys.argv[2:]))
        print(json.dumps(serve(at[0], at[1], at[2], bool(at[3]))))
    else:
        main()
