"""The HTTP API for external engines: /api/instances, and the alarms in /health.

POST describes one engine, or a list of them, with the fields of the cluster file. DELETE names one
in its path. Both need the cluster token, and may be repeated. With a registry, both change the
registry, and so all gateways. An engine that the cluster file describes is changed there only.
Called by process.external.
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
    """A worker of ours wants to join a gateway for external engines."""

    status = 409


class EnginesApi:
    """Handlers that the gateway process mounts over those of the control side."""

    def __init__(
        self,
        fleet: Fleet,
        conductor: ClusterRead,
        token: str,
        health: Health,
        registered: RegistryEngines | None = None,
    ) -> None:
        """`registered`: the engines of the registry, where there is one."""
        self._fleet = fleet
        self._conductor = conductor
        self._token = token
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
        views, now_us = self._conductor.views(), self._conductor.now_us()
        listed = []
        for instance, row in rows(self._fleet).items():
            view = views.get(instance)
            listed.append(row if view is None else instance_row(view, now_us) | row)
        return json_response(listed)

    async def _add(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
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
                try:
                    if await self._fleet.add(SOURCE, spec.untrusted()):
                        changed.append(spec.name)
                except ConfigError as error:
                    raise spec.fault(error) from None
        finally:
            self._changed()
        return changed

    async def _remove(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
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
        return json_response({"status": "ok", "instances": states, "alarms": self._health.alarms()})

    async def _no_workers(self, request: HttpRequest) -> Response:
        check_token(request, self._token)
        raise Embedded(
            "the instances of this gateway are external engines, which cannot exchange KV with"
            " embedded workers; start a gateway without instances for the workers",
            "instances",
        )


def _read(kept: Path) -> list[InstanceSpec]:
    return msgspec.json.decode(kept.read_bytes(), type=list[InstanceSpec]) if kept.exists() else []
