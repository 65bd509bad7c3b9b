"""The counters of the Transfer Engine's lanes, in Prometheus' form.

Every process with a Transfer Engine registers it. It reads the lanes when Prometheus asks for
/metrics. When a peer leaves, its counters leave too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.live.transfer.batch import LaneStats

_MAX_PEERS = 64
"""The most peers with labels of their own; the counters of further peers are summed as `other`."""
_LABELS = ("peer", "lane", "transport", "host")
_COUNTERS = (
    ("bytes", "Bytes that arrived."),
    ("slices", "Slices that arrived."),
    ("retries", "Slices taken over from another lane, where they had failed."),
    ("failures", "Runs that broke off by the lane's fault."),
    ("probations", "How often the lane was taken out of use for a while."),
)


class LaneMetrics(Collector):
    """The caller registers it with a CollectorRegistry."""

    def __init__(self, stats: Callable[[], Sequence[LaneStats]]) -> None:
        """`stats` returns every lane, with the lanes of one location next to each other."""
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """See Collector.collect."""
        counts: dict[tuple[str, ...], list[float]] = {}
        on_probation: dict[tuple[str, ...], bool] = {}
        for labels, lane in self._labelled():
            counted = [float(getattr(lane.counters, name)) for name, _ in _COUNTERS]
            counts[labels] = list(map(add, counts.get(labels, [0.0] * len(counted)), counted))
            on_probation[labels] = on_probation.get(labels, False) or lane.on_probation
        for index, (name, text) in enumerate(_COUNTERS):
            counter = CounterMetricFamily(f"moonserve_transfer_{name}", text, labels=_LABELS)
            for labels, values in counts.items():
                counter.add_metric(labels, values[index])
            yield counter
        healthy = GaugeMetricFamily(
            "moonserve_transfer_lane_healthy", "0 while the lane is out of use.", labels=_LABELS
        )
        for labels, bad in on_probation.items():
            healthy.add_metric(labels, float(not bad))
        yield healthy

    def _labelled(self) -> Iterable[tuple[tuple[str, ...], LaneStats]]:
        """Yield every lane with its labels. Lanes of two starts of one segment share labels."""
        peers: dict[str, None] = {}
        last = ""
        number = 0
        for lane in self._stats():
            number = number + 1 if lane.location == last else 0
            last = lane.location
            if len(peers) < _MAX_PEERS:
                peers[last] = None
            if last in peers:
                yield (last, str(number), lane.path.transport, lane.path.address.host), lane
            else:
                yield ("other", "", lane.path.transport, ""), lane
