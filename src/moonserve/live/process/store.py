"""The store's own processes: a master alone, and a segment without an engine.

For the CLI. Both run until SIGTERM or SIGINT, and print one line per step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import seconds_to_us
from moonserve.live.access.guard import Guard, own_names
from moonserve.live.clock import LoopClock
from moonserve.live.control.views import Figures
from moonserve.live.http.client import HttpClient, client_of
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import App, Handler, Server, serve
from moonserve.live.process.metrics import ProcessMetrics
from moonserve.live.process.supervise import say, stop_event
from moonserve.live.registry.entries import (
    MASTER,
    MasterEntry,
    find_master,
    follow_master,
    open_registry,
)
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.leaving import hand_on
from moonserve.live.store.local import EventLog, LocalPool
from moonserve.live.store.remote import HttpRpc, mounted, within
from moonserve.live.store.server import MasterService
from moonserve.live.store.settings import check_reachable, url_of
from moonserve.live.tls.contexts import Tls
from moonserve.live.transfer.metrics import LaneMetrics

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_TICK_S = 0.5
_MASTER_S = 15.0
_EVENTS_KEPT = 100_000


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A store's master in a process of its own."""

    host: str = "127.0.0.1"
    port: int = 8100
    """0 takes any free port."""
    tls: Tls | None = None
    """For its listener, which accepts processes of the cluster only; None: without TLS."""
    token: str = ""
    """Callers must send it."""
    recover_s: float = 3.0
    """How long it collects the contents of segments before it answers; 0: the pool is new."""
    terms: Terms = Terms()
    registry: str = ""
    """The registry in which Conductor and workers find it; "": they get its URL by settings."""
    advertise_host: str | None = None
    """Host at which others reach it, if not `host`."""


class SegmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the pool that only holds objects."""

    settings: StoreSettings
    store_url: str = ""
    """URL of the master; "": the registry has it."""
    registry: str = ""
    drain_s: float = 10.0
    """How long the objects in memory may take to move elsewhere, after a signal to stop."""
    metrics_port: int | None = None
    """Port of /health and /metrics; 0 takes any free one, None: there are none."""


async def run_master(config: MasterConfig, say: Say = say) -> None:
    """Run a master. Raises ConfigError if it cannot listen."""
    stop = stop_event()
    registry = await open_registry(config.registry, config.tls)
    if registry is not None and config.advertise_host is None:
        check_reachable(config.host)
    start = time.time_ns() // 1_000
    now_us = LoopClock().now_us
    recover_us = seconds_to_us(config.recover_s)
    until_us = now_us() + recover_us if recover_us else None
    master = Master(config.terms, start, until_us)
    events = EventLog(start, master.inventory, _EVENTS_KEPT)
    pool = LocalPool(MasterService(master, now_us), events.add, events)

    async def health(request: HttpRequest) -> Response:
        return json_response({"status": "recovering" if master.stats().recovering else "ok"})

    async def stats(request: HttpRequest) -> Response:
        return json_response({"store": await pool.lookup({})})

    routes: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): health,
        ("GET", "/metrics"): _page(ProcessMetrics("store"), Figures(pool.metrics)),
        ("GET", "/api/health"): health,
        ("GET", "/api/stats"): stats,
        **pool.routes(),
    }
    guard = Guard(config.token, own_names(config.host, config.advertise_host))
    master_app = App(routes, gate=guard, name="store master")
    tls = config.tls
    listener = tls.listener() if tls else None
    server = await serve(master_app, config.host, config.port, "listen", tls=listener)
    say(f"listening on {url_of(config.host, server.port, tls)}")
    if registry is not None:
        url = url_of(config.advertise_host or config.host, server.port, tls)
        await registry.register(MASTER, msgspec.json.encode(MasterEntry(url)))
        say(f"registered as {url}")
    recovering = master.stats().recovering
    while not await within(stop, _TICK_S):
        pool.tick()
        if recovering and not master.stats().recovering:
            recovering = False
            say(f"recovered {_counted(master)}")
    pool.ends()
    if registry is not None:
        await registry.close()
    await server.stop(0)
    say("stopped")


def _counted(master: Master) -> str:
    stats = master.stats()
    return f"{stats.objects} objects on {len(stats.segments)} segments"


async def run_segment(config: SegmentConfig, say: Say = say) -> None:
    """Run a segment. Raises MoonserveError where it cannot become a member."""
    mine = config.settings
    if mine.advertise_host is None:
        check_reachable(mine.host)
    stop = stop_event()
    async with AsyncExitStack() as stack:
        http = client_of(mine.tls)
        stack.push_async_callback(http.close)
        rpc = await _reach(config, http, stack)
        client = await mounted(rpc.connect, lambda: StoreClient.open(rpc, mine), stop)
        if client is None:
            return
        stack.push_async_callback(client.close)
        if config.metrics_port is not None:
            server = await _serve_metrics(config, client, config.metrics_port)
            stack.push_async_callback(server.stop, 0)
            say(f"metrics at {url_of(mine.host, server.port, mine.tls)}/metrics")
        client.start_beats()
        for owner in client.owners:
            it = owner.mounting
            say(f"{it.id}: {it.capacity_bytes >> 20} MiB of {it.tier} at {rpc.url}")
        await stop.wait()
        say("leaving: objects in memory move elsewhere, if there is room")
        await hand_on(client, config.drain_s)
    say("stopped")


async def _reach(config: SegmentConfig, http: HttpClient, stack: AsyncExitStack) -> HttpRpc:
    """The calls to the master, whose URL may change in the registry. Raises ConfigError."""
    token = config.settings.token.decode()
    if config.store_url:
        return HttpRpc(http, config.store_url, token)
    registry = await open_registry(config.registry, config.settings.tls)
    assert registry is not None, "the command gives a URL or a registry"
    stack.push_async_callback(registry.close)
    rpc = HttpRpc(http, await find_master(registry, _MASTER_S), token)
    stack.callback(asyncio.create_task(follow_master(registry, rpc.move)).cancel)
    return rpc


def _page(*collectors: Collector) -> Handler:
    """The handler of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)

    async def metrics(request: HttpRequest) -> Response:
        return Response(body=generate_latest(registry), content_type=CONTENT_TYPE_PLAIN_0_0_4)

    return metrics


async def _serve_metrics(config: SegmentConfig, client: StoreClient, port: int) -> Server:
    """Serve health and the lanes' metrics. Raises ConfigError if the port is taken."""

    async def health(request: HttpRequest) -> Response:
        return json_response({"status": "ok", "id": config.settings.segment})

    routes: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): health,
        ("GET", "/metrics"): _page(ProcessMetrics("segment"), LaneMetrics(client.transfer.stats)),
    }
    mine = config.settings
    app = App(routes, gate=Guard(""), name=f"segment {mine.segment}")
    tls = mine.tls.listener() if mine.tls else None
    return await serve(app, mine.host, port, "metrics_port", tls=tls)
