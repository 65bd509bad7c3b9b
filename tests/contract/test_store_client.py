"""StoreClient and its master from inside: segments, beats, tickets, ledgers, calls.

test_kvstore.py has what every KVStore must do.
"""

import asyncio
import gc
import os
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest, ConfigError, DeadlineExceeded
from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.store.words import Card, Terms
from moonserve.core.units import LeaseId, SegmentId
from moonserve.live.store import wire
from moonserve.live.store.admin import ledgers
from moonserve.live.store.objects import Objects
from moonserve.live.store.settings import StoreTimes
from moonserve.live.transfer import region
from tests.support.pools import LEASE, ROOM, Pool, blocks, key, read_all

KINDS = ["embedded", "shm", "tcp"]


@asynccontextmanager
async def pool(kind: str, terms: Terms) -> AsyncIterator[Pool]:
    """A running pool."""
    made = Pool(kind, terms)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def run(kind: str, test: Callable[[Pool], Awaitable[None]], terms: Terms = Terms()) -> None:  # noqa: B008
    """Run a test against a pool of this kind."""

    async def body() -> None:
        async with pool(kind, terms) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves shared memory, or a warning about an unclosed resource."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield
        gc.collect()
    assert not [path for path in region._ours() if f"-{os.getpid()}-" in path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_corrupt_bytes_are_never_returned(kind: str) -> None:
    """One flipped bit: the read ends before that object, which is dropped and can be put again."""

    async def test(it: Pool) -> None:
        items = blocks(5000, 5000, 5000)
        await it.writer.put(items, None)
        found = it.service.master.locate(key(1))
        assert found is not None
        it.writer.owners[0].region.view[found.replicas[0].offset + 4999] ^= 1
        assert await read_all(it.reader, [k for k, _ in items]) == [bytes(items[0][1])]
        assert it.service.master.locate(key(1)) is None
        assert await it.writer.put(items, None) == 3
        assert await read_all(it.reader, [k for k, _ in items]) == [bytes(m) for _, m in items]

    run(kind, test)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extent_reused_under_a_reader_is_noticed(kind: str) -> None:
    """After its lease ran out, an object may be overwritten; its late reader gets nothing."""

    async def test(it: Pool) -> None:
        await it.writer.put(blocks(ROOM), None)
        found = await it.reader.find([key(0)], LEASE)
        it.now_us += Terms().lease_ttl_us
        it.service.master.beat(it.now_us, SegmentId("w"), it.writer.settings.epoch)
        it.service.reap()
        assert await it.writer.put([(key(1), memoryview(bytes(ROOM)))], None) == 1
        assert await it.reader.read(found, [memoryview(bytearray(ROOM))]) == 0
        assert it.service.master.locate(key(1)) is not None

    run(kind, test)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_put_goes_to_the_preferred_segment(kind: str) -> None:
    """`near` names the segment; if it is full or absent, the put uses another."""

    async def test(it: Pool) -> None:
        items = blocks(3000, 3000, 3000)
        for near, item in zip(("r", "r", "gone"), items, strict=True):
            assert await it.writer.put([item], None, None, SegmentId(near)) == 1
        places = [it.service.master.locate(k) for k, _ in items]
        assert [p.replicas[0].segment for p in places if p is not None] == ["r", "w", "w"]
        assert await read_all(it.reader, [k for k, _ in items]) == [bytes(m) for _, m in items]

    run(kind, test)


@pytest.mark.parametrize("kind", KINDS)
def test_half_written_objects_are_never_seen(kind: str) -> None:
    """Until the put has ended, others find nothing; a cancelled put leaves no ticket."""

    async def test(it: Pool) -> None:
        it.hold = asyncio.Event()
        putting = asyncio.create_task(it.writer.put(blocks(5000), None))
        while it.service.master.stats().pending_puts == 0:
            await asyncio.sleep(0)
        assert await it.reader.find([key(0)], LEASE) == []
        putting.cancel()
        it.hold.set()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert it.service.master.stats().pending_puts == 0

    run(kind, test)


def test_a_cancelled_read_ends_when_no_thread_writes_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caller may reuse the buffers then."""

    async def test(it: Pool) -> None:
        items = blocks(5000)
        await it.writer.put(items, None)
        found = await it.reader.find([key(0)], LEASE)
        gate, begun, read = threading.Event(), threading.Event(), it.reader.transfer.read

        def slow(*args: Any) -> list[bool]:
            begun.set()
            gate.wait(5)
            return read(*args)

        monkeypatch.setattr(it.reader.transfer, "read", slow)
        into = memoryview(bytearray(5000))
        reading = asyncio.create_task(it.reader.read(found, [into]))
        await asyncio.to_thread(begun.wait)
        reading.cancel()
        await asyncio.sleep(0.02)
        assert not reading.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert into == items[0][1]

    run("tcp", test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_master_out_of_reach_is_an_empty_pool(kind: str) -> None:
    """No call raises; when a new master comes, the segment is mounted again and works."""

    async def test(it: Pool) -> None:
        items = blocks(5000)
        await it.writer.put(items, None)
        it.is_down = True
        assert await it.reader.find([key(0)], LEASE) == []
        assert await it.writer.put(items, None) == 0
        await it.reader.release(LEASE)
        it.is_down = False
        await it.come_back()
        assert await it.reader.find([key(0)], LEASE) == []
        assert await it.writer.put(items, None) == 1
        assert await read_all(it.reader, [key(0)]) == [bytes(items[0][1])]

    run(kind, test)


@pytest.mark.parametrize("kind", KINDS)
def test_ledgers_return_to_zero(kind: str) -> None:
    """After concurrent puts and reads and their releases: no lease, no pending put, equal bytes."""

    async def test(it: Pool) -> None:
        async def one(number: int) -> None:
            lease = LeaseId(f"r{number}")
            items = blocks(*[3000] * (number % 7 + 1))
            hand = it.writer if number % 2 else it.reader
            await hand.put([(k, m) for k, m in items if k != key(number % 3)], lease)
            await it.reader.find([k for k, _ in items], lease)
            await hand.release(lease)

        await asyncio.gather(*(one(number) for number in range(30)))
        stats = it.service.master.stats()
        assert (stats.leases, stats.pending_puts) == (0, 0)
        for segment in stats.segments:
            assert segment.used_bytes == segment.evictable_bytes == segment.objects * 3008

    run(kind, test)


def test_puts_spill_onto_other_segments_over_tcp() -> None:
    """With its own segment full of leased objects, a worker writes onto another's."""

    async def test(it: Pool) -> None:
        items = blocks(3000, 3000, 3000)
        assert await it.reader.put(items, LEASE) == 3
        homes = [it.service.master.locate(k) for k, _ in items]
        assert [h.replicas[0].segment for h in homes if h] == ["r", "w", "w"]
        assert await read_all(it.writer, [k for k, _ in items]) == [bytes(m) for _, m in items]
        assert await read_all(it.reader, [k for k, _ in items]) == [bytes(m) for _, m in items]

    run("tcp", test)


def test_a_dead_owner_is_a_short_read_within_the_deadline() -> None:
    """The peer's server is gone: the read is short, soon, and raises nothing."""

    async def test(it: Pool) -> None:
        await it.writer.put(blocks(5000), None)
        found = await it.reader.find([key(0)], LEASE)
        it.writer.owners[0].server.close()
        started = time.monotonic()
        assert await it.reader.read(found, [memoryview(bytearray(5000))]) == 0
        assert time.monotonic() - started < 2 * it.reader.settings.transfer_s + 5

    run("tcp", test)


def test_beats_keep_a_segment_and_mount_it_again() -> None:
    """Beats keep a segment alive, and mount it again at a master that forgot it."""

    async def test(it: Pool) -> None:
        it.writer.start_beats()
        it.writer.start_beats()
        await it.come_back()
        while not it.service.master.addresses():
            await asyncio.sleep(0.001)
        it.now_us += it.terms.segment_ttl_us
        for _ in range(20):
            await asyncio.sleep(0.002)
        it.service.reap()
        assert list(it.service.master.addresses()) == ["w"]

    run("embedded", test, Terms(segment_ttl_us=4000))


def test_beats_go_on_after_a_bug(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error in a beat is logged, and the next beat comes all the same."""

    async def test(it: Pool) -> None:
        calls = 0

        def buggy(addresses: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyError("bug")

        monkeypatch.setattr(it.writer.transfer, "retain", buggy)
        it.writer.start_beats()
        while calls < 3:
            await asyncio.sleep(0.001)
        said = [it.getMessage() for it in caplog.records if it.levelname == "CRITICAL"]
        assert said == ["a bug ended the beats of a segment; they start again"]

    run("embedded", test, Terms(segment_ttl_us=4000))


def test_a_bug_in_every_beat_leaves_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beats start again at their own pace, not at once."""

    async def test(it: Pool) -> None:
        calls = 0

        def buggy(addresses: object) -> None:
            nonlocal calls
            calls += 1
            raise KeyError("bug")

        monkeypatch.setattr(it.writer.transfer, "retain", buggy)
        it.writer.start_beats()
        await asyncio.sleep(0.1)
        assert calls == 1

    run("embedded", test)


def test_a_beat_waits_shorter_than_other_calls() -> None:
    """A master that hangs in a beat is asked again within the beat's own deadline."""

    async def test(it: Pool) -> None:
        beats = 0
        other = await it.client("o", times=StoreTimes(beat_call_s=0.01))
        answer = other.link.rpc

        async def slow(op: str, body: bytes, end_s: float) -> bytes:
            nonlocal beats
            if op == "beat":
                beats += 1
                await asyncio.sleep(end_s - asyncio.get_running_loop().time())
                raise DeadlineExceeded("late")
            return await answer(op, body, end_s)

        other.link.rpc = slow
        other.start_beats()
        async with asyncio.timeout(other.settings.call_s - 1):
            while beats < 3:
                await asyncio.sleep(0.001)
        await other.close()

    run("embedded", test, Terms(segment_ttl_us=4000))


def test_closing_leaves_the_pool() -> None:
    """After close, the segment is unmounted, and its removal is among the events."""

    async def test(it: Pool) -> None:
        other = await it.client("o")
        await other.put(blocks(10), None)
        await other.close()
        assert list(it.service.master.addresses()) == ["w"]
        o, epoch = SegmentId("o"), other.settings.epoch
        stored = BlocksStored(o, (key(0),), None, "dram", epoch)
        assert it.service.master.drain_events() == [stored, BlocksCleared(o, "dram", epoch)]

    run("embedded", test)


@pytest.mark.parametrize("epoch", [0, 1 << 60])
def test_of_two_living_segments_of_one_name_the_second_is_refused(epoch: int) -> None:
    """Whichever started later: the error has the address of the first, which goes on as before."""

    async def test(it: Pool) -> None:
        it.writer.start_beats()
        items = blocks(100, 100)
        assert await it.writer.put(items, None) == 2
        at = it.writer.owners[0].mounting.address
        with pytest.raises(ConfigError, match=rf"name: w is held by {at.host}:{at.port}; choose"):
            await it.client("w", epoch=epoch)
        assert await read_all(it.reader, [name for name, _ in items]) == [
            bytes(m) for _, m in items
        ]

    run("embedded", test, Terms(segment_ttl_us=40_000))


def test_a_segment_that_was_killed_is_back_before_it_is_missed() -> None:
    """A restart gets its name back once the dead one has missed its beats."""

    async def test(it: Pool) -> None:
        dead = it.writer.owners[0].mounting.address
        starting = asyncio.create_task(it.client("w"))
        await asyncio.sleep(0.05)
        assert it.service.master.addresses() == {"w": dead}
        it.now_us += 20_000
        again = await starting
        assert it.service.master.addresses() == {"w": again.owners[0].mounting.address}
        await again.close()

    run("embedded", test, Terms(segment_ttl_us=40_000))


def test_a_listener_that_cannot_be_is_a_clear_error() -> None:
    """A port in use, or a card of another machine: the error names the setting and the address, and
    no memory is left behind."""

    async def test(it: Pool) -> None:
        with pytest.raises(ConfigError, match=r"listen: .* is in use; choose"):
            await it.client("o", port=it.writer.owners[0].mounting.address.port)
        with pytest.raises(ConfigError, match=r"card: cannot listen on 192.0.2.1:0: "):
            await it.client("o", cards=(Card("127.0.0.1"), Card("192.0.2.1", "red")))

    run("embedded", test)


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("steal", b""),
        ("find", b""),
        ("find", b"\xff\x00"),
        ("find", msgspec.msgpack.encode([[b""], "lease"])),
        ("find", msgspec.msgpack.encode([[bytes(32)] * (wire.MAX_BATCH + 1), "lease"])),
        ("find", msgspec.msgpack.encode([[bytes(32)], ""])),
        ("put_start", msgspec.msgpack.encode(["w", [[bytes(32), 0]], None])),
        ("put_start", msgspec.msgpack.encode(["w", [[bytes(32), 1 << 40]], None])),
        (
            "put_start",
            msgspec.msgpack.encode(["w", [[bytes(32), 1]], None, None, {"replicas": 0}]),
        ),
        ("mount", msgspec.msgpack.encode([{"id": "w"}])),
        (
            "mount",
            msgspec.msgpack.encode(
                [["w", 1, 0, {"host": "h", "port": 1, "region": "", "identity": b""}]]
            ),
        ),
    ],
)
def test_malformed_calls_are_bad_requests(op: str, body: bytes) -> None:
    """Unknown operations and bodies of the wrong shape are refused at once, changing nothing."""
    service = Pool("embedded").service
    with pytest.raises(BadRequest):
        service.handle(op, body)
    assert ledgers(service.master)["segments"] == []


