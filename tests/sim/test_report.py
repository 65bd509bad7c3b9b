"""The report's parts: charts that show what they are given, and why a request was slow."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.charts import Line, LineChart, columns
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.report import embedded, report, why_slow
from moonserve.sim.setup import Breakdown, Setup
from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import Row, Trace


def charts(page: str, part: str = "charts") -> list[dict[str, Any]]:
    """The charts that a page has as data."""
    (text,) = re.findall(rf'id="{part}">(.*?)</script>', page, re.DOTALL)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def test_many_instances_get_fewer_columns() -> None:
    """A page of a thousand instances stays small."""
    assert columns(16) == 160
    assert 1_000 * columns(1_000) <= 20_000


def test_names_from_outside_are_escaped() -> None:
    """A trace's name may hold anything."""
    sim = Simulation(Trace("t", 512, [Row(0, 600, 3, (1, 2))]), Setup())
    sim.run()
    page = report(sim, measure(sim, 0.0), "<script>x</script>", "a & b")
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page
    assert "a &amp; b" in page


def test_no_text_of_a_chart_ends_its_script() -> None:
    """A chart is data in a script element: whatever its texts are, the element ends where it
    should."""
    text = embedded([LineChart("</script><b>", [Line("<!--", "c1", [1], [math.nan])], "", "")])
    assert "<" not in text
    (chart,) = json.loads(text)
    assert chart["kind"] == "lines"
    assert chart["title"] == "</script><b>"
    assert chart["lines"] == [{"name": "<!--", "tone": "c1", "xs": [1], "ys": [None]}]


def test_a_page_is_one_file() -> None:
    """It has its style, its data and its drawing code in it, and names no other file or host."""
    sim = Simulation(synthesize(3, 40, 2.0), Setup())
    sim.run()
    page = report(sim, measure(sim, 0.0), "t", "")
    assert not re.findall(r"(?:src|href)=|@import|url\(|import .* from", page)
    assert "export function figure(" in page
    names = [band["name"] for band in charts(page, "timelines")[0]["bands"]]
    assert sorted(names) == sorted(sim.nodes)


def test_the_same_run_is_the_same_page() -> None:
    """A report can be compared with another byte by byte."""
    pages = []
    for _ in range(2):
        sim = Simulation(synthesize(3, 40, 2.0), Setup())
        sim.run()
        pages.append(report(sim, measure(sim, 0.0), "t", ""))
    assert pages[0] == pages[1]


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
        chart = next(it for it in charts(page) if it["title"] == title)
        line = chart["lines"][0]
        at = line["xs"].index(chart["goal"]["at"])
        assert line["ys"][at] == pytest.approx(share)
        assert line["ys"][-1] == pytest.approx(result.summary["completed"] / 80)
        assert line["ys"] == sorted(line["ys"])
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
