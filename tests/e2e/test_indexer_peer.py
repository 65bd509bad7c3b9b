"""The Indexer API beside dynamo.indexer: the same events over ZMQ into both, equal answers.

Opt-in: MOONSERVE_DYNAMO names a Python that has ai-dynamo-runtime (1.6.1 was compared).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from moonserve.core.kv.events import ClearedEvent, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.indexer import local_hashes, rolling
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.http.client import HttpClient, UpstreamError
from moonserve.live.http.server import App, serve
from moonserve.live.kvevents.wire import encode_batch

zmq = pytest.importorskip("zmq")
pytestmark = [pytest.mark.peer, pytest.mark.slow]

SIZE = 4
PYTHON = os.environ.get("MOONSERVE_DYNAMO", "")
TIERS = ("GPU", "CPU", "DISK")
Path = tuple[int, ...]
"""A block by the branch taken at each block before it, its own last."""


def tokens_of(path: Path) -> list[int]:
    """All tokens up to this block's end."""
    return [
        token % 50_000
        for depth in range(len(path))
        for token in hashlib.sha256(repr(path[: depth + 1]).encode()).digest()[:SIZE]
    ]


def name_of(path: Path) -> int:
    """An engine's hash of a block: the same on all of them."""
    return int.from_bytes(hashlib.sha256(b"engine %r" % (path,)).digest()[:8], "big") >> 1


class Engine:
    """One rank's cache on three tiers, and its publisher."""

    def __init__(self, context: Any, instance: int, rank: int) -> None:
        self.instance = instance
        self.rank = rank
        self.held: dict[str, dict[Path, None]] = {tier: {} for tier in TIERS}
        self._socket = context.socket(zmq.PUB)
        self._socket.sndhwm = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    def publish(self, *events: KvEvent) -> None:
        """One batch."""
        payload = encode_batch(float(self._seq), events, self.rank)
        self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    def store(self, path: Path, tier: str) -> None:
        """What is lacking of a chain, behind its first part that is there."""
        held = self.held[tier]
        first = next((at for at in range(len(path)) if path[: at + 1] not in held), len(path))
        chain = [path[: at + 1] for at in range(first, len(path))]
        fresh = [block for block in chain if block not in held]
        if not fresh or len(fresh) < len(chain):  # all there; or a hole that later blocks span
            return
        held.update(dict.fromkeys(fresh))
        names = [name_of(block) for block in fresh]
        parent = None if first == 0 else name_of(path[:first])
        fields: list[Any] = [names, parent, tokens_of(path)[first * SIZE :], SIZE, None, tier]
        self.publish(StoredEvent(*fields))

    def remove(self, rng: random.Random, tier: str, leaf_first: bool) -> None:
        """A few blocks: leaves, as engines do, or any."""
        held = self.held[tier]
        for _ in range(rng.randint(1, 6)):
            if not held:
                return
            block = rng.choice(list(held))
            while leaf_first and (below := [b for b in held if b[:-1] == block]):
                block = rng.choice(below)
            del held[block]
            self.publish(RemovedEvent([name_of(block)], tier))

    def clear(self) -> None:
        """All of it, where nothing lies below the device (dynamo clears all tiers, vLLM one)."""
        if not self.held["CPU"] and not self.held["DISK"]:
            self.held["GPU"].clear()
            self.publish(ClearedEvent())

    def mark(self, number: int) -> Path:
        """A block of its own, to be looked for."""
        path = (1_000 + 100 * number + 10 * self.instance + self.rank,)
        self.store(path, "GPU")
        return path

    def close(self) -> None:
        """Publish no more."""
        self._socket.close(0)


