"""Block keys, and the index of who holds which prefix.

Key of block i = SHA-256(key of block i-1, the block's tokens as u32 little-endian). The chain's
root is a hash of the Namespace: everything that must be equal for KV bytes to be exchangeable.
Tails (a last, partial block) have keys of their own that no full block can collide with.

The index is fed by the store's events and read by placement; it never asks the store.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from moonserve.core.units import BlockKey, SegmentId, Tokens

_VERSION = b"moonserve-kv-1"
_TAIL = b"tail"


class Namespace(msgspec.Struct, frozen=True):
    """What must agree for two workers to share KV bytes.

    model: served name; revision: hash of the weights; layout: dtype and block memory order, such
    as "float32/blk,layer,kv,tok,head,dim/L30/H3/D64"; block_size: tokens; lora, tenant_salt,
    multimodal: "" where unused.
    """

    model: str
    revision: str
    layout: str
    block_size: Tokens
    lora: str = ""
    tenant_salt: str = ""
    multimodal: str = ""

    def root(self) -> bytes:
        """The chain's root: a digest over all fields, each length-prefixed by msgpack."""
        return sha256(_VERSION + msgspec.msgpack.encode(msgspec.structs.astuple(self))).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian, 4 bytes each. Raises OverflowError on an id out of range."""
    words = array("I", tokens)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        words.byteswap()
    return words.tobytes()


def chain_keys(root: bytes, tokens: Sequence[int], block_size: Tokens) -> list[BlockKey]:
    """The keys of every full block of `tokens`, in order; a partial last block has none."""
    raw = token_bytes(tokens)
    width = 4 * block_size
    parent = root
    keys: list[BlockKey] = []
    for at in range(0, len(tokens) // block_size * width, width):
        parent = sha256(parent + raw[at : at + width]).digest()
        keys.append(BlockKey(parent))
    return keys


def tail_key(root: bytes, keys: Sequence[BlockKey], tail: Sequence[int]) -> BlockKey:
    """The key of a partial last block: `keys` are the full blocks before it."""
    parent = keys[-1] if keys else root
    return BlockKey(sha256(_TAIL + parent + token_bytes(tail)).digest())


class Match(msgspec.Struct, frozen=True):
    """How much of one chain is held where, in leading contiguous blocks."""

    pool: int
    """The run that readers can load block by block, whoever holds each."""
    by_holder: dict[SegmentId, int]
    """The run each holder has on its own; holders of nothing are absent."""


class PrefixIndex:
    """Which segment holds which block, as a bitmask of holders per key.

    Exact for what it was told: `stored` and `removed` may come in any order for different
    (key, holder) pairs and are idempotent. Memory is bounded by what the segments hold.
    """

    def __init__(self) -> None:
        self._masks: dict[BlockKey, int] = {}
        self._bits: dict[SegmentId, int] = {}
        self._counts: dict[SegmentId, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._masks)

    def stored(self, key: BlockKey, holder: SegmentId) -> None:
        """`holder` now has `key`, complete and readable."""
        bit = self._bits.get(holder)
        if bit is None:
            bit = self._free.pop() if self._free else len(self._bits)
            self._bits[holder] = bit
            self._counts[holder] = 0
        mask = self._masks.get(key, 0)
        if not mask >> bit & 1:
            self._masks[key] = mask | 1 << bit
            self._counts[holder] += 1

    def removed(self, key: BlockKey, holder: SegmentId) -> None:
        """`holder` no longer has `key`."""
        bit = self._bits.get(holder)
        mask = self._masks.get(key)
        if bit is None or mask is None or not mask >> bit & 1:
            return
        mask &= ~(1 << bit)
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]
        self._counts[holder] -= 1
        if not self._counts[holder]:  # its bit may name another holder from now on
            del self._counts[holder]
            self._free.append(self._bits.pop(holder))

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """The longest leading run of `keys` in the pool and in each holder. O(blocks held)."""
        live = -1
        ended: list[tuple[int, int]] = []
        pool = 0
        for key in keys:
            mask = self._masks.get(key, 0)
            if not mask:
                break
            if live & mask != live:
                ended.append((live & ~mask, pool))
                live &= mask
            pool += 1
        ended.append((live, pool))
        runs: dict[SegmentId, int] = {}
        for holder, bit in self._bits.items():
            for mask, length in ended:
                if mask >> bit & 1:
                    if length:
                        runs[holder] = length
                    break
        return Match(pool, runs)
