"""Frames of KV events: every version decodes, nonsense is one typed error."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.kv.events import ClearedEvent, RemovedEvent, StoredEvent
from moonserve.live.kvevents.wire import (
    BadFrame,
    decode_batch,
    encode_batch,
    read_live,
    read_replayed,
    replay_request,
)
from tests.support.kvevents import messages

pack = msgspec.msgpack.encode

# A batch of vLLM 0.32: a block of two tokens stored, one removed, all cleared.
MAP = bytes.fromhex(
    "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfb1"
    "94c1f0e4a3d5b0b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b"
    "5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69"
    "647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac42"
    "6c6f636b52656d6f766564ac626c6f636b5f68617368657391cfb194c1f0e4a3d5b0a66d656469756da3475055"
    "a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
HASH = 0xB194C1F0E4A3D5B0
EVENTS = [
    StoredEvent(
        [HASH], None, [1, 2], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    ),
    RemovedEvent([HASH], "GPU", 0),
    ClearedEvent(),
]


SALTED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1],
    "block_size": 1,
    "lora_id": None,
    "medium": "GPU",
    "cache_salt": "s",
}
"""SGLang's map form."""


def test_the_map_form_both_ways() -> None:
    """vLLM's map form is read, and written again byte for byte."""
    batch = decode_batch(MAP)
    assert (batch.ts, [*batch.events], batch.dp_rank) == (1.5, EVENTS, 0)
    assert encode_batch(1.5, EVENTS, 0) == MAP


@pytest.mark.parametrize(
    "name",
    ["capture", "mc_D", "mc_P", "mcstore", "nixl_D", "nixl_P"],
)
def test_captures_of_vllm_both_ways(name: str) -> None:
    """Every captured batch of vLLM 0.32 decodes, in sequence, and is written again as it was."""
    for number, frames in enumerate(messages(f"kv_events_{name}.bin")):
        seq, batch = read_live(frames)
        assert (seq, batch.unknown) == (number, 0)
        assert encode_batch(batch.ts, batch.events, batch.dp_rank or 0) == frames[2]


def test_another_engines_capture() -> None:
    """The same format with fewer fields, as another engine's mocker writes it."""
    ((seq, batch),) = [read_live(frames) for frames in messages("kv_events_dynmock.bin")]
    (event,) = batch.events
    assert isinstance(event, StoredEvent)
    assert (seq, len(event.block_hashes), event.medium, event.group_idx) == (0, 3, None, 0)


@pytest.mark.parametrize("topic", [True, False])
def test_a_replay_with_and_without_topic(topic: bool) -> None:
    """Both forms of a replay's answer are read, the end included."""
    answers = list(messages("kv_replay_vllm032.bin"))
    if not topic:  # as vLLM up to 0.24 writes it
        answers = [[frames[0], *frames[2:]] for frames in answers]
    *batches, end = map(read_replayed, answers)
    assert [it and it[0] for it in batches] == [14, 15, 16]
    assert end is None


