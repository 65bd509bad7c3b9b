"""Stream: golden captures of real vLLM, and each rule about what counts."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from moonserve.core.kv.events import (
    ClearedEvent,
    KvBatch,
    KvEvent,
    RemovedEvent,
    StoredEvent,
    mixed,
)
from moonserve.core.kv.facts import BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.kv.stream import Bounds, KvEventStream
from moonserve.core.kv.vllm_hash import algorithm_of, block_hash, event_hash, root_hash
from moonserve.core.units import SegmentId
from moonserve.live.kvevents.wire import read_live
from tests.support.kvevents import feed, fixture, hashes_of, messages, stored

ME, POOL = SegmentId("p0"), SegmentId("mooncake")
SIZE = 32
PLAIN = Namespace("smol", "r", "l", SIZE)
A = list(range(4 * SIZE))


def keys_of(tokens: Sequence[int], **fields: str) -> list[bytes]:
    """What the Conductor asks the index with."""
    return [*chain_keys(replace(PLAIN, **fields).root(), tokens, SIZE)]


def stream(pool: SegmentId | None = None, **bounds: int) -> KvEventStream:
    """One of an engine with our block size."""
    return KvEventStream(ME, 7, PLAIN, pool, Bounds(**bounds))


def batch(*events: KvEvent) -> KvBatch:
    """The batch of one step."""
    return KvBatch(1.0, events)


class Indexed:
    """A stream and the index that it feeds."""

    def __init__(self, it: KvEventStream | None = None) -> None:
        self.stream = stream() if it is None else it
        self.index = PrefixIndex()

    def tell(self, *events: KvEvent) -> None:
        feed(self.index, self.stream.facts(batch(*events)))

    def has(self, keys: Sequence[bytes], holder: SegmentId = ME) -> int:
        """Leading blocks that a holder has."""
        return self.index.match(keys).by_holder.get(holder, 0)


# Captures


def chains_of_capture() -> dict[str, list[bytes]]:
    """The chains that the captured requests make, by the letters of their names."""
    said: list[dict[str, Any]] = json.loads(fixture("kv_events_requests.json").read_text())
    tokens = {}
    for it in said:
        if it.get("prompt_token_ids"):
            name = it["name"].replace("evict filler ", "F").replace("short", "s")
            tokens[name.split(":")[0]] = it["prompt_token_ids"] + it["output_token_ids"]
    return {
        "A": keys_of(tokens["A + 60 -> extends"][:160]),
        "B": keys_of(tokens["B"]),
        "salted": keys_of(tokens["A"][:100], tenant_salt="tenant-7"),
        "lora": keys_of(tokens["A"][:100], lora="lora1"),
        "D": keys_of(tokens["D"][:64]),
        "E": keys_of(tokens["E concurrent dup 1"][:96]),
        **{f"F{i}": keys_of(tokens[f"F{i}"][:600]) for i in range(5)},
    }


AFTER_BATCH: list[dict[str, int]] = [
    {"A": 3},
    {"A": 5},  # the repeated request told nothing
    {"A": 5, "B": 1},
    {"A": 5, "B": 2},  # filled by decode
    {"A": 5, "B": 2, "salted": 3},
    {"A": 5, "B": 2, "salted": 3, "lora": 3},
    {"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2},
    {"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2},  # D's second block a second time
    {"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2, "E": 3},
    {"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2, "E": 3},  # E's third a second time
    {"A": 5, "B": 2, "salted": 3, "lora": 3, "D": 2, "E": 3, "F0": 18},
    {"E": 2, "F0": 18, "F1": 18},  # D's second and E's third block went twice
    {"F0": 2, "F1": 18, "F2": 18},
    {"F1": 2, "F2": 18, "F3": 18},
    {"F2": 2, "F3": 18, "F4": 18},
    {"A": 3, "F3": 17, "F4": 18},
    {"A": 3},  # cleared, and A anew
]
"""Written by hand from the dump: leading blocks per chain, and nothing else."""


def test_the_index_after_each_captured_batch() -> None:
    """After each batch of a real engine the index holds what its events say, block by block."""
    chains = chains_of_capture()
    it = Indexed()
    for expected, frames in zip(AFTER_BATCH, messages("kv_events_capture.bin"), strict=True):
        _, told = read_live(frames)
        it.tell(*told.events)
        assert {n: it.has(keys) for n, keys in chains.items() if it.has(keys)} == expected
        assert it.index.entries == it.stream.blocks == sum(expected.values())
        assert it.index.tiers(chains["A"][0], ME) in ((), ("device",))
    counts = it.stream.stats
    assert (counts.unknown_removed, counts.orphans, counts.unplaced, counts.mismatches) == (0,) * 4
    assert counts.cleared == 1
    assert it.stream.algorithm == "sha256_cbor"
    assert it.stream.mismatch is None


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("kv_events_capture.bin", "sha256_cbor"),
        ("kv_events_mc_D.bin", "sha256"),
        ("kv_events_mc_P.bin", "sha256"),
        ("kv_events_mcstore.bin", "sha256"),
        ("kv_events_nixl_D.bin", "sha256"),
        ("kv_events_nixl_P.bin", "sha256"),
    ],
)
def test_recomputed_hashes_are_those_of_the_engine(name: str, algorithm: Any) -> None:
    """vLLM's hash of every captured block comes out again, salts included; a LoRA's covers a path
    that events do not have."""
    digests, checked = {}, 0
    for frames in messages(name):
        for event in read_live(frames)[1].events:
            if not isinstance(event, StoredEvent) or event.lora_name is not None:
                continue
            parent = root_hash(algorithm)
            if event.parent_block_hash is not None:
                parent = digests[event.parent_block_hash]
            for at, hash in enumerate(event.block_hashes):
                extra = (event.extra_keys or [None] * len(event.block_hashes))[at]
                salt = (("cache_salt", extra[0]),) if extra else None
                if event.medium == "cpu" and hash in digests:
                    continue  # tells no salt
                tokens = event.token_ids[at * SIZE : (at + 1) * SIZE]
                parent = digests[hash] = block_hash(algorithm, parent, tokens, salt)
                assert event_hash(parent) == hash
                checked += 1
    assert checked > 4


def test_an_algorithm_is_known_by_either_form_of_a_hash() -> None:
    """Whole, and its last eight bytes; another hash is nobody's."""
    whole = block_hash("sha256_cbor", root_hash("sha256_cbor"), A[:SIZE])
    assert algorithm_of(whole, A[:SIZE]) == algorithm_of(event_hash(whole), A[:SIZE])
    assert algorithm_of(event_hash(whole) ^ 1, A[:SIZE]) is None


