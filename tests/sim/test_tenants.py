"""One tenant asks for nine times as much as another, of a cluster that holds a third of it all."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from moonserve.sim.axes import setup_of
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.trace import Row, Trace


def flood(seed: int, requests: int, rps: float, calm: float) -> Trace:
    """Prompts of about 8,000 tokens that share nothing, outputs of about 200."""
    rng, rows, at_s, block = Random(seed), list[Row](), 0.0, 0
    for _ in range(requests):
        tokens = max(512, round(8_000 * rng.lognormvariate(0, 0.5)))
        made = max(2, round(200 * rng.lognormvariate(0, 0.5)))
        blocks = tuple(range(block, block - (-tokens // 512)))
        tenant = "calm" if rng.random() < calm else "flood"
        rows.append(Row(round(at_s * 1e6), tokens, made, blocks, 0, tenant))
        block += len(blocks)
        at_s += rng.expovariate(rps)
    return Trace("flood", 512, rows)


def good(calm: float = 0.1, **axes: Any) -> dict[str, tuple[float, int]]:
    """By tenant, the share of its requests within their objectives, and their input tokens."""
    values = {"split": "4+4", "ttft_slo": "10s", **axes}
    sim = Simulation(flood(1, 800, 8.0, calm), setup_of(values))
    sim.run()
    asked, met, tokens = Counter[str](), Counter[str](), Counter[str]()
    for row in measure(sim, 0.0).rows:
        asked[row.tenant] += 1
        if row.met_ttft and row.met_tbt:
            met[row.tenant] += 1
            tokens[row.tenant] += row.input_tokens
    return {name: (met[name] / asked[name], tokens[name]) for name in asked}


@pytest.mark.parametrize(
    ("policy", "admission"),
    [
        ("kvcache_centric", "predictive"),
        ("least_loaded", "predictive"),
        ("dynamo_overlap", "predictive"),
        ("late_binding", "predictive"),
        ("late_binding", "none"),
    ],
)
def test_who_asks_for_less_than_its_part_gets_it(policy: str, admission: str) -> None:
    """Nearly all of it, whoever places, while the other is served less than half."""
    found = good(policy=policy, admission=admission)
    assert found["calm"][0] > 0.85
    assert found["flood"][0] < 0.6


def test_who_asks_for_more_than_its_part_gets_a_like_part() -> None:
    """Where two ask for more than half each, each gets about half of the tokens."""
    found = good(calm=0.3, admission="predictive")
    assert 0.75 < found["calm"][1] / found["flood"][1] < 1.33


def test_where_nobody_is_refused_on_arrival_all_wait_alike() -> None:
    """Policies that bind on arrival share by refusing; without that the flood is before all."""
    found = good(policy="kvcache_centric", admission="none")
    assert found["calm"][0] < 0.2
