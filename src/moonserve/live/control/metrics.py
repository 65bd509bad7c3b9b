"""What the gateway counts, in Prometheus's form.

Plain integers on the hot path, turned into metric families only when /metrics is read: a histogram
of prometheus_client costs microseconds per token. `registry` takes further collectors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonserve.core.schedule.account import Account
from moonserve.core.schedule.hot import SKIPPED
from moonserve.live.control.loop import ConductorLoop

_TTFT_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TBT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Buckets:
    """A histogram of seconds: counts per bucket, and the sum."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus reads it: cumulative buckets."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum_s)


class Predictions(Collector):
    """How far off the Conductor's predictions were: bias (predicted less actual), and sizes."""

    def __init__(self, conductor: ConductorLoop) -> None:
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry; nothing is told before there is something to compare."""
        for name, text, errors, unit in (
            (
                "moonserve_decode_tbt_error_seconds",
                "TBT predicted on admission for when prefill ends, less what it was then.",
                self._conductor.errors.tbt,
                1e6,
            ),
            (
                "moonserve_output_error_tokens",
                "Output length predicted when decode began, less what it was.",
                self._conductor.errors.output,
                1.0,
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=("figure",))
            parts = {"bias": errors.bias, "p50": errors.quantile(0.5), "p90": errors.quantile(0.9)}
            for figure, value in parts.items():
                if value is not None:
                    family.add_metric((figure,), value / unit)
            yield family


class Served(Collector):
    """What the Conductor's account says: goodput, prefill for nothing, prompts shared."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        it = self._account
        for name, text, count in (
            ("good_requests", "Served within their objectives; TBT by the mean gap.", it.good),
            ("good_tokens", "Input and output tokens of those.", it.good_tokens),
            (
                "wasted_prefill_seconds",
                "Prefill, as predicted, of what was dropped or failed later, or done again.",
                it.wasted_us / 1e6,
            ),
            ("shared_prefills", "Prompts that a group of instances shares.", it.shared),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)


class Copies(Collector):
    """Copies of prefixes: what the Conductor wanted, what came of it, what kept it from more."""

    def __init__(self, conductor: ConductorLoop) -> None:
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        hot = self._conductor.copies
        copies = CounterMetricFamily(
            "moonserve_spread_copies", "Copies of hot prefixes, by stage.", labels=("stage",)
        )
        for stage in ("started", "done", "failed"):
            copies.add_metric((stage,), hot.done[stage])
        yield copies
        skipped = CounterMetricFamily(
            "moonserve_spread_skipped", "Looks at hot prefixes without a copy.", labels=("reason",)
        )
        for reason in SKIPPED:
            skipped.add_metric((reason,), hot.skipped[reason])
        yield skipped
        for name, text, count in (
            ("spread_copied_bytes", "Bytes of hot prefixes that were copied.", hot.done["bytes"]),
            ("kept_blocks", "Blocks that prefill loaded and keeps.", self._conductor.kept_blocks),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)
        for name, text, count in (
            ("spread_copies_under_way", "Copies of hot prefixes.", len(hot)),
            ("spread_bytes_under_way", "What is still to come of them.", hot.bytes_under_way),
        ):
            yield GaugeMetricFamily(f"moonserve_{name}", text, value=count)


class Alarms(Collector):
    """How much is wrong."""

    def __init__(self, alarms: Callable[[], list[str]]) -> None:
        self._alarms = alarms

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        text = "Things that somebody should look at; /health says which."
        yield GaugeMetricFamily("moonserve_alarms", text, value=float(len(self._alarms())))


class Metrics(Collector):
    """The gateway's counts; each attribute is raised by whoever sees it happen."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By (route, status)."""
        self.rejected: Counter[str] = Counter()
        """Answered 429, by reason."""
        self.ttft = Buckets(_TTFT_BOUNDS_S)
        self.tbt = Buckets(_TBT_BOUNDS_S)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.in_flight = 0
        self.disconnects = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> bytes:
        """All of the registry in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        requests = CounterMetricFamily(
            "moonserve_requests", "Requests answered.", labels=("route", "status")
        )
        for (route, status), count in sorted(self.requests.items()):
            requests.add_metric((route, str(status)), count)
        yield requests
        rejected = CounterMetricFamily(
            "moonserve_rejected", "Requests answered 429.", labels=("reason",)
        )
        for reason, count in sorted(self.rejected.items()):
            rejected.add_metric((reason,), count)
        yield rejected
        yield self.ttft.family(
            "moonserve_ttft_seconds", "From the request's arrival to its first token."
        )
        yield self.tbt.family("moonserve_tbt_seconds", "Between a request's pieces of output.")
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of requests that began.", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens that prefill reused.", self.cached_tokens),
            ("completion_tokens", "Tokens generated.", self.completion_tokens),
            ("client_disconnects", "Clients that left before the end.", self.disconnects),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)
        yield GaugeMetricFamily(
            "moonserve_in_flight", "Requests being served.", value=self.in_flight
        )
