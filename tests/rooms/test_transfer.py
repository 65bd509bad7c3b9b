"""Regions, their clean-up, and the TCP transport: bounds, keys, deadlines, lost peers."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import Address, Card
from moonserve.core.transfer.lanes import LaneTerms
from moonserve.live.transfer import frames, region
from moonserve.live.transfer.batch import EngineSettings
from moonserve.live.transfer.client import Slice, Transfer
from moonserve.live.transfer.metrics import LaneMetrics
from moonserve.live.transfer.ports import Path
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer
from moonserve.live.transfer.tcp import TcpTransport

TOKEN = b"secret"
SIZE = 1 << 20


@pytest.fixture
def memory() -> Iterator[Region]:
    """A region of SIZE bytes with a pattern in it."""
    made = Region.create(SIZE)
    made.view[:] = bytes(range(256)) * (SIZE // 256)
    yield made
    made.close()


@pytest.fixture
def server(memory: Region) -> Iterator[TransferServer]:
    """A server of that region."""
    made = TransferServer(memory, TOKEN)
    yield made
    made.close()


def soon(seconds: float = 5.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_written_is_read_back(memory: Region, server: TransferServer, shared: bool) -> None:
    """Slices of any size and number arrive whole, by shared memory and by TCP."""
    transfer = Transfer(TOKEN, shared_memory=shared)
    address = server.address("127.0.0.1")
    sizes = [1, 63, 4096, 300_000, *([7] * 600)]
    offsets = [sum(sizes[:i]) + 5 for i in range(len(sizes))]
    sent = [os.urandom(size) for size in sizes]
    written = transfer.write(
        address, [Slice(o, memoryview(b)) for o, b in zip(offsets, sent, strict=True)], soon()
    )
    got = [bytearray(size) for size in sizes]
    read = transfer.read(
        address, [Slice(o, memoryview(b)) for o, b in zip(offsets, got, strict=True)], soon()
    )
    assert all(written)
    assert all(read)
    assert got == sent
    assert transfer.is_near(address) == shared
    assert memory.view[5] == sent[0][0]
    transfer.close()


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_outside_the_region_is_reached(server: TransferServer, shared: bool) -> None:
    """A slice that leaves the region by one byte is refused, read or written."""
    transfer = Transfer(TOKEN, shared_memory=shared)
    address = server.address("127.0.0.1")
    for offset in (SIZE - 7, SIZE, 1 << 62):
        assert transfer.read(address, [Slice(offset, memoryview(bytearray(8)))], soon()) == [False]
        assert transfer.write(address, [Slice(offset, memoryview(bytes(8)))], soon()) == [False]
    assert transfer.read(address, [Slice(SIZE - 8, memoryview(bytearray(8)))], soon()) == [True]
    transfer.close()


def test_who_lacks_the_token_gets_nothing(server: TransferServer) -> None:
    """A wrong token is refused before any byte of the segment is sent."""
    transfer = Transfer(b"guess", shared_memory=False)
    got = bytearray(8)
    address = server.address("127.0.0.1")
    assert transfer.read(address, [Slice(8, memoryview(got))], soon()) == [False]
    assert got == bytes(8)


def test_another_region_is_never_taken_for_the_one_meant(server: TransferServer) -> None:
    """A stale identity is refused by shared memory and by TCP, though name and port are right."""
    real = server.address("127.0.0.1")
    stale = Address(real.host, real.port, real.region, bytes(16))
    for shared in (True, False):
        transfer = Transfer(TOKEN, shared_memory=shared)
        assert transfer.write(stale, [Slice(0, memoryview(b"x"))], soon()) == [False]


def test_region_names_are_no_paths(memory: Region) -> None:
    """A name that could lead out of the regions' folder is not opened."""
    assert Region.attach(f"../{memory.path.parent.name}/{memory.name}", memory.identity) is None
    assert Region.attach(memory.name, bytes(16)) is None


