"""Which blocks engines and pools hold that publish no KV events, inferred from what is sent there.

Guess: the driver calls it for models whose instances publish no events. Keys are then made over the
prompt's text, without a tokenizer. An instance should keep the prompts that it computed last, as
many as its KV memory holds; the `cached_tokens` of each reply shrink or restore that size. All this
is prediction: the engine's own count of reused tokens decides.

Reported: the blocks of a pool whose master publishes nothing. The gateway feeds it with the blocks
that workers or engines put there, and those that they missed there. It returns facts for the
Conductor. Several workers report the same block, late and in any order, so it returns each block
once as stored and once as removed. It knows too much until a block is missed. A miss soon after a
put is ignored, since a worker looks for a block until it is there.

What never happens here: a second copy of one block; more blocks kept than the bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from struct import iter_unpack
from typing import cast

from xxhash import xxh3_128_digest

from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.kv.index import parting
from moonserve.core.units import BlockKey, Bytes, Micros, SegmentId, Tokens

_BYTES_PER_TOKEN = 4.0
"""About that of English text; each model's own ratio is learnt."""
_LEAST_BYTES, _MOST_BYTES = 0.5, 16.0
"""Limits for any text. Prompts with images or cut prompts are outside, and teach nothing."""
_LEARNT = 16
"""Prompts after which the size of a piece follows the learnt ratio."""
_STRAY = 1.25
"""How far the size of a piece may be off. Beyond that it changes, and earlier keys are useless."""
_SHRINK = 0.9
_GROW = 1.02
_LEAST = 0.1


