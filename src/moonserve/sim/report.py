"""A simulated run as one HTML file for people: figures, curves, timelines, and the slowest
requests.

It reads what sim.cluster and sim.metrics left, and changes nothing. The file has the style and the
drawing code of moonserve.page in it, so it needs no network, and follows the reader's light or dark
mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jinja2
import msgspec
import numpy as np
from numpy.typing import NDArray

from moonserve import page
from moonserve.sim.charts import Band, Chart, Goal, HeatMap, Line, LineChart, columns
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import RequestRow, Result, percent
from moonserve.sim.served import Served

Numbers = NDArray[np.float64]

ASKED = 0.99
"""A goal counts as met if this share of requests meets it."""
_SLOWEST = 12
_POINTS = 400


def report(sim: Simulation, result: Result, title: str, subtitle: str) -> str:
    """The whole page. `title` and `subtitle` say what was simulated."""
    charts = [*_curves(sim, result), *_load(sim), *_over_arrivals(sim, result)]
    charts.append(_calibration(sim))
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("moonserve.sim", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return pages.get_template("report.html").render(
        title=title,
        subtitle=subtitle,
        style=page.text("style.css"),
        drawing=page.text("charts.js"),
        tiles=_tiles(sim, result.summary),
        charts=embedded(charts),
        timelines=embedded([_timelines(sim, result.summary)]),
        slowest=_slowest(sim, result.rows),
        figures=[(name, _plain(value)) for name, value in result.summary.items()],
    )


def embedded(charts: Sequence[Chart]) -> str:
    """Charts as JSON inside a script element, which no text in them can end."""
    return msgspec.json.encode(charts).decode().replace("<", "\\u003c")


def why_slow(served: Served) -> str:
    """What a request's time to first token was made of: the largest parts, in seconds."""
    decision, first_us = served.judged, served.first_us
    if decision is None or first_us is None:
        return "it has no first token"
    chosen = decision.chosen
    computed = decision.prompt_tokens - chosen.reused_tokens
    fetched = chosen.reused_tokens - chosen.local_tokens
    ttft_us = first_us - served.arrived_us
    shared_us = decision.predicted_ttft_us - decision.waited_us
    parts = [(shared_us, f"by {len(decision.stages)} instances together")]
    if not decision.stages:
        parts = [
            (chosen.queue_us, f"queued on {decision.prefill}"),
            (chosen.compute_us, f"computing {computed:,} tokens"),
            (chosen.transfer_us, f"loading {fetched:,} tokens"),
        ]
    parts += [
        (decision.waited_us, "until it was placed"),
        (ttft_us - decision.predicted_ttft_us, "more than predicted"),
    ]
    largest = sorted((part for part in parts if part[0] * 10 >= ttft_us), reverse=True)
    said = ", ".join(f"{us / 1e6:.1f} s {what}" for us, what in largest)
    again = f"; placed {served.attempts} times" if served.attempts > 1 else ""
    return said + again


# Headline.


def _tile(label: str, value: str, below: str, met: bool | None = None) -> dict[str, Any]:
    """One headline figure; `met` says whether its goal was met, None where it has none."""
    return {"label": label, "value": value, "below": below, "met": met}


def _tiles(sim: Simulation, summary: dict[str, Any]) -> list[dict[str, Any]]:
    goal, s = sim.setup.goal, summary
    ttft = "no goal" if goal.ttft_us is None else f"{goal.ttft_us / 1e6:g} s"
    tbt = "no goal" if goal.tbt_us is None else f"{goal.tbt_us / 1e3:g} ms"
    lost = f"of {s['requests']:,}; {s['rejected']:,} refused, {s['failed']:,} failed"
    held = f"{s['hit_rate_available']:.1%} were held by an instance"
    tokens = f"{s['goodput_tokens_per_s']:,.0f} tokens/s within both goals"
    return [
        _goal_tile("Both goals", percent(s["attainment"]), s["attainment"], "both"),
        _goal_tile("TTFT p99", _s(s["ttft_p99_s"]), s["attainment_ttft"], ttft),
        _goal_tile("TBT p99", _ms(s["tbt_p99_ms"]), s["attainment_tbt"], tbt),
        _tile("Goodput", f"{s['goodput_rps']:.2f} /s", tokens),
        _tile("Prompt reused", f"{s['hit_rate_tokens']:.1%}", held),
        _tile("Completed", f"{s['completed']:,}", lost),
    ]


def _goal_tile(label: str, value: str, share: float, goal: str) -> dict[str, Any]:
    """A figure with its goal, which counts as met if the share ASKED of the requests meets it."""
    return _tile(label, value, f"{goal} met by {percent(share)} of all requests", share >= ASKED)


# Distributions.


