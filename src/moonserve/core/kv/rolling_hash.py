"""XXH3-64 names of KV blocks, as Mooncake's Conductor Indexer API and other indexers compute them.

    local[i] = XXH3(tokens of block i as u32 little-endian, seed)
    seq[0]   = local[0];  seq[i] = XXH3(seq[i-1] || local[i], seed), both as u64 little-endian

A local hash covers one block, a rolling one (seq) also all blocks before it. They name blocks in
core.kv.tiers only. Anybody can compute these 64 bits, so they never name bytes that are shared: the
store's keys are those of core.kv.keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from moonserve.core.kv.keys import token_bytes
from moonserve.core.units import Tokens

SEED = 1337
"""The default seed; dynamo's indexer has the same."""

_pair = Struct("<QQ").pack


def local_hashes(tokens: Sequence[int], block_size: Tokens, seed: int = SEED) -> list[int]:
    """The local hash of every full block, in order. OverflowError: a token id is no u32."""
    raw, width = token_bytes(tokens), 4 * block_size
    ends = range(width, len(raw) + 1, width)
    return [xxh3_64_intdigest(raw[end - width : end], seed) for end in ends]


def rolling(local: Iterable[int], seed: int = SEED, parent: int | None = None) -> list[int]:
    """The rolling hashes of blocks with these local hashes; `parent`: that of the block before."""
    hashes: list[int] = []
    for each in local:
        parent = each if parent is None else xxh3_64_intdigest(_pair(parent, each), seed)
        hashes.append(parent)
    return hashes
