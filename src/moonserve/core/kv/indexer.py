"""What the Indexer API answers from: an index by instance and tier, and the KV events that fill it.

Called by live.external.indexer_api. There is one TieredIndex per Space. Its sources are the KV
events of one rank of one instance, or of a store that many instances read; a RollingIndexer takes
the events of one source. It is not the Conductor's index; see
docs/adr/0019-two-indexes-one-follower.md.

Blocks have XXH3-64 names, as Mooncake's Conductor Indexer API and other indexers compute them:

    local[i] = XXH3(tokens of block i as u32 little-endian, seed)
    seq[0]   = local[0];  seq[i] = XXH3(seq[i-1] || local[i], seed), both as u64 little-endian

A local hash covers one block, a rolling one (seq) also all blocks before it. The key of a block
with a LoRA or a salt also has a mask of these, so that blocks that differ in them never meet.
Anybody can compute these 64 bits, so they never name bytes that are shared: the store's keys are
those of core.kv.keys.

What never happens here: a hit for a source that has left, or beyond a block that nobody holds; a
block that also depends on an image, named by its tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from moonserve.core.kv.events import ClearedEvent, EngineHash, KvBatch, StoredEvent, covered
from moonserve.core.kv.facts import TIERS, Tier
from moonserve.core.kv.index import MAX_ENTRIES, PrefixIndex
from moonserve.core.kv.keys import token_bytes
from moonserve.core.kv.stream import BlockChange, BlockStream
from moonserve.core.units import SegmentId, Tokens

SEED = 1337
"""The default seed; dynamo's indexer has the same."""
_U64 = (1 << 64) - 1
_pair = Struct("<QQ").pack


class Space(msgspec.Struct, frozen=True, order=True):
    """The sources that one query asks together. A block's LoRA and salt are in its key."""

    model: str
    tenant: str
    block_size: Tokens


Key: TypeAlias = int | tuple[int, int]
"""A rolling hash, or (mask, rolling hash) where there is a LoRA or a salt."""


def mask(lora: str, salt: str) -> int:
    """The mask of blocks with this LoRA and this salt; 0 for neither."""
    if not lora and not salt:
        return 0
    return xxh3_64_intdigest(msgspec.msgpack.encode((lora, salt))) or 1


def keyed(cover: int, rolled: int) -> Key:
    """The key of a block under this mask."""
    return (cover, rolled) if cover else rolled


def salted(owner: str, engine: str) -> str:
    """The one salt of a block, of the salt that its source was registered with and the salt of the
    request: the Indexer API has one field for both."""
    return "|".join(filter(None, (owner, engine)))


class BlockSource:
    """Whose blocks a stream of KV events reports: one rank of an instance, or a store."""

    __slots__ = ("holders", "id", "instance", "rank", "shared")

    def __init__(self, id: SegmentId, instance: str, rank: int = 0, shared: bool = False) -> None:
        """`shared`: a store that all instances of the space read; it is not an instance itself."""
        self.id = id
        self.instance = instance
        self.rank = str(rank)
        self.shared = shared
        self.holders: dict[Tier, SegmentId] = {tier: SegmentId(f"{id} {tier}") for tier in TIERS}
        """What stands in the index for this source's blocks on each tier."""


class TierHits(
    msgspec.Struct,
    frozen=True,
    rename={"gpu": "GPU", "dp": "DP", "cpu": "CPU", "disk": "DISK"},
):
    """Tokens of a prompt that one instance holds; each number is the largest of its ranks.

    Counted as engines look for a prefix: the blocks that the device holds from the start without a
    gap, then the blocks from there on in host memory, then those from there on on disk. So each
    tier includes the ones above it, and `disk` equals `longest_matched`.
    """

    longest_matched: Tokens
    gpu: Tokens
    dp: dict[str, Tokens]
    """On the device of each rank."""
    cpu: Tokens
    disk: Tokens


