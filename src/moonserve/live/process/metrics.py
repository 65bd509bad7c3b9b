"""What every process counts, whatever its parts are; the assemblies register it for /metrics.

The label `process` tells the kinds of processes apart, since a Conductor adds its fronts up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.logs import LINES

ProcessKind: TypeAlias = Literal["gateway", "front", "conductor", "worker", "segment", "store"]

_SUMS = ("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds")
"""What the sum over several processes still means."""


class ProcessMetrics(Collector):
    """The counts of this process. Its CPU time, memory and descriptors are known on Linux only."""

    def __init__(self, kind: ProcessKind) -> None:
        self._label: dict[str, str] = {"process": kind}
        self._system = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        """See Collector.collect."""
        yield CounterMetricFamily(
            "moonserve_log_lines_dropped",
            "Lines of the log that could not be written.",
            value=LINES.dropped,
        )
        processes = GaugeMetricFamily(
            "moonserve_processes", "Processes of each kind that this page is about."
        )
        processes.add_sample("moonserve_processes", self._label, 1)
        yield processes
        for family in self._system.collect():
            if family.name in _SUMS:
                labelled = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    labelled.add_sample(sample.name, self._label, sample.value)
                yield labelled
