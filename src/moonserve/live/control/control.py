"""The control side of a gateway: Conductor, store master, joins and the admin API.

One per cluster, in the gateway's process or in one of its own; live.process lists it as a part.
Serves no request of a client.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moonserve.core.kv.facts import BlockEvent
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Tick
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import BlockKey, SegmentId
from moonserve.live.clock import LoopClock
from moonserve.live.control.advice import LatestAdvice
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.drains import Drains
from moonserve.live.control.history import Observed
from moonserve.live.control.in_registry import InRegistry
from moonserve.live.control.join import Internal
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.page import PageFiles
from moonserve.live.control.placement_api import PlacementApi
from moonserve.live.control.usage import UsageSums
from moonserve.live.control.views import (
    Api,
    Figures,
    alarm_metrics,
    conductor_metrics,
    instance_metrics,
    open_alarms,
)
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.kvevents.follower import Follow
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import ConductorEntry, find_master, open_registry
from moonserve.live.store.external import ExternalPool
from moonserve.live.store.local import LocalPool
from moonserve.live.store.pool import Pool
from moonserve.live.store.remote import RemotePool
from moonserve.live.store.server import MasterService
from moonserve.live.store.settings import check_reachable, url_of
from moonserve.live.text.tools import TextTools

_TICK_S = 0.5
_MASTER_S = 15.0
"""Longest wait until the registry has the store's master."""


async def registered(config: GatewayConfig) -> tuple[GatewayConfig, Registry | None]:
    """Open the registry, if the configuration names one, and read the store's master from it.

    Raises ConfigError.
    """
    if not config.registry:
        return config, None
    if config.advertise_host is None:
        check_reachable(config.host)
    registry = await open_registry(config.registry, config.tls)
    if registry is not None and config.store == "embedded" and not config.store_url:
        try:
            master = await find_master(registry, _MASTER_S)
        except BaseException:
            await registry.close()
            raise
        config = msgspec.structs.replace(config, store_url=master, follows_master=True)
    return config, registry


