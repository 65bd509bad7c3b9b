"""Sizes and times as people write them: 512MiB, 30s, 100ms. Settings, commands and simulations read
them here, so that one spelling holds everywhere. Nothing here reads a clock.
"""

from __future__ import annotations

import math
import re

from moonserve.core.units import MAX_BYTES, Bytes, Micros

_SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_TIMES_US = {"us": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
MAX_US: Micros = 10**12
"""No time that a user may set is longer: 11 days."""


def parse_bytes(text: str | int) -> Bytes:
    """Read a size such as "512MiB", "2GiB" or "4096"; units are powers of 1,024.

    Raises ValueError with the remedy.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 512MiB or 2GiB")
    size = float(match[1]) * (1 << _SIZES[match[2].upper()])
    if size > MAX_BYTES:
        raise ValueError(f"{text!r} is more than any size can be: {MAX_BYTES >> 40}TiB")
    return int(size)


def parse_duration_us(given: object) -> Micros:
    """Read a time with its unit, such as "30s", "100ms", "2.5 ms" or "2m", in whole microseconds.

    Raises ValueError with the remedy; a bare number has two readings, and the error names both.
    """
    text = str(given).strip()
    if re.fullmatch(_NUMBER, text):
        if not float(text):
            raise ValueError(f"{text} must be above 0; write it like 30s or 100ms")
        raise ValueError(f"{text} has no unit; write {text}s for seconds or {text}ms")
    match = re.fullmatch(rf"{_NUMBER}\s*(us|ms|s|m|h)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write it like 30s or 100ms")
    time_us = float(match[1]) * _TIMES_US[match[2]]
    if not time_us:
        raise ValueError(f"{text!r} must be above 0; write it like 30s or 100ms")
    if not 1 <= time_us <= MAX_US:
        longest = f"{MAX_US // _TIMES_US['h']}h"
        raise ValueError(f"{text!r} must be from 1us to {longest}; write it like 30s or 100ms")
    return round(time_us)


def parse_seconds(given: object) -> float:
    """Read the value of a name that ends with its unit, such as drain_s: a number of seconds, or a
    time with its unit.

    Raises ValueError with the remedy.
    """
    text = str(given).strip()
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration_us(text) / _TIMES_US["s"]
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a time; write it like 30s or 100ms")
    return seconds


def shown_duration(time_us: Micros) -> str:
    """Write a time in s, ms or us, whichever is whole; `parse_duration_us` reads the same."""
    for unit in ("s", "ms"):
        if time_us % _TIMES_US[unit] == 0:
            return f"{time_us // _TIMES_US[unit]}{unit}"
    return f"{time_us}us"
