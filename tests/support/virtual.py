"""The live shell in virtual time: workers without sockets, whose store is the simulator's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from moonserve.core.errors import Overloaded
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Sampling, Stopping
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.events import Digest, Event, events
from moonserve.core.schedule.facts import InstanceInfo, Joined
from moonserve.core.store.words import Found, Replica
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, SegmentId
from moonserve.live.clock import LoopClock
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.embedded import EmbeddedServing
from moonserve.live.drive.wire import Decoded, Prefilled
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.http.message import decode_json
from moonserve.live.worker.job import WorkerLimits
from moonserve.live.worker.metrics import Metrics
from moonserve.live.worker.runner import Runner
from moonserve.live.worker.wire import CompletionBody, make_job
from moonserve.live.worker.workbench import Workbench
from moonserve.sim.network import Network
from moonserve.sim.segments import Segments
from moonserve.sim.setup import MODEL, Setup
from moonserve.sim.trace import Row, Trace


class _LoopTime:
    """The running loop's time, as sim.clock.TimedCalls has it."""

    @property
    def now_us(self) -> Micros:
        return LoopClock().now_us()

    def at(self, time_us: Micros, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_at(time_us / 1e6, call)


class _Named:
    """The parts of a node that Segments needs."""

    def __init__(self, info: InstanceInfo) -> None:
        self.info = info
        self.name = str(info.id)


class SharedStore:
    """KV bytes in a dict. The simulator decides where they are and how long they travel."""

    def __init__(self, setup: Setup, nodes: dict[str, _Named], copies: bool) -> None:
        prefills = [node for node in nodes.values() if node.info.role != "decode"]
        self.data: dict[BlockKey, bytes] = {}
        self.segments = Segments(setup, prefills, [])
        self.network = Network(_LoopTime(), setup.profile.link_bytes_per_s)
        self.copies = copies
        self.owners: dict[LeaseId, str] = {}
        self.chains: dict[LeaseId, tuple[BlockKey, ...]] = {}
        self.fetches: dict[RequestId, bool] = {}
        """Whether the decision was to load blocks that others hold."""
        self.later: dict[RequestId, list[str]] = {}
        """Members of a group that got the KV before their part from the member before: they do not
        keep it."""
        self.tell: Callable[..., None] = lambda *facts: None
        self.nodes = nodes

    async def copy(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> int:
        """Copy blocks as the store's master does, over the simulator's links."""
        held = self.segments.held(to, keys)
        if held == len(keys):
            return held  # it kept the blocks that it fetched
        assert source is not None
        chain = next(it for it in self.chains.values() if keys[-1] in it)
        first = chain.index(keys[0])
        there = self.segments.held(source, chain[: first + len(keys)])
        node = self.nodes[to]

        def came() -> None:
            stored = self.segments.store(node, chain, first, there, copies=True)  # type: ignore[arg-type]
            self.tell(*stored)

        self.network.send(source, to, (there - first) * node.info.block_bytes, came)
        return there - first


class WorkerStore:
    """One worker's KVStore."""

    def __init__(self, shared: SharedStore, node: _Named, block_bytes: int) -> None:
        self._shared = shared
        self._node = node
        self._block_bytes = block_bytes
        self._sources: dict[LeaseId, dict[str, int]] = {}

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        shared = self._shared
        if self._node.info.role == "decode":
            sources = {shared.owners[lease]: len(keys)}
            local = 0
        else:
            fetches = shared.fetches[RequestId(lease.rpartition("/")[0])]
            local, sources = shared.segments.find(self._node, keys, fetches)  # type: ignore[arg-type]
        self._sources[lease] = sources
        count = local + sum(sources.values())
        size = self._block_bytes
        return [Found(key, size, 0, 1, (Replica(SegmentId(lease), 0),)) for key in keys[:count]]

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        shared, node = self._shared, self._node
        keys = [item.key for item in found]
        sources = self._sources.pop(LeaseId(found[0].replicas[0].segment))
        await self._moved(sources, node.info.block_bytes)
        if shared.copies and sources and node.info.role != "decode":
            stored = shared.segments.store(node, keys, 0, len(keys), copies=True)  # type: ignore[arg-type]
            shared.tell(*stored)
        for key, buffer in zip(keys, into, strict=True):
            buffer[:] = shared.data[key]
        return len(found)

    async def _moved(self, remote: dict[str, int], size: int) -> None:
        if not remote:
            return
        done = [asyncio.get_running_loop().create_future() for _ in remote]
        for (source, count), future in zip(remote.items(), done, strict=True):
            moved = lambda future=future: future.set_result(None)  # noqa: E731
            self._shared.network.send(source, self._node.name, count * size, moved)
        await asyncio.gather(*done)

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        shared, node = self._shared, self._node
        for key, view in items:
            shared.data.setdefault(key, bytes(view))
        assert lease is not None
        shared.owners[lease] = node.name
        chain = shared.chains[LeaseId(lease.rpartition("/")[0])]  # full blocks of its prompt
        full = [key for key, _ in items if key in chain]
        if full:
            first = chain.index(full[0])
            last = first + len(full)
            later = node.name in shared.later[RequestId(lease.rpartition("/")[0])]
            if (shared.copies and not later) or shared.segments.is_local(node, chain[:first]):  # type: ignore[arg-type]
                first = 0
            shared.tell(*shared.segments.store(node, chain, first, last))  # type: ignore[arg-type]
        return len(items)

    async def release(self, lease: LeaseId) -> None:
        pass

    async def close(self) -> None:
        pass


class LocalWire:
    """The wire's calls, made directly at runners."""

    def __init__(self, runners: dict[str, Runner], engines: dict[str, FakeEngine]) -> None:
        self._runners = runners
        self._engines = engines
        self._count = 0

    def _job(self, to: InstanceInfo, request: Request, body: bytes) -> Any:
        self._count += 1
        return make_job(
            decode_json(body, CompletionBody),
            request=RequestId(f"{request.id}-{self._count}"),
            lease=LeaseId(f"{request.id}/x"),
            model=to.model,
            shape=self._engines[to.id].shape,
            encode=None,
        )

    async def prefill(self, to: InstanceInfo, request: Request, body: bytes) -> Prefilled:
        job = self._job(to, request, body)
        pieces = [piece async for piece in self._runners[to.id].generate(job)]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "first_token_id": pieces[-1].token,
            "lease": job.lease,
        }
        finish = pieces[-1].finish
        return Prefilled(
            tuple(piece.token for piece in pieces),
            finish.reason if finish else None,
            pieces[-1].cached_tokens,
            params,
        )

    async def prefetch(
        self, to: InstanceInfo, request: Request, lease: LeaseId, keys: Sequence[BlockKey]
    ) -> None:
        """Does nothing: the setups that both drivers run have no overlap."""

    async def decode(
        self, to: InstanceInfo, request: Request, body: bytes
    ) -> AsyncGenerator[Decoded, None]:
        job = self._job(to, request, body)
        async for piece in self._runners[to.id].generate(job):
            yield Decoded((piece.token,), piece.finish.reason if piece.finish else None)


def tokens_of(row: Row, block_size: int) -> tuple[int, ...]:
    """Token ids that are equal if and only if block ids are."""
    made = [block * 64 + at % 64 for block in row.blocks for at in range(block_size)]
    return tuple(made[: row.input_tokens])


class LiveRun:
    """A trace through the live shell: EmbeddedServing, ConductorLoop, runners, fake engines."""

    def __init__(self, trace: Trace, setup: Setup, conductor: Conductor, copies: bool) -> None:
        self.trace = trace
        self.setup = setup
        self.conductor = conductor
        self.copies = copies
        self.digest = Digest()
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}

    async def run(self) -> None:
        size = self.trace.block_size
        infos = self.setup.instances(size)
        nodes = {str(info.id): _Named(info) for info in infos}
        store = SharedStore(self.setup, nodes, self.copies)
        engines = {str(info.id): self._engine(info) for info in infos}
        runners: dict[str, Runner] = {}

        @contextlib.asynccontextmanager
        async def fetch(url: str, lease: LeaseId) -> AsyncIterator[AsyncIterator[bytes]]:
            """Fetch the KV of a part of a prompt; it takes no time."""
            parts = runners[url.removeprefix("sim://")].parts
            assert parts is not None
            async with contextlib.aclosing(await parts.hand_on(lease)) as frames:
                yield frames

        runners |= {
            name: Runner(
                Workbench(
                    engines[name],
                    node.info.namespace,
                    WorkerLimits(
                        chunk_tokens=node.info.chunk_tokens,
                        max_seqs=node.info.max_seqs,
                        max_waiting=100_000,
                        pass_s=1e6,
                        piece_s=1e6,
                        decode_kv="off",
                    ),
                    Metrics(MODEL),
                    LoopClock(),
                ),
                WorkerStore(store, node, engines[name].shape.block_bytes),
                fetch,
            )
            for name, node in nodes.items()
        }
        self.shared = store
        loop = ConductorLoop(self.conductor, lambda lease: None, store.copy, self._note)
        store.tell = lambda *facts: loop.tell(*facts) if facts else None
        loop.tell(*[Joined(info) for info in infos])
        cluster = EmbeddedServing(loop, LocalWire(runners, engines), {})  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as group:
            for number, row in enumerate(self.trace.rows):
                group.create_task(self._one(cluster, number, row))
        await asyncio.gather(*[runner.close() for runner in runners.values()])

    def _engine(self, info: InstanceInfo) -> FakeEngine:
        return FakeEngine(
            block_size=info.namespace.block_size,
            num_blocks=info.kv_blocks,
            max_len=1 << 30,
            vocab_size=1 << 31,
            cost=self.setup.profile.cost(),
        )

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that a single engine would give."""
        return self._engine(self.setup.instances(self.trace.block_size)[0]).reference(prompt, count)

    def _note(self, now_us: Micros, facts: Any, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Prefill):
                decision = action.decision
                fetches = decision.reused_tokens > decision.chosen.local_tokens
                self.shared.fetches[action.request] = fetches or self.setup.one_copy
                later = [str(stage.instance) for stage in decision.stages[1:]]
                self.shared.later[action.request] = later
        happened = events(now_us, facts, actions)
        self.events += happened
        self.digest.take(happened)

    async def _one(self, cluster: EmbeddedServing, number: int, row: Row) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(row.at_us / 1e6 - loop.time())
        prompt = tokens_of(row, self.trace.block_size)
        request = Request(
            RequestId(f"r{number:06}"),
            MODEL,
            len(prompt),
            prompt,
            Sampling(temperature=0.0),
            Stopping(max_tokens=row.output_tokens, ignore_eos=True),
        )
        keys = self._keys(prompt)
        self.shared.chains[LeaseId(request.id)] = keys
        tokens = self.tokens[request.id] = []
        with contextlib.suppress(Overloaded):  # the digest has it
            async for output in cluster.generate(request):
                tokens += output.token_ids

    def _keys(self, prompt: tuple[int, ...]) -> tuple[BlockKey, ...]:
        namespace = self.setup.instances(self.trace.block_size)[0].namespace
        return tuple(chain_keys(namespace.root(), prompt, self.trace.block_size))
