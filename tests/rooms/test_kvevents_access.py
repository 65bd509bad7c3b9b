"""Who may read KV events, and what one reader may take of a publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import KvBatch
from moonserve.live.kvevents import publisher as publishing_module
from moonserve.live.kvevents.curve import keys_of
from moonserve.live.kvevents.publisher import Publisher, check_readers
from moonserve.live.kvevents.subscriber import EventFeed, Subscriptions
from moonserve.live.kvevents.wire import EventAddress, replay_request
from moonserve.live.tls.authority import init
from tests.support.kvevents import stored
from tests.support.kvsockets import publishing, zmq_context

ANY = "tcp://127.0.0.1:0"
TOKENS = list(range(64))


class Counts:
    """A sink that counts."""

    def __init__(self) -> None:
        self.batches = 0

    def batch(self, batch: KvBatch) -> None:
        self.batches += 1

    def reset(self, why: str, restarted: bool) -> None:
        pass


async def until(true: Callable[[], bool]) -> None:
    """Wait until something holds; fails after 25 seconds."""
    async with asyncio.timeout(25):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(
    events: Publisher, curve: str | None
) -> AsyncIterator[tuple[EventFeed, Counts]]:
    """A feed of this publisher; curve: the folder of its keys, None: in clear."""
    sink = Counts()
    address = EventAddress(events.endpoint, events.replay_endpoint or "", curve=curve is not None)
    with zmq_context() as context:
        feed = EventFeed(address, sink, Subscriptions(context, curve or ""), replay_s=1.0)
        await feed.start()
        try:
            yield feed, sink
        finally:
            await feed.close()


@pytest.mark.parametrize(
    ("endpoint", "encrypted", "open_to_all", "allowed"),
    [
        ("tcp://127.0.0.1:5557", False, False, True),
        ("tcp://[::1]:5557", False, False, True),
        ("tcp://localhost:5557", False, False, True),
        ("ipc:///run/events", False, False, True),
        ("tcp://*:5557", False, False, False),
        ("tcp://0.0.0.0:5557", False, False, False),
        ("tcp://10.0.0.5:5557", False, False, False),
        ("tcp://*:5557", True, False, True),
        ("tcp://*:5557", False, True, True),
    ],
)
def test_events_in_clear_stay_on_this_machine(
    endpoint: str, encrypted: bool, open_to_all: bool, allowed: bool
) -> None:
    """Beyond loopback, events need encryption or the operator's explicit word."""
    if allowed:
        check_readers([endpoint], encrypted, open_to_all)
    else:
        with pytest.raises(ConfigError, match=r"kv_events: tcp://.*--kv-events-open"):
            check_readers(["tcp://127.0.0.1:1", endpoint], encrypted, open_to_all)


def test_only_known_subscribers_read_encrypted_events(tmp_path: Path) -> None:
    """A subscriber with keys in the publisher's folder gets all; others get nothing."""

    async def main() -> None:
        init(tmp_path / "ours")
        init(tmp_path / "theirs")
        ours, theirs = tmp_path / "ours" / "events", tmp_path / "theirs" / "events"
        # They know the publisher's public key, and have a key pair that it does not know.
        (theirs / "publisher.key").write_bytes((ours / "publisher.key").read_bytes())
        curve = keys_of(str(ours), "publisher")
        async with publishing(ANY, ANY, curve=curve) as events:
            events.publish([stored(TOKENS, 16)])
            async with (
                following(events, str(ours)) as (feed, sink),
                following(events, str(theirs)) as (foreign, nothing),
                following(events, None) as (clear, neither),
            ):
                await until(lambda: sink.batches == 1)  # a replay
                assert feed.connected
                events.publish([stored(TOKENS, 16)])
                await until(lambda: sink.batches == 2)
                await asyncio.sleep(0.2)
                assert (nothing.batches, neither.batches) == (0, 0)
                assert not foreign.connected
                assert not clear.connected

    asyncio.run(asyncio.wait_for(main(), 30))


def test_encrypted_addresses_need_keys(tmp_path: Path) -> None:
    """A missing folder or file is an error that names the setting and the remedy."""

    async def main() -> None:
        async with publishing(ANY, ANY) as events:
            with pytest.raises(ConfigError, match="set --kv-events-curve or --tls-dir"):
                async with following(events, ""):
                    pass
        with pytest.raises(ConfigError, match=r"kv_events_curve: cannot read .*tls init"):
            keys_of(str(tmp_path), "publisher")

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_reader_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has one replay at a time, with a bounded queue; others get theirs meanwhile."""
    monkeypatch.setattr(publishing_module, "_QUEUED", 100)

    async def main() -> None:
        async with publishing(ANY, ANY, kept=3_000) as events:
            event = stored(TOKENS * 40, 16)
            for _ in range(3_000):
                events.publish([event])
            with zmq_context() as context, context.socket(zmq.DEALER) as greedy:
                greedy.rcvhwm = 1
                greedy.linger = 0
                assert events.replay_endpoint is not None
                greedy.connect(events.replay_endpoint)
                for _ in range(50):
                    await greedy.send_multipart(replay_request(0))
                await until(lambda: len(events._replays) == 1)
                async with following(events, None) as (_, sink):
                    await until(lambda: sink.batches == 3_000)
                assert len(events._replays) == 1
            await until(lambda: not events._replays)  # the peer is gone

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_kept_and_asked_is_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are kept up to a number of bytes; a request that is too large is not received."""
    monkeypatch.setattr(publishing_module, "_KEPT_BYTES", 20_000)

    async def main() -> None:
        async with publishing(ANY, ANY) as events:
            event = stored(TOKENS * 10, 16)
            for _ in range(100):
                events.publish([event])
            assert sum(len(payload) for _, payload in events._kept) == events._kept_bytes <= 20_000
            assert events._kept[-1][0] == 99
            with zmq_context() as context, context.socket(zmq.DEALER) as large:
                large.linger = 0
                assert events.replay_endpoint is not None
                large.connect(events.replay_endpoint)
                await large.send_multipart([b"", bytes(1 << 10)])
                await until(lambda: "malformed replay request" in caplog.text)
                caplog.clear()
                await large.send_multipart([b"", bytes(1 << 20)])
                async with following(events, None) as (_, sink):
                    await until(lambda: sink.batches > 0)
                await asyncio.sleep(0.2)
                assert "malformed replay request" not in caplog.text

    asyncio.run(asyncio.wait_for(main(), 30))
