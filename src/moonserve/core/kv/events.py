"""KV events: what vLLM and SGLang publish about their KV blocks, and the Conductor's keys of these.

The fields are vLLM's, so that msgspec reads and writes the wire's form (live.kvevents.wire).
core.kv.order puts batches into order; core.kv.stream makes changes of an index of them.

The keys are those that core.kv.keys makes for a prompt: the LoRA's name and the cache salt are
fields of the chain's namespace. If a block holds more than tokens (images, prompt embeddings), the
key before it is mixed with that, so text before an image is still shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec

from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.units import BlockKey

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


_EXTRA = b"extra"


def mixed(parent: bytes, extra: Sequence[Any]) -> bytes:
    """What replaces `parent` before a block that also holds `extra`, which is hashed as msgpack."""
    return sha256(_EXTRA + parent + msgspec.msgpack.encode(extra)).digest()


def covered(event: StoredEvent, heads: bool) -> tuple[str, str, list[list[Any]]]:
    """What an event's hashes cover besides tokens: (LoRA, salt, other contents of each block).

    heads: whether the first block heads a chain; only such a block names a salt. The last part is
    empty if no block has other contents.
    """
    lora = event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}")
    if event.extra_keys is None or not any(event.extra_keys):
        return lora, "", []
    extras = [_without(extra, event.lora_name) for extra in event.extra_keys]
    extras += [[]] * (len(event.block_hashes) - len(extras))
    salt = ""
    if heads and extras and extras[0] and isinstance(extras[0][-1], str):
        salt = extras[0].pop()
    return lora, salt, extras if any(extras) else []


def event_keys(
    plain: Namespace, root: bytes, event: StoredEvent, at: int, parent: BlockKey | None
) -> list[BlockKey]:
    """The keys of an event's blocks from number `at` on.

    plain: the namespace without LoRA and salt; root: its root; parent: the key before block `at`,
    None: that block heads its chain. Raises OverflowError on an invalid token id.
    """
    size, tokens = plain.block_size, event.token_ids
    base: bytes = root if parent is None else parent
    lora, salt, extras = covered(event, parent is None)
    if parent is None and (lora or salt):
        base = msgspec.structs.replace(plain, lora=lora, tenant_salt=salt).root()
    if not extras:
        return chain_keys(base, tokens[at * size :] if at else tokens, size)
    keys: list[BlockKey] = []
    for number in range(at, len(event.block_hashes)):
        base = mixed(base, extras[number]) if extras[number] else base
        keys += chain_keys(base, tokens[number * size : (number + 1) * size], size)
        base = keys[-1]
    return keys


def _without(extra: list[Any] | None, lora: str | None) -> list[Any]:
    """A block's extra keys without its LoRA's name, which comes first."""
    rest = list(extra or ())
    return rest[1:] if lora is not None and rest[:1] == [lora] else rest
