"""An Engine without a model: it detects wrong KV, and needs almost no computation.

Each KV slot holds its token and its position. The next token is a hash of the whole context, *read
back from the blocks*. So KV that is missing, stale, misplaced or another request's changes every
token after it; `reference` returns the right tokens. Tests and `--engine fake` use it. It does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from moonserve.core.engine.batch import Chunk, Pass, PassResult
from moonserve.core.errors import BadRequest
from moonserve.core.request import Sampling, Shaping, TokenLogprobs
from moonserve.core.schedule.cost import Cost, pass_sample
from moonserve.core.units import Micros, RequestId, Tokens
from moonserve.live.clock import LoopClock
from moonserve.live.ports import Clock, EngineShape, Layers

_SLOT_BYTES = 8
_LAYERS = 8
"""A pass reports so many layers, one after the other. It divides the bytes of every block."""
GREEDY = Sampling(temperature=0.0)


def fake_cost(
    base_us: Micros = 200, prefill_us_per_token: Micros = 10, decode_us_per_seq: Micros = 100
) -> Cost:
    """Return the cost of its passes: a base for prefill, one for decode, and a time per token."""
    return Cost((base_us, prefill_us_per_token, 0, 0, base_us, decode_us_per_seq, 0), learns=False)


class FakeEngine:
    """The fake engine. A slot is u32 token, u32 position + 1, little-endian; 0 is never written.

    words: the range of ids of its tokens; with the real tokenizer the default gives English words.
    eos_one_in: on average one token in this many is eos_token_ids[0]; None: no token.
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
        self.shape = EngineShape(
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
        self._memory = memoryview(bytearray(num_blocks * self.shape.block_bytes))

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Write every chunk's slots, wait for the pass's cost, and sample from the blocks."""
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
        elapsed_us = self._clock.now_us() - began_us  # measured: it may be longer
        return PassResult(sampled, elapsed_us, self._logprobs(work, sampled))

    def block(self, index: int) -> memoryview:
        """Return the writable bytes of one pool block."""
        size = self.shape.block_bytes
        assert 0 <= index < self.shape.num_blocks
        return self._memory[index * size : (index + 1) * size]

    async def start_profile(self) -> None:
        """See ports.Engine."""
        raise BadRequest(
            "the fake engine computes nothing to profile; start it with --engine torch"
        )

    async def stop_profile(self, file: Path) -> None:
        """See ports.Engine."""
        raise AssertionError("no profile has started")

    async def close(self) -> None:
        """Close the engine; it has nothing to free."""

    def reference(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY
    ) -> list[int]:
        """Return the `count` tokens that every correct run must give after `prompt`."""
        context = b"".join(_slot(token, at) for at, token in enumerate(prompt))
        made: list[int] = []
        for at in range(len(prompt), len(prompt) + count):
            made.append(self._sample(context, sampling))
            context += _slot(made[-1], at)
        return made

    def _write(self, chunk: Chunk) -> None:
        size = self.shape.block_size
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
        if sampling.shaping is not None:
            return self._shaped(digest, len(context) // _SLOT_BYTES, sampling.shaping)
        if self._eos_one_in is not None and digest % self._eos_one_in == 0:
            return self.shape.eos_token_ids[0]
        return self._words[(digest >> 16) % len(self._words)]

    def _shaped(self, digest: int, position: Tokens, shaping: Shaping) -> int:
        """A token under biases: one of those with a positive bias if there are such, and none with
        a negative one or a penalty."""
        barred = {token for token, added in shaping.bias if added < 0} | _penalised(shaping)
        if position < shaping.barred_until:
            barred.update(shaping.barred)
        if shaping.allowed:
            allowed = _set_bits(shaping.allowed)
            return allowed[(digest >> 16) % len(allowed)]
        eos = self.shape.eos_token_ids[0]
        if self._eos_one_in is not None and digest % self._eos_one_in == 0 and eos not in barred:
            return eos
        wanted = [token for token, added in shaping.bias if added > 0 and token not in barred]
        words = wanted or [word for word in self._words if word not in barred]
        return words[(digest >> 16) % len(words)]

    def _logprobs(
        self, work: Pass, sampled: Mapping[RequestId, int]
    ) -> dict[RequestId, TokenLogprobs] | None:
        """A made up number for each token that wants one: a function of the token alone."""
        found = {}
        for chunk in work.chunks:
            shaping = None if chunk.sampling is None else chunk.sampling.shaping
            if shaping is not None and shaping.logprobs is not None:
                found[chunk.request] = self.logprobs(sampled[chunk.request], shaping.logprobs)
        return found or None

    def logprobs(self, token: int, most: int) -> TokenLogprobs:
        """What is reported with a token: it is the likeliest one, before the tokens after it."""
        first = -(token % 64) / 64
        top = [((token + at) % self.shape.vocab_size, first - at) for at in range(most)]
        return TokenLogprobs(first, tuple(top))


def _penalised(shaping: Shaping) -> set[int]:
    """The tokens that have a penalty."""
    penalties, counts = shaping.penalties, shaping.counts
    if penalties is None or counts is None:
        return set()
    seen = zip(memoryview(counts.ids).cast("q"), memoryview(counts.counts).cast("q"), strict=True)
    for_text = max(penalties.presence, penalties.frequency) > 0
    return {id for id, count in seen if penalties.repetition > 1 or (for_text and count)}


def _set_bits(mask: bytes) -> list[int]:
    return [id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1]


def _slot(token: int, position: int) -> bytes:
    return token.to_bytes(4, "little") + (position + 1).to_bytes(4, "little")
