"""vLLM's own names of KV blocks: to publish events with them, and to detect how an engine hashes.

A block's hash is SHA-256 over (hash of the block before, token ids, extra keys), written as
canonical CBOR or, by default, pickled; the chain's root is the hash of a seed, fixed since 0.30. An
event carries the last 8 bytes as a number, or all; the real connector of the Mooncake store puts
the whole into its keys. Used by core.kv.stream and by live.kvevents.publisher.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Literal, TypeAlias

Algorithm: TypeAlias = Literal["sha256", "sha256_cbor"]
Extra: TypeAlias = int | str | bytes | tuple["Extra", ...] | None
"""What a block's hash covers besides tokens, as vLLM hashes it; None: nothing.

("cache_salt", salt), ("lora", name, path) or ("mm", identifier, offset)."""

SEED = "vllm-none-hash"
"""Seed of the root, unless the engine sets PYTHONHASHSEED; random before vLLM 0.30."""
_ARRAY, _NULL = 0x80, b"\xf6"


def cbor(value: Extra) -> bytes:
    """A value as canonical CBOR."""
    if isinstance(value, tuple):
        return _head(_ARRAY, len(value)) + b"".join(map(cbor, value))
    if isinstance(value, bytes):
        return _head(0x40, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return _head(0x60, len(raw)) + raw
    if value is None:
        return _NULL
    return _head(0, value) if value >= 0 else _head(0x20, -1 - value)


def _head(kind: int, count: int) -> bytes:
    """An item's kind and count in the shortest form. Raises OverflowError over 64 bits."""
    if count < 24:
        return bytes([kind | count])
    for code, size in enumerate((1, 2, 4), start=24):
        if count < 1 << 8 * size:
            return bytes([kind | code]) + count.to_bytes(size, "big")
    return bytes([kind | 27]) + count.to_bytes(8, "big")


def _pickled(value: Extra) -> bytes:
    return pickle.dumps(value, protocol=5)


_WRITTEN: dict[Algorithm, Callable[[Extra], bytes]] = {"sha256_cbor": cbor, "sha256": _pickled}


def root_hash(algorithm: Algorithm, seed: str = SEED) -> bytes:
    """The hash that stands before a chain's first block."""
    return sha256(_WRITTEN[algorithm](seed)).digest()


def block_hash(
    algorithm: Algorithm, parent: bytes, tokens: Sequence[int], extra: Extra = None
) -> bytes:
    """The 32 bytes that name a block; `parent`: the hash of the block before, or the root's."""
    return sha256(_WRITTEN[algorithm]((parent, tuple(tokens), extra))).digest()


def event_hash(hash: bytes) -> int:
    """A hash as events carry it: its last 8 bytes, big-endian."""
    return int.from_bytes(hash[-8:], "big")


def algorithm_of(hash: int | bytes, tokens: Sequence[int], seed: str = SEED) -> Algorithm | None:
    """The algorithm of the hash of a chain's first block without extra keys; None: neither."""
    for algorithm in _WRITTEN:
        made = block_hash(algorithm, root_hash(algorithm, seed), tokens)
        if hash in (made, event_hash(made)):
            return algorithm
    return None
