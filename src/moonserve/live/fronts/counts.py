"""Metrics of several processes as one: Prometheus's samples, summed by name and labels.

The front server and the fronts use it. The counters and histograms of a process that is gone stay
in the sums, so that these never fall; its gauges are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def family_of(metric: Metric) -> Family:
    """The current samples of one metric."""
    return Family(
        metric.name,
        metric.type,
        metric.documentation,
        [(it.name, tuple(sorted(it.labels.items())), it.value) for it in metric.samples],
    )


def families(collectors: Iterable[Collector]) -> list[Family]:
    """Return the current samples of these collectors."""
    return [family_of(metric) for collector in collectors for metric in collector.collect()]


class Sums:
    """Sums over several processes; metrics are in the order in which they first appear."""

    def __init__(self, counts: Iterable[Family] = ()) -> None:
        self._found: dict[str, Family] = {}
        self._values: dict[str, dict[tuple[str, Label], float]] = {}
        for family in counts:
            self.add(family)

    def add(self, family: Family) -> None:
        """Add one metric of one process."""
        self._found.setdefault(family.name, family)
        sums = self._values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            sums[name, labels] = sums.get((name, labels), 0.0) + value

    def families(self) -> Iterator[Family]:
        """All sums."""
        for name, it in self._found.items():
            samples = [(*key, value) for key, value in self._values[name].items()]
            yield Family(name, it.kind, it.text, samples)


def summed(counts: Iterable[Iterable[Family]]) -> list[Family]:
    """Add up several processes."""
    return list(Sums(family for one in counts for family in one).families())


def lasting(counts: Iterable[Family]) -> list[Family]:
    """Return the metrics that stay true when their process is gone."""
    return [family for family in counts if family.kind in ("counter", "histogram")]


class Summed(Collector):
    """Families as a collector, so that prometheus_client can write them."""

    def __init__(self, counts: Iterable[Family]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Called by the registry of metrics."""
        for family in self._counts:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
