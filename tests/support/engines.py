"""Fake engines for the fleet, a fleet for them, and waits for states."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from random import Random
from typing import Any

from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Tick
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import EngineMonitor, Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.kvevents.follower import Follow
from moonserve.live.text.tools import TextTools
from tests.support.fake_vllm import FakeVllm
from tests.support.serving import ByteText

QUICK = Times(poll_s=0.02, answer_s=0.5, failures=3, retry_s=0.05)


class Engine(FakeVllm):
    """A FakeVllm whose health and load a test sets."""

    health = 200
    waiting = 0
    deferred = 0
    """Requests that wait for KV from elsewhere."""
    usage = 0.0
    key = ""
    """The API key that it checks; empty: none."""
    gaps = 0
    """Gaps between tokens so far, of 25 ms each."""
    prefix_caching = True
    metrics = True
    started_s: float | None = 1_000.0

    async def start(self) -> Engine:
        """Start as FakeVllm does, as another process than before."""
        if self.started_s is not None:
            self.started_s += 1.0
        await super().start()
        return self

    async def _health(self, request: HttpRequest) -> Response:
        return Response(self.health)

    async def _models(self, request: HttpRequest) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return json_response({"error": "Unauthorized"}, 401)
        return await super()._models(request)

    async def _metrics(self, request: HttpRequest) -> Response:
        if not self.metrics:
            return Response(404)
        started = "" if self.started_s is None else f"process_start_time_seconds {self.started_s}\n"
        page = started + "# HELP vllm:num_requests_running what\n"
        for rank in range(self.dp_size):
            of = f'{{engine="{rank}",model_name="{self.model}"}}'
            page += f"vllm:num_requests_running{of} {float(self.running)}\n"
            waiting = float(self.waiting + self.deferred)
            page += f"vllm:num_requests_waiting{of} {waiting}\n"
            reason = of.replace("}", ',reason="deferred"}')
            page += f"vllm:num_requests_waiting_by_reason{reason} {float(self.deferred)}\n"
            page += f"vllm:kv_cache_usage_perc{of} {self.usage}\n"
            page += f"vllm:inter_token_latency_seconds_sum{of} {0.025 * self.gaps}\n"
            page += f"vllm:inter_token_latency_seconds_count{of} {float(self.gaps)}\n"
        page += f'vllm:cache_config_info{{block_size="{self.block_size}",'
        page += f'enable_prefix_caching="{self.prefix_caching}",num_gpu_blocks="100",'
        page += 'prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
        return Response(body=page.encode(), content_type="text/plain")


class Rig:
    """A fleet on a Conductor, with the engines' one tokenizer, "bytes"."""

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        follow: Follow | None = None,
        text: TextTools | None = None,
    ) -> None:
        self.conductor = ConductorLoop(Conductor(rng=Random(0)), lambda lease: None)
        self.http = HttpClient()
        found = text or ByteText()
        self.fleet = Fleet(
            self.conductor,
            self.http,
            lambda ref: found,
            environ or {},
            follow=follow,
            times=QUICK,
        )

    @property
    def views(self) -> dict[InstanceId, InstanceView]:
        """The Conductor's views."""
        return self.conductor.core.view.instances

    def monitor(self, name: str) -> EngineMonitor:
        """The monitor of the engine of that name."""
        return next(it for _, it in self.fleet.monitors() if it.member.spec.name == name)

    async def until(self, true: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Wait, with the Conductor's ticks, until this is true."""
        async with asyncio.timeout(timeout_s):
            while not true():
                self.conductor.tell(Tick())
                await asyncio.sleep(0.01)

    async def up(self, engine: FakeVllm, **described: Any) -> EngineMonitor:
        """Add an engine and wait until it is up."""
        fields: dict[str, Any] = {"name": engine.name, "url": engine.url, "events": "off"}
        await self.fleet.add("test", InstanceSpec(**{**fields, **described}))
        monitor = self.monitor(described.get("name", engine.name))
        await self.until(
            lambda: monitor.state == "up" and set(monitor.member.infos) <= set(self.views)
        )
        return monitor


@contextlib.asynccontextmanager
async def rig(*engines: FakeVllm, **options: Any) -> AsyncIterator[Rig]:
    """A Rig with running engines; everything is stopped afterwards."""
    made = Rig(**options)
    try:
        for engine in engines:
            await engine.start()
        yield made
    finally:
        await made.fleet.close()
        await made.http.close()
        made.conductor.stop()
        for engine in engines:
            await engine.stop()
