"""The worker process: engine, segment, HTTP server and membership in one event loop.

The CLI calls `run_worker`, which is the whole process and prints one line per step. `Worker.start`
assembles the serving part; tests call it too. No request is served in this file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from moonserve.core.errors import ConfigError, MoonserveError
from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad
from moonserve.core.units import InstanceId, SegmentId, Tokens
from moonserve.live.access.guard import Guard, own_names
from moonserve.live.clock import LoopClock
from moonserve.live.engine import installed
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.http.client import HttpClient, client_of
from moonserve.live.http.server import Server, serve
from moonserve.live.model.catalog import resolve
from moonserve.live.model.config import load_config
from moonserve.live.ports import Engine, KVStore
from moonserve.live.process.metrics import ProcessMetrics
from moonserve.live.process.profiles import PassProfiler, Profiles
from moonserve.live.process.supervise import beat, say, stop_event
from moonserve.live.registry.entries import open_registry
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.leaving import hand_on
from moonserve.live.store.remote import HttpRpc, mounted
from moonserve.live.store.settings import check_reachable, url_of
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer
from moonserve.live.transfer import mooncake_master
from moonserve.live.transfer.metrics import LaneMetrics
from moonserve.live.worker.app import WorkerApp, part_client
from moonserve.live.worker.conductors import Conductors
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.fence import Fence
from moonserve.live.worker.job import WorkerLimits
from moonserve.live.worker.kv import OnPut
from moonserve.live.worker.metrics import Metrics
from moonserve.live.worker.passes import warm_up
from moonserve.live.worker.runner import Runner
from moonserve.live.worker.workbench import Workbench
from moonserve.logs import LINES

if TYPE_CHECKING:
    from moonserve.live.kvevents.publisher import Publisher

log = logging.getLogger(__name__)

Say = Callable[[str], None]
T = TypeVar("T")

_FAKE_BLOCKS = 1024
_CLEAN_UP_S = 30.0


class Worker:
    """A runner that listens; made by `start`, ended by `stop`."""

    def __init__(
        self,
        runner: Runner,
        server: Server,
        info: InstanceInfo,
        http: HttpClient,
        profiles: Profiles,
    ) -> None:
        self.runner = runner
        self.info = info
        self._server = server
        self._http = http
        self._profiles = profiles

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        engine: Engine,
        store: KVStore | None = None,
        *,
        model: str,
        tokenizer: Tokenizer | None = None,
        epoch: int = 1,
        on_put: OnPut | None = None,
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008 - frozen
        fence: Fence | None = None,
    ) -> Worker:
        """Serve `engine` under the name `model`; on_put: see WorkerKV; fence: see WorkerApp.

        limits: those that `config` does not set. Raises ConfigError if the port is taken.
        """
        shape = engine.shape
        namespace = Namespace(model, shape.revision, shape.layout, shape.block_size)
        metrics = Metrics(model)
        metrics.registry.register(ProcessMetrics("worker"))
        metrics.cache(shape.block_size, shape.num_blocks)
        if isinstance(store, StoreClient):
            metrics.registry.register(LaneMetrics(store.transfer.stats))
        limits = msgspec.structs.replace(
            limits,
            chunk_tokens=config.chunk_tokens,
            max_seqs=config.max_seqs,
            decode_kv=config.decode_kv,
        )
        pool_len = shape.num_blocks * shape.block_size
        http = client_of(config.tls)
        fetch = part_client(http, config.token, limits.chain_s)
        bench = Workbench(engine, namespace, limits, metrics, LoopClock())
        runner = Runner(bench, store, fetch, on_put)
        metrics.watch(runner.ledger, shape.num_blocks)
        info = InstanceInfo(
            id=InstanceId(config.name),
            epoch=epoch,
            role=config.role,
            url="",
            model=model,
            namespace=namespace,
            kv_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            max_seqs=config.max_seqs,
            chunk_tokens=config.chunk_tokens,
            max_len=min(shape.max_len, pool_len),  # the pool has no room for a longer request
            max_requests=limits.max_seqs + limits.max_waiting,
            segment=SegmentId(config.name) if isinstance(store, StoreClient) else None,
            segment_bytes=store.settings.capacity_bytes if isinstance(store, StoreClient) else 0,
            rack=config.rack,
            # A part is one long pass: requests that decode here would wait for its end.
            layers=shape.layers if store and shape.layers > 1 and config.role == "prefill" else 0,
        )
        guard = Guard(config.token, own_names(config.host, config.advertise_host))
        app = WorkerApp(runner, bench, info, tokenizer, guard, fence)
        profiles = Profiles(config.profile_folder, config.name, PassProfiler(engine))
        try:
            await profiles.prepare()
            tls = config.tls.listener() if config.tls else None
            served = app.app(profiles.routes())
            server = await serve(served, config.host, config.port, "listen", tls=tls)
        except MoonserveError:
            await runner.close()
            raise
        url = url_of(config.advertise_host or config.host, server.port, config.tls)
        app.info = msgspec.structs.replace(info, url=url)
        return cls(runner, server, app.info, http, profiles)

    def load(self) -> InstanceLoad:
        """What a heartbeat reports. Raises EngineFailed once the worker cannot serve any more."""
        if self.runner.failure is not None:
            raise self.runner.failure
        return self.runner.take_load()

    async def stop(self, drain_s: float) -> None:
        """Let running requests finish for `drain_s`, cut the rest, stop the runner."""
        await self._server.stop(drain_s)
        await self._profiles.stop()
        await self.runner.close()
        await self._http.close()


class Loaded(NamedTuple):
    """A model that is ready to serve."""

    engine: Engine
    tokenizer: Tokenizer | None
    name: str
    """As clients write it."""


async def run_worker(
    config: WorkerConfig,
    share: StoreSettings,
    say: Say = say,
    load: Callable[[WorkerConfig, Say], Loaded] | None = None,
    limits: WorkerLimits = WorkerLimits(),  # noqa: B008 - frozen
) -> None:
    """Run one worker until SIGTERM or SIGINT. Raises MoonserveError when it cannot go on.

    share: its share of the KV store; its epoch is also the worker's. load: how to get the model;
    limits: those that `config` does not set.
    """
    _check_host(config, share)
    stop = stop_event()
    model = await asyncio.to_thread(load or load_model, config, say)
    worker: Worker | None = None
    try:
        async with AsyncExitStack() as stack:
            http = client_of(config.tls)
            stack.push_async_callback(http.close)
            if config.engine == "torch":
                say("warming up: measuring some passes")
            samples = await warm_up(model.engine, config.role, config.chunk_tokens)
            registry = await open_registry(config.registry, config.tls)
            if registry is not None:
                stack.push_async_callback(registry.close)
            fence = Fence()
            conductors = Conductors(http, config.token, config.gateway, registry, heard=fence.heard)
            publisher = None if config.kv_events == "off" else _publisher(config, say)
            if publisher is not None:
                stack.push_async_callback(publisher.close)
            store = await _open_store(conductors, http, config, share, stop)
            if store is not None:
                stack.push_async_callback(store.close)
                stack.push_async_callback(_move_objects, store, stop, config)
                on_put = None
                if publisher is not None and isinstance(store, StoreClient):
                    on_put = publish_blocks(store, publisher, model.engine.shape.block_size)
                worker = await Worker.start(
                    config,
                    model.engine,
                    store,
                    model=model.name,
                    tokenizer=model.tokenizer,
                    epoch=share.epoch,
                    on_put=on_put,
                    limits=limits,
                    fence=fence,
                )
                stack.push_async_callback(worker.stop, config.drain_s)
                stack.callback(_limit_clean_up, worker)
                worker.runner.measured(samples)
                say(f"listening on {worker.info.url}")
                await _belong(worker, conductors, stop, say)
    finally:
        if worker is not None and worker.runner.hung:
            _end_process(say)
        await model.engine.close()
    say("stopped")


async def _belong(worker: Worker, conductors: Conductors, stop: asyncio.Event, say: Say) -> None:
    """Be a member until `stop` is set. Raises the error that ends the membership before."""
    ready = False

    def joined(url: str) -> None:
        nonlocal ready
        say(f"joined {url}")
        if not ready:
            ready = True
            beat()

    beating = asyncio.create_task(conductors.run(worker.info, worker.load, joined))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({beating, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if beating.done():
        await conductors.leave()
        beating.result()
    beating.cancel()
    say("leaving: letting running requests finish")
    await conductors.leave()


# Ways to end.


async def _move_objects(store: KVStore, stop: asyncio.Event, config: WorkerConfig) -> None:
    """Move this worker's objects to other segments, unless the worker ends for a fault."""
    if stop.is_set() and isinstance(store, StoreClient):
        await hand_on(store, config.drain_s)


