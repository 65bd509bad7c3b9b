"""Owners, link and objects over a master in this process: copies, repair, fail-over, recovery."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import xxhash

from moonserve.core.errors import BadRequest, Recovering, StoreError
from moonserve.core.store.master import Master
from moonserve.core.store.words import Copy, Found, Held, PutOptions, Terms, Ticket
from moonserve.core.units import LeaseId, SegmentId
from moonserve.live.store import operations, wire
from moonserve.live.store.client import StoreClient
from moonserve.live.store.copying import Copier, Fetched, Write
from moonserve.live.store.leaving import hand_on
from moonserve.live.store.link import now_us
from moonserve.live.store.objects import Objects
from moonserve.live.store.server import MasterService
from moonserve.live.store.settings import StoreTimes
from moonserve.live.transfer import region
from tests.support.pools import ROOM, Pool, blocks, key, read_all

TERMS = Terms(segment_ttl_us=40_000)  # beats come every 10 ms; the master's clock stands still
TWICE = PutOptions(replicas=2, blocks=False)


def run(
    test: Callable[[Pool, list[StoreClient]], Awaitable[None]],
    terms: Terms = TERMS,
    kind: str = "shm",
    times: StoreTimes = StoreTimes(),  # noqa: B008 - frozen
) -> None:
    """Run a test with three members that beat."""

    async def body() -> None:
        pool = Pool(kind, terms)
        members = [
            await pool.client(name, transfer_s=1.0, call_s=1.0, times=times) for name in "abc"
        ]
        try:
            for member in members:
                member.start_beats()
            await test(pool, members)
        finally:
            for member in members:
                await member.close()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert not [path for path in region._ours() if f"-{os.getpid()}-" in path.name]


def places(pool: Pool, name: bytes) -> list[str]:
    """The segments on which an object is stored."""
    found = pool.service.master.locate(name)
    return [] if found is None else [it.segment for it in found.replicas]


async def until(true: Callable[[], object]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.002)


async def drop(pool: Pool, name: str, members: list[StoreClient]) -> None:
    """Let the master drop a segment: its owner is gone, the others beat."""
    (gone,) = [it for it in members if it.settings.segment == name]
    for owner in gone.owners:
        await owner.stop_beats()
        owner.server.close()
    others = [it.settings.segment for it in members if it is not gone]
    pool.now_us += TERMS.segment_ttl_us

    def beats(name: SegmentId) -> int:
        holder = pool.service.master.holder(name)
        assert holder is not None
        return holder.beats

    before = {name: beats(name) for name in others}
    await until(lambda: all(beats(name) > before[name] for name in others))
    pool.service.reap()
    assert name not in pool.service.master.addresses()


def test_a_second_replica_is_made_and_serves_alone() -> None:
    """replicas=2: the copy appears by itself, and is read when the first owner is gone."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        a, b, _ = members
        data = os.urandom(70_000)
        await Objects(a).put([(b"thing", memoryview(data))], TWICE)
        await until(lambda: len(places(pool, b"thing")) == 2)
        assert places(pool, b"thing")[0] == "a"
        members[0].owners[0].server.close()
        (got,) = await Objects(b).get([b"thing"])
        assert got == data
        found = await b.get([b"thing"], LeaseId("x"))
        into = [memoryview(bytearray(70_000))]
        assert await b.read([it for it in found if it], into) == 1
        assert into[0] == data

    run(test, kind="tcp")