def conductor_and_pool(config: GatewayConfig, http: HttpClient) -> tuple[ConductorLoop, Pool]:
    """The Conductor, and the pool as it sees it: each reports to the other."""

    async def copy(keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        return await pool.copy(keys, to, source)

    core = Conductor(config.tuning, random.Random(0))
    has_page = not config.no_ui
    conductor = ConductorLoop(core, lambda lease: pool.release(lease), copy, has_page=has_page)
    pool = _open_pool(config, http, lambda events: conductor.tell(*events))
    return conductor, pool


def _open_pool(
    config: GatewayConfig, http: HttpClient, tell: Callable[[Sequence[BlockEvent]], None]
) -> Pool:
    if config.store != "embedded":
        return ExternalPool(config.store)
    if config.store_url:
        return RemotePool(http, config.store_url, config.token, tell)
    first_ticket = time.time_ns() // 1_000  # larger than any that an earlier master gave out
    master = Master(Terms(eviction=config.eviction), first_ticket)
    return LocalPool(MasterService(master, LoopClock().now_us), tell)


class Control(ProcessPart):
    """See the module. `start` and `stop` are called on the event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        http: HttpClient,
        conductor: ConductorLoop,
        pool: Pool,
        health: Health,
        follow: Follow,
        *,
        model: str,
        tools: Callable[[str], TextTools | None],
        registry: Registry | None = None,
        settled: Callable[[], Awaitable[object]] | None = None,
        port: int | None = None,
        takes_fronts: bool = False,
    ) -> None:
        """follow: follows the KV events of an engine. model: the name of the served model; "":
        external engines serve theirs. tools: the text tools of a model, where this process has
        them. registry: where others are found. settled: returns once external engines have
        reported what they hold. port: the one that others find; None: the one of `start`.
        takes_fronts: whether this process decides for fronts, and not for clients of its own.
        """
        self._config = config
        self._takes_fronts = takes_fronts
        self._http = http
        self._model = model
        self._port = port
        self._conductor = conductor
        self._pool = pool
        self._health = health
        self._internal = Internal(conductor, [model], lambda: self.leadership.term)
        self._api = Api(conductor, pool)
        self._drains = Drains(conductor, pool, registry)
        health.report_alarms(self._drains.alarms)
        self._advice = LatestAdvice(conductor.now_us)
        self._usage = UsageSums()
        conductor.watch_ended(self._usage.ended)
        self._place: InRegistry | None = None
        if registry is not None:
            self._place = place = self._in(registry, settled, takes_fronts)
            health.report_unready(lambda: place.not_ready)
            health.report_alarms(registry.alarms)
        self.leadership = Leadership() if self._place is None else self._place.leadership
        """Whether this process decides."""
        self._observed = Observed(conductor, pool, health, lambda: self.leadership)
        self._page = None if config.no_ui else PageFiles()
        self._placement = PlacementApi(conductor, tools, model)
        self._indexer = IndexerApi(follow, config.tuning.max_indexed_blocks)
        self._ticker: asyncio.Task[None] | None = None

    def routes(self) -> Routes:
        """The routes of all that this part consists of."""
        place = {} if self._place is None else self._place.routes()
        return (
            self._internal.routes()
            | self._api.routes()
            | self._observed.routes()
            | self._advice.routes()
            | ({} if self._page is None else self._page.routes())
            | self._pool.routes()
            | {("GET", "/health"): self._health_route}
            | {("GET", "/api/tenants"): self._usage.tenants_route}
            | self._placement.routes()
            | self._indexer.routes()
            | place
        )

    def prefixes(self) -> Routes:
        """Path prefixes of the admin API and of the page."""
        own = self._api.prefixes() | self._drains.prefixes()
        return own | ({} if self._page is None else self._page.prefixes())

    def collectors(self) -> list[Collector]:
        """What the Conductor counts."""
        loop = self._conductor
        reads: list[Callable[[], Iterable[Metric]]] = [
            partial(conductor_metrics, loop),
            partial(instance_metrics, loop),
            self._usage.metrics,
            self._advice.metrics,
            self._pool.metrics,
            self._indexer.metrics,
            partial(alarm_metrics, self._health.alarms),
        ]
        if self._place is not None:
            reads.append(self._place.metrics)
        return [Figures(read) for read in reads]

    async def start(self, port: int) -> None:
        """Let the Conductor's time pass, and be found by others. Raises RegistryError."""
        self._ticker = asyncio.create_task(self._tick())
        self._observed.start()
        self._drains.start()
        if self._place is not None:
            host = self._config.advertise_host or self._config.host
            url = url_of(host, self._port or port, self._config.tls)
            name = url.partition("://")[2]
            await self._place.start(ConductorEntry(name, time.time_ns() // 1_000, url, self._model))

    async def gathered(self) -> None:
        """Return once this gateway knows what others hold, or gave up after some seconds."""
        if self._place is not None:
            await self._place.gathered.wait()

    async def stop(self) -> None:
        """To be called when no request is under way any more."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._observed.stop()
        self._drains.stop()
        if self._place is not None:
            await self._place.close()
        self._placement.stop()
        await self._indexer.close()
        await self._pool.close()
        self._conductor.stop()

    def ends(self) -> None:
        """See ProcessPart."""
        self._pool.ends()

    async def _health_route(self, request: HttpRequest) -> Response:
        """200: this process is well; alarms about other processes stand beside that."""
        said: dict[str, Any] = {"status": "ok", "alarms": open_alarms(self._health)}
        if self._takes_fronts:
            said["instances"] = len(self._conductor.views())
            if why := self.leadership.standing_by():
                said["standby"] = why
        return json_response(said)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._pool.tick()
            self._conductor.tell(Tick())

    def _in(
        self,
        registry: Registry,
        settled: Callable[[], Awaitable[object]] | None,
        takes_fronts: bool,
    ) -> InRegistry:
        known, move = settled, None
        if isinstance(self._pool, RemotePool):
            known = self._pool.known.wait
            move = self._pool.move if self._config.follows_master else None
        has_workers = self._config.store != "none"
        return InRegistry(
            registry,
            self._conductor,
            self._internal,
            self._http,
            self._config.token,
            known,
            has_workers,
            move,
            takes_fronts,
            has_own_fronts=takes_fronts and self._port is not None,
        )