def _limit_clean_up(worker: Worker) -> None:
    """Where the engine hangs, the clean-up may hang too: end the process after a while."""
    if worker.runner.hung:
        threading.Timer(_CLEAN_UP_S, os._exit, (1,)).start()


def _end_process(say: Say) -> None:
    """End the process at once, so that its supervisor starts it again.

    At its exit, the interpreter would wait for the hanging thread of the engine for ever.
    """
    say("the engine hangs: ending this process")
    LINES.flush()
    os._exit(1)


# Parts of the process.


def _publisher(config: WorkerConfig, say: Say) -> Publisher:
    """The publisher of events about this worker's segments. Raises ConfigError."""
    if config.store == "mooncake":
        why = "the Mooncake store does not report evictions; set kv_events to off"
        raise ConfigError(why, "kv_events")
    from moonserve.live.kvevents.curve import keys_of  # only here: these import ZMQ
    from moonserve.live.kvevents.publisher import Publisher

    endpoint, _, replay = config.kv_events.partition(",")
    folder = "" if config.kv_events_open else config.kv_events_curve
    curve = keys_of(folder, "publisher") if folder else None
    publisher = Publisher(endpoint, replay or None, curve=curve)
    say(f"publishing KV events on {publisher.endpoint}, replay on {publisher.replay_endpoint}")
    return publisher


