"""What operators read of the cluster: /api with instances, decisions and statistics, and metrics.

Control mounts the handlers and lists the collectors, which read the Conductor's counts when
/metrics is read. The pool has its own views (live.store). Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonserve.core.errors import BadRequest
from moonserve.core.schedule.account import KEPT
from moonserve.core.schedule.explain import Explanation
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.hot import SKIPPED
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.shown import explained, listed
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId
from moonserve.invalid import shortened
from moonserve.live.clock import since_1970_us, wall_ms
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.lost import without_addresses
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, decode_query, json_response
from moonserve.live.http.server import Handler
from moonserve.live.store.pool import Pool
from moonserve.page import path_of

DECISIONS_PREFIX = "/api/decisions/"
_SHOWN = (
    *("id", "role", "url", "model", "epoch", "kv_blocks", "block_bytes", "max_seqs"),
    *("chunk_tokens", "layers", "segment", "segment_bytes", "rack", "connector"),
)
"""Fields of an InstanceInfo that are shown as they are."""


_OUTCOMES = (
    *("under_way", "waiting", "running", "stop", "length"),
    *("refused", "failed", "cancelled"),
)
"""What may be asked for at any time. External engines have more words, which are known once a
request has ended so."""


class NoDecision(BadRequest):
    """No decision is kept for this request id."""

    status = 404


class ExplanationReply(Explanation, kw_only=True):
    """What GET /api/decisions/ID answers."""

    page: str | None
    """Where the page for operators shows the request, a path; None: the page is not served."""


class DecisionsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /api/decisions: which requests are listed. Empty: all."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    outcome: str = ""
    """As in Record; `under_way`: waiting or running."""
    tenant: str | None = None
    instance: str = ""
    """One that prefilled or decoded it, or would have."""
    late: bool = False
    """Only those that missed their objectives."""

    def wants(self, record: Record) -> bool:
        """Whether the request is listed."""
        decision = record.decision
        placed_at = () if decision is None else (decision.prefill, decision.decode)
        return (
            self.outcome in ("", record.outcome, "" if record.is_closed else "under_way")
            and self.tenant in (None, record.tenant)
            and (not self.instance or self.instance in placed_at)
            and (not self.late or record.is_good is False)
        )


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
            ("GET", "/api/targets"): self._targets,
            ("GET", DECISIONS_PREFIX.rstrip("/")): self._decisions,
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

    async def _targets(self, request: HttpRequest) -> Response:
        """The pages of all instances, as Prometheus discovers targets over HTTP."""
        infos = [view.info for view in self._conductor.views().values()]
        return json_response([target(it) for it in {it.url: it for it in infos}.values()])

    async def _stats(self, request: HttpRequest) -> Response:
        promised = self._conductor.promised()
        return json_response(
            {
                "requests": promised.requests,
                "placed": self._conductor.placed,
                "waited_us": self._conductor.account.waited_us,
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
        record = self._conductor.account.find(wanted)
        if record is None:
            kept = f"the latest {KEPT} requests are kept, and a recording has older ones"
            raise NoDecision(
                f"no decision is kept for request {shortened(wanted)}; {kept}", "request id"
            )
        told = explained(record, self._clock_ms())
        shown = path_of(record.id) if self._conductor.has_page else None
        fields = {name: getattr(told, name) for name in told.__struct_fields__}
        return json_response(ExplanationReply(**fields, page=shown))

    async def _decisions(self, request: HttpRequest) -> Response:
        asked = decode_query(request.query, DecisionsAsked)
        self._check_outcome(asked.outcome)
        rows = islice(filter(asked.wants, self._conductor.account.latest()), asked.limit)
        clock_ms = self._clock_ms()
        return json_response([listed(record, clock_ms) for record in rows])

    def _check_outcome(self, outcome: str) -> None:
        """Raises BadRequest: it is no outcome, and none of the requests that are kept has it."""
        kept = (record.outcome for record in self._conductor.account.latest())
        if outcome and outcome not in _OUTCOMES and outcome not in kept:
            known = ", ".join(_OUTCOMES)
            raise BadRequest(
                f"no request that is kept has the outcome {outcome[:80]!r}; use one of {known}, or"
                " one that a row of the list has",
                "outcome",
            )

    def _clock_ms(self) -> Callable[[Micros], int]:
        """Milliseconds since 1970 for a time of the Conductor."""
        return wall_ms(since_1970_us(self._conductor.now_us()))


def target(info: InstanceInfo) -> dict[str, Any]:
    """Where an instance's metrics are, and the labels that they get."""
    url = urlsplit(info.url)
    return {
        "targets": [url.netloc.rpartition("@")[2]],
        "labels": {
            "__scheme__": url.scheme,
            "__metrics_path__": url.path.rstrip("/") + "/metrics",
            "instance_id": info.id,
            "role": info.role,
        },
    }


