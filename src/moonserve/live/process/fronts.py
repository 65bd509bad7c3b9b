"""The processes of a gateway that is several: fronts that serve clients, one with the Conductor.

A supervisor starts them with the path of one unix socket. Every front listens on the gateway's
address, where the kernel gives each new connection to one of them; the Conductor's process listens
for HTTP on loopback, for what fronts pass on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from moonserve.live.api.app import GatewayApp
from moonserve.live.api.limiter import METRICS_TYPE
from moonserve.live.api.relay import RelayApp
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import Control, registered
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts.counts import Summed, families, summed
from moonserve.live.fronts.desk import Desk
from moonserve.live.fronts.engines import RemoteFleet
from moonserve.live.fronts.forward import Forward
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.http.auth import require_token_beyond_loopback
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.model.catalog import resolve
from moonserve.live.ports import Registry
from moonserve.live.process.external import FILE, ForeignControl, relay_of
from moonserve.live.process.gateway import (
    INTERNAL_BODY_BYTES,
    Text,
    front_of,
    read_text,
    run_gateway,
)
from moonserve.live.store.settings import check_reachable
from moonserve.live.tasks import keep_doing

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5
"""How often it is seen whether foreign engines have begun or ceased to tell events."""


class ConductorProcess:
    """Conductor, store master, joins and the admin API; made by `start`."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry | None = None,
        specs: Sequence[InstanceSpec] | None = None,
    ) -> None:
        """`specs`: the foreign engines; None: workers of ours will join."""
        self._http = HttpClient()
        self._fleet: Fleet | None = None
        self.control: Control | ForeignControl
        if specs is None:
            name = resolve(config.model).name
            self.control = Control(config, self._http, name, registry=registry)
        else:
            self.control = ForeignControl(config, self._http, Times(), registry)
            self._fleet = self.control.fleet
        self._app = App(
            self.control.routes() | {("GET", "/metrics"): self._metrics},
            self.control.prefixes(),
            max_body_bytes=config.max_body_bytes,
            body_limits={"/internal/": INTERNAL_BODY_BYTES},
            name="conductor",
        )
        self._server: Server | None = None
        self._desk: Desk | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None = None
    ) -> ConductorProcess:
        """Wire all parts and listen, at the socket `path` too. Raises ConfigError."""
        if specs is not None:
            config = msgspec.structs.replace(config, store="none")
        one = cls(*await registered(config), specs)
        if isinstance(one.control, ForeignControl):
            await one.control.fleet.described(FILE, specs or ())
            await one.control.keep(Path(f"{path}.engines"))
        one._server = await serve(one._app, _LOOPBACK, 0)
        desk = Desk(one.control.conductor, f"http://{_LOOPBACK}:{one.port}", one._fleet)
        one._desk = desk
        one._looking = keep_doing("looking at engines", partial(_look, desk))
        await one.control.start(config.port)  # where fronts are found
        await one.control.gathered()
        await one._desk.listen(path)
        return one

    @property
    def port(self) -> int:
        """Where it listens for HTTP."""
        assert self._server is not None
        return self._server.port

    async def stop(self, drain_s: float) -> None:
        """To be called when the fronts have stopped: no request is under way."""
        assert self._server is not None
        assert self._desk is not None
        if self._looking is not None:
            self._looking.cancel()
        await self._desk.close()
        await self._server.stop(0)
        await self.control.stop()
        await self._http.close()

    async def _metrics(self, request: HttpRequest) -> Response:
        """The sums over all fronts, and the Conductor's own."""
        assert self._desk is not None
        own = families(self.control.collectors())
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Summed(summed([await self._desk.counts(), own])))
        return Response(body=generate_latest(registry), content_type=METRICS_TYPE)


async def _look(desk: Desk) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        desk.look()


class FrontProcess:
    """OpenAI's API for some of the clients; made by `start`."""

    def __init__(self, config: GatewayConfig, text: Text | None, path: str) -> None:
        """`text`: of the model that workers of ours serve; None: engines are foreign."""
        self._http = http = HttpClient()
        self.conductor = RemoteConductor(path, lambda: families([self._front.metrics.registry]))
        part = -(-config.max_in_flight // config.workers)
        config = msgspec.structs.replace(config, max_in_flight=part)
        self._front: GatewayApp | RelayApp
        if text is not None:
            self._front = front_of(config, text, self.conductor, http)
        else:
            tools = lambda ref: read_text(ref).tools  # noqa: E731
            fleet = RemoteFleet(self.conductor, http, tools, os.environ)
            self._front = relay_of(config, self.conductor, fleet, fleet, http)
        self._front.undecided = self.conductor.missing
        routes = self._front.routes()
        del routes["GET", "/metrics"]  # the sums over all are asked for
        self._forward = Forward(self.conductor)
        self._app = App(
            routes,
            self._front.prefixes(),
            max_body_bytes=config.max_body_bytes,
            body_limits={"/internal/": INTERNAL_BODY_BYTES},
            fallback=self._forward,
            name="front",
        )
        self._server: Server | None = None

    @classmethod
    async def start(cls, config: GatewayConfig, path: str, foreign: bool = False) -> FrontProcess:
        """Read the model's text side, wire all parts, listen beside others. Raises ConfigError."""
        require_token_beyond_loopback(config.host, config.token, "workers")
        text = None if foreign else await asyncio.to_thread(read_text, config.model)
        one = cls(config, text, path)
        await one.conductor.start()
        one._server = await serve(one._app, config.host, config.port, shared=True)
        return one

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return self._server.port

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them."""
        assert self._server is not None
        self._front.drain()
        await self._front.idle(drain_s)
        await self._server.stop(0)
        await self.conductor.leave()
        await self._forward.close()
        await self._http.close()


async def run_conductor(
    config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None
) -> None:
    """Run the Conductor's process until SIGTERM or SIGINT."""
    if config.registry and config.advertise_host is None:
        check_reachable(config.host)
    host = config.advertise_host or config.host
    here = msgspec.structs.replace(config, host=_LOOPBACK, advertise_host=host)
    await run_gateway(here, start=lambda config: ConductorProcess.start(config, path, specs))


async def run_front(config: GatewayConfig, path: str, specs: Sequence[InstanceSpec] | None) -> None:
    """Run one front until SIGTERM or SIGINT."""
    foreign = specs is not None
    await run_gateway(config, start=lambda config: FrontProcess.start(config, path, foreign))
