"""KV events: what vLLM and SGLang publish about the blocks in their KV caches.

The fields are vLLM's, so that msgspec reads and writes the wire's form (live.kvevents.wire).
core.kv.order puts batches into order; core.kv.stream makes changes of an index of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

EngineHash: TypeAlias = int | bytes
"""An engine's own name of a block: the last 8 bytes of its hash as a number, or the whole hash."""


def _none() -> None:
    """Default of a field that may be missing when read, but that vLLM always writes."""


class StoredEvent(msgspec.Struct, frozen=True, tag="BlockStored", omit_defaults=True):
    """A run of blocks of one chain was stored. The fields have the order of the array form."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    """Hash of the block before the first; None: the first block heads its chain."""
    token_ids: list[int]
    """Token ids of all blocks; empty: the engine does not know them."""
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_none)
    medium: str | None = msgspec.field(default_factory=_none)
    """GPU (also on a CPU engine), CPU or STORAGE; cpu from the Mooncake store; None: GPU."""
    lora_name: str | None = msgspec.field(default_factory=_none)
    extra_keys: list[list[Any] | None] | None = None
    """For each block, what its hash covers besides tokens: the LoRA's name, (identifier, offset) of
    each image, the cache salt (first block only), digests of prompt embeddings."""
    group_idx: int | None = None
    """The number of the cache, of a hybrid model."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, as seen from the engine; None: unknown."""
    ownership: str | None = None
    session_id: str | None = None
    """Of the request. An engine with full reports repeats the blocks that the request reused, with
    this id."""


class RemovedEvent(msgspec.Struct, frozen=True, tag="BlockRemoved", omit_defaults=True):
    """One copy less of each of these blocks."""

    block_hashes: list[EngineHash]
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedEvent(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine's own cache was emptied; other tiers were not."""


KvEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


class KvBatch(msgspec.Struct, frozen=True):
    """The changes of one step of an engine, in order."""

    ts: float
    """Time of the step, in seconds of the engine's clock."""
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None
    unknown: int = 0
    """How many events of unknown types were left out."""
