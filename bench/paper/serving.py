"""Latencies: by policy (Fig. 5), by split (Fig. 15), and against a coupled cluster (Fig. 1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bench.paper.lab import POLICY_NAMES, Lab, Page

from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.plan import Trials, decode_bound, max_speed, prefill_bound
from moonserve.sim.setup import Setup
from moonserve.sim.sweep import Cell, grid
from moonserve.sim.trace import Trace, read_trace, scale

PAPER_FIG5 = dict(zip(POLICY_NAMES, (19.65, 5.27, 3.58, 3.07), strict=True))
SPEEDS = [1.0, 1.5, 2.0]
SHADES = ["#9ecae1", "#4292c6", "#084594", "#bdbdbd"]


# Fig. 5


def measure_fig05(lab: Lab) -> Any:
    rows = lab.sweep(
        {
            "trace": str(lab.path("conversation")),
            "speed": lab.some(SPEEDS),
            "policy": list(POLICY_NAMES),
        }
    )
    names = ["speed", "policy", "ttft_mean_s", "ttft_p90_s", "hit_rate_tokens"]
    names += ["hit_rate_available", "imbalance", "prefill_gpu_s_mean"]
    return [{name: row[name] for name in names} for row in rows]


def show_fig05(found: Any, page: Page) -> None:
    page.say(
        "Conversation trace, 8 prefill + 8 decode nodes, profile a800-loaded, nobody refused. "
        "Ratios are to KVCache-centric at the same speed."
    )
    best = {r["speed"]: r["ttft_mean_s"] for r in found if r["policy"] == "kvcache_centric"}
    last = PAPER_FIG5["kvcache_centric"]
    page.table(
        [
            "speed",
            "policy",
            "mean TTFT, s",
            "p90, s",
            "ratio",
            "hit rate, tokens",
            "best any holder had",
            "busiest prefill node / mean",
        ],
        [
            [
                f"{row['speed']:g}",
                POLICY_NAMES[row["policy"]],
                f"{row['ttft_mean_s']:.2f}",
                f"{row['ttft_p90_s']:.2f}",
                f"{row['ttft_mean_s'] / best[row['speed']]:.2f}",
                f"{row['hit_rate_tokens']:.3f}",
                f"{row['hit_rate_available']:.3f}",
                f"{row['imbalance']:.2f}",
            ]
            for row in found
        ]
        + [
            ["paper", POLICY_NAMES[p], f"{s:.2f}", "", f"{s / last:.2f}", "", "", ""]
            for p, s in PAPER_FIG5.items()
        ],
    )
    page.say(
        "What differs, and why. The order is the paper's at every speed, and its ratios lie "
        "between ours at 1 and at 1.5 times real time; the seconds differ, since neither its "
        "replay speed, nor its cache sizes in this experiment, nor the threshold of Algorithm 1 "
        "was published. Random and load balancing find few of the blocks that somebody has, "
        "cache-aware most, and KVCache-centric all, because what is elsewhere is fetched. That "
        "saves GPU time, and the nearer prefill is to its limit, the more of a queue that time "
        "is: at 2 times real time all but KVCache-centric are past theirs, and their means only "
        "say how long the trace lasted."
    )


def draw_fig05(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    speeds = sorted({row["speed"] for row in found})
    groups = [
        (
            f"here, speed {speed:g}",
            {r["policy"]: r["ttft_mean_s"] for r in found if r["speed"] == speed},
        )
        for speed in speeds
    ]
    groups.append(("paper", PAPER_FIG5))
    width = 0.8 / len(groups)
    colors = [*SHADES[: len(speeds)], SHADES[-1]]
    for at, ((label, values), color) in enumerate(zip(groups, colors, strict=True)):
        places = [i + (at - (len(groups) - 1) / 2) * width for i in range(len(POLICY_NAMES))]
        bars = axes.bar(places, [values[p] for p in POLICY_NAMES], width, color=color, label=label)
        axes.bar_label(bars, fmt="{:.2f}", fontsize=8, padding=2)
    axes.set_xticks(range(len(POLICY_NAMES)), list(POLICY_NAMES.values()))
    axes.set(yscale="log", ylabel="mean TTFT, s (log scale)")
    axes.grid(axis="x", visible=False)
    axes.legend()
    return figure


# Fig. 15


SPLITS = list(range(2, 15))
FIG15_SPEEDS = [1.0, 1.5, 2.0]


def fastest(trace: Trace, setup: Setup) -> float | None:
    """The highest speed that 99% meet."""
    trials = Trials(trace, setup, 0.99)
    guess = 0.8 * min(prefill_bound(trace, setup), decode_bound(trace, setup))
    return max_speed(trials, 0.99, guess).speed


def measure_fig15(lab: Lab) -> Any:
    axes = {
        "trace": str(lab.path("synthetic")),
        "policy": "kvcache_centric",
        "speed": lab.some(FIG15_SPEEDS),
        "split": [f"{p}+{16 - p}" for p in lab.some(SPLITS)],
    }
    names = ["speed", "prefill", "attainment", "attainment_ttft", "attainment_tbt"]
    names += ["goodput_rps", "ttft_mean_s", "tbt_p90_ms"]
    cells = [{name: row[name] for name in names} for row in lab.sweep(axes)]
    setups = [cell.setup for cell in grid({**axes, "speed": 1.0})]
    trace = lab.trace("synthetic")
    speeds = lab.run([partial(fastest, trace, setup) for setup in setups])
    return {"cells": cells, "fastest": {s.prefill: v for s, v in zip(setups, speeds, strict=True)}}


def show_fig15(found: Any, page: Page) -> None:
    page.say(
        "Synthetic trace, 16 nodes, KVCache-centric, profile a800-loaded, nobody refused. "
        "Attained: the share of requests with TTFT <= 30 s and TBT <= 200 ms; the last column is "
        "the highest speed at which 99% attain both."
    )
    speeds = sorted({row["speed"] for row in found["cells"]})
    cells = {(row["prefill"], row["speed"]): row for row in found["cells"]}
    heads = ["prefill : decode"]
    for speed in speeds:
        heads += [f"attained at {speed:g}x", "mean TTFT, s", "TBT p90, ms"]
    rows = []
    for prefill, speed_99 in found["fastest"].items():
        line = [f"{prefill} : {16 - int(prefill)}"]
        for speed in speeds:
            row = cells[int(prefill), speed]
            line += [f"{row['attainment']:.3f}", f"{row['ttft_mean_s']:.2f}"]
            line += [f"{row['tbt_p90_ms']:,.0f}"]
        rows.append([*line, "none" if speed_99 is None else f"{speed_99:.2f}"])
    page.table([*heads, "fastest"], rows)
    page.say(
        "As in the paper the optimum is in the middle and both ends fall: too few prefill nodes "
        "and first tokens come late, too few decode nodes and tokens come slowly. Where exactly "
        "it lies depends on the costs: on a loaded A800's decode step here. (The paper's own "
        "points were not verified.)"
    )


def draw_fig15(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    speeds = sorted({row["speed"] for row in found["cells"]})
    for speed, color in zip(speeds, SHADES, strict=False):
        rows = [row for row in found["cells"] if row["speed"] == speed]
        places = [row["prefill"] for row in rows]
        left.plot(places, [r["attainment"] for r in rows], "o-", color=color, label=f"{speed:g}x")
    left.set(ylabel="share of requests that attain both objectives", ylim=(0, 1.03))
    left.legend(title="speed", loc="upper left", framealpha=0.9, frameon=True)
    places = [int(p) for p in found["fastest"]]
    right.bar(places, [speed or 0 for speed in found["fastest"].values()], color=SHADES[1])
    right.set(ylabel="highest speed that 99% attain, times real time")
    right.grid(axis="x", visible=False)
    for axes in (left, right):
        axes.set_xticks(places, [f"{p}:{16 - p}" for p in places], rotation=60)
        axes.set(xlabel="prefill : decode nodes")
    return figure


# Fig. 1


TBT_MS = [100, 200, 300]
CLUSTERS: dict[str, dict[str, Any]] = {
    "disaggregated, 8 + 8": {"split": "8+8", "policy": "kvcache_centric"},
    "disaggregated, 6 + 10": {"split": "6+10", "policy": "kvcache_centric"},
    "coupled, 16, chunks of 2,048": {"split": "16", "policy": "cache_aware", "chunk_tokens": 2048},
    "coupled, 16, whole prompts": {"split": "16", "policy": "cache_aware"},
}
PAPER_GAIN = {100: "+498%", 200: "+157%", 300: "+59%"}


def attained(cell: Cell) -> dict[str, Any]:
    """Shares of requests within 30 s and each TBT; and the summary's figures."""
    trace = scale(read_trace(Path(cell.values["trace"])), cell.values["speed"])
    sim = Simulation(trace, cell.setup)
    sim.run()
    result = measure(sim, 0.0)
    shares = {}
    for limit in TBT_MS:
        good = [r for r in result.rows if r.met_ttft and (r.tbt_ms is None or r.tbt_ms <= limit)]
        shares[str(limit)] = len(good) / len(result.rows)
    names = ("ttft_mean_s", "tbt_p50_ms", "tbt_p90_ms", "gap_p99_ms", "attainment_ttft")
    return {"shares": shares, **{name: result.summary[name] for name in names}}


