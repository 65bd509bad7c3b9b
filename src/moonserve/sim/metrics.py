"""From a finished simulation to numbers with stable names: the summary, and one row per request.

It reads what the simulation left and changes nothing. Names end in their unit: seconds or
milliseconds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonserve.core.request import Slo
from moonserve.core.units import Tokens
from moonserve.sim.cluster import Simulation
from moonserve.sim.hindsight import could_have_been_served
from moonserve.sim.node import Node
from moonserve.sim.seesaw import loads, swing
from moonserve.sim.served import Served

Times = NDArray[np.float64]


class RequestRow(msgspec.Struct, frozen=True):
    """One request's figures."""

    id: str
    arrived_s: float
    tenant: str
    priority: int
    input_tokens: Tokens
    output_tokens: Tokens
    outcome: str
    prefill: str | None
    decode: str | None
    cached_tokens: Tokens
    ttft_s: float | None
    predicted_ttft_s: float | None
    waited_s: float | None
    """Time that it waited at the Conductor; part of the TTFT."""
    prefill_s: float
    """Engine time of its prefills."""
    tbt_ms: float | None
    """The paper's TBT: the mean of the longest tenth of its gaps, of at least one gap."""
    predicted_tbt_ms: float | None
    met_ttft: bool
    met_tbt: bool


class Lost(msgspec.Struct, frozen=True):
    """Requests that were refused, or failed, for similar reasons."""

    outcome: str
    count: int
    reason: str
    """The reason of a refusal, for programs."""
    why: str
    """The text of the first of them."""
    first: str


class Result(msgspec.Struct):
    """A run in numbers."""

    summary: dict[str, Any]
    rows: list[RequestRow]
    gaps_ms: NDArray[np.float32]
    """Every gap between two tokens of one request."""
    lost: list[Lost] = []
    """Lost requests by reason, the most frequent first."""


def measure(sim: Simulation, cpu_s: float) -> Result:
    """All figures of a run. `cpu_s`: the CPU time of the simulation."""
    rows: list[RequestRow] = []
    gaps: list[Times] = []
    ends: dict[Node, Times] = {}
    for served in sim.served:
        own = gaps_ms(served, ends)
        gaps.append(own)
        rows.append(_row(served, own, sim.setup.goal))
    all_gaps = np.concatenate(gaps).astype(np.float32) if gaps else np.zeros(0, np.float32)
    return Result(_summary(sim, rows, all_gaps, cpu_s), rows, all_gaps, _lost(sim))


def queues(sim: Simulation, most: int = 200) -> dict[str, list[float]]:
    """Where requests stood, at up to `most` of the samples, evenly chosen.

    times_s: on the trace's clock. waiting: at the Conductor. prefill_queued: on instances that
    prefill, not begun. decode_queued: the same on instances that only decode. decoding: in passes
    of instances that decode; on mixed instances, prefilling requests count too.
    """
    count = len(sim.samples)
    chosen = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    samples = [sim.samples[at] for at in chosen]
    roles = [node.info.role for node in sim.nodes.values()]

    def on(found: Sequence[int], *wanted: str) -> int:
        return sum(n for n, role in zip(found, roles, strict=True) if role in wanted)

    return {
        "times_s": [sample.at_us / 1e6 for sample in samples],
        "waiting": [sample.conductor for sample in samples],
        "prefill_queued": [on(sample.waiting, "prefill", "both") for sample in samples],
        "decode_queued": [on(sample.waiting, "decode") for sample in samples],
        "decoding": [on(sample.running, "decode", "both") for sample in samples],
    }


def gaps_ms(served: Served, ends: dict[Node, Times]) -> Times:
    """Times between one token and the next, in order. `ends` is filled with each node's passes."""
    if served.outcome != "completed":
        return np.zeros(0)
    parts = [np.array(served.prefilled_tokens_us, np.float64)]
    for node, call in served.calls:
        if node not in ends:  # by node, not by name: the instance may have died and joined again
            ends[node] = np.asarray(node.ends, np.float64)
        parts += [ends[node][first:last] for first, last in call.spans]
    return np.diff(np.sort(np.concatenate(parts))) / 1e3


