"""What operators see and change of external engines: /api/instances, alarms and metrics.

POST describes one engine, or a list of them, with the fields of the cluster file. DELETE names one
in its path. Both need the cluster token, and may be repeated. With a registry, both change the
registry, for this Conductor and the next. An engine that the cluster file describes is changed
there only. Called by process.external.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from moonserve.core.errors import UNREADABLE, BadRequest, ConfigError
from moonserve.core.units import InstanceId
from moonserve.live.control.views import by_label, instance_row, open_alarms
from moonserve.live.external.fleet import Fleet, Unknown
from moonserve.live.external.monitor import EngineMonitor
from moonserve.live.external.registry_engines import RegistryEngines
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Handler
from moonserve.live.ports import ClusterRead

log = logging.getLogger(__name__)

PATH = "/api/instances"
SOURCE = "HTTP"
_EVENT_COUNTS = (
    ("events_batches", "Batches of KV events that arrived from an engine.", "batches"),
    ("events_gaps", "Times that batches of KV events were missing.", "gaps"),
    ("events_resets", "Times that all known blocks of an instance were forgotten.", "resets"),
    (
        "events_orphans",
        "Blocks left out because the blocks before them were never reported.",
        "orphans",
    ),
    ("events_malformed", "Messages that could not be read as KV events.", "malformed"),
)
_HIT_COUNTS = (
    ("hit_predicted_tokens", "Prompt tokens predicted to be cached at an instance.", "claimed"),
    (
        "hit_confirmed_tokens",
        "Prompt tokens predicted to be cached at an instance that were.",
        "found",
    ),
    (
        "hit_unpredicted_tokens",
        "Prompt tokens cached at an instance that were not predicted.",
        "unclaimed",
    ),
)
"""Names of metrics, help texts, and fields of FeedCounts or Trust."""


def _row(source: str, monitor: EngineMonitor, instance: InstanceId) -> dict[str, Any]:
    """What only the fleet knows of an instance, also if it is not used."""
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


def fleet_metrics(fleet: Fleet, conductor: ClusterRead) -> Iterator[Metric]:
    """Per instance: whether it is up and trusted, its event counts, predicted and real hits."""
    monitors = {
        instance: monitor
        for _, monitor in fleet.monitors()
        for instance in monitor.member.spec.ids()
    }
    feeds = {i: monitor.feeds[i].counts() for i, monitor in monitors.items() if i in monitor.feeds}
    joined = conductor.views()
    views = {i: joined[i] for i in monitors if i in joined}
    gauges: list[tuple[str, str, dict[InstanceId, float]]] = [
        (
            "up",
            "Whether an engine answers and is used.",
            {i: monitor.state == "up" and i in views for i, monitor in monitors.items()},
        ),
        (
            "events_followed",
            "Whether the KV events of an engine are followed; 0: what it holds is guessed.",
            {i: i in feeds for i in monitors},
        ),
        (
            "events_trusted",
            "Whether the KV events of an engine add up to what it holds.",
            {i: it.connected and it.trusted and not it.fault for i, it in feeds.items()},
        ),
        (
            "trust",
            "The share of an instance's claims to hold blocks that counts; 1: it is trusted.",
            {i: view.trust.share for i, view in views.items()},
        ),
        (
            "other_requests",
            "Requests at an engine that did not come from this gateway.",
            {i: view.external.waiting + view.external.running for i, view in views.items()},
        ),
    ]
    for name, text, values in gauges:
        yield by_label(GaugeMetricFamily, f"instance_{name}", text, "instance_id", values)
    trusts = {i: view.trust for i, view in views.items()}
    for counted, counts in ((feeds, _EVENT_COUNTS), (trusts, _HIT_COUNTS)):
        for name, text, field in counts:
            values = {i: getattr(it, field) for i, it in counted.items()}
            yield by_label(CounterMetricFamily, f"instance_{name}", text, "instance_id", values)


class WrongDescription(BadRequest):
    """A field of a description is wrong."""


class Embedded(BadRequest):
    """A worker of ours wants to join a gateway for external engines."""

    status = 409


class EnginesApi:
    """Handlers that the gateway process mounts over those of the control side."""

    def __init__(
        self,
        fleet: Fleet,
        conductor: ClusterRead,
        health: Health,
        registered: RegistryEngines | None = None,
    ) -> None:
        """`registered`: the engines of the registry, where there is one."""
        self._fleet = fleet
        self._conductor = conductor
        self._health = health
        self._registered = registered
        self._kept: Path | None = None

    async def keep(self, kept: Path) -> None:
        """Keep descriptions in this file, so that a restarted process finds them, and use those
        that an earlier process left there. A registry keeps descriptions by itself."""
        if self._registered is not None:
            return
        self._kept = kept
        for spec in _read(kept):
            try:
                await self._fleet.add(SOURCE, spec.untrusted())
            except (ConfigError, BadRequest) as error:
                log.warning("engine %s, described over HTTP, is lost: %s", spec.name, error)

    def _changed(self) -> None:
        if self._kept is None:
            return
        specs = [it.member.spec for source, it in self._fleet.monitors() if source == SOURCE]
        new = self._kept.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(specs))
            new.replace(self._kept)
        except OSError as error:
            log.warning("engines described over HTTP will be lost by a restart: %s", error)

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("GET", PATH): self._list,
            ("POST", PATH): self._add,
            ("GET", "/health"): self._health_route,
            ("POST", "/internal/join"): self._no_workers,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes."""
        return {("DELETE", PATH + "/"): self._remove}

    async def _list(self, request: HttpRequest) -> Response:
        views = self._conductor.views()
        now_us = self._conductor.now_us()
        listed = []
        for source, monitor in self._fleet.monitors():
            for instance in monitor.member.spec.ids():
                view = views.get(instance)
                known = {} if view is None else instance_row(view, now_us)
                listed.append(known | _row(source, monitor, instance))
        return json_response(listed)

    async def _add(self, request: HttpRequest) -> Response:
        body = await request.body()
        if body.lstrip().startswith(b"["):
            specs = decode_json(body, list[InstanceSpec])
        else:
            specs = [decode_json(body, InstanceSpec)]
        put = self._put if self._registered is None else self._registered.put
        try:
            return json_response({"changed": await put(specs)})
        except ConfigError as error:
            raise WrongDescription(str(error), error.field.rpartition(".")[2]) from None

    async def _put(self, specs: list[InstanceSpec]) -> list[str]:
        """Have this gateway use these engines. Returns the names of those that changed; raises as
        Fleet.add."""
        changed = []
        try:
            for spec in specs:
                with spec.named():
                    if await self._fleet.add(SOURCE, spec.untrusted()):
                        changed.append(spec.name)
        finally:
            self._changed()
        return changed

    async def _remove(self, request: HttpRequest) -> Response:
        name = request.path.removeprefix(PATH + "/")
        if self._registered is not None:
            return json_response({"changed": [name] if await self._registered.remove(name) else []})
        try:
            await self._fleet.remove(SOURCE, name)
        except Unknown:
            return json_response({"changed": []})  # it is not there, as was asked
        self._changed()
        return json_response({"changed": [name]})

    async def _health_route(self, request: HttpRequest) -> Response:
        """200: this process works. What is wrong with engines is in `alarms`."""
        states = {monitor.member.spec.name: monitor.state for _, monitor in self._fleet.monitors()}
        alarms = open_alarms(self._health)
        return json_response({"status": "ok", "instances": states, "alarms": alarms})

    async def _no_workers(self, request: HttpRequest) -> Response:
        raise Embedded(
            "the instances of this gateway are external engines, which cannot exchange KV with"
            " embedded workers; start a gateway without instances for the workers",
            "instances",
        )


def _read(kept: Path) -> list[InstanceSpec]:
    if not kept.exists():
        return []
    try:
        return msgspec.json.decode(kept.read_bytes(), type=list[InstanceSpec])
    except UNREADABLE as error:
        log.warning("engines described over HTTP are lost: %s cannot be read: %s", kept, error)
        return []
