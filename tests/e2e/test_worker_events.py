"""A worker's KV events, followed as a gateway follows vLLM's, give the blocks in its segment."""

from __future__ import annotations

import asyncio

import pytest

from moonserve.core.kv.events import KvBatch, RemovedEvent, StoredEvent
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.keys import chain_keys
from moonserve.core.kv.stream import KvEventStream
from moonserve.core.kv.vllm_hash import block_hash, event_hash, root_hash
from moonserve.core.units import BlockKey, SegmentId
from tests.support.inproc import BLOCK, site
from tests.support.kvevents import feed

pytest.importorskip("zmq", reason="pyzmq is not installed")

from moonserve.live.kvevents.publisher import Publisher
from moonserve.live.kvevents.subscriber import EventFeed
from moonserve.live.kvevents.wire import EventAddress

ANY = "tcp://127.0.0.1:0"


class Follower:
    """A sink that keeps the events."""

    def __init__(self, stream: KvEventStream) -> None:
        self.stream = stream
        self.index = PrefixIndex()
        self.events: list[StoredEvent | RemovedEvent] = []
        self.facts: list[BlockEvent] = []

    def batch(self, batch: KvBatch) -> None:
        self.events += [it for it in batch.events if isinstance(it, StoredEvent | RemovedEvent)]
        self.facts += (facts := self.stream.facts(batch))
        feed(self.index, facts)

    def reset(self, why: str, restarted: bool) -> None:
        raise AssertionError(why)


def test_events_follow_the_segment() -> None:
    """After requests and an eviction a follower's index equals the segment's catalogue.

    The hashes are those that vLLM gives the same tokens.
    """

    async def run() -> None:
        async with site() as it:
            events = Publisher(ANY, ANY)
            worker = await it.add("w", "both", publisher=events)
            store = it.stores["w"]
            stream = KvEventStream(SegmentId("w"), 1, worker.info.namespace)
            follower = Follower(stream)
            feed_ = EventFeed(EventAddress(events.endpoint, events.replay_endpoint or ""), follower)
            prompt = [*range(1000, 1000 + 5 * BLOCK)]
            await it.tokens(prompt, 1)
            await feed_.start()  # late: the first batches are replayed
            await it.tokens([*prompt[: 3 * BLOCK], *range(2000, 2000 + 2 * BLOCK)], 1)
            held = store.owners[0].catalogue.held
            await until(lambda: len(held) == stream.blocks == 7)
            assert stream.algorithm == "sha256_cbor"
            await store.evict(SegmentId("w"), 2 * worker.info.block_bytes)
            await until(lambda: len(held) == stream.blocks == 5)
            assert {BlockKey(key) for key in held} == {
                key for key in map(BlockKey, held) if follower.index.tiers(key, SegmentId("w"))
            }
            await it.tokens(prompt, 1)
            await until(lambda: len(held) == stream.blocks)
            await feed_.close()
            await events.close()
            first = follower.events[0]
            assert isinstance(first, StoredEvent)
            parent = root_hash("sha256_cbor")
            for at, hash in enumerate(first.block_hashes):
                parent = block_hash("sha256_cbor", parent, prompt[at * BLOCK : (at + 1) * BLOCK])
                assert hash == event_hash(parent)
            assert first.token_ids == prompt[: len(first.block_hashes) * BLOCK]
            assert (first.medium, first.block_size) == ("CPU", BLOCK)

    asyncio.run(run())


def test_events_of_salted_requests_are_vllms() -> None:
    """The first block's event has the salt, which is in its hash too.

    A follower indexes the blocks under the keys by which a gateway looks for them.
    """

    async def run() -> None:
        async with site() as it:
            events = Publisher(ANY, ANY)
            worker = await it.add("w", "both", publisher=events)
            store = it.stores["w"]
            namespace = worker.info.namespace
            follower = Follower(KvEventStream(SegmentId("w"), 1, namespace))
            feed_ = EventFeed(EventAddress(events.endpoint, events.replay_endpoint or ""), follower)
            await feed_.start()
            prompt = [*range(1000, 1000 + 3 * BLOCK)]
            for salt in ("A", None):
                await it.tokens(prompt, BLOCK + 1, salt)
            held = store.owners[0].catalogue.held
            await until(lambda: len(held) == follower.stream.blocks == 2 * 4)
            await feed_.close()
            await events.close()
            tokens = [*prompt, *it.reference(prompt, BLOCK)]
            for salt in ("A", ""):
                found = follower.index.match(chain_keys(namespace.salted(salt), tokens, BLOCK))
                assert found.by_holder == {SegmentId("w"): 4}, salt
            stored = [it for it in follower.events if isinstance(it, StoredEvent)]
            extras = [it.extra_keys for it in stored if it.parent_block_hash is None]
            assert [it and it[0] for it in extras] == [["A"], None]
            parent = root_hash("sha256_cbor")
            first = block_hash("sha256_cbor", parent, prompt[:BLOCK], (("cache_salt", "A"),))
            assert stored[0].block_hashes[0] == event_hash(first)

    asyncio.run(run())


async def until(true: object) -> None:
    """Wait until something holds; fails after five seconds."""
    assert callable(true)
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.01)
