"""What engines hold that tell no KV events: guessed from what was sent to them.

For the relay, where a model's instances tell nothing: keys are then made over the prompt's text,
with no tokenizer, and each instance is taken to keep the prompts it computed, the latest first, as
many as its KV memory holds. What `cached_tokens` says of each request shrinks or restores that
size. All this is prediction: what an engine says it reused is what counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.units import BlockKey, Bytes, SegmentId, Tokens

_BYTES_PER_TOKEN = 4.0
"""Of English text, about; each model's own is learnt."""
_LEAST_BYTES, _MOST_BYTES = 0.5, 16.0
"""Of any text; a prompt with images, or of many cut short, says nothing of it."""
_LEARNT = 16
"""Prompts after which the pieces follow what was learnt."""
_STRAY = 1.25
"""How far off the size of a piece may be; past it, it is made anew and what was known is no use."""
_SHRINK, _GROW, _LEAST = 0.9, 1.02, 0.1


def text_keys(root: bytes, text: bytes, piece: Bytes) -> list[BlockKey]:
    """The keys of every full piece of `text`, chained as those of blocks are."""
    parent, keys = root[:16], []
    for at in range(piece, len(text) + 1, piece):
        parent = xxh3_128_digest(parent + text[at - piece : at])
        keys.append(BlockKey(parent))
    return keys


class Ratio:
    """Bytes of text per token of one model, and the piece of text that stands for a block."""

    def __init__(self, block_size: Tokens) -> None:
        self._block_size = block_size
        self._per_token = _BYTES_PER_TOKEN
        self._seen = 0
        self.piece: Bytes = round(block_size * _BYTES_PER_TOKEN)
        """What a block comes to, in bytes of text."""

    def tokens(self, size: Bytes) -> Tokens:
        """How many tokens so much text is likely to be: at least one."""
        return max(1, round(size / self._per_token))

    def learn(self, size: Bytes, tokens: Tokens) -> None:
        """So much text was so many tokens, as an engine counted."""
        if not tokens or not _LEAST_BYTES <= size / tokens <= _MOST_BYTES:
            return
        self._seen = min(self._seen + 1, 64)
        self._per_token += (size / tokens - self._per_token) / (1 + self._seen)
        fitting = max(1, round(self._block_size * self._per_token))
        strays = not 1 / _STRAY < fitting / self.piece < _STRAY
        if self._seen >= _LEARNT and strays:
            self.piece = fitting


class Guess:
    """What one start of one instance is taken to hold: keys, the latest used last."""

    def __init__(self, segment: SegmentId, epoch: int, kv_blocks: int) -> None:
        self.epoch = epoch
        self._segment = segment
        self._most = kv_blocks
        self._share = 1.0
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def room(self) -> int:
        """How many keys it is taken to keep."""
        return max(1, round(self._most * self._share))

    def served(self, keys: Sequence[BlockKey]) -> list[BlocksStored | BlocksRemoved]:
        """It has just computed this chain, or loaded it: what the index is to be told."""
        told: list[BlocksStored | BlocksRemoved] = []
        held, at = self._keys, 0
        keys = keys[: self.room]
        while at < len(keys):
            stop = at
            while stop < len(keys) and keys[stop] not in held:
                stop += 1
            if stop > at:
                parent = keys[at - 1] if at else None
                new = tuple(keys[at:stop])
                told.append(BlocksStored(self._segment, new, parent, "device", self.epoch))
            at = stop + 1
        for key in reversed(keys):  # a chain is given up from its end
            held[key] = None
            held.move_to_end(key)
        if gone := self._evicted():
            told.append(BlocksRemoved(self._segment, gone, "device", self.epoch))
        return told

    def said(self, predicted: Tokens, cached: Tokens) -> list[BlocksStored | BlocksRemoved]:
        """It reused so much where so much was predicted: what the index is to be told.

        Less than half means that it keeps less than was taken.
        """
        if cached * 2 < predicted:
            self._share = max(_LEAST, self._share * _SHRINK)
        elif predicted:
            self._share = min(1.0, self._share * _GROW)
        if gone := self._evicted():
            return [BlocksRemoved(self._segment, gone, "device", self.epoch)]
        return []

    def _evicted(self) -> tuple[BlockKey, ...]:
        over = len(self._keys) - self.room
        return tuple([self._keys.popitem(last=False)[0] for _ in range(over)])
