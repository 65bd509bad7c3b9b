"""The gateway process: OpenAI API, Conductor and, by default, store master in one event loop.

`Gateway.start` wires the parts; `run_gateway` adds signals and the drain. For the CLI and tests;
everything it wires can be had without it.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from moonserve.core.units import Bytes, Tokens
from moonserve.live.api.app import GatewayApp, Limits
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import Control, registered
from moonserve.live.drive.dispatch import Cluster
from moonserve.live.drive.wire import WireClient
from moonserve.live.http.auth import require_token_beyond_loopback
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, Server, serve
from moonserve.live.model.catalog import resolve
from moonserve.live.model.config import load_config
from moonserve.live.ports import Conducting, Registry
from moonserve.live.process.supervise import beat, say
from moonserve.live.text.template import load_template
from moonserve.live.text.tokenizer import load_tokenizer
from moonserve.live.text.tools import ModelText

INTERNAL_BODY_BYTES: Bytes = 64 << 20


class Gateway:
    """All parts of a gateway, wired and listening; made by `start`."""

    def __init__(self, config: GatewayConfig, text: Text, registry: Registry | None = None) -> None:
        self._config = config
        self._http = HttpClient()
        tools = {text.name: text.tools}.get
        self._control = Control(config, self._http, text.name, tools, registry)
        self.conductor, self.pool = self._control.conductor, self._control.pool
        self._front = front_of(config, text, self.conductor, self._http)
        self._front.not_ready = self._control.not_ready
        for collector in self._control.collectors():
            self._front.metrics.registry.register(collector)
        self._server: Server | None = None

    @classmethod
    async def start(cls, config: GatewayConfig) -> Gateway:
        """Read the model's text side, wire all parts, listen. Raises ConfigError."""
        require_token_beyond_loopback(config.host, config.token, "workers")
        text = await asyncio.to_thread(read_text, config.model)
        config, registry = await registered(config)
        gateway = cls(config, text, registry)
        try:
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
        """Refuse new requests, let running ones finish for `drain_s`, then cut them.

        The server listens until they have ended: workers beat and call the store meanwhile.
        """
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
            body_limits={"/internal/": INTERNAL_BODY_BYTES},
            name="gateway",
        )
        self._server = await serve(app, self._config.host, self._config.port)
        await self._control.start(self._server.port)


class Running(Protocol):
    """A gateway that listens."""

    @property
    def port(self) -> int:
        """Where."""

    async def stop(self, drain_s: float) -> None:
        """See Gateway.stop."""


class Text(msgspec.Struct, frozen=True):
    """The text side of the served model."""

    name: str
    max_len: Tokens
    tools: ModelText


def front_of(
    config: GatewayConfig, text: Text, conductor: Conducting, http: HttpClient
) -> GatewayApp:
    """OpenAI's API over the instances that the Conductor knows."""
    wire = WireClient(http, config.token, config.prefill_timeout_s, config.token_timeout_s)
    cluster = Cluster(conductor, wire, {text.name: text.max_len})
    return GatewayApp(cluster, {text.name: text.tools}.__getitem__, limits_of(config))


def limits_of(config: GatewayConfig) -> Limits:
    """What one process of this gateway takes on."""
    shares_ids = config.workers > 1 or bool(config.registry)
    return Limits(max_in_flight=config.max_in_flight, shares_ids=shares_ids)


def read_text(ref: str) -> Text:
    """The text side of a model. Raises ConfigError where files are missing or wrong."""
    found = resolve(ref)
    tokenizer = load_tokenizer(found.path)
    tools = ModelText(tokenizer, load_template(found.path, tokenizer))
    return Text(found.name, load_config(found.path).max_len, tools)


async def run_gateway(
    config: GatewayConfig,
    say: Callable[[str], None] = say,
    start: Callable[[GatewayConfig], Awaitable[Running]] = Gateway.start,
) -> None:
    """Run one gateway until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = await start(config)
    gc.collect()
    gc.freeze()  # what is there by now stays: no collection shall look at it again
    gc.set_threshold(10_000, 20, 20)  # nor as often at what is under way
    say(f"listening on http://{config.host}:{gateway.port}")
    beat()
    await stop.wait()
    say("draining: new requests are refused, running ones may finish")
    await gateway.stop(config.drain_s)
    say("stopped")
