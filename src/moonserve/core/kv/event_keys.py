"""The Conductor's keys of the blocks of a KV event, from its token ids and its other fields.

Called by core.kv.stream. The keys are those that core.kv.keys makes for a prompt: the LoRA's name
and the cache salt are fields of the chain's namespace. If a block holds more than tokens (images,
prompt embeddings), the key before it is mixed with that, so text before an image is still shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from moonserve.core.kv.events import StoredEvent
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.units import BlockKey

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
