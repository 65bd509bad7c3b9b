"""One engine rank's KV events as changes of an index, under the index's own keys.

BlockStream takes batches in order (core.kv.order). It names a block by the event's token ids and
the key of the block before it, so an engine may hash as it likes: its hashes are only names here.
KvEventStream makes the Conductor's facts of these changes; core.kv.indexer feeds the Indexer API.

An engine may store a hash several times and remove it as often. The stream counts copies per tier,
and the index receives the first store and the last removal only.

What never happens here: a change for a block of which the engine sent neither token ids nor a known
hash; more kept than the bounds; a hash of one run of the engine believed in the next run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from moonserve.core.kv.events import (
    ClearedEvent,
    EngineHash,
    KvBatch,
    RemovedEvent,
    StoredEvent,
    event_keys,
)
from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Tier
from moonserve.core.kv.index import COPIES, ONE_COPY
from moonserve.core.kv.keys import Namespace
from moonserve.core.kv.vllm_hash import Algorithm, algorithm_of
from moonserve.core.units import BlockKey, SegmentId, Tokens

_TIERS: dict[str, Tier] = {
    "GPU": "device",
    "NPU": "device",
    "CPU": "dram",
    "CPU_PINNED": "dram",
    "CPU_TIER1": "dram",
    "CPU_TIER2": "disk",
    "DISK": "disk",
    "STORAGE": "disk",
}
"""The media that vLLM and SGLang name, in upper case."""
_SHARED = ("cpu", "EXTERNAL")
"""Media of a shared store: the Mooncake connector of vLLM sends the first, SGLang the second."""
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of caches that hold every block of a prefix."""
_MAX_KINDS = 64
_POOL_TIER: Tier = "dram"

K = TypeVar("K")
"""What an index calls a block: any hashable value."""

Place: TypeAlias = Tier | Literal["pool"]
"""A tier of the engine's own, or the store that it shares with other engines."""


class Bounds(msgspec.Struct, frozen=True):
    """How much one BlockStream keeps."""

    blocks: int = 2_000_000
    """Blocks held."""
    orphans: int = 1_024
    """Events whose parent is not known."""
    retired: int = 65_536
    """Hashes of removed blocks: a child may still follow."""


_BOUNDS = Bounds()


class StreamStats(msgspec.Struct):
    """Counts since the stream began."""

    events: int = 0
    stored: int = 0
    """Blocks that the index was given."""
    removed: int = 0
    """Blocks that were taken out of the index."""
    cleared: int = 0
    """Times that the engine cleared its own cache."""
    reports: int = 0
    """Blocks that an engine repeated as stored because a request reused them."""
    orphans: int = 0
    """Blocks put aside because their parent is not known yet."""
    orphans_dropped: int = 0
    """Orphans given up because there were too many."""
    mismatches: int = 0
    """Blocks of another size than the index has."""
    other_groups: int = 0
    """Blocks of caches that do not count: see KvEventStream on hybrid models."""
    unplaced: int = 0
    """Blocks with neither token ids nor a known hash, or on an unknown medium."""
    unknown_removed: int = 0
    """Removals of blocks that were not known."""
    refused: int = 0
    """Blocks left out because the stream was full."""


class _EngineBlock(msgspec.Struct, Generic[K], eq=False):
    """A block that the engine holds or held lately."""

    key: K
    parent: K | None
    count: int = 0
    """Its copies, with 20 bits for each tier; see core.kv.index.ONE_COPY."""


class BlockChange(msgspec.Struct, Generic[K], eq=False):
    """Blocks that were stored at or removed from one place; or a place that was cleared."""

    what: Literal["stored", "removed", "cleared"]
    place: Place
    keys: list[K]
    """A run of one chain if stored, in no order if removed, empty if cleared."""
    parent: K | None = None
    """If stored, the key of the block before keys[0]; None: keys[0] heads its chain."""


class Orphan(msgspec.Struct, eq=False):
    """A stored event that waits for its parent, and its blocks that were removed meanwhile."""

    event: StoredEvent
    parent: EngineHash
    place: Place
    removed: list[EngineHash] = []


