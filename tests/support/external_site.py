"""A gateway before fake vLLM engines on one event loop: real Conductor, API and sockets.

It replaces the fleet: the test names the engines and reports that they have joined.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import Any, TypeVar

import msgspec

from moonserve.core.errors import NobodyAlive
from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import LAPTOP_PASS, Cost
from moonserve.core.schedule.facts import Connector, InstanceInfo, Joined, Role
from moonserve.core.schedule.observed import Part
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import BlockKey, InstanceId, SegmentId, Tokens
from moonserve.live.api.engine_text import EngineText
from moonserve.live.api.front import Front
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.calls import CallLimits
from moonserve.live.external.member import Member
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import ClientResponse, HttpClient, sse_events
from moonserve.live.http.server import App, Server, serve
from moonserve.live.text.tools import TextTools
from tests.support.fake_vllm import Fabric, FakeVllm

NOTHING = Promised(0, 0, 0, 0)
SHORT = CallLimits(first_byte_s=5.0, handover_s=5.0, token_s=5.0, slow_token_s=0.1)


class NotedCall:
    """One call as the driver reported it."""

    def __init__(
        self, instance: InstanceId, part: Part, prompt: Tokens, predicted: Tokens, streams: bool
    ) -> None:
        self.instance, self.part, self.prompt, self.predicted = instance, part, prompt, predicted
        self.streams = streams
        self.count = 0
        self.said: list[Tokens | None] = []
        self.over = 0
        self.last: Tokens | None = None

    def answered(self, cached: Tokens | None) -> None:
        """The first token."""
        self.said.append(cached)

    def ended(self, cached: Tokens | None = None) -> None:
        """The end of the call, however often it is reported."""
        self.over += 1
        self.last = self.last if cached is None else cached


class FakeFleet:
    """The Engines and the Observer of the gateway."""

    def __init__(self) -> None:
        self.members: dict[InstanceId, Member] = {}
        self.notes: list[NotedCall] = []
        self.lacking: list[BlockKey] = []
        """The blocks that were reported as missing."""
        self.exact: TextTools | None = None
        """If set, engines send KV events, and this is their tokenizer."""

    def member(self, instance: InstanceId) -> Member:
        """See Engines."""
        if instance not in self.members:
            raise NobodyAlive(f"{instance} is gone")
        return self.members[instance]

    def follows_events(self, model: str) -> bool:
        """See Engines."""
        return self.exact is not None

    def follows_events_of(self, instance: InstanceId) -> bool:
        """See Engines."""
        return self.exact is not None

    def text(self, model: str) -> TextTools | None:
        """See Engines."""
        return self.exact

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """See Observer."""
        self.lacking += keys

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> NotedCall:
        """See Observer."""
        self.notes.append(NotedCall(instance, part, prompt, predicted, streams))
        return self.notes[-1]


class Site:
    """See the module. Tests make it by `run`."""

    def __init__(self, tuning: Tuning, limits: CallLimits) -> None:
        self.http = HttpClient()
        self.fleet = FakeFleet()
        self.fabric = Fabric()
        core = Conductor(tuning, Random(0), lambda info: Cost(LAPTOP_PASS, (200, 0.0005)))
        self.conductor = ConductorLoop(core, lambda lease: None)
        self.backend = EngineText(
            self.conductor, self.fleet, self.fleet, self.http, call_limits=limits
        )
        self.front = Front(self.backend)
        self.engines: dict[str, FakeVllm] = {}
        self.version = ""
        """What engines that are added report; empty: nothing."""
        self._server: Server | None = None

    async def start(self) -> None:
        """Start the gateway."""
        self._server = await serve(
            App(self.front.routes(), self.front.prefixes(), name="gateway"), "127.0.0.1", 0
        )

    async def stop(self) -> None:
        """Stop the gateway and all engines."""
        if self._server is not None:
            await self._server.stop(1)
        self.conductor.stop()
        await self.http.close()
        for engine in self.engines.values():
            await engine.stop()

    async def add(
        self, name: str, role: Role = "both", connector: Connector = "none", **more: Any
    ) -> FakeVllm:
        """Start an engine and report that its ranks have joined."""
        assert connector != "embedded"
        engine = await FakeVllm(name, connector, self.fabric, **more).start()
        self.engines[name] = engine
        spec = InstanceSpec(
            name=name,
            url=engine.url,
            role=role,
            engine="sglang" if connector == "sglang" else "vllm",
            connector=connector,
            bootstrap=engine.bootstrap if connector in ("mooncake", "sglang") else "",
            dp_size=engine.dp_size,
        )
        member = Member(spec, self.http)
        member.version = self.version
        for rank, instance in enumerate(spec.ids()):
            self.fleet.members[instance] = member
            self.join(
                InstanceInfo(
                    id=instance,
                    epoch=1,
                    role=role,
                    url=engine.url,
                    model=engine.model,
                    namespace=Namespace(engine.model, "", "", engine.block_size),
                    kv_blocks=1_000,
                    block_bytes=1_000,
                    max_seqs=64,
                    chunk_tokens=8_192,
                    max_len=engine.max_len,
                    segment=SegmentId(instance),
                    connector=connector,
                    bootstrap=member.bootstrap,
                    dp_rank=rank if engine.dp_size > 1 else None,
                    fetches=False,
                )
            )
        return engine

    def join(self, info: InstanceInfo) -> None:
        """Report that an instance has joined."""
        self.fleet.members[info.id].infos[info.id] = info
        self.conductor.tell(Joined(info))

    def rejoin(self, name: str) -> None:
        """Report that an engine has restarted."""
        info = self.fleet.members[InstanceId(name)].infos[InstanceId(name)]
        self.join(msgspec.structs.replace(info, epoch=info.epoch + 1))

    @property
    def url(self) -> str:
        """The gateway's URL."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.port}"

    async def post(
        self, body: dict[str, Any] | bytes, chat: bool = False, **headers: str
    ) -> ClientResponse:
        """One request and its whole reply."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        raw = body if isinstance(body, bytes) else msgspec.json.encode({"model": "m", **body})
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(
            "POST", self.url + path, headers=named, body=raw, timeout_s=20
        )

    async def send(self, path: str, body: dict[str, Any], **headers: str) -> ClientResponse:
        """One request for model m to this path and its whole reply."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = msgspec.json.encode({"model": "m", **body})
        return await self.http.request(
            "POST", self.url + path, headers=named, body=raw, timeout_s=20
        )

    @contextlib.asynccontextmanager
    async def stream(
        self, body: dict[str, Any], chat: bool = False
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """One streamed request: its events, decoded."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        raw = msgspec.json.encode({"model": "m", "stream": True, **body})
        async with self.http.stream(
            "POST", self.url + path, body=raw, timeout_s=20, idle_timeout_s=20
        ) as reply:
            assert reply.status == 200, await reply.read()
            yield _decoded(sse_events(reply))

    async def settled(self) -> None:
        """Wait until nothing is promised, no engine works and no client is served. Fails after
        seconds."""
        async with asyncio.timeout(5):
            while not self._idle():
                await asyncio.sleep(0.01)
        assert all(note.over for note in self.fleet.notes)

    def _idle(self) -> bool:
        nothing = self.conductor.core.promised() == NOTHING
        return nothing and not self.busy and not self.front.metrics.in_flight

    @property
    def calls(self) -> list[str]:
        """Which engines were called, in the order of the calls."""
        made = [(call.at_s, name) for name, it in self.engines.items() for call in it.calls]
        return [name for _, name in sorted(made)]

    @property
    def busy(self) -> int:
        """How many generations the engines work on."""
        return sum(engine.running for engine in self.engines.values())


async def _decoded(events: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    async for data in events:
        yield msgspec.json.decode(data)


S = TypeVar("S", bound=Site)


def run(
    use: Callable[[Site], Awaitable[None]],
    *pools: tuple[str, Role, Connector],
    tuning: Tuning | None = None,
    limits: CallLimits = SHORT,
    version: str = "",
) -> None:
    """Run a test with a gateway and these engines; at its end nothing may be left. version: that
    the engines report."""

    def make() -> Site:
        site = Site(tuning or Tuning(), limits)
        site.version = version
        return site

    run_on(make, use, pools)


def run_on(
    make: Callable[[], S],
    use: Callable[[S], Awaitable[None]],
    pools: Sequence[tuple[str, Role, Connector]],
) -> None:
    """Run a test on the site that `make` makes, with these engines."""

    async def main() -> None:
        site = make()
        await site.start()
        try:
            for name, role, connector in pools:
                await site.add(name, role, connector)
            await asyncio.sleep(0)
            async with asyncio.timeout(30):
                await use(site)
            await site.settled()
        finally:
            await site.stop()

    asyncio.run(main())
