"""The engine, one pass at a time: who needs one waits for the turn. Used by the runner, and by the
parts of prompts that run beside its batch.

A pass that does not end within its deadline means a hung engine: nothing can be run any more. Where
a pass tells of its layers, each may take as long; what it waits there for ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TypeVar

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.schedule.cost import pass_sample
from moonserve.core.schedule.facts import PassSample
from moonserve.core.units import Micros
from moonserve.live.ports import Engine, Layers

log = logging.getLogger(__name__)

_MAX_SAMPLES = 256


T = TypeVar("T")


def taken(samples: deque[T]) -> tuple[T, ...]:
    """All there are, which then are there no more."""
    whole = tuple(samples)
    samples.clear()
    return whole


class _Told:
    """Layers, and whether the engine has come on to one since it was last asked."""

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
            self._waits, self._came = False, True

    def comes_on(self) -> bool:
        """Whether it has, or waits for others."""
        came, self._came = self._came, False
        return came or self._waits


class Passes:
    """Turns at one engine, in order of asking."""

    def __init__(self, engine: Engine, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()
        self.hung = False
        """Whether a pass does not end: its thread may never."""
        self.samples: deque[PassSample] = deque(maxlen=_MAX_SAMPLES)
        """Measured, oldest first; taken by the heartbeat."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run one pass. Raises what `layers` does, and EngineFailed; then see `hung`."""
        told = None if layers is None else _Told(layers)
        async with self._turn:
            task = asyncio.create_task(self._engine.run(work, told))
            await asyncio.wait({task}, timeout=self._deadline_s)
            while told is not None and not task.done() and told.comes_on():
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

    def measured(self, work: Pass, elapsed_us: Micros) -> None:
        """So long did the engine compute."""
        self.samples.append(pass_sample(work, elapsed_us))