def test_store_events_belong_to_the_pool() -> None:
    """Events of the Mooncake store's connector are the pool's, under the salt that the same hash
    had on the device, and outlives the device's eviction."""
    it = Indexed(stream(POOL))
    for frames in messages("kv_events_mcstore.bin"):
        it.tell(*read_live(frames)[1].events)
    counts = it.stream.stats
    assert (counts.unplaced, counts.orphans, counts.unknown_removed) == (0, 0, 0)
    events = [e for f in messages("kv_events_mcstore.bin") for e in read_live(f)[1].events]
    first, salted = events[0], events[4]
    assert isinstance(first, StoredEvent)
    assert isinstance(salted, StoredEvent)
    assert salted.extra_keys == [["t1"], None, None]
    for keys in (keys_of(first.token_ids), keys_of(salted.token_ids, tenant_salt="t1")):
        assert it.has(keys, POOL) == 3
        assert it.index.tiers(keys[0], POOL) == ("dram",)
    assert it.has(keys_of(salted.token_ids, tenant_salt="t1")) == 0, "evicted from the device"


def test_reuse_reports_are_no_copies() -> None:
    """An engine asked for full reports repeats what a request reused: that is no second copy."""
    it = Indexed()
    for frames in messages("kv_events_nixl_P.bin"):
        it.tell(*read_live(frames)[1].events)
    assert it.stream.stats.reports == 2


# Rules


def test_a_block_stored_twice_goes_with_its_second_removal() -> None:
    """The index gets the first store and the last removal: engines store a hash twice at times."""
    it = stream()
    first = stored(A, SIZE)
    assert len(it.facts(batch(first))) == 1
    assert it.facts(batch(first)) == []
    gone = RemovedEvent(first.block_hashes, "GPU", 0)
    assert it.facts(batch(gone)) == []
    assert it.facts(batch(gone)) == [BlocksRemoved(ME, (*keys_of(A),), "device", 7)]
    assert it.facts(batch(gone)) == []
    assert it.stats.unknown_removed == 4


def test_tiers_are_counted_apart() -> None:
    """A block on the device, in memory and on disk is held until all three let it go."""
    it = Indexed()
    for medium in ("GPU", "CPU", "STORAGE"):
        it.tell(stored(A, SIZE, medium=medium))
    first = keys_of(A)[0]
    assert it.index.tiers(first, ME) == ("device", "dram", "disk")
    it.tell(ClearedEvent())
    assert it.index.tiers(first, ME) == ("dram", "disk")
    names = stored(A, SIZE).block_hashes
    it.tell(RemovedEvent(names, "CPU"), RemovedEvent(names, "STORAGE"))
    assert it.index.entries == it.stream.blocks == 0


