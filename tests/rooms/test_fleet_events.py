"""An engine's KV events over ZMQ, from its socket to what the Conductor matches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
import zmq.asyncio

from moonserve.core.kv.events import StoredEvent
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.inferred import Reported
from moonserve.core.kv.keys import chain_keys
from moonserve.core.schedule.facts import Fact
from moonserve.core.units import BlockKey, InstanceId, SegmentId
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.external.monitor import POOL
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve
from moonserve.live.kvevents.follower import Followers
from moonserve.live.kvevents.wire import encode_batch
from tests.support.engines import Engine, rig

A = InstanceId("a")
TOKENS = list(range(64))


class Publisher:
    """An engine's PUB socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._number = 0

    async def stored(self, tokens: Sequence[int], size: int, skip: int = 0) -> None:
        """Publish a chain's blocks, named by their place; `skip` batches are lost before."""
        names = list(range(1, len(tokens) // size + 1))
        event = StoredEvent([*names], None, list(tokens), size, None, "GPU", None)
        self._number += skip
        number = struct.pack(">Q", self._number)
        self._number += 1
        batch = encode_batch(float(self._number), [event], 0)
        await self._socket.send_multipart([b"", number, batch])


@contextlib.contextmanager
def publisher() -> Iterator[Publisher]:
    """One, closed after."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    try:
        yield Publisher(socket)
    finally:
        context.destroy(linger=0)


def test_what_an_engine_tells_is_what_the_conductor_matches() -> None:
    """Blocks are known under our keys; a lost batch is an alarm; a restart forgets all."""

    async def body() -> None:
        fake = Engine("a")
        async with asyncio.timeout(20), rig(fake, follow=Followers().follow) as it:
            with publisher() as engine:
                where = f"tcp://127.0.0.1:{engine.port}"
                monitor = await it.up(fake, tokenizer="t", events=where)
                await it.until(lambda: monitor.feeds[A].counts().connected)
                index, info = it.conductor.core.index, it.views[A].info
                keys = chain_keys(info.namespace.root(), TOKENS, 32)
                assert it.fleet.follows_events("m")
                await engine.stored(TOKENS, 32)
                await it.until(lambda: index.match(keys).by_holder == {"a": 2})
                assert not [said for said in it.fleet.alarms() if "KV events were lost" in said]
                await engine.stored(TOKENS, 32, skip=3)
                await it.until(lambda: monitor.feeds[A].counts().gaps == 1)
                assert any("KV events were lost" in said for said in it.fleet.alarms())
                await fake.restart()
                await it.until(lambda: A in it.views and it.views[A].info.epoch > info.epoch)
                await it.until(lambda: index.match(keys).by_holder == {})

    asyncio.run(body())


def test_events_with_blocks_of_another_size_are_not_used() -> None:
    """What the events say differs from what the metrics say: an alarm with the remedy."""

    async def body() -> None:
        fake = Engine("a")
        async with asyncio.timeout(20), rig(fake, follow=Followers().follow) as it:
            with publisher() as engine:
                where = f"tcp://127.0.0.1:{engine.port}"
                monitor = await it.up(fake, tokenizer="t", events=where)
                await it.until(lambda: monitor.feeds[A].counts().connected)
                await engine.stored(TOKENS, 16)
                await it.until(lambda: monitor.feeds[A].counts().fault)
                alarm = next(said for said in it.fleet.alarms() if "not used" in said)
                assert alarm.startswith(
                    "a: its KV events are not used: their blocks have 16 tokens"
                )
                assert not len(it.conductor.core.index)

    asyncio.run(body())


def test_an_engine_in_both_indexes_is_followed_once() -> None:
    """The Conductor and the Indexer API share the subscription of an engine that both know, and
    each finds its blocks under keys of its own."""

    async def body() -> None:
        fake, followers = Engine("a"), Followers()
        async with asyncio.timeout(20), rig(fake, follow=followers.follow) as it:
            with publisher() as engine:
                where = f"tcp://127.0.0.1:{engine.port}"
                monitor = await it.up(fake, tokenizer="t", events=where)
                await it.until(lambda: monitor.feeds[A].counts().connected)
                api = IndexerApi(followers.follow)
                server = await serve(App(api.routes()), "127.0.0.1", 0)

                async def post(path: str, **fields: Any) -> Any:
                    body = json.dumps({"model": "m", "block_size": 32, **fields}).encode()
                    url = f"http://127.0.0.1:{server.port}{path}"
                    reply = await it.http.request("POST", url, body=body, timeout_s=5)
                    return json.loads(reply.body)

                await post("/register", endpoint=where, instance_id="e")
                assert followers.subscribed == 1
                await engine.stored(TOKENS, 32)
                keys = chain_keys(it.views[A].info.namespace.root(), TOKENS, 32)
                index = it.conductor.core.index
                await it.until(lambda: index.match(keys).by_holder == {"a": 2})
                found = await post("/query", token_ids=TOKENS)
                assert found["default"]["e"]["longest_matched"] == 64
                await it.fleet.remove("test", "a")
                assert followers.subscribed == 1
                await post("/unregister", instance_id="e")
                assert followers.subscribed == 0
                await api.close()
                await server.stop(0)

    asyncio.run(body())


def test_a_shared_block_is_told_once_whoever_tells_it() -> None:
    """Two engines that report one block of a store make one claim; all their own blocks pass."""
    ledger = Reported(POOL)
    keys = tuple(BlockKey(bytes([number]) * 32) for number in range(3))
    shared = BlocksStored(POOL, keys, None, "dram", 0)
    own = BlocksStored(SegmentId("a"), keys, None, "device", 7)
    facts = [fact for event in (shared, own, shared, own) for fact in ledger.take(5, event)]
    assert facts == [shared, own, own]


def test_what_was_missed_in_a_shared_store_is_told_as_removed_once() -> None:
    """A fleet's miss goes by the same ledger as its engines' events."""

    class Heard:
        def __init__(self) -> None:
            self.facts: list[Fact] = []
            self.time_us = 0

        def now_us(self) -> int:
            return self.time_us

        def tell(self, *facts: Fact) -> None:
            self.facts += facts

    heard, keys = Heard(), tuple(BlockKey(bytes([number]) * 32) for number in range(3))
    fleet = Fleet(heard, HttpClient(), lambda ref: NotImplemented, {})  # type: ignore[arg-type]
    heard.tell(*fleet._pool.take(0, BlocksStored(POOL, keys, None, "dram", 0)))
    heard.time_us = 60_000_000
    fleet.missed(keys[1:])
    fleet.missed(keys[1:])
    assert heard.facts[1:] == [BlocksRemoved(POOL, keys[1:], "dram", 0)]
