"""Every policy: the highest speed it may be driven at, and what it serves under more load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from bench.paper.lab import Lab, Page
from bench.paper.shapes import SHAPES, TUNED, at_load

from moonserve.core.schedule.policies import POLICIES
from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
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
from moonserve.sim.sweep import Cell, grid
from moonserve.sim.trace import Trace, read_trace, scale

TRACES = ["conversation", "synthetic"]
TARGET = 0.99
LOADS = [1.0, 1.5, 2.0, 2.5, 3.0]
IDEAL = "one FCFS queue, ideal shared pool"
OURS = "late_binding"
GOALS: dict[str, dict[str, Any]] = {
    "ttft": {"tbt_slo": None},
    "both": {},
    "again": {"first_token": "decode"},
}
"""Objectives a cluster is driven by: TTFT <= 30 s alone; with TBT <= 200 ms; the same where decode
streams the first token."""
COLORS = {"ttft": "#084594", "both": "#9ecae1", "again": "#4292c6"}


def speeds_of(path: Path, policy: str) -> dict[str, dict[str, Any]]:
    """The highest speed at which enough meet each goal; nobody is refused.

    A search begins where the one before, for another goal, ended: that is near.
    """
    trace = read_trace(path)
    found = {}
    guess = 0.8 * prefill_bound(trace, setup_of({}))
    for goal, objectives in GOALS.items():
        began = time.process_time()
        setup = setup_of({"policy": policy, "admission": "none", **objectives})
        trials = Trials(trace, setup, TARGET)
        if goal == "both":
            guess = min(guess, 0.8 * decode_bound(trace, setup))
        elif goal == "again":  # without a joiner's wait, a tenth more
            guess *= 1.1
        speed = max_speed(trials, TARGET, guess).speed
        guess = speed or guess
        cpu_s = round(time.process_time() - began, 1)
        found[goal] = {"speed": speed, "simulations": len(trials.tries), "cpu_s": cpu_s}
    return found


def queue_speed(trace: Trace, setup: Setup, refuse: bool) -> float | None:
    """The highest speed of one queue before an ideal shared pool, TTFT alone."""

    def at(speed: float) -> Try:
        share, _ = central_queue(trace, setup, speed, refuse)
        return Try(speed, share, share, 1.0, whole=True)

    return max_speed(at, TARGET, prefill_bound(trace, setup)).speed


def measure_speeds(lab: Lab) -> Any:
    keys = [(t, p) for t in TRACES for p in lab.policies()]
    results = lab.run([partial(speeds_of, lab.path(t), p) for t, p in keys])
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
        {"trace": t, "goal": goal, "policy": p, **one}
        for (t, p), by_goal in zip(keys, results, strict=True)
        for goal, one in by_goal.items()
    ]
    before = lab.before("policies")
    return {"rows": lab.with_others(before["rows"] if before else [], rows), "bounds": bounds}


def show_speeds(found: Any, page: Page) -> None:
    page.say(
        "The highest replay speed, in steps of 0.05, at which 99% of all requests meet the "
        "objectives: TTFT <= 30 s alone; TTFT <= 30 s with TBT <= 200 ms; and both where decode "
        "streams the first token, as behind vLLM's connectors, so that nobody sees a joiner's wait "
        "for the pass under way as a gap. 8 prefill + 8 decode nodes, profile a800-loaded, nobody "
        "refused. A speed counts if the next two steps miss."
    )
    page.say(
        "One cell by hand, the highest speed and the first that misses: "
        "`moonserve sweep --trace mooncake_conversation.jsonl --policy late_binding --split 8+8 "
        "--speed 2.3,2.35 --set tbt_slo=null`. The first column has `--set tbt_slo=null`, no "
        "objective for TBT; the second neither flag, since 200 ms is the default; the third "
        "`--set first_token=decode`."
    )
    for name, bounds in found["bounds"].items():
        page.say(f"**{name}**")
        speeds = _speeds(found["rows"], name)
        ranked = sorted(speeds, key=lambda p: [-(speeds[p][goal] or 0.0) for goal in GOALS])
        table = [
            [f"**{p}**" if p == OURS else p, *(_speed(speeds[p][goal]) for goal in GOALS)]
            for p in ranked
        ]
        table += [
            ["_one FCFS queue, ideal shared pool_", _speed(bounds["queue"]), "", ""],
            ["_the same, refusing what would be late_", _speed(bounds["queue, refusing"]), "", ""],
            ["_fluid bound of prefill_", *[_speed(bounds["prefill"])] * 3],
            ["_fluid bound of decode_", "", *[_speed(bounds["decode"])] * 2],
        ]
        page.table(["policy", "TTFT alone", "TTFT and TBT", "both, decode streams all"], table)
    page.say(
        "The bounds. *Decode*: at a TBT of 200 ms and the trace's mean context, eight nodes give "
        "so many tokens a second, whoever places them. *Prefill*: eight nodes busy all the time, "
        "every block that anybody computed at hand. *One queue*: first come, first served, before "
        "all eight, with that same ideal cache; whoever keeps to that order does no better. "
        "Letting the right hundredth of the requests wait can, since the longest hundredth is a "
        "large share of the work."
    )


def _speeds(rows: Any, trace: str) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if row["trace"] == trace:
            found.setdefault(row["policy"], {})[row["goal"]] = row["speed"]
    return found


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw_speeds(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 6), layout="constrained")
    for axes, (name, bounds) in zip(panels, found["bounds"].items(), strict=True):
        speeds = _speeds(found["rows"], name)
        names = sorted(speeds, key=lambda p: [speeds[p][goal] or 0.0 for goal in GOALS])
        for goal, shift, label in (
            ("ttft", 0.27, "TTFT <= 30 s alone"),
            ("again", 0.0, "TTFT and TBT <= 200 ms, decode streams all"),
            ("both", -0.27, "TTFT and TBT <= 200 ms"),
        ):
            places = [at + shift for at in range(len(names))]
            values = [speeds[p][goal] or 0 for p in names]
            bars = axes.barh(places, values, 0.26, color=COLORS[goal], label=label)
            labels = axes.bar_label(bars, fmt="{:.2f}", fontsize=7, padding=3)
            for text in labels:  # bounds may cross them
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
        for key, style, label in (
            ("queue", "--", "one FCFS queue, ideal pool (TTFT)"),
            ("decode", ":", "fluid bound of decode (TBT)"),
        ):
            axes.axvline(bounds[key] or 0, color="black", ls=style, lw=1.2, label=label)
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"{name}, nobody refused")
        axes.set(xlabel="highest speed that 99% of requests attain, times real time")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.1)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


# Goodput.


ARMS: dict[str, dict[str, Any]] = {
    "TTFT alone, nobody refused": {"tbt_slo": None, "admission": "none"},
    "TTFT alone, refused what would miss it": {"tbt_slo": None, "admission": "ttft"},
}


def goodput_of(path: Path, cells: Sequence[Cell]) -> list[tuple[float, float]]:
    """Shares of requests and of input tokens within the objectives, at each cell's speed."""
    trace = read_trace(path)
    return [in_time(scale(trace, cell.values["speed"]), cell.setup) for cell in cells]