def test_events_without_tokens_are_placed_by_their_hash() -> None:
    """Events with hashes only are placed if the device has reported the tokens."""
    it = Indexed()
    it.tell(stored(A, SIZE))
    names = stored(A, SIZE).block_hashes
    it.tell(StoredEvent([*names[1:3], 5], None, [], 0, None, "CPU"))
    assert it.index.tiers(keys_of(A)[2], ME) == ("device", "dram")
    assert it.stream.stats.unplaced == 1


def test_a_child_waits_for_its_parent() -> None:
    """Events of unknown parents count once the parent is known, but for removed blocks."""
    it = Indexed()
    names = hashes_of(A, SIZE)
    it.tell(stored(A, SIZE, 3), stored(A[: 3 * SIZE], SIZE, 1))
    assert it.index.entries == 0
    assert it.stream.stats.orphans == 3
    it.tell(RemovedEvent([names[3]], "GPU", 0))
    it.tell(stored(A[:SIZE], SIZE))
    assert it.has(keys_of(A)) == 3
    assert it.stream.stats.orphans_dropped == 0


def test_orphans_are_bounded() -> None:
    """The oldest of too many orphans are given up, and counted."""
    it = stream(orphans=2)
    chains = [[*range(n, n + 2 * SIZE)] for n in (0, 100, 200)]
    for chain in chains:
        it.facts(batch(stored(chain, SIZE, 1)))
    assert it.stats.orphans_dropped == 1
    heads = [it.facts(batch(stored(chain[:SIZE], SIZE))) for chain in chains]
    told = [sum(len(f.keys) for f in facts if isinstance(f, BlocksStored)) for facts in heads]
    assert told == [1, 2, 2]


def test_a_parent_may_be_gone_when_its_child_comes() -> None:
    """A block that was evicted a moment ago still places what follows it."""
    it = Indexed()
    it.tell(stored(A[: 2 * SIZE], SIZE), RemovedEvent(stored(A, SIZE).block_hashes[:2], "GPU", 0))
    it.tell(stored(A, SIZE, 2))
    assert it.index.entries == 2
    it.tell(stored(A[: 2 * SIZE], SIZE))
    assert it.has(keys_of(A)) == 4


def test_a_chain_stored_anew_around_a_block_that_stayed() -> None:
    """A hole in a chain is filled by a second copy of what comes after it, counted as such."""
    it = Indexed(stream(retired=0))
    names = stored(A, SIZE).block_hashes
    it.tell(stored(A, SIZE), RemovedEvent(names[:1], "GPU", 0), stored(A, SIZE))
    assert (it.has(keys_of(A)), it.stream.blocks) == (4, 4)
    it.tell(RemovedEvent(names, "GPU", 0))
    assert it.index.tiers(keys_of(A)[1], ME) == ("device",)
    it.tell(RemovedEvent(names[1:], "GPU", 0))
    assert it.index.entries == it.stream.blocks == it.stream.stats.unknown_removed == 0


def test_orphans_go_with_their_tier() -> None:
    """Clearing the device takes what waits for a parent there; what is adopted waits no more."""
    it = Indexed()
    it.tell(stored(A, SIZE, 1), ClearedEvent(), stored(A[:SIZE], SIZE))
    assert it.index.entries == 1
    it.tell(RemovedEvent(stored(A, SIZE).block_hashes, "GPU", 0))
    assert it.stream.stats.unknown_removed == 3
    it.tell(stored(A, SIZE, 2), stored(A, SIZE, 1), stored(A, SIZE))
    it.tell(*[RemovedEvent(stored(A, SIZE).block_hashes, "GPU", 0)] * 3)
    assert it.index.entries == it.stream.blocks == 0
    assert it.stream.stats.unknown_removed == 3 + 3


def test_clearing_empties_the_device_only() -> None:
    """AllBlocksCleared is one fact; the store keeps what it has, and what was removed before may
    still be a parent."""
    it = Indexed(stream(POOL))
    it.tell(stored(A, SIZE), stored(A, SIZE, medium="cpu"))
    assert it.stream.facts(batch(ClearedEvent())) == [BlocksCleared(ME, "device", 7)]
    assert it.has(keys_of(A), POOL) == 4
    assert it.stream.blocks == 0


def test_a_reset_forgets_all_but_the_pool() -> None:
    """After lost batches no earlier block counts, on any tier; the same hash is new again."""
    it = Indexed(stream(POOL))
    it.tell(stored(A, SIZE), stored(A, SIZE, medium="CPU"), stored(A, SIZE, medium="cpu"))
    feed(it.index, it.stream.cleared())
    assert (it.has(keys_of(A)), it.has(keys_of(A), POOL)) == (0, 4)
    it.tell(stored(A, SIZE, 1))
    assert it.has(keys_of(A)) == 0, "its parent was never told to this stream"
    it.tell(stored(A[:SIZE], SIZE))
    assert it.has(keys_of(A)) == 4


