"""Sums over requests that are over: outcomes, the hit funnel, usage by tenant, time by stage.

Control has one `UsageSums`, which the Conductor's loop tells of each record that is complete. The
sums are plain numbers. They become metrics when /metrics is read, and rows of GET /api/tenants. A
request is counted by the Conductor at which it ended, so sums over Conductors count it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from moonserve.core.schedule.funnel import Reuse
from moonserve.core.schedule.record import Fate, Record, StageTimes
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.live.drive.metrics import Buckets
from moonserve.live.http.message import HttpRequest, Response, json_response

MOST_TENANTS = 1_000
"""Tenants with sums of their own; those that come later are summed as `other`."""
OTHERS = "other"
NO_TENANT = "none"
_STAGE_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
)
_STAGES = ("waited", "prefill", "queue", "load", "compute", "publish", "handover", "decode")


class TenantUsage(msgspec.Struct):
    """What the requests of one tenant used, since the start of this process."""

    requests: int = 0
    """Requests that ended, refused ones included."""
    judged: int = 0
    """Of these, all but those that were cancelled, or that an engine refused."""
    in_time: int = 0
    refused: int = 0
    """By the Conductor."""
    failed: int = 0
    prompt_tokens: Tokens = 0
    """Of requests that were placed."""
    cached_tokens: Tokens = 0
    """Of these, what prefill reused."""
    output_tokens: Tokens = 0
    prefill_us: Micros = 0
    """Work of prefills that were of use: measured by our workers, else as predicted."""
    decode_us: Micros = 0
    """Time in which its requests held a place in decode."""
    wasted_us: Micros = 0
    """Predicted work of prefills that were of no use."""


class UsageSums:
    """See the module."""

    def __init__(self) -> None:
        self.outcomes: dict[Fate, int] = dict.fromkeys(get_args(Fate), 0)
        self.reuse = Reuse()
        self.tenants: dict[str, TenantUsage] = {}
        self._stages = {stage: Buckets(_STAGE_BOUNDS_S) for stage in _STAGES}

    def ended(self, record: Record) -> None:
        """A request is over."""
        outcome = record.fate
        self.outcomes[outcome] += 1
        if outcome != "refused":
            self.reuse.take(record)
        times = record.stages()
        if record.is_good is not None:
            self._took(times)
        self._used(self._tenant(record.tenant), record, outcome, times.decode_us or 0)

    def _tenant(self, name: str) -> TenantUsage:
        name = name or NO_TENANT
        if name not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            name = OTHERS
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantUsage()
        return found

    def _used(self, tenant: TenantUsage, record: Record, outcome: Fate, decode_us: Micros) -> None:
        tenant.requests += 1
        tenant.judged += outcome not in ("cancelled", "engine_refused")
        tenant.in_time += outcome == "in_time"
        tenant.refused += outcome == "refused"
        tenant.failed += outcome == "failed"
        tenant.wasted_us += record.wasted_us
        if not record.attempts:
            return
        measured = record.measured
        tenant.prompt_tokens += record.prompt_tokens
        tenant.cached_tokens += measured.cached_tokens or 0
        tenant.output_tokens += measured.tokens
        tenant.decode_us += decode_us
        parts = measured.prefill
        shared = record.decision is not None and record.decision.stages
        if parts is None or shared or not record.spent_us:  # not spent: it was wasted
            tenant.prefill_us += record.spent_us
        else:
            tenant.prefill_us += parts.load_us + parts.compute_us

    def _took(self, times: StageTimes) -> None:
        self._observe("waited", times.waited_us)
        self._observe("prefill", times.prefill_us)
        self._observe("handover", times.handover_us)
        self._observe("decode", times.decode_us)
        parts = times.parts
        if parts is not None:
            self._observe("queue", parts.queue_us)
            self._observe("load", parts.load_us)
            self._observe("compute", parts.compute_us)
            self._observe("publish", parts.publish_us)

    def _observe(self, stage: str, us: Micros | None) -> None:
        if us is not None:
            self._stages[stage].observe(us / MICROS_PER_SECOND)

    # For those who read.

    async def tenants_route(self, request: HttpRequest) -> Response:
        """GET /api/tenants: the tenants with the most prompt tokens first."""
        rows = sorted(self.tenants.items(), key=lambda item: -item[1].prompt_tokens)
        return json_response({"tenants": [_row(name, usage) for name, usage in rows]})

    def metrics(self) -> Iterable[Metric]:
        """All sums, for /metrics."""
        ended = CounterMetricFamily(
            "moonserve_ended_requests",
            "Requests that ended, by what became of them; late: not within their objectives.",
            labels=("outcome",),
        )
        for outcome, count in self.outcomes.items():
            ended.add_metric((outcome,), count)
        yield ended
        funnel = self.reuse.reported
        for name, text, value in (
            (
                "prompt_tokens",
                "Prompt tokens of requests whose engine reported what it reused.",
                funnel.prompt,
            ),
            ("held_tokens", "Of these, the prefix that anyone in the pool held.", funnel.held),
            (
                "local_tokens",
                "Of these, the prefix that the chosen prefill instance held.",
                funnel.local,
            ),
            (
                "promised_tokens",
                "Of these, the prefix that the decision planned to reuse.",
                funnel.promised,
            ),
            (
                "delivered_tokens",
                "Of these, the prefix that the engine reused.",
                funnel.delivered,
            ),
            (
                "unreported_requests",
                "Requests whose engine did not report what it reused.",
                self.reuse.unreported.served,
            ),
        ):
            yield CounterMetricFamily(f"moonserve_prefix_{name}", text, value=value)
        stages = HistogramMetricFamily(
            "moonserve_stage_seconds",
            "Time by stage; queue, load, compute and publish are parts of prefill.",
            labels=("stage",),
        )
        for stage, buckets in self._stages.items():
            buckets.add_to(stages, (stage,))
        yield stages
        yield from self._tenant_metrics()

    def _tenant_metrics(self) -> Iterable[Metric]:
        for name, text, field, unit in (
            ("requests", "Requests that ended.", "requests", 1),
            ("refused_requests", "Requests that the Conductor refused.", "refused", 1),
            ("prompt_tokens", "Prompt tokens of requests that were placed.", "prompt_tokens", 1),
            ("cached_tokens", "Prompt tokens that prefill reused.", "cached_tokens", 1),
            ("completion_tokens", "Tokens generated.", "output_tokens", 1),
            (
                "prefill_seconds",
                "Prefill time of use; as predicted where engines do not report it.",
                "prefill_us",
                MICROS_PER_SECOND,
            ),
            (
                "decode_seconds",
                "Time in which requests held a place in decode.",
                "decode_us",
                MICROS_PER_SECOND,
            ),
            (
                "wasted_seconds",
                "Predicted time of prefills that were of no use.",
                "wasted_us",
                MICROS_PER_SECOND,
            ),
        ):
            family = CounterMetricFamily(f"moonserve_tenant_{name}", text, labels=("tenant",))
            for tenant, usage in self.tenants.items():
                family.add_metric((tenant,), getattr(usage, field) / unit)
            yield family


def _row(name: str, usage: TenantUsage) -> dict[str, str | float]:
    """Times in seconds, as `prefill_s`, `decode_s` and `wasted_s`."""
    row: dict[str, str | float] = {"tenant": name}
    for field, value in msgspec.structs.asdict(usage).items():
        if field.endswith("_us"):
            row[field.removesuffix("us") + "s"] = value / MICROS_PER_SECOND
        else:
            row[field] = value
    return row
