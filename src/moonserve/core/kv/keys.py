"""Block keys: the names of KV blocks, equal where their bytes are exchangeable.

Key of block i = SHA-256(key of block i-1, the block's tokens as u32 little-endian). The chain's
root is a hash of the Namespace: everything that must be equal for KV bytes to be exchangeable.
Tails (a last, partial block) have keys of their own that no full block can collide with.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from moonserve.core.units import BlockKey, Tokens

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

    def salted(self, salt: str) -> bytes:
        """The root of the chains of requests with this cache salt; "": with none."""
        return msgspec.structs.replace(self, tenant_salt=salt).root() if salt else self.root()


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


class KeyChain:
    """The block keys of a sequence that grows; no block is hashed twice."""

    def __init__(self, root: bytes, block_size: Tokens) -> None:
        self._parent = root
        self._block_size = block_size
        self._keys: tuple[BlockKey, ...] = ()

    def of(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        """The keys of every full block of `tokens`, which begin with those of the last call."""
        fresh = tokens[len(self._keys) * self._block_size :]
        if len(fresh) >= self._block_size:
            self._keys += tuple(chain_keys(self._parent, fresh, self._block_size))
            self._parent = self._keys[-1]
        return self._keys


def tail_key(root: bytes, keys: Sequence[BlockKey], tail: Sequence[int]) -> BlockKey:
    """The key of a partial last block: `keys` are the full blocks before it."""
    parent = keys[-1] if keys else root
    return BlockKey(sha256(_TAIL + parent + token_bytes(tail)).digest())
