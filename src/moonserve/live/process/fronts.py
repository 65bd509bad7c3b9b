"""The processes of a gateway that has several: fronts that serve clients, one with the Conductor.

A supervisor starts them with the path of one unix socket. Every front listens on the gateway's
address, where the kernel gives each new connection to one of them. The Conductor's process listens
for HTTP on loopback, for requests that fronts forward.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from moonserve.live.api.limiter import METRICS_TYPE
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import registered
from moonserve.live.external.monitor import Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts.counts import Summed, families, summed
from moonserve.live.fronts.engines import RemoteFleet
from moonserve.live.fronts.forward import Forward
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.fronts.server import FrontServer
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient, client_of
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.model.catalog import resolve
from moonserve.live.ports import Registry
from moonserve.live.process.access import IN_REGISTRY, Access, conductor_guard, watched_keys
from moonserve.live.process.external import ExternalSettings
from moonserve.live.process.gateway import (
    Deciding,
    Text,
    expecting,
    front_of,
    load_text,
    read_text,
    with_engines,
)
from moonserve.live.process.metrics import ProcessMetrics
from moonserve.live.process.parts import Process, run
from moonserve.live.registry.entries import open_registry
from moonserve.live.store.settings import check_reachable, url_of
from moonserve.live.tasks import keep_doing
from moonserve.live.tls.contexts import ClientAuth, Tls, trusting

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5
"""How often the Conductor's process looks for external engines whose events began or ended."""


class FrontsLink(ProcessPart):
    """The Conductor's end of the link to the fronts."""

    def __init__(self, deciding: Deciding, path: str, tls: Tls | None) -> None:
        self._deciding = deciding
        self._path = path
        self._tls = tls
        self._server: FrontServer | None = None
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> Routes:
        """The sums over all fronts."""
        return {("GET", "/metrics"): self._metrics}

    async def start(self, port: int) -> None:
        """Let fronts connect, once this process knows what others hold."""
        deciding = self._deciding
        url = url_of(_LOOPBACK, port, self._tls)
        self._server = server = FrontServer(deciding.conductor, url, deciding.fleet)
        self._looking = keep_doing("looking at engines", self._look)
        await deciding.control.gathered()
        await server.listen(self._path)

    async def stop(self) -> None:
        """To be called when the fronts have stopped: no request is under way."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.close()

    async def _look(self) -> None:
        while self._server is not None:
            await asyncio.sleep(_LOOK_S)
            self._server.look()

    async def _metrics(self, request: HttpRequest) -> Response:
        """The sums over all fronts, and the Conductor's own."""
        collectors = [it for part in self._deciding.parts for it in part.collectors()]
        own = families([ProcessMetrics(), *collectors])
        counts = [own] if self._server is None else [await self._server.counts(), own]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Summed(summed(counts)))
        return Response(body=generate_latest(registry), content_type=METRICS_TYPE)


class ConductorProcess(Process):
    """Conductor, store master, joins and the admin API; made by `start`."""

    def __init__(
        self, config: GatewayConfig, http: HttpClient, deciding: Deciding, path: str
    ) -> None:
        self.conductor, self.fleet = deciding.conductor, deciding.fleet
        fronts = FrontsLink(deciding, path, config.tls)
        auth: ClientAuth = "required" if config.tls else "none"
        here = msgspec.structs.replace(config, port=0, tls_client_auth=auth)
        parts = [*deciding.parts, fronts]
        super().__init__(here, http, parts, guard=conductor_guard(here), name="conductor")

    @classmethod
    async def start(
        cls, config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None = None
    ) -> ConductorProcess:
        """Make all parts and listen, at the socket `path` too.

        config: its host is loopback; its port is the one of the fronts. specs: the external
        engines; None: workers will join. Raises ConfigError, RegistryError.
        """
        engines = None
        if specs is not None:
            engines = ExternalSettings(specs, Times(), Path(f"{path}.engines"))
        config, registry = await registered(with_engines(config, engines))
        http = client_of(config.tls)
        name = resolve(config.model).name if specs is None else ""
        health = Health()
        deciding = Deciding(config, http, health, registry, name, engines, config.port)
        deciding.parts += watched_keys(config, registry, health)
        one = cls(config, http, deciding, path)
        await one.listen()
        return one


class ConductorLink(ProcessPart):
    """A front's end of the link to the Conductor."""

    def __init__(self, conductor: RemoteConductor, forward: Forward) -> None:
        self._conductor = conductor
        self._forward = forward

    def routes(self) -> Routes:
        """The metrics: the Conductor's process adds up those of all fronts."""
        return {("GET", "/metrics"): self._forward}

    async def prepare(self) -> None:
        """Connect as soon as the Conductor's process listens."""
        await self._conductor.start()

    async def stop(self) -> None:
        """Leave the Conductor; cut what is being forwarded."""
        await self._conductor.leave()
        await self._forward.close()


class FrontProcess(Process):
    """OpenAI's API for some of the clients; made by `start`."""

    def __init__(
        self, config: GatewayConfig, text: Text | None, path: str, registry: Registry | None
    ) -> None:
        """`text`: of the model that workers serve; None: engines are external. registry: has the
        API keys; None: a file has them, or there are none."""
        http = client_of(config.tls) if text else HttpClient(trusting(config.engine_ca))
        self.conductor = conductor = RemoteConductor(
            path,
            lambda: families([front.metrics.registry]),
            on_engines=lambda engines: None if fleet is None else fleet.update(engines),
            on_gone=lambda: self._forward.cut(),
        )
        health = Health(undecided=conductor.missing)
        fleet = None
        if text is None:
            fleet = RemoteFleet(conductor, http, load_text, os.environ)
        part = -(-config.max_in_flight // config.workers)
        config = msgspec.structs.replace(config, max_in_flight=part)
        access = Access(config, registry, health, conductor)
        front = front_of(config, conductor, http, health, text, fleet, access)
        self._forward = Forward(conductor, config.token, lambda: client_of(config.tls))
        self._registry = registry
        parts = [*access.parts, ConductorLink(conductor, self._forward)]
        super().__init__(config, http, parts, front, guard=access.guard, name="front")

    @classmethod
    async def start(cls, config: GatewayConfig, path: str, external: bool = False) -> FrontProcess:
        """Read the model's text side, make all parts, listen beside other fronts.

        Raises ConfigError.
        """
        text = None if external else await asyncio.to_thread(read_text, config.model)
        where = config.registry if config.keys == IN_REGISTRY else ""
        registry = await open_registry(where, config.tls)
        one = cls(config, text, path, registry)
        await one.listen(one._forward, shared=True)
        return one

    async def stop(self, drain_s: float) -> None:
        """See Process."""
        await super().stop(drain_s)
        if self._registry is not None:
            await self._registry.close()


async def run_conductor(
    config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None
) -> None:
    """Run the Conductor's process until SIGTERM or SIGINT."""
    if config.registry and config.advertise_host is None:
        check_reachable(config.host)
    host = config.advertise_host or config.host
    here = msgspec.structs.replace(config, host=_LOOPBACK, advertise_host=host)
    await run(ConductorProcess.start(here, path, specs), here)


async def run_front(config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None) -> None:
    """Run one front until SIGTERM or SIGINT."""
    config = expecting(config, specs)
    await run(FrontProcess.start(config, path, specs is not None), config)
