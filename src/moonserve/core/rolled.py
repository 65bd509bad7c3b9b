"""One stream's KV events as blocks of core.indexer: an engine's hashes become rolling ones.

Engines hash as they like, so a block's tokens are hashed anew, behind what its parent hashed to.
For live.gateway.indexer; the Conductor's own index has core.kvstream, whose keys the store shares.

What never happens here: more remembered of an engine than its cache may hold; a block named by
tokens alone that also depends on an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from moonserve.core.hashes import local_hashes, rolling
from moonserve.core.index import Tier
from moonserve.core.indexer import TIERS, Key, Stream, Tiered, keyed, mask, salted
from moonserve.core.kvevents import Cleared, EngineHash, KvBatch, Removed, Stored
from moonserve.core.units import Tokens

MAX_BLOCKS = 4_000_000
"""Of one stream."""
MAX_ORPHANS = 1_024
"""Events of blocks whose parent is not known yet, in one stream."""
_FIELD = (1 << 20) - 1
_ONE: dict[Tier, int] = {tier: 1 << 20 * at for at, tier in enumerate(TIERS)}
_U64 = (1 << 64) - 1
_MEDIA: dict[str, Tier] = {"CPU": "dram", "CPU_PINNED": "dram", "CPU_TIER1": "dram"}


class Counts(msgspec.Struct):
    """Of one stream, since it was registered. Blocks that came to nothing, and why."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    wrong_size: int = 0
    """Of another block size than was registered."""
    unreadable: int = 0
    """With too few tokens to be named, or too many for the bound."""
    orphans: int = 0
    """Dropped since their parent never came."""


