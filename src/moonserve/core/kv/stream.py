"""Stream: one engine rank's KV events as facts about blocks, under our keys.

Fed with batches in order (core.kv.order), by whoever follows the engine; its facts go to the
Conductor's index. Our key of a block is computed from the event's token ids and the key before it
(core.kv.event_keys), so it does not matter how an engine hashes: its hashes only name blocks here.

Who counts: the engine may store a hash several times and remove it as often; that is counted here,
per tier, and the index is told of the first and the last only.

What never happens here: a fact about a block of which the engine told neither tokens nor a hash
that is known; more kept than the bounds; a hash of one run of the engine believed in the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.kv.event_keys import event_keys
from moonserve.core.kv.events import ClearedEvent, EngineHash, KvBatch, RemovedEvent, StoredEvent
from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Tier
from moonserve.core.kv.keys import Namespace
from moonserve.core.kv.orphans import Orphans, Place
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
"""vLLM's and SGLang's words."""
_SHARED = ("cpu", "EXTERNAL")
"""The Mooncake store's connector says the first, SGLang the second."""
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
"""Caches that hold every block of a prefix."""
_ONE: dict[Tier, int] = {"device": 1, "dram": 1 << 20, "disk": 1 << 40}
_FIELD = (1 << 20) - 1
_MAX_KINDS = 64
_POOL_TIER: Tier = "dram"


Keys: TypeAlias = Callable[[StoredEvent, int, BlockKey | None], list[BlockKey]]
"""The names of an event's blocks from a number on, behind the one before. May raise OverflowError;
see core.kvkeys."""


class StreamStats(msgspec.Struct):
    """Counted since the beginning."""

    events: int = 0
    stored: int = 0
    """Blocks told as stored."""
    removed: int = 0
    cleared: int = 0
    """Times that the engine's own cache was cleared."""
    reports: int = 0
    """Blocks told again since a request reused them."""
    orphans: int = 0
    """Blocks whose chain is not known up to them, put aside."""
    orphans_dropped: int = 0
    """Of these, how many were given up for others."""
    mismatches: int = 0
    """Blocks of another size."""
    other_groups: int = 0
    """Blocks of caches that do not hold every block of a prefix, or of further ones that do."""
    unplaced: int = 0
    """Blocks with neither tokens nor a known hash, or on a medium that nobody here knows."""
    unknown_removed: int = 0
    """Removals of blocks that were not known."""
    refused: int = 0
    """Blocks beyond the bound."""


