"""KV events: from frames to the index, beside msgspec alone reading the same frames.

    python bench/kvevents.py [--quick]

One process, one thread; the frames are an engine's in steady state: each batch stores the 18 blocks
of a prompt of 600 tokens, that shares its first 6 with others, and removes as many. `index` is the
Conductor's index, `tiered` that of the Indexer API; `array` is the form of vLLM up to 0.20 and of
SGLang. Ratios are medians over rounds, of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # also when imported as bench.kvevents

from common import machine_line
from moonserve.core.kv.events import ClearedEvent, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.indexer import BlockSource, RollingIndexer, TieredIndex
from moonserve.core.kv.keys import Namespace
from moonserve.core.kv.stream import KvEventStream
from moonserve.core.units import SegmentId
from moonserve.live.kvevents.wire import decode_batch, encode_batch

SIZE, BLOCKS, SHARED, HELD = 32, 18, 6, 200


class _Bare(msgspec.Struct, array_like=True):
    """What msgspec alone makes of a batch."""

    ts: float
    events: list[StoredEvent | RemovedEvent | ClearedEvent]
    dp_rank: int | None = None


def workload(count: int, rng: Random) -> list[list[KvEvent]]:
    """Events of so many batches, after HELD more that fill the engine's cache."""
    heads = [
        ([rng.getrandbits(64) for _ in range(SHARED)], [rng.randrange(50_000) for _ in range(192)])
        for _ in range(8)
    ]
    batches: list[list[KvEvent]] = [
        [StoredEvent(hashes, None, tokens, SIZE, None, "GPU", None, [None] * SHARED, 0)]
        for hashes, tokens in heads
    ]
    live: list[list[int]] = []
    for number in range(count + HELD):
        own = [rng.getrandbits(64) for _ in range(BLOCKS - SHARED)]
        tokens = [rng.randrange(50_000) for _ in range(len(own) * SIZE)]
        parent = heads[number % len(heads)][0][-1]
        events: list[KvEvent] = []
        if len(live) >= HELD:
            events += [RemovedEvent([hash], "GPU", 0) for hash in reversed(live.pop(0))]
        kind = "full_attention"
        none: list[list[Any] | None] = [None] * len(own)
        events.append(StoredEvent([*own], parent, tokens, SIZE, None, "GPU", None, none, 0, kind))
        live.append(own)
        batches.append(events)
    return batches


def as_arrays(payload: bytes) -> bytes:
    """The same batch in the form of old versions."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    names = {
        "BlockStored": StoredEvent.__struct_fields__[:7],
        "BlockRemoved": ("block_hashes", "medium"),
    }
    rows = [[it["type"], *(it.get(name) for name in names[it["type"]])] for it in events]
    return msgspec.msgpack.encode([ts, rows, rank])


Doing = Callable[[bytes], object]


def ways() -> dict[str, Doing]:
    """What is done with a frame, each with state of its own."""

    def to_stream(payload: bytes) -> None:
        alone.facts(decode_batch(payload))

    def to_index(payload: bytes) -> None:
        for fact in stream.facts(decode_batch(payload)):
            if isinstance(fact, BlocksStored):
                index.stored(fact.segment, fact.keys, fact.parent, fact.tier, fact.epoch)
            elif isinstance(fact, BlocksRemoved):
                index.removed(fact.segment, fact.keys, fact.tier, fact.epoch)

    def to_tiered_index(payload: bytes) -> None:
        rolling.batch(decode_batch(payload))

    space, index = Namespace("m", "r", "l", SIZE), PrefixIndex()
    source, tiered = BlockSource(SegmentId("p0"), "p0"), TieredIndex(SIZE, 1337)
    tiered.join(source)
    rolling = RollingIndexer(source, tiered, "", "")
    alone, stream = (KvEventStream(SegmentId("p0"), 1, space) for _ in range(2))
    return {
        "decode": decode_batch,
        "stream": to_stream,
        "index": to_index,
        "tiered": to_tiered_index,
    }


def seconds(do: Doing, frames: Sequence[bytes]) -> float:
    """CPU time for all."""
    begun = time.process_time()
    for payload in frames:
        do(payload)
    return time.process_time() - begun


def rounds(
    maps: Sequence[bytes], frames: Sequence[bytes], warm: int, count: int
) -> dict[str, list[float]]:
    """Seconds per round of msgspec alone on `maps`, and of each way on `frames`; the first `warm`
    are not timed."""
    bare: Doing = msgspec.msgpack.Decoder(_Bare).decode
    spent: dict[str, list[float]] = {"msgspec": []}
    for _ in range(count):
        spent["msgspec"].append(seconds(bare, maps[warm:]))
        for name, do in ways().items():
            seconds(do, frames[:warm])
            spent.setdefault(name, []).append(seconds(do, frames[warm:]))
    return spent


def main() -> None:
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    args.add_argument("--quick", action="store_true", help="a tenth of the batches")
    quick = args.parse_args().quick
    batches = workload(200 if quick else 2_000, Random(1))
    maps = [encode_batch(float(n), it, 0) for n, it in enumerate(batches)]
    warm = 8 + HELD
    rest = [event for it in batches[warm:] for event in it]
    blocks = sum(len(it.block_hashes) for it in rest if not isinstance(it, ClearedEvent))
    print(machine_line())
    print(f"{len(batches) - warm} batches, {len(rest)} events, {blocks} blocks told")
    for form, frames in (("map", maps), ("array", [as_arrays(it) for it in maps])):
        spent = rounds(maps, frames, warm, 3 if quick else 7)
        for name, each in spent.items():
            s = median(each)
            ratio = median(a / b for a, b in zip(each, spent["msgspec"], strict=True))
            print(
                f"{form:6}{name:8}{len(rest) / s:10,.0f} events/s {blocks / s:10,.0f} blocks/s"
                f" {1e6 * s / len(frames[warm:]):7.1f} us/batch {ratio:5.1f} x msgspec on maps"
            )


if __name__ == "__main__":
    main()
