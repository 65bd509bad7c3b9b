"""One contract for every way of moving bytes, through the engine: local, shm, tcp, mooncake."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from moonserve.core.errors import TransferFailed
from moonserve.core.store.words import Address
from moonserve.live.transfer.batch import EngineSettings, TransferLost, TransferRequest
from moonserve.live.transfer.engine import TransferEngine
from moonserve.live.transfer.memory import LocalTransport, ShmTransport
from moonserve.live.transfer.ports import Op, Path, Slice, Transport
from moonserve.live.transfer.region import Region, clean_stale
from moonserve.live.transfer.tcp import TcpTransport
from tests.support.segment_owner import SIZE, TOKEN, Owner

FAR = "far:segment"
SLICE = 64 << 10
KINDS = ["local", "shm", "tcp", pytest.param("mooncake", marks=pytest.mark.mooncake)]


@dataclass
class World:
    """An engine, one segment it reaches by one kind of transport, and that segment's memory."""

    kind: str
    engine: TransferEngine
    memory: memoryview
    path: Path
    owner: Owner | None
    """None for local: a segment of this process."""

    def requests(self, op: Op, *pieces: tuple[int, bytes | bytearray]) -> list[TransferRequest]:
        """One request per (offset, memory)."""
        return [TransferRequest(op, memoryview(memory), FAR, offset) for offset, memory in pieces]


@pytest.fixture(scope="module", params=KINDS)
def transport(request: pytest.FixtureRequest) -> tuple[str, Transport]:
    """One of each kind: Mooncake allows no more per process."""
    kind: str = request.param
    if kind == "local":
        return kind, LocalTransport()
    if kind == "shm":
        return kind, ShmTransport()
    if kind == "tcp":
        return kind, TcpTransport(TOKEN, stall_s=1.0)
    from moonserve.live.transfer.mooncake import MooncakeTransport

    return kind, MooncakeTransport()


@pytest.fixture
def world(transport: tuple[str, Transport]) -> Iterator[World]:
    """A new owner with a random pattern in its memory, and a new engine."""
    kind, way = transport
    engine = TransferEngine({kind: way}, EngineSettings(slice_bytes=SLICE))
    if isinstance(way, LocalTransport):
        region = Region.create(SIZE)
        way.adopt(region)
        made = World(kind, engine, region.view, Path(kind, address_of(region)), None)
    else:
        owner = Owner(kind)
        made = World(kind, engine, owner.region.view, owner.path, owner)
    made.memory[:] = random.Random(7).randbytes(SIZE)
    engine.register(FAR, [made.path])
    yield made
    engine.close()
    if made.owner is not None:
        made.owner.stop()
        clean_stale()  # who was killed, or stopped, could not remove its memory itself
    else:
        region.close()


def address_of(region: Region) -> Address:
    """Enough of an address to find the region by."""
    return Address("127.0.0.1", 1, region.name, region.identity)