def publish_blocks(store: StoreClient, publisher: Publisher, block_size: Tokens) -> OnPut:
    """Publish events of all blocks that the segments of `store` receive and lose.

    Returns the function that a runner calls with the keys it is about to put.
    """
    from moonserve.live.kvevents.publisher import SegmentEvents

    segment_events = SegmentEvents(block_size, publisher.publish)
    for owner in store.owners:
        holds = owner.catalogue.held.__contains__
        owner.watch_changes(segment_events.segment(owner.mounting.tier, holds))
    return segment_events.learned


def _check_host(config: WorkerConfig, share: StoreSettings) -> None:
    """Check the host, the transport and KV events before a model is loaded.

    Raises ConfigError: the gateway could not reach this address, the transport is not installed, or
    other machines could read KV events.
    """
    if config.advertise_host is None:
        check_reachable(config.host)
    if share.transport == "mooncake":
        mooncake_master.require("transport")
    if config.kv_events != "off":
        from moonserve.live.kvevents.publisher import check_readers  # only here: imports ZMQ

        addresses = [it for it in config.kv_events.split(",") if it]
        check_readers(addresses, bool(config.kv_events_curve), config.kv_events_open)


async def _unless(stop: asyncio.Event, doing: Coroutine[Any, Any, T]) -> T | None:
    """The result; None: `stop` was set before."""
    task = asyncio.create_task(doing)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None


async def _open_store(
    conductors: Conductors,
    http: HttpClient,
    config: WorkerConfig,
    share: StoreSettings,
    stop: asyncio.Event,
) -> KVStore | None:
    """The store, once its master answers; None: `stop` was set before. Raises MoonserveError."""
    if config.store == "mooncake":
        return await mounted(
            conductors.ping, partial(_mount_mooncake, conductors, config, share), stop
        )
    url = await _unless(stop, conductors.master(config.store_url))
    if url is None:
        return None
    rpc = HttpRpc(http, url, config.token)
    if not config.store_url:
        conductors.follow_master(rpc.move)
    return await mounted(rpc.connect, partial(_mount, rpc, share), stop)


async def _mount_mooncake(
    conductors: Conductors, config: WorkerConfig, share: StoreSettings
) -> KVStore:
    """One attempt. Raises ConfigError where another attempt would fail too, else MoonserveError."""
    from moonserve.live.store.mooncake import MooncakeSettings, MooncakeStore

    settings = MooncakeSettings(
        master=config.mooncake_master,
        segment_bytes=share.capacity_bytes,
        host=config.advertise_host or config.host,
        protocol=share.mooncake_protocol,
        device=share.mooncake_device,
    )
    return await MooncakeStore.open(settings, conductors.blocks)


async def _mount(rpc: HttpRpc, share: StoreSettings) -> KVStore:
    """One attempt, as `_mount_mooncake`."""
    client = await StoreClient.open(rpc, share)
    client.start_beats()
    return client


def load_model(config: WorkerConfig, say: Say) -> Loaded:
    """Load the engine and the tokenizer. Takes seconds; raises ConfigError."""
    if config.engine == "torch":
        installed.require()
    found = resolve(config.model)
    say(f"loading {found.name} for the {config.engine} engine")
    tokenizer = load_tokenizer(found.path)
    if config.engine == "fake":
        shape = load_config(found.path)
        fake = FakeEngine(
            block_size=config.block_size,
            num_blocks=config.kv_blocks or _FAKE_BLOCKS,
            max_len=shape.max_len,
            vocab_size=shape.vocab_size,
            words=range(min(1000, shape.vocab_size // 2), min(8000, shape.vocab_size)),
            eos_token_ids=shape.eos_token_ids,
            cost=Cost(config.pass_us, learns=False) if config.pass_us else None,
        )
        return Loaded(fake, tokenizer, found.name)
    from moonserve.live.engine.torch_engine import TorchEngine  # torch takes a second to import

    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = config.threads or (int(omp_threads) if omp_threads.isdecimal() else None)
    engine = TorchEngine.load(
        found.path,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.kv_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        threads=threads,
        kernels=config.kernels,
        progress=say,
    )
    return Loaded(engine, tokenizer, found.name)