def test_a_put_under_way_does_not_bring_back_a_segment_that_left() -> None:
    """Closing is the last call that the master receives; the put does not mount again."""

    async def test(it: Pool) -> None:
        other = await it.client("o")
        closing = asyncio.create_task(other.close())
        assert await other.put(blocks(10), None) == 0
        await closing
        assert list(it.service.master.addresses()) == ["w"]

    run("embedded", test)


def test_an_object_put_on_a_namesake_is_not_ours() -> None:
    """A client that lost its name to another start does not count that segment as its own."""

    async def test(it: Pool) -> None:
        silent = await it.client("o")
        it.now_us += 3_000_000
        successor = await it.client("o")
        assert await silent.put(blocks(10), None) == 1
        assert not silent.owners[0].catalogue.held
        await silent.close()
        assert await read_all(successor, [key(0)]) != []
        await successor.close()

    run("embedded", test)


def test_two_getters_of_one_client_lease_apart() -> None:
    """If one releases its lease, the other still holds its own."""

    async def test(it: Pool) -> None:
        await Objects(it.writer).put([(b"k", memoryview(b"x"))])
        leases = []

        async def told(op: str, body: bytes, end_s: float) -> bytes:
            if op == "get":
                leases.append(msgspec.msgpack.decode(body, type=wire.FindCall).lease)
            return await it.rpc(op, body, end_s)

        it.writer.link.rpc = told
        assert await Objects(it.writer).get([b"k"]) == await Objects(it.writer).get([b"k"])
        assert len({*leases}) == 2

    run("embedded", test)


def test_a_cancel_while_memory_is_reserved_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserving much memory takes long; a cancelled open leaves no segment behind."""
    create = region.Region.create
    reserving, go = threading.Event(), threading.Event()

    def slow(size: int) -> region.Region:
        made = create(size)
        reserving.set()
        go.wait(5)
        return made

    async def test(it: Pool) -> None:
        monkeypatch.setattr(region.Region, "create", slow)
        opening = asyncio.create_task(it.client("o"))
        await asyncio.to_thread(reserving.wait, 5)
        opening.cancel()
        asyncio.get_running_loop().call_later(0.05, go.set)
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert list(it.service.master.addresses()) == ["w"]

    run("embedded", test)
