"""Which engine has how much of a prompt, on which tier: the answers of the Indexer API.

One index per Space, that is, for all that must agree for KV to be reused, and in it one PrefixIndex
per tier, whose holders are streams: the KV events of one rank of one instance, or of a store that
many instances read. Fed by live.gateway.indexer. The Conductor's own index is another: this one
knows of instances that the Conductor does not place anything on, and of none unless it is told to.

What never happens here: a hit for a stream that has left, or beyond a block that nobody holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from moonserve.core.index import PrefixIndex, Tier
from moonserve.core.units import SegmentId, Tokens

TIERS: tuple[Tier, ...] = ("device", "dram", "disk")
MAX_ENTRIES = 10_000_000
"""(block, stream, tier) triples in all spaces; what comes beyond is refused, and counted."""
MAX_SPACES = 4_096


class Space(msgspec.Struct, frozen=True):
    """What must agree for a block to be reused, beside its tokens and those before it."""

    model: str
    block_size: Tokens
    lora: str = ""
    salt: str = ""
    tenant: str = "default"


class Stream(msgspec.Struct, frozen=True):
    """Whose blocks a stream of events tells of."""

    id: SegmentId
    instance: str
    rank: int = 0
    shared: bool = False
    """All instances of the space read them, as from a store; then it is no instance itself."""


class Hits(
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


class Tiered:
    """The blocks of one Space."""

    def __init__(self, block_size: Tokens) -> None:
        self._block_size = block_size
        self._on = {tier: PrefixIndex() for tier in TIERS}
        self._ranks: dict[str, dict[SegmentId, str]] = {}
        """Streams of each instance, with their ranks."""
        self._of: dict[SegmentId, str] = {}
        self._shared: dict[SegmentId, None] = {}
        self._below: dict[SegmentId, None] = {}
        """Streams that have had something below the device."""
        self._nothing: dict[str, msgspec.Raw] | None = None

    def join(self, stream: Stream) -> None:
        """It may have blocks here from now on; again: of no effect."""
        if stream.shared:
            self._shared[stream.id] = None
        else:
            self._of[stream.id] = stream.instance
            self._ranks.setdefault(stream.instance, {})[stream.id] = str(stream.rank)
        self._nothing = None

    def leave(self, stream: Stream) -> bool:
        """Whatever it has here goes. Whether somebody is left."""
        for index in self._on.values():
            index.dropped(stream.id, 0)
        self._shared.pop(stream.id, None)
        self._below.pop(stream.id, None)
        if self._of.pop(stream.id, None) is not None:
            ranks = self._ranks[stream.instance]
            del ranks[stream.id]
            if not ranks:
                del self._ranks[stream.instance]
        self._nothing = None
        return bool(self._of or self._shared)

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
                none = Hits(0, 0, dict.fromkeys(ranks.values(), 0), 0, 0)
                self._nothing[name] = msgspec.Raw(msgspec.json.encode(none))
        return self._nothing

    def hits(self, keys: Sequence[int]) -> dict[str, Hits]:
        """What each instance has of the chain of rolling hashes `keys`; who has nothing is absent."""
        gpu = cpu = disk = self._on["device"].match(keys).by_holder
        if self._below:
            cpu = self._go_on(self._on["dram"], keys, gpu)
            disk = self._go_on(self._on["disk"], keys, cpu)
        size, found = self._block_size, dict.fromkeys([self._of[stream] for stream in disk])
        for name in found:
            ranks = self._ranks[name]
            dp = {rank: size * gpu.get(stream, 0) for stream, rank in ranks.items()}
            most = [size * max(map(tier.get, ranks, (0,) * len(ranks))) for tier in (cpu, disk)]
            found[name] = Hits(most[1], max(dp.values()), dp, *most)
        return found

    def _go_on(
        self, index: PrefixIndex, keys: Sequence[int], starts: Mapping[SegmentId, int]
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
