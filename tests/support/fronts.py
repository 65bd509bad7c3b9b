"""A Conductor's end of the links to fronts, on one event loop, at a unix socket and a TCP port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from moonserve.live.access.guard import Guard
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts import wire
from moonserve.live.fronts.road import Road, road_of
from moonserve.live.fronts.server import FrontServer
from moonserve.live.http.server import App, serve, serve_socket
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from moonserve.live.process.gateway import Gateway
from moonserve.live.tls.contexts import Tls
from tests.support.engines import QUICK

TOKEN = "the-secret-of-this-test"
WELCOME = wire.Welcome("m", 0, 1)
ASK = (
    f"GET {wire.PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    f"connection: upgrade\r\nupgrade: {wire.PROTOCOL}\r\n\r\n"
).encode()
"""How a front that is made by hand asks for its link."""


class Served:
    """Where a FrontServer is reached."""

    def __init__(self, path: str, port: int, tls: Tls | None) -> None:
        self.path, self.port, self._tls = path, port, tls

    def road(self, by: str = "socket", token: str = TOKEN) -> Road:
        """The way to it, by the socket or by TCP."""
        where = self.path if by == "socket" else f"127.0.0.1:{self.port}"
        return road_of(where, token, self._tls, None)


@contextlib.asynccontextmanager
async def served(
    server: Callable[[], FrontServer], path: str, tls: Tls | None = None
) -> AsyncIterator[Served]:
    """Serve what `server` returns at the time of each request. tls: at the port."""

    async def channel(request):  # type: ignore[no-untyped-def]
        [handler] = server().routes().values()
        return await handler(request)

    app = App({("GET", wire.PATH): channel}, gate=Guard(TOKEN))
    at_socket = await serve_socket(app, path, "socket")
    listener = None if tls is None else tls.listener()
    at_port = await serve(app, "127.0.0.1", 0, tls=listener)
    try:
        yield Served(path, at_port.port, tls)
    finally:
        await at_socket.stop(0)
        await at_port.stop(0)


async def before_engines(
    role: str, specs: Sequence[InstanceSpec], shared: bool = False
) -> tuple[Gateway | ConductorProcess, Gateway | FrontProcess]:
    """The process that decides for these engines, and the one that serves clients: a gateway is
    both, a front has a Conductor. shared: whether other fronts may listen at the front's port."""
    config = GatewayConfig(model="", port=0, token="t0ken", wait_ready=10_000_000)
    if role == "gateway":
        gateway = await Gateway.start(config, specs, QUICK)
        return gateway, gateway
    conductor = await ConductorProcess.start(config, specs)
    behind = msgspec.structs.replace(config, conductor=f"127.0.0.1:{conductor.port}")
    return conductor, await FrontProcess.start(behind, shared=shared)
