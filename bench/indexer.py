"""The Indexer API: CPU per query over HTTP, beside dynamo.indexer on the same events.

    python bench/indexer.py [--dynamo PYTHON] [--workers 64] [--rounds 7]

PYTHON is an interpreter that has `ai-dynamo-runtime` (1.6.1 was measured). Each worker publishes
the events of two prompts, of which many share their heads; both indexers subscribe to all. Each
server has one core to itself where there are two, and they are asked in turns, round by round:
figures are medians over rounds, of the server's CPU per query and of the time until its answer.
Answers are compared. `index alone` is the same work in this process without HTTP and JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from common import machine_line
from moonserve.core.kv.events import KvBatch, StoredEvent
from moonserve.core.kv.indexer import (
    BlockSource,
    RollingIndexer,
    TieredIndex,
    local_hashes,
    rolling,
    token_keys,
)
from moonserve.core.units import SegmentId
from moonserve.live.kvevents.wire import encode_batch

SIZE = 16
LENGTHS = (64, 512, 2_048)
PIECE = 256
"""Blocks per event."""
ASKED = 40
"""Queries of each kind in a round."""


def world(workers: int, rng: random.Random) -> list[list[list[int]]]:
    """The prompts of each worker as token ids, 2,048 blocks each, from few heads and middles."""

    def blocks(count: int) -> list[int]:
        return [rng.randrange(128_000) for _ in range(count * SIZE)]

    heads = [blocks(64) for _ in range(8)]
    middles = [[blocks(448) for _ in range(4)] for _ in heads]

    def prompt() -> list[int]:
        head = rng.randrange(len(heads))
        return heads[head] + rng.choice(middles[head]) + blocks(1_536)

    return [[prompt() for _ in range(2)] for _ in range(workers)]


def events_of(prompts: Sequence[Sequence[int]]) -> list[StoredEvent]:
    """One worker's; its own hashes are what rolling ones with another seed are."""
    held: dict[int, None] = {}
    events = []
    for tokens in prompts:
        names = [name >> 1 for name in rolling(local_hashes(tokens, SIZE, 7), 7)]
        first = next((at for at, name in enumerate(names) if name not in held), len(names))
        for at in range(first, len(names), PIECE):
            piece = names[at : at + PIECE]
            held.update(dict.fromkeys(piece))
            parent = names[at - 1] if at else None
            ids = list(tokens[at * SIZE : (at + len(piece)) * SIZE])
            events.append(StoredEvent(list(piece), parent, ids, SIZE, medium="GPU"))
    return events


class Server:
    """One indexer's process."""

    def __init__(self, name: str, command: list[str], port: int, core: int | None) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if core is not None:
            os.sched_setaffinity(self.process.pid, {core})
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for _ in range(600):
            try:
                self._client.connect()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"{name} does not listen")

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """POST JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._client.request("POST", path, data, {"content-type": "application/json"})
        reply = self._client.getresponse()
        return reply.status, reply.read()

    def body(self, path: str, tokens: list[int], local: list[int]) -> bytes:
        """A query; by hashes, ours takes the standard's rolling ones and dynamo's local ones."""
        asked: dict[str, Any] = {"model_name": "m"}
        if path == "/query":
            asked["token_ids"] = tokens
        elif self.name == "moonserve":
            asked["seq_hashes"] = rolling(local)
        else:
            asked["block_hashes"] = [each - 2**64 * (each >> 63) for each in local]
        return json.dumps(asked).encode()

    def cpu_us(self) -> float:
        """CPU time of all its threads until now."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3

    def until_idle(self) -> None:
        """Until it has taken all that was published."""
        self._client.close()  # dynamo's gives idle ones up; it is opened again when it is asked
        last, idle = self.cpu_us(), 0
        while idle < 4:
            time.sleep(0.3)
            now = self.cpu_us()
            last, idle = now, idle + 1 if now - last < 3_000 else 0

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port nobody has."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))


def fill(servers: Sequence[Server], told: Sequence[Sequence[StoredEvent]]) -> None:
    """Register every worker's publisher and publish all; says what taking it cost."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4_096)
    sockets = []
    for worker in range(len(told)):
        socket = context.socket(zmq.PUB)
        socket.sndhwm = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sockets.append(socket)
        body = {"instance_id": worker, "model_name": "m", "block_size": SIZE}
        for server in servers:
            status, reply = server.ask(
                "/register", {**body, "endpoint": f"tcp://127.0.0.1:{port}", "dp_rank": 0}
            )
            assert status in (200, 201), reply
    time.sleep(2)  # PUB drops what it publishes before its subscribers have come
    before = [server.cpu_us() for server in servers]
    blocks = 0
    for socket, events in zip(sockets, told, strict=True):
        for seq, event in enumerate(events):
            payload = encode_batch(0.0, (event,), 0)
            socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])
            blocks += len(event.block_hashes)
    for server, cpu_us in zip(servers, before, strict=True):
        server.until_idle()
        took_us = (server.cpu_us() - cpu_us) / blocks
        print(f"{server.name}: {blocks} blocks stored, {took_us:.2f} us of CPU each")


def prompts_of(told: list[list[list[int]]], rng: random.Random, blocks: int) -> list[list[int]]:
    """Most are prefixes of what somebody has, some go astray half way, some are new."""
    asked = []
    for _ in range(ASKED):
        tokens = list(rng.choice(rng.choice(told))[: blocks * SIZE])
        if (draw := rng.random()) < 0.3:
            start = 0 if draw < 0.1 else rng.randrange(blocks) * SIZE
            tokens[start:] = [rng.randrange(128_000) for _ in tokens[start:]]
        asked.append(tokens)
    return asked


def same(ours: bytes, theirs: bytes) -> bool:
    """Whether two answers say the same of everybody's longest match."""
    mine = json.loads(ours)["default"]
    other = json.loads(theirs)["instances"]
    found = {name: hit["longest_matched"] for name, hit in mine.items() if hit["longest_matched"]}
    return found == {name: hit["longest_matched"] for name, hit in other.items()}


