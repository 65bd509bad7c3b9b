"""What becomes of engines' events in the Indexer API's index.

How blocks on tiers are counted: tests/law/test_indexer_law.py; what a stream of events says:
test_kvstream.py; the API itself: test_indexer_api.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest

from moonserve.core.kv.events import ClearedEvent, KvBatch, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.indexer import (
    BlockSource,
    RollingIndexer,
    TieredIndex,
    TierHits,
    mask,
    token_keys,
)
from moonserve.core.units import SegmentId
from moonserve.live.kvevents.wire import read_live
from tests.support.kvevents import fixture, messages

SIZE = 4
TOKENS = list(range(1, 25))


class Site:
    """A space and the streams in it."""

    def __init__(self) -> None:
        self.space = TieredIndex(SIZE, 0)
        self.streams: dict[str, RollingIndexer] = {}

    def add(
        self, instance: str, rank: int = 0, kind: str = "vLLM", lora: str = "", salt: str = ""
    ) -> RollingIndexer:
        """One more stream."""
        stream = BlockSource(SegmentId(f"{instance}/{rank}"), instance, rank, kind == "Mooncake")
        self.space.join(stream)
        made = self.streams[stream.id] = RollingIndexer(stream, self.space, lora, salt)
        return made

    def hits(
        self, tokens: Sequence[int] = TOKENS, lora: str = "", salt: str = ""
    ) -> dict[str, TierHits]:
        """What a prompt finds."""
        return self.space.hits(token_keys(mask(lora, salt), tokens, SIZE, 0))


def tell(stream: RollingIndexer, *events: KvEvent) -> None:
    """One batch."""
    stream.batch(KvBatch(0.0, events))


def stored(
    first: int,
    last: int,
    medium: str | None = "GPU",
    tokens: Sequence[int] = TOKENS,
    **more: object,
) -> StoredEvent:
    """Blocks first..last-1 of `tokens`; the engine calls block i 100 + i."""
    names = list(range(100 + first, 100 + last))
    parent = None if first == 0 else 99 + first
    fields = {"medium": medium, **more}
    return msgspec.structs.replace(
        StoredEvent(list(names), parent, list(tokens[first * SIZE : last * SIZE]), SIZE), **fields
    )


def removed(*blocks: int, medium: str | None = "GPU") -> RemovedEvent:
    """Of the same."""
    return RemovedEvent([100 + block for block in blocks], medium)


def test_the_standards_own_example() -> None:
    """Device of rank 0 has two blocks, of rank 1 one; host memory two, disk the first and third."""
    site = Site()
    rank0, rank1 = site.add("vllm-1"), site.add("vllm-1", 1)
    tell(rank0, stored(0, 2), stored(0, 2, "cpu"), stored(0, 1, "disk"), stored(2, 3, "disk"))
    tell(rank1, stored(0, 1))
    assert site.hits() == {"vllm-1": TierHits(12, 8, {"0": 8, "1": 4}, 8, 12)}
    wire = msgspec.json.decode(msgspec.json.encode(site.hits()["vllm-1"]))
    assert wire == {"longest_matched": 12, "GPU": 8, "DP": {"0": 8, "1": 4}, "CPU": 8, "DISK": 12}


def test_lora_and_salt_keep_blocks_apart() -> None:
    """The same tokens under another adapter or salt are other blocks, and so is what follows."""
    site = Site()
    one = site.add("a")
    tell(one, stored(0, 1, extra_keys=[["tenant-7"]]), stored(1, 2))
    tell(one, StoredEvent([7], None, TOKENS[:SIZE], SIZE, lora_name="l", extra_keys=[["l"]]))
    tell(one, StoredEvent([8], None, TOKENS[:SIZE], SIZE, lora_name="l", extra_keys=[["l", "s"]]))
    assert site.hits() == {}
    assert site.hits(salt="tenant-7")["a"].gpu == 2 * SIZE
    assert site.hits(lora="l")["a"].gpu == SIZE
    assert site.hits(lora="l", salt="s")["a"].gpu == SIZE
    assert site.hits(lora="s", salt="l") == {}
    owned = site.add("b", lora="own", salt="w8a8")
    tell(owned, stored(0, 1))
    assert site.hits(lora="own", salt="w8a8")["b"].gpu == SIZE


def test_a_block_with_an_image_is_not_found_by_its_tokens() -> None:
    """Nor what comes after it; what comes before is."""
    site = Site()
    tell(site.add("a"), stored(0, 3, extra_keys=[None, [["image-hash", 0]], None]))
    assert site.hits()["a"].gpu == SIZE
    assert site.space.entries == 3


def test_a_reset_drops_every_tier_of_one_source() -> None:
    """When batches were lost, or the engine restarted; the other rank keeps what it has."""
    site = Site()
    one, other = site.add("a"), site.add("a", 1)
    for source in (one, other):
        tell(source, stored(0, 2), stored(0, 3, "cpu"), stored(0, 4, "disk"))
    one.reset()
    device = {"0": 0, "1": 2 * SIZE}
    assert site.hits() == {"a": TierHits(4 * SIZE, 2 * SIZE, device, 3 * SIZE, 4 * SIZE)}
    tell(one, stored(0, 1))
    assert site.hits()["a"].dp == {"0": SIZE, "1": 2 * SIZE}


def test_clearing_an_engine_leaves_what_it_put_below() -> None:
    """vLLM clears its own cache; blocks that it put into host memory are still there."""
    site = Site()
    one = site.add("a")
    tell(one, stored(0, 3), stored(0, 2, "cpu"), ClearedEvent())
    assert site.hits()["a"] == TierHits(2 * SIZE, 0, {"0": 0}, 2 * SIZE, 2 * SIZE)
    tell(one, stored(2, 3))  # behind a parent that only host memory has
    assert site.hits()["a"].longest_matched == 2 * SIZE
    tell(one, stored(0, 2))
    assert site.hits()["a"].gpu == 3 * SIZE


@pytest.mark.parametrize(
    ("medium", "found"),
    [
        (None, TierHits(4, 4, {"0": 4}, 4, 4)),
        ("GPU", TierHits(4, 4, {"0": 4}, 4, 4)),
        ("npu", TierHits(4, 4, {"0": 4}, 4, 4)),
        ("cpu", TierHits(4, 0, {"0": 0}, 4, 4)),
        ("CPU_PINNED", TierHits(4, 0, {"0": 0}, 4, 4)),
        ("STORAGE", TierHits(4, 0, {"0": 0}, 0, 4)),
    ],
)
def test_media(medium: str | None, found: TierHits) -> None:
    """Accelerators are devices, CPU's memory is the host's, all else counts as disk."""
    site = Site()
    tell(site.add("a"), stored(0, 1, medium))
    assert site.hits() == {"a": found}


def test_a_real_engine() -> None:
    """vLLM's captured events: after each batch prompts are found by tokens, adapter and salt."""
    said = json.loads(fixture("kv_events_requests.json").read_text())
    tokens = {
        it["name"].split(":")[0]: it["prompt_token_ids"] + it["output_token_ids"]
        for it in said
        if it.get("prompt_token_ids")
    }
    prompts = {
        "A": (tokens["A + 60 -> extends"][:160], "", ""),
        "B": (tokens["B"], "", ""),
        "salted": (tokens["A"][:100], "", "tenant-7"),
        "lora": (tokens["A"][:100], "lora1", ""),
        "D": (tokens["D"][:64], "", ""),
    }
    after = [
        *({"A": 3}, {"A": 5}, {"A": 5, "B": 1}, {"A": 5, "B": 2}),
        {"A": 5, "B": 2, "salted": 3},
        {"A": 5, "B": 2, "salted": 3, "lora": 3},
        *[{"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2}] * 5,
        *[dict[str, int]()] * 4,  # evicted by others
        *[{"A": 3}] * 2,
    ]
    space, stream = TieredIndex(32, 5), BlockSource(SegmentId("e"), "e")
    space.join(stream)
    it = RollingIndexer(stream, space, "", "")
    for expected, frames in zip(after, messages("kv_events_capture.bin"), strict=True):
        it.batch(read_live(frames)[1])
        found = {
            name: hits["e"].longest_matched // 32
            for name, (ids, lora, salt) in prompts.items()
            if (hits := space.hits(token_keys(mask(lora, salt), ids, 32, 5)))
        }
        assert found == expected