def test_a_region_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker starts while the file system of the temporary folder has no room for any file."""
    if not File("/dev/shm").is_dir():
        pytest.skip("this system has no memory file system")

    def full() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    Region.create(4096).close()


def test_stale_regions_are_left_if_no_descriptor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start does not fail because it cannot look for what others left."""

    def none_left(folder: File) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", none_left)
    assert region.clean_stale() == 0


def test_a_pooled_connection_that_died_is_replaced_once(memory: Region) -> None:
    """The peer's TCP server restarting between two reads is not seen by the reader."""
    first = TransferServer(memory, TOKEN)
    transfer = Transfer(TOKEN, shared_memory=False)
    address = first.address("127.0.0.1")
    assert transfer.read(address, [Slice(0, memoryview(bytearray(8)))], soon()) == [True]
    first.close()
    second = TransferServer(memory, TOKEN, port=first.port)
    assert transfer.read(address, [Slice(0, memoryview(bytearray(8)))], soon()) == [True]
    second.close()
    assert transfer.read(address, [Slice(0, memoryview(bytearray(8)))], soon()) == [False]
    transfer.close()


def test_a_silent_peer_costs_no_more_than_the_deadline() -> None:
    """A peer that accepts and never answers: the slice is not there, and the wait is over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], "", bytes(16))
        started = time.monotonic()
        transfer = Transfer(TOKEN)
        assert transfer.read(address, [Slice(0, memoryview(bytearray(8)))], soon(0.2)) == [False]
        assert time.monotonic() - started < 10  # not the system's minutes


def join(server: TransferServer) -> socket.socket:
    """A connection of somebody who knows the token; the server's answer is still to be read."""
    peer = socket.create_connection(("127.0.0.1", server.port), 5)
    nonce = peer.recv(40, socket.MSG_WAITALL)[8:]
    identity = server.address("").identity
    peer.sendall(identity + frames.proof(TOKEN, nonce, identity))
    return peer


def test_members_are_bounded(memory: Region) -> None:
    """Over the bound, a member is turned away at once; when another leaves, there is room again."""
    server = TransferServer(memory, TOKEN, max_connections=2)
    peers = [join(server)]
    assert peers[0].recv(1) == bytes([frames.OK])
    peers += [join(server)]
    assert peers[1].recv(1) == bytes([frames.OK])
    peers += [join(server)]
    assert peers[2].recv(1) == bytes([frames.REFUSED])
    for peer in peers:
        peer.close()
    transfer = Transfer(TOKEN, shared_memory=False)
    deadline = soon()
    one = [Slice(0, memoryview(bytearray(8)))]
    while not transfer.read(server.address("127.0.0.1"), one, soon())[0]:
        assert time.monotonic() < deadline
    transfer.close()
    server.close()


def test_strangers_take_no_members_place(memory: Region) -> None:
    """However many connect and say nothing, who knows the token is served at once."""
    server = TransferServer(memory, TOKEN, max_connections=2)
    strangers = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(100)]
    transfer = Transfer(TOKEN, shared_memory=False)
    one = [Slice(0, memoryview(bytearray(8)))]
    assert transfer.read(server.address("127.0.0.1"), one, soon()) == [True]
    assert len(server._strangers) <= 64
    transfer.close()
    server.close()
    for stranger in strangers:
        stranger.close()


def test_an_overheard_proof_opens_nothing(server: TransferServer) -> None:
    """What showed the token on one connection is refused on the next: the nonce is another."""
    identity = server.address("").identity
    with socket.create_connection(("127.0.0.1", server.port), 5) as first:
        said = identity + frames.proof(TOKEN, first.recv(40, socket.MSG_WAITALL)[8:], identity)
        first.sendall(said)
        assert first.recv(1) == bytes([frames.OK])
    with socket.create_connection(("127.0.0.1", server.port), 5) as second:
        second.recv(40, socket.MSG_WAITALL)
        second.sendall(said)
        assert second.recv(1) == bytes([frames.REFUSED])