class Both:
    """Our API and dynamo's, asked the same."""

    def __init__(self, client: HttpClient, ours: str, theirs: str) -> None:
        self.client = client
        self.urls = (ours, theirs)

    async def post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        """The reply, which is a good one."""
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        reply = await self.client.request(
            "POST", url + path, headers=headers, body=data, timeout_s=10
        )
        assert reply.status in (200, 201), reply.body
        return json.loads(reply.body)

    async def register(self, engine: Engine) -> None:
        """With both."""
        body = {
            "instance_id": engine.instance,
            "dp_rank": engine.rank,
            "endpoint": engine.endpoint,
            "model_name": "m",
            "block_size": SIZE,
        }
        for url in self.urls:
            await self.post(url, "/register", body)

    async def query(self, tokens: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Who has something, as ours and as theirs."""
        asked = {"model_name": "m", "token_ids": tokens}
        ours = (await self.post(self.urls[0], "/query", asked))["default"]
        theirs = (await self.post(self.urls[1], "/query", asked))["instances"]
        return {
            name: {
                "longest_matched": hit["longest_matched"],
                "gpu": hit["GPU"],
                "dp": {rank: count for rank, count in hit["DP"].items() if count},
                "cpu": hit["CPU"],
                "disk": hit["DISK"],
            }
            for name, hit in ours.items()
            if hit["longest_matched"]
        }, {
            name: {**hit, "dp": {rank: count for rank, count in hit["dp"].items() if count}}
            for name, hit in theirs.items()
        }

    async def check(self, engines: list[Engine], path: Path, cut: int, holes: bool) -> bool:
        """That ours is what engines have, by hashes too, and theirs the same; whether it is much.

        dynamo forgets, with a block that goes, those of its engine that follow it: where holes are
        filled again it knows less.
        """
        tokens = tokens_of(path)[: len(path) * SIZE - cut]
        ours, theirs = await self.query(tokens)
        assert ours == expected(engines, path[: len(tokens) // SIZE]), path
        if holes:
            for name, hit in theirs.items():
                assert hit["longest_matched"] <= ours[name]["longest_matched"], path
        else:
            assert ours == theirs, path
        bodies = ({"token_ids": tokens}, {"seq_hashes": rolling(local_hashes(tokens, SIZE))})
        found = [
            await self.post(self.urls[0], path, {"model_name": "m", **body})
            for path, body in zip(("/query", "/query_by_hash"), bodies, strict=True)
        ]
        assert found[0] == found[1]
        return bool(theirs)

    async def until_known(self, engine: Engine, path: Path) -> None:
        """Until both have heard of this block."""
        while True:
            found = await self.query(tokens_of(path))
            if all(
                str(engine.rank) in hit.get(str(engine.instance), {"dp": ()})["dp"] for hit in found
            ):
                return
            await asyncio.sleep(0.02)


def expected(engines: list[Engine], path: Path) -> dict[str, Any]:
    """Block by block, tier after tier, from what engines hold."""
    found: dict[str, Any] = {}
    for engine in engines:
        at, ends = 0, dict.fromkeys(TIERS, 0)
        for tier in TIERS:
            while at < len(path) and path[: at + 1] in engine.held[tier]:
                at += 1
            ends[tier] = at * SIZE
        if at:
            hit = found.setdefault(
                str(engine.instance),
                {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0},
            )
            for name, tier in (
                ("longest_matched", "DISK"),
                *((tier.lower(), tier) for tier in TIERS),
            ):
                hit[name] = max(hit[name], ends[tier])
            if ends["GPU"]:
                hit["dp"][str(engine.rank)] = ends["GPU"]
    return found


@pytest.fixture
def dynamo() -> Iterator[str]:
    """The URL of a fresh dynamo.indexer."""
    if not PYTHON:
        pytest.skip("MOONSERVE_DYNAMO names no Python with ai-dynamo-runtime")
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def chain(rng: random.Random) -> Path:
    """A prompt of a small world: many share their heads."""
    return tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randint(1, 24)))


async def compare(url: str, seed: int, tiers: tuple[str, ...], leaf_first: bool) -> int:
    """Tell both the same for a while, and ask both; how many answers were equal (or it fails)."""
    rng, client, asked = random.Random(seed), HttpClient(), 0
    api, context = IndexerApi(), zmq.Context()
    server = await serve(App(api.routes()), "127.0.0.1", 0)
    both = Both(client, f"http://127.0.0.1:{server.port}", url)
    engines = [Engine(context, instance, rank) for instance in (1, 2, 3) for rank in (0, 1)]
    try:
        await until_up(client, url)
        for engine in engines:
            await both.register(engine)
        await asyncio.sleep(1)  # PUB drops what it publishes before its subscribers have come
        for number in range(30):
            for _ in range(20):
                engine, tier = rng.choice(engines), rng.choice(tiers)
                if (draw := rng.random()) < 0.6:
                    engine.store(chain(rng), tier)
                elif draw < 0.98:
                    engine.remove(rng, tier, leaf_first)
                else:
                    engine.clear()
            for engine in engines:
                await both.until_known(engine, engine.mark(number))
            for _ in range(40):
                cut = rng.choice((0, 1, 3))
                asked += await both.check(engines, chain(rng), cut, not leaf_first)
    finally:
        for engine in engines:
            engine.close()
        await api.close()
        await server.stop(0)
        await client.close()
        context.term()
    return asked


async def until_up(client: HttpClient, url: str) -> None:
    """Until it answers."""
    while True:
        try:
            await client.request("GET", url + "/health", timeout_s=1)
            return
        except UpstreamError:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("tiers", "leaf_first"),
    [(("GPU",), True), (("GPU",), False), (TIERS, True)],
    ids=["leaves first", "holes", "tiers"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_equal_answers(dynamo: str, seed: int, tiers: tuple[str, ...], leaf_first: bool) -> None:
    """Stored, removed and cleared on three instances of two ranks: every answer is as it should be,
    and dynamo's the same, or less where that forgets."""

    async def main() -> int:
        async with asyncio.timeout(120):
            return await compare(dynamo, seed, tiers, leaf_first)

    assert asyncio.run(main()) > 500  # of 1,200 there was something to be found
