"""Recordings of simulated clusters, and of requests that are made up: rows without a gateway."""

from __future__ import annotations

from typing import Any

from moonserve.core.request import Slo
from moonserve.core.schedule.recorded import RecordedRequest
from moonserve.core.schedule.shown import in_ms
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import gaps_ms
from moonserve.sim.served import Served

START_MS = 1_800_000_000_000


def row(request: str, timestamp: int, **known: Any) -> RecordedRequest:
    """A request of 40 tokens that was served in time, with what `known` says otherwise."""
    fields: dict[str, Any] = {
        "outcome": "length",
        "why": "",
        "input_length": 40,
        "output_length": 5,
        "hash_ids": [2 * timestamp, 2 * timestamp + 1],
        "block_size": 32,
        "output_guessed": False,
        "in_time": True,
        "actual_ttft_ms": 100.0,
        "actual_tbt_ms": 10.0,
        "ttft_slo_ms": 1_000.0,
    }
    return RecordedRequest(request=request, timestamp=timestamp, **{**fields, **known})


def recording(sim: Simulation, slo: Slo) -> list[tuple[int, RecordedRequest]]:
    """What a gateway would have recorded of this run: when each request ended, and its row, in
    milliseconds since 1970, in the order of the ends."""
    rows = [_recorded(served, sim.trace.block_size, slo) for served in sim.served]
    ends_ms = [START_MS + (it.ended_us or sim.clock.now_us) // 1_000 for it in sim.served]
    return sorted(zip(ends_ms, rows, strict=True), key=lambda it: it[0])


def _recorded(served: Served, block_size: int, slo: Slo) -> RecordedRequest:
    refused = served.outcome != "completed"
    gaps = gaps_ms(served, {})
    ttft_ms = None if served.first_us is None else (served.first_us - served.arrived_us) / 1e3
    tbt_ms = float(gaps.mean()) if len(gaps) else None
    goals_ms = [None if goal is None else goal / 1e3 for goal in (slo.ttft_us, slo.tbt_us)]
    in_time = all(
        goal is None or had is None or had <= goal
        for goal, had in zip(goals_ms, (ttft_ms, tbt_ms), strict=True)
    )
    decision, arrived_ms = served.decision, START_MS + served.arrived_us // 1_000
    return row(
        served.id,
        arrived_ms,
        arrived_ms=arrived_ms,
        prefill=None if decision is None else decision.prefill,
        decode=None if decision is None else decision.decode,
        prompt_tokens=served.row.input_tokens,
        output_tokens=served.row.output_tokens,
        actual_cached_tokens=served.cached,
        outcome="refused" if refused else "length",
        input_length=served.row.input_tokens,
        output_length=served.row.output_tokens,
        hash_ids=list(served.row.blocks),
        block_size=block_size,
        in_time=None if refused else in_time,
        actual_ttft_ms=ttft_ms,
        actual_tbt_ms=tbt_ms,
        ttft_slo_ms=goals_ms[0],
        tbt_slo_ms=goals_ms[1],
        stages=in_ms(served.stages()),
        pool_tokens=0 if decision is None else decision.pool_tokens,
    )