@pytest.mark.parametrize(
    ("raw", "event"),
    [
        (["BlockStored", [1], None, [1, 2], 2, None], StoredEvent([1], None, [1, 2], 2)),
        (
            ["BlockStored", [b"h" * 32], 5, [1], 1, 3, "GPU", "lo"],
            StoredEvent([b"h" * 32], 5, [1], 1, 3, "GPU", "lo"),
        ),
        (
            [
                "BlockStored",
                [1],
                None,
                [1],
                1,
                None,
                "CPU",
                None,
                [["s"]],
                0,
                "x",
                1,
                *"abc",
                "new",
            ],
            StoredEvent([1], None, [1], 1, None, "CPU", None, [["s"]], 0, "x", 1, "a", "b", "c"),
        ),
        (["BlockRemoved", [1, b"2"]], RemovedEvent([1, b"2"])),
        (["BlockRemoved", [1], "GPU"], RemovedEvent([1], "GPU")),
        (["AllBlocksCleared"], ClearedEvent()),
        ({"type": "AllBlocksCleared", "future": {"x": [1]}}, ClearedEvent()),
        (
            ["BlockStored", [-5], -6, [1], 1, None, "CPU_PINNED", {"cache_salt": "s"}],
            StoredEvent([-5], -6, [1], 1, None, "CPU_PINNED"),
        ),
        (
            ["BlockStored", [1, -2], None, [1, 2], 1, None, "GPU", {"cache_salt": "s"}],
            StoredEvent([1, -2], None, [1, 2], 1, None, "GPU", None, [["s"]]),
        ),
        (
            ["BlockStored", [1], None, [1], 1, None, "GPU", ["kv"]],
            StoredEvent([1], None, [1], 1, None, "GPU"),
        ),
        (SALTED, StoredEvent([1], None, [1], 1, None, "GPU", None, [["s"]])),
        (
            SALTED | {"extra_keys": [["s"]]},
            StoredEvent([1], None, [1], 1, None, "GPU", None, [["s"]]),
        ),
        (
            {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "new": 1},
            RemovedEvent([2**64 - 1]),
        ),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_arrays_and_maps_of_every_age(raw: object, event: object, mixed: bool) -> None:
    """Missing last fields and unknown ones are no fault; unknown types are left out and counted."""
    others = [["BlockMoved", 1], {"type": "BlockMoved"}, {"no": "type"}, [["odd"]]] if mixed else []
    batch = decode_batch(pack([2.0, [raw, *others]]))
    (read,) = batch.events
    assert read == event or msgspec.structs.astuple(read) == msgspec.structs.astuple(event)
    assert isinstance(read, type(event))
    assert (batch.unknown, batch.dp_rank) == (len(others), None)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        MAP[:-1],
        pack({"ts": 1}),
        pack([1.0]),
        pack([1.0, [1]]),
        pack([1.0, ["BlockStored"]]),
        pack([1.0, [{"type": "BlockStored", "block_hashes": "x"}]]),
        pack([1.0, [{"type": "BlockRemoved"}, {"type": "BlockMoved"}]]),
        b"\x91" * 5_000,
        b"\x92\x01\x91\x81\x80\x01",
    ],
)
def test_nonsense_is_one_error(payload: bytes) -> None:
    """What is no batch raises BadFrame and nothing else."""
    with pytest.raises(BadFrame):
        decode_batch(payload)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_frames(frames: list[bytes]) -> None:
    """Arbitrary messages raise BadFrame, or are read with the number and the batch they carry."""
    for read in (read_live, read_replayed):
        with suppress(BadFrame):
            answer = read(frames)
            if answer is not None:
                number, batch = answer
                assert int.from_bytes(frames[-2], "big") == number
                assert batch == decode_batch(frames[-1])


@given(st.integers(0, len(MAP) - 1), st.integers(0, 255))
def test_any_damaged_batch(at: int, byte: int) -> None:
    """A batch with one wrong byte is a BadFrame, or is a batch that can be written and read."""
    damaged = MAP[:at] + bytes([byte]) + MAP[at + 1 :]
    with suppress(BadFrame):
        batch = decode_batch(damaged)
        written = encode_batch(batch.ts, batch.events, batch.dp_rank or 0)
        again = decode_batch(written)
        assert encode_batch(again.ts, again.events, again.dp_rank or 0) == written


def test_numbers_of_frames_and_bytes() -> None:
    """Three frames published, the number in eight bytes, big-endian."""
    assert read_live([b"topic", replay_request(258)[1], MAP])[0] == 258
    for frames in ([b"", MAP], [b"", b"\0" * 7, MAP], [b"", b"\0" * 8, MAP, b""]):
        with pytest.raises(BadFrame):
            read_live(frames)
    for frames in ([b"x", b"\0" * 8, MAP], [b"", b"\0" * 8], [b""] * 5):
        with pytest.raises(BadFrame):
            read_replayed(frames)
