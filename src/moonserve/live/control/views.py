"""Read-only HTTP views of the cluster: instances, decisions, health and statistics.

Control mounts them. The pool has its own views (live.store).
"""

from __future__ import annotations

from typing import Any

from moonserve.core.errors import BadRequest
from moonserve.core.schedule.explain import Explanation, explanation, why, why_spread
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import Micros, RequestId
from moonserve.live.control.loop import ConductorLoop, Record
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Handler
from moonserve.live.store.pool import Pool

DECISIONS_PREFIX = "/api/decisions/"


class NoDecision(BadRequest):
    """No decision is kept for this request id."""

    status = 404


class Api:
    """Handlers of /api, to be mounted by the gateway process."""

    def __init__(self, conductor: ConductorLoop, pool: Pool) -> None:
        self._conductor = conductor
        self._pool = pool

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("GET", "/api/instances"): self._instances,
            ("GET", "/api/health"): self._health,
            ("GET", "/api/stats"): self._stats,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes."""
        return {("GET", DECISIONS_PREFIX): self._decision}

    async def _instances(self, request: HttpRequest) -> Response:
        now_us = self._conductor.now_us()
        rows = [instance_row(view, now_us) for view in self._conductor.views().values()]
        return json_response(rows)

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _stats(self, request: HttpRequest) -> Response:
        promised = self._conductor.promised()
        return json_response(
            {
                "requests": promised.requests,
                "placed": self._conductor.placed,
                "waited_us": self._conductor.waited_us,
                "prefills_promised": promised.prefills,
                "prefill_us_promised": promised.prefill_us,
                "decodes_promised": promised.decodes,
                "index_blocks": self._conductor.index_blocks(),
                "store": await self._pool.lookup({}),
                "tuning": self._conductor.tuning,
            }
        )

    async def _decision(self, request: HttpRequest) -> Response:
        wanted = RequestId(request.path.removeprefix(DECISIONS_PREFIX))
        record = self._conductor.records.get(wanted)
        if record is None:
            raise NoDecision(f"no decision is kept for request {wanted}", "request id")
        return json_response(explain(wanted, record))


def instance_row(view: InstanceView, now_us: Micros) -> dict[str, Any]:
    """What the Conductor knows and estimates about an instance."""
    info, trust = view.info, view.trust
    return {
        "id": info.id,
        "role": info.role,
        "url": info.url,
        "model": info.model,
        "epoch": info.epoch,
        "heard_ms_ago": (now_us - view.heard_us) / 1_000,
        "running": view.load.running,
        "waiting": view.load.waiting,
        "free_blocks": view.load.free_blocks,
        "kv_blocks": info.kv_blocks,
        "block_bytes": info.block_bytes,
        "block_size": info.namespace.block_size,
        "max_seqs": info.max_seqs,
        "chunk_tokens": info.chunk_tokens,
        "layers": info.layers,
        "segment": info.segment,
        "rack": info.rack,
        "prefills_promised": view.prefills,
        "queue_ms": view.queue_us(now_us) / 1_000,
        "decodes_promised": view.decodes,
        "prefill_1k_ms": view.cost.prefill_us(1_000, 0, info.chunk_tokens) / 1_000,
        "tbt_ms": view.tbt_us(1_000) / 1_000,
        "cost": dict(zip(("pass_us", "load_us"), view.cost.lasting(), strict=True)),
        "others": view.external,
        "trusted": trust.trusted,
        "trust": {
            "share": trust.share,
            "claimed_tokens": trust.claimed,
            "found_tokens": trust.found,
            "unclaimed_tokens": trust.unclaimed,
        },
    }


def explain(request: RequestId, record: Record) -> Explanation:
    """Explain a request: its decision, its predictions and the measured values."""
    decision = record.decision
    sentence = record.error or "It waits for an instance to be free."
    if decision is not None and record.reason is None:
        sentence = why(decision, record.candidates)
    explained = explanation(request, record.outcome, decision, record.candidates, sentence)
    explained.attempts = record.attempts
    explained.actual_ttft_ms = _ms(record.ttft_us)
    explained.actual_tbt_ms = _ms(record.tbt_us)
    explained.actual_cached_tokens = record.cached_tokens
    explained.reject_reason = record.reason
    explained.error = record.error
    explained.spread = None if record.spread is None else why_spread(record.spread)
    return explained


def _ms(us: Micros | None) -> float | None:
    return None if us is None else us / 1_000
