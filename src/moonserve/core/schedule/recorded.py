"""One row of a recording: a row of a Mooncake trace, with all that is known of the request.

`live.record` writes rows. The simulator reads the first part of each (sim.trace), and anybody may
read the rest: it is what `explain` shows. A row has no text and no token ids. Its block ids are
hashes of the blocks' keys with a secret, so that nobody can find a prompt by guessing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from moonserve.core.schedule.explain import Explanation
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.shown import explained
from moonserve.core.units import BlockKey, Micros, Tokens

_ID_BYTES = 8


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
