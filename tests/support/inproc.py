"""A whole cluster on one event loop: real gateway, real workers and segments, fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Role
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.store.words import Found
from moonserve.core.units import Micros, SegmentId
from moonserve.live.control.config import LIVE, GatewayConfig
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.http.client import HttpClient, client_of, sse_events
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.process.gateway import Gateway
from moonserve.live.process.worker import Worker, publish_blocks
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.remote import HttpRpc
from moonserve.live.store.settings import url_of
from moonserve.live.text.tokenizer import Tokenizer
from moonserve.live.tls.contexts import Tls
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.join import BeatTimes, ConductorClient, ConductorMember

BLOCK = 16
TOKEN = "the-secret-of-this-test"
_epochs = itertools.count(1)


class Site:
    """One gateway and the workers that were added to it."""

    def __init__(
        self,
        gateway: Gateway,
        http: HttpClient,
        stack: contextlib.AsyncExitStack,
        tls: Tls | None = None,
    ) -> None:
        """tls: of all processes; then blocks travel by TCP only."""
        self.gateway = gateway
        self.tls = tls
        self.http = http
        self.workers: dict[str, Worker] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.members: dict[str, asyncio.Task[None]] = {}
        self.stores: dict[str, StoreClient] = {}
        self._stack = stack

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return url_of("127.0.0.1", self.gateway.port, self.tls)

    async def add(
        self,
        name: str,
        role: Role,
        cost: Cost | None = None,
        epoch: int = 0,
        blocks: int = 256,
        read_us: Micros = 0,
        publisher: Any = None,
        tokenizer: Tokenizer | None = None,
        **more: Any,
    ) -> Worker:
        """Start a worker and wait until it has joined; `more` goes into its WorkerConfig.

        read_us: how much longer its store takes to read a block; publisher: of its KV events;
        tokenizer: None: it knows token ids only.
        """
        control = ConductorClient(self.http, self.url, TOKEN)
        common = {"engine": "fake", "token": TOKEN, "block_size": BLOCK, "tls": self.tls}
        config = WorkerConfig(name=name, role=role, model=DEFAULT_MODEL, **{**common, **more})
        epoch = epoch or next(_epochs)
        settings = StoreSettings(
            segment=SegmentId(name),
            epoch=epoch,
            capacity_bytes=4 << 20,
            token=TOKEN.encode(),
            shared_memory=self.tls is None,
            tls=self.tls,
        )
        store = await StoreClient.open(HttpRpc(self.http, self.url, TOKEN), settings)
        self._stack.push_async_callback(store.close)
        self.stores[name] = store
        store.start_beats()
        engine = self.engines[name] = FakeEngine(
            block_size=BLOCK, num_blocks=blocks, max_len=8192, cost=cost or fake_cost()
        )
        store.read = _slowed(store.read, read_us)  # type: ignore[method-assign]
        on_put = publish_blocks(store, publisher, BLOCK) if publisher is not None else None
        worker = await Worker.start(
            config,
            engine,
            store,
            model=DEFAULT_MODEL,
            epoch=epoch,
            on_put=on_put,
            tokenizer=tokenizer,
        )
        self._stack.push_async_callback(worker.stop, 0)
        joined = asyncio.Event()
        times = BeatTimes(conflict_s=6.0)  # longer than a silent earlier start keeps its name
        member = ConductorMember(control, worker.info, worker.load, times)
        task = asyncio.create_task(member.run(joined.set))
        self._stack.callback(task.cancel)
        waiting = asyncio.create_task(joined.wait())
        await asyncio.wait({task, waiting}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        self.workers[name] = worker
        self.members[name] = task
        return worker

    def busy_decode(self) -> list[str]:
        """The names of decode workers that run something."""
        busy = [name for name, worker in self.workers.items() if worker.runner.ledger().running]
        return [name for name in busy if self.workers[name].info.role == "decode"]

    async def lose(self, name: str) -> None:
        """End the worker and its segment, as after a kill: it ends no stream and does not leave."""
        self.members.pop(name).cancel()
        worker = self.workers.pop(name)
        await self.stores.pop(name).close()
        await worker.stop(0)

    async def tokens(
        self, prompt: list[int], count: int, salt: str | None = None, **headers: str
    ) -> list[int]:
        """Token ids of a streamed completion; raises AssertionError on an error event."""
        body = {
            "model": DEFAULT_MODEL,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        got: list[int] = []
        async with self.http.stream(
            "POST",
            self.url + "/v1/completions",
            headers=headers,
            body=json.dumps(body).encode(),
            timeout_s=20,
            idle_timeout_s=20,
        ) as reply:
            assert reply.status == 200, await reply.read()
            async for event in sse_events(reply):
                parsed: dict[str, Any] = json.loads(event)
                assert "error" not in parsed, parsed
                for choice in parsed["choices"]:
                    got += choice.get("token_ids") or []
        return got

    def reference(self, prompt: list[int], count: int) -> list[int]:
        """The tokens that one engine alone generates."""
        engine = FakeEngine(block_size=BLOCK, num_blocks=512, max_len=8192)
        return list(engine.reference(prompt, count))

    async def settle(self) -> None:
        """Wait until every ledger is at zero."""
        async with asyncio.timeout(10):
            while any(self.ledgers().values()):
                await asyncio.sleep(0.02)

    def ledgers(self) -> dict[str, int]:
        """Promises, leases, puts, and everything that workers hold."""
        promised = self.gateway.conductor.core.promised()
        stats = self.gateway.pool.service.master.stats()
        ledger = {
            "requests": promised.requests,
            "prefills": promised.prefills,
            "decodes": promised.decodes,
            "leases": stats.leases,
            "puts": stats.pending_puts,
        }
        for name, worker in self.workers.items():
            own = worker.runner.ledger()
            ledger[name] = own.running + own.waiting + own.streams + own.blocks_used + own.ahead
        return ledger


def _slowed(read: Any, us: Micros) -> Any:
    async def slow(found: Sequence[Found], into: Sequence[memoryview]) -> int:
        await asyncio.sleep(us * len(found) / 1e6)
        return int(await read(found, into))

    return slow


@contextlib.asynccontextmanager
async def site(**config: Any) -> AsyncIterator[Site]:
    """A gateway without workers; all is stopped at the end. `config`: fields of GatewayConfig and
    of its Tuning."""
    tuned = {name: config.pop(name) for name in Tuning.__struct_fields__ if name in config}
    tuning = msgspec.structs.replace(LIVE, **tuned)
    settings = GatewayConfig(
        model=DEFAULT_MODEL, token=TOKEN, tuning=tuning, **{"port": 0, "wait_ready": 1, **config}
    )
    async with contextlib.AsyncExitStack() as stack:
        gateway = await Gateway.start(settings)
        http = client_of(settings.tls)
        stack.push_async_callback(http.close)
        stack.push_async_callback(gateway.stop, 0)
        yield Site(gateway, http, stack, settings.tls)