def test_out_of_threads_turns_one_peer_away(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, that peer is cut, leaves nothing, and the next is served."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kv-serve":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection(("127.0.0.1", server.port), 5) as peer:
            assert peer.recv(1) == b""
    assert server._open == {}
    transfer = Transfer(TOKEN, shared_memory=False)
    one = [Slice(0, memoryview(bytearray(8)))]
    assert transfer.read(server.address("127.0.0.1"), one, soon()) == [True]
    transfer.close()


@pytest.mark.parametrize("frame", [b"\x07\x01\x00", b"\x01\x00\x00", b"\x01\xff\xff"])
def test_a_malformed_frame_ends_the_connection(server: TransferServer, frame: bytes) -> None:
    """Unknown operations and counts out of bounds are never answered."""
    link = TcpTransport(TOKEN).open(Path("tcp", server.address("127.0.0.1")))
    done = [False]
    link.run("read", [Slice(0, memoryview(bytearray(8)))], soon(), done)
    assert done == [True]
    assert link._sock is not None
    link._sock.sendall(frame.ljust(frames.LEAST, b"\0"))
    link._sock.settimeout(5)
    assert link._sock.recv(1) == b""
    link.close()


def test_no_room_is_said_with_its_remedy() -> None:
    """A region larger than the machine's memory is a clear error, and leaves nothing behind."""
    with pytest.raises(ConfigError, match=r"segment_bytes: there are no .* use a smaller segment"):
        Region.create(1 << 60)
    assert not [path for path in region._ours() if f"-{os.getpid()}-" in path.name]


def test_a_segment_that_is_not_in_shared_memory_is_logged(
    tmp_path: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the best folder has no room, the log names the folder that is used, and the remedy."""
    monkeypatch.setattr(region, "folders", lambda: [File("/proc"), tmp_path])
    Region.create(4096).close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"is in {tmp_path}" in record.getMessage()
    assert "/proc has 0 bytes free" in record.getMessage()
    assert "--shm-size" in record.getMessage()


def test_a_region_of_another_user_is_not_mapped(
    memory: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could shorten it, which would end this process; the bytes then come by TCP."""
    if os.geteuid() == 0:
        os.chown(memory.path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert Region.attach(memory.name, memory.identity) is None
    if os.geteuid() == 0:
        os.chown(memory.path, 0, -1)
        other = Region.attach(memory.name, memory.identity)
        assert other is not None
        other.close()


def test_a_closed_region_leaves_no_file(memory: Region) -> None:
    """Close unlinks, also while a reader still holds a slice; that slice stays readable."""
    other = Region.create(4096)
    held = other.view[:4]
    held[:] = b"live"
    other.close()
    other.close()
    assert not other.path.exists()
    assert bytes(held) == b"live"
    assert memory.path.exists()


def test_only_dead_owners_regions_are_removed(memory: Region) -> None:
    """A region is removed at the next start once its owner is killed, never while it lives."""
    code = (
        "from moonserve.live.transfer.region import Region; import time;"
        "r = Region.create(4096); print(r.path, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = File(owner.stdout.readline().strip())
    region.clean_stale()
    assert path.exists()
    owner.kill()
    owner.wait(10)
    assert path.exists()
    Region.create(4096).close()
    assert not path.exists()
    assert memory.path.exists()


def test_forgetting_an_address_keeps_copies_in_flight_safe(
    memory: Region, server: TransferServer
) -> None:
    """After `retain` without it, a segment is no longer mapped, and can be reached anew."""
    transfer = Transfer(TOKEN)
    address = server.address("127.0.0.1")
    got = bytearray(4)
    assert transfer.read(address, [Slice(0, memoryview(got))], soon()) == [True]
    transfer.retain([])
    assert not transfer.is_near(address)
    assert transfer.read(address, [Slice(4, memoryview(got))], soon()) == [True]
    assert bytes(got) == bytes(memory.view[4:8])


def test_nothing_is_written_past_the_deadline(memory: Region, server: TransferServer) -> None:
    """A put that waited too long for a thread: its extent may be another's, in memory too."""
    transfer = Transfer(TOKEN)
    transfer.adopt(memory)
    address = server.address("127.0.0.1")
    assert transfer.write(address, [Slice(0, memoryview(b"first"))], soon()) == [True]
    assert transfer.write(address, [Slice(0, memoryview(b"later"))], soon(-0.001)) == [False]
    assert bytes(memory.view[:5]) == b"first"
    into = bytearray(5)  # reading late does no harm: the caller waits
    assert transfer.read(address, [Slice(0, memoryview(into))], soon(-0.001)) == [True]
    transfer.close()


def test_late_bytes_of_a_write_that_was_given_up_touch_nothing(
    memory: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that stalls takes none of what it finds when it goes on: the extent is another's."""
    go = threading.Event()
    receive = frames.Channel.recv_all

    def stalled(*args: Any, **how: Any) -> None:
        assert not how or go.wait(5)
        receive(*args, **how)

    monkeypatch.setattr(frames.Channel, "recv_all", stalled)
    server = TransferServer(memory, TOKEN)
    transfer = Transfer(TOKEN, shared_memory=False)
    late = [Slice(0, memoryview(b"late" * 25_000))]
    assert transfer.write(server.address("127.0.0.1"), late, soon(0.2)) == [False]
    go.set()
    while server._open:
        time.sleep(0.001)
    assert memory.view[:256] == bytes(range(256))
    transfer.close()
    server.close()


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_a_host_that_is_no_name_is_a_lost_peer(host: str) -> None:
    """An owner that advertises nonsense costs its readers a miss, not an error."""
    transfer = Transfer(TOKEN)
    address = Address(host, 80, "", b"i" * 16)
    assert transfer.read(address, [Slice(0, memoryview(bytearray(5)))], soon()) == [False]
    transfer.close()


def test_a_peer_is_reached_by_tcp_where_mooncake_is_not_offered_or_fails(memory: Region) -> None:
    """With Mooncake's engine on both sides all goes by it, and by TCP once that breaks off; a peer
    that offers none is reached by TCP alone.
    """
    server, engine = TransferServer(memory, TOKEN), TransferServer(memory, TOKEN)
    plain = server.address("127.0.0.1")
    both = msgspec.structs.replace(plain, mooncake=engine.address("127.0.0.1"), location="n:both")
    settings = EngineSettings(slice_bytes=4096, terms=LaneTerms(spread_bytes=4096))

    def reading(address: Address) -> set[str]:
        stand_in: Any = TcpTransport(TOKEN)  # the contract of transports has the real one
        transfer = Transfer(TOKEN, shared_memory=False, settings=settings, mooncake=stand_in)
        got = bytearray(SIZE)
        for _ in range(3):
            assert transfer.read(address, [Slice(0, memoryview(got))], soon()) == [True]
            assert got == memory.view
        stats = transfer.stats()
        transfer.close()
        return {it.path.transport for it in stats if it.counters.bytes}

    assert reading(both) == {"mooncake"}
    assert reading(plain) == {"tcp"}
    engine.close()
    assert reading(both) == {"tcp"}
    server.close()


def spread(memory: Region, *own: Card) -> dict[str, int]:
    """Read all of a segment at two cards, from these of our own: the bytes by host."""
    server = TransferServer(memory, TOKEN, also=["127.0.0.2"])
    cards = (Card("127.0.0.1", "red"), Card("127.0.0.2", "blue"))
    address = msgspec.structs.replace(server.address("elsewhere"), cards=cards, location="n:s")
    settings = EngineSettings(slice_bytes=4096, terms=LaneTerms(spread_bytes=4096))
    transfer = Transfer(TOKEN, shared_memory=False, settings=settings, cards=own)
    got = [bytearray(SIZE)] if not own else [bytearray(4096)]
    assert all(transfer.read(address, [Slice(0, memoryview(it)) for it in got], soon()))
    stats = transfer.stats()
    assert {it.location for it in stats} == {"n:s"}
    transfer.close()
    server.close()
    return {it.path.address.host: it.counters.bytes for it in stats}


@pytest.mark.skipif(sys.platform == "darwin", reason="there, 127.0.0.2 has to be set up first")
def test_bytes_travel_by_all_cards_of_a_peer_and_by_those_of_our_rail_first(
    memory: Region,
) -> None:
    """Each address of an owner has its lanes; which is nearer is what the rails say."""
    assert all(spread(memory).values())
    assert spread(memory, Card("127.0.0.1", "blue")) == {"127.0.0.1": 0, "127.0.0.2": 4096}
    assert spread(memory, Card("127.0.0.1", "red")) == {"127.0.0.1": 4096, "127.0.0.2": 0}


@pytest.mark.skipif(sys.platform == "darwin", reason="there, 127.0.0.2 has to be set up first")
def test_any_port_is_one_that_is_free_at_all_cards(
    memory: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system gives at the first may be taken at the second; a port asked for is that."""
    listen = socket.create_server
    with listen(("127.0.0.2", 0)) as theirs:
        taken = theirs.getsockname()[1]
        given = iter([taken])

        def create(at: tuple[str, int], **more: object) -> socket.socket:
            return listen((at[0], at[1] or next(given, 0)), **more)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "create_server", create)
        server = TransferServer(memory, TOKEN, also=["127.0.0.2"])
        server.close()
        assert server.port != taken
        with pytest.raises(OSError, match="in use"):
            TransferServer(memory, TOKEN, port=taken, also=["127.0.0.2"])
        listen(("127.0.0.1", taken)).close()


def test_lanes_are_told_of_in_bounded_numbers(memory: Region) -> None:
    """Prometheus reads each lane's counters by peer; peers past the bound are one."""
    server = TransferServer(memory, TOKEN)
    transfer = Transfer(TOKEN)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LaneMetrics(transfer.stats))
    for number in range(70):
        named = msgspec.structs.replace(
            server.address("127.0.0.1"),
            identity=number.to_bytes(16, "big"),
            location=f"n:s{number}",
        )
        transfer.read(named, [Slice(0, memoryview(bytearray(8)))], soon())
    near = msgspec.structs.replace(server.address("127.0.0.1"), location="n:near")
    assert transfer.read(near, [Slice(0, memoryview(bytearray(8)))], soon()) == [True]
    page = generate_latest(registry).decode()
    labels = 'lane="0",peer="n:s0",transport="tcp"'
    assert f'moonserve_transfer_failures_total{{host="127.0.0.1",{labels}}}' in page
    assert (
        'moonserve_transfer_bytes_total{host="",lane="",peer="other",transport="shm"} 8.0' in page
    )
    assert f'moonserve_transfer_lane_healthy{{host="127.0.0.1",{labels}}} 0.0' in page
    rows = [it for it in page.splitlines() if it.startswith("moonserve_transfer_bytes_total{")]
    assert len(rows) == 64 + 2
    transfer.close()
    server.close()


def test_a_resolver_that_hangs_costs_no_more_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slice is not there, the wait is over, and one thread at most is left behind."""
    answer, asked = threading.Event(), []

    def hang(host: str, *args: object, flags: int = 0, **kwargs: object) -> None:
        if not flags:
            asked.append(host)
            answer.wait(30)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    transfer = Transfer(TOKEN, shared_memory=False)
    address = Address("owner.example", 80, "", b"i" * 16)
    started = time.monotonic()
    for _ in range(2):
        assert transfer.read(address, [Slice(0, memoryview(bytearray(5)))], soon(0.1)) == [False]
    assert time.monotonic() - started < 10
    assert len(asked) <= transfer.engine.settings.lanes  # a lookup that hangs is not asked again
    answer.set()
    transfer.close()


def test_two_threads_that_meet_a_segment_first_register_it_once(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second would cut off what the first has begun to read."""
    transfer = Transfer(TOKEN, shared_memory=False)
    register, met = transfer.engine.register, []

    def slow(location: str, paths: list[Path]) -> None:
        met.append(location)
        time.sleep(0.1)
        register(location, paths)

    monkeypatch.setattr(transfer.engine, "register", slow)
    slices = [Slice(0, memoryview(bytearray(5)))]
    args = (server.address("127.0.0.1"), slices, soon())
    threads = [threading.Thread(target=transfer.read, args=args) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.close()
    assert len(met) == 1
