"""The fleet as people and programs see it: rows of GET /api/instances, and metrics."""

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
    ("events_batches", "Batches of KV events that came.", "batches"),
    ("events_gaps", "Times that batches of KV events were missing.", "gaps"),
    ("events_resets", "Times that all known of an instance's KV was forgotten.", "resets"),
    ("events_orphans", "Blocks left out, since what is before them was never told.", "orphans"),
    ("events_malformed", "Messages that were no KV events.", "malformed"),
)


def rows(fleet: Fleet) -> dict[InstanceId, dict[str, Any]]:
    """By instance, what only the fleet knows; those that are not used included."""
    found = {}
    for source, monitor in fleet.monitors():
        for instance in monitor.member.spec.ids():
            found[instance] = _row(source, monitor, instance)
    return found


def _row(source: str, monitor: EngineMonitor, instance: InstanceId) -> dict[str, Any]:
    spec, said = monitor.member.spec, monitor.facts
    feed = monitor.feeds.get(instance)
    return {
        "id": instance,
        "name": spec.name,
        "source": source,
        "engine": spec.engine,
        "role": spec.role,
        "connector": spec.connector,
        "url": spec.url,
        "model": spec.model if said is None else said.model,
        "state": monitor.state,
        "why": monitor.why,
        "warnings": [] if said is None else said.warnings,
        "version": "" if said is None else said.version,
        "hash_algorithm": "" if said is None else said.hash_algorithm,
        "events": feed.counts() if feed is not None else "off" if said is not None else "",
    }


class FleetMetrics(Collector):
    """Per instance: up, trusted, what became of its events, hits as predicted and as they were."""

    def __init__(self, fleet: Fleet, conductor: ClusterRead) -> None:
        self._fleet = fleet
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
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
            "Whether its KV events are followed; 0: what it holds is guessed.",
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
            "The part of what it claims to hold that counts; 1: it is trusted.",
            [(view.info.id, view.trust.share) for view in views],
        )
        yield _gauge(
            "instance_others",
            "Requests there that others sent.",
            [
                (view.info.id, float(view.external.waiting + view.external.running))
                for view in views
            ],
        )
        for name, text, field in (
            ("hit_predicted", "Prompt tokens taken to be cached there.", "claimed"),
            ("hit_confirmed", "Of these, those that were.", "found"),
            ("hit_unpredicted", "Prompt tokens cached there beyond that.", "unclaimed"),
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
