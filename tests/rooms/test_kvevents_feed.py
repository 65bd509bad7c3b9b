"""EventFeed and Publisher over real sockets: lost batches are replayed, or reported as lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import ClearedEvent, KvBatch, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.kv.stream import KvEventStream
from moonserve.core.kv.vllm_hash import algorithm_of
from moonserve.core.units import BlockKey, SegmentId
from tests.support.kvevents import feed, stored

pytest.importorskip("zmq", reason="pyzmq is not installed")

import zmq
import zmq.asyncio

from moonserve.live.kvevents import subscriber
from moonserve.live.kvevents.publisher import Publisher, SegmentEvents
from moonserve.live.kvevents.subscriber import EventFeed, Subscriptions
from moonserve.live.kvevents.wire import EventAddress, encode_batch, replay_answer
from tests.support.kvsockets import zmq_context

SIZE, ME = 4, SegmentId("p0")
SPACE = Namespace("m", "r", "l", SIZE)
A, B = [*range(3 * SIZE)], [*range(100, 100 + 2 * SIZE)]
ANY = "tcp://127.0.0.1:0"


def keys(tokens: Sequence[int]) -> list[BlockKey]:
    """Our keys of a plain prompt."""
    return chain_keys(SPACE.root(), tokens, SIZE)


class Lossy(Publisher):
    """An engine some of whose batches do not arrive."""

    def lose(self, *events: KvEvent) -> None:
        self._kept.append((self._next, encode_batch(float(self._next), events, 0)))
        self._next += 1

    def raw(self, *frames: bytes) -> None:
        self._plain.send_multipart(frames)


class Gateway:
    """A sink: a stream, and the index it feeds."""

    def __init__(self) -> None:
        self.stream = KvEventStream(ME, 1, SPACE)
        self.index = PrefixIndex()
        self.resets: list[tuple[str, bool]] = []
        self.batches = 0

    def batch(self, batch: KvBatch) -> None:
        self.batches += 1
        feed(self.index, self.stream.facts(batch))

    def reset(self, why: str, restarted: bool) -> None:
        self.resets.append((why, restarted))
        feed(self.index, self.stream.cleared())
        assert self.index.entries == 0

    def has(self, tokens: Sequence[int]) -> int:
        return self.index.match(keys(tokens)).by_holder.get(ME, 0)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something holds; fails after 25 seconds."""
    async with asyncio.timeout(25):
        while not true():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def following(
    engine: Publisher, replay: bool = True, topic: str = "", replay_s: float = 2.0
) -> AsyncIterator[tuple[EventFeed, Gateway]]:
    """A feed that is connected, and its sink; no socket is left after."""
    gateway = Gateway()
    before = asyncio.all_tasks()
    at = EventAddress(engine.endpoint, engine.replay_endpoint or "" if replay else "", topic)
    with zmq_context() as context:
        follower = EventFeed(at, gateway, Subscriptions(context), replay_s=replay_s)
        await follower.start()
        try:
            await until(lambda: follower.connected and follower.order.want is None)
            await asyncio.sleep(0.05)  # the subscription is under way
            yield follower, gateway
        finally:
            await follower.close()
            assert asyncio.all_tasks() <= before
            assert not follower.connected


@asynccontextmanager
async def engine_at(endpoint: str = ANY, replay: str | None = ANY) -> AsyncIterator[Lossy]:
    """A publishing engine."""
    engine = Lossy(endpoint, replay, "kv@m")
    try:
        yield engine
    finally:
        await engine.close()


def test_who_comes_late_learns_what_is_there() -> None:
    """At its start a feed has all replayed that the engine still keeps; then it follows."""

    async def run() -> None:
        async with engine_at() as engine:
            engine.publish([stored(A, SIZE)])
            async with following(engine, topic="kv@") as (follower, gateway):
                assert gateway.has(A) == 3
                engine.publish([stored(B, SIZE)])
                await until(lambda: gateway.has(B) == 2)
                assert follower.order.complete
            assert gateway.resets == []

    asyncio.run(run())


