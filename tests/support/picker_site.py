"""A picker before fake engines, on one event loop: real Conductor, real gRPC.

It adds a picker to external_site.Site, whose engines need not be called: the test is the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import msgspec

from moonserve.core.schedule.facts import Connector, Role
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.live.access.guard import Guard
from moonserve.live.access.keys import Keys
from moonserve.live.access.meter import LocalMeter
from moonserve.live.api.limiter import Limits
from moonserve.live.health import Health
from moonserve.live.http.server import ProcessPart
from moonserve.live.picker.front import PickerFront
from moonserve.live.picker.server import PickerServer
from tests.support.external_site import SHORT, Site, run_on
from tests.support.picker_proxy import Exchange

NOTHING = Promised(0, 0, 0, 0)
MOST = 1 << 20
TOKEN = "the-cluster's-token"


class PickerSite(Site):
    """See the module. Tests make it by `run`."""

    def __init__(
        self,
        tuning: Tuning,
        within_s: float = 5.0,
        objectives: Mapping[str, int] | None = None,
        streams: int = 64,
        keys: Keys | None = None,
        shared_s: float | None = None,
    ) -> None:
        super().__init__(tuning, SHORT)
        self.backend.limits = Limits(max_in_flight=streams)
        self.health = Health()

        def parts(front: PickerFront) -> Sequence[ProcessPart]:
            self.server = PickerServer(
                front,
                "127.0.0.1",
                0,
                most=MOST,
                streams=streams,
                tls=None,
                client_auth="none",
                shared_s=shared_s,
            )
            return [self.server]

        self.picker = PickerFront(
            self.backend,
            self.health,
            parts,
            most=MOST,
            within_s=within_s,
            objectives=objectives or {},
            salted=False,
            guard=None if keys is None else Guard(TOKEN, keys=keys),
            meter=LocalMeter(self.conductor.now_us),
        )

    async def start(self) -> None:
        """Start it, without the HTTP server of Site."""
        await self.server.start(0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")

    async def stop(self) -> None:
        """Stop it and all engines."""
        await self.channel.close()
        await self.server.stop()
        await super().stop()

    def exchange(self) -> Exchange:
        """A request of a client begins."""
        return Exchange(self.channel)

    def at(self, name: str) -> str:
        """The endpoint of an engine."""
        return f"127.0.0.1:{self.engines[name].port}"

    def named(self, endpoints: Sequence[str]) -> list[str]:
        """The engines at these endpoints."""
        by_endpoint = {self.at(name): name for name in self.engines}
        return [by_endpoint[it] for it in endpoints]

    async def settled(self) -> None:
        """Wait until nothing is promised and no request is under way. Fails after seconds."""
        async with asyncio.timeout(5):
            while self.conductor.core.promised() != NOTHING or self.picker.metrics.in_flight:
                await asyncio.sleep(0.005)
        assert all(note.over for note in self.fleet.notes)


def completion(prompt: str = "Once upon a time", **fields: Any) -> bytes:
    """The body of a request."""
    return msgspec.json.encode({"model": "m", "prompt": prompt, "max_tokens": 4, **fields})


def run(
    use: Callable[[PickerSite], Awaitable[None]],
    *engines: tuple[str, Role, Connector],
    tuning: Tuning | None = None,
    **settings: Any,
) -> None:
    """Run a test with a picker and these engines; at its end nothing may be left."""

    run_on(lambda: PickerSite(tuning or Tuning(), **settings), use, engines)
