"""A whole decision, from a prompt's keys to the Prefill action, beside dynamo's SelectionService.

    python bench/decide.py [--dynamo PYTHON] [--quick]
    python bench/decide.py --own [--dynamo PYTHON] [--quick]
    python bench/decide.py --forms [--quick]

Ours is Conductor.step with kvcache_centric: match, every candidate's terms, policy, decode choice,
reservation and decision record. Theirs is `select`, which reserves nothing. PYTHON is an
interpreter that has `ai-dynamo-runtime` (1.6.1 was measured), `pyzmq` and `msgpack`. The index is
that of bench/index.py, and requests are in flight, two per instance.

Four rows for each size:
  keys    the keys are given (theirs: block and sequence hashes); the request's end is not timed
  reserve the same with reservation on both sides: theirs select_and_reserve
  tokens  the same with token ids given: both hash them first
  life    keys given, to the end: ours PrefillEnded and DecodeEnded, theirs select_and_reserve,
          prefill_complete and free_reservation

--own runs what is like a live cluster only (see SETUPS), with 200,000 entries: some minutes.
--forms compares the two forms of core, compiled and Python, instead of ours and dynamo's.

Theirs opens several files for each instance: 4,096 of them need more than 20,000 (`ulimit -n`).

Each side is one process, pinned to one core (unpinned, theirs waits for a thread to wake), and they
take turns round by round. Wall and CPU time (all threads) are medians of single calls; ratios are
medians over rounds. All ledgers must be empty at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from random import Random
from statistics import median
from typing import Any

from index import LENGTHS, Child, Work, asked

BLOCK = 16
IN_FLIGHT = 2
"""Requests per instance, of 512 blocks each."""
SETUPS = {
    "half": "half prefill and half decode, one cost model",
    "both": "all prefill and decode, one cost model",
    "own": "half prefill and half decode, each with a cost model fitted to it alone, stores full",
}
KINDS = ("keys", "reserve", "tokens", "life")
FIRST_PORT = 23_000


def tokens_of(nodes: Sequence[int]) -> list[int]:
    """16 token ids for each node, no two nodes alike."""
    rest = tuple(range(BLOCK - 2))
    return [token for node in nodes for token in (node & 0xFFFF, node >> 16, *rest)]


class Moonserve:
    """The Conductor, in one of SETUPS; live, each instance has a cost model fitted to it alone."""

    def __init__(self, work: Work, instances: int, setup: str) -> None:
        from moonserve.core import request
        from moonserve.core.kv import keys
        from moonserve.core.kv.facts import BlocksStored
        from moonserve.core.schedule import facts
        from moonserve.core.schedule.conductor import Conductor
        from moonserve.core.schedule.cost import Cost

        self.facts, self.request, self.naming = facts, request, keys
        self.space = keys.Namespace("m", "r", "l", BLOCK)
        one = Cost()
        own = setup == "own"
        self.conductor = Conductor(cost_of=lambda info: self.fitted(info.id) if own else one)
        for at in range(instances):
            role = "both" if setup == "both" else ("prefill", "decode")[at % 2]
            self.step(facts.Joined(self.instance(at, role, len(work.held[at]) if own else 0)))
        self.keys: dict[int, bytes] = {-1: self.space.root()}
        for worker, parent, nodes in work.events:
            keys = self.chain(parent, nodes)
            before = None if parent < 0 else self.keys[parent]
            self.step(BlocksStored(name(worker), keys, before, "dram", 1))
        self.running: list[tuple[str, int]] = []

    async def fill(self) -> None:
        """Nothing is left to do."""

    def fitted(self, name: str) -> Any:
        """Costs fitted to passes and loads that err by 3 %, on a machine that differs by 1 %."""
        from moonserve.core.schedule.cost import Cost

        random, truth, found = Random(name), Cost(), Cost()
        speed = random.uniform(0.99, 1.01)

        def took_us(us: float) -> int:
            return round(us * speed * max(0.5, random.gauss(1.0, 0.03)))

        sample = self.facts.PassSample
        passes, loads = [], []
        for _ in range(32):
            new, past, seqs = (random.randrange(1, most) for most in (8_192, 16_384, 32))
            both = (new, (past + new) ** 2 - past**2, past, seqs, seqs * random.randrange(16_384))
            passes.append(sample(*both, took_us(truth.pass_of_us(sample(*both, 0)))))
            size = random.randrange(1, 512) << 20
            loads.append(self.facts.TransferSample(size, took_us(truth.transfer_us(size))))
        found.observe(passes, loads)
        return found

    def instance(self, at: int, role: Any, store_blocks: int) -> Any:
        """One with a segment of its own."""
        return self.facts.InstanceInfo(
            id=name(at),
            epoch=1,
            role=role,
            url="",
            model="m",
            namespace=self.space,
            kv_blocks=100_000,
            block_bytes=1 << 20,
            max_seqs=256,
            chunk_tokens=8_192,
            max_len=1 << 20,
            segment=name(at),
            segment_bytes=store_blocks << 20,
        )

    def step(self, *facts: Any) -> Any:
        """One step, always at the same instant."""
        return self.conductor.step(0, facts)

    def chain(self, parent: int, nodes: Sequence[int]) -> tuple[bytes, ...]:
        """The keys of nodes, one after another."""
        for node in nodes:
            if node not in self.keys:
                raw = self.naming.token_bytes(tokens_of([node]))
                self.keys[node] = sha256(self.keys[parent] + raw).digest()
            parent = node
        return tuple(self.keys[node] for node in nodes)

    def ask(self, nodes: Sequence[int]) -> tuple[Any, Any, list[int]]:
        """A query as it comes: prompt, keys, token ids."""
        return len(nodes) * BLOCK, self.chain(-1, nodes), tokens_of(nodes)

    async def keys_given(self, name: str, ask: Any) -> int:
        """One decision; the blocks that the chosen instance has itself."""
        [action] = self.step(self.facts.Arrived(self.request.Request(name, "m", ask[0]), ask[1]))
        self.running.append((name, action.number))
        return action.decision.chosen.local_tokens // BLOCK

    reserve = keys_given

    async def tokens_given(self, name: str, ask: Any) -> None:
        """The same, keys made first."""
        keys = tuple(self.naming.chain_keys(self.keys[-1], ask[2], BLOCK))
        await self.keys_given(name, (ask[0], keys))

    async def whole_life(self, name: str, ask: Any) -> None:
        """A decision, and both ends."""
        await self.keys_given(name, ask)
        await self.end()

    async def end(self) -> None:
        """The last request that came ends."""
        request, number = self.running.pop()
        [decode] = self.step(self.facts.PrefillEnded(request, number, final=False))
        self.step(self.facts.DecodeEnded(request, decode.number))

    async def close(self) -> bool:
        """Whether the ledger is empty when all have ended."""
        while self.running:
            await self.end()
        told = self.conductor.promised()
        return (told.requests, told.prefills, told.prefill_us, told.decodes) == (0, 0, 0, 0)


class Dynamo:
    """dynamo.llm.SelectionService in process, its index fed over ZMQ as engines do."""

    def __init__(self, work: Work, instances: int, setup: str) -> None:
        self.work, self.instances = work, instances
        self.service: Any = None
        self.hash: Any = None
        self.running: list[str] = []

    async def fill(self) -> None:
        """Register workers, send their events and wait until they were taken."""
        import msgpack
        import zmq
        from dynamo.llm import (  # type: ignore[import-not-found]
            SelectionService,
            compute_block_hash_for_seq,
        )

        self.hash = compute_block_hash_for_seq
        self.service = SelectionService(indexer_threads=1)
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 8_192)
        sockets = []
        for worker in range(self.instances):
            socket = context.socket(zmq.PUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(f"tcp://127.0.0.1:{FIRST_PORT + worker}")
            sockets.append(socket)
            about = {
                "worker_id": worker,
                "model_name": "m",
                "block_size": BLOCK,
                "endpoint": f"http://127.0.0.1:{FIRST_PORT - 10_000 + worker}",
                "kv_events_endpoint": f"tcp://127.0.0.1:{FIRST_PORT + worker}",
                "total_kv_blocks": 100_000,
                "max_num_batched_tokens": 8_192,
            }
            await self.service.upsert_worker(about)
        await asyncio.sleep(3)  # subscriptions say nothing of when they hold
        seq, sent = self.work.seq, [0] * self.instances
        for worker, parent, nodes in self.work.events:
            before = None if parent < 0 else seq[parent]
            stored = ["BlockStored", [seq[n] for n in nodes], before, tokens_of(nodes), BLOCK]
            batch = msgpack.packb([time.time(), [[*stored, None, "GPU", None]], 0])
            sockets[worker].send_multipart([b"", sent[worker].to_bytes(8, "big"), batch])
            sent[worker] += 1
        spent, before_s = time.process_time(), -1.0
        while spent - before_s > 0.02:
            before_s = spent
            await asyncio.sleep(0.5)
            spent = time.process_time()

    def ask(self, nodes: Sequence[int]) -> tuple[Any, Any]:
        """Two queries as they come: hashes, token ids."""
        tokens = tokens_of(nodes)
        hashes = {
            "block_hashes": [_signed(key) for key in self.hash(tokens, BLOCK)],
            "sequence_hashes": [_signed(self.work.seq[n]) for n in nodes],
            "isl_tokens": len(tokens),
        }
        return {"model_name": "m", **hashes}, {"model_name": "m", "token_ids": tokens}

    async def keys_given(self, name: str, ask: Any) -> int:
        """One choice; the blocks that the chosen worker has."""
        chosen = await self.service.select(ask[0])
        return int(chosen["overlap"]["longest_matched"]) // BLOCK

    async def tokens_given(self, name: str, ask: Any) -> Any:
        """One choice, hashes made first."""
        return await self.service.select(ask[1])

    async def reserve(self, name: str, ask: Any) -> None:
        """One choice that counts as load."""
        await self.service.select_and_reserve(ask[0] | {"selection_id": name})
        self.running.append(name)

    async def whole_life(self, name: str, ask: Any) -> None:
        """A choice, and both ends."""
        await self.reserve(name, ask)
        await self.end()

    async def end(self) -> None:
        """The last request that came ends."""
        name = self.running.pop()
        await self.service.prefill_complete(name)
        await self.service.free_reservation(name)

    async def close(self) -> bool:
        """Whether nothing is active when all have ended."""
        while self.running:
            await self.end()
        loads = [load for model in self.service.loads() for load in model["loads"]]
        self.service.shutdown()
        return not any(load["active_requests"] for load in loads)


def _signed(key: int) -> int:
    """64 bits as its binding takes them."""
    return key - (1 << 64) if key >> 63 else key


def name(worker: int) -> Any:
    """An instance's, and its segment's."""
    return f"i{worker:04}"


FORMS = ("compiled", "python")
"""Our sides with --forms, as MOONSERVE_CORE names them; "moonserve" is the form that runs here."""
SIDES: dict[str, Any] = {
    "moonserve": Moonserve,
    "dynamo": Dynamo,
    **dict.fromkeys(FORMS, Moonserve),
}


async def timed(
    call: Callable[[str, Any], Awaitable[object]], side: Any, asks: Sequence[Any]
) -> tuple[float, float]:
    """Median wall and CPU microseconds of a call; what it leaves running is ended, untimed."""
    walls, spent, left = [], [], len(side.running)
    for number, ask in enumerate(asks):
        cpu_ns, began_ns = time.process_time_ns(), time.perf_counter_ns()
        await call(f"q{number}", ask)
        walls.append(time.perf_counter_ns() - began_ns)
        spent.append(time.process_time_ns() - cpu_ns)
        while len(side.running) > left:
            await side.end()
    return median(walls) / 1_000, median(spent) / 1_000


async def serve(kind: str, args: Sequence[str]) -> None:
    """A child: fill; one round per line of input; then end what runs. JSON lines out."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    instances, entries, queries = map(int, args[:3])
    work = Work(instances, entries, 2 * queries, holes=False)
    side = SIDES[kind](work, instances, args[3])
    await side.fill()
    busy = [side.ask(nodes) for nodes in work.queries[512][:queries]]
    for number in range(IN_FLIGHT * instances):
        await side.reserve(f"busy{number}", busy[number % queries])
    asks = {n: [side.ask(nodes) for nodes in work.queries[n][queries:]] for n in LENGTHS}
    gc.collect()
    gc.freeze()
    print("{}", flush=True)
    calls = (side.keys_given, side.reserve, side.tokens_given, side.whole_life)
    for _ in sys.stdin:
        times = {}
        for n, of in asks.items():
            for what, call in zip(KINDS, calls, strict=True):
                times[f"{n} {what}"] = await timed(call, side, of)
        print(json.dumps(times), flush=True)
    found = [await side.keys_given(f"f{number}", ask) for number, ask in enumerate(asks[512])]
    print(json.dumps({"found": sum(found) / len(found), "empty": await side.close()}), flush=True)