def test_a_gap_is_replayed() -> None:
    """Batches that were lost on the way are fetched before later ones count; duplicates of a hash
    and a clear among them."""

    async def run() -> None:
        async with engine_at() as engine, following(engine) as (follower, gateway):
            engine.publish([stored(B, SIZE)])
            await until(lambda: gateway.has(B) == 2)
            engine.lose(stored(A, SIZE), stored(A, SIZE))
            engine.lose(stored(B, SIZE), ClearedEvent(), stored(A, SIZE), stored(A, SIZE))
            engine.publish([RemovedEvent(stored(A, SIZE).block_hashes, "GPU")])
            await until(lambda: gateway.batches == 4)
            assert (gateway.has(A), gateway.has(B), gateway.resets) == (3, 0, [])
            assert follower.order.stats.gaps == 1

    asyncio.run(run())


def test_a_gap_without_replay_is_said() -> None:
    """Without a replay address all earlier blocks are dropped, and later batches count."""

    async def run() -> None:
        async with (
            engine_at(replay=None) as engine,
            following(engine, replay=False) as (follower, gateway),
        ):
            engine.publish([stored(A, SIZE)])
            await until(lambda: gateway.has(A) == 3)
            engine.lose(RemovedEvent(stored(A, SIZE).block_hashes, "GPU"))
            engine.publish([stored(B, SIZE)])
            await until(lambda: gateway.has(B) == 2)
            assert gateway.has(A) == 0
            assert gateway.resets == [("batches 1 to 1 are lost", False)]
            assert not follower.order.complete

    asyncio.run(run())


def test_a_gap_that_nobody_replays_any_more_is_said() -> None:
    """Where the engine kept too little, or does not answer, the same: by a deadline."""

    async def run() -> None:
        async with engine_at() as engine, following(engine, replay_s=0.1) as (follower, gateway):
            engine.publish([stored(A, SIZE)])
            await until(lambda: gateway.has(A) == 3)
            engine.lose(ClearedEvent())
            engine._kept.clear()
            engine.publish([stored(B, SIZE)])
            await until(lambda: gateway.has(B) == 2)
            assert gateway.has(A) == 0
            assert [restarted for _, restarted in gateway.resets] == [False]
            assert engine._listening is not None
            engine._listening.cancel()
            engine.lose(ClearedEvent())
            engine.publish([stored(A, SIZE)])
            await until(lambda: gateway.has(A) == 3)
            assert gateway.has(B) == 0
            assert follower.order.stats.untrusted == 2

    asyncio.run(run())


