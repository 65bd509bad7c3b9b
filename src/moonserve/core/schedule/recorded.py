"""What a recording has: rows of a Mooncake trace, with all that is known of each request, and the
cluster that served them.

`live.record` writes both. The simulator reads the first part of each (sim.trace), and anybody may
read the rest: it is what `explain` shows. A row has no text and no token ids. Its block ids are
hashes of the blocks' keys with a secret, so that nobody can find a prompt by guessing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from moonserve.core.schedule.explain import Explanation
from moonserve.core.schedule.facts import Connector, InstanceInfo, Role
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.shown import explained
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import BlockKey, Bytes, InstanceId, Micros, Tokens

CLUSTER_FILE = "cluster.json"
"""The file of a recording that has the cluster."""
_ID_BYTES = 8


class RecordedInstance(msgspec.Struct, frozen=True):
    """What a simulation needs to know of an instance; the fields are those of InstanceInfo."""

    id: InstanceId
    role: Role
    connector: Connector
    block_size: Tokens
    block_bytes: Bytes
    kv_blocks: int
    max_seqs: int
    chunk_tokens: Tokens
    segment_bytes: Bytes
    layers: int

    @staticmethod
    def of(info: InstanceInfo) -> RecordedInstance:
        """The part of an instance's own report that is recorded: no addresses."""
        names = (name for name in RecordedInstance.__struct_fields__ if name != "block_size")
        return RecordedInstance(
            block_size=info.namespace.block_size, **{name: getattr(info, name) for name in names}
        )


class RecordedCluster(msgspec.Struct, frozen=True):
    """The cluster that served recorded requests, as it was when it could last serve."""

    instances: list[RecordedInstance]
    tuning: Tuning


def cluster_of(infos: Iterable[InstanceInfo], tuning: Tuning) -> RecordedCluster | None:
    """What is recorded of a cluster; None: it cannot serve, for want of one role."""
    instances = [RecordedInstance.of(info) for info in infos]
    roles = {it.role for it in instances}
    if "both" in roles or {"prefill", "decode"} <= roles:
        return RecordedCluster(instances, tuning)
    return None


class RecordedRequest(Explanation, kw_only=True):
    """A trace row (its first five fields), followed by the explanation of the request."""

    timestamp: int
    """When it arrived, in ms since 1970. Rows are in the order of their ends."""
    input_length: Tokens
    output_length: Tokens
    """Generated tokens, at least 1. Of a request that was not served: `output_guess`."""
    hash_ids: list[int]
    """One for each block of the prompt, the last, partial one included."""
    block_size: Tokens
    output_guessed: bool


def recorded(
    record: Record,
    keys: Sequence[BlockKey],
    key_tokens: Tokens,
    block_size: Tokens,
    salt: bytes,
    clock_ms: Callable[[Micros], int],
    output_guess: Tokens,
) -> RecordedRequest:
    """The row of one request.

    keys: of the full blocks of its prompt, each of `key_tokens` tokens; block_size: of the row, a
    multiple of that. salt: the secret, at most 64 bytes. clock_ms: see `shown.explained`.
    output_guess: for a request that was not served, how long its answer might have been.
    """
    shown = explained(record, clock_ms)
    shown.said = None  # the instance's own words, which may quote a prompt
    served = record.is_good is not None
    return RecordedRequest(
        **{name: getattr(shown, name) for name in Explanation.__struct_fields__},
        timestamp=clock_ms(record.arrived_us),
        input_length=record.prompt_tokens,
        output_length=max(1, record.measured.tokens if served else output_guess),
        hash_ids=_ids(record, keys, key_tokens, block_size, salt),
        block_size=block_size,
        output_guessed=not served,
    )


def _ids(
    record: Record,
    keys: Sequence[BlockKey],
    key_tokens: Tokens,
    block_size: Tokens,
    salt: bytes,
) -> list[int]:
    """A key names all tokens up to the end of its block: the last key in a larger block names that.

    Blocks without a key, such as the last, partial one, are shared with no other request.
    """
    step = block_size // key_tokens
    ids = [_id(key, salt) for key in keys[step - 1 :: step]]
    missing = -(-record.prompt_tokens // block_size) - len(ids)
    own = f"{record.id}/{record.arrived_us}/"
    return ids + [_id(f"{own}{number}".encode(), salt) for number in range(missing)]


def _id(name: bytes, salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=_ID_BYTES, key=salt).digest())
