"""Chunked pipeline parallelism: how quick groups are, and what they do to everybody else."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from bench.paper.lab import Lab, Page

from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.trace import Row, Trace, head, read_trace, scale

FORMS = {"chain": "parts of the prompt", "layers": "shares of the layers"}
NODES = [1, 2, 4, 8]
PROMPTS = [32_768, 65_536, 98_304, 131_072]
ARMS: dict[str, dict[str, Any]] = {
    "one node": {"cpp": 1},
    "up to 8, parts of the prompt": {"cpp": 8},
    "up to 8, shares of the layers": {"cpp": 8, "cpp_form": "layers"},
}
SPEEDS = [1.0, 1.5, 2.0]
ROWS = 2_000
ADMISSIONS = ["none", "predictive"]
GOALS: dict[str, Any] = {"ttft_slo": "10s", "tbt_slo": "100ms", "first_token": "decode"}
LONG = 64_000
"""Tokens from which on a prompt is a long one: 10 s of one node's time."""


# Alone.


def alone(form: str, tokens: int, nodes: int) -> dict[str, Any]:
    """One prompt in an idle cluster, by exactly so many nodes."""
    trace = Trace("one prompt", 512, [Row(0, tokens, 2, tuple(range(-(-tokens // 512))))])
    hurry = "1ms" if nodes > 1 else None  # never met, so as many as may be share it
    sim = Simulation(
        trace,
        setup_of(
            {"split": f"{nodes}+1", "cpp": nodes, "cpp_form": form, "ttft_slo": hurry}
            | {"profile": "a800"}
        ),
    )
    sim.run()
    [served] = sim.served
    decision = served.judged
    assert decision is not None
    assert served.first_us is not None
    found: dict[str, Any] = {
        "form": form,
        "tokens": tokens,
        "nodes": nodes,
        "ttft_s": served.first_us / 1e6,
    }
    found["predicted_s"] = decision.predicted_ttft_us / 1e6
    found["spent_s"] = served.prefill_us / 1e6
    found["parts"] = [stage.end - stage.start for stage in decision.stages]
    found["chunks"] = decision.stages[0].pieces if decision.stages else 1
    return found


def measure_alone(lab: Lab) -> Any:
    return [alone(f, t, n) for f in FORMS for t in lab.some(PROMPTS) for n in NODES]


def show_alone(found: Any, page: Page) -> None:
    page.say(
        "One prompt in an idle cluster of so many prefill nodes, profile a800 (LLaMA3-70B on "
        "8xA800; links of 87 GB/s, 80 layers), nothing reused. Ideal: the time of one node over "
        "their number. Spent: what the nodes computed together, waiting included. Predicted by "
        "the planner before it began; measured in the simulator, where KV also moves to the decode "
        "node over the same links."
    )
    for form, name in FORMS.items():
        rows = [row for row in found if row["form"] == form]
        ones = {row["tokens"]: row["ttft_s"] for row in rows if row["nodes"] == 1}
        page.say(f"**{name}**")
        page.table(
            [
                "prompt tokens", "nodes", "TTFT, s", "ideal, s", "of the ideal", "predicted, s",
                "spent, node-s", "parts of the prompt" if form == "chain" else "chunks",
            ],
            [
                [
                    f"{row['tokens']:,}",
                    row["nodes"],
                    f"{row['ttft_s']:.2f}",
                    f"{ones[row['tokens']] / row['nodes']:.2f}",
                    f"{ones[row['tokens']] / row['nodes'] / row['ttft_s']:.0%}",
                    f"{row['predicted_s']:.2f}",
                    f"{row['spent_s']:.2f}",
                    " ".join(f"{part:,}" for part in row["parts"])
                    if form == "chain"
                    else row["chunks"],
                ]
                for row in rows
            ],
        )  # fmt: skip
    page.say(
        "What is lost against the ideal: every pass has a base (68 ms here) and reads the KV of "
        "what is before it, which eight passes do eight times; each stage begins a layer behind "
        "the one before; and parts are whole blocks. Stages over layers pay the base and the "
        "reading once for every chunk, and the pipeline has to fill: more chunks fill it sooner "
        "and cost more."
    )


def draw_alone(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    colors = plt.get_cmap("viridis")
    for axes, (form, name) in zip(panels, FORMS.items(), strict=True):
        lengths = sorted({row["tokens"] for row in found})
        for at, tokens in enumerate(lengths):
            rows = [r for r in found if r["form"] == form and r["tokens"] == tokens]
            color = colors(at / len(PROMPTS))
            nodes, times = [r["nodes"] for r in rows], [r["ttft_s"] for r in rows]
            axes.plot(nodes, times, "o-", ms=4, color=color, label=f"{tokens // 1024}k tokens")
            axes.plot(nodes, [times[0] / n for n in nodes], ":", lw=1, color=color)
        axes.set(title=name, xlabel="prefill nodes", xscale="log", yscale="log")
        axes.set_xticks(NODES, [str(n) for n in NODES])
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("TTFT, s (dotted: ideal)")
    panels[0].legend()
    return figure


# Among others.


def with_long(trace: Trace, every_s: float, seed: int = 1) -> Trace:
    """The trace, and among it prompts of 64,000 to 128,000 tokens that nobody else has."""
    rng = Random(seed)
    rows, block = list(trace.rows), 1 + max(max(row.blocks) for row in trace.rows)
    at_s, last_s = rng.expovariate(1 / every_s), trace.rows[-1].at_us / 1e6
    while at_s < last_s:
        tokens = round(LONG * math.exp(rng.uniform(0, math.log(2))))
        blocks = -(-tokens // 512)
        rows.append(Row(round(at_s * 1e6), tokens, 200, tuple(range(block, block + blocks))))
        block += blocks
        at_s += rng.expovariate(1 / every_s)
    return Trace(f"{trace.name} and long prompts", 512, sorted(rows, key=lambda row: row.at_us))


def among(path: Path, rows: int, speed: float, admission: str, arm: str) -> dict[str, Any]:
    """One cell."""
    trace = scale(with_long(head(read_trace(path), rows), 12.0), speed)
    sim = Simulation(trace, setup_of({**GOALS, "admission": admission, **ARMS[arm]}))
    sim.run()
    result = measure(sim, 0.0)
    found: dict[str, Any] = {"speed": speed, "admission": admission, "arm": arm}
    for name in ("goodput_rps", "goodput_tokens_per_s", "attainment", "rejected", "busy_prefill"):
        found[name] = result.summary[name]
    for name, wanted in (("long", True), ("other", False)):
        them = [row for row in result.rows if (row.input_tokens >= LONG) == wanted]
        times = [row.ttft_s for row in them if row.ttft_s is not None]
        found[f"{name}_count"] = len(them)
        found[f"{name}_good"] = sum(row.met_ttft and row.met_tbt for row in them)
        found[f"{name}_ttft_s"] = sum(times) / len(times) if times else None
        found[f"{name}_p90_s"] = sorted(times)[len(times) * 9 // 10] if times else None
    groups = [len(s.judged.stages) for s in sim.served if s.judged and s.judged.stages]
    found["groups"], found["members"] = len(groups), sum(groups)
    return found


def measure_among(lab: Lab) -> Any:
    rows = 300 if lab.quick else ROWS
    path = lab.path("conversation")
    keys = [(s, a, arm) for a in ADMISSIONS for s in lab.some(SPEEDS) for arm in ARMS]
    return lab.run([partial(among, path, rows, *key) for key in keys])


def show_among(found: Any, page: Page) -> None:
    page.say(
        f"The first {ROWS:,} requests of the conversation trace, and among them, every 12 s on "
        f"average, a prompt of {LONG:,} to {2 * LONG:,} tokens that nobody else has, with 200 "
        "tokens of output: one request in 18, a third of the tokens. 8 + 8 nodes, profile "
        "a800-loaded, TTFT <= 10 s and TBT <= 100 ms: one node alone would need 10 to 27 s for "
        "the long ones. Good: meets both; a share of all, the refused included."
    )
    for admission in ADMISSIONS:
        page.say(f"**admission {admission}**")
        rows = [row for row in found if row["admission"] == admission]
        page.table(
            [
                "speed", "who prefills", "good, long", "good, others", "TTFT long, s",
                "TTFT others, s", "p90 others, s", "refused", "good /s", "good tokens/s",
                "shared", "mean size", "prefill busy",
            ],
            [
                [
                    f"{row['speed']:g}",
                    row["arm"],
                    f"{_share(row, 'long'):.1%}",
                    f"{_share(row, 'other'):.1%}",
                    _number(row["long_ttft_s"]),
                    _number(row["other_ttft_s"]),
                    _number(row["other_p90_s"]),
                    f"{row['rejected']:,}",
                    f"{row['goodput_rps']:.2f}",
                    f"{row['goodput_tokens_per_s']:,.0f}",
                    f"{row['groups']:,}",
                    _number(row["members"] / row["groups"] if row["groups"] else None),
                    f"{row['busy_prefill']:.0%}",
                ]
                for row in rows
            ],
        )  # fmt: skip
    page.say(
        "A group costs more than one node (a tenth more for 8, see [the page before](cpp.md)) and "
        "holds all its nodes at once, and what it serves was refused before: the others' TTFT "
        "grows by the long prompts' share of the work. At real time that takes next to nobody's "
        "objective. Beyond, long prompts are served at the price of short ones: at 1.5 times real "
        "time, with admission, 77 long ones more and 166 others less, as many requests a second "
        "and 27% more tokens; at twice, fewer requests and 13% more tokens. Who wants requests "
        "rather than tokens there leaves them unshared. Without admission everybody is late beyond "
        "real time, shared or not. Two rules came of such tables. Only a prompt that is too long "
        "for one idle node is shared: sharing whatever a queue makes late cost up to 3% of the "
        "requests a second. And one that is late all the same is shared by idle nodes only: when "
        "all nodes took part in whatever seemed to save time, the mean TTFT at 1.5 times real "
        "time without admission (1,500 requests) was 116 s, not 21."
    )


def _share(row: Any, of: str) -> float:
    return float(row[f"{of}_good"] / max(1, row[f"{of}_count"]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw_among(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    colors = plt.get_cmap("tab10")
    for line, admission in zip(panels, ADMISSIONS, strict=True):
        for at, arm in enumerate(ARMS):
            rows = [r for r in found if r["admission"] == admission and r["arm"] == arm]
            xs = [row["speed"] for row in rows]
            lines = {
                "good, long prompts": [_share(r, "long") for r in rows],
                "good, others": [_share(r, "other") for r in rows],
                "goodput, tokens/s": [r["goodput_tokens_per_s"] for r in rows],
            }
            for axes, (label, ys) in zip(line, lines.items(), strict=True):
                axes.plot(xs, ys, "o-", ms=3, color=colors(at), label=arm)
                axes.set(title=f"admission {admission}", xlabel="speed", ylabel=label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


ALONE = (measure_alone, show_alone, draw_alone)
AMONG = (measure_among, show_among, draw_among)
