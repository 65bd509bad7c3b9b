"""Captured KV events, an index fed by a stream, and an engine that publishes as vLLM does."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from moonserve.core.kv.events import EngineHash, StoredEvent
from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.vllm_hash import block_hash, event_hash, root_hash

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
"""What a real vLLM 0.32 sent; see tests/fixtures/README.md."""
_MAGIC = b"KVEV1\n"


def fixture(name: str) -> Path:
    """A file captured from a real engine."""
    return FOLDER / name


def messages(name: str) -> Iterator[list[bytes]]:
    """The frames of each message of a capture."""
    rest = fixture(name).read_bytes()
    assert rest.startswith(_MAGIC)
    rest = rest[len(_MAGIC) :]
    while rest:
        record, rest = _taken(rest)
        record = record[8:]  # when it was received
        count, record = record[0], record[1:]
        frames = []
        for _ in range(count):
            frame, record = _taken(record)
            frames.append(frame)
        yield frames


def _taken(raw: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack(">I", raw[:4])
    return raw[4 : 4 + size], raw[4 + size :]


def feed(index: PrefixIndex, facts: Sequence[BlockEvent]) -> None:
    """Give a stream's facts to an index."""
    for fact in facts:
        if isinstance(fact, BlocksStored):
            index.stored(fact.segment, fact.keys, fact.parent, fact.tier, fact.epoch)
        elif isinstance(fact, BlocksRemoved):
            index.removed(fact.segment, fact.keys, fact.tier, fact.epoch)
        else:
            index.cleared(fact.segment, fact.tier, fact.epoch)


def hashes_of(tokens: Sequence[int], size: int) -> list[int]:
    """The hashes of a plain chain's full blocks, as vLLM 0.32 with sha256_cbor sends them."""
    made, parent = [], root_hash("sha256_cbor")
    for at in range(0, len(tokens) // size * size, size):
        parent = block_hash("sha256_cbor", parent, tokens[at : at + size])
        made.append(event_hash(parent))
    return made


def stored(tokens: Sequence[int], size: int, start: int = 0, medium: str = "GPU") -> StoredEvent:
    """The full blocks of a plain chain from number `start` on, as one event."""
    names: list[EngineHash] = [*hashes_of(tokens, size)]
    before = names[start - 1] if start else None
    run = list(tokens[start * size : len(names) * size])
    return StoredEvent(names[start:], before, run, size, None, medium, None, group_idx=0)
