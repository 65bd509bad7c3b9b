"""The charts of a report as plain data, for the drawing code of moonserve.page.

sim.report makes them and puts them into its page as JSON; charts.js there draws them. Nothing here
draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_MOST_CELLS = 8_000


class Line(msgspec.Struct, frozen=True):
    """One series. `tone` names its colour: c1, c2, c3 or quiet. A y that is not a number is a gap
    in the line."""

    name: str
    tone: str
    xs: Sequence[float]
    ys: Sequence[float]


class Goal(msgspec.Struct, frozen=True):
    """A vertical line at a goal."""

    at: float
    label: str


class Band(msgspec.Struct, frozen=True):
    """One row of a heatmap: shares from 0 to 1, and what stands at its right end."""

    name: str
    tone: str
    shares: Sequence[float]
    note: str = ""


class LineChart(msgspec.Struct, frozen=True, tag_field="kind", tag="lines"):
    """One or more lines over one axis of x."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    shares: bool = False
    """Whether y goes from 0 to 100%."""
    log_x: bool = False
    goal: Goal | None = None


class HeatMap(
    msgspec.Struct,
    frozen=True,
    rename={"first": "from", "last": "to"},
    tag_field="kind",
    tag="heat",
):
    """One row for each band; a larger share is darker; x goes from `first` to `last`."""

    title: str
    bands: Sequence[Band]
    first: float
    last: float
    x_label: str
    note: str = ""


Chart: TypeAlias = LineChart | HeatMap


def columns(rows: int, most: int = 160) -> int:
    """Into how many columns a heatmap of so many rows divides its time, to stay small."""
    return max(20, min(most, _MOST_CELLS // max(1, rows)))
