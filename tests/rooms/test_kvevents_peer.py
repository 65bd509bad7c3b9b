"""vLLM's own classes and ours read each other; needs vLLM beside this project."""

import asyncio
from typing import Any

import msgspec
import pytest

from moonserve.core.kv.events import ClearedEvent, KvBatch, KvEvent, RemovedEvent, StoredEvent
from moonserve.live.kvevents.wire import decode_batch, encode_batch
from tests.support.kvevents import stored

EVENTS: list[KvEvent] = [
    stored([*range(96)], 32),
    stored([*range(128)], 32, 2, "CPU"),
    RemovedEvent([2**64 - 1, 1], "CPU"),
    ClearedEvent(),
]


BATCHES = 3_000


def vllms_events() -> object:
    """Their module."""
    return pytest.importorskip(
        "vllm.distributed.kv_events", reason="vLLM is not installed beside this project"
    )


@pytest.mark.peer
def test_vllm_reads_our_batches() -> None:
    """Each field arrives, and vLLM writes the same bytes again, which we read."""
    theirs: Any = vllms_events()
    sent = encode_batch(2.5, EVENTS, 3)
    batch = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(sent)
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 3)
    for ours, other in zip(EVENTS, batch.events, strict=True):
        assert type(other).__name__ == ours.__struct_config__.tag
        for name in other.__struct_fields__:
            assert getattr(other, name) == getattr(ours, name)
    back = msgspec.msgpack.encode(batch)
    assert back == sent
    assert [*decode_batch(back).events] == EVENTS


class Counting:
    """A sink that looks whether all comes, in order."""

    def __init__(self) -> None:
        self.hashes: list[object] = []
        self.resets: list[str] = []

    def batch(self, batch: KvBatch) -> None:
        self.hashes += [e.block_hashes[0] for e in batch.events if isinstance(e, StoredEvent)]

    def reset(self, why: str, restarted: bool) -> None:
        self.resets.append(why)


@pytest.mark.peer
def test_vllms_publisher_is_followed() -> None:
    """Of vLLM's own publisher a late feed gets every batch, though its replay drops what is beyond
    the queue of its socket."""
    theirs: Any = vllms_events()
    from moonserve.live.kvevents.subscriber import EventFeed
    from moonserve.live.kvevents.wire import EventAddress

    publisher = theirs.ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv")
    at = [s.last_endpoint.decode() for s in (publisher._pub, publisher._replay)]

    def publish(hash: int) -> None:
        event = theirs.BlockStored([hash], None, [hash] * 32, 32, None, "GPU", None)
        publisher.publish(theirs.KVEventBatch(ts=float(hash), events=[event]))

    async def run() -> None:
        for hash in range(BATCHES):
            publish(hash)
        sink = Counting()
        feed = EventFeed(EventAddress(*at, "kv"), sink, replay_s=2.0)
        await feed.start()
        async with asyncio.timeout(60):
            while len(sink.hashes) < BATCHES:
                await asyncio.sleep(0.05)
            publish(BATCHES)
            while len(sink.hashes) <= BATCHES:
                await asyncio.sleep(0.05)
        await feed.close()
        assert sink.hashes == [*range(BATCHES + 1)]
        assert sink.resets == []
        assert feed.order.complete

    try:
        asyncio.run(run())
    finally:
        publisher.shutdown()
