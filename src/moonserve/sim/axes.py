"""The settings of a simulation by name: from text, YAML or flags to a Setup.

`moonserve simulate`, `sweep` and `plan` and the paper's figures make their setups here. A name is a
field of Setup or of Tuning, or one of the few names that stand for several fields (SPECIAL).
Nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.schedule.profiles import PROFILES, Profile, profile_from_json, profile_of
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import Micros
from moonserve.invalid import in_words
from moonserve.quantity import parse_duration_us, shown_duration
from moonserve.sim.recording import recorded_profile
from moonserve.sim.setup import ALONE, Breakdown, Setup
from moonserve.sim.trace import is_recording

SPECIAL: Mapping[str, Any] = {
    "trace": str,
    "speed": float,
    "split": str,
    "profile": str,
    "ttft_slo": str | None,
    "tbt_slo": str | None,
}
"""split: "8+8" is 8 prefill and 8 decode instances, "16" is 16 that do both; code may also give the
counts of prefill, decode and mixed instances. The Conductor works for the objectives, times such as
30s or 100ms, and attainment is measured by them; null is none."""
_OBJECTIVES = ("ttft_slo", "tbt_slo")

_NOT_ALONE = {
    *("prefill", "decode", "mixed", "profile", "tuning", "goal", "breakdowns", "sample_us"),
}
_TUNING = {f.name: f.type for f in msgspec.structs.fields(Tuning) if f.name != "slo"}
_SETUP = {f.name: f.type for f in msgspec.structs.fields(Setup) if f.name not in _NOT_ALONE}
AXES: Mapping[str, Any] = {**SPECIAL, **_TUNING, **_SETUP}
"""What may be varied, and the type of its values."""

DEFAULTS: Mapping[str, Any] = {
    "speed": 1.0,
    "split": "8+8",
    "profile": "a800-loaded",
    "ttft_slo": "30s",
    "tbt_slo": "200ms",
    "admission": "none",
}


def value_of(name: str, given: Any) -> Any:
    """What an axis takes from text or YAML. Raises ConfigError naming the axis."""
    if name == "cache_blocks" and given == "infinite":
        return None
    if name in _OBJECTIVES:
        objective_us = _objective({name: None if given == "null" else given}, name)
        return None if objective_us is None else shown_duration(objective_us)
    try:
        return msgspec.convert(given, AXES[name], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{in_words(error, AXES[name])[1]}, not {given!r}", name) from None


def setup_of(values: Mapping[str, Any], breakdowns: tuple[Breakdown, ...] = ()) -> Setup:
    """The setup that these values describe; `trace` and `speed` are no part of it."""
    values = {**DEFAULTS, **values}
    if values.get("first_token") == "decode":
        values = {"tbt_share": ALONE, "join_passes": 0.0, **values}
    goal = Slo(_objective(values, "ttft_slo"), _objective(values, "tbt_slo"))
    split = values["split"]
    prefill, decode, mixed = _split(split) if isinstance(split, str) else split
    setup = Setup(
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        profile=_profile(values["profile"]),
        tuning=Tuning(slo=goal, **{k: v for k, v in values.items() if k in _TUNING}),
        goal=goal,
        breakdowns=breakdowns,
        **{k: v for k, v in values.items() if k in _SETUP},
    )
    setup.check()
    return setup


def values_of(setup: Setup) -> dict[str, Any]:
    """The values that describe a setup without faults: `setup_of` makes it from them."""
    tuning = setup.tuning
    return {
        "split": (setup.prefill, setup.decode, setup.mixed),
        "profile": setup.profile,
        "ttft_slo": None if tuning.slo.ttft_us is None else shown_duration(tuning.slo.ttft_us),
        "tbt_slo": None if tuning.slo.tbt_us is None else shown_duration(tuning.slo.tbt_us),
        **{name: getattr(tuning, name) for name in _TUNING},
        **{name: getattr(setup, name) for name in _SETUP},
    }


def _profile(given: str | Profile) -> Profile:
    return given if isinstance(given, Profile) else read_profile(given)


def _objective(values: Mapping[str, Any], name: str) -> Micros | None:
    value = values[name]
    try:
        return None if value is None else parse_duration_us(value)
    except ValueError as error:
        raise ConfigError(str(error), name) from None


def _split(text: str) -> tuple[int, int, int]:
    """Prefill, decode and mixed instances."""
    parts = text.split("+")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{text!r} must be as 8+8 (prefill and decode), or 16 (mixed)", "split")
    counts = [int(part) for part in parts]
    return (0, 0, counts[0]) if len(counts) == 1 else (counts[0], counts[1], 0)


def read_profile(name: str) -> Profile:
    """A built-in profile, one in a file, or that of a recording. Raises ConfigError."""
    path = Path(name)
    if name not in PROFILES and is_recording(path):
        return recorded_profile(path)
    if name in PROFILES or not path.is_file():
        return profile_of(name)
    try:
        return profile_from_json(path.read_bytes(), name)
    except OSError as err:
        raise ConfigError(f"{name} cannot be read: {err.strerror}", "profile") from err