def paper_tbt_ms(gaps: Times) -> float | None:
    """The paper's TBT of one request: the mean of its longest tenth of gaps, of at least one gap.

    None: there are no gaps.
    """
    if not len(gaps):
        return None
    longest = max(1, len(gaps) // 10)
    return float(np.partition(gaps, len(gaps) - longest)[-longest:].mean())


def _lost(sim: Simulation) -> list[Lost]:
    """Group failures whose texts differ only in numbers."""
    groups: dict[tuple[str, str], list[Served]] = {}
    for one in sim.served:
        if one.outcome in ("refused", "failed"):
            alike = one.reason or re.sub(r"\d+", "", one.why)
            groups.setdefault((one.outcome, alike), []).append(one)
    lost = [
        Lost(outcome, len(them), them[0].reason, them[0].why, them[0].id)
        for (outcome, _), them in groups.items()
    ]
    return sorted(lost, key=lambda it: -it.count)


def _row(served: Served, gaps: Times, goal: Slo) -> RequestRow:
    decision = served.judged
    first_us = served.first_us
    ttft_s = None if first_us is None else (first_us - served.arrived_us) / 1e6
    tbt_ms = paper_tbt_ms(gaps)
    done = served.outcome == "completed"
    return RequestRow(
        id=served.id,
        arrived_s=served.arrived_us / 1e6,
        tenant=served.row.tenant,
        priority=served.row.priority,
        input_tokens=served.row.input_tokens,
        output_tokens=served.row.output_tokens,
        outcome=served.outcome,
        prefill=decision.prefill if decision else None,
        decode=decision.decode if decision else None,
        cached_tokens=served.cached,
        ttft_s=ttft_s,
        predicted_ttft_s=decision.predicted_ttft_us / 1e6 if decision else None,
        waited_s=decision.waited_us / 1e6 if decision else None,
        prefill_s=served.prefill_us / 1e6,
        tbt_ms=tbt_ms,
        predicted_tbt_ms=decision.predicted_tbt_us / 1e3 if decision else None,
        met_ttft=done and _meets(ttft_s, goal.ttft_us, 1e6),
        met_tbt=done and _meets(tbt_ms, goal.tbt_us, 1e3),
    )


def _summary(
    sim: Simulation, rows: Sequence[RequestRow], gaps: NDArray[np.float32], cpu_s: float
) -> dict[str, Any]:
    setup, served = sim.setup, sim.served
    ends_us = [one.ended_us for one in served if one.ended_us is not None]
    first_s = rows[0].arrived_s if rows else 0.0
    span_s = max(1e-6, max(ends_us, default=sim.clock.now_us) / 1e6 - first_s)
    done = [row for row in rows if row.outcome == "completed"]
    ttfts = np.array([row.ttft_s for row in done], float)
    tbts = np.array([row.tbt_ms for row in done if row.tbt_ms is not None], float)
    good = [row for row in done if row.met_ttft and row.met_tbt]
    count = max(1, len(rows))
    tokens = max(1, sum(row.input_tokens for row in rows))
    begun = [one for one in served if one.prefilled_us is not None]
    looked_up = max(1, sum(one.row.input_tokens for one in begun))
    touches = max(1, sum(len(one.row.blocks) for one in begun))
    size = sim.trace.block_size
    prefill_s = np.array([one.prefill_us for one in served if one.prefilled_us], float) / 1e6
    errors = [abs(r.predicted_ttft_s - r.ttft_s) for r in done if r.predicted_ttft_s and r.ttft_s]
    return {
        "policy": setup.tuning.policy,
        "profile": setup.profile.name,
        "prefill": setup.prefill,
        "decode": setup.decode,
        "mixed": setup.mixed,
        "requests": len(rows),
        "completed": len(done),
        "rejected": sum(row.outcome == "refused" for row in rows),
        **_rejections(served),
        "could_have_been_served": could_have_been_served(sim),
        "failed": sum(row.outcome == "failed" for row in rows),
        "span_s": span_s,
        **quantiles("ttft", ttfts, "s", with_mean=True),
        **quantiles("tbt", tbts, "ms"),
        **quantiles("gap", gaps, "ms"),
        "attainment": len(good) / count,
        "attainment_ttft": sum(row.met_ttft for row in rows) / count,
        "attainment_tbt": sum(row.met_tbt for row in rows) / count,
        "goodput_rps": len(good) / span_s,
        "goodput_tokens_per_s": sum(r.input_tokens + r.output_tokens for r in good) / span_s,
        "goodput_token_share": sum(r.input_tokens for r in good) / tokens,
        "hit_rate_tokens": sum(one.cached for one in begun) / looked_up,
        "hit_rate_blocks": sum(one.cached // size for one in begun) / touches,
        "hit_rate_available": sum(one.available for one in begun) / looked_up,
        "prefill_gpu_s_mean": mean(prefill_s),
        "wasted_prefill_s": sum(one.wasted_us for one in served) / 1e6,
        **_predictions(sim),
        **swing(*loads(sim), (setup.prefill, setup.decode)),
        "imbalance": _imbalance([node.busy_us for node in sim.prefills]),
        "imbalance_decode": _imbalance([node.busy_us for node in sim.decodes]),
        "busy_prefill": _share_busy([node.busy_us for node in sim.prefills], span_s),
        "busy_decode": _share_busy([node.busy_us for node in sim.decodes], span_s),
        "ttft_error_mean_s": mean(np.array(errors)),
        "regret_mean_s": mean(np.array([_regret_s(one) for one in served if one.first_us])),
        "shared_prompts": sum(bool(one.judged and one.judged.stages) for one in begun),
        "migrations": sim.carrier.copied_blocks,
        "spread_copies": sim.conductor.hot.done["done"],
        "spread_bytes": sim.conductor.hot.done["bytes"],
        "transfers": sim.carrier.network.transfers,
        "transfer_bytes": sim.carrier.network.bytes,
        "preemptions": sum(node.preemptions for node in sim.nodes.values()),
        "digest": sim.digest.hex(),
        "cpu_s": cpu_s,
    }


def _rejections(served: Sequence[Served]) -> dict[str, Any]:
    """Refusals by reason; those of `dropped_tbt_slo` came after their prefill."""
    reasons = Counter(one.reason for one in served if one.outcome == "refused")
    known = {"rejected_ttft_slo": "ttft_slo", "rejected_tbt_slo": "tbt_slo"}
    known["dropped_tbt_slo"] = "tbt_slo_late"
    found = {name: reasons.pop(reason, 0) for name, reason in known.items()}
    return {**found, "rejected_other": sum(reasons.values())}


def _predictions(sim: Simulation) -> dict[str, Any]:
    """Predicted less actual: TBT on the decode instance when prefill ended, and output lengths."""
    found = {}
    for name, errors, unit in (
        ("decode_tbt_{}_ms", sim.conductor.errors.tbt, 1e3),
        ("output_{}_tokens", sim.conductor.errors.output, 1.0),
    ):
        parts = {
            "bias": errors.bias,
            "error_p50": errors.quantile(0.5),
            "error_p90": errors.quantile(0.9),
        }
        for part, value in parts.items():
            found[name.format(part)] = None if value is None else value / unit
    return found


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, rounded down: 100% means all of them."""
    shift = 10.0 ** (digits + 2)
    return f"{math.floor(round(share * shift, 6)) / shift:.{digits}%}"


def _meets(value: float | None, goal_us: int | None, in_us: float) -> bool:
    """Whether a value in units of `in_us` microseconds is within a goal; a missing value is not."""
    return goal_us is None or value is None or value * in_us <= goal_us


def quantiles(
    name: str, values: NDArray[Any], unit: str, with_mean: bool = False
) -> dict[str, Any]:
    """Quantiles, named after what they measure; None if there are no values."""
    found: dict[str, Any] = {f"{name}_mean_{unit}": mean(values)} if with_mean else {}
    for q in (50, 90, 99):
        found[f"{name}_p{q}_{unit}"] = float(np.percentile(values, q)) if len(values) else None
    return found


def mean(values: NDArray[Any]) -> float | None:
    """The mean; None if there are no values."""
    return float(values.mean()) if len(values) else None


def _imbalance(busy_us: Sequence[int]) -> float | None:
    """The busiest instance over the mean; 1 is even."""
    total = sum(busy_us)
    return max(busy_us) * len(busy_us) / total if total else None


def _share_busy(busy_us: Sequence[int], span_s: float) -> float:
    return sum(busy_us) / 1e6 / span_s / max(1, len(busy_us))


def counterfactual_s(served: Served) -> tuple[str, float] | None:
    """With hindsight: the instance that would have served it soonest, and its TTFT there.

    For each candidate: the time when it really had finished its earlier requests, then the
    candidate's own transfer and compute. What this choice would have done to other requests is left
    out.
    """
    decision = served.judged
    if decision is None or not served.tails:
        return None
    tails = dict(served.tails)
    decided_us = served.arrived_us + decision.waited_us
    best: tuple[str, float] | None = None
    for candidate in served.judged_among:
        tail = tails.get(str(candidate.instance))
        free_us = decided_us
        if tail is not None and tail.prefilled_us is not None:
            free_us = max(free_us, tail.prefilled_us)
        ends_us = free_us + candidate.transfer_us + candidate.compute_us
        ttft_s = (ends_us - served.arrived_us) / 1e6
        if best is None or ttft_s < best[1]:
            best = (str(candidate.instance), ttft_s)
    return best


def _regret_s(served: Served) -> float:
    best = counterfactual_s(served)
    assert served.first_us is not None
    actual_s = (served.first_us - served.arrived_us) / 1e6
    return max(0.0, actual_s - best[1]) if best else 0.0