def measure_fig01(lab: Lab) -> Any:
    arms = [(name, speed) for name in CLUSTERS for speed in lab.some([1.0, 1.25, 1.5])]
    cells = [
        cell
        for name, speed in arms
        for cell in grid({"trace": str(lab.path("conversation")), "speed": speed, **CLUSTERS[name]})
    ]
    found = lab.run([partial(attained, cell) for cell in cells])
    return [
        {"cluster": name, "speed": speed, **one}
        for (name, speed), one in zip(arms, found, strict=True)
    ]


def show_fig01(found: Any, page: Page) -> None:
    page.say(
        "Conversation trace, 16 nodes, profile a800-loaded, nobody refused. Attained: share of "
        "requests with TTFT <= 30 s and a TBT (mean of the longest tenth of the gaps) within the "
        "limit. Coupled nodes prefill and decode, keep local caches of 3 M tokens each, and get "
        "requests by cache-aware placement. KV memory is as large as a decode node's."
    )
    page.table(
        [
            "cluster",
            "speed",
            *(f"TBT <= {limit} ms" for limit in TBT_MS),
            "TTFT alone",
            "mean TTFT, s",
            "TBT p50, ms",
            "TBT p90, ms",
        ],
        [
            [
                row["cluster"],
                f"{row['speed']:g}",
                *(f"{row['shares'][str(limit)]:.3f}" for limit in TBT_MS),
                f"{row['attainment_ttft']:.3f}",
                f"{row['ttft_mean_s']:.2f}",
                f"{row['tbt_p50_ms']:.0f}",
                f"{row['tbt_p90_ms']:.0f}",
            ]
            for row in found
        ],
    )
    shares = {(row["cluster"], row["speed"]): row["shares"] for row in found}
    ours, theirs = list(CLUSTERS)[:2], list(CLUSTERS)[2:]
    page.say("Disaggregated over coupled, as the paper counts (fractions at one replay speed):")
    page.table(
        ["over", "of", "speed", *(f"TBT <= {limit} ms" for limit in TBT_MS)],
        [
            [
                other,
                one,
                f"{speed:g}",
                *(_gain(shares[one, speed][str(n)], shares[other, speed][str(n)]) for n in TBT_MS),
            ]
            for one in ours
            for other in theirs
            for speed in sorted({row["speed"] for row in found})
        ]
        + [["paper: vLLM", "Mooncake", "not given", *PAPER_GAIN.values()]],
    )
    page.say(
        "How large the gain is depends on the load and on the split. With 6 + 10, the better one "
        "for this trace, it is largest at the tightest limit up to 1.25 times real time, as in "
        "the paper, and there it is of the paper's size. (The paper's range, 59% to 498%, is in "
        "its abstract; the value between, and which limit has which, were not verified.) Beyond "
        "1.3 times real time eight decode nodes are more than full, whoever places, and coupled "
        "nodes, all of which decode, can be ahead of 8 + 8. Whole prompts do better here than "
        "chunks, since every pass with prefill has a fixed cost of 68 ms on these nodes: chunks "
        "of 512, tried as well, do not keep up with the trace. What differs from the paper: its "
        "baseline is one version of vLLM with a scheduler of its own; here the same core serves "
        "every arm."
    )


