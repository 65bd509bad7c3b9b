"""RollingIndexer: one stream of KV events as blocks of a TieredIndex, named by rolling hashes.

Engines hash as they like: core.kv.stream follows their events with keys from here, which hash a
block's tokens behind the key of its parent. The events of a store that many instances read name
blocks by the standard's own hashes, and these are taken as they are. Called by
live.external.indexer_api.

What never happens here: a block that also depends on an image, named by its tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from moonserve.core.kv.event_keys import covered
from moonserve.core.kv.events import ClearedEvent, EngineHash, KvBatch, StoredEvent
from moonserve.core.kv.facts import Tier
from moonserve.core.kv.rolling_hash import local_hashes, rolling
from moonserve.core.kv.stream import BlockChange, BlockStream, StreamStats
from moonserve.core.kv.tiers import TIERS, BlockSource, Key, TieredIndex, keyed, mask, salted
from moonserve.core.units import Tokens

_U64 = (1 << 64) - 1


class RollingIndexer:
    """See the module. Puts the blocks of one source into `space`."""

    def __init__(self, source: BlockSource, space: TieredIndex, lora: str, salt: str) -> None:
        """`lora`, `salt`: of all blocks whose events name none."""
        self._source = source
        self._space = space
        self._lora = lora
        self._salt = salt
        self._stream = BlockStream[Key](space.block_size, self._keys)

    @property
    def stats(self) -> StreamStats:
        """Counts of an engine's events. The events of a store are not counted."""
        return self._stream.stats

    @property
    def mismatch(self) -> Tokens | None:
        """The engine's block size if it is not the space's, else None."""
        return self._stream.mismatch

    def batch(self, batch: KvBatch) -> None:
        """Take the next batch."""
        if self._source.shared:
            self._take_from_store(batch)
            return
        for change in self._stream.changes(batch):
            self._apply(change)

    def reset(self, restarted: bool = False) -> None:
        """Remove all blocks of the source, whether its engine restarted or batches were lost."""
        self._stream.forget()
        for tier in TIERS:
            self._space.cleared(self._source, tier)

    def _apply(self, change: BlockChange[Key]) -> None:
        assert change.place != "pool", "the stream is not pooled"
        match change.what:
            case "stored":
                self._space.stored(self._source, change.keys, change.parent, change.place)
            case "removed":
                self._space.removed(self._source, change.keys, change.place)
            case "cleared":
                self._space.cleared(self._source, change.place)

    def _keys(self, event: StoredEvent, at: int, parent: Key | None) -> list[Key]:
        """See core.kv.stream.Keys."""
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

    def _take_from_store(self, batch: KvBatch) -> None:
        """Each object of the store is a block, and its name is the standard's hash."""
        cover = mask(self._lora, self._salt)
        for event in batch.events:
            if isinstance(event, ClearedEvent):
                self.reset()
                continue
            tier: Tier = "dram" if (event.medium or "CPU").upper() == "CPU" else "disk"
            keys = [keyed(cover, _number(name)) for name in event.block_hashes]
            if not isinstance(event, StoredEvent):
                self._space.removed(self._source, keys, tier)
                continue
            before = event.parent_block_hash
            parent = None if before is None else keyed(cover, _number(before))
            self._space.stored(self._source, keys, parent, tier)


def _number(name: EngineHash) -> int:
    """A rolling hash as a number: events carry it signed, unsigned, or as the last 8 bytes."""
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name & _U64


def block_keys(cover: int, hashes: Sequence[int]) -> Sequence[Key]:
    """The keys of a chain of rolling hashes; `cover`: see core.kv.tiers.mask."""
    return [keyed(cover, each) for each in hashes] if cover else hashes


def token_keys(cover: int, tokens: Sequence[int], size: Tokens, seed: int) -> Sequence[Key]:
    """The keys of the full blocks of a prompt. OverflowError: a token id is no u32."""
    return block_keys(cover, rolling(local_hashes(tokens, size, seed), seed))
