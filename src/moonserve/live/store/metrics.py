"""The ledgers of the store's master, in Prometheus's form.

LocalPool registers it where the master runs: in a gateway's or Conductor's process, or in one of
its own. It reads the master whenever /metrics is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from moonserve.core.store.words import MasterStats

_SEGMENT = (
    ("capacity_bytes", "Size of a segment."),
    ("used_bytes", "Bytes in use on a segment, extents of puts and copies under way included."),
    ("evictable_bytes", "Bytes that eviction could free on a segment now."),
    ("objects", "Objects with a replica on a segment."),
    ("draining", "Whether all objects move off a segment."),
)
_NOW = (
    ("objects", "Objects in the pool.", "objects"),
    ("leases", "Leases that keep objects from eviction.", "leases"),
    ("pending_puts", "Puts that began and have not ended.", "pending_puts"),
    ("pending_copies", "Copies of objects that have not ended.", "pending_copies"),
    (
        "waiting_objects",
        "Objects that wait for a replica, or to leave a draining segment.",
        "waiting",
    ),
    ("recovering", "Whether a new master still collects what segments hold.", "recovering"),
)
_SINCE_START = (
    ("evicted_replicas", "Replicas that were evicted.", "evicted"),
    ("demoted_replicas", "Replicas that were moved from memory to disk.", "demoted"),
    ("promoted_replicas", "Replicas that were copied from disk to memory.", "promoted"),
)
"""Names of metrics and help texts; fields of SegmentStats or MasterStats."""


def master_metrics(stats: MasterStats) -> Iterator[Metric]:
    """The pool as a whole, and each segment."""
    for field, text in _SEGMENT:
        gauge = GaugeMetricFamily(
            f"moonserve_store_segment_{field}", text, labels=("segment", "tier")
        )
        for segment in stats.segments:
            gauge.add_metric((segment.id, segment.tier), float(getattr(segment, field)))
        yield gauge
    for name, text, field in _NOW:
        value = float(getattr(stats, field))
        yield GaugeMetricFamily(f"moonserve_store_{name}", text, value=value)
    for name, text, field in _SINCE_START:
        value = float(getattr(stats, field))
        yield CounterMetricFamily(f"moonserve_store_{name}", text, value=value)
