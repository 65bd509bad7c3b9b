"""Overload: what each mode of admission refuses, wastes and serves; the see-saw of the pools."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from bench.paper.lab import Lab, Page

from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.seesaw import loads
from moonserve.sim.trace import Row, Trace, read_trace, scale

ARMS: dict[str, dict[str, Any]] = {
    "none": {"admission": "none"},
    "ttft": {"admission": "ttft"},
    "early": {"admission": "early"},
    "predictive, uniform t_d": {"admission": "predictive", "predictor": "uniform"},
    "predictive, survival": {"admission": "predictive", "predictor": "survival"},
    "predictive, survival, for tokens": {
        "admission": "predictive",
        "predictor": "survival",
        "overtaken": 0.0,
    },
    "predictive, oracle": {"admission": "predictive", "predictor": "oracle"},
}
STREAMED: dict[str, dict[str, Any]] = {
    f"{arm}, first token from prefill": {**ARMS[arm], "first_token": "prefill"}
    for arm in ("ttft", "early", "predictive, survival")
}
"""The second token is a pass later then, which counts in the TBT."""
SPEEDS = [1.0, 1.25, 1.5, 2.0, 3.0]
TRACES = ["conversation", "synthetic"]
BASE: dict[str, Any] = {"tbt_slo": "100ms", "first_token": "decode"}
PAPER = {"ttft": 4183, "early": 3771, "predictive, uniform t_d": 3589}
"""arXiv Table 3: requests refused at twice real time: baseline, early, predictive."""
SEESAW = {**BASE, "split": "24+2", "ttft_slo": "40s"}
OPEN = {"open loop, at random": (0.8, False), "open loop, paced": (0.8, True)}
"""Nobody is refused: requests a second that both pools can take, and whether at equal distances."""
SHOWN = ["early", "predictive, survival", "open loop, at random", "open loop, paced"]
COLORS = {"prefill": "#084594", "decode": "#d94801"}
FIGURES = [
    "rejected", "rejected_ttft_slo", "rejected_tbt_slo", "dropped_tbt_slo", "wasted_prefill_s",
    "completed", "requests", "attainment", "goodput_rps", "goodput_tokens_per_s", "ttft_mean_s",
    "ttft_p90_s", "decode_tbt_bias_ms", "decode_tbt_error_p50_ms", "decode_tbt_error_p90_ms",
    "seesaw_correlation", "seesaw_amplitude_prefill", "seesaw_amplitude_decode", "seesaw_period_s",
    "seesaw_dispersion_prefill", "seesaw_dispersion_decode",
]  # fmt: skip


# Rejections.


def served(path: Path, speed: float, arm: str) -> dict[str, Any]:
    """One cell of the table."""
    axes = {**BASE, **{**ARMS, **STREAMED}[arm]}
    sim = Simulation(scale(read_trace(path), speed), setup_of(axes))
    sim.run()
    found = measure(sim, 0.0).summary
    good = round(found["attainment"] * found["requests"])
    return {"speed": speed, "arm": arm, "good": good, **{name: found[name] for name in FIGURES}}


def measure_rejections(lab: Lab) -> Any:
    keys = [(t, s, a) for t in TRACES for s in lab.some(SPEEDS) for a in (*ARMS, *STREAMED)]
    found = lab.run([partial(served, lab.path(t), s, a) for t, s, a in keys])
    return [{"trace": t, **row} for (t, _, _), row in zip(keys, found, strict=True)]


def show_rejections(found: Any, page: Page) -> None:
    page.say(
        "8 + 8 nodes, profile a800-loaded, Algorithm 1, TTFT <= 30 s and TBT <= 100 ms, first "
        "token from decode but where said: streamed by prefill, the second waits for the pass "
        "under way, and fewer can decode within the same TBT. "
        "Good: requests that meet both. Dropped: refused when their prefill "
        "had ended. Served too late: admitted, answered, and not good. "
        "Tokens: input and output of good requests. Bias and p50: TBT predicted at "
        "admission for the moment when prefill ends, less what it was."
    )
    for trace in TRACES:
        page.say(f"**{trace}**")
        rows = [row for row in found if row["trace"] == trace]
        page.table(
            [
                "speed", "admission", "refused", "of these dropped", "wasted prefill, s",
                "served too late", "good", "good /s",
                "good tokens/s", "mean TTFT, s", "TBT bias, ms", "error p50, ms",
            ],
            [
                [
                    f"{row['speed']:g}",
                    row["arm"],
                    f"{row['rejected']:,}",
                    f"{row['dropped_tbt_slo']:,}",
                    f"{row['wasted_prefill_s']:,.0f}",
                    f"{row['completed'] - row['good']:,}",
                    f"{row['attainment']:.3f}",
                    f"{row['goodput_rps']:.2f}",
                    f"{row['goodput_tokens_per_s']:,.0f}",
                    f"{row['ttft_mean_s']:.2f}",
                    f"{row['decode_tbt_bias_ms']:+.1f}",
                    f"{row['decode_tbt_error_p50_ms']:.1f}",
                ]
                for row in rows
            ],
        )  # fmt: skip
    said = ", ".join(f"{arm} {count:,}" for arm, count in PAPER.items())
    page.say(
        f"arXiv Table 3 (its own trace of 23,000 requests, at twice real time): refused {said}. "
        "How many are refused depends on the trace and says little by itself: what can be served "
        "is given by decode here, and a mode differs in what it spends on those it does not serve, "
        "and in whom it serves. `ttft` and `early` favour short prompts, since those overtake the "
        "long ones between admission and hand-over, and the long ones are dropped. Predictive "
        "admission keeps room for as much of that as `overtaken` says: three quarters by default, "
        "none of it in the row for tokens: fewer requests, far more tokens. It also "
        "counts on a short wait for room (`held_share`): without that, decode is idle at times for "
        "what was forecast and does not come. Uniform t_d shows that carried too far: it is low "
        "by design and lets in too many, who then wait for room in decode as long as their TTFT "
        "allows, and short prompts are first again. Measured and left out: a reservation, which "
        "admits only what leaves room at every hand-over promised already (conversation, 2 times, "
        "no wait: 57,098 tokens/s and 3.74 requests/s, 22 s wasted; without it, `overtaken` 0: "
        "56,125, 3.76, 97 s), and that with one standard deviation above the mean (54,155, 3.69). "
        "How far one run says anything: variants of `survival` that differ in nothing but how "
        "often its tables are made anew have 4,768 to 4,872 good requests on conversation at 3 "
        "times, 7,123 to 7,202 at twice, and waste 64 to 136 s and 11 to 36 s; two per cent are "
        "chance."
    )


def draw_rejections(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    figures = {
        "wasted_prefill_s": "wasted prefill, s",
        "goodput_rps": "goodput, requests/s",
        "goodput_tokens_per_s": "goodput, tokens/s",
    }
    colors = plt.get_cmap("tab10")
    for line, trace in zip(panels, TRACES, strict=True):
        for axes, (name, label) in zip(line, figures.items(), strict=True):
            for at, arm in enumerate(ARMS):
                rows = [r for r in found if r["trace"] == trace and r["arm"] == arm]
                xs, ys = [r["speed"] for r in rows], [r[name] for r in rows]
                axes.plot(xs, ys, "o-", ms=3, color=colors(at), label=arm)
            axes.set(title=trace, xlabel="speed", ylabel=label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return figure


# See-saw.


def long_prompts(
    seed: int, requests: int, rps: float, prompt: int, output: int, paced: bool = False
) -> Trace:
    """Arrivals, Poisson or paced, of unlike prompts, log-normal around their medians.

    Nothing is reused.
    """
    rng = Random(seed)
    rows, at_s, block = [], 0.0, 0
    for _ in range(requests):
        tokens = max(512, round(prompt * math.exp(rng.gauss(0, 0.1))))
        made = max(2, round(output * math.exp(rng.gauss(0, 0.3))))
        blocks = -(-tokens // 512)
        rows.append(Row(round(at_s * 1e6), tokens, made, tuple(range(block, block + blocks))))
        block += blocks
        at_s += 1 / rps if paced else rng.expovariate(rps)
    return Trace("long prompts", 512, rows)


def swung(arm: str, requests: int) -> dict[str, Any]:
    """One arm on long prompts, with the pools' loads over time."""
    axes = ARMS["none"] if arm in OPEN else ARMS[arm]
    rps, paced = OPEN.get(arm, (1.5, False))
    trace = long_prompts(1, requests, rps, 100_000, 200, paced)
    setup = msgspec.structs.replace(setup_of({**SEESAW, **axes}), sample_us=2_000_000)
    sim = Simulation(trace, setup)
    sim.run()
    found = measure(sim, 0.0).summary
    names = ("times_s", "prefill_load", "decode_load")
    lines = {n: [round(v, 2) for v in s.tolist()] for n, s in zip(names, loads(sim), strict=True)}
    return {"arm": arm, **{name: found[name] for name in FIGURES}, **lines}