class TieredIndex:
    """The blocks of one Space: one PrefixIndex, with a holder for each tier of each source."""

    def __init__(self, block_size: Tokens, seed: int, max_blocks: int = MAX_ENTRIES) -> None:
        """`max_blocks`: how many it knows at most, counted once for each source and tier."""
        self.block_size = block_size
        self.seed = seed
        """Of the hashes that the keys are made of."""
        self._index = PrefixIndex(max_blocks)
        self._sources: dict[SegmentId, BlockSource] = {}
        """Sources that are no store, by their holder for the device."""
        self._ranks: dict[str, dict[SegmentId, str]] = {}
        """The ranks of each instance, by the same holder."""
        self._stores: dict[SegmentId, BlockSource] = {}
        self._below: dict[SegmentId, BlockSource] = {}
        """Sources that have had a block below the device, by that holder too."""
        self._nothing: dict[str, msgspec.Raw] | None = None

    def join(self, source: BlockSource) -> None:
        """The source may have blocks here from now on. A second call changes nothing."""
        device = source.holders["device"]
        if source.shared:
            self._stores[device] = source
        else:
            self._sources[device] = source
            self._ranks.setdefault(source.instance, {})[device] = source.rank
        self._nothing = None

    def leave(self, source: BlockSource) -> bool:
        """Remove the source and all its blocks. Returns whether any source is left."""
        for tier in TIERS:
            self.cleared(source, tier)
        device = source.holders["device"]
        self._stores.pop(device, None)
        self._below.pop(device, None)
        if self._sources.pop(device, None) is not None:
            ranks = self._ranks[source.instance]
            del ranks[device]
            if not ranks:
                del self._ranks[source.instance]
        self._nothing = None
        return bool(self._sources or self._stores)

    def stored(
        self, source: BlockSource, keys: Sequence[Key], parent: Key | None, tier: Tier
    ) -> None:
        """The source has these blocks of a chain; `parent` is the key before the first."""
        if tier != "device":
            self._below[source.holders["device"]] = source
        self._index.stored(source.holders[tier], keys, parent)

    def removed(self, source: BlockSource, keys: Sequence[Key], tier: Tier) -> None:
        """The source has one copy less of each of these blocks."""
        self._index.removed(source.holders[tier], keys)

    def cleared(self, source: BlockSource, tier: Tier) -> None:
        """The source has no blocks on this tier."""
        self._index.cleared(source.holders[tier])

    @property
    def entries(self) -> int:
        """How many (block, source, tier) triples it holds."""
        return self._index.entries

    @property
    def evicted(self) -> int:
        """How many of these triples it has forgotten because it was full."""
        return self._index.evicted

    def touch(self, keys: Sequence[Key]) -> None:
        """A query asked for this chain: forget others before it."""
        self._index.touch(keys)

    @property
    def instances(self) -> Mapping[str, msgspec.Raw]:
        """All instances, each with the answer, in JSON, of an instance that holds nothing."""
        if self._nothing is None:
            self._nothing = {}
            for name, ranks in self._ranks.items():
                none = TierHits(0, 0, dict.fromkeys(ranks.values(), 0), 0, 0)
                self._nothing[name] = msgspec.Raw(msgspec.json.encode(none))
        return self._nothing

    def hits(self, keys: Sequence[Key]) -> dict[str, TierHits]:
        """What each instance has of the chain `keys`; an instance that has nothing is absent."""
        size, found = self.block_size, dict[str, TierHits]()
        several: dict[str, list[tuple[BlockSource, int, int, int]]] = {}
        for reach in self._reaches(keys):
            source, gpu, cpu, disk = reach
            if len(self._ranks[source.instance]) == 1:
                most, on_gpu = disk * size, gpu * size
                dp = {source.rank: on_gpu}
                found[source.instance] = TierHits(most, on_gpu, dp, cpu * size, most)
            else:
                several.setdefault(source.instance, []).append(reach)
        for name, reaches in several.items():
            dp = dict.fromkeys(self._ranks[name].values(), 0)
            dp.update({source.rank: gpu * size for source, gpu, _, _ in reaches})
            cpu = size * max([reach[2] for reach in reaches])
            disk = size * max([reach[3] for reach in reaches])
            found[name] = TierHits(disk, max(dp.values()), dp, cpu, disk)
        return found

    def _reaches(self, keys: Sequence[Key]) -> list[tuple[BlockSource, int, int, int]]:
        """How many blocks of `keys` each source reaches with its device, then with host memory,
        then with disk; a source that reaches none is left out."""
        first = self._index.match(keys).by_holder
        sources = self._sources
        if not self._below:  # then all holders are of devices
            return [(sources[device], run, run, run) for device, run in first.items()]
        runs = {0: first}
        stores = list(self._stores.values())

        def go_on(source: BlockSource, tier: Tier, at: int) -> int:
            holders = [it.holders[tier] for it in (source, *stores)]
            while at < len(keys):
                if at not in runs:
                    runs[at] = self._index.match(keys[at:]).by_holder
                run = max([runs[at].get(holder, 0) for holder in holders])
                if not run:
                    break
                at += run
            return at

        deeper = sources if stores else self._below
        found = [
            (sources[device], run, run, run)
            for device, run in first.items()
            if device in sources and device not in deeper
        ]
        for device, source in deeper.items():
            if device in sources:
                gpu = first.get(device, 0)
                cpu = go_on(source, "dram", gpu)
                disk = go_on(source, "disk", cpu)
                if disk:
                    found.append((source, gpu, cpu, disk))
        return found


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


class RollingIndexer(BlockStream[Key]):
    """See the module. Puts the blocks of one source into `space`."""

    def __init__(self, source: BlockSource, space: TieredIndex, lora: str, salt: str) -> None:
        """`lora`, `salt`: of all blocks whose events name none."""
        super().__init__(space.block_size)
        self._source = source
        self._space = space
        self._lora = lora
        self._salt = salt

    def batch(self, batch: KvBatch) -> None:
        """Take the next batch."""
        if self._source.shared:
            self._take_from_store(batch)
            return
        for change in self.changes(batch):
            self._apply(change)

    def reset(self, restarted: bool = False) -> None:
        """Remove all blocks of the source, whether its engine restarted or batches were lost."""
        self.forget()
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

    def named(self, event: StoredEvent, at: int, parent: Key | None) -> list[Key]:
        """See BlockStream."""
        size = event.block_size
        local = local_hashes(event.token_ids[at * size :], size, self._space.seed)
        lora, salt, extras = covered(event, parent is None)
        for number, extra in enumerate(extras[at : at + len(local)]):
            if extra:
                local[number] ^= xxh3_64_intdigest(msgspec.msgpack.encode(extra))
        if parent is None:
            cover = mask(lora or self._lora, salted(self._salt, salt))
            above = None
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
    """The keys of a chain of rolling hashes; `cover`: see core.kv.indexer.mask."""
    return [keyed(cover, each) for each in hashes] if cover else hashes


def token_keys(cover: int, tokens: Sequence[int], size: Tokens, seed: int) -> Sequence[Key]:
    """The keys of the full blocks of a prompt. OverflowError: a token id is no u32."""
    return block_keys(cover, rolling(local_hashes(tokens, size, seed), seed))
