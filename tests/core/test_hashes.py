"""XXH3-64 names of blocks."""

from __future__ import annotations

import struct

import pytest
import xxhash

from moonserve.core.kv.indexer import SEED, local_hashes, rolling


def test_golden_hashes() -> None:
    """The values that dynamo's compute_block_hash_for_seq gives for these tokens."""
    golden = [15310707395893867146, 15292316782987903195, 5532946206955930018]
    assert local_hashes(range(48), 16) == golden
    assert local_hashes(range(50), 16) == golden  # a partial block has no name


@pytest.mark.parametrize("seed", [0, SEED, 2**64 - 1])
def test_rolling_hashes_are_the_standards(seed: int) -> None:
    """The first is the local one; each further one covers the one before and its own local one."""
    local = local_hashes(range(64), 16, seed)
    first = xxhash.xxh3_64_intdigest(struct.pack("<16I", *range(16)), seed)
    second = xxhash.xxh3_64_intdigest(struct.pack("<QQ", first, local[1]), seed)
    assert local[0] == first
    rolled = rolling(local, seed)
    assert rolled[:2] == [first, second]
    assert rolling(local[2:], seed, parent=second) == rolled[2:]
    assert rolling([], seed) == []


def test_what_is_no_u32_has_no_hash() -> None:
    """Tokens out of range are an error, not another token's hash."""
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            local_hashes([token], 1)
