"""The report's parts: charts that show what they are given, and why a request was slow."""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.charts import Band, Goal, Line, columns, heatmap, line_chart
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.report import report, why_slow
from moonserve.sim.setup import Breakdown, Setup
from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import Row, Trace


def ticks(svg: str) -> list[str]:
    """The numbers along the axis of x."""
    return re.findall(r"class='mid'>([^<]*)<", svg)


def points(svg: str) -> list[tuple[float, float]]:
    """Where the (only) line goes."""
    (path,) = re.findall(r"<path d='([^']*)' class='line", svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_line_goes_where_its_values_are() -> None:
    """Higher values are higher up, later ones further right; ticks are round."""
    svg = line_chart("t", [Line("a", "c1", [20, 30, 40], [0.0, 0.5, 1.0])], "s", "", shares=True)
    (x0, y0), (x1, y1), (x2, y2) = points(svg)
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2))
    assert y0 > y2
    assert 0 < x0 < 60
    assert ticks(svg) == ["20", "25", "30", "35", "40"]


def test_a_log_axis_gives_decades_equal_room() -> None:
    """1 to 10 is as wide as 10 to 100; what is not above 0 has no place there."""
    line = Line("a", "c1", [0, 1, 10, 100], [0, 0, 0, 1])
    svg = line_chart("t", [line], "s", "", log_x=True)
    (x1, _), (x10, _), (x100, _) = points(svg)
    assert x10 - x1 == pytest.approx(x100 - x10, abs=0.2)
    assert ticks(svg) == ["1", "2", "5", "10", "20", "50", "100"]


def test_the_goal_is_always_in_sight() -> None:
    """A goal far beyond all values widens the axis."""
    svg = line_chart("t", [Line("a", "c1", [1, 2], [0, 1])], "s", "", goal=Goal(30, "goal 30 s"))
    assert "goal 30 s" in svg
    assert max(x for x, _ in points(svg)) < 100
    assert ticks(svg)[-1] == "30"


def test_gaps_in_the_data_are_gaps_in_the_line() -> None:
    """A value that is not a number breaks the line rather than drawing one."""
    svg = line_chart("t", [Line("a", "c1", [1, 2, 3], [0.0, float("nan"), 1.0])], "s", "")
    assert re.findall(r"[ML](?=\d)", re.findall(r"d='(M[^']*)' class='line", svg)[0]) == ["M", "M"]
    assert "nothing to show" in line_chart("t", [], "s", "")


def test_equal_neighbours_of_a_heatmap_are_one() -> None:
    """A band's cells keep their order, width and shade, in as few rectangles as can be."""
    svg = heatmap("t", [Band("p0", "c1", [1.0, 1.0, 0.0, 1.0], "75%")], 0, 4, "s")
    cells = re.findall(r"x='([\d.]+)' y='[\d.]+' width='([\d.]+)'.*?opacity='([\d.]+)'", svg)
    assert [shade for _, _, shade in cells] == ["1.00", "0.05", "1.00"]
    assert float(cells[0][1]) == pytest.approx(2 * float(cells[1][1]), abs=0.2)
    assert "p0" in svg
    assert "75%" in svg


def test_many_instances_get_fewer_columns() -> None:
    """A page of a thousand instances stays small."""
    assert columns(16) == 160
    assert 1_000 * columns(1_000) <= 20_000


def test_names_from_outside_are_escaped() -> None:
    """A trace's name may hold anything."""
    sim = Simulation(Trace("t", 512, [Row(0, 600, 3, (1, 2))]), Setup())
    sim.run()
    page = report(sim, measure(sim, 0.0), "<script>x</script>", "a & b")
    assert "<script" not in page
    assert "a &amp; b" in page


def test_the_same_run_is_the_same_page() -> None:
    """A report can be compared with another byte by byte."""
    pages = []
    for _ in range(2):
        sim = Simulation(synthesize(3, 40, 2.0), Setup())
        sim.run()
        pages.append(report(sim, measure(sim, 0.0), "t", ""))
    assert pages[0] == pages[1]


def heights(page: str, title: str) -> list[list[tuple[float, float]]]:
    """The lines of one chart, as (x in pixels, y from 0 to 1)."""
    chart = page.split(f"aria-label='{title}'")[1].split("</svg>")[0]
    paths = re.findall(r"<path d='([^']*)' class='line", chart)
    lines = [re.findall(r"[ML]([\d.]+) ([\d.]+)", path) for path in paths]
    return [[(float(x), 1 - (float(y) - 10) / 192) for x, y in line] for line in lines]


@pytest.mark.parametrize(("refuse", "goal"), [("ttft", Slo(600_000, 60_000)), ("none", Slo(1, 1))])
def test_curves_meet_the_goals_where_the_headline_does(
    refuse: Literal["ttft", "none"], goal: Slo
) -> None:
    """A curve's height at its goal is the share of all requests that met it, refused included."""
    rows = [*synthesize(3, 80, 4.0).rows]
    rows[0] = msgspec.structs.replace(rows[0], output_tokens=1)
    tuning = Tuning(slo=goal, admission=refuse)
    sim = Simulation(Trace("t", 512, rows), Setup(2, 2, tuning=tuning, goal=goal))
    sim.run()
    result = measure(sim, 0.0)
    page = report(sim, result, "t", "")
    assert (result.summary["rejected"] > 5) == (refuse == "ttft")
    for title, share in (
        ("Time to first token", result.summary["attainment_ttft"]),
        ("Time between tokens", result.summary["attainment_tbt"]),
    ):
        chart = page.split(f"aria-label='{title}'")[1].split("</svg>")[0]
        (at,) = re.findall(r"<path d='M([\d.]+) 10V202' class='goal'", chart)
        line = heights(page, title)[0]
        assert share in [pytest.approx(y, abs=0.002) for x, y in line if abs(x - float(at)) < 0.2]
        assert line[-1][1] == pytest.approx(result.summary["completed"] / 80, abs=0.002)
        assert line == sorted(line)
    assert "share of all requests" in page


def test_why_a_request_was_slow() -> None:
    """The largest parts of its time come first: its queue, its own work, and being placed again."""
    rows = [Row(0, 20_000, 2, tuple(range(40))), Row(0, 5_000, 50, tuple(range(50, 60)))]
    sim = Simulation(Trace("t", 512, rows), Setup(prefill=1, decode=2))
    sim.run()
    assert why_slow(sim.served[0]) == "2.6 s computing 20,000 tokens"
    said = why_slow(sim.served[1])
    assert re.fullmatch(r"2\.6 s queued on p000, 0\.\d s computing 5,000 tokens", said)


@pytest.mark.parametrize(("instance", "at_us"), [("p000", 500_000), ("d000", 5_000_000)])
def test_a_request_placed_again_says_so(instance: str, at_us: int) -> None:
    """What was lost with an instance shows; parts are those of the first token, never more."""
    fault = (Breakdown("kill", instance, at_us),)
    trace = Trace("t", 512, [Row(0, 20_000, 500, tuple(range(40)))])
    sim = Simulation(trace, Setup(prefill=2, decode=2, breakdowns=fault))
    sim.run()
    (served,) = sim.served
    lost = ", 0.5 s until it was placed" if instance == "p000" else ""
    assert why_slow(served) == f"2.6 s computing 20,000 tokens{lost}; placed 2 times"
    (row,) = measure(sim, 0.0).rows
    assert row.ttft_s == pytest.approx(row.predicted_ttft_s)
