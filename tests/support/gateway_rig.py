"""The API of a gateway over a scripted cluster (FakeServing), on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from moonserve.live.api.front import Front
from moonserve.live.api.limiter import Limits
from moonserve.live.api.own_text import OwnText
from moonserve.live.http.client import ClientResponse, HttpClient, sse_events
from moonserve.live.http.server import App, Server, serve
from tests.support.serving import ByteText, FakeServing


class Rig:
    """A gateway on a socket, and a client for it."""

    def __init__(
        self, serving: FakeServing, backend: OwnText, gateway: Front, server: Server
    ) -> None:
        self.serving = serving
        self.backend = backend
        self.gateway = gateway
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self.client = HttpClient()

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        """Send JSON (bytes go as they are); underscores in header names become dashes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.request(
            "POST", self.url + path, headers=sent, body=data, timeout_s=30
        )

    async def get(self, path: str) -> ClientResponse:
        """GET."""
        return await self.client.request("GET", self.url + path, timeout_s=30)

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, [DONE] included."""
        data = json.dumps({**body, "stream": True}).encode()
        async with self.client.stream(
            "POST", self.url + path, body=data, timeout_s=30, idle_timeout_s=30
        ) as reply:
            raw = await reply.read()
        assert reply.status == 200, raw

        async def whole() -> Any:
            yield raw.replace(b"data: [DONE]", b'data: "[DONE]"')

        return [json.loads(event) async for event in sse_events(whole())]


def run(
    use: Callable[[Rig], Awaitable[None]],
    *script: Any,
    limits: Limits | None = None,
    text: ByteText | None = None,
    **app: Any,
) -> None:
    """Run `use` with a gateway over a cluster that plays `script`; nothing may be left open."""

    async def main() -> None:
        async with asyncio.timeout(30):
            serving = FakeServing(*script)
            backend = OwnText(serving, lambda model: text or ByteText(), limits)
            gateway = Front(backend)
            routes = gateway.routes(), gateway.prefixes()
            server = await serve(App(*routes, absent=gateway.absent(), **app), "127.0.0.1", 0)
            rig = Rig(serving, backend, gateway, server)
            try:
                await use(rig)
            finally:
                await rig.client.close()
                await server.stop(1)
            assert (serving.open, gateway.metrics.in_flight, backend._live) == (0, 0, set())

    asyncio.run(main())


def parsed(reply: ClientResponse) -> dict[str, Any]:
    """The body of a reply with status 200."""
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.body)
    return found
