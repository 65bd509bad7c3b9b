"""KV events as engines tell them: what vLLM and SGLang publish of their KV caches.

The fields are vLLM's, so that msgspec reads and writes them as they are on the wire: see
live.kvevents. core.kv.order puts batches into order; core.kv.stream makes facts of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

EngineHash: TypeAlias = int | bytes
"""An engine's own name of a block: the last 8 bytes of its hash as a number, or all of it."""


def _none() -> None:
    """The default of what may be missing when read, and is written nevertheless, as vLLM does."""


class StoredEvent(msgspec.Struct, frozen=True, tag="BlockStored", omit_defaults=True):
    """A run of blocks of one chain is in the cache. The fields' order is that of the array form."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    """Of the block before; None: the first of them heads its chain."""
    token_ids: list[int]
    """Of all blocks; empty where the engine does not know them."""
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_none)
    medium: str | None = msgspec.field(default_factory=_none)
    """Where: GPU (also on a CPU engine), CPU, STORAGE; the Mooncake store says cpu; None: GPU."""
    lora_name: str | None = msgspec.field(default_factory=_none)
    extra_keys: list[list[Any] | None] | None = None
    """Of each block, what its hash covers besides tokens: the LoRA's name, (identifier, offset) of
    each image in it, the cache salt (first block only), digests of prompt embeddings."""
    group_idx: int | None = None
    """Which of a hybrid model's caches."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, as seen from the engine; None: not said."""
    ownership: str | None = None
    session_id: str | None = None
    """Of the request; an engine asked for full reports repeats with it what that request reused."""


class RemovedEvent(msgspec.Struct, frozen=True, tag="BlockRemoved", omit_defaults=True):
    """One copy less of each of these blocks."""

    block_hashes: list[EngineHash]
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedEvent(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine's own cache is empty; other tiers may not be."""


KvEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent


class KvBatch(msgspec.Struct, frozen=True):
    """What one step of an engine changed, in order."""

    ts: float
    """When, in seconds of the engine's clock."""
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None
    unknown: int = 0
    """Events of types that nobody here knows, left out."""
