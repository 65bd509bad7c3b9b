"""What the fleet shows of its engines: rows for GET /api/instances, and metrics.

Called by control.engines_api and by Prometheus. Nothing here changes the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import EngineMonitor
from moonserve.live.kvevents.follower import FeedCounts
from moonserve.live.ports import ClusterRead

_COUNTS = (
    ("events_batches", "Batches of KV events that arrived.", "batches"),
    ("events_gaps", "Times that batches of KV events were missing.", "gaps"),
    ("events_resets", "Times that all known blocks of an instance were forgotten.", "resets"),
    (
        "events_orphans",
        "Blocks left out because the blocks before them were never reported.",
        "orphans",
    ),
    ("events_malformed", "Messages that could not be read as KV events.", "malformed"),
)


def rows(fleet: Fleet) -> dict[InstanceId, dict[str, Any]]:
    """What only the fleet knows of each instance, also of those that are not used."""
    found = {}
    for source, monitor in fleet.monitors():
        for instance in monitor.member.spec.ids():
            found[instance] = _row(source, monitor, instance)
    return found


def _row(source: str, monitor: EngineMonitor, instance: InstanceId) -> dict[str, Any]:
    spec = monitor.member.spec
    facts = monitor.facts
    feed = monitor.feeds.get(instance)
    return {
        "id": instance,
        "name": spec.name,
        "source": source,
        "engine": spec.engine,
        "role": spec.role,
        "connector": spec.connector,
        "url": spec.url,
        "model": spec.model if facts is None else facts.model,
        "state": monitor.state,
        "why": monitor.why,
        "warnings": [] if facts is None else facts.warnings,
        "version": "" if facts is None else facts.version,
        "hash_algorithm": "" if facts is None else facts.hash_algorithm,
        "events": feed.counts() if feed is not None else "off" if facts is not None else "",
    }


class FleetMetrics(Collector):
    """Per instance: whether it is up and trusted, its event counts, predicted and real hits."""

    def __init__(self, fleet: Fleet, conductor: ClusterRead) -> None:
        self._fleet = fleet
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the metrics registry."""
        monitors = [
            (instance, monitor)
            for _, monitor in self._fleet.monitors()
            for instance in monitor.member.spec.ids()
        ]
        feeds = {i: monitor.feeds[i].counts() for i, monitor in monitors if i in monitor.feeds}
        views = self._conductor.views()
        yield _gauge(
            "instance_up",
            "Whether the engine answers and is used.",
            [(i, float(monitor.state == "up" and i in views)) for i, monitor in monitors],
        )
        yield _gauge(
            "instance_events",
            "Whether its KV events are followed; 0: the gateway guesses what it holds.",
            [(i, float(i in feeds)) for i, _ in monitors],
        )
        yield _gauge(
            "instance_events_trusted",
            "Whether its events add up to what it holds.",
            [(i, float(_adds_up(it))) for i, it in feeds.items()],
        )
        yield from self._of_views([views[i] for i, _ in monitors if i in views])
        for name, text, field in _COUNTS:
            family = CounterMetricFamily(f"moonserve_instance_{name}", text, labels=("instance",))
            for instance, counts in feeds.items():
                family.add_metric((instance,), float(getattr(counts, field)))
            yield family

    def _of_views(self, views: list[InstanceView]) -> Iterable[Metric]:
        yield _gauge(
            "instance_trust",
            "The share of its claims to hold blocks that counts; 1: it is trusted.",
            [(view.info.id, view.trust.share) for view in views],
        )
        yield _gauge(
            "instance_others",
            "Requests there that did not come from this gateway.",
            [
                (view.info.id, float(view.external.waiting + view.external.running))
                for view in views
            ],
        )
        for name, text, field in (
            ("hit_predicted", "Prompt tokens predicted to be cached there.", "claimed"),
            ("hit_confirmed", "Predicted tokens that were cached.", "found"),
            ("hit_unpredicted", "Cached prompt tokens that were not predicted.", "unclaimed"),
        ):
            full = f"moonserve_instance_{name}_tokens"
            family = CounterMetricFamily(full, text, labels=("instance",))
            for view in views:
                family.add_metric((view.info.id,), float(getattr(view.trust, field)))
            yield family


def _adds_up(counts: FeedCounts) -> bool:
    return counts.connected and counts.trusted and not counts.fault


def _gauge(name: str, text: str, values: list[tuple[InstanceId, float]]) -> Metric:
    family = GaugeMetricFamily(f"moonserve_{name}", text, labels=("instance",))
    for instance, value in values:
        family.add_metric((instance,), value)
    return family
