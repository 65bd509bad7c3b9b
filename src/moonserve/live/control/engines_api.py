"""Engines over HTTP: described, looked at and let go at /api/instances; alarms in /health.

POST takes one description, or a list, with the fields of the cluster file; DELETE names one in its
path. Both need the cluster token, and may be repeated. With a registry both change that, and so
all gateways. What the cluster file describes is its to change.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from moonserve.core.errors import BadRequest, ConfigError
from moonserve.live.control.views import instance_row
from moonserve.live.external.fleet import Fleet, Unknown
from moonserve.live.external.registry_engines import RegistryEngines
from moonserve.live.external.rows import rows
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.health import Health
from moonserve.live.http.auth import check_token
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Handler
from moonserve.live.ports import ClusterRead

log = logging.getLogger(__name__)

PATH = "/api/instances"
SOURCE = "HTTP"


class WrongDescription(BadRequest):
    """A field of a description is wrong."""


class Embedded(BadRequest):
    """A worker of ours at a gateway for foreign engines."""

    status = 409


class FleetApi:
    """Handlers, to be mounted by the gateway process over those of gateway.api."""

    def __init__(
        self,
        fleet: Fleet,
        conductor: ClusterRead,
        token: str,
        health: Health,
        found: RegistryEngines | None = None,
    ) -> None:
        """found: engines of a registry, where there is one."""
        self._fleet = fleet
        self._conductor = conductor
        self._token = token
        self._health = health
        self._found = found
        self._kept: Path | None = None

    async def keep(self, kept: Path) -> None:
        """Have what is described in this file, for who comes after us should we die; if one who
        was before us left it, take up what it says. A registry keeps them by itself."""
        if self._found is not None:
            return
        self._kept = kept
        for spec in _read(kept):
            try:
                await self._fleet.add(SOURCE, spec.told())
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
            log.warning("engines will not be known after a restart: %s", error)

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
        views, now_us = self._conductor.views(), self._conductor.now_us()
        found = []
        for instance, row in rows(self._fleet).items():
            view = views.get(instance)
            found.append(row if view is None else instance_row(view, now_us) | row)
        return json_response(found)

    async def _add(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
        body = await request.body()
        several = body.lstrip().startswith(b"[")
        specs = decode_json(body, list[InstanceSpec]) if several else []
        specs = specs if several else [decode_json(body, InstanceSpec)]
        put = self._put if self._found is None else self._found.put
        try:
            return json_response({"changed": await put(specs)})
        except ConfigError as error:
            raise WrongDescription(str(error), error.field.rpartition(".")[2]) from None

    async def _put(self, specs: list[InstanceSpec]) -> list[str]:
        """Have them used by this gateway; the names of those that changed. Raises as Fleet.add."""
        changed = []
        try:
            for spec in specs:
                try:
                    if await self._fleet.add(SOURCE, spec.told()):
                        changed.append(spec.name)
                except ConfigError as error:
                    raise spec.fault(error) from None
        finally:
            self._changed()
        return changed

    async def _remove(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
        name = request.path.removeprefix(PATH + "/")
        if self._found is not None:
            return json_response({"changed": [name] if await self._found.remove(name) else []})
        try:
            await self._fleet.remove(SOURCE, name)
        except Unknown:
            return json_response({"changed": []})  # as it was to be
        self._changed()
        return json_response({"changed": [name]})

    async def _health_route(self, request: HttpRequest) -> Response:
        """200: this process is well; what is wrong with engines is said beside that."""
        states = {monitor.member.spec.name: monitor.state for _, monitor in self._fleet.monitors()}
        return json_response({"status": "ok", "instances": states, "alarms": self._health.alarms()})

    async def _no_workers(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
        raise Embedded(
            "the instances of this gateway are foreign engines, with which embedded workers cannot"
            " exchange KV; start them with a gateway of their own (without instances)",
            "instances",
        )


def _read(kept: Path) -> list[InstanceSpec]:
    return msgspec.json.decode(kept.read_bytes(), type=list[InstanceSpec]) if kept.exists() else []
