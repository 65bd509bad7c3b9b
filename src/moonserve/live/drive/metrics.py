"""What a gateway counts of its requests, in Prometheus's form.

The API and the driver raise the counts. They are plain integers on the hot path, and become metric
families only when /metrics is read: a histogram of prometheus_client costs microseconds per token.
`registry` takes further collectors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonserve.live.exposition import Turn, exposed

_TTFT_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_TBT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Buckets:
    """A histogram of seconds: counts per bucket, and the sum."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """The histogram alone, as Prometheus reads it."""
        family = HistogramMetricFamily(name, text, labels=())
        self.add_to(family, ())
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the histogram to a family, with cumulative buckets."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum_s)


class RequestMetrics(Collector):
    """The counts of one process; its parts raise the attributes."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Requests by (route, status)."""
        self.rejected: Counter[str] = Counter()
        """Requests answered 429, by reason."""
        self.ttft = Buckets(_TTFT_BOUNDS_S)
        self.tbt = Buckets(_TBT_BOUNDS_S)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.in_flight = 0
        self.disconnects = 0
        self.resumed = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    async def text(self, turn: Turn | None = None) -> bytes:
        """All metrics of the registry in Prometheus's text format."""
        return await exposed(self.registry.collect(), turn)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        requests = CounterMetricFamily(
            "moonserve_requests", "Requests answered.", labels=("route", "status")
        )
        for (route, status), count in sorted(self.requests.items()):
            requests.add_metric((route, str(status)), count)
        yield requests
        rejected = CounterMetricFamily(
            "moonserve_rejected_requests", "Requests answered 429.", labels=("reason",)
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
            ("streams_resumed", "Times a stream went on at another engine.", self.resumed),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)
        yield GaugeMetricFamily(
            "moonserve_requests_in_flight", "Requests being served.", value=self.in_flight
        )
