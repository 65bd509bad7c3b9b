"""What several processes have counted, as one: Prometheus's samples, summed by name and labels.

Pure but for prometheus_client's types. A process that is gone keeps its share of every counter and
histogram, so that the sums never fall; its gauges are gone with it.
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
    """What these count now."""
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
    """One count of all; order of the first that has each."""
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
    """What of it stays true when the process is gone."""
    return [family for family in counts if family.kind in ("counter", "histogram")]


class Summed(Collector):
    """Families as a collector, to be written out by the library."""

    def __init__(self, counts: Iterable[Family]) -> None:
        self._counts = list(counts)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        for family in self._counts:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
