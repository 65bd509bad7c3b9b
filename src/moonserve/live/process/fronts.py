"""The two roles of a gateway in several processes: fronts that serve clients, and their Conductor.

`moonserve conductor` runs a ConductorProcess, and `moonserve gateway --conductor` a FrontProcess.
Both may be on one host, where they use a unix socket, or on several. `gateway --workers N` starts
one Conductor and N fronts. Fronts that share a port get connections from the kernel in turns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.units import MICROS_PER_SECOND
from moonserve.live.api.limiter import METRICS_TYPE
from moonserve.live.control import page
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import registered
from moonserve.live.drive.wire import OrderedBy
from moonserve.live.exposition import Turn, exposed
from moonserve.live.external.monitor import Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Summed, Sums, families, family_of
from moonserve.live.fronts.engines import RemoteFleet
from moonserve.live.fronts.forward import Forward
from moonserve.live.fronts.remote import AbsenceLimits, RemoteConductor
from moonserve.live.fronts.road import IN_REGISTRY, road_of
from moonserve.live.fronts.server import FrontServer
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient, client_of
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.http.switch import Switch
from moonserve.live.model.catalog import resolve
from moonserve.live.ports import Registry
from moonserve.live.process.access import IN_REGISTRY as KEYS_IN_REGISTRY
from moonserve.live.process.access import Access, conductor_guard, watched_keys
from moonserve.live.process.external import ExternalSettings
from moonserve.live.process.gateway import (
    Deciding,
    Text,
    front_of,
    load_text,
    read_text,
    with_engines,
)
from moonserve.live.process.metrics import ProcessMetrics
from moonserve.live.process.parts import Process, run
from moonserve.live.registry.entries import open_registry
from moonserve.live.tasks import keep_doing
from moonserve.live.tls.contexts import ClientAuth, trusting

_LOOK_S = 0.5
"""How often the Conductor's process looks for external engines whose events began or ended."""


class FrontsLink(ProcessPart):
    """The Conductor's end of the links to the fronts."""

    def __init__(self, deciding: Deciding, welcome: wire.Welcome) -> None:
        """welcome: what fronts hear first."""
        self._deciding = deciding
        self._leadership = deciding.control.leadership
        self._server = FrontServer(
            deciding.conductor, welcome, deciding.fleet, leadership=self._leadership
        )
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> Routes:
        """Where fronts connect, and the sums over all of them."""
        return {
            **self._server.routes(),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/ready"): self._ready,
        }

    async def start(self, port: int) -> None:
        """Let fronts connect, once this process knows what others hold."""
        self._looking = keep_doing("looking at engines", self._look)
        await self._deciding.control.gathered()
        self._server.open()

    async def stop(self) -> None:
        """To be called when the fronts have stopped: no request is under way."""
        if self._looking is not None:
            self._looking.cancel()
        self._server.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._server.look()

    async def _ready(self, request: HttpRequest) -> Response:
        """200: it accepts fronts. 503: it stands by, or does not know yet what others hold."""
        why = self._server.closed()
        return json_response({"ready": not why, "why": why}, 503 if why else 200)

    async def _metrics(self, request: HttpRequest) -> Response:
        """The sums over all fronts, and the Conductor's own."""
        collectors = [it for part in self._deciding.parts for it in part.collectors()]
        sums = Sums(await self._server.counts())
        turn = Turn()
        for collector in (ProcessMetrics("conductor"), *collectors):
            for metric in collector.collect():
                sums.add(family_of(metric))
                await turn.over()
        page = await exposed(Summed(sums.families()).collect())
        return Response(body=page, content_type=METRICS_TYPE)


class ConductorProcess(Process):
    """Conductor, store master, joins and the admin API; made by `start`."""

    def __init__(
        self, config: GatewayConfig, http: HttpClient, deciding: Deciding, welcome: wire.Welcome
    ) -> None:
        self.conductor, self.fleet = deciding.conductor, deciding.fleet
        auth: ClientAuth = "required" if config.tls else "none"
        here = msgspec.structs.replace(config, tls_client_auth=auth)
        parts = [*deciding.parts, FrontsLink(deciding, welcome)]
        super().__init__(here, http, parts, guard=conductor_guard(here), name="conductor")

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        specs: Sequence[InstanceSpec] | None = None,
        kept: Path | None = None,
        port: int | None = None,
    ) -> ConductorProcess:
        """Make all parts and listen.

        specs: the external engines; None: workers will join. kept: a file that keeps engines that
        are described over HTTP for the next start. port: the one that others find in the registry;
        None: the one at which it listens. Raises ConfigError, RegistryError.
        """
        engines = (
            None if specs is None else ExternalSettings(specs, Times(), kept, config.kubernetes)
        )
        config, registry = await registered(with_engines(config, engines))
        http = client_of(config.tls)
        model = resolve(config.model).name if specs is None else ""
        health = Health()
        deciding = Deciding(config, http, health, registry, model, engines, port, True)
        deciding.parts += watched_keys(config, registry, health)
        expected = sum(len(spec.ids()) for spec in specs or ())
        welcome = wire.Welcome(
            model, expected, has_page=not config.no_ui, sampling=deciding.traces.sampling
        )
        one = cls(config, http, deciding, welcome)
        await one.listen()
        return one


