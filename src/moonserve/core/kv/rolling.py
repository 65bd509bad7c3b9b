"""One stream's KV events as blocks of core.kv.tiers: an engine's hashes become rolling ones.

Engines hash as they like: core.kv.stream follows what they tell, with keys from here, which hash a
block's tokens behind what its parent hashed to. A store whose hashes are the standard's own is
taken at its word. For live.external.indexer_api.

What never happens here: a block named by tokens alone that also depends on an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
from xxhash import xxh3_64_intdigest

from moonserve.core.kv.event_keys import covered
from moonserve.core.kv.events import ClearedEvent, EngineHash, KvBatch, StoredEvent
from moonserve.core.kv.facts import Tier
from moonserve.core.kv.keys import Namespace
from moonserve.core.kv.rolling_hash import local_hashes, rolling
from moonserve.core.kv.stream import EventStream, Keys, StreamStats
from moonserve.core.kv.tiers import TIERS, Key, Source, TieredIndex, keyed, mask, salted
from moonserve.core.units import Tokens

_U64 = (1 << 64) - 1


class Rolled:
    """See the module. Puts what a stream tells into `space`."""

    def __init__(self, stream: Source, space: TieredIndex, lora: str, salt: str) -> None:
        """lora, salt: of all its blocks, where they say none."""
        self._stream = stream
        self._space = space
        self._lora = lora
        self._salt = salt
        only_size = Namespace("", "", "", space.block_size)
        keys = cast(Keys, self._keys)  # any hashable will do
        self._events = EventStream(stream.id, 0, only_size, keys=keys)

    @property
    def stats(self) -> StreamStats:
        """What came of an engine's events; of a store's nothing is counted."""
        return self._events.stats

    @property
    def mismatch(self) -> Tokens | None:
        """The engine's block size where it is not the space's."""
        return self._events.mismatch

    def batch(self, batch: KvBatch) -> None:
        """Take one batch, in order."""
        if self._stream.shared:
            self._told_by_store(batch)
            return
        for fact in self._events.batch(batch):
            self._space.heard(self._stream, fact)

    def reset(self) -> None:
        """Nothing that it told counts any more."""
        self._events.reset()
        for tier in TIERS:
            self._space.cleared(self._stream, tier)

    def _keys(self, event: StoredEvent, at: int, parent: Key | None) -> list[Key]:
        """See kvstream.Keys."""
        size = event.block_size
        local = local_hashes(event.token_ids[at * size :], size, self._space.seed)
        lora, salt, extras = covered(event, parent is None)
        for number, extra in enumerate(extras[at : at + len(local)]):
            if extra:
                local[number] ^= xxh3_64_intdigest(msgspec.msgpack.encode(extra))
        if parent is None:
            cover, above = mask(lora or self._lora, salted(self._salt, salt)), None
        else:
            cover, above = parent if isinstance(parent, tuple) else (0, parent)
        return [keyed(cover, each) for each in rolling(local, self._space.seed, above)]

    def _told_by_store(self, batch: KvBatch) -> None:
        """By name alone: an object is a block, and its hash is the standard's."""
        cover = mask(self._lora, self._salt)
        for event in batch.events:
            if isinstance(event, ClearedEvent):
                self.reset()
                continue
            tier: Tier = "dram" if (event.medium or "CPU").upper() == "CPU" else "disk"
            keys = [keyed(cover, _number(name)) for name in event.block_hashes]
            if not isinstance(event, StoredEvent):
                self._space.removed(self._stream, keys, tier)
                continue
            before = event.parent_block_hash
            parent = None if before is None else keyed(cover, _number(before))
            self._space.stored(self._stream, keys, parent, tier)


def _number(name: EngineHash) -> int:
    """A rolling hash as it is written: a number, signed or not, or bytes that end with it."""
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name & _U64


def block_keys(cover: int, hashes: Sequence[int]) -> Sequence[Key]:
    """Of a chain of rolling hashes; `cover`: core.kv.tiers.mask."""
    return [keyed(cover, each) for each in hashes] if cover else hashes


def token_keys(cover: int, tokens: Sequence[int], size: Tokens, seed: int) -> Sequence[Key]:
    """Of the full blocks of a prompt. Raises OverflowError: a token id is no u32."""
    return block_keys(cover, rolling(local_hashes(tokens, size, seed), seed))