def test_another_block_size_is_said_and_not_indexed() -> None:
    """Blocks of another size than the namespace's are not indexed; `mismatch` has the size."""
    it = stream()
    assert it.facts(batch(stored(A, 16))) == []
    assert (it.mismatch, it.stats.mismatches) == (16, 8)


def test_blocks_filled_in_part_are_left_out() -> None:
    """A smaller block of an engine with our size is no mismatch of the engine."""
    it = stream()
    it.facts(batch(stored(A, SIZE), StoredEvent([9], None, [1] * 8, 8, None, "GPU")))
    assert (it.mismatch, it.stats.mismatches) == (None, 1)


def test_one_cache_of_a_hybrid_model_counts() -> None:
    """Of several caches the first that holds whole prefixes counts; its removals alone too."""
    it = Indexed()
    window = replace(stored(A, SIZE), group_idx=0, kv_cache_spec_kind="sliding_window")
    full = replace(stored(A, SIZE), group_idx=1, kv_cache_spec_kind="full_attention")
    again = replace(full, group_idx=2)
    it.tell(window, full, again)
    names = full.block_hashes
    it.tell(RemovedEvent(names, "GPU", 0), RemovedEvent(names, "GPU", 2))
    assert it.has(keys_of(A)) == 4
    it.tell(RemovedEvent(names, "GPU", 1))
    assert it.has(keys_of(A)) == 0
    assert it.stream.stats.other_groups == 16


def test_images_change_the_keys_from_their_block_on() -> None:
    """Text before an image is shared; what follows is another chain for another image."""
    it = Indexed()
    event = replace(stored(A, SIZE), extra_keys=[None, [["img", 3]], None, None])
    it.tell(event)
    plain = keys_of(A)
    assert it.has(plain) == 1
    key = mixed(plain[0], [["img", 3]])
    assert it.has([plain[0], *chain_keys(key, A[SIZE:], SIZE)]) == 4


def test_salt_and_lora_are_fields_of_the_namespace() -> None:
    """A salted block of a LoRA is found by requests of that tenant with that LoRA only."""
    it = Indexed()
    extras: list[list[Any] | None] = [["lo", "salty"], ["lo"], ["lo"], ["lo"]]
    it.tell(replace(stored(A, SIZE), lora_name="lo", lora_id=1, extra_keys=extras))
    assert it.has(keys_of(A, lora="lo", tenant_salt="salty")) == 4
    for fields in ({}, {"lora": "lo"}, {"tenant_salt": "salty"}):
        assert it.has(keys_of(A, **fields)) == 0


def test_pool_events_of_unknown_salt_are_left_out() -> None:
    """A store's event names no salt: unless its hash comes out without one, it is not believed."""
    it = Indexed(stream(POOL))
    it.tell(replace(stored(A, SIZE, medium="cpu"), block_hashes=[1, 2, 3, 4]))
    assert it.has(keys_of(A), POOL) == 0
    assert it.stream.stats.unplaced == 4
    it.tell(stored(A, SIZE, medium="cpu"))
    assert it.has(keys_of(A), POOL) == 4


def test_whole_hashes_do_as_well_as_numbers() -> None:
    """Engines that send hashes as bytes are followed in the same way."""
    it = Indexed()
    event = stored(A, SIZE)
    names = [hash.to_bytes(32, "big") for hash in event.block_hashes if isinstance(hash, int)]
    it.tell(replace(event, block_hashes=[*names]), RemovedEvent([*names[2:]], None))
    assert it.has(keys_of(A)) == 2


@pytest.mark.parametrize(
    "event",
    [
        StoredEvent([1], None, [1 << 32] * SIZE, SIZE),
        StoredEvent([1], None, [-1] * SIZE, SIZE),
        StoredEvent([1, 2], None, [1] * SIZE, SIZE),
        StoredEvent([1], None, [1] * SIZE, SIZE, None, "a medium of its own"),
        StoredEvent([], None, [], SIZE),
        StoredEvent([1, 1], 1, [1] * 2 * SIZE, SIZE),
    ],
)
def test_nonsense_is_counted_and_not_indexed(event: StoredEvent) -> None:
    """What an engine should never say makes no claim and no fault."""
    it = Indexed()
    it.tell(event)
    assert it.index.entries == 0


def test_blocks_are_bounded() -> None:
    """An engine that never removes is believed up to a bound."""
    it = Indexed(stream(blocks=3))
    it.tell(stored(A, SIZE))
    assert it.has(keys_of(A)) == it.stream.blocks == 3
    assert it.stream.stats.refused == 1