def over_http(servers: Sequence[Server], told: list[list[list[int]]], rounds: int) -> None:
    """CPU and time per query, by length and path."""
    rng = random.Random(2)
    head = f"{'blocks':>6} {'path':14}"
    print(head + "".join(f" {server.name:>22}" for server in servers) + "   ours/theirs")
    for blocks in LENGTHS:
        prompts = prompts_of(told, rng, blocks)
        local = [local_hashes(tokens, SIZE) for tokens in prompts]
        for path in ("/query", "/query_by_hash"):
            cpus: dict[str, list[float]] = {server.name: [] for server in servers}
            times: dict[str, list[float]] = {server.name: [] for server in servers}
            answers: dict[str, list[bytes]] = {}
            for turn in range(rounds + 1):
                for server in servers:
                    pairs = zip(prompts, local, strict=True)
                    bodies = [server.body(path, *pair) for pair in pairs]
                    before, replies = server.cpu_us(), []
                    for body in bodies:
                        begin = time.perf_counter()
                        status, reply = server.ask(path, body)
                        times[server.name] += [(time.perf_counter() - begin) * 1e6] * bool(turn)
                        assert status == 200, reply
                        replies.append(reply)
                    cpus[server.name] += [(server.cpu_us() - before) / ASKED] * bool(turn)
                    answers[server.name] = replies
            if len(servers) == 2:
                both = zip(*answers.values(), strict=True)
                assert all(same(ours, theirs) for ours, theirs in both), "answers differ"
            line = f"{blocks:6} {path:14}"
            for server in servers:
                cpu, wall = (
                    statistics.median(cpus[server.name]),
                    statistics.median(times[server.name]),
                )
                line += f" {cpu:7.0f} us, p50 {wall:5.0f}"
            if len(servers) == 2:
                pairs_of = zip(*cpus.values(), strict=True)
                line += f"   {statistics.median([a / b for a, b in pairs_of]):5.2f}"
            print(line, flush=True)


def alone(
    told: list[list[list[int]]], events: Sequence[Sequence[StoredEvent]], rounds: int
) -> None:
    """The index without HTTP and JSON, in this process."""
    space = TieredIndex(SIZE, 1337)
    for worker, of_worker in enumerate(events):
        stream = BlockSource(SegmentId(str(worker)), str(worker))
        space.join(stream)
        rolled = RollingIndexer(stream, space, "", "")
        for event in of_worker:
            rolled.batch(KvBatch(0.0, (event,)))
    rng = random.Random(3)
    gc.disable()
    for blocks in LENGTHS:
        prompts = prompts_of(told, rng, blocks)
        hashing, looking = [], []
        for tokens in prompts * rounds:
            begin = time.perf_counter()
            keys = token_keys(0, tokens, SIZE, 1337)
            middle = time.perf_counter()
            space.hits(keys)
            hashing.append((middle - begin) * 1e6)
            looking.append((time.perf_counter() - middle) * 1e6)
        hash_us, look_us = statistics.median(hashing), statistics.median(looking)
        print(f"index alone, {blocks:5} blocks: hashes {hash_us:6.1f} us, answer {look_us:6.1f} us")


async def serve_ours(port: int) -> None:
    """Be the child with our API."""
    from moonserve.live.external.indexer_api import IndexerApi
    from moonserve.live.http.server import App, serve

    await serve(App(IndexerApi().routes()), "127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        import uvloop

        uvloop.run(serve_ours(int(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dynamo", default="", metavar="PYTHON")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"{machine_line()}; {args.workers} workers")
    told = world(args.workers, random.Random(1))
    events = [events_of(prompts) for prompts in told]
    alone(told, events, args.rounds)
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if len(cores) > 1 else None
    port, servers = free_port(), []
    try:
        servers.append(
            Server("moonserve", [sys.executable, __file__, "child", str(port)], port, core)
        )
        if args.dynamo:
            port = free_port()
            command = [args.dynamo, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
            servers.append(Server("dynamo.indexer", command, port, core))
        fill(servers, events)
        over_http(servers, told, args.rounds)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
