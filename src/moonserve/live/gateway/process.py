"""The gateway process: OpenAI API, Conductor and, by default, store master in one event loop.

`Gateway.start` wires the parts; `run_gateway` adds signals and the drain. For the CLI and tests;
everything it wires can be had without it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Sequence

from moonserve.core.conductor import Conductor
from moonserve.core.facts import BlockEvent, Tick
from moonserve.core.master import Master
from moonserve.core.policies import Tuning
from moonserve.core.pool import Terms
from moonserve.core.units import BlockKey, LeaseId, Micros, SegmentId, Tokens, seconds_to_us
from moonserve.live.clock import LoopClock
from moonserve.live.conductor import ConductorLoop
from moonserve.live.dispatch import Cluster
from moonserve.live.gateway.api import Api
from moonserve.live.gateway.app import GatewayApp, Limits
from moonserve.live.gateway.config import GatewayConfig
from moonserve.live.gateway.internal import Internal
from moonserve.live.gateway.metrics import Copies, Predictions
from moonserve.live.gateway.text import ModelText
from moonserve.live.http.auth import require_token_beyond_loopback
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, Server, serve
from moonserve.live.instances.wire import WireClient
from moonserve.live.model.catalog import ModelRef, resolve
from moonserve.live.model.config import load_config
from moonserve.live.store.foreign import ForeignPool
from moonserve.live.store.local import LocalPool
from moonserve.live.store.remote import RemotePool
from moonserve.live.store.server import MasterService
from moonserve.live.text.template import load_template
from moonserve.live.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

_TICK_S = 0.5
_BIND_AHEAD_US: Micros = 20_000
"""Late binding: before an instance is free, its next call travels there, and KV is looked up and
loaded: some milliseconds each, and the predicted end errs by some more. Longer binds too early."""
_INTERNAL_BODY_BYTES = 64 << 20


class Gateway:
    """All parts of a gateway, wired and listening; made by `start`."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        tuning = Tuning(
            policy=config.policy,
            kvcache_balancing_threshold=config.threshold,
            slo=config.slo,
            admission=config.admission,
            admission_low=config.admission_low,
            admission_high=config.admission_high,
            predictor=config.predictor,
            spread_bytes=config.spread_bytes,
            cpp=config.cpp,
            bind_ahead_us=_BIND_AHEAD_US,
            dead_after_us=seconds_to_us(config.dead_after_s),
        )
        core = Conductor(tuning, random.Random(0))
        self.conductor = ConductorLoop(core, self._release, self._copy)
        self._http = HttpClient()
        self.pool = self._open_pool()
        self._front: GatewayApp | None = None
        self._server: Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: GatewayConfig) -> Gateway:
        """Read the model's text side, wire all parts, listen. Raises ConfigError."""
        require_token_beyond_loopback(config.host, config.token, "workers")
        gateway = cls(config)
        await gateway._listen()
        return gateway

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return self._server.port

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then cut them.

        The server listens until they have ended: workers beat and call the store meanwhile.
        """
        if self._front is not None:
            self._front.drain()
            await self._front.idle(drain_s)
        if self._server is not None:
            await self._server.stop(0)
        if self._ticker is not None:
            self._ticker.cancel()
        await self.pool.close()
        self.conductor.stop()
        await self._http.close()

    async def _listen(self) -> None:
        config = self._config
        found, max_len, text = await asyncio.to_thread(_read_model, config.model)
        wire = WireClient(
            self._http, config.token, config.prefill_timeout_s, config.token_timeout_s
        )
        cluster = Cluster(self.conductor, wire, {found.name: max_len})
        self._front = front = GatewayApp(
            cluster, {found.name: text}.__getitem__, Limits(max_in_flight=config.max_in_flight)
        )
        front.metrics.registry.register(Predictions(self.conductor.core.outlook))
        front.metrics.registry.register(Copies(self.conductor))
        internal = Internal(self.conductor, config.token, [found.name])
        api = Api(self.conductor, self.pool)
        app = App(
            front.routes() | internal.routes() | api.routes() | self.pool.routes(),
            front.prefixes() | api.prefixes(),
            max_body_bytes=config.max_body_bytes,
            body_limits={"/internal/": _INTERNAL_BODY_BYTES},
            name="gateway",
        )
        self._server = await serve(app, config.host, config.port)
        self._ticker = asyncio.create_task(self._tick())

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
        if config.store == "mooncake":
            return ForeignPool()
        if config.store_url:
            return RemotePool(self._http, config.store_url, config.token, self._tell)
        first_ticket = time.time_ns() // 1_000  # larger than any an earlier master gave out
        master = Master(Terms(eviction=config.eviction), first_ticket)
        return LocalPool(MasterService(master, LoopClock().now_us), config.token, self._tell)

    def _tell(self, events: Sequence[BlockEvent]) -> None:
        self.conductor.tell(*events)


def _read_model(ref: str) -> tuple[ModelRef, Tokens, ModelText]:
    """The text side of a model. Raises ConfigError where files are missing or wrong."""
    found = resolve(ref)
    tokenizer = load_tokenizer(found.path)
    text = ModelText(tokenizer, load_template(found.path, tokenizer))
    return found, load_config(found.path).max_len, text


async def run_gateway(
    config: GatewayConfig, say: Callable[[str], None] = lambda line: print(line, flush=True)
) -> None:
    """Run one gateway until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = await Gateway.start(config)
    say(f"listening on http://{config.host}:{gateway.port}")
    await stop.wait()
    say("draining: new requests are refused, running ones may finish")
    await gateway.stop(config.drain_s)
    say("stopped")
