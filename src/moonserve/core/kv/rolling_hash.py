"""XXH3-64 names of KV blocks, as Mooncake's Conductor Indexer API and other indexers compute them.

    local[i] = XXH3(tokens of block i as u32 little-endian, seed)
    seq[0]   = local[0];  seq[i] = XXH3(seq[i-1] || local[i], seed), both as u64 little-endian

A local hash says what a block contains, a rolling one (seq) also all that came before it. They name
blocks in core.kv.tiers only: 64 bits that anybody can compute name nothing whose bytes are shared;
the store's keys are core.kv.keys's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from moonserve.core.kv.keys import token_bytes
from moonserve.core.units import Tokens

SEED = 1337
"""What is hashed with where nobody says another seed; dynamo's indexer has the same one."""

_pair = Struct("<QQ").pack


def local_hashes(tokens: Sequence[int], block_size: Tokens, seed: int = SEED) -> list[int]:
    """Of every full block, in order; a partial last one has none. OverflowError: not a u32."""
    raw, width = token_bytes(tokens), 4 * block_size
    ends = range(width, len(raw) + 1, width)
    return [xxh3_64_intdigest(raw[end - width : end], seed) for end in ends]


def rolling(local: Iterable[int], seed: int = SEED, parent: int | None = None) -> list[int]:
    """The rolling hashes of blocks with these local ones; `parent` is that of the block before."""
    hashes: list[int] = []
    for each in local:
        parent = each if parent is None else xxh3_64_intdigest(_pair(parent, each), seed)
        hashes.append(parent)
    return hashes