class ConductorLink(ProcessPart):
    """A front's end of the link to the Conductor, which is connected already."""

    def __init__(
        self, conductor: RemoteConductor, forward: Forward, registry: Registry | None
    ) -> None:
        self._conductor = conductor
        self._forward = forward
        self._registry = registry

    def routes(self) -> Routes:
        """The metrics, which the Conductor adds up over all fronts, its page, and `_health`."""
        routes: Routes = {("GET", "/metrics"): self._forward, ("GET", "/health"): self._health}
        if self._conductor.has_page:
            routes["GET", page.PATH] = self._forward
        return routes

    async def _health(self, request: HttpRequest) -> Response | StreamingResponse:
        """The Conductor's. While that is away this front is well all the same: it has streams."""
        reply = await self._forward(request)
        if not isinstance(reply, Switch) and reply.status != 503:
            return reply
        why = self._conductor.missing() or "the Conductor does not answer"
        return json_response({"status": "ok", "alarms": [why]})

    async def stop(self) -> None:
        """Leave the Conductor; cut what is being forwarded."""
        await self._conductor.leave()
        await self._forward.close()
        if self._registry is not None:
            await self._registry.close()


class FrontProcess(Process):
    """OpenAI's API for some of the clients; made by `start`."""

    def __init__(
        self,
        config: GatewayConfig,
        conductor: RemoteConductor,
        text: Text | None,
        registry: Registry | None,
        shared: bool,
    ) -> None:
        """conductor: is connected. text: of the model that workers serve; None: there are external
        engines. registry: closed at the end; None: neither keys nor the Conductor are in one.
        shared: other fronts listen at the same ports."""
        http = client_of(config.tls) if text else HttpClient(trusting(config.engine_ca))
        self.conductor = conductor
        self.forward = Forward(conductor)
        health = Health(undecided=conductor.missing)
        fleet = None
        if text is None:
            fleet = RemoteFleet(conductor, http, load_text, os.environ)
        access = Access(config, registry, health, conductor)
        orders = OrderedBy(lambda: conductor.term, conductor.leads)
        front = front_of(
            config,
            conductor,
            http,
            health,
            text,
            fleet,
            access,
            orders,
            lambda: conductor.sampling,
            shared,
        )
        conductor.attach(
            lambda: families([front.metrics.registry]),
            lambda engines: None if fleet is None else fleet.update(engines),
            self.forward.cut,
            lambda: None if fleet is None else fleet.report_again(),
        )
        parts = [ConductorLink(conductor, self.forward, registry), *access.parts]
        super().__init__(
            config, http, parts, front, guard=access.guard, name="front", conductor=conductor
        )

    @classmethod
    async def start(cls, config: GatewayConfig, shared: bool = False) -> FrontProcess:
        """Connect to the Conductor, read the model's text side if workers serve it, make all parts,
        and listen. shared: other fronts listen at the same port. Raises ConfigError.
        """
        in_registry = config.conductor.startswith(IN_REGISTRY)
        where = config.conductor if in_registry else config.registry
        needed = in_registry or config.keys == KEYS_IN_REGISTRY
        registry = await open_registry(where if needed else "", config.tls)
        road = road_of(config.conductor, config.token, config.tls, registry)
        absence = AbsenceLimits(new_s=config.wait_ready / MICROS_PER_SECOND)
        conductor = RemoteConductor(road, absence=absence)
        try:
            welcome = await conductor.start(config.conductor_s)
            text = None
            if welcome.model:
                text = await asyncio.to_thread(_text_of, config, welcome.model)
            if config.ready_instances is None:
                config = msgspec.structs.replace(config, ready_instances=welcome.expected)
            one = cls(config, conductor, text, registry, shared)
        except BaseException:
            await conductor.leave()
            if registry is not None:
                await registry.close()
            raise
        await one.listen(one.forward, shared=shared)
        return one


def _text_of(config: GatewayConfig, model: str) -> Text:
    """The text side of the model that the Conductor's workers serve. Raises ConfigError."""
    name = resolve(config.model).name
    if name != model:
        raise ConfigError(
            f"is {name} here, but the Conductor at {config.conductor} has workers of {model}: give"
            " both the same model, or name another Conductor",
            "model",
        )
    return read_text(config.model)


async def run_conductor(
    config: GatewayConfig,
    specs: Sequence[InstanceSpec] | None,
    kept: Path | None,
    port: int | None,
) -> None:
    """Run a Conductor until SIGTERM or SIGINT; see ConductorProcess.start."""
    await run(ConductorProcess.start(config, specs, kept, port), config)


async def run_front(config: GatewayConfig, shared: bool) -> None:
    """Run one front until SIGTERM or SIGINT; see FrontProcess.start."""
    await run(FrontProcess.start(config, shared), config)
