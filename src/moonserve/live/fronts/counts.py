"""Metrics of several processes as one: Prometheus's samples, summed by name and labels.

The front server and the fronts use it. The counters and histograms of a process that is gone stay
in the sums, so that these never fall; its gauges are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Label = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True):
    """One metric's samples at one time: (name, labels, value)."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, Label, float]]


def families(collectors: Iterable[Collector]) -> list[Family]:
    """Return the current samples of these collectors."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(it.name, tuple(sorted(it.labels.items())), it.value) for it in metric.samples],
        )
        for collector in collectors
        for metric in collector.collect()
    ]


def summed(counts: Iterable[Iterable[Family]]) -> list[Family]:
    """Add up several processes; metrics are in the order in which they first appear."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Label], float]] = {}
    for one in counts:
        for family in one:
            found.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                sums[name, labels] = sums.get((name, labels), 0.0) + value
    return [
        Family(name, it.kind, it.text, [(*key, value) for key, value in values[name].items()])
        for name, it in found.items()
    ]


def lasting(counts: Iterable[Family]) -> list[Family]:
    """Return the metrics that stay true when their process is gone."""
    return [family for family in counts if family.kind in ("counter", "histogram")]


class Summed(Collector):
    """Families as a collector, so that prometheus_client can write them."""

    def __init__(self, counts: Iterable[Family]) -> None:
        self._counts = list(counts)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry of metrics."""
        for family in self._counts:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