@pytest.mark.parametrize(
    ("rack", "node", "nearest"), [("y", "", "b"), ("x", "", "a"), ("x", "n", "b")]
)
def test_the_nearest_replica_is_read(rack: str, node: str, nearest: str) -> None:
    """A replica on the same node before one in the same rack before others."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        near = {
            "a": await pool.client("a2", rack="x"),
            "b": await pool.client("b2", rack="y", node="n"),
        }
        reader = await pool.client("reader", room=0, rack=rack, node=node)
        for member in near.values():
            member.start_beats()
        options = PutOptions(replicas=5, blocks=False)
        await Objects(near["a"]).put([(b"thing", memoryview(b"x" * 5000))], options)
        await until(lambda: len(places(pool, b"thing")) == 5)
        assert await Objects(reader).get([b"thing"]) == [b"x" * 5000]
        (used,) = reader.transfer.stats()
        assert used.location.endswith(f":{nearest}2")
        for member in (reader, *near.values()):
            await member.close()

    run(test, kind="tcp")


def test_what_a_lost_segment_leaves_is_copied_again() -> None:
    """Repair: the segment is dropped, and soon its objects have as many replicas as wanted."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        items = [(bytes([n]), memoryview(os.urandom(3000))) for n in range(20)]
        await Objects(members[0]).put(items, TWICE)
        names = [name for name, _ in items]
        await until(lambda: all(len(places(pool, name)) == 2 for name in names))
        await drop(pool, "a", members)
        assert all(len(places(pool, name)) == 1 for name in names)
        await until(lambda: all(sorted(places(pool, name)) == ["b", "c"] for name in names))
        got = await Objects(members[1]).get(names)
        assert got == [bytes(memory) for _, memory in items]

    run(test)


def test_a_corrupt_source_is_never_copied() -> None:
    """A copy whose bytes are not what was put becomes no replica; the source is dropped."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        await Objects(members[0]).put([(b"k", memoryview(bytes(5000)))], PutOptions(blocks=False))
        found = pool.service.master.locate(b"k")
        assert found is not None
        members[0].owners[0].region.view[found.replicas[0].offset] ^= 1
        assert await members[0].drain(SegmentId("a"))
        await until(lambda: pool.service.master.locate(b"k") is None)
        assert pool.service.master.stats().pending_copies == 0

    run(test)


def test_one_corrupt_replica_is_dropped_and_mended() -> None:
    """A reader gets the bytes from the other replica; the bad one is replaced."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        data = os.urandom(5000)
        await Objects(members[0]).put([(b"k", memoryview(data))], TWICE)
        await until(lambda: len(places(pool, b"k")) == 2)
        found = pool.service.master.locate(b"k")
        assert found is not None
        members[0].owners[0].region.view[found.replicas[0].offset] ^= 1
        assert await Objects(members[0]).get([b"k"]) == [data]
        pool.service.reap()
        await until(lambda: len(places(pool, b"k")) == 2)
        for member in members:
            assert await Objects(member).get([b"k"]) == [data]

    run(test)