class _Block:
    """A block that the engine has, or had lately: its name here, and copies per tier in 20 bits
    each."""

    __slots__ = ("count", "key", "parent")

    def __init__(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.key = key
        self.parent = parent
        self.count = 0


class _Note:
    """A fact in the making."""

    __slots__ = ("keys", "parent", "place", "what")

    def __init__(
        self,
        what: Literal["stored", "removed", "cleared"],
        place: Place,
        keys: list[BlockKey],
        parent: BlockKey | None,
    ) -> None:
        self.what = what
        self.place = place
        self.keys = keys
        self.parent = parent


class EventStream:
    """See the module. One per engine rank and epoch."""

    def __init__(
        self,
        holder: SegmentId,
        epoch: int,
        namespace: Namespace,
        pool: SegmentId | None = None,
        *,
        max_blocks: int = 2_000_000,
        max_orphans: int = 1_024,
        max_retired: int = 65_536,
        keys: Keys | None = None,
    ) -> None:
        """`holder`: whose blocks these are; `namespace`: of requests without LoRA and salt; `pool`:
        the holder of what engines share by a store, None: what is told of such a store counts as
        the engine's own memory. Bounds: blocks held, events of unknown parents, hashes of blocks
        that are gone (a child may follow). `keys`: other names than those of core.kvkeys."""
        self.stats = StreamStats()
        self.algorithm: Algorithm | Literal["other"] | None = None
        """How the engine hashes, by its first event of a plain chain; None: there was none yet.
        Engines that share a store must agree in it."""
        self.block_size: Tokens | None = None
        """The engine's, as its events tell; where it is not the namespace's, nothing is told."""
        self._holder = holder
        self._epoch = epoch
        self._size = namespace.block_size
        self._keys = keys or partial(event_keys, namespace, namespace.root())
        self._pool = pool
        self._max_blocks = max_blocks
        self._max_retired = max_retired
        self._known: dict[EngineHash, _Block] = {}
        """What is held on some tier."""
        self._retired: OrderedDict[EngineHash, _Block] = OrderedDict()
        """What is not, or in the pool only; the latest last."""
        self._orphans = Orphans(max_orphans)
        self._kinds: dict[int, str] = {}
        self._group: int | None = None
        """Of a hybrid model's caches the one that counts; None: not known yet."""
        self._notes: list[_Note] = []

    @property
    def blocks(self) -> int:
        """How many the engine has on tiers of its own, as far as it told."""
        return len(self._known)

    @property
    def mismatch(self) -> Tokens | None:
        """The engine's block size where it is not the namespace's."""
        return None if self.block_size in (None, self._size) else self.block_size

    def batch(self, batch: KvBatch) -> list[BlockEvent]:
        """What the next batch changes, in order."""
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
        notes, self._notes = self._notes, []
        return [self._fact(note) for note in notes]

    def reset(self) -> list[BlockEvent]:
        """Forget all: the engine restarted, or batches were lost and what was told is doubtful.

        What is told after is true, but what the engine still has is unknown until it stores it
        anew. The pool keeps what it has.
        """
        counts = 0
        for block in self._known.values():
            counts |= block.count
        for kept in (self._known, self._retired, self._orphans, self._kinds):
            kept.clear()
        self._group = self.algorithm = self.block_size = None
        held = [tier for tier, one in _ONE.items() if counts // one & _FIELD]
        return [BlocksCleared(self._holder, tier, self._epoch) for tier in held]

    # Which events count, and where

    def _is_counted(self, group: int | None, kind: str | None) -> bool:
        """Whether a cache is the one that counts: the first that holds every block of a prefix."""
        if group is None or (kind is None and group == self._group):
            return True
        if kind is not None and len(self._kinds) < _MAX_KINDS:
            self._kinds[group] = kind
        kind = kind or self._kinds.get(group)
        if self._group is None and kind in _FULL:
            self._group = group
        return group == (self._group or 0) and (kind is None or kind in _FULL)

    def _place(self, medium: str | None, locality: str | None) -> Place | None:
        """Where something lies; None: on a medium that nobody here knows."""
        if medium == "GPU" and locality is None:
            return "device"
        if self._pool is not None and (medium in _SHARED or locality == "REMOTE"):
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

    def _find_all(self, event: StoredEvent, place: Place) -> list[_Block] | None:
        """The event's blocks, up to one that cannot be known; None: their parent is not known."""
        found: list[_Block] = []
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
            keys = self._keys(event, at, parent)
        except OverflowError:  # a token id that is none
            self.stats.unplaced += len(event.block_hashes) - at
            return found
        for key in keys:
            found.append(_Block(key, parent))
            parent = key
        return found

    def _find(self, hash: EngineHash) -> _Block | None:
        return self._known.get(hash) or self._retired.get(hash)

    def _heads(self, event: StoredEvent, place: Place) -> bool:
        """Whether an event without parent heads a chain as its fields say.

        Events of the pool do not tell of LoRA and salt: without these the hash must come out.
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

    def _add(self, event: StoredEvent, place: Place, found: Sequence[_Block]) -> None:
        """One copy more of each; those that are there already where a request's reuse is told."""
        report = event.session_id is not None and event.parent_block_hash is None
        for hash, made in zip(event.block_hashes, found, strict=False):
            block = self._known.get(hash, made)
            if place == "pool":
                if not block.count:
                    self._retire(hash, block)
                self._note_stored(place, block)
                continue
            one = _ONE[place]
            held = block.count // one & _FIELD
            if held and report:
                self.stats.reports += 1
                continue
            if not block.count:
                if len(self._known) >= self._max_blocks:
                    self.stats.refused += 1
                    self._retire(hash, block)
                    continue
                self._known[hash] = block
                self._retired.pop(hash, None)
            block.count += one
            if not held:
                self._note_stored(place, block)

    def _note_stored(self, place: Place, block: _Block) -> None:
        self.stats.stored += 1
        last = self._notes[-1] if self._notes else None
        if last and last.what == "stored" and last.place == place and last.keys[-1] == block.parent:
            last.keys.append(block.key)
        else:
            self._notes.append(_Note("stored", place, [block.key], block.parent))

    def _retire(self, hash: EngineHash, block: _Block) -> None:
        """Keep its name for a while: what follows it may still be told."""
        self._retired[hash] = block
        self._retired.move_to_end(hash)
        if len(self._retired) > self._max_retired:
            self._retired.popitem(last=False)

    def _adopt(self, hashes: Sequence[EngineHash]) -> None:
        """These are known now: so are their children, and theirs."""
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
        last = self._notes[-1] if self._notes else None
        if last and last.what == "removed" and last.place == place:
            last.keys += gone
        else:
            self._notes.append(_Note("removed", place, gone, None))

    def _remove(self, hash: EngineHash, place: Place) -> BlockKey | None:
        """One copy less; the block's key where it was the last there."""
        block = self._find(hash) if place == "pool" else self._known.get(hash)
        one = 0 if place == "pool" else _ONE[place]
        if block is None or (one and not block.count // one & _FIELD):
            self.stats.unknown_removed += not self._orphans.removed(hash, place)
            return None
        if not one:
            return block.key
        block.count -= one
        if not block.count:
            del self._known[hash]
            self._retire(hash, block)
        return None if block.count // one & _FIELD else block.key

    def _on_cleared(self) -> None:
        """The engine's own cache is empty; what lies on other tiers and in the pool stays."""
        self.stats.cleared += 1
        for hash, block in list(self._known.items()):
            block.count &= ~_FIELD
            if not block.count:
                del self._known[hash]
                self._retire(hash, block)
        self._orphans.clear("device")
        self._notes.append(_Note("cleared", "device", [], None))

    def _fact(self, note: _Note) -> BlockEvent:
        keys = tuple(note.keys)
        if note.place == "pool":
            assert self._pool is not None, "without one nothing is placed there"
            holder, tier, epoch = self._pool, _POOL_TIER, 0
        else:
            holder, tier, epoch = self._holder, note.place, self._epoch
        if note.what == "stored":
            return BlocksStored(holder, keys, note.parent, tier, epoch)
        if note.what == "removed":
            return BlocksRemoved(holder, keys, tier, epoch)
        return BlocksCleared(holder, tier, epoch)