def _curves(sim: Simulation, result: Result) -> list[Chart]:
    goal = sim.setup.goal
    done = [row for row in result.rows if row.outcome == "completed"]
    ttft = np.array([row.ttft_s for row in done], float)
    tbt = np.array([row.tbt_ms for row in done if row.tbt_ms is not None], float)
    ttft_goal = tbt_goal = None
    if goal.ttft_us is not None:
        ttft_goal = Goal(goal.ttft_us / 1e6, f"goal {goal.ttft_us / 1e6:g} s")
    if goal.tbt_us is not None:
        tbt_goal = Goal(goal.tbt_us / 1e3, f"goal {goal.tbt_us / 1e3:g} ms")
    every = len(result.rows)  # a refused or failed request never gets there
    at_once = len(done) - len(tbt)  # a single token has no gap that could be too long
    each_gap = np.asarray(result.gaps_ms, float)
    gaps = [
        _cdf("requests (mean of the longest tenth of gaps)", "c1", tbt, every, tbt_goal, at_once),
        _cdf("gaps of completed requests", "quiet", each_gap, len(each_gap), tbt_goal),
    ]
    return [
        LineChart(
            "Time to first token",
            [_cdf("requests", "c1", ttft, every, ttft_goal)],
            "seconds (log)",
            "share of all requests within:",
            shares=True,
            log_x=True,
            goal=ttft_goal,
        ),
        LineChart(
            "Time between tokens",
            gaps,
            "milliseconds (log)",
            "share of all requests within, or of gaps:",
            shares=True,
            log_x=True,
            goal=tbt_goal,
        ),
    ]


def _cdf(
    name: str, tone: str, values: Numbers, every: int, goal: Goal | None, below: int = 0
) -> Line:
    """The share of `every` request that is within x; `below` of them are within any x. Exact at the
    goal.

    At most _POINTS points. The lowest half percent is left out, since it would stretch a log axis.
    """
    if not len(values):
        return Line(name, tone, (), ())
    ordered = np.sort(values)
    lowest = len(ordered) // 200
    chosen = np.unique(np.linspace(lowest, len(ordered) - 1, _POINTS).astype(int))
    xs, counts = ordered[chosen], chosen + 1
    if goal is not None:
        met = int(np.searchsorted(ordered, goal.at, side="right"))
        place = int(np.searchsorted(xs, goal.at, side="right"))
        xs = np.insert(xs, place, goal.at)
        counts = np.insert(counts, place, met)
    return Line(name, tone, xs.tolist(), ((counts + below) / every).tolist())


# Over time.


def _clock(sim: Simulation) -> tuple[float, str]:
    """The length of a second on the time axes, and their unit."""
    return (1 / 60, "minutes") if sim.clock.now_us > 600e6 else (1.0, "seconds")


def _pools(sim: Simulation) -> list[tuple[str, str, list[int]]]:
    """(name, tone, columns of a sample) of each kind of instance in the run."""
    kinds = (("prefill", "prefill", "c1"), ("decode", "decode", "c2"), ("both", "mixed", "c1"))
    nodes = list(sim.nodes.values())
    pools = [
        (name, tone, [at for at, node in enumerate(nodes) if node.info.role == role])
        for role, name, tone in kinds
    ]
    return [pool for pool in pools if pool[2]]


def _load(sim: Simulation) -> list[Chart]:
    per_s, unit = _clock(sim)
    at = np.array([sample.at_us for sample in sim.samples], float) / 1e6 * per_s
    waiting = np.array([sample.waiting for sample in sim.samples], float)
    running = np.array([sample.running for sample in sim.samples], float)
    shares = _busy(sim)
    pools = _pools(sim)
    conductor = [sample.conductor for sample in sim.samples]
    queues = [Line("at the Conductor", "c3", at.tolist(), conductor)]
    queues += [
        Line(f"on {name}", tone, at.tolist(), waiting[:, cols].sum(1).tolist())
        for name, tone, cols in pools
    ]
    runs = [
        Line(name, tone, at.tolist(), running[:, cols].sum(1).tolist())
        for name, tone, cols in pools
    ]
    busy = [
        Line(name, tone, at[1:].tolist(), shares[:, cols].mean(1).tolist())
        for name, tone, cols in pools
    ]
    return [
        LineChart("Waiting", queues, unit, "requests:"),
        LineChart("Running", runs, unit, "requests:"),
        LineChart("Busy", busy, unit, "mean share of time:", shares=True),
    ]


def _busy(sim: Simulation) -> Numbers:
    """The share of time that each instance was busy, between one sample and the next."""
    at = np.array([sample.at_us for sample in sim.samples], float)
    busy = np.array([sample.busy_us for sample in sim.samples], float)
    shares: Numbers = np.diff(busy, axis=0) / np.maximum(np.diff(at), 1.0)[:, None]
    return shares


