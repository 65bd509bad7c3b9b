"""Every policy: the highest speed it may be driven at, and what it serves under more load."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.paper.lab import Lab, Page

from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.plan import (
    Misses,
    Trials,
    Try,
    central_queue,
    decode_bound,
    max_speed,
    prefill_bound,
)
from moonserve.sim.setup import Setup
from moonserve.sim.sweep import Cell, grid, setup_of
from moonserve.sim.trace import Trace, read_trace, scale

TRACES = ["conversation", "synthetic"]
TARGET = 0.99
LOADS = [1.0, 1.5, 2.0, 2.5, 3.0]
REFUSE = {"none": "nobody refused", "ttft": "refused what misses its TTFT"}
OURS = "late_binding"
BAR = {"attainment": "#9ecae1", "attainment_ttft": "#084594"}


def speeds_of(path: Path, policy: str, refuse: str) -> dict[str, Any]:
    """Highest speeds: both objectives, and TTFT alone."""
    trace = read_trace(path)
    setup = setup_of({"policy": policy, "refuse": refuse})
    began = time.process_time()
    timely = Trials(trace, setup, TARGET, "attainment_ttft")
    alone = max_speed(timely, TARGET, prefill_bound(trace, setup) * 0.8, figure="attainment_ttft")
    joint = Trials(trace, setup, TARGET)
    joint.tries = dict(timely.tries)
    both = max_speed(joint, TARGET, min(alone.speed or 0.0, decode_bound(trace, setup)))
    return {
        "both": both.speed,
        "ttft": alone.speed,
        "simulations": len(joint.tries),
        "cpu_s": round(time.process_time() - began, 1),
    }


def queue_speed(trace: Trace, setup: Setup, refuse: bool) -> float | None:
    """The highest speed of one queue before an ideal shared pool, TTFT alone."""

    def at(speed: float) -> Try:
        share, _ = central_queue(trace, setup, speed, refuse)
        return Try(speed, share, share, 1.0, whole=True)

    return max_speed(at, TARGET, prefill_bound(trace, setup)).speed


def measure_speeds(lab: Lab) -> Any:
    keys = [(t, r, p) for t in TRACES for r in REFUSE for p in lab.policies()]
    results = lab.run([partial(speeds_of, lab.path(t), p, r) for t, r, p in keys])
    setup = setup_of({})
    bounds = {}
    for name in TRACES:
        trace = lab.trace(name)
        bounds[name] = {
            "decode": decode_bound(trace, setup),
            "prefill": prefill_bound(trace, setup),
            "queue": queue_speed(trace, setup, False),
            "queue, refusing": queue_speed(trace, setup, True),
        }
    rows = [
        {"trace": t, "refuse": r, "policy": p, **one}
        for (t, r, p), one in zip(keys, results, strict=True)
    ]
    before = lab.before("policies")
    return {"rows": lab.with_others(before["rows"] if before else [], rows), "bounds": bounds}


def show_speeds(found: Any, page: Page) -> None:
    page.say(
        "The highest replay speed, in steps of 0.05, at which 99% of all requests have TTFT <= 30 "
        "s and TBT <= 200 ms, and at which 99% have that TTFT: 8 prefill + 8 decode nodes, "
        "profile a800-loaded. A speed counts if the next two steps miss. Refused requests have "
        "missed. Sorted by TTFT alone with nobody refused."
    )
    rows = found["rows"]
    for name, bounds in found["bounds"].items():
        page.say(f"**{name}**")
        values = {
            (row["policy"], row["refuse"], what): row[what]
            for row in rows
            for what in ("both", "ttft")
            if row["trace"] == name
        }
        order = dict.fromkeys(row["policy"] for row in rows)
        ranked = sorted(order, key=lambda p: -(values[p, "none", "ttft"] or 0.0))
        table = [
            [
                f"**{policy}**" if policy == OURS else policy,
                *(_speed(values[policy, r, w]) for r in REFUSE for w in ("both", "ttft")),
            ]
            for policy in ranked
        ]
        queue, refusing = bounds["queue"], bounds["queue, refusing"]
        table += [
            ["_one FCFS queue, ideal shared pool_", "", _speed(queue), "", _speed(refusing)],
            ["_fluid bound of prefill_", "", _speed(bounds["prefill"]), "", ""],
            ["_fluid bound of decode_", _speed(bounds["decode"]), "", _speed(bounds["decode"]), ""],
        ]
        page.table(
            ["policy", *(f"{w}, {t}" for t in REFUSE.values() for w in ("both", "TTFT alone"))],
            table,
        )
    page.say(
        "The bounds. *Decode*: at a TBT of 200 ms and the trace's mean context, eight nodes give "
        "so many tokens a second, whoever places them. *Prefill*: eight nodes busy all the time, "
        "every block that anybody computed at hand. *One queue*: first come, first served, before "
        "all eight, with that same ideal cache; whoever keeps to that order does no better. "
        "Leaving out or delaying the right hundredth of the requests can, since the longest "
        "hundredth is a large share of the work."
    )


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw_speeds(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for axes, (name, bounds) in zip(panels, found["bounds"].items(), strict=True):
        rows = [r for r in found["rows"] if r["trace"] == name and r["refuse"] == "none"]
        rows.sort(key=lambda row: row["ttft"] or 0.0)
        names = [row["policy"] for row in rows]
        for key, shift, color, label in (
            ("ttft", 0.2, BAR["attainment_ttft"], "TTFT <= 30 s alone"),
            ("both", -0.2, BAR["attainment"], "and TBT <= 200 ms"),
        ):
            places = [at + shift for at in range(len(rows))]
            bars = axes.barh(places, [r[key] or 0 for r in rows], 0.38, color=color, label=label)
            labels = axes.bar_label(bars, fmt="{:.2f}", fontsize=8, padding=3)
            for text in labels:  # bounds may cross them
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
        for key, style, label in (
            ("queue", "--", "one FCFS queue, ideal pool (TTFT)"),
            ("decode", ":", "fluid bound of decode (TBT)"),
        ):
            axes.axvline(bounds[key] or 0, color="black", ls=style, lw=1.2, label=label)
        axes.set_yticks(range(len(rows)), names)
        axes.set(title=f"{name}, nobody refused")
        axes.set(xlabel="highest speed that 99% of requests attain, times real time")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.1)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


# Goodput.


def goodput_of(cell: Cell) -> dict[str, Any]:
    """Shares of requests and of input tokens within the objectives."""
    trace = scale(read_trace(Path(cell.values["trace"])), cell.values["speed"])
    sim = Simulation(trace, cell.setup)
    began = time.process_time()
    misses = Misses(sim)

    def nothing_open() -> bool:
        misses.look()
        return misses.decided

    sim.run(nothing_open)
    rows = measure(sim, 0.0).rows
    tokens = sum(row.input_tokens for row in rows)
    timely = [row for row in rows if row.met_ttft]
    both = [row for row in timely if row.met_tbt]
    return {
        "policy": cell.values["policy"],
        "refuse": cell.values["refuse"],
        "speed": cell.values["speed"],
        "requests": len(timely) / len(rows),
        "tokens": sum(row.input_tokens for row in timely) / tokens,
        "requests_both": len(both) / len(rows),
        "tokens_both": sum(row.input_tokens for row in both) / tokens,
        "cpu_s": round(time.process_time() - began, 1),
    }


def measure_goodput(lab: Lab) -> Any:
    found: dict[str, Any] = {}
    before = lab.before("goodput")
    for name in TRACES:
        cells = grid(
            {
                "trace": str(lab.path(name)),
                "refuse": list(REFUSE),
                "policy": lab.policies(),
                "speed": lab.some(LOADS),
            }
        )
        trace, setup = lab.trace(name), cells[0].setup
        loads = sorted({cell.values["speed"] for cell in cells})
        ideal = {
            refuse: [central_queue(trace, setup, speed, refuse != "none") for speed in loads]
            for refuse in REFUSE
        }
        rows = lab.run([partial(goodput_of, cell) for cell in cells])
        others = before[name]["rows"] if before else []
        found[name] = {"loads": loads, "rows": lab.with_others(others, rows), "ideal": ideal}
    return found


def show_goodput(found: Any, page: Page) -> None:
    page.say(
        "Shares of all requests, and of all their input tokens, that were served in time: 8 "
        "prefill + 8 decode nodes, profile a800-loaded. Each cell is requests / tokens, in "
        "percent."
    )
    for name, part in found.items():
        loads = part["loads"]
        for refuse, told in REFUSE.items():
            rows = [row for row in part["rows"] if row["refuse"] == refuse]
            for suffix, what in (("", "TTFT <= 30 s"), ("_both", "TTFT and TBT <= 200 ms")):
                page.say(f"**{name}, {told}: {what}**")
                table = [
                    [f"**{policy}**" if policy == OURS else policy, *cells]
                    for policy, cells in _by_policy(rows, suffix).items()
                ]
                if not suffix:
                    ideal = [f"{100 * a:.1f} / {100 * b:.1f}" for a, b in part["ideal"][refuse]]
                    table.append(["_one FCFS queue, ideal shared pool_", *ideal])
                page.table(["policy", *(f"{speed:g}x" for speed in loads)], table)
    page.say(
        "Where TBT counts as well, the conversation trace is beyond what eight decode nodes give "
        "from about 1.3x on (see [the bounds](policies.md)): refusing by TTFT alone does not help "
        "there, and more decode nodes do."
    )


def _by_policy(rows: Any, suffix: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        shares = 100 * row["requests" + suffix], 100 * row["tokens" + suffix]
        found.setdefault(row["policy"], []).append(f"{shares[0]:.1f} / {shares[1]:.1f}")
    return found


def draw_goodput(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained", sharey=True)
    for axes_row, (name, part) in zip(panels, found.items(), strict=True):
        for axes, (refuse, told) in zip(axes_row, REFUSE.items(), strict=True):
            policies = dict.fromkeys(row["policy"] for row in part["rows"])
            colors = [plt.get_cmap("tab20")(at) for at in range(20)]
            for policy, color in zip(policies, colors, strict=False):
                shares = [
                    row["requests"]
                    for row in part["rows"]
                    if row["policy"] == policy and row["refuse"] == refuse
                ]
                ours = policy == OURS
                style = {"lw": 2.8, "color": "#d62728"} if ours else {"lw": 1.2, "color": color}
                axes.plot(part["loads"], shares, marker="o", ms=3.5, label=policy, **style)
            ideal = [share for share, _ in part["ideal"][refuse]]
            axes.plot(part["loads"], ideal, "k--", lw=1.2, label="one FCFS queue, ideal pool")
            axes.set(title=f"{name}, {told}", ylim=(0, 1.03), xlabel="speed, times real time")
        axes_row[0].set_ylabel("share of requests with TTFT <= 30 s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


SPEEDS = (measure_speeds, show_speeds, draw_speeds)
GOODPUT = (measure_goodput, show_goodput, draw_goodput)
