"""The control side of a gateway: Conductor, store master, joins and the admin API.

One per cluster, in the gateway's process or in one of its own; `process` mounts its routes. Serves
no request of a client.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from prometheus_client.registry import Collector

from moonserve.core.kv.facts import BlockEvent
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Tick
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.clock import LoopClock
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.join import Internal
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.metrics import Alarms, Copies, Predictions, Served
from moonserve.live.control.peers import Several, Standing
from moonserve.live.control.placement_api import PlacementApi
from moonserve.live.control.views import Api
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Handler
from moonserve.live.kvevents.follower import Followers
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import GatewayEntry, find_master, open_registry
from moonserve.live.store.external import ForeignPool
from moonserve.live.store.local import LocalPool
from moonserve.live.store.remote import RemotePool
from moonserve.live.store.server import MasterService
from moonserve.live.store.settings import check_reachable, url_of
from moonserve.live.text.tools import TextTools

_TICK_S = 0.5
_MASTER_S = 15.0
"""Longest wait for the store's master to be found in a registry."""


async def registered(config: GatewayConfig) -> tuple[GatewayConfig, Registry | None]:
    """The registry, and with it the store's master, where the configuration leaves that to it.

    Raises ConfigError.
    """
    if not config.registry:
        return config, None
    if config.advertise_host is None:
        check_reachable(config.host)
    registry = await open_registry(config.registry)
    if registry is not None and config.store == "embedded" and not config.store_url:
        try:
            master = await find_master(registry, _MASTER_S)
        except BaseException:
            await registry.close()
            raise
        config = msgspec.structs.replace(config, store_url=master, follows_master=True)
    return config, registry


class Control:
    """See the module. `start` and `stop` are called on the event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        http: HttpClient,
        model: str,
        tools: Callable[[str], TextTools | None] = lambda model: None,
        registry: Registry | None = None,
        settled: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`model`: the name that the served model goes by; `tools`: a model's text side, where it
        has one in this process; `registry`: where others are found; `settled`: returns once foreign
        engines have told what they hold.
        """
        self._config = config
        self._http = http
        self._model = model
        core = Conductor(config.tuning, random.Random(0))
        self.conductor = ConductorLoop(core, self._release, self._copy)
        self.pool = self._open_pool()
        self._internal = Internal(self.conductor, config.token, [model])
        self._api = Api(self.conductor, self.pool)
        self.several = None if registry is None else self._among(registry, settled)
        self.alarms: Callable[[], list[str]] = list if registry is None else registry.alarms
        """What somebody should look at, in words."""
        self._selection = PlacementApi(self.conductor, tools, config.token)
        self.followers = Followers()
        """Follows the KV events of engines, for the Indexer API and for the fleet."""
        self._indexer = IndexerApi(config.token, self.followers.follow)
        self._ticker: asyncio.Task[None] | None = None

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        own = self._internal.routes() | self._api.routes() | self.pool.routes()
        others = {} if self.several is None else self.several.routes()
        own["GET", "/health"] = self._health
        return own | self._selection.routes() | self._indexer.routes() | others

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes."""
        return self._api.prefixes()

    def collectors(self) -> list[Collector]:
        """What it counts, for a registry of metrics."""
        loop = self.conductor
        others = [] if self.several is None else [Standing(self.several)]
        alarms = Alarms(lambda: self.alarms())
        return [Predictions(loop), Served(loop.account), Copies(loop), alarms, *others]

    async def start(self, port: int) -> None:
        """Time passes from now on, and others find us at that port. Raises RegistryError."""
        self._ticker = asyncio.create_task(self._tick())
        if self.several is not None:
            url = url_of(self._config.advertise_host or self._config.host, port)
            name = url.removeprefix("http://")
            await self.several.start(GatewayEntry(name, time.time_ns() // 1_000, url))

    def not_ready(self) -> str:
        """Why clients should go elsewhere, as far as is known here; empty: they need not."""
        return "" if self.several is None else self.several.not_ready

    async def gathered(self) -> None:
        """Return once there is no such reason any more; in seconds, whatever comes."""
        if self.several is not None:
            await self.several.gathered.wait()

    async def stop(self) -> None:
        """To be called when nobody is served any more."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self.several is not None:
            await self.several.close()
        self._selection.stop()
        await self._indexer.close()
        await self.pool.close()
        self.conductor.stop()

    async def _health(self, request: HttpRequest) -> Response:
        """200: this process is well; what else is wrong is said beside that."""
        return json_response({"status": "ok", "alarms": self.alarms()})

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.pool.tick()
            self.conductor.tell(Tick())

    def _release(self, lease: LeaseId) -> None:
        self.pool.release(lease)

    async def _copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        return await self.pool.copy(keys, to, source)

    def _open_pool(self) -> LocalPool | RemotePool | ForeignPool:
        config = self._config
        if config.store != "embedded":
            return ForeignPool(config.store)
        if config.store_url:
            return RemotePool(self._http, config.store_url, config.token, self._tell)
        first_ticket = time.time_ns() // 1_000  # larger than any an earlier master gave out
        master = Master(Terms(eviction=config.eviction), first_ticket)
        return LocalPool(MasterService(master, LoopClock().now_us), config.token, self._tell)

    def _among(
        self, registry: Registry, settled: Callable[[], Awaitable[object]] | None
    ) -> Several:
        token, known, move = self._config.token, settled, None
        if isinstance(self.pool, RemotePool):
            known = self.pool.known.wait
            move = self.pool.move if self._config.follows_master else None
        has_workers = self._config.store != "none"
        duty = f"conductor/{self._model}" if has_workers else "conductor"
        return Several(
            registry,
            self.conductor,
            self._internal,
            self._http,
            token,
            known,
            has_workers,
            move,
            duty,
        )

    def _tell(self, events: Sequence[BlockEvent]) -> None:
        self.conductor.tell(*events)