def _over_arrivals(sim: Simulation, result: Result) -> list[Chart]:
    """Hit rate and attainment of the requests that arrived in each window."""
    per_s, unit = _clock(sim)
    rows = result.rows
    at = np.array([row.arrived_s for row in rows], float)
    windows = int(max(1, min(60, len(rows) // 10)))
    edges = np.linspace(at.min(), at.max() + 1e-6, windows + 1)
    tokens, _ = np.histogram(at, edges, weights=[row.input_tokens for row in rows])
    count, _ = np.histogram(at, edges)
    middle = ((edges[:-1] + edges[1:]) / 2 * per_s).tolist()

    def line(name: str, tone: str, values: Sequence[float], whole: Any) -> Line:
        summed, _ = np.histogram(at, edges, weights=np.array(values, float))
        shares = np.divide(summed, whole, out=np.full(windows, np.nan), where=whole > 0)
        return Line(name, tone, middle, shares.tolist())

    hits = [
        line("held by someone", "quiet", [one.available for one in sim.served], tokens),
        line("reused", "c1", [row.cached_tokens for row in rows], tokens),
    ]
    goals = [
        line("TTFT", "c1", [row.met_ttft for row in rows], count),
        line("TBT", "c2", [row.met_tbt for row in rows], count),
    ]
    when = f"{unit}, by arrival"
    window = np.searchsorted(edges, at, side="right") - 1
    waits = [
        [r.ttft_s for r, w in zip(rows, window, strict=True) if w == k and r.ttft_s]
        for k in range(windows)
    ]
    ttfts = [
        Line(name, tone, middle, [float(np.quantile(w, q)) if w else math.nan for w in waits])
        for name, tone, q in (("median", "c1", 0.5), ("p90", "c2", 0.9))
    ]
    return [
        LineChart("Time to first token", ttfts, when, "seconds:"),
        LineChart("Prompt tokens reused", hits, when, "share of input tokens:", shares=True),
        LineChart("Goals met", goals, when, "share of requests:", shares=True),
    ]


def _calibration(sim: Simulation) -> Chart:
    """Actual TBT by predicted TBT: right predictions are on the diagonal.

    It shows the latest requests, in groups of similar predictions; nothing if nothing was
    predicted.
    """
    pairs = np.array(sorted(sim.conductor.errors.tbt.latest), float).reshape(-1, 2) / 1e3
    groups = np.array_split(pairs, max(1, min(20, len(pairs) // 10)))
    middle = [float(group[:, 0].mean()) for group in groups if len(group)]
    lines = [Line("as predicted", "quiet", middle, middle)]
    lines += [
        Line(name, tone, middle, [float(np.quantile(g[:, 1], q)) for g in groups if len(g)])
        for name, tone, q in (("median", "c1", 0.5), ("p90", "c2", 0.9))
    ]
    when = "as predicted on admission for that moment, ms"
    title = "Time between tokens on the decode instance when prefill ended"
    return LineChart(title, lines, when, "as it was, ms:")


def _timelines(sim: Simulation, summary: dict[str, Any]) -> Chart:
    """A heatmap of each instance: how busy it was or, if it only decodes, how many requests it
    ran."""
    per_s, unit = _clock(sim)
    shares = _busy(sim)
    nodes = list(sim.nodes.values())
    running = np.array([sample.running for sample in sim.samples], float)[:-1]
    decoding = [at for at, node in enumerate(nodes) if node.info.role == "decode"]
    most = max(1.0, running[:, decoding].max(initial=0.0))
    shown = shares.copy()
    shown[:, decoding] = running[:, decoding] / most
    step = -(-len(shown) // columns(len(nodes))) or 1  # samples of one column
    starts = range(0, len(shown), step)
    merged = np.array([shown[at : at + step].mean(0) for at in starts])
    bands = [
        Band(
            nodes[at].name,
            tone,
            merged[:, at].tolist() if len(merged) else (),
            f"{running[:, at].mean():.0f}" if at in decoding else f"{shares[:, at].mean():.0%}",
        )
        for _, tone, cols in _pools(sim)
        for at in cols
    ]
    parts = [
        f"the busiest {name} instance has {value:.2f} times the mean's work"
        for name, value in (
            ("prefill", summary["imbalance"]),
            ("decode", summary["imbalance_decode"] if sim.setup.decode else None),
        )
        if value is not None
    ]
    last_s = len(starts) * step * sim.setup.sample_us / 1e6
    note = "Share of time busy, the mean at the right"
    if decoding:
        note += f"; on decode instances, requests running (full colour: {most:.0f})"
    note += ". Imbalance: " + "; ".join(parts) + "."
    return HeatMap("Each instance over time", bands, 0.0, last_s * per_s, unit, note)


# Requests.


def _slowest(sim: Simulation, rows: Sequence[RequestRow]) -> list[dict[str, str]]:
    """The lines of the table of the longest times to first token, as text."""
    order = sorted(
        (at for at, row in enumerate(rows) if row.ttft_s is not None),
        key=lambda at: (-(rows[at].ttft_s or 0.0), at),
    )
    return [
        {
            "id": rows[at].id,
            "ttft": _s(rows[at].ttft_s),
            "tbt": _ms(rows[at].tbt_ms),
            "arrived": f"{rows[at].arrived_s:,.0f} s",
            "input": f"{rows[at].input_tokens:,}",
            "reused": f"{rows[at].cached_tokens:,}",
            "why": why_slow(sim.served[at]),
        }
        for at in order[:_SLOWEST]
    ]


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _ms(value: float | None) -> str:
    if value is not None and value >= 10_000:
        return f"{value / 1000:,.0f} s"
    return "-" if value is None else f"{value:.0f} ms"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value if value is not None else "-")
