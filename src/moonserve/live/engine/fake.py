"""An Engine without a model: a detector of wrong KV that costs nothing to run.

Each KV slot really holds its token and position, and the next token is a hash of the whole context
*read back from the blocks*. KV that is missing, stale, misplaced or another request's changes every
token after it; `reference` says what they must be. For tests and `--engine fake`; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from moonserve.core.engine.batch import Chunk, Pass, PassResult
from moonserve.core.request import Sampling
from moonserve.core.schedule.cost import Cost, pass_sample
from moonserve.core.units import Micros, Tokens
from moonserve.live.clock import LoopClock
from moonserve.live.ports import Clock, EngineShape, Layers

_SLOT_BYTES = 8
_LAYERS = 8
"""Of nothing in particular, but that they come one after the other; divides all blocks."""
GREEDY = Sampling(temperature=0.0)


def fake_cost(
    base_us: Micros = 200, prefill_us_per_token: Micros = 10, decode_us_per_seq: Micros = 100
) -> Cost:
    """How long its passes take: a base for prefill, one for decode, and so much a token."""
    return Cost((base_us, prefill_us_per_token, 0, 0, base_us, decode_us_per_seq, 0), learns=False)


class FakeEngine:
    """See the module. A slot is u32 token, u32 position + 1, little-endian; 0 is never written.

    words: the range of ids that tokens are taken from; with the real tokenizer its default reads
    as English words. eos_one_in: one token in so many is eos_token_ids[0]; None: never.
    """

    def __init__(
        self,
        *,
        block_size: Tokens = 32,
        num_blocks: int = 256,
        max_len: Tokens = 8192,
        vocab_size: int = 49152,
        words: range = range(1000, 8000),
        eos_token_ids: tuple[int, ...] = (2,),
        eos_one_in: int | None = None,
        cost: Cost | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert words.stop <= vocab_size, "words outside the vocabulary"
        self._shape = EngineShape(
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=block_size * _SLOT_BYTES,
            vocab_size=vocab_size,
            max_len=max_len,
            layout="fake/blk,tok/u32token,u32position+1",
            revision=f"fake-{words.start}-{words.stop}-{eos_one_in}",
            eos_token_ids=eos_token_ids,
            layers=_LAYERS,
        )
        self._words = words
        self._eos_one_in = eos_one_in
        self._cost = cost or fake_cost()
        self._clock = clock or LoopClock()
        self._memory = memoryview(bytearray(num_blocks * self._shape.block_bytes))

    @property
    def shape(self) -> EngineShape:
        """The pool's shape."""
        return self._shape

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Write every chunk's slots, take the time it costs, sample from what the blocks say."""
        began_us = self._clock.now_us()
        for chunk in work.chunks:
            self._write(chunk)
        cost_us = self._cost.pass_of_us(pass_sample(work, 0))
        if layers is None:
            await self._clock.sleep_us(cost_us)
        else:
            for layer in range(_LAYERS):
                await self._clock.sleep_us(cost_us // _LAYERS)
                await layers.reached(layer)
        sampled = {
            chunk.request: self._sample(self._context(chunk), chunk.sampling)
            for chunk in work.chunks
            if chunk.sampling is not None
        }
        return PassResult(sampled, self._clock.now_us() - began_us)  # on a busy machine, longer

    def block(self, index: int) -> memoryview:
        """The writable bytes of one pool block."""
        size = self._shape.block_bytes
        assert 0 <= index < self._shape.num_blocks
        return self._memory[index * size : (index + 1) * size]

    async def close(self) -> None:
        """Nothing to free."""

    def reference(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        """The `count` tokens that a right run of any shape must give after `prompt`."""
        context = b"".join(_slot(token, at) for at, token in enumerate(prompt))
        made: list[int] = []
        for at in range(len(prompt), len(prompt) + count):
            made.append(self._sample(context, sampling))
            context += _slot(made[-1], at)
        return made

    def _write(self, chunk: Chunk) -> None:
        size = self._shape.block_size
        for at, token in enumerate(chunk.tokens, chunk.start):
            offset = at % size * _SLOT_BYTES
            block = self.block(chunk.blocks[at // size])
            block[offset : offset + _SLOT_BYTES] = _slot(token, at)

    def _context(self, chunk: Chunk) -> bytes:
        end = (chunk.start + len(chunk.tokens)) * _SLOT_BYTES
        return b"".join(self.block(index) for index in chunk.blocks)[:end]

    def _sample(self, context: bytes, sampling: Sampling) -> int:
        salt = b"" if sampling.temperature == 0 else b"%d" % sampling.seed
        digest = int.from_bytes(sha256(context + salt).digest()[:8], "little")
        if self._eos_one_in is not None and digest % self._eos_one_in == 0:
            return self._shape.eos_token_ids[0]
        return self._words[(digest >> 16) % len(self._words)]


def _slot(token: int, position: int) -> bytes:
    return token.to_bytes(4, "little") + (position + 1).to_bytes(4, "little")