def test_a_replay_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a batch comes: by a deadline it is broken off, and what is known not all."""
    monkeypatch.setattr(subscriber, "_LONGEST_REPLAY_S", 0.3)

    async def endless(router: zmq.asyncio.Socket) -> None:
        who, *_ = await router.recv_multipart()
        for number in count(5):
            payload = encode_batch(0.0, [stored(A, SIZE)], 0)
            await router.send_multipart([who, *replay_answer(b"", number, payload)])
            await asyncio.sleep(0.02)

    async def run() -> None:
        with zmq_context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            port = router.bind_to_random_port("tcp://127.0.0.1")
            telling = asyncio.create_task(endless(router))
            async with engine_at(replay=None) as engine:
                engine.replay_endpoint = f"tcp://127.0.0.1:{port}"
                async with following(engine) as (follower, gateway):
                    assert gateway.batches > 3
                    assert not follower.order.complete
            telling.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("replay", [True, False])
def test_a_restart_at_the_same_address_is_noticed(replay: bool) -> None:
    """All entries of the old process go, even before the new one publishes anything; the new one's
    first batches are learned."""

    async def run() -> None:
        async with engine_at() as engine:
            at, replay_at = engine.endpoint, engine.replay_endpoint
            async with following(engine, replay) as (_, gateway):
                engine.publish([stored(A, SIZE)])
                engine.publish([stored(B, SIZE)])
                await until(lambda: gateway.has(A) == 3 and gateway.has(B) == 2)
                await engine.close()
                async with engine_at(at, replay_at) as reborn:
                    await until(lambda: len(gateway.resets) == 1)
                    assert gateway.index.entries == 0
                    await asyncio.sleep(0.05)
                    reborn.publish([stored(B, SIZE)])
                    await until(lambda: gateway.has(B) == 2)
                    assert gateway.has(A) == 0
                    if replay:
                        reborn.lose(stored(A, SIZE))
                        reborn.publish([ClearedEvent()])
                        await until(lambda: gateway.batches == 5)
                        assert gateway.index.entries == 0

    asyncio.run(run())


def test_nonsense_between_batches_is_counted() -> None:
    """Malformed messages are counted and cost nothing else; of other topics nothing is heard."""

    async def run() -> None:
        async with engine_at() as engine, following(engine, topic="kv@") as (follower, gateway):
            engine.raw(b"kv@m", b"short", b"")
            engine.raw(b"kv@m")
            engine.raw(b"other", b"\0" * 8, b"")
            engine.publish([stored(A, SIZE)])
            await until(lambda: gateway.has(A) == 3)
            assert follower.malformed == 2
            assert gateway.resets == []

    asyncio.run(run())


def test_a_batch_that_cannot_be_read_is_lost_aloud() -> None:
    """Its replay cannot be read either: all earlier blocks are dropped, and the feed goes on."""

    async def run() -> None:
        async with engine_at() as engine, following(engine) as (follower, gateway):
            engine.publish([stored(A, SIZE)])
            engine._kept.append((1, b"nonsense"))
            engine._next = 2
            engine.publish([stored(B, SIZE)])
            await until(lambda: gateway.has(B) == 2)
            assert gateway.has(A) == 0
            assert follower.malformed >= 1

    asyncio.run(run())


def test_addresses_that_are_none() -> None:
    """A wrong address is a ConfigError that names it, and leaves no socket."""

    async def run() -> None:
        with zmq_context() as context:
            for address in (EventAddress("nowhere"), EventAddress(ANY[:-2] + ":1", "tcp://")):
                follower = EventFeed(address, Gateway(), Subscriptions(context))
                with pytest.raises(ConfigError, match=r"nowhere|tcp://"):
                    await follower.start()
        async with engine_at() as engine:
            with pytest.raises(ConfigError, match="cannot listen"):
                Publisher(engine.endpoint, None)
            with pytest.raises(ConfigError, match="cannot listen"):
                Publisher(ANY, engine.endpoint)

    asyncio.run(run())


def test_a_silent_engine_is_waited_for() -> None:
    """A feed may start before its engine: it learns all when that comes up."""

    async def run() -> None:
        async with engine_at() as engine:
            at, replay_at = engine.endpoint, engine.replay_endpoint
        gateway = Gateway()
        follower = EventFeed(EventAddress(at, replay_at or ""), gateway, replay_s=0.1)
        await follower.start()
        await asyncio.sleep(0.1)
        assert not follower.connected
        async with engine_at(at, replay_at) as engine:
            engine.publish([stored(A, SIZE)])
            await until(lambda: gateway.has(A) == 3)
            await follower.close()

    asyncio.run(run())


def test_what_lies_in_a_segment_is_published() -> None:
    """A put of a worker is one event under vLLM's own hashes; a removed block is an event too;
    what others bring counts once its tokens are known here."""
    told: list[Sequence[KvEvent]] = []
    here: set[BlockKey] = set()

    async def run() -> None:
        events = SegmentEvents(SIZE, told.append)
        changed = events.segment("dram", here.__contains__)
        chain = keys(A)
        events.learned(chain, A)
        assert told == []
        here.update(chain)
        changed(chain)
        await asyncio.sleep(0)
        here.remove(chain[2])
        changed(chain)
        changed(keys(B))
        await asyncio.sleep(0)
        here.update(keys(B)[:1])
        changed(keys(B)[:1])  # brought by another
        events.learned(keys(B), B)
        await asyncio.sleep(0)

    asyncio.run(run())
    first = stored(A, SIZE, medium="CPU")
    (one,), (gone,), (brought,) = told
    assert isinstance(one, StoredEvent)
    assert one.block_hashes == first.block_hashes
    assert (one.token_ids, one.parent_block_hash, one.medium) == (A, None, "CPU")
    assert algorithm_of(one.block_hashes[0], A[:SIZE]) == "sha256_cbor"
    assert gone == RemovedEvent(first.block_hashes[2:], "CPU")
    assert isinstance(brought, StoredEvent)
    assert brought.token_ids == B[:SIZE]


def test_a_feed_that_fails_says_so() -> None:
    """A sink that raises is a bug: its blocks are forgotten, and the feed is not connected."""

    async def main() -> None:
        async with engine_at() as engine, following(engine) as (follower, gateway):
            engine.publish([stored(A[:SIZE], SIZE)])
            await until(lambda: gateway.batches == 1)
            gateway.stream = None  # type: ignore[assignment]
            gateway.reset = lambda why, restarted: gateway.resets.append(  # type: ignore[method-assign]
                (why, restarted)
            )
            engine.publish([stored(B[:SIZE], SIZE)])
            await until(lambda: bool(gateway.resets))
            await asyncio.sleep(0.05)
            assert gateway.resets == [("following it failed", False)]
            assert not follower.connected

    asyncio.run(main())


def test_as_many_feeds_as_a_fleet_has_engines() -> None:
    """ZMQ's own limit of sockets per process is no limit here."""

    async def main() -> None:
        address = EventAddress("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
        with zmq_context() as context:
            feeds = [EventFeed(address, Gateway(), Subscriptions(context)) for _ in range(400)]
            try:
                for one in feeds:
                    await one.start()
            finally:
                for one in feeds:
                    await one.close()

    asyncio.run(main())


def test_two_indexes_share_one_subscription() -> None:
    """An address that two feeds follow is subscribed to once; a feed that starts later still
    learns what was published before, and each feed may end without the other."""

    async def main() -> None:
        async with engine_at() as engine:
            with zmq_context() as context:
                subscriptions, first, second = Subscriptions(context), Gateway(), Gateway()
                address = EventAddress(engine.endpoint, engine.replay_endpoint or "")
                feeds = [EventFeed(address, sink, subscriptions) for sink in (first, second)]
                await feeds[0].start()
                await until(lambda: feeds[0].connected)
                engine.publish([stored(A, SIZE)])
                await until(lambda: first.has(A) == 3)
                await feeds[1].start()
                await until(lambda: second.has(A) == 3)
                engine.lose(stored(B[:SIZE], SIZE))
                engine.publish([stored(B, SIZE)])
                await until(lambda: first.has(B) == second.has(B) == 2)
                assert (first.batches, second.batches, first.resets, second.resets) == (
                    3,
                    3,
                    [],
                    [],
                )
                assert subscriptions.count == 1
                await feeds[0].close()
                assert feeds[1].connected
                engine.publish([ClearedEvent()])
                await until(lambda: second.has(A) == 0)
                assert (first.has(A), first.batches) == (3, 3)
                await feeds[1].close()
                assert subscriptions.count == 0

    asyncio.run(main())


def test_a_bug_in_one_index_leaves_the_other_its_events() -> None:
    """Of two feeds of one subscription only the one whose sink raises ends."""

    async def main() -> None:
        async with engine_at() as engine:
            with zmq_context() as context:
                subscriptions, bad, good = Subscriptions(context), Gateway(), Gateway()
                address = EventAddress(engine.endpoint, engine.replay_endpoint or "")
                feeds = [EventFeed(address, sink, subscriptions) for sink in (bad, good)]
                for one in feeds:
                    await one.start()
                await until(lambda: all(one.connected and one.order.want is None for one in feeds))
                bad.batch = None  # type: ignore[assignment, method-assign]
                engine.publish([stored(A, SIZE)])
                await until(lambda: good.has(A) == 3)
                assert bad.resets == [("following it failed", False)]
                assert [one.connected for one in feeds] == [False, True]
                engine.publish([stored(B, SIZE)])
                await until(lambda: good.has(B) == 2)
                for one in feeds:
                    await one.close()

    asyncio.run(main())
