"""The engine's passes: one at a time, each with a deadline, and those that warm an engine up.

The runner and the parts of prompts run passes; the worker process warms the engine up before the
runner exists. A pass that does not end within its deadline means a hung engine, which runs nothing
any more. Where a pass reports its layers, the deadline holds for each layer, without the time that
the pass waits for other workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from moonserve.core.engine.batch import Chunk, Pass, PassResult
from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.request import Sampling
from moonserve.core.schedule.cost import pass_sample
from moonserve.core.schedule.facts import PassSample, Role
from moonserve.core.units import Micros, RequestId, Tokens
from moonserve.live.ports import Engine, EngineShape, Layers

log = logging.getLogger(__name__)

_REPEATS = 2
"""How often a warm-up pass is measured again whose time looks delayed by something else."""
_SUSPECT = 2
"""A pass that took so many times as long as others of its kind looks delayed."""
_SHORT: Tokens = 48
_DECODES = (1, 1, 4, 4)
"""Batch sizes of the decode passes of a warm-up."""


class _WatchedLayers:
    """Layers that also report whether the engine made progress since the last question."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._waits = False
        self._came = False

    async def reached(self, layer: int) -> None:
        """See ports.Layers."""
        self._waits = True
        try:
            await self._layers.reached(layer)
        finally:
            self._waits = False
            self._came = True

    def progressed(self) -> bool:
        """Whether the engine has reached a layer, or waits there for others."""
        came, self._came = self._came, False
        return came or self._waits


class Passes:
    """The turns at one engine, in order of asking."""

    def __init__(self, engine: Engine, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()
        self.hung = False
        """Whether a pass did not end: its thread may never end."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run one pass. Raises EngineFailed, then see `hung`, and what `layers` raises."""
        watched = None if layers is None else _WatchedLayers(layers)
        async with self._turn:
            task = asyncio.create_task(self._engine.run(work, watched))
            await asyncio.wait({task}, timeout=self._deadline_s)
            while watched is not None and not task.done() and watched.progressed():
                await asyncio.wait({task}, timeout=self._deadline_s)
        if not task.done():
            self.hung = True
            raise EngineFailed(f"the engine did not end a pass within {self._deadline_s:g} s")
        error = task.exception()
        if isinstance(error, MoonserveError) and layers is not None:
            raise error
        if error is not None:
            log.error("a pass of %d requests failed", len(work.chunks), exc_info=error)
            raise EngineFailed(f"the engine failed: {error}") from error
        return task.result()


async def warm_up(engine: Engine, role: Role, chunk_tokens: Tokens) -> list[PassSample]:
    """Run passes of the kinds that this role will see; returns their times without the first.

    The first answers of a warm engine are not slow, and the Conductor learns the worker's costs
    from these passes. A pass that looks delayed is run again, and the shorter time counts: an
    instance that the Conductor takes for slow gets no work that could prove it wrong.
    """
    passes = list(_warm_up_passes(engine.shape, role, chunk_tokens))
    took_us = [(await engine.run(work)).elapsed_us for work in passes]
    del passes[:1], took_us[:1]
    for _ in range(_REPEATS):
        for at in _suspects(passes, took_us):
            took_us[at] = min(took_us[at], (await engine.run(passes[at])).elapsed_us)
    return [pass_sample(work, us) for work, us in zip(passes, took_us, strict=True)]


def _suspects(passes: Sequence[Pass], took_us: Sequence[Micros]) -> list[int]:
    """The indices of passes that took far longer than the quickest of their kind.

    Prefills are compared by the token, decode passes as they are.
    """
    by_kind: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for at, (work, us) in enumerate(zip(passes, took_us, strict=True)):
        tokens = sum(len(chunk.tokens) for chunk in work.chunks)
        prefill = tokens > len(work.chunks)
        by_kind[prefill].append((us / tokens if prefill else us, at))
    return sorted(
        at for kind in by_kind.values() for slow, at in kind if slow > _SUSPECT * min(kind)[0]
    )


def _warm_up_passes(shape: EngineShape, role: Role, chunk_tokens: Tokens) -> Iterator[Pass]:
    """Prefills of growing length and a second chunk; decodes of two batch sizes.

    One prefill is longer than a chunk, as a part of a prompt may be. From chunks of one length
    alone, the cost of attention inside a chunk cannot be separated from that to earlier tokens.
    """
    rows = max(_DECODES)
    short = min(_SHORT, shape.max_len // 2, shape.num_blocks // rows * shape.block_size - 1)
    if short < 1 or len(_DECODES) > shape.num_blocks:
        return
    yield Pass(tuple(_warm_up_chunk(shape, row, 0, short) for row in range(rows)))
    if role != "decode":
        longest = min(shape.max_len, shape.num_blocks * shape.block_size)
        for length in (short, chunk_tokens // 2, chunk_tokens, 3 * chunk_tokens):
            if length <= longest:
                yield Pass((_warm_up_chunk(shape, 0, 0, length),))
        if 2 * chunk_tokens <= longest:
            yield Pass((_warm_up_chunk(shape, 0, chunk_tokens, chunk_tokens),))
    if role != "prefill":
        for row in range(rows):
            yield Pass((_warm_up_chunk(shape, row, 0, short),))
        for count in _DECODES:
            yield Pass(tuple(_warm_up_chunk(shape, row, short, 1) for row in range(count)))


def _warm_up_chunk(shape: EngineShape, row: int, start: Tokens, length: Tokens) -> Chunk:
    """Some tokens of one of several imagined requests; each has its own share of the pool."""
    first = shape.num_blocks // max(_DECODES) * row
    blocks = tuple(range(first, first + -(-(start + length) // shape.block_size)))
    tokens = tuple((7 + start + i) % shape.vocab_size for i in range(length))
    return Chunk(RequestId(f"warm-up-{row}"), tokens, start, blocks, Sampling(temperature=0.0))
