"""Which engine has how much of a prompt, on which tier: the answers of the Indexer API.

One TieredIndex per Space, with a PrefixIndex per tier, whose holders are sources: the KV
events of one rank of one instance, or of a store that many instances read. Its keys are rolling
hashes (core.kv.rolling_hash), those of blocks with a LoRA or a salt marked by these: so blocks that
differ in them never meet, and who asks by hashes needs none but the standard's. Fed by
live.external.indexer_api. The Conductor's own index is another: this one knows the instances that
were registered for it, and they need not be any that the Conductor places requests on.

What never happens here: a hit for a stream that has left, or beyond a block that nobody holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import msgspec
from xxhash import xxh3_64_intdigest

from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Tier
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.units import SegmentId, Tokens

TIERS: tuple[Tier, ...] = ("device", "dram", "disk")


class Space(msgspec.Struct, frozen=True, order=True):
    """Whose streams are asked together. What else must agree for a block to be reused, its LoRA and
    salt, is in the keys."""

    model: str
    tenant: str
    block_size: Tokens


Key: TypeAlias = int | tuple[int, int]
"""A rolling hash; with the mask before it where there is a LoRA or a salt."""


def mask(lora: str, salt: str) -> int:
    """What tells blocks with this LoRA and this salt from others; 0 for neither."""
    if not lora and not salt:
        return 0
    return xxh3_64_intdigest(msgspec.msgpack.encode((lora, salt))) or 1


def keyed(cover: int, rolled: int) -> Key:
    """The key of a block under this mask."""
    return (cover, rolled) if cover else rolled


def salted(owner: str, engine: str) -> str:
    """One salt of what a stream was registered with and what a request had hashed: the standard
    asks for either by the same field."""
    return "|".join(filter(None, (owner, engine)))


class Source(msgspec.Struct, frozen=True):
    """Whose blocks a stream of events tells of."""

    id: SegmentId
    instance: str
    rank: int = 0
    shared: bool = False
    """All instances of the space read them, as from a store; then it is no instance itself."""


class TierHits(
    msgspec.Struct,
    frozen=True,
    rename={"gpu": "GPU", "dp": "DP", "cpu": "CPU", "disk": "DISK"},
):
    """Tokens of a prompt that one instance has, each the most of any of its ranks.

    As engines look: first what its device holds from the start without a gap; then, from there on,
    what host memory holds; then disk. So every tier counts those above it, and the last is longest.
    """

    longest_matched: Tokens
    gpu: Tokens
    dp: dict[str, Tokens]
    """On the device of each rank."""
    cpu: Tokens
    disk: Tokens


class TieredIndex:
    """The blocks of one Space."""

    def __init__(self, block_size: Tokens, seed: int) -> None:
        self.block_size = block_size
        self.seed = seed
        """Of the hashes that the keys are made of."""
        self._on = {tier: PrefixIndex() for tier in TIERS}
        self._ranks: dict[str, dict[SegmentId, str]] = {}
        """Streams of each instance, with their ranks."""
        self._of: dict[SegmentId, str] = {}
        self._shared: dict[SegmentId, None] = {}
        self._below: dict[SegmentId, None] = {}
        """Streams that have had something below the device."""
        self._nothing: dict[str, msgspec.Raw] | None = None

    def join(self, stream: Source) -> None:
        """It may have blocks here from now on; again: of no effect."""
        if stream.shared:
            self._shared[stream.id] = None
        else:
            self._of[stream.id] = stream.instance
            self._ranks.setdefault(stream.instance, {})[stream.id] = str(stream.rank)
        self._nothing = None

    def leave(self, stream: Source) -> bool:
        """Whatever it has here goes. Whether somebody is left."""
        for index in self._on.values():
            index.cleared(stream.id)
        self._shared.pop(stream.id, None)
        self._below.pop(stream.id, None)
        if self._of.pop(stream.id, None) is not None:
            ranks = self._ranks[stream.instance]
            del ranks[stream.id]
            if not ranks:
                del self._ranks[stream.instance]
        self._nothing = None
        return bool(self._of or self._shared)

    def heard(self, stream: Source, fact: BlockEvent) -> None:
        """What core.kv.stream says of the stream's blocks, its keys being ours."""
        match fact:
            case BlocksStored(_, keys, parent, tier, _):
                self.stored(stream, cast("Sequence[Key]", keys), cast("Key | None", parent), tier)
            case BlocksRemoved(_, keys, tier, _):
                self.removed(stream, cast("Sequence[Key]", keys), tier)
            case BlocksCleared(_, tier, _):
                self.cleared(stream, tier)

    def stored(self, stream: Source, keys: Sequence[Key], parent: Key | None, tier: Tier) -> None:
        """It has these blocks of a chain, the first of them after `parent`."""
        if tier != "device":
            self._below[stream.id] = None
        self._on[tier].stored(stream.id, keys, parent)

    def removed(self, stream: Source, keys: Sequence[Key], tier: Tier) -> None:
        """It has one copy less of each."""
        self._on[tier].removed(stream.id, keys)

    def cleared(self, stream: Source, tier: Tier) -> None:
        """It has nothing there."""
        self._on[tier].cleared(stream.id)

    @property
    def entries(self) -> int:
        """(block, stream, tier) triples."""
        return sum([index.entries for index in self._on.values()])

    @property
    def instances(self) -> Mapping[str, msgspec.Raw]:
        """All there are, each with the answer, in JSON, of one that has nothing of a prompt."""
        if self._nothing is None:
            self._nothing = {}
            for name, ranks in self._ranks.items():
                none = TierHits(0, 0, dict.fromkeys(ranks.values(), 0), 0, 0)
                self._nothing[name] = msgspec.Raw(msgspec.json.encode(none))
        return self._nothing

    def hits(self, keys: Sequence[Key]) -> dict[str, TierHits]:
        """What each instance has of the chain `keys`; who has nothing is absent."""
        gpu = cpu = disk = self._on["device"].match(keys).by_holder
        if self._below:
            cpu = self._go_on(self._on["dram"], keys, gpu)
            disk = self._go_on(self._on["disk"], keys, cpu)
        size, of, found = self.block_size, self._of, dict[str, TierHits]()
        for stream, blocks in disk.items():
            name = of[stream]
            ranks = self._ranks[name]
            if len(ranks) == 1:
                most, on_cpu, on_gpu = blocks * size, cpu.get(stream, 0), gpu.get(stream, 0)
                dp = {ranks[stream]: on_gpu * size}
                found[name] = TierHits(most, on_gpu * size, dp, on_cpu * size, most)
            elif name not in found:
                dp = {rank: size * gpu.get(one, 0) for one, rank in ranks.items()}
                tiers = [size * max([tier.get(one, 0) for one in ranks]) for tier in (cpu, disk)]
                found[name] = TierHits(tiers[1], max(dp.values()), dp, *tiers)
        return found

    def _go_on(
        self, index: PrefixIndex, keys: Sequence[Key], starts: Mapping[SegmentId, int]
    ) -> dict[SegmentId, int]:
        """How far each stream comes that has `starts` blocks above this tier; 0 is left out."""
        runs: dict[int, Mapping[SegmentId, int]] = {}
        ends = dict(starts)
        for stream in self._of if self._shared else self._below:
            at = ends.get(stream, 0)
            while True:
                if at not in runs:
                    runs[at] = index.match(keys[at:]).by_holder
                run = max([runs[at].get(holder, 0) for holder in (stream, *self._shared)])
                if not run:
                    break
                at += run
            if at:
                ends[stream] = at
        return ends
