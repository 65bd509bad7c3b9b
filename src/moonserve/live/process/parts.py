"""One process: parts behind one HTTP server. The order of start, drain and stop stands here only.

`gateway` and `fronts` make lists of parts; `run` adds signals. A process serves clients (it has a
front) or only other processes.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from moonserve.core.units import Bytes
from moonserve.live.access.guard import Guard
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.views import Figures
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.client import HttpClient
from moonserve.live.http.places import PlaceLimits
from moonserve.live.http.server import (
    App,
    Handler,
    ProcessPart,
    Routes,
    Server,
    serve,
    serve_socket,
)
from moonserve.live.openai.request import PATHS, BodyShape
from moonserve.live.ports import Conducting
from moonserve.live.process.about import About
from moonserve.live.process.metrics import ProcessKind, ProcessMetrics
from moonserve.live.process.profiles import LoopProfiler, Profiles
from moonserve.live.process.supervise import beat, proxy_line, say, stop_event
from moonserve.live.store.settings import url_of

INTERNAL_BODY_BYTES: Bytes = 64 << 20
_PART_S = 1.0
"""How long clients' connections may each send one more request to a process that leaves a shared
port."""
_CUT_S = 1.0
"""How long clients may take to read why their requests were ended."""
_CUT = "this server is stopping, and running requests have had their time; send the request again"
_NO_CLIENTS = dict.fromkeys(
    PATHS.values(), "a Conductor serves no clients; send the request to a gateway of its cluster"
)


class ClientSide(Protocol):
    """What serves clients, or the proxy before them: Front, or PickerFront."""

    metrics: RequestMetrics
    parts: Sequence[ProcessPart]
    """Parts that it needs; they start last."""

    def routes(self) -> Routes:
        """Handlers of exact paths."""

    def prefixes(self) -> Routes:
        """Handlers of path prefixes."""

    def body_shapes(self) -> dict[str, BodyShape]:
        """The fields of bodies, by path."""

    def absent(self) -> dict[str, str]:
        """Paths that clients may expect here, each with why it is not here and what to use."""

    def drain(self) -> None:
        """Refuse new requests from now on."""

    def stop_waiting(self) -> None:
        """Answer requests that wait for instances now; others go on."""

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way. False: `timeout_s` is over."""


class Process:
    """Parts that share one HTTP client and one server; made and started by the assemblies."""

    def __init__(
        self,
        config: GatewayConfig,
        http: HttpClient,
        parts: Sequence[ProcessPart],
        front: ClientSide | None = None,
        *,
        guard: Guard,
        name: ProcessKind,
        conductor: Conducting | None = None,
    ) -> None:
        """front: serves clients, and is drained at the end; guard: of all paths; name: of the
        server, for its log; conductor: that of the requests of `front`."""
        self.http = http
        self._config = config
        self._parts = [*parts, *([] if front is None else front.parts)]
        self._front = front
        self._guard = guard
        self._name = name
        self._conductor = conductor
        self._server: Server | None = None
        self._at_socket: Server | None = None
        self._shared = False
        if front is not None:
            front.metrics.registry.register(ProcessMetrics(name))

    @property
    def port(self) -> int:
        """The port that the process listens at."""
        assert self._server is not None, "start it first"
        return self._server.port

    @property
    def proxies_at(self) -> str:
        """Where proxies ask the process; empty: it is no picker."""
        return next(filter(None, (part.proxies_at for part in self._parts)), "")

    async def listen(self, fallback: Handler | None = None, shared: bool = False) -> None:
        """Prepare all parts, listen, then start the parts in order; on failure, stop all.

        It listens at the port and, if the settings name one, at the unix socket.

        fallback: serves the paths that no part has; shared: other processes listen there too.
        Raises ConfigError, RegistryError.
        """
        if not shared:  # else nobody could say which of the processes is profiled
            self._parts.append(Profiles(self._config.profile_folder, self._name, LoopProfiler()))
        self._shared = shared
        try:
            for part in self._parts:
                await part.prepare()
            routes = self._mounted(lambda part: part.routes())
            prefixes = self._mounted(lambda part: part.prefixes())
            shapes = {} if self._front is None else self._front.body_shapes()
            picks = self._front is not None and self._config.picker_port is not None
            about = About("picker" if picks else self._name, routes, prefixes, shapes, fallback)
            app = App(
                {**about.routes(), **routes},
                prefixes,
                max_body_bytes=self._config.max_body_bytes,
                body_limits={"/internal/": INTERNAL_BODY_BYTES},
                keep_alive_s=self._config.keep_alive_s,
                place_limits=PlaceLimits(
                    connections=self._config.max_connections,
                    per_address=self._config.address_connections,
                    files_each=2,  # a request needs one for its client, and one for an instance
                ),
                fallback=fallback,
                absent=_NO_CLIENTS if self._front is None else self._front.absent(),
                gate=self._guard,
                certified=() if self._config.tls_client_auth == "none" else ("/internal/",),
                name=self._name,
            )
            config = self._config
            tls = config.tls.listener(config.tls_client_auth) if config.tls else None
            self._server = await serve(app, config.host, config.port, shared=shared, tls=tls)
            if config.socket:
                self._at_socket = await serve_socket(app, config.socket, "socket")
            if self._front is not None:
                self._front.metrics.registry.register(Figures(self._server.metrics))
            for part in self._parts:
                await part.start(self._server.port)
        except BaseException:
            await self.stop(0)
            raise

    def _mounted(self, of: Callable[[ProcessPart | ClientSide], Routes]) -> Routes:
        mounted = {} if self._front is None else of(self._front)
        for part in self._parts:
            mounted = mounted | of(part)
        return mounted

    async def stop(self, drain_s: float, others_go_on: bool = True) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, then end them with an error.

        The server listens until they have ended: workers beat and call the store meanwhile. If
        other processes listen at its port and go on, it leaves that at once: clients and workers
        connect to those.
        """
        for part in self._parts:
            part.ends()
        leaves = self._shared and others_go_on
        if self._front is not None and leaves:
            self._front.stop_waiting()
        elif self._front is not None:
            self._front.drain()
            if not await self._front.idle(drain_s):
                self._cut()
                await self._front.idle(_CUT_S)
        for server in (self._server, self._at_socket):
            if server is not None and leaves:
                await server.stop(drain_s, _PART_S, self._cut)
            elif server is not None:
                await server.stop(0)
        for part in reversed(self._parts):
            await part.stop()
        await self.http.close()

    def _cut(self) -> None:
        if self._conductor is not None:
            self._conductor.end_all(_CUT)


async def run(
    start: Coroutine[Any, Any, Process], config: GatewayConfig, say: Callable[[str], None] = say
) -> None:
    """Start a process and run it until SIGTERM or SIGINT, also while it starts: a front may wait
    long for its Conductor. ALL_END: the others at its port end too. Raises ConfigError,
    RegistryError."""
    stop = stop_event()
    starting = asyncio.create_task(start)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled():
            say("stopped before it was ready")
            return
    process = starting.result()
    gc.collect()
    gc.freeze()  # objects of the start stay for ever: no collection need look at them again
    gc.set_threshold(10_000, 20, 20)  # requests make few cycles: look for them less often
    if process.proxies_at:
        say(proxy_line(process.proxies_at))
    say(f"listening on {url_of(config.host, process.port, config.tls)}")
    beat()
    await stop.wait()
    say("draining: new requests are refused, running ones may finish")
    await process.stop(config.drain_s, others_go_on=not stop.all_end)
    say("stopped")