def text_keys(root: bytes, text: bytes, piece: Bytes) -> list[BlockKey]:
    """The keys of every full piece of `text`, chained like those of blocks."""
    parent = BlockKey(root[:16])
    # a call of BlockKey for each would cost half as much as the digest
    digest = cast(Callable[[bytes], BlockKey], xxh3_128_digest)
    pieces = iter_unpack(f"{piece}s", memoryview(text)[: len(text) // piece * piece])
    return [parent := digest(parent + one) for (one,) in pieces]


class Ratio:
    """Bytes of text per token of one model, and the size of a piece that stands for a block."""

    def __init__(self, block_size: Tokens) -> None:
        self._block_size = block_size
        self._per_token = _BYTES_PER_TOKEN
        self._seen = 0
        self.piece: Bytes = round(block_size * _BYTES_PER_TOKEN)
        """Bytes of text that stand for a block."""

    def tokens(self, size: Bytes) -> Tokens:
        """The likely number of tokens in `size` bytes of text: at least one."""
        return max(1, round(size / self._per_token))

    def learn(self, size: Bytes, tokens: Tokens) -> None:
        """Learn that `size` bytes of text were `tokens` tokens, as an engine counted."""
        if not tokens or not _LEAST_BYTES <= size / tokens <= _MOST_BYTES:
            return
        self._seen = min(self._seen + 1, 64)
        self._per_token += (size / tokens - self._per_token) / (1 + self._seen)
        fitting = max(1, round(self._block_size * self._per_token))
        strays = not 1 / _STRAY < fitting / self.piece < _STRAY
        if self._seen >= _LEARNT and strays:
            self.piece = fitting


class _GuessedRun:
    """Successive keys of a chain that were used last by the same prompt."""

    __slots__ = ("after", "before", "keys")

    def __init__(self, keys: tuple[BlockKey, ...], before: _GuessedRun | None) -> None:
        self.keys = keys
        self.before = before
        self.after: dict[BlockKey, _GuessedRun] = {}
        """The runs that follow, by their first key."""


class Guess:
    """The keys that one start of one instance should hold.

    They stand in runs: a prompt costs a step for each run of its chain, not for each key. No key is
    held without those before it in its chain, since the end of a chain is evicted first.
    """

    def __init__(self, segment: SegmentId, epoch: int, kv_blocks: int) -> None:
        self.epoch = epoch
        self._segment = segment
        self._most = kv_blocks
        self._share = 1.0
        self._heads: dict[BlockKey, _GuessedRun] = {}
        """The runs that begin chains, by their first key."""
        self._order: OrderedDict[_GuessedRun, None] = OrderedDict()
        """The latest used is last; a run comes before the one that it follows."""
        self._held = 0

    def __len__(self) -> int:
        return self._held

    @property
    def room(self) -> int:
        """How many keys the instance should keep."""
        return max(1, round(self._most * self._share))

    def served(self, keys: Sequence[BlockKey]) -> list[BlocksStored | BlocksRemoved]:
        """The instance has computed or loaded this chain. Returns the facts for the index."""
        keys = keys[: self.room]
        facts: list[BlocksStored | BlocksRemoved] = []
        way: list[_GuessedRun] = []
        at = 0
        last: _GuessedRun | None = None
        after = self._heads
        while at < len(keys):
            run = after.get(keys[at])
            if run is None:
                new = tuple(keys[at:])
                run = after[new[0]] = _GuessedRun(new, last)
                self._held += len(new)
                parent = keys[at - 1] if at else None
                facts.append(BlocksStored(self._segment, new, parent, "device", self.epoch))
            size = parting(run.keys, 0, keys, at, len(run.keys))
            if size < len(run.keys):
                run = after[keys[at]] = self._front(run, size)
            way.append(run)
            last = run
            at += size
            after = run.after
        for run in reversed(way):
            self._order[run] = None
            self._order.move_to_end(run)
        return facts + self._evicted()

    def _front(self, run: _GuessedRun, size: int) -> _GuessedRun:
        """Divide a run: its first `size` keys, which are used now, become a run of their own."""
        front = _GuessedRun(run.keys[:size], run.before)
        run.keys = run.keys[size:]
        run.before = front
        front.after[run.keys[0]] = run
        return front

    def said(self, predicted: Tokens, cached: Tokens) -> list[BlocksStored | BlocksRemoved]:
        """The instance reused `cached` tokens of `predicted`. Returns the facts for the index.

        If it reused less than half, it keeps less than was guessed.
        """
        if cached * 2 < predicted:
            self._share = max(_LEAST, self._share * _SHRINK)
        elif predicted:
            self._share = min(1.0, self._share * _GROW)
        return self._evicted()

    def _evicted(self) -> list[BlocksStored | BlocksRemoved]:
        gone: list[BlockKey] = []
        over = self._held - self.room
        while len(gone) < over:
            run = next(iter(self._order))
            left = max(0, len(run.keys) - over + len(gone))
            gone += reversed(run.keys[left:])
            if not left:
                del self._order[run]
                siblings = self._heads if run.before is None else run.before.after
                del siblings[run.keys[0]]
            run.keys = run.keys[:left]
        if not gone:
            return []
        self._held -= len(gone)
        return [BlocksRemoved(self._segment, tuple(gone), "device", self.epoch)]


_CROSSING_US: Micros = 10_000_000


class Reported:
    """The blocks of one pool, under one holder. If there are too many, the oldest reports go."""

    def __init__(self, holder: SegmentId, max_blocks: int = 1 << 18) -> None:
        self._holder = holder
        self._max_blocks = max_blocks
        self._known: OrderedDict[BlockKey, Micros] = OrderedDict()
        """Block -> when it was last put there."""

    def __len__(self) -> int:
        """How many blocks are there, by the reports."""
        return len(self._known)

    def take(self, now_us: Micros, event: BlockEvent) -> list[BlockEvent]:
        """The facts that follow from one event. An event of another holder is such a fact itself.

        Of this pool, only stored and removed blocks are reported.
        """
        if event.segment != self._holder:
            return [event]
        if isinstance(event, BlocksStored):
            return self.stored(now_us, event.keys, event.parent)
        return self.removed(now_us, event.keys) if isinstance(event, BlocksRemoved) else []

    def stored(
        self, now_us: Micros, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> list[BlockEvent]:
        """A run of a chain was put there; `parent` is the key before it. Returns the facts."""
        runs: list[tuple[BlockKey | None, list[BlockKey]]] = []
        run: list[BlockKey] = []
        for key in keys:
            if key in self._known:
                run = []
            else:
                if not run:
                    runs.append((parent, run))
                run.append(key)
            self._known[key] = now_us
            parent = key
        for key in reversed(keys):  # a chain loses its tail first
            self._known.move_to_end(key)
        surplus = len(self._known) - self._max_blocks
        gone = [self._known.popitem(last=False)[0] for _ in range(surplus)]
        made: list[BlockEvent] = [
            BlocksStored(self._holder, tuple(run), parent, "dram", 0) for parent, run in runs
        ]
        return made + self._removal(gone)

    def removed(self, now_us: Micros, keys: Iterable[BlockKey]) -> list[BlockEvent]:
        """These blocks were looked for, and were not there. Returns the facts."""
        late_us = now_us - _CROSSING_US
        gone = [key for key in dict.fromkeys(keys) if self._known.get(key, now_us) <= late_us]
        for key in gone:
            del self._known[key]
        return self._removal(gone)

    def _removal(self, keys: list[BlockKey]) -> list[BlockEvent]:
        return [BlocksRemoved(self._holder, tuple(keys), "dram", 0)] if keys else []