def instance_row(view: InstanceView, now_us: Micros) -> dict[str, Any]:
    """What the Conductor knows and estimates about an instance."""
    info, trust = view.info, view.trust
    return {
        **{name: getattr(info, name) for name in _SHOWN},
        "drained": view.drained,
        "heard_ms_ago": (now_us - view.heard_us) / 1_000,
        "running": view.load.running,
        "waiting": view.load.waiting,
        "free_blocks": view.load.free_blocks,
        "block_size": info.namespace.block_size,
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


class Figures(Collector):
    """Metrics that are read from what this process knows whenever /metrics is read."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        return self._read()


S = TypeVar("S", bound=str)
Family: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]


def by_label(family: Family, name: str, text: str, label: str, values: Mapping[S, float]) -> Metric:
    """A metric with one value for each value of its label."""
    metric = family(f"moonserve_{name}", text, labels=(label,))
    for of, value in values.items():
        metric.add_metric((of,), value)
    return metric


def conductor_metrics(conductor: ConductorLoop) -> Iterator[Metric]:
    """What the Conductor counts: blocks of its index, goodput, wasted prefill, copies of hot
    prefixes, and the errors of its predictions (bias: predicted less actual)."""
    account, hot, index = conductor.account, conductor.copies, conductor.index
    counts: Family = CounterMetricFamily
    now: Family = GaugeMetricFamily
    for family, name, text, value in (
        (
            now,
            "index_blocks",
            "Blocks that the prefix index knows, each counted once for each holder.",
            index.entries,
        ),
        (
            now,
            "index_limit_blocks",
            "The most blocks that the prefix index may know.",
            index.max_entries,
        ),
        (
            counts,
            "index_evicted_blocks",
            "Blocks that the full prefix index forgot; their holders still have them.",
            index.evicted,
        ),
        (
            counts,
            "good_requests",
            "Requests served within their SLOs; TBT is the mean of a request.",
            account.good,
        ),
        (
            counts,
            "good_tokens",
            "Input and output tokens of requests served within their SLOs.",
            account.good_tokens,
        ),
        (
            counts,
            "wasted_prefill_seconds",
            "Predicted prefill time of requests later dropped, failed or prefilled again.",
            account.wasted_us / MICROS_PER_SECOND,
        ),
        (
            counts,
            "shared_prefills",
            "Prompts that a group of instances prefilled together.",
            account.shared,
        ),
        (counts, "spread_copied_bytes", "Copied bytes of hot prefixes.", hot.done["bytes"]),
        (
            counts,
            "kept_blocks",
            "Blocks that prefill instances loaded and keep.",
            conductor.kept_blocks,
        ),
        (now, "spread_copies_under_way", "Copies of hot prefixes that run now.", len(hot)),
        (
            now,
            "spread_bytes_under_way",
            "Bytes that copies of hot prefixes still have to move.",
            hot.bytes_under_way,
        ),
    ):
        yield family(f"moonserve_{name}", text, value=value)
    stages = {stage: hot.done[stage] for stage in ("started", "done", "failed")}
    yield by_label(counts, "spread_copies", "Copies of hot prefixes, by stage.", "stage", stages)
    skipped = {reason: hot.skipped[reason] for reason in SKIPPED}
    text = "Hot prefixes that were not copied, by reason."
    yield by_label(counts, "spread_skipped", text, "reason", skipped)
    for name, text, errors, unit in (
        (
            "decode_tbt_error_seconds",
            "TBT predicted at admission for the end of prefill, less the TBT then.",
            conductor.errors.tbt,
            MICROS_PER_SECOND,
        ),
        (
            "output_error_tokens",
            "Output length predicted at the start of decode, less the real length.",
            conductor.errors.output,
            1,
        ),
    ):
        figures = {"bias": errors.bias, "p50": errors.quantile(0.5), "p90": errors.quantile(0.9)}
        values = {of: value / unit for of, value in figures.items() if value is not None}
        yield by_label(now, name, text, "figure", values)


_OF_INSTANCES: tuple[tuple[str, str, Callable[[InstanceView, Micros], float]], ...] = (
    (
        "prefill_queue_seconds",
        "Predicted time until the prefills that are promised to an instance are done.",
        lambda view, now_us: view.queue_us(now_us) / MICROS_PER_SECOND,
    ),
    ("prefills", "Prefills promised to an instance.", lambda view, _: view.prefills),
    (
        "decodes",
        "Requests that decode at an instance, those of other senders included.",
        lambda view, _: len(view.residencies.active) + view.external.running,
    ),
    (
        "max_decodes",
        "The most requests that an instance decodes at once.",
        lambda view, _: view.info.max_seqs,
    ),
    (
        "context_tokens",
        "Context of the requests that decode at an instance.",
        lambda view, _: view.residencies.context + view.external.context,
    ),
    ("kv_tokens", "The most context that fits into an instance.", lambda view, _: view.kv_tokens),
    (
        "tbt_seconds",
        "Predicted TBT of an instance with one more request of 1,000 tokens.",
        lambda view, _: view.tbt_us(1_000) / MICROS_PER_SECOND,
    ),
    (
        "silence_seconds",
        "Time since the last heartbeat of an instance.",
        lambda view, now_us: (now_us - view.heard_us) / MICROS_PER_SECOND,
    ),
)


def instance_metrics(conductor: ConductorLoop) -> Iterator[Metric]:
    """What the Conductor knows and promised of each instance, and the objectives of the cluster."""
    now_us = conductor.now_us()
    views = list(conductor.views().values())
    for name, text, value in _OF_INSTANCES:
        gauge = GaugeMetricFamily(
            f"moonserve_instance_{name}", text, labels=("instance_id", "role")
        )
        for view in views:
            gauge.add_metric((view.info.id, view.info.role), value(view, now_us))
        yield gauge
    slo = conductor.tuning.slo
    goals = {"ttft": slo.ttft_us, "tbt": slo.tbt_us}
    values = {of: us / MICROS_PER_SECOND for of, us in goals.items() if us is not None}
    text = "Objectives of requests that bring none of their own."
    yield by_label(GaugeMetricFamily, "objective_seconds", text, "objective", values)


def open_alarms(health: Health) -> list[str]:
    """The alarms without addresses, because /health is open to clients. GET /api/instances and the
    log have the addresses."""
    return [without_addresses(text) for text in health.alarms()]


def alarm_metrics(alarms: Callable[[], list[str]]) -> Iterator[Metric]:
    """The number of alarms."""
    text = "Alarms that an operator should look at; /health lists them."
    yield GaugeMetricFamily("moonserve_alarms", text, value=float(len(alarms())))
