"""A hot spot: what copies of a prefix that most requests share are worth to each policy."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.paper.lab import Lab, Page

from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.synthesize import Shape, synthesize

SHAPE = Shape(hot_share=0.6, hot_tokens=8_192, output_tokens=100)
RPS = 12.0
STORES = {
    True: "one copy of each block, as in the embedded store",
    False: "each instance keeps what it computes",
}
FIGURES = [
    "completed", "ttft_mean_s", "ttft_p99_s", "imbalance", "hit_rate_tokens", "busy_prefill",
    "spread_copies", "spread_bytes", "transfer_bytes",
]  # fmt: skip


def served(requests: int, policy: str, one_copy: bool, spreads: bool) -> dict[str, Any]:
    """One cell of the table."""
    arm = {"policy": policy, "one_copy": one_copy}
    most = Tuning().spread_bytes if spreads else 0
    setup = setup_of({**arm, "spread_bytes": most, "tbt_slo": None})  # prefill alone counts
    sim = Simulation(synthesize(1, requests, RPS, SHAPE), setup)
    sim.run()
    found = measure(sim, 0.0).summary
    return {**arm, "spreads": spreads, **{name: found[name] for name in FIGURES}}


def measure_hotspot(lab: Lab) -> Any:
    count = 300 if lab.quick else 2_000
    cells = [(p, one, b) for one in STORES for p in lab.policies() for b in (False, True)]
    rows = lab.run([partial(served, count, *cell) for cell in cells])
    return lab.with_others(lab.before("hotspot") or [], rows)


def show_hotspot(found: Any, page: Page) -> None:
    page.say(
        f"Made-up chat, {RPS:g} requests a second on 8 + 8 nodes (a800-loaded), nobody refused: "
        f"{SHAPE.hot_share:.0%} of sessions begin with the same {SHAPE.hot_tokens:,} tokens. Each "
        "pair of figures is without / with copies of hot prefixes (`--spread-bytes 0` / 8GiB). "
        "Imbalance: the busiest prefill node over the mean. Hit rate: input tokens not computed. "
        "Copies: of the hot prefix and of long chats that many turns go on from."
    )
    for one_copy, store in STORES.items():
        page.say(f"**{store}**")
        rows = []
        for policy in POLICIES:
            pair = [r for r in found if (r["policy"], r["one_copy"]) == (policy, one_copy)]
            if not pair:
                continue
            without, spread = sorted(pair, key=lambda row: row["spreads"])
            cells = [
                f"{without[name]:{form}} / {spread[name]:{form}}"
                for name, form in (
                    ("ttft_mean_s", ".2f"),
                    ("ttft_p99_s", ".2f"),
                    ("imbalance", ".2f"),
                    ("hit_rate_tokens", ".3f"),
                )
            ]
            copied = f"{spread['spread_copies']} ({spread['spread_bytes'] / 1e9:,.0f} GB)"
            rows.append([policy, *cells, copied])
        page.table(
            ["policy", "mean TTFT, s", "p99 TTFT, s", "imbalance", "hit rate", "copies"], rows
        )
    page.say(
        "With one copy of each block, what an instance computes of the prefix is lost to it, and "
        "rules that never fetch compute it again at every turn, or follow its one holder: copies "
        "help all of them. Where each instance keeps what it computes, the prefix spreads by "
        "itself under rules that look at queues, and copies change little; they help where a rule "
        "follows the cache so far that a second holder never comes to be. They do not help "
        "kvcache_centric, which keeps what it fetches, and hardly late_binding, for which loading "
        "costs milliseconds. sglang_cache_aware keeps its imbalance: of equal holders it names the "
        "first. llmd_scorers gives up hits for balance: once there are holders enough, queues "
        "outweigh what it scores for the tails of chats."
    )


def draw_hotspot(found: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axes, (one_copy, store) in zip(panels, STORES.items(), strict=True):
        for at, (spread, color, label) in enumerate(
            ((False, "#9ecae1", "without copies"), (True, "#084594", "with copies"))
        ):
            rows = [r for r in found if (r["one_copy"], r["spreads"]) == (one_copy, spread)]
            rows.sort(key=lambda row: list(POLICIES).index(row["policy"]))
            heights = [i + 0.4 * at for i in range(len(rows))]
            axes.barh(heights, [r["ttft_mean_s"] for r in rows], 0.4, color=color, label=label)
        axes.set_yticks([i + 0.2 for i in range(len(rows))], [r["policy"] for r in rows])
        axes.set(title=store, xlabel="mean TTFT, s", xscale="log")
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower right")
    return figure


HOTSPOT = (measure_hotspot, show_hotspot, draw_hotspot)