def test_a_drained_segment_is_empty_and_nothing_is_lost() -> None:
    """drain: its objects move to other segments, and the owner may leave."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        items = blocks(*[4000] * 50)
        assert await members[0].put(items, None) == 50
        assert not await members[1].drain(SegmentId("nobody"))
        assert await members[1].drain(SegmentId("a"))
        await until(lambda: pool.service.master.stats().segments[0].objects == 0)
        await until(lambda: not members[0].owners[0].catalogue.held)
        assert all("a" not in places(pool, name) for name, _ in items)
        assert await read_all(members[2], [name for name, _ in items]) == [
            bytes(memory) for _, memory in items
        ]

    run(test)


@pytest.mark.parametrize("ends", ["one", "all", "master"])
def test_a_member_that_leaves_moves_its_objects(
    ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They move to members that stay; if all leave or the master is gone, it does not wait for
    long."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        items = [(bytes([n]), memoryview(os.urandom(3000))) for n in range(20)]
        await Objects(members[0]).put(items)
        pool.is_down = ends == "master"
        leaving = members if ends == "all" else members[:1]
        async with asyncio.timeout(5):
            await asyncio.gather(*(hand_on(member, 60) for member in leaving))
        held = {name for key, _ in items for name in places(pool, key)}
        if ends != "all":  # some may have been copied before the others left too
            assert held <= ({"b", "c"} if ends == "one" else {"a"})
        assert all(places(pool, key) for key, _ in items)
        said = [it.getMessage() for it in caplog.records if it.name.endswith("leaving")]
        assert bool(said) == (ends == "all")
        pool.is_down = False

    with caplog.at_level("INFO"):
        run(test, times=StoreTimes(stall_s=0.1))


def test_a_member_that_leaves_logs_that_time_ran_out(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the seconds and the number of objects left, if no member takes them in time."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        await Objects(members[0]).put([(b"k", memoryview(os.urandom(3000)))])
        for member in members[1:]:
            await member.drain(member.owners[0].mounting.id)
        await hand_on(members[0], 0.2)

    run(test)
    said = [it.getMessage() for it in caplog.records if it.name.endswith("leaving")]
    assert said == ["left with 1 objects: 0.2 s were too short"]


def test_a_master_that_restarts_knows_all_that_was_put() -> None:
    """Owners' contents, and claims of puts that had just ended, bring every object back."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        old = blocks(*[3000] * 30)
        assert await members[0].put(old, None) == 30
        await until(lambda: len(members[0].owners[0].catalogue.held) == 30)
        new = blocks(*[3000] * 5, first=30)
        gone = blocks(*[3000] * 5, first=35)
        assert await members[1].put(gone, None, new[-1][0]) == 5
        removals = await members[0].remove([name for name, _ in gone])
        assert [it.outcome for it in removals] == ["removed"] * 5
        assert await members[1].put(new, None, old[-1][0]) == 5
        pool.service = MasterService(
            Master(TERMS, 10**15, recovering_until_us=pool.now_us + 1), lambda: pool.now_us
        )
        names = [name for name, _ in old + new + gone]
        asking = asyncio.gather(read_all(members[2], names))
        await until(lambda: len(pool.service.master.addresses()) == 3)
        assert not asking.done()
        pool.now_us += 1
        (got,) = await asking
        assert got == [bytes(memory) for _, memory in old + new]

    run(test)


