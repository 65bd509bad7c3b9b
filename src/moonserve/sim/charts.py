"""Charts as inline SVG, coloured by the page's CSS variables so that light and dark both read well.

sim.report gives plain data and gets text. It draws lines and heatmaps, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

_WIDTH, _HEIGHT = 520.0, 240.0
_LEFT = 48.0
_RIGHT = 14.0
_TOP = 10.0
_BOTTOM = 38.0
_SHADES = 12
_MOST_CELLS = 8_000


class Line(msgspec.Struct, frozen=True):
    """One series. `tone` names its colour: c1, c2, c3 or quiet."""

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


class _Scale:
    """Data to pixels along one axis."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self.low, self.log = low, log
        self.high = max(high, low + max(1e-9, abs(low) * 1e-9))  # a single value needs a range too
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self._start + (self._end - self._start) * (value - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """Round numbers within the range, at most about so many."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
            return [tick for tick in found if self.low <= tick <= self.high]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step + 1e-9)
        ticks = [round(k * step, 9) for k in range(first, last + 1)]
        # no two ticks have the same text
        return list({number(tick): tick for tick in ticks}.values())


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    shares: bool = False,
    log_x: bool = False,
    goal: Goal | None = None,
) -> str:
    """A figure with one or more lines over one axis of x. `shares`: y goes from 0 to 100%."""
    xs = [x for line in lines for x in line.xs if x > 0 or not log_x]
    ys = [y for line in lines for y in line.ys if not math.isnan(y)]
    if not xs or not ys:
        return _figure(title, "<p class='empty'>nothing to show</p>")
    ends = [*xs, goal.at * 1.1] if goal else xs
    x_of = _Scale(min(ends), max(ends), _LEFT, _WIDTH - _RIGHT, log_x)
    top = 1.0 if shares else max(ys) * 1.05 or 1.0
    y_of = _Scale(0.0, top, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f"<svg viewBox='0 0 {_WIDTH:g} {_HEIGHT:g}' role='img' aria-label='{escape(title)}'>",
        *_y_axis(y_of, shares),
        *_x_axis(x_of, _HEIGHT - _BOTTOM, x_label),
    ]
    if goal is not None:
        parts += _goal(goal, x_of(goal.at))
    parts += [_path(line, x_of, y_of) for line in lines]
    keys = [f"<span><i class='{ln.tone}'></i>{escape(ln.name)}</span>" for ln in lines]
    legend = f"<div class='legend'>{escape(y_label)}{''.join(keys)}</div>"
    return _figure(title, legend + "\n".join([*parts, "</svg>"]))


def heatmap(
    title: str, bands: Sequence[Band], first: float, last: float, x_label: str, note: str = ""
) -> str:
    """One row per band; a larger share is darker; x runs from `first` to `last`."""
    if not bands or not bands[0].shares:
        return _figure(title, "<p class='empty'>nothing to show</p>")
    width = 1080.0
    left = 56.0
    right = 46.0
    row = min(18.0, max(5.0, 480.0 / len(bands)))
    every = math.ceil(11.0 / row)  # so that names do not overlap
    height = row * len(bands)
    x_of = _Scale(first, last, left, width - right)
    parts = [f"<svg viewBox='0 0 {width:g} {height + 42:g}' role='img' aria-label='{title}'>"]
    for at, band in enumerate(bands):
        y = at * row
        middle = y + row / 2 + 4
        parts += _cells(band, x_of, y, row)
        if at % every == 0:
            parts.append(f"<text x='{left - 6:g}' y='{middle:g}' class='end'>{band.name}</text>")
            parts.append(f"<text x='{width - right + 6:g}' y='{middle:g}'>{band.note}</text>")
    parts += _x_axis(x_of, height + 2, x_label)
    below = f"<p class='note'>{escape(note)}</p>" if note else ""
    return _figure(title, "\n".join([*parts, "</svg>"]) + below)


def columns(rows: int, most: int = 160) -> int:
    """Into how many columns a heatmap of so many rows divides its time, to stay small."""
    return max(20, min(most, _MOST_CELLS // max(1, rows)))


def number(value: float) -> str:
    """A tick's text."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def _cells(band: Band, x_of: _Scale, y: float, row: float) -> list[str]:
    """A band's rectangles; neighbours of the same shade are one."""
    step = (x_of.high - x_of.low) / len(band.shares)
    shades = [round(min(1.0, max(0.0, share)) * _SHADES) for share in band.shares]
    parts: list[str] = []
    begin = 0
    for at in range(1, len(shades) + 1):
        if at < len(shades) and shades[at] == shades[begin]:
            continue
        x = x_of(x_of.low + begin * step)
        end = x_of(x_of.low + at * step)
        shade = 0.05 + 0.95 * shades[begin] / _SHADES
        parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{end - x:.1f}' height='{row - 1:.1f}' "
            f"class='{band.tone}' fill-opacity='{shade:.2f}'/>"
        )
        begin = at
    return parts


def _y_axis(y_of: _Scale, shares: bool) -> list[str]:
    parts = []
    for tick in y_of.ticks(5):
        y = y_of(tick)
        text = f"{tick:.0%}" if shares else number(tick)
        parts.append(f"<path d='M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}' class='grid'/>")
        parts.append(f"<text x='{_LEFT - 6:g}' y='{y + 4:.1f}' class='end'>{text}</text>")
    return parts


def _x_axis(x_of: _Scale, y: float, label: str) -> list[str]:
    start = x_of(x_of.low)
    end = x_of(x_of.high)
    parts = [f"<path d='M{start:.1f} {y:g}H{end:.1f}' class='axis'/>"]
    for tick in x_of.ticks(max(5, round((end - start) / 70))):
        x = x_of(tick)
        parts.append(f"<path d='M{x:.1f} {y:g}v4' class='axis'/>")
        parts.append(f"<text x='{x:.1f}' y='{y + 16:g}' class='mid'>{number(tick)}</text>")
    parts.append(f"<text x='{end:.1f}' y='{y + 32:g}' class='end'>{escape(label)}</text>")
    return parts


def _goal(goal: Goal, x: float) -> list[str]:
    side, nudge = ("end", -5) if x > _WIDTH / 2 else ("begin", 5)
    low = _HEIGHT - _BOTTOM
    place = f"x='{x + nudge:.1f}' y='{low - 8:g}' class='{side} goal'"
    return [
        f"<path d='M{x:.1f} {_TOP:g}V{low:g}' class='goal'/>",
        f"<text {place}>{escape(goal.label)}</text>",
    ]


def _path(line: Line, x_of: _Scale, y_of: _Scale) -> str:
    """A polyline with gaps where y is not a number."""
    drawn, text = False, []
    for x, y in zip(line.xs, line.ys, strict=True):
        if math.isnan(y) or (x_of.log and x <= 0):
            drawn = False
            continue
        text.append(f"{'L' if drawn else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
        drawn = True
    return f"<path d='{''.join(text)}' class='line {line.tone}'/>"


def _figure(title: str, body: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}</figure>"
