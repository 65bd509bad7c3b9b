"""The store's own processes: a master alone, and a segment without an engine.

For the CLI. Both run until SIGTERM or SIGINT and say one line per step.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

import msgspec

from moonserve.core.errors import ConfigError, MoonserveError
from moonserve.core.master import Master
from moonserve.core.pool import Terms
from moonserve.core.units import seconds_to_us
from moonserve.live.clock import LoopClock
from moonserve.live.http.auth import require_token_beyond_loopback
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import App, Handler, serve
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.local import EVENTS_PATH, EventLog, LocalPool
from moonserve.live.store.remote import HttpRpc, mounted, within
from moonserve.live.store.server import MasterService

log = logging.getLogger(__name__)

Say = Callable[[str], None]

_TICK_S = 0.5
_BODY_BYTES = 64 << 20
_EVENTS_KEPT = 100_000
_DRAIN_POLL_S = 0.05
_WILDCARD = ("0.0.0.0", "::")


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A store's master in a process of its own."""

    host: str = "127.0.0.1"
    port: int = 8100
    """0 takes any free port."""
    token: str = ""
    """Callers must present it; empty only when bound to loopback."""
    recover_s: float = 3.0
    """How long it asks segments what they hold, before it answers; 0: the pool is new."""
    terms: Terms = Terms()


class SegmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the pool that only holds."""

    settings: StoreSettings
    store_url: str
    """Where the master is."""
    drain_s: float = 10.0
    """How long what lies in memory may take to move elsewhere, after a stop was asked for."""


def _say(line: str) -> None:
    print(line, flush=True)


async def run_master(config: MasterConfig, say: Say = _say) -> None:
    """Run a master. Raises ConfigError where it cannot listen."""
    require_token_beyond_loopback(config.host, config.token, "members of the pool")
    stop = _stop_event()
    start = time.time_ns() // 1_000
    now_us = LoopClock().now_us
    recover_us = seconds_to_us(config.recover_s)
    until_us = now_us() + recover_us if recover_us else None
    master = Master(config.terms, start, until_us)
    events = EventLog(start, master.inventory, _EVENTS_KEPT)
    pool = LocalPool(MasterService(master, now_us), config.token, events.add)

    async def health(request: HttpRequest) -> Response:
        return json_response({"status": "recovering" if master.stats().recovering else "ok"})

    async def stats(request: HttpRequest) -> Response:
        return json_response({"store": await pool.lookup({})})

    routes: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): health,
        ("GET", "/api/health"): health,
        ("GET", "/api/stats"): stats,
        ("POST", EVENTS_PATH): pool.guarded(events.handle),
        **pool.routes(),
    }
    app = App(routes, pool.prefixes(), max_body_bytes=_BODY_BYTES, name="store master")
    server = await serve(app, config.host, config.port)
    say(f"listening on http://{config.host}:{server.port}")
    recovering = master.stats().recovering
    while not await within(stop, _TICK_S):
        pool.tick()
        if recovering and not master.stats().recovering:
            recovering = False
            say(f"recovered {_counted(master)}")
    await server.stop(0)
    say("stopped")


def _counted(master: Master) -> str:
    stats = master.stats()
    return f"{stats.objects} objects on {len(stats.segments)} segments"


async def run_segment(config: SegmentConfig, say: Say = _say) -> None:
    """Run a segment. Raises MoonserveError where it cannot become a member."""
    mine = config.settings
    if mine.host in _WILDCARD and mine.advertise_host is None:
        raise ConfigError(
            f"others cannot reach {mine.host}; give the address that they can with"
            " --advertise-host",
            "advertise_host",
        )
    stop = _stop_event()
    http = HttpClient()
    try:
        rpc = HttpRpc(http, config.store_url, mine.token.decode())
        client = await mounted(rpc, lambda: StoreClient.open(rpc, mine), stop)
        if client is None:
            return
        client.start_beats()
        for owner in client.owners:
            it = owner.mounting
            say(f"{it.id}: {it.capacity_bytes >> 20} MiB of {it.tier} at {config.store_url}")
        await stop.wait()
        say("leaving: what lies in memory is moved elsewhere, if there is room")
        try:
            async with asyncio.timeout(config.drain_s):
                await _drain(client)
        except (TimeoutError, OSError, MoonserveError) as error:
            log.warning("left with %d objects: %r", _in_memory(client), error)
        await client.close()
    finally:
        await http.close()
    say("stopped")


async def _drain(client: StoreClient) -> None:
    """Empty what is lost with this process, while there is somebody else to take it."""
    own = [it for it in client.owners if it.mounting.tier == "dram"]
    names = [owner.mounting.id for owner in own]
    for owner in own:
        await client.drain(owner.mounting.id)
        await owner.catch_up()
    while _in_memory(client) and any(it not in names for it in client.link.addresses):  # noqa: ASYNC110 - beats change both
        await asyncio.sleep(_DRAIN_POLL_S)


def _in_memory(client: StoreClient) -> int:
    own = [owner for owner in client.owners if owner.mounting.tier == "dram"]
    return sum(len(owner.catalogue.held) for owner in own)


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
