"""The gateway process before foreign engines: Conductor, fleet and relay in one event loop.

As `process.Gateway` is before workers of ours; both have the same control side. Needs no model
files but the tokenizers that engine descriptions name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from prometheus_client.registry import Collector

from moonserve.core.units import seconds_to_us
from moonserve.live.api.relay import RelayApp
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import Control, registered
from moonserve.live.drive import calls
from moonserve.live.drive.engines import Engines
from moonserve.live.external.api import FleetApi
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import Times
from moonserve.live.external.observed import Observer
from moonserve.live.external.registry_engines import RegistryEngines
from moonserve.live.external.rows import FleetMetrics
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.auth import require_token_beyond_loopback
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, Handler, Server, serve
from moonserve.live.ports import Conducting, Registry
from moonserve.live.process.gateway import limits_of, read_text
from moonserve.live.tasks import keep_doing


def starting(
    specs: Sequence[InstanceSpec],
) -> Callable[[GatewayConfig], Awaitable[ForeignGateway]]:
    """How `process.run_gateway` starts one before these engines."""
    return lambda config: ForeignGateway.start(config, specs)


FILE = "the cluster file"
"""The source of engines that are given at the start."""


def settings_before(config: GatewayConfig, times: Times) -> GatewayConfig:
    """The configuration as it is with foreign engines: there is no store of ours, and no groups."""
    dead_after_us = seconds_to_us(times.longest_s)
    tuning = msgspec.structs.replace(
        config.tuning, spread_bytes=0, cpp=1, dead_after_us=dead_after_us
    )
    return msgspec.structs.replace(config, store="none", tuning=tuning)


class ForeignControl:
    """The control side: Control, and the fleet of foreign engines; see gateway.control.Control."""

    def __init__(
        self, config: GatewayConfig, http: HttpClient, times: Times, registry: Registry | None
    ) -> None:
        self._found: RegistryEngines | None = None
        """Engines from the registry."""
        self._following: asyncio.Task[None] | None = None
        self._control = Control(
            settings_before(config, times),
            http,
            "",
            lambda model: self.fleet.text(model),
            registry,
            self._settled,
        )
        self.conductor = conductor = self._control.conductor
        self.fleet = Fleet(
            conductor,
            http,
            lambda ref: read_text(ref).tools,
            os.environ,
            follow=self._control.followers.follow,
            times=times,
        )
        self._control.alarms = self.fleet.alarms
        if registry is not None:
            self._found = RegistryEngines(registry, self.fleet)
        self._api = FleetApi(self.fleet, conductor, config.token, self._found)

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return self._control.routes() | self._api.routes()

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes."""
        return self._control.prefixes() | self._api.prefixes()

    def collectors(self) -> list[Collector]:
        """What it counts."""
        return [*self._control.collectors(), FleetMetrics(self.fleet, self.conductor)]

    def not_ready(self) -> str:
        """See Control."""
        return self._control.not_ready()

    async def gathered(self) -> None:
        """See Control."""
        await self._control.gathered()

    async def keep(self, kept: Path) -> None:
        """See FleetApi."""
        await self._api.keep(kept)

    async def start(self, port: int) -> None:
        """See Control."""
        if self._found is not None:
            self._following = keep_doing("following engines in the registry", self._found.follow)
        await self._control.start(port)

    async def stop(self) -> None:
        """See Control."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self.fleet.close()
        await self._control.stop()

    async def _settled(self) -> None:
        assert self._found is not None, "only asked where there is a registry"
        await self._found.settled()


def relay_of(
    config: GatewayConfig,
    conductor: Conducting,
    engines: Engines,
    observer: Observer,
    http: HttpClient,
) -> RelayApp:
    """OpenAI's API over foreign engines."""
    times_out = calls.Limits(config.prefill_timeout_s, token_s=config.token_timeout_s)
    return RelayApp(conductor, engines, observer, http, limits_of(config), times_out)


class ForeignGateway:
    """All parts, wired and listening; made by `start`."""

    def __init__(
        self, config: GatewayConfig, times: Times, registry: Registry | None = None
    ) -> None:
        self._config = config
        self._http = HttpClient()
        self._control = ForeignControl(config, self._http, times, registry)
        self.conductor, self.fleet = self._control.conductor, self._control.fleet
        self._front = relay_of(config, self.conductor, self.fleet, self.fleet, self._http)
        self._front.not_ready = self._control.not_ready
        for collector in self._control.collectors():
            self._front.metrics.registry.register(collector)
        self._server: Server | None = None

    @classmethod
    async def start(
        cls, config: GatewayConfig, specs: Sequence[InstanceSpec], times: Times | None = None
    ) -> ForeignGateway:
        """Read the tokenizers, wire all parts, listen; engines join as they answer.

        Raises ConfigError.
        """
        require_token_beyond_loopback(config.host, config.token, "who describes engines")
        _, registry = await registered(msgspec.structs.replace(config, store="none"))
        gateway = cls(config, times or Times(), registry)
        try:
            await gateway.fleet.described(FILE, specs)
            await gateway._listen()
        except BaseException:
            await gateway.stop(0)
            raise
        return gateway

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return self._server.port

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them."""
        self._front.drain()
        await self._front.idle(drain_s)
        if self._server is not None:
            await self._server.stop(0)
        await self._control.stop()
        await self._http.close()

    async def _listen(self) -> None:
        app = App(
            self._front.routes() | self._control.routes(),
            self._front.prefixes() | self._control.prefixes(),
            max_body_bytes=self._config.max_body_bytes,
            name="gateway",
        )
        self._server = await serve(app, self._config.host, self._config.port)
        await self._control.start(self._server.port)