class Orphans:
    """At most `most` stored events whose parent is not known yet; the oldest are given up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[EngineHash, list[Orphan]] = OrderedDict()
        """By parent, oldest first."""
        self._count = 0
        self._missing: dict[EngineHash, Orphan] = {}
        """Hash -> the latest orphan that has it."""

    def __len__(self) -> int:
        return self._count

    def put(self, event: StoredEvent, place: Place) -> int:
        """Add an orphan. Returns how many blocks of older orphans were given up for it."""
        parent = event.parent_block_hash
        assert parent is not None, "an event without a parent is not an orphan"
        dropped = 0
        if self._count >= self._most:
            oldest = next(iter(self._waiting.values()))[0]
            dropped = len(oldest.event.block_hashes)
            self._take_out(oldest)
        orphan = Orphan(event, parent, place)
        self._waiting.setdefault(parent, []).append(orphan)
        self._count += 1
        self._missing.update(dict.fromkeys(event.block_hashes, orphan))
        return dropped

    def take(self, parent: EngineHash) -> list[Orphan]:
        """Take out those that waited for this parent, in the order in which they arrived."""
        taken = list(self._waiting.get(parent, ()))
        for orphan in taken:
            self._take_out(orphan)
        return taken

    def removed(self, hash: EngineHash, place: Place) -> bool:
        """Note that a copy of a block was removed. Returns False if no orphan has it."""
        orphan = self._missing.get(hash)
        if orphan is None or orphan.place != place:
            return False
        if len(orphan.removed) < len(orphan.event.block_hashes):
            orphan.removed.append(hash)
        return True

    def clear(self, place: Place | None = None) -> None:
        """Drop the orphans of one place; None: all."""
        for orphan in [it for waiting in self._waiting.values() for it in waiting]:
            if place in (None, orphan.place):
                self._take_out(orphan)

    def _take_out(self, orphan: Orphan) -> None:
        waiting = self._waiting[orphan.parent]
        waiting.remove(orphan)
        if not waiting:
            del self._waiting[orphan.parent]
        self._count -= 1
        for hash in orphan.event.block_hashes:
            if self._missing.get(hash) is orphan:
                del self._missing[hash]


class BlockStream(ABC, Generic[K]):
    """See the module. One per engine rank and index; `named` is the index's.

    A hybrid model has several caches ("groups"). The first one that holds every block of a prefix
    counts; the events of the others are only counted.
    """

    def __init__(
        self,
        block_size: Tokens,
        pooled: bool = False,
        bounds: Bounds = _BOUNDS,
    ) -> None:
        """`block_size`: the index's. `pooled`: whether events of a store that engines share have
        place "pool"; otherwise they count as the engine's own memory."""
        self.stats = StreamStats()
        self.algorithm: Algorithm | Literal["other"] | None = None
        """How the engine hashes, by its first event of a plain chain; None: no such event yet.
        Engines that share a store must agree in it."""
        self.block_size: Tokens | None = None
        """The engine's block size, as its events have it. If it is not the index's, nothing
        changes."""
        self._size = block_size
        self._pooled = pooled
        self._bounds = bounds
        self._known: dict[EngineHash, _EngineBlock[K]] = {}
        """Blocks held on some tier."""
        self._retired: OrderedDict[EngineHash, _EngineBlock[K]] = OrderedDict()
        """Blocks held on no tier, or in the pool only; the latest last."""
        self._orphans = Orphans(bounds.orphans)
        self._kinds: dict[int, str] = {}
        self._group: int | None = None
        """The cache of a hybrid model that counts; None: not known yet."""
        self._changes: list[BlockChange[K]] = []

    @abstractmethod
    def named(self, event: StoredEvent, at: int, parent: K | None) -> list[K]:
        """The keys of the event's blocks from number `at` on.

        parent: the key of the block before; None: block `at` heads its chain. May raise
        OverflowError on an invalid token id.
        """

    @property
    def blocks(self) -> int:
        """How many blocks the engine holds on tiers of its own, by its events."""
        return len(self._known)

    @property
    def mismatch(self) -> Tokens | None:
        """The engine's block size if it is not the index's, else None."""
        return None if self.block_size in (None, self._size) else self.block_size

    def changes(self, batch: KvBatch) -> list[BlockChange[K]]:
        """Take the next batch. Returns what it changes, in order."""
        for event in batch.events:
            self.stats.events += 1
            if isinstance(event, ClearedEvent):
                self._on_cleared()
                continue
            kind = event.kv_cache_spec_kind if isinstance(event, StoredEvent) else None
            place = self._place(event.medium, event.locality)
            if not self._is_counted(event.group_idx, kind):
                self.stats.other_groups += len(event.block_hashes)
            elif place is None:
                self.stats.unplaced += len(event.block_hashes)
            elif isinstance(event, RemovedEvent):
                self._on_removed(event.block_hashes, place)
            else:
                self._on_stored(event, place)
        changes, self._changes = self._changes, []
        return changes

    def forget(self) -> list[Tier]:
        """Forget all: the engine restarted, or batches were lost. Returns the tiers it had.

        What the engine sends afterwards is true. What it still holds is unknown until it stores it
        again. The pool keeps what it has.
        """
        counts = 0
        for block in self._known.values():
            counts |= block.count
        for kept in (self._known, self._retired, self._orphans, self._kinds):
            kept.clear()
        self._group = None
        self.algorithm = None
        self.block_size = None
        return [tier for tier, one in ONE_COPY.items() if counts // one & COPIES]

    # Which events count, and where

    def _is_counted(self, group: int | None, kind: str | None) -> bool:
        """Whether this cache of a hybrid model counts: the first that holds whole prefixes."""
        if group is None or (kind is None and group == self._group):
            return True
        if kind is not None and len(self._kinds) < _MAX_KINDS:
            self._kinds[group] = kind
        kind = kind or self._kinds.get(group)
        if self._group is None and kind in _FULL:
            self._group = group
        return group == (self._group or 0) and (kind is None or kind in _FULL)

    def _place(self, medium: str | None, locality: str | None) -> Place | None:
        """The place of an event's blocks; None: the medium is unknown."""
        if medium == "GPU" and locality is None:
            return "device"
        if self._pooled and (medium in _SHARED or locality == "REMOTE"):
            return "pool"
        return "device" if medium is None else _TIERS.get(medium.upper())

    # Stored

    def _on_stored(self, event: StoredEvent, place: Place) -> None:
        count = len(event.block_hashes)
        if event.token_ids:
            if self.block_size is None:
                self.block_size = event.block_size
            if event.block_size != self._size:
                self.stats.mismatches += count
                return
            if len(event.token_ids) != count * self._size:
                self.stats.unplaced += count
                return
        found = self._find_all(event, place)
        if found is None:
            self.stats.orphans += count
            self.stats.orphans_dropped += self._orphans.put(event, place)
        else:
            self._add(event, place, found)
            if self._orphans:
                self._adopt(event.block_hashes[: len(found)])

    def _find_all(self, event: StoredEvent, place: Place) -> list[_EngineBlock[K]] | None:
        """The event's blocks, up to the first that cannot be named; None: the parent is unknown."""
        found: list[_EngineBlock[K]] = []
        before = None
        for hash in event.block_hashes:
            block = self._find(hash)
            if block is None:
                break
            found.append(block)
            before = block
        at = len(found)
        if at == len(event.block_hashes):
            return found
        if not event.token_ids:
            self.stats.unplaced += len(event.block_hashes) - at
            return found
        if before is None and event.parent_block_hash is not None:
            before = self._find(event.parent_block_hash)
            if before is None:
                return None
        if before is None and not self._heads(event, place):
            self.stats.unplaced += len(event.block_hashes)
            return []
        parent = None if before is None else before.key
        try:
            keys = self.named(event, at, parent)
        except OverflowError:  # an invalid token id
            self.stats.unplaced += len(event.block_hashes) - at
            return found
        for key in keys:
            found.append(_EngineBlock(key, parent))
            parent = key
        return found

    def _find(self, hash: EngineHash) -> _EngineBlock[K] | None:
        return self._known.get(hash) or self._retired.get(hash)

    def _heads(self, event: StoredEvent, place: Place) -> bool:
        """Whether an event without parent heads a chain as its fields say.

        Events of the pool name neither LoRA nor salt, so the hash without both must come out.
        """
        tuned = event.lora_name is not None or event.lora_id is not None
        plain = not tuned and not any(event.extra_keys or ())
        made = None
        if plain and (place == "pool" or self.algorithm is None):
            made = algorithm_of(event.block_hashes[0], event.token_ids[: self._size])
        if place == "pool":
            return made is not None
        if plain and self.algorithm is None:
            self.algorithm = made or "other"
        return True

    def _add(self, event: StoredEvent, place: Place, found: Sequence[_EngineBlock[K]]) -> None:
        """Add one copy of each block, but none if the event only repeats what a request reused."""
        report = event.session_id is not None and event.parent_block_hash is None
        for hash, made in zip(event.block_hashes, found, strict=False):
            block = self._known.get(hash, made)
            if place == "pool":
                if not block.count:
                    self._retire(hash, block)
                self._add_stored(place, block)
                continue
            one = ONE_COPY[place]
            held = block.count // one & COPIES
            if held and report:
                self.stats.reports += 1
                continue
            if not block.count:
                if len(self._known) >= self._bounds.blocks:
                    self.stats.refused += 1
                    self._retire(hash, block)
                    continue
                self._known[hash] = block
                self._retired.pop(hash, None)
            block.count += one
            if not held:
                self._add_stored(place, block)

    def _add_stored(self, place: Place, block: _EngineBlock[K]) -> None:
        self.stats.stored += 1
        last = self._changes[-1] if self._changes else None
        if last and last.what == "stored" and last.place == place and last.keys[-1] == block.parent:
            last.keys.append(block.key)
        else:
            self._changes.append(BlockChange("stored", place, [block.key], block.parent))

    def _retire(self, hash: EngineHash, block: _EngineBlock[K]) -> None:
        """Keep the name of a removed block for a while: a child may still follow."""
        self._retired[hash] = block
        self._retired.move_to_end(hash)
        if len(self._retired) > self._bounds.retired:
            self._retired.popitem(last=False)

    def _adopt(self, hashes: Sequence[EngineHash]) -> None:
        """These blocks are known now: add their orphaned children, and the children of those."""
        known = list(hashes)
        while known and self._orphans:
            for orphan in self._orphans.take(known.pop()):
                found = self._find_all(orphan.event, orphan.place) or []
                self._add(orphan.event, orphan.place, found)
                self._on_removed(orphan.removed, orphan.place)
                known += orphan.event.block_hashes[: len(found)]

    # Removed and cleared

    def _on_removed(self, hashes: Sequence[EngineHash], place: Place) -> None:
        gone = [key for key in (self._remove(hash, place) for hash in hashes) if key is not None]
        if not gone:
            return
        self.stats.removed += len(gone)
        last = self._changes[-1] if self._changes else None
        if last and last.what == "removed" and last.place == place:
            last.keys += gone
        else:
            self._changes.append(BlockChange("removed", place, gone))

    def _remove(self, hash: EngineHash, place: Place) -> K | None:
        """Take away one copy. Returns the block's key if it was the last one at that place."""
        block = self._find(hash) if place == "pool" else self._known.get(hash)
        one = 0 if place == "pool" else ONE_COPY[place]
        if block is None or (one and not block.count // one & COPIES):
            self.stats.unknown_removed += not self._orphans.removed(hash, place)
            return None
        if not one:
            return block.key
        block.count -= one
        if not block.count:
            del self._known[hash]
            self._retire(hash, block)
        return None if block.count // one & COPIES else block.key

    def _on_cleared(self) -> None:
        """The engine's own cache is empty. Blocks on other tiers and in the pool stay."""
        self.stats.cleared += 1
        for hash, block in list(self._known.items()):
            block.count &= ~COPIES
            if not block.count:
                del self._known[hash]
                self._retire(hash, block)
        self._orphans.clear("device")
        self._changes.append(BlockChange("cleared", "device", []))


class KvEventStream(BlockStream[BlockKey]):
    """One engine rank's events as the Conductor's facts about one instance, in one epoch of it."""

    def __init__(
        self,
        holder: SegmentId,
        epoch: int,
        namespace: Namespace,
        pool: SegmentId | None = None,
        bounds: Bounds = _BOUNDS,
    ) -> None:
        """`holder`: whose blocks these are; `namespace`: that of requests without LoRA and salt;
        `pool`: the holder of a store that engines share, None: there is none."""
        super().__init__(namespace.block_size, pool is not None, bounds)
        self._plain = namespace
        self._root = namespace.root()
        self._holder = holder
        self._epoch = epoch
        self._pool = pool

    def named(self, event: StoredEvent, at: int, parent: BlockKey | None) -> list[BlockKey]:
        """See BlockStream."""
        return event_keys(self._plain, self._root, event, at, parent)

    def facts(self, batch: KvBatch) -> list[BlockEvent]:
        """Take the next batch. Returns what it changes, in order."""
        return [self._fact(change) for change in self.changes(batch)]

    def cleared(self) -> list[BlockEvent]:
        """Forget all; see `forget`."""
        return [BlocksCleared(self._holder, tier, self._epoch) for tier in self.forget()]

    def _fact(self, change: BlockChange[BlockKey]) -> BlockEvent:
        if change.place == "pool":
            assert self._pool is not None, "without a pool, nothing is placed there"
            holder = self._pool
            tier = _POOL_TIER
            epoch = 0
        else:
            holder = self._holder
            tier = change.place
            epoch = self._epoch
        if change.what == "stored":
            return BlocksStored(holder, tuple(change.keys), change.parent, tier, epoch)
        if change.what == "removed":
            return BlocksRemoved(holder, tuple(change.keys), tier, epoch)
        return BlocksCleared(holder, tier, epoch)