def measure_seesaw(lab: Lab) -> Any:
    count = 300 if lab.quick else 3_000
    return lab.run([partial(swung, arm, count) for arm in (*ARMS, *OPEN)])


def show_seesaw(found: Any, page: Page) -> None:
    page.say(
        "Made for it: prompts around 100,000 tokens (18 s of prefill), outputs around 200 (some "
        "18 s of decode), 1.5 requests a second on 24 + 2 nodes: more than either pool can take. "
        "TTFT <= 40 s, TBT <= 100 ms, first token from decode. Load: requests on a node of the "
        "pool, waiting ones included, every 2 s; correlation of the two pools, amplitude as half "
        "the spread from 5% to 95% over the mean, and period. Dispersion: the variance of the "
        "number of requests in a pool over its mean, 1 where they come at random. The last two "
        "rows have no admission: 0.8 requests a second, which both pools can take, at random "
        "times and at equal distances."
    )
    page.table(
        [
            "admission", "correlation", "amplitude, prefill", "amplitude, decode",
            "dispersion, prefill", "dispersion, decode", "period, s", "refused", "of these dropped",
            "wasted prefill, s", "good", "good /s", "good tokens/s",
        ],
        [
            [
                row["arm"],
                f"{row['seesaw_correlation']:+.2f}",
                f"{row['seesaw_amplitude_prefill']:.2f}",
                f"{row['seesaw_amplitude_decode']:.2f}",
                f"{row['seesaw_dispersion_prefill']:.2f}",
                f"{row['seesaw_dispersion_decode']:.2f}",
                "-" if row["seesaw_period_s"] is None else f"{row['seesaw_period_s']:.0f}",
                f"{row['rejected']:,}",
                f"{row['dropped_tbt_slo']:,}",
                f"{row['wasted_prefill_s']:,.0f}",
                f"{row['attainment']:.3f}",
                f"{row['goodput_rps']:.3f}",
                f"{row['goodput_tokens_per_s']:,.0f}",
            ]
            for row in found
        ],
    )  # fmt: skip
    page.say(
        "What the correlation says: no more than that the sum of the loads is steadier than "
        "each. A paced stream with nobody refused has one as negative as predictive admission, "
        "since a request that leaves one pool enters the other; at random times the sum varies "
        "with the arrivals, which hides that. So it is no sign of a swing, and a rule that took"
        " it away would have to let the total vary. The swing is what `early` adds to chance: "
        "its prefill load disperses more than that of arrivals at random, decode's follows a "
        "prefill later, so that the two are a quarter of a period apart and correlate by nearly"
        " nothing. Under predictive admission both disperse less than by chance."
    )


def draw_seesaw(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len(SHOWN), 1, figsize=(11, 8.5), sharex=True, layout="constrained", squeeze=False
    )
    for [axes], arm in zip(panels, SHOWN, strict=True):
        row = next(one for one in found if one["arm"] == arm)
        for pool, color in COLORS.items():
            load = row[f"{pool}_load"]
            mean = sum(load) / max(1, len(load)) or 1.0
            axes.plot(row["times_s"], [v / mean for v in load], color=color, lw=1, label=pool)
        said = f"{arm}: correlation {row['seesaw_correlation']:+.2f}, dispersion "
        said += " and ".join(f"{row[f'seesaw_dispersion_{pool}']:.2f}" for pool in COLORS)
        axes.set(title=said, ylim=(0, 2.5))
        axes.set_ylabel("load over its mean")
    last_s = min(row["times_s"][-1] for row in found if row["arm"] in SHOWN)
    panels[-1][0].set(xlabel="seconds", xlim=(0, last_s))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


REJECTIONS = (measure_rejections, show_rejections, draw_rejections)
SEESAW_FIGURE = (measure_seesaw, show_seesaw, draw_seesaw)
