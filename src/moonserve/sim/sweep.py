"""Grids of simulations: named axes with their values, made into cells that run by themselves.

`moonserve sweep` and the paper's figures make grids. An axis is a setting of a simulation (see
sim.axes). The caller runs the cells, several at a time if it wants to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.sim.axes import AXES, DEFAULTS, setup_of, value_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Trace, read_trace, scale


class Cell(msgspec.Struct, frozen=True):
    """One simulation of a grid, by the values that make it."""

    values: dict[str, Any]
    setup: Setup

    def run(self, cpu_clock: Callable[[], float]) -> dict[str, Any]:
        """Simulate: this cell's values and the summary's figures. `cpu_clock` counts seconds."""
        began = cpu_clock()
        trace = scale(read_trace(Path(self.values["trace"])), self.values["speed"])
        sim = Simulation(trace, self.setup)
        sim.run()
        return {**self.values, **measure(sim, cpu_clock() - began).summary}


def grid(axes: Mapping[str, Any]) -> list[Cell]:
    """All combinations, the last axis fastest. A value by itself is an axis of one.

    ConfigError names the axis, and the value that it does not take.
    """
    if "trace" not in axes:
        raise ConfigError("is missing; name a file of requests", "trace")
    lists: dict[str, list[Any]] = {}
    for name, given in {**DEFAULTS, **axes}.items():
        if name not in AXES:
            raise ConfigError(f"is none of {', '.join(AXES)}", name)
        several = isinstance(given, Sequence) and not isinstance(given, str)
        lists[name] = [value_of(name, one) for one in (given if several else [given])]
        if not lists[name]:
            raise ConfigError("needs one value or more", name)
    return [
        Cell(values, setup_of(values))
        for chosen in product(*lists.values())
        for values in [dict(zip(lists, chosen, strict=True))]
    ]


def check(cells: Sequence[Cell]) -> None:
    """Read what cells read, and scale it, before the first one runs. Raises ConfigError."""
    runs = dict.fromkeys((cell.values["trace"], cell.values["speed"]) for cell in cells)
    traces: dict[str, Trace] = {}
    for name, speed in runs:
        if name == "-":
            raise ConfigError(
                "cells run by themselves, so stdin cannot be read; name a file", "trace"
            )
        if name not in traces:
            whole = read_trace(Path(name))
            traces[name] = Trace(whole.name, whole.block_size, whole.rows[-1:])
        scale(traces[name], speed)
