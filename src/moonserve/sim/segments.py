"""The simulated KV store: which instance's segment holds which block.

There is one cache per prefill instance (and per decode instance, if it keeps its output), or one
for all. It returns stored and evicted blocks as facts, which the Conductor's index follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.schedule.facts import Fact, InstanceInfo
from moonserve.core.store.words import Terms
from moonserve.core.units import BlockKey, SegmentId, Tokens
from moonserve.sim.cache import Cache
from moonserve.sim.setup import POOL, Setup
from moonserve.sim.trace import Row, Trace


class SegmentHost(Protocol):
    """What a segment needs of its instance: a sim.node.Node is one."""

    info: InstanceInfo
    name: str


class Segments:
    """All segments. Keys are the trace's block ids, as bytes."""

    def __init__(
        self, setup: Setup, prefills: Sequence[SegmentHost], decodes: Sequence[SegmentHost]
    ) -> None:
        blocks = setup.cache_blocks
        self._setup = setup
        holders = [*prefills, *(decodes if setup.keep_output else ())]
        names = dict.fromkeys(node.name for node in holders)
        if setup.pooled:
            total = None if blocks is None else blocks * len(prefills)
            self._caches: dict[str, Cache[BlockKey]] = {POOL: Cache(total, setup.eviction)}
        else:
            self._caches = {name: self._empty() for name in names}
        self._pooled = setup.pooled

    def _empty(self) -> Cache[BlockKey]:
        """A segment without blocks."""
        blocks, eviction = self._setup.cache_blocks, self._setup.eviction
        if blocks is None or not self._setup.embedded_store:
            return Cache(blocks, eviction)
        terms = Terms()
        return Cache(int(terms.high * blocks), eviction, int(terms.low * blocks))

    def _own(self, node: SegmentHost) -> str:
        return POOL if self._pooled else node.name

    def find(
        self, node: SegmentHost, keys: Sequence[BlockKey], fetch: bool
    ) -> tuple[int, dict[str, int]]:
        """The leading run of `keys` that exist: how many are local, and how many each holder gives.

        Blocks that the node has itself never move, even if another holder's blocks come before
        them. Without `fetch`, only its own leading run counts. All found blocks are used, so that
        eviction takes other blocks first. A global pool belongs to every node, but is never local.
        """
        own = self._own(node)
        mine = self._caches[own]
        run = mine.run(keys)
        taken: dict[str, list[BlockKey]] = {own: list(keys[:run])}
        source = own
        for key in keys[run:] if fetch else ():
            if key in mine:
                taken[own].append(key)
                continue
            if key not in self._caches[source]:
                found = next((n for n, cache in self._caches.items() if key in cache), None)
                if found is None:
                    break
                source = found
            taken.setdefault(source, []).append(key)
        for name, used in taken.items():
            self._caches[name].touch(used)
        counts = {name: len(used) for name, used in taken.items() if used}
        local = 0 if self._pooled else counts.pop(own, 0)
        return local, counts

    def store(
        self,
        node: SegmentHost,
        keys: Sequence[BlockKey],
        first: int,
        last: int,
        copies: bool = False,
    ) -> list[Fact]:
        """Hold keys[first:last] of a chain in the node's segment; with `copies`, even if others
        hold them."""
        name = self._own(node)
        cache, segment = self._caches[name], SegmentId(name)
        mine: Sequence[int] = range(first, last)
        if self._setup.one_copy and not copies:
            others = [it for it in self._caches.values() if it is not cache]
            mine = [at for at in mine if not any(keys[at] in other for other in others)]
        wanted = [keys[at] for at in mine]
        fresh = [at for at in mine if keys[at] not in cache]
        evicted = cache.insert(wanted)
        facts: list[Fact] = []
        at = 0
        while at < len(fresh):  # pieces of the chain without a gap
            end = at + 1
            while end < len(fresh) and fresh[end] == fresh[end - 1] + 1:
                end += 1
            begin = fresh[at]
            parent = keys[begin - 1] if begin else None
            piece = tuple(keys[begin : fresh[end - 1] + 1])
            facts.append(BlocksStored(segment, piece, parent, "dram", node.info.epoch))
            at = end
        if evicted:
            facts.append(BlocksRemoved(segment, tuple(evicted), "dram", node.info.epoch))
        return facts

    def fill(self, node: SegmentHost, keys: Sequence[BlockKey]) -> list[Fact]:
        """Take room for blocks that no other request will look for; node: see `store`."""
        return [
            fact
            for fact in self.store(node, keys, 0, len(keys))
            if not isinstance(fact, BlocksStored)
        ]

    def held(self, segment: SegmentId, keys: Sequence[BlockKey]) -> int:
        """How many leading keys of these a segment has."""
        return self._caches[segment].run(keys)

    def is_local(self, node: SegmentHost, keys: Sequence[BlockKey]) -> bool:
        """Whether the node's own segment has all of them."""
        return self._caches[self._own(node)].run(keys) == len(keys)

    def clear(self, node: SegmentHost) -> None:
        """Forget what the node's segment held: the node lost its memory."""
        if not self._pooled and node.name in self._caches:
            self._caches[node.name] = self._empty()


def full_keys(row: Row, size: Tokens) -> tuple[BlockKey, ...]:
    """The keys of a row's full blocks: block ids, as bytes, serve as keys."""
    return tuple(map(key_of, row.blocks[: row.input_tokens // size]))


@lru_cache(maxsize=1 << 20)
def key_of(block: int) -> BlockKey:
    """The key of a block of the trace."""
    return BlockKey(block.to_bytes(8, "big"))


def next_turns(trace: Trace) -> dict[BlockKey, tuple[BlockKey, ...]]:
    """For the last full block of a request: the longest chain that continues it."""
    size = trace.block_size
    lasts = {keys[-1] for row in trace.rows if (keys := full_keys(row, size))}
    longest: dict[BlockKey, tuple[BlockKey, ...]] = {}
    for row in trace.rows:
        keys = full_keys(row, size)
        for key in keys[:-1]:
            if key in lasts and len(keys) > len(longest.get(key, ())):
                longest[key] = keys
    return longest
