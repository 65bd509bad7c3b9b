"""What every process counts, whatever its parts are; the assemblies register it for /metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.logs import LINES


class ProcessMetrics(Collector):
    """The counts of this process."""

    def collect(self) -> Iterable[Metric]:
        """See Collector.collect."""
        yield CounterMetricFamily(
            "moonserve_log_lines_dropped",
            "Lines of the log that could not be written.",
            value=LINES.dropped,
        )
