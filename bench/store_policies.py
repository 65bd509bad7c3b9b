"""Hit rates of the store's eviction orders on the public traces, by the store's own master.

    python bench/store_policies.py [--blocks 1000 10000] [--trace conversation]

One segment with room for so many blocks. A request finds its leading blocks, puts the others and
releases all. Beside it, in brackets, what sim/cache's bare order hits without the group rule, with
a request's blocks entering before the excess is evicted. Shares of all block touches. A request
with more blocks than fit keeps what it could put.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from common import machine_line
from moonserve.core.store.evict import EVICTIONS
from moonserve.core.store.master import Master
from moonserve.core.store.words import ALIGN, Address, Key, Mount, Terms, Ticket
from moonserve.core.units import LeaseId, SegmentId
from moonserve.sim.stats import hits
from moonserve.sim.trace import Trace, read_trace

TRACES = Path(os.environ.get("MOONSERVE_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
SEGMENT = SegmentId("all")


def store_hits(trace: Trace, blocks: int, eviction: str) -> int:
    """Blocks found by all requests of a trace, in order."""
    master = Master(Terms(eviction=eviction, high=1.0), 1)
    master.mount(0, Mount(SEGMENT, 1, blocks * ALIGN, Address("", 0, "", b"")))
    found = 0
    for number, row in enumerate(trace.rows):
        keys: list[Key] = [block.to_bytes(32, "big") for block in row.blocks]
        lease = LeaseId(str(number))
        run = len(master.find(0, keys, lease))
        found += run
        parent = keys[run - 1] if run else None
        outcomes = master.put_start(0, SEGMENT, [(it, ALIGN) for it in keys[run:]], lease, parent)
        ends = [(it.id, 0) for it in outcomes if isinstance(it, Ticket)]
        master.put_end(0, ends, lease)
        master.release(lease)
        master.drain_events()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[1_000, 10_000, 30_000, 50_000, 100_000]
    )
    parser.add_argument("--trace", nargs="+", default=["conversation", "synthetic"])
    args = parser.parse_args()
    print(machine_line())
    for name in args.trace:
        trace = read_trace(TRACES / f"mooncake_{name}.jsonl")
        touches = sum(len(row.blocks) for row in trace.rows)
        print(f"\n{name}: {len(trace.rows):,} requests, {touches:,} block touches")
        print(f"{'':14}" + "".join(f"{blocks:>18,}" for blocks in args.blocks))
        for eviction in EVICTIONS:
            started, cells = time.process_time(), []
            for blocks in args.blocks:
                ours = store_hits(trace, blocks, eviction) / touches
                bare = hits(trace, blocks, eviction).block_hits / touches
                cells.append(f"{ours:>9.4f} ({bare:.4f})".rjust(18))
            took = time.process_time() - started
            print(f"{eviction:14}" + "".join(cells) + f"   {took:.0f} s")


if __name__ == "__main__":
    main()
