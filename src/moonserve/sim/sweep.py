"""Grids of simulations: named axes with their values, made into cells that run by themselves.

For `moonserve sweep` and the paper's figures. An axis is a setting of Setup or of Tuning, or one of
the few that stand for several (see SPECIAL). Running many cells at a time is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.schedule.policies import Tuning
from moonserve.core.schedule.profiles import PROFILES, Profile, profile_from_json, profile_of
from moonserve.core.units import Micros
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.setup import ALONE, Setup
from moonserve.sim.trace import Trace, read_trace, scale

SPECIAL: Mapping[str, Any] = {
    "trace": str,
    "speed": float,
    "split": str,
    "profile": str,
    "ttft_slo_s": float | None,
    "tbt_slo_ms": float | None,
}
"""split: "8+8" is 8 prefill and 8 decode instances, "16" is 16 that do both. The objectives are
what the Conductor works for and what attainment is measured by; null is none."""

_NOT_ALONE = {
    *("prefill", "decode", "mixed", "profile", "tuning", "goal", "breakdowns", "sample_us"),
}
_TUNING = {f.name: f.type for f in msgspec.structs.fields(Tuning) if f.name != "slo"}
_SETUP = {f.name: f.type for f in msgspec.structs.fields(Setup) if f.name not in _NOT_ALONE}
AXES: Mapping[str, Any] = {**SPECIAL, **_TUNING, **_SETUP}
"""What may be varied, and the type of its values."""

_DEFAULTS: Mapping[str, Any] = {
    "speed": 1.0,
    "split": "8+8",
    "profile": "a800-loaded",
    "ttft_slo_s": 30.0,
    "tbt_slo_ms": 200.0,
    "admission": "none",
}


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
    for name, given in {**_DEFAULTS, **axes}.items():
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


def value_of(name: str, given: Any) -> Any:
    """What an axis takes from text or YAML. Raises ConfigError naming the axis."""
    if name == "cache_blocks" and given == "infinite":
        return None
    try:
        return msgspec.convert(given, AXES[name], strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{given!r} is not {_kind(AXES[name])}", name) from None


def _kind(wanted: Any) -> str:
    """The values of an axis, for people."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    parts: list[str] = []
    for part in get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,):
        if get_origin(part) is Literal:
            parts += map(str, get_args(part))
        else:
            parts.append(names.get(part, "null"))
    return " or ".join(parts)


def setup_of(values: Mapping[str, Any]) -> Setup:
    """The setup that values of axes describe; `trace` and `speed` are no part of it."""
    values = {**_DEFAULTS, **values}
    if values.get("first_token") == "decode":
        values = {"tbt_share": ALONE, "join_passes": 0.0, **values}
    goal = Slo(_objective(values, "ttft_slo_s", 1e6), _objective(values, "tbt_slo_ms", 1e3))
    prefill, decode, mixed = _split(values["split"])
    setup = Setup(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        profile=_profile(values["profile"]),
        tuning=Tuning(slo=goal, **{k: v for k, v in values.items() if k in _TUNING}),
        goal=goal,
        **{k: v for k, v in values.items() if k in _SETUP},
    )
    setup.check()
    return setup


def _objective(values: Mapping[str, Any], name: str, unit_us: float) -> Micros | None:
    value = values[name]
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{value} is no time", name)
    return None if value is None else round(value * unit_us)


def _split(text: str) -> tuple[int, int, int]:
    """Prefill, decode and mixed instances."""
    parts = text.split("+")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{text!r} must be as 8+8 (prefill and decode), or 16 (mixed)", "split")
    counts = [int(part) for part in parts]
    return (0, 0, counts[0]) if len(counts) == 1 else (counts[0], counts[1], 0)


def _profile(name: str) -> Profile:
    path = Path(name)
    if name in PROFILES or not path.is_file():
        return profile_of(name)
    return profile_from_json(path.read_bytes(), name)