@pytest.mark.parametrize(("failures", "said"), [(2, 0), (3, 1), (6, 1)])
def test_one_failed_beat_is_not_logged(
    failures: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """If the master stays away, one warning is logged; one lost connection logs none."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        left, answered = failures, 0
        rpc = members[0].link.rpc

        async def failing(op: str, body: bytes, end_s: float) -> bytes:
            nonlocal left, answered
            if op == "beat" and left > 0:
                left -= 1
                raise StoreError("away")
            reply = await rpc(op, body, end_s)
            answered += op == "beat"
            return reply

        members[0].link.rpc = failing
        await until(lambda: left == 0 and answered)

    run(test)
    assert [it.levelname for it in caplog.records if "away" in it.message] == ["WARNING"] * said


def test_a_master_that_recovers_too_long_is_a_clear_error() -> None:
    """Within its time a call fails and says why; for blocks the pool looks empty."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        pool.service = MasterService(Master(TERMS, 10**15, 10**15), lambda: pool.now_us)
        with pytest.raises(Recovering, match="still gathers"):
            await members[0].exists([b"k"])
        with pytest.raises(StoreError, match="out of reach: the store's master has started"):
            await Objects(members[0], 0.1).get([b"k"])
        assert await members[0].find([key(0)], LeaseId("x")) == []

    run(test)


def test_what_cannot_be_read_is_a_clear_error() -> None:
    """A single replica on a dead owner: out of reach first, lost once the master drops it."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        await Objects(members[0]).put([(b"k", memoryview(bytes(100)))])
        members[0].owners[0].server.close()
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        with pytest.raises(StoreError, match="6b is out of reach: segment a, which had it, cannot"):
            await Objects(members[1], 0.3).get([b"k"])
        assert loop.time() < asked_s + 2
        reading = asyncio.create_task(Objects(members[1], 5).get([b"k"]))
        await asyncio.sleep(0)
        await drop(pool, "a", members)
        with pytest.raises(StoreError, match="6b is lost: segment a"):
            await reading
        assert await Objects(members[1]).get([b"k", b"never"]) == [None, None]

    run(test, kind="tcp")


@pytest.mark.parametrize("end", ["left", "lost"])
def test_a_get_without_a_reply_leaves_no_lease(end: str) -> None:
    """The master leased the objects, but its reply was lost or its caller was cancelled."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        a = members[0]
        await Objects(a).put([(b"k", memoryview(b"x"))])
        answer, asked = a.link.rpc, asyncio.Event()

        async def deaf(op: str, body: bytes, end_s: float) -> bytes:
            reply = await answer(op, body, end_s)
            if op == "get":
                asked.set()
                if end == "lost":
                    raise StoreError("lost")
                await asyncio.sleep(60)
            return reply

        a.link.rpc = deaf
        getting = asyncio.create_task(Objects(a, most_s=0.05).get([b"k"]))
        await asked.wait()
        assert pool.service.master.stats().leases == 1
        if end == "left":
            getting.cancel()
        with pytest.raises((StoreError, asyncio.CancelledError)):
            await getting
        assert pool.service.master.stats().leases == 0

    run(test)


def test_a_member_that_leaves_drains_no_other_start_of_its_segment() -> None:
    """A member that was taken for dead stops: its successor keeps its objects."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        old, *_ = members
        await old.owners[0].stop_beats()
        pool.now_us += TERMS.segment_ttl_us // 2
        successor = await pool.client("a")
        successor.start_beats()
        await Objects(successor).put([(b"k", memoryview(b"x"))])
        await hand_on(old, 5)
        assert not any(it.draining for it in pool.service.master.stats().segments)
        await successor.close()

    run(test)


def test_no_room_and_no_quota_are_clear_errors() -> None:
    """Full of pinned objects, and over a tenant's quota: refused at once, with numbers."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        objects = Objects(members[0])
        big = memoryview(bytes(1 << 20))
        pinned = PutOptions(blocks=False, pin=True)
        await objects.put([(bytes([n]), big) for n in range(3)], pinned)
        with pytest.raises(StoreError, match="no room for 1048576 bytes"):
            await objects.put([(b"more", big)])
        mine = PutOptions(blocks=False, pin=True, tenant="t")
        with pytest.raises(StoreError, match=r"quota of 1000 bytes.* no room in it for 1 of 2000"):
            await objects.put([(b"t", memoryview(bytes(2000)))], mine)
        assert await members[0].pin([bytes([0]), b"none"], False) == [True, False]
        await objects.put([(b"more", big)])
        assert await members[0].exists([bytes([0]), b"more"]) == [False, True]

    run(test, Terms(segment_ttl_us=40_000, quotas={"t": 1000}))


@pytest.mark.parametrize(
    ("items", "options", "field", "says"),
    [
        ([(b"", b"1")], {}, "key", "1 to 256 bytes, not 0"),
        ([(b"k" * 257, b"1")], {}, "key", "1 to 256 bytes, not 257"),
        ([("k", b"1")], {}, "key", "must be bytes, not str"),
        ([(b"k", b"")], {}, "data", "1 to 1073741824 bytes, not 0"),
        ([(b"k", "text")], {}, "data", "must be contiguous bytes, not str"),
        ([(b"k", memoryview(b"1234")[::2])], {}, "data", "contiguous"),
        ([(b"k", b"1")] * 4097, {}, "items", "at most 4096 a call, not 4097"),
        ([(b"k", b"1")], {"replicas": 0}, "replicas", "1 to 8, not 0"),
        ([(b"k", b"1")], {"replicas": -1}, "replicas", "1 to 8, not -1"),
        ([(b"k", b"1")], {"replicas": 9}, "replicas", "1 to 8, not 9"),
        ([(b"k", b"1")], {"replicas": "2"}, "replicas", "Expected `int`"),
        ([(b"k", b"1")], {"tenant": 5}, "tenant", "Expected `str`"),
        ([(b"k", b"1")], {"preferred": "nope"}, "preferred", "no segment 'nope'; mounted"),
    ],
)
def test_what_can_never_be_put_is_refused_at_once(
    items: Any, options: dict[str, Any], field: str, says: str
) -> None:
    """The error names the field and its limit, though the call may take long."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        asked_s = time.monotonic()
        with pytest.raises(BadRequest, match=says) as raised:
            await Objects(members[0], 20.0).put(items, PutOptions(blocks=False, **options))
        assert raised.value.param == field
        if field in ("key", "items"):
            with pytest.raises(BadRequest, match=says):
                await Objects(members[0], 20.0).get([key for key, _ in items])
        assert time.monotonic() < asked_s + 5
        assert pool.service.master.stats().pending_puts == 0

    run(test)


def test_any_buffer_is_put_and_a_preferred_segment_may_have_left() -> None:
    """Buffers of any item size; if the preferred segment is dead, another gets it."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        numbers = memoryview(bytes(range(32))).cast("I")
        await drop(pool, "b", members)
        gone = PutOptions(blocks=False, preferred=SegmentId("b"))
        await Objects(members[0]).put([(b"numbers", numbers)], gone)
        assert await Objects(members[2]).get([b"numbers"]) == [bytes(range(32))]
        assert places(pool, b"numbers") == ["a"]

    run(test)


def test_an_object_larger_than_any_segment_is_a_clear_error() -> None:
    """The error has both sizes; if no segment takes objects, it says that."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        large = memoryview(bytes(ROOM + 1))
        with pytest.raises(StoreError, match=f"no room for {ROOM + 1} bytes: .* has {ROOM}$"):
            await Objects(members[0]).put([(b"k", large)])
        for name in "abc":
            await members[0].drain(SegmentId(name))
        with pytest.raises(StoreError, match="no segment takes objects"):
            await Objects(members[0]).put([(b"k", memoryview(b"1"))])

    run(test)


def test_opening_a_client_without_a_segment_fails_without_a_master() -> None:
    """Opening it fails, not its first use."""

    async def body() -> None:
        pool = Pool("embedded")
        pool.is_down = True
        with pytest.raises(OSError, match="master is down"):
            await pool.client("x", room=0)

    asyncio.run(body())


def test_objects_are_listed_by_prefix_and_removed() -> None:
    """scan returns keys in order, page by page; remove returns the result for each."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        a = members[0]
        items = [(f"x{n}".encode(), memoryview(bytes(n + 1))) for n in range(5)]
        await Objects(a).put([*items, (b"y", memoryview(b"1"))])
        listed: list[Found] = []
        while page := await a.scan(b"x", listed[-1].key if listed else None, 2):
            listed += page
        assert [(it.key, it.size) for it in listed] == [(n, len(m)) for n, m in items]
        await a.get([b"x0"], LeaseId("l"))
        removals = await members[1].remove([b"x0", b"x1", b"z"])
        assert [it.outcome for it in removals] == ["leased", "removed", "missing"]
        assert [it.outcome for it in await a.remove([b"x0"], force=True)] == ["removed"]
        assert await a.evict(SegmentId("a"), 1) > 0

    run(test)


def test_a_client_without_a_segment_forgets_segments_no_longer_named() -> None:
    """Else it would keep the memory of dead owners mapped; a live segment is named again."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        reader = await pool.client("reader", room=0, times=StoreTimes(unnamed_s=0.05))
        await Objects(members[0]).put([(b"k", memoryview(b"x"))])
        for _ in range(2):
            assert await Objects(reader).get([b"k"]) == [b"x"]
            await until(lambda: not reader.link.addresses)
            assert not reader.transfer.engine.locations()
        await reader.close()

    run(test)


@pytest.mark.parametrize("op", ["read", "write"])
def test_segments_that_leave_under_a_copy_are_no_error(op: str) -> None:
    """A beat that omits two segments, while bytes move to or from them, raises nothing."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        a, b, c = members
        data = [os.urandom(5000) for _ in "bc"]
        items = [(name, memoryview(it)) for name, it in zip([b"b", b"c"], data, strict=True)]
        copier = Copier(a.link, a.transfer, ThreadPoolExecutor(1), a.settings)
        work: Coroutine[None, None, object]
        expected: object
        if op == "read":
            for it, item in zip((b, c), items, strict=True):
                await Objects(it).put([item], PutOptions(blocks=False))
            found = [it for it in await a.get([b"b", b"c"], LeaseId("x")) if it]
            assert [it.replicas[0].segment for it in found] == ["b", "c"]
            work = copier.read(found, [memoryview(bytearray(5000)) for _ in found], 1.0)
            expected = Fetched([], [])
        else:
            writes = []
            for it, (name, memory) in zip((b, c), items, strict=True):
                near = PutOptions(preferred=it.settings.segment)
                call = wire.PutStartCall(None, [(name, 5000)], None, None, near)
                started = await a.link.call(operations.PUT_START, call)
                (ticket,) = started.outcomes
                a.link.addresses.update(started.addresses)
                assert isinstance(ticket, Ticket)
                assert ticket.segment == it.settings.segment
                writes.append(Write(ticket, memory))
            work = copier.write(writes, 1.0)
            expected = [xxhash.xxh3_64_intdigest(it) for it in data]
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        a.link.addresses = {}
        assert await task == expected

    run(test)


async def a_copy(members: list[StoreClient], number: int = 0) -> Copy:
    """An order to copy an object from a to b, to a place of its own for each number."""
    a, b, _ = members
    await Objects(a).put([(b"k", memoryview(b"k" * 5000))])
    (found,) = await b.get([b"k"], LeaseId("x"))
    assert found is not None
    id = (1 << 60) + number
    place = (number % 100 + 1) * 8192
    held = Held(b"k", 5000, found.checksum, found.version, id, place, None, PutOptions())
    return Copy(held, found.replicas[0], 60_000_000)


def test_a_copy_that_starts_too_late_writes_nothing() -> None:
    """While it waited for a thread its time ended, and its extent may have been reused."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        (owner,) = members[1].owners
        copy = await a_copy(members)
        for _ in range(members[1].settings.threads):
            members[1]._threads.submit(time.sleep, 0.3)
        owner.take_copies(now_us(), [msgspec.structs.replace(copy, left_us=100_000)])
        await owner.idle()
        assert owner.region.view[copy.held.offset] == 0
        assert b"k" not in owner.catalogue.held

    run(test)


def test_no_segment_is_mounted_while_copies_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new master may reuse their extents; the next beat mounts it once the copies end."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        (owner,) = members[1].owners
        copy = await a_copy(members)
        go = threading.Event()

        def slow(*args: Any) -> list[bool]:
            go.wait(10)
            return [False]

        monkeypatch.setattr(members[1].transfer, "read", slow)
        owner.take_copies(now_us(), [copy])
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="still being copied to"):
            await owner.mount()
        pool.service.master.unmount(SegmentId("b"), owner.mounting.epoch)
        await asyncio.sleep(0.1)
        assert "b" not in pool.service.master.addresses()
        go.set()
        await until(lambda: "b" in pool.service.master.addresses())

    run(test, times=StoreTimes(stop_copies_s=0.02))


def test_a_member_that_leaves_begins_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """More copies are ordered than run at once: the waiting ones are dropped, without an error."""

    async def test(pool: Pool, members: list[StoreClient]) -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        (owner,) = members[1].owners
        copies = [await a_copy(members, number) for number in range(160)]
        read = members[1].transfer.read

        def slow(*args: Any) -> list[bool]:
            time.sleep(0.05)
            return read(*args)

        monkeypatch.setattr(members[1].transfer, "read", slow)
        owner.take_copies(now_us(), copies)
        await members[1].close()
        gc.collect()
        async with asyncio.timeout(0):
            await owner.idle()
        assert not errors

    run(test)