class Rolled:
    """See the module. Puts what a stream tells into `space`."""

    def __init__(self, stream: Stream, space: Tiered, lora: str, salt: str, standard: bool) -> None:
        """lora, salt: of all its blocks, where they say none; standard: its own hashes are rolling
        XXH3-64 ones, to be taken where tokens are lacking."""
        self.counts = Counts()
        self._stream = stream
        self._space = space
        self._seed = space.seed
        self._lora = lora
        self._salt = salt
        self._standard = standard
        self._known: dict[EngineHash, list[Any]] = {}
        """Key, and copies by tier, 20 bits each."""
        self._orphans: dict[EngineHash, list[Stored]] = {}
        """By the parent that they wait for."""
        self._waiting = 0

    def __len__(self) -> int:
        """How many blocks it has."""
        return len(self._known)

    def batch(self, batch: KvBatch) -> None:
        """Take one batch, in order."""
        for event in batch.events:
            match event:
                case Stored():
                    self._stored(event)
                case Removed():
                    self._removed(event)
                case Cleared():
                    self._cleared()

    def reset(self) -> None:
        """Nothing that it told counts any more."""
        for tier in TIERS:
            self._space.cleared(self._stream, tier)
        self._known.clear()
        self._forget_orphans()

    def _tier(self, medium: str | None) -> Tier:
        """Any kind of accelerator is a device; what nobody knows, the slowest there is."""
        name = (medium or "GPU").upper()
        if name in _MEDIA:
            return _MEDIA[name]
        return "device" if name.endswith("PU") and not self._stream.shared else "disk"

    def _stored(self, event: Stored) -> None:
        count = len(event.block_hashes)
        if event.block_size != self._space.block_size:
            self.counts.wrong_size += count
        elif event.group_idx or not count:
            pass  # of a hybrid model's caches the first says what is there
        elif len(self._known) + count > MAX_BLOCKS:
            self.counts.unreadable += count
        elif (parent := event.parent_block_hash) is None or parent in self._known:
            self._put(event, None if parent is None else self._known[parent][0])
        elif self._standard and not event.token_ids:
            self._put(event, None)
        elif self._waiting < MAX_ORPHANS:
            self._orphans.setdefault(parent, []).append(event)
            self._waiting += 1
        else:
            self.counts.orphans += count

    def _put(self, event: Stored, parent: Key | None) -> None:
        todo = [(event, parent)]
        while todo:
            event, parent = todo.pop()
            keys = self._keys(event, parent)
            if keys is None:
                self.counts.unreadable += len(event.block_hashes)
                continue
            tier = self._tier(event.medium)
            for name, key in zip(event.block_hashes, keys, strict=True):
                self._known.setdefault(name, [key, 0])[1] += _ONE[tier]
            self._space.stored(self._stream, keys, parent, tier)
            self.counts.stored += len(keys)
            for name, key in zip(event.block_hashes, keys, strict=True):
                for waited in self._orphans.pop(name, ()) if self._orphans else ():
                    self._waiting -= 1
                    todo.append((waited, key))

    def _keys(self, event: Stored, parent: Key | None) -> list[Key] | None:
        """The keys of its blocks; None: there is no telling."""
        names, size = event.block_hashes, event.block_size
        if not event.token_ids:
            if all(name in self._known for name in names):
                return [self._known[name][0] for name in names]
            if not self._standard:
                return None
            cover = mask(event.lora_name or self._lora, self._salt)
            return [keyed(cover, _number(name)) for name in names]
        if len(event.token_ids) < len(names) * size:
            return None
        try:
            local = local_hashes(event.token_ids[: len(names) * size], size, self._seed)
        except OverflowError:
            return None
        lora, salt = event.lora_name or self._lora, ""
        for at, extra in enumerate(event.extra_keys or ()):
            if not extra or at >= len(local):
                continue
            others = [each for each in extra if each != event.lora_name]
            if at == 0 and parent is None and others and isinstance(others[-1], str):
                salt = others.pop()
            if others:
                local[at] ^= xxh3_64_intdigest(msgspec.msgpack.encode(others), self._seed)
        if parent is None:
            cover, above = mask(lora, salted(self._salt, salt)), None
        else:
            cover, above = parent if isinstance(parent, tuple) else (0, parent)
        return [keyed(cover, each) for each in rolling(local, self._seed, above)]

    def _removed(self, event: Removed) -> None:
        if event.group_idx:
            return
        tier, keys = self._tier(event.medium), list[Key]()
        for name in event.block_hashes:
            entry = self._known.get(name)
            if entry is None:
                self._forget_orphans(name)
            elif entry[1] // _ONE[tier] & _FIELD:
                entry[1] -= _ONE[tier]
                keys.append(entry[0])
                if not entry[1]:
                    del self._known[name]
        self._space.removed(self._stream, keys, tier)
        self.counts.removed += len(keys)

    def _cleared(self) -> None:
        """An engine's own cache is empty, not where it put blocks besides; or a store is."""
        self.counts.cleared += 1
        if self._stream.shared:
            self.reset()
            return
        self._space.cleared(self._stream, "device")
        for entry in self._known.values():
            entry[1] &= ~_FIELD
        self._known = {name: entry for name, entry in self._known.items() if entry[1]}
        self._forget_orphans()

    def _forget_orphans(self, gone: EngineHash | None = None) -> None:
        """All, or those of which this block is one: told in pieces, it is not sure what is left."""
        if not self._orphans:
            return
        kept: dict[EngineHash, list[Stored]] = {}
        for parent, events in self._orphans.items():
            rest = [it for it in events if gone is not None and gone not in it.block_hashes]
            if rest:
                kept[parent] = rest
        waiting = sum(map(len, kept.values()))
        self.counts.orphans += self._waiting - waiting
        self._orphans, self._waiting = kept, waiting


def _number(name: EngineHash) -> int:
    """A rolling hash as engines write it: a number, signed or not, or bytes that end with it."""
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name & _U64


def block_keys(cover: int, hashes: Sequence[int]) -> Sequence[Key]:
    """Of a chain of rolling hashes, signed or not; `cover`: core.indexer.mask."""
    numbers = [each & _U64 for each in hashes] if min(hashes, default=0) < 0 else hashes
    return [keyed(cover, each) for each in numbers] if cover else numbers


def token_keys(cover: int, tokens: Sequence[int], size: Tokens, seed: int) -> Sequence[Key]:
    """Of the full blocks of a prompt. Raises OverflowError: a token id is no u32."""
    return block_keys(cover, rolling(local_hashes(tokens, size, seed), seed))