def _gain(ours: float, theirs: float) -> str:
    return "from nothing" if theirs == 0 else f"{ours / theirs - 1:+,.0%}"


def draw_fig01(found: Any) -> Any:
    import matplotlib.pyplot as plt

    speeds = sorted({row["speed"] for row in found})
    figure, panels = plt.subplots(
        1, len(speeds), figsize=(11, 3.8), sharey=True, layout="constrained", squeeze=False
    )
    colors = [SHADES[2], SHADES[1], "#fd8d3c", "#d94801"]
    for axes, speed in zip(panels[0], speeds, strict=True):
        for at, (name, color) in enumerate(zip(CLUSTERS, colors, strict=True)):
            row = next(r for r in found if r["cluster"] == name and r["speed"] == speed)
            places = [i + (at - 1.5) * 0.21 for i in range(len(TBT_MS))]
            shares = [row["shares"][str(limit)] for limit in TBT_MS]
            bars = axes.bar(places, shares, 0.2, color=color, label=name)
            axes.bar_label(bars, fmt="{:.2f}", fontsize=6.5, padding=1)
        axes.set_xticks(range(len(TBT_MS)), [str(limit) for limit in TBT_MS])
        axes.set(title=f"speed {speed:g}", xlabel="limit of TBT, ms", ylim=(0, 1.08))
        axes.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("share of requests that attain")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


FIG05 = (measure_fig05, show_fig05, draw_fig05)
FIG15 = (measure_fig15, show_fig15, draw_fig15)
FIG01 = (measure_fig01, show_fig01, draw_fig01)