def in_time(trace: Trace, setup: Setup) -> tuple[float, float]:
    """Shares of requests and of input tokens within the objectives."""
    sim = Simulation(trace, setup)
    misses = Misses(sim)

    def nothing_open() -> bool:
        misses.look()
        return misses.decided

    sim.run(nothing_open)
    misses.look()
    tokens = sum(row.input_tokens for row in trace.rows)
    return 1 - misses.any / len(trace.rows), 1 - misses.tokens / tokens


def measure_goodput(lab: Lab) -> Any:
    loads = list(lab.some(LOADS))
    keys = [(t, arm, p) for t in TRACES for arm in ARMS for p in lab.policies()]
    calls = [
        partial(
            goodput_of,
            lab.path(t),
            grid({"trace": str(lab.path(t)), "policy": p, "speed": loads, **ARMS[arm]}),
        )
        for t, arm, p in keys
    ]
    rows = [
        {"trace": t, "arm": arm, "policy": p, "speed": x, "requests": part, "tokens": of_tokens}
        for (t, arm, p), shares in zip(keys, lab.run(calls), strict=True)
        for x, (part, of_tokens) in zip(loads, shares, strict=True)
    ]
    for name in TRACES:
        trace, setup = lab.trace(name), setup_of({})
        for arm, refuse in zip(ARMS, (False, True), strict=True):
            for x in loads:
                part, of_tokens = central_queue(trace, setup, x, refuse)
                row = {"trace": name, "arm": arm, "policy": IDEAL, "speed": x}
                rows.append({**row, "requests": part, "tokens": of_tokens})
    before = lab.before("goodput")
    others = [row for row in before["rows"] if row["policy"] != IDEAL] if before else []
    return {"loads": loads, "rows": lab.with_others(others, rows)}