def soon(seconds: float = 10.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def test_what_is_written_is_there_and_is_read_back(world: World) -> None:
    """Pieces of any size arrive whole, at their place and nowhere else, in both directions."""
    sizes = [1, 63, 4096, SLICE - 1, SLICE + 1, 3 * SLICE + 5, 0, *([7] * 600)]
    before = bytes(world.memory)
    offsets = [sum(sizes[:i]) + 5 for i in range(len(sizes))]
    sent = [os.urandom(size) for size in sizes]
    pieces = list(zip(offsets, sent, strict=True))
    assert world.engine.submit(world.requests("write", *pieces), soon()).wait() == []
    end = offsets[-1] + sizes[-1]
    assert bytes(world.memory) == before[:5] + b"".join(sent) + before[end:]
    got = [bytearray(size) for size in sizes]
    pulled = list(zip(offsets, got, strict=True))
    assert world.engine.submit(world.requests("read", *pulled), soon()).wait() == []
    assert got == sent


def test_one_batch_reads_and_writes(world: World) -> None:
    """A batch may go in both directions, and each request goes in its own."""
    got = bytearray(SLICE * 2)
    batch = [
        TransferRequest("read", memoryview(got), FAR, 0),
        TransferRequest("write", memoryview(b"x" * SLICE), FAR, 2 * SLICE),
    ]
    assert world.engine.submit(batch, soon()).wait() == []
    assert got == world.memory[: 2 * SLICE]
    assert world.memory[2 * SLICE : 3 * SLICE] == b"x" * SLICE


def test_nothing_outside_the_segment_is_reached(world: World) -> None:
    """What leaves the segment by one byte is refused; the rest of the batch arrives."""
    good, bad = bytearray(8), bytearray(8)
    wrong = [-1, SIZE - 7, SIZE, 1 << 62]
    requests = world.requests("read", *((offset, bad) for offset in wrong), (SIZE - 8, good))
    lost = world.engine.submit(requests, soon()).wait()
    assert lost == [TransferLost(i, 0, 8, "refused") for i in range(len(wrong))]
    assert good == world.memory[-8:]
    assert bad == bytes(8)
    before = bytes(world.memory)
    requests = world.requests("write", *((offset, b"!" * 8) for offset in wrong))
    assert len(world.engine.submit(requests, soon()).wait()) == len(wrong)
    assert world.memory == before


def test_another_segment_is_never_taken_for_the_one_meant(world: World) -> None:
    """Where the address is right but the identity is not, nothing is read or written."""
    real = world.path.address
    stale = Address(real.host, real.port, real.region, bytes(16))
    world.engine.register("stale:segment", [Path(world.kind, stale)])
    before = bytes(world.memory)
    got = bytearray(8)
    requests = [
        TransferRequest("read", memoryview(got), "stale:segment", 0),
        TransferRequest("write", memoryview(b"!" * 8), "stale:segment", 0),
    ]
    assert {it.request for it in world.engine.submit(requests, soon()).wait()} == {0, 1}
    assert got == bytes(8)
    assert world.memory == before


def test_the_caller_may_do_a_lane_of_it_itself(world: World) -> None:
    """`transfer` gives the same bytes as `submit`, small and large."""
    for size in (4096, 40 * SLICE):
        got = bytearray(size)
        assert world.engine.transfer("read", FAR, [Slice(3, memoryview(got))], soon()) == [True]
        assert got == world.memory[3 : 3 + size]


@pytest.mark.parametrize("cancel", [True, False])
def test_once_waited_for_nothing_is_written_any_more(world: World, cancel: bool) -> None:
    """A batch that is late or cancelled ends at once; its memory is the caller's from then on."""
    if world.owner is None:
        pytest.skip("one cannot stop one's own process and look")
    warm = bytearray(8)
    assert world.engine.submit(world.requests("read", (0, warm)), soon()).wait() == []
    world.owner.process.send_signal(signal.SIGSTOP)
    got = bytearray(SIZE)
    started = time.monotonic()
    batch = world.engine.submit(world.requests("read", (0, got)), soon(20 if cancel else 0.3))
    if cancel:
        time.sleep(0.1)
        batch.cancel()
    lost = batch.wait()
    assert time.monotonic() - started < 10
    then = bytes(got)
    world.owner.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert got == then
    for start in range(0, SIZE, SLICE):
        if TransferLost(0, start, start + SLICE, "late") not in lost:
            assert then[start : start + SLICE] == world.memory[start : start + SLICE]
    assert bool(lost) == (world.kind not in ("local", "shm"))
    assert world.engine.in_flight_bytes() == 0
    assert world.engine.submit(world.requests("read", (0, warm)), soon()).wait() == []


def test_a_dead_owner_costs_slices_and_no_patience(world: World) -> None:
    """A killed owner's bytes are lost well before the deadline, unless they are mapped here."""
    if world.owner is None:
        pytest.skip("one cannot survive one's own death")
    got = bytearray(SLICE)
    assert world.engine.submit(world.requests("read", (0, got)), soon()).wait() == []
    world.owner.process.kill()
    world.owner.process.wait(10)
    started = time.monotonic()
    for _ in range(5):
        lost = world.engine.submit(world.requests("read", (0, got)), soon(60)).wait()
        assert bool(lost) == (world.kind != "shm")
    assert time.monotonic() - started < 30


def test_many_threads_at_once_get_their_own_bytes(world: World) -> None:
    """Transfers that share lanes do not mix."""
    wrong: list[int] = []

    def pull(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            size = chance.choice([100, SLICE, 5 * SLICE])
            offset = chance.randrange(SIZE - size)
            got = bytearray(size)
            lost = world.engine.submit(world.requests("read", (offset, got)), soon(30)).wait()
            if lost or got != world.memory[offset : offset + size]:
                wrong.append(seed)

    threads = [threading.Thread(target=pull, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_lanes_count_what_they_carried(world: World) -> None:
    """The counters of a segment's lanes add up to what was transferred, and name the path."""
    got = bytearray(5 * SLICE)
    assert world.engine.submit(world.requests("read", (0, got)), soon()).wait() == []
    assert all(world.engine.transfer("write", FAR, [Slice(0, memoryview(b"a" * 10))], soon()))
    stats = world.engine.stats()
    assert sum(it.counters.bytes for it in stats) == 5 * SLICE + 10
    assert sum(it.counters.slices for it in stats) == 6
    assert {it.path.transport for it in stats} == {world.kind}
    assert not any(it.counters.failures or it.on_probation for it in stats)
    assert world.engine.in_flight_bytes() == 0


def test_a_view_is_the_memory_itself(world: World) -> None:
    """On one host a reader sees the segment's bytes in place, read-only; elsewhere it is told."""
    if world.kind not in ("local", "shm"):
        with pytest.raises(TransferFailed, match="not in this host's memory"):
            world.engine.view(FAR, 0, 8)
        return
    view = world.engine.view(FAR, 16, 8)
    world.memory[16:24] = b"in place"
    assert view == b"in place"
    assert view.readonly
    with pytest.raises(TransferFailed, match="are out of segment"):
        world.engine.view(FAR, SIZE - 7, 8)
    world.engine.forget(FAR)
    assert view == b"in place"
    view.release()