def bench(pythons: dict[str, str], args: tuple[int, int, int, str], rounds: int) -> None:
    """Print the lines of one size: both sides' figures, and how many times faster ours are."""
    from moonserve.native import VARIABLE  # theirs need not have moonserve

    sides = {
        side: Child(python, __file__, side, args, {VARIABLE: side} if side in FORMS else {})
        for side, python in pythons.items()
    }
    times: dict[str, dict[str, list[tuple[float, float]]]] = {side: {} for side in sides}
    for _ in range(rounds):
        for side, child in sides.items():
            for what, pair in child.round().items():
                times[side].setdefault(what, []).append(pair)
    print(f"{args[0]} instances, {SETUPS[args[3]]}, {args[1]} entries")
    ours, *beside = times
    for what in times[ours]:
        cells = []
        for side, of in times.items():
            wall_us, cpu_us = (median(column) for column in zip(*of[what], strict=True))
            cells.append(f"{side} wall {wall_us:7.1f} us, CPU {cpu_us:7.1f} us")
        for other in beside:
            pairs = list(zip(times[other][what], times[ours][what], strict=True))
            wall, cpu = (median(them[i] / us[i] for them, us in pairs) for i in (0, 1))
            cells.append(f"{wall:5.2f}x faster, CPU {cpu:5.2f}x")
        print(f"  blocks: {what:12}  {'  '.join(cells)}", flush=True)
    for side, child in sides.items():
        end = child.end()
        print(
            f"  {side}: ledger {'empty' if end['empty'] else 'NOT EMPTY'} at the end; the chosen "
            f"instance itself has {end['found']:.0f} of 512 blocks on average"
        )


def _flag(name: str) -> bool:
    """Whether this flag was given; it is taken off the command line."""
    given = name in sys.argv
    if given:
        sys.argv.remove(name)
    return given


def main() -> None:
    """Run all sizes."""
    forms = _flag("--forms")
    own = _flag("--own")
    pythons, quick = asked(str(__doc__), "ai-dynamo-runtime, pyzmq and msgpack")
    if forms:
        pythons = dict.fromkeys(FORMS, sys.executable)
    else:
        from moonserve import CORE

        print(f"ours: {CORE.name}")
    entries, queries, rounds = (200_000, 40, 7) if forms or own else (1_000_000, 100, 5)
    if quick:
        entries, queries, rounds = 20_000, 10, 1
    sizes = (8, 64) if quick else (8, 64, 1_024) if forms or own else (8, 64, 1_024, 4_096)
    for instances in sizes:
        for setup in ("own",) if own else ("half", "own") if forms else SETUPS:
            bench(pythons, (instances, entries, queries, setup), rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(sys.argv[2], sys.argv[3:]))
    else:
        main()