def show_goodput(found: Any, page: Page) -> None:
    page.say(
        "Shares of all requests, and of all their input tokens, whose first token came in 30 s. "
        "(TBT is left out: the conversation trace is beyond what eight decode nodes give from 1.3x "
        "on, whoever places; see [the bounds](policies.md).) 8 prefill + 8 decode nodes, profile "
        "a800-loaded. Each cell is requests / tokens, in percent. Refused requests have missed."
    )
    for name in TRACES:
        for arm in ARMS:
            page.say(f"**{name}: {arm}**")
            table = [
                [
                    f"**{policy}**" if policy == OURS else policy,
                    *(f"{100 * row['requests']:.1f} / {100 * row['tokens']:.1f}" for row in rows),
                ]
                for policy, rows in _by_policy(found, name, arm).items()
            ]
            page.table(["policy", *(f"{speed:g}x" for speed in found["loads"])], table)


def _by_policy(found: Any, trace: str, arm: str) -> dict[str, list[Any]]:
    """Rows by rising speed, of each policy."""
    lines: dict[str, list[Any]] = {}
    for row in sorted(found["rows"], key=lambda row: (row["policy"] == IDEAL, row["speed"])):
        if row["trace"] == trace and row["arm"] == arm:
            lines.setdefault(row["policy"], []).append(row)
    return lines


def draw_goodput(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, len(ARMS), figsize=(11, 8), layout="constrained", sharey=True)
    colors = dict(zip(POLICIES, map(plt.get_cmap("tab20"), range(20)), strict=False))
    for axes_row, name in zip(panels, TRACES, strict=True):
        for axes, arm in zip(axes_row, ARMS, strict=True):
            for policy, rows in _by_policy(found, name, arm).items():
                style: dict[str, Any] = {"lw": 1.2, "color": colors.get(policy, "black")}
                if policy == OURS:
                    style = {"lw": 2.8, "color": "#d62728", "zorder": 3}
                elif policy == IDEAL:
                    style |= {"ls": "--"}
                shares = [row["requests"] for row in rows]
                speeds = [row["speed"] for row in rows]
                axes.plot(speeds, shares, marker="o", ms=3.5, label=policy, **style)
            axes.set_title(f"{name}\n{arm}", fontsize=10)
            axes.set(ylim=(0, 1.03), xlabel="speed, times real time")
        axes_row[0].set_ylabel("share of requests that meet their objectives")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


# Other shapes.


SHAPE_LOADS = [1.4]
SEEDS = [1, 2]
SHAPE_ROWS = 1_500
DULL = ("random", "round_robin", "least_loaded", "cache_aware", "alpha_beta", "vllm_cache_aware")
"""Policies that are behind others here on the public traces, and one with the score of another."""


def shape_of(name: str, policy: str, load: float, rows: int, split: str = "8+8") -> list[Any]:
    """Shares of requests and of input tokens in time, by seed."""
    shares = []
    for seed in SEEDS:
        objectives = {"split": split, "tbt_slo": None, "admission": "ttft"}
        trace = _loaded(name, seed, rows, load, split)
        [cell] = grid({"trace": "-", "policy": policy, "speed": 1.0, **objectives})
        shares.append(in_time(trace, cell.setup))
    return shares


@lru_cache(maxsize=4)
def _loaded(name: str, seed: int, rows: int, load: float, split: str) -> Trace:
    return at_load(name, seed, rows, load, setup_of({"split": split}))


def measure_shapes(lab: Lab) -> Any:
    policies = [policy for policy in lab.policies() if policy not in DULL]
    rows = 200 if lab.quick else SHAPE_ROWS
    keys = [(s, x, p) for s in SHAPES for x in lab.some(SHAPE_LOADS) for p in policies]
    calls = [partial(shape_of, s, p, x, rows) for s, x, p in keys]
    found = [
        {"shape": s, "load": x, "policy": p, "shares": shares}
        for (s, x, p), shares in zip(keys, lab.run(calls), strict=True)
    ]
    before = lab.before("shapes")
    return {"rows": lab.with_others(before["rows"] if before else [], found)}


def show_shapes(found: Any, page: Page) -> None:
    page.say(
        "Shares of all requests, and of all their input tokens, whose first token came in 30 s, in "
        "percent: requests / tokens, each the mean of two seeds, and in brackets by how much the "
        "two differ. 8 prefill + 8 decode nodes, profile a800-loaded, refused what would miss its "
        f"TTFT; {SHAPE_ROWS} requests. The load is a multiple of what eight nodes can prefill with "
        "every block at hand that anybody computed. The shapes stand in `bench/paper/shapes.py`. "
        f"Rules were tuned on {', '.join(TUNED)} and on parts of the public traces; the others "
        "only judge. Bold: the highest of a column."
    )
    shapes = [*TUNED, *(name for name in SHAPES if name not in TUNED)]
    for load in sorted({row["load"] for row in found["rows"]}):
        page.say(f"**Load {load:g}**")
        cells = {
            (row["policy"], row["shape"]): list(zip(*row["shares"], strict=True))
            for row in found["rows"]
            if row["load"] == load
        }
        policies = list(dict.fromkeys(policy for policy, _ in cells))
        best = {
            name: [max(_mean(cells[p, name][at]) for p in policies) for at in (0, 1)]
            for name in shapes
        }
        table = [
            [policy, *(_cell(cells[policy, name], best[name]) for name in shapes)]
            for policy in policies
        ]
        heads = [f"{name} (tuned)" if name in TUNED else name for name in shapes]
        page.table(["policy", *heads], table)


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


def _cell(both: Sequence[Sequence[float]], best: Sequence[float]) -> str:
    """Requests / tokens in percent, with the range over seeds."""
    texts = []
    for shares, most in zip(both, best, strict=True):
        text = f"{100 * _mean(shares):.1f}"
        if _mean(shares) == most:
            text = f"**{text}**"
        texts.append(f"{text} ({100 * (max(shares) - min(shares)):.1f})")
    return " / ".join(texts)


def draw_shapes(found: Any) -> Any:
    import matplotlib.pyplot as plt

    loads = sorted({row["load"] for row in found["rows"]})
    figure, panels = plt.subplots(
        len(loads), 2, figsize=(11, 5 * len(loads)), layout="constrained", squeeze=False
    )
    names = list(SHAPES)
    colors = dict(zip(POLICIES, map(plt.get_cmap("tab20"), range(20)), strict=False))
    for axes_row, load in zip(panels, loads, strict=True):
        for axes, at, what in zip(axes_row, (0, 1), ("requests", "tokens"), strict=True):
            for policy in dict.fromkeys(row["policy"] for row in found["rows"]):
                shares = {
                    row["shape"]: _mean([both[at] for both in row["shares"]])
                    for row in found["rows"]
                    if row["policy"] == policy and row["load"] == load
                }
                ours = policy == OURS
                axes.plot(
                    names,
                    [shares[name] for name in names],
                    marker="o" if ours else ".",
                    ls="",
                    ms=7 if ours else 5,
                    color="#d62728" if ours else colors.get(policy, "black"),
                    label=policy,
                )
            axes.set(ylim=(0, 1.03), title=f"share of {what} in time, load {load:g}")
            axes.tick_params(axis="x", rotation=30)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


SPEEDS = (measure_speeds, show_speeds, draw_speeds)
GOODPUT = (measure_goodput, show_goodput, draw_goodput)
OTHERS = (measure_shapes, show_shapes, draw_shapes)
