"""The engine over scripted lanes and real sockets: retries, deadlines, cancels, back-pressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as File

import pytest

from moonserve.core.errors import ConfigError, DeadlineExceeded, TransferFailed
from moonserve.core.store.words import Address
from moonserve.core.transfer.lanes import LaneTerms
from moonserve.live.tls.authority import init
from moonserve.live.tls.contexts import Tls, TlsFiles
from moonserve.live.transfer.batch import EngineSettings, TransferLost, TransferRequest
from moonserve.live.transfer.engine import TransferEngine
from moonserve.live.transfer.memory import MemoryLink
from moonserve.live.transfer.ports import Op, Path, Slice, parse_location
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer
from moonserve.live.transfer.tcp import TcpTransport
from tests.support.certificates import tls_of

TOKEN = b"secret"
FAR = "far:segment"
PAGE = 1 << 10


def soon(seconds: float = 10.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def path(name: str, distance: int = 0) -> Path:
    """A path of the scripted transport."""
    return Path("scripted", Address(name, 1, "", b""), distance)


class ScriptedLink:
    """A lane over `memory` that first does what its script says."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.link = MemoryLink(script.memory, None)
        self.is_cut = threading.Event()
        self.closed = 0

    def arm(self) -> None:
        """Forget earlier cuts."""
        self.is_cut.clear()

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """Note who carries what, let the script have its say, copy."""
        self.script.carried.append((self.name, [it.offset for it in slices]))
        self.script.act(self, slices, deadline_s, done)
        self.link.run(op, slices, deadline_s, done)

    def cut(self) -> None:
        """Wake whoever hangs in `hang`."""
        self.is_cut.set()

    def close(self) -> None:
        """Count."""
        self.closed += 1

    def hang(self, deadline_s: float) -> None:
        """Be a peer that never answers."""
        if self.is_cut.wait(max(0.0, deadline_s - time.monotonic())):
            raise TransferFailed("cut")
        raise DeadlineExceeded("late")


Act = Callable[[ScriptedLink, Sequence[Slice], float, list[bool]], None]


class Script:
    """A transport whose lanes do as told."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(range(256)) * 1024)
        self.carried: list[tuple[str, list[int]]] = []
        self.links: list[ScriptedLink] = []
        self.act: Act = lambda link, slices, deadline_s, done: None

    def open(self, path: Path) -> ScriptedLink:
        """A new lane, named by the path and a number."""
        before = sum(it.name.startswith(path.address.host) for it in self.links)
        self.links.append(ScriptedLink(f"{path.address.host}{before}", self))
        return self.links[-1]

    def most_lanes(self, path: Path) -> int:
        """Any number."""
        return 99


@pytest.fixture
def script() -> Script:
    """One per test."""
    return Script()


def engine_of(script: Script, *paths: Path, lanes: int = 1, **more: object) -> TransferEngine:
    """An engine with one segment; slices and runs are small, so that several lanes have work."""
    terms = LaneTerms(run_bytes=2 * PAGE, spread_bytes=PAGE, probation_us=60_000_000)
    settings = EngineSettings(lanes=lanes, slice_bytes=PAGE, terms=terms, **more)  # type: ignore[arg-type]
    engine = TransferEngine({"scripted": script}, settings)
    engine.register(FAR, paths)
    return engine


def read(into: bytearray, offset: int = 0) -> list[TransferRequest]:
    """A batch of one."""
    return [TransferRequest("read", memoryview(into), FAR, offset)]


def test_a_broken_lane_costs_no_slice(script: Script) -> None:
    """What fails on one card's lane arrives over another's, and only what had not arrived."""

    def act(
        link: ScriptedLink, slices: Sequence[Slice], deadline_s: float, done: list[bool]
    ) -> None:
        if link.name == "a0":
            link.link.run("read", slices[:1], deadline_s, done)  # one gets through
            raise TransferFailed("reset")

    script.act = act
    engine = engine_of(script, path("a"), path("b"))
    got = bytearray(8 * PAGE)
    assert engine.submit(read(got), soon()).wait() == []
    assert got == script.memory[: 8 * PAGE]
    counters = {it.path.address.host: it for it in engine.stats()}
    assert counters["a"].counters.failures == 2
    assert counters["a"].on_probation
    assert counters["a"].counters.slices == 2
    assert counters["b"].counters.slices == 6
    assert counters["b"].counters.retries == 2
    script.carried.clear()
    assert engine.transfer("read", FAR, [Slice(0, memoryview(got)[:PAGE])], soon()) == [True]
    assert [name for name, _ in script.carried] == ["b0"]
    engine.close()


def test_with_every_lane_broken_the_batch_says_what_is_lost(script: Script) -> None:
    """After the bound of tries slices are lost, each said once, with request and place."""

    def act(
        link: ScriptedLink, slices: Sequence[Slice], deadline_s: float, done: list[bool]
    ) -> None:
        if any(it.offset >= 4 * PAGE for it in slices):
            raise OSError("no route")

    script.act = act
    engine = engine_of(script, path("a"), path("b"), lanes=2)
    one, two = bytearray(100), bytearray(2 * PAGE + 1)
    batch = read(one) + read(two, 4 * PAGE)
    lost = engine.submit(batch, soon()).wait()
    spans = [(it.request, it.start, it.stop) for it in lost]
    assert spans == [(1, 0, PAGE), (1, PAGE, 2 * PAGE), (1, 2 * PAGE, 2 * PAGE + 1)]
    assert {it.why for it in lost} <= {"failed", "no lane"}
    assert one == script.memory[:100]
    assert engine.in_flight_bytes() == 0
    engine.close()


def test_the_nearest_card_is_used_first(script: Script) -> None:
    """A far path carries nothing while a near one is idle."""
    engine = engine_of(script, path("far", 1), path("near"))
    for _ in range(5):
        assert engine.submit(read(bytearray(PAGE)), soon()).wait() == []
        assert engine.transfer("read", FAR, [Slice(0, memoryview(bytearray(9)))], soon()) == [True]
    assert {name for name, _ in script.carried} == {"near0"}
    engine.close()


def test_a_large_batch_uses_every_card_before_any_twice(script: Script) -> None:
    """Lanes of all paths carry at the same time."""
    together = threading.Barrier(3, timeout=5)
    script.act = lambda link, slices, deadline_s, done: together.wait() and None
    engine = engine_of(script, path("a"), path("b"), path("c"), lanes=2)
    got = bytearray(3 * PAGE)
    assert engine.submit(read(got), soon()).wait() == []
    assert sorted(name for name, _ in script.carried) == ["a0", "b0", "c0"]
    engine.close()


def test_a_batch_is_over_at_its_deadline_and_blames_nobody(script: Script) -> None:
    """What hangs and what waits behind it is late; the lane is trusted as before."""
    script.act = lambda link, slices, deadline_s, done: link.hang(deadline_s)
    engine = engine_of(script, path("a"))
    started = time.monotonic()
    lost = engine.submit(read(bytearray(5 * PAGE)), soon(0.2)).wait()
    assert time.monotonic() - started < 5
    assert [it.why for it in lost] == ["late"] * 5
    assert not engine.stats()[0].on_probation
    assert engine.in_flight_bytes() == 0
    engine.close()


def test_a_cancel_cuts_its_own_batch_only(script: Script) -> None:
    """The cancelled batch's lane is cut, and what waited behind it goes on."""
    hung = threading.Event()

    def act(
        link: ScriptedLink, slices: Sequence[Slice], deadline_s: float, done: list[bool]
    ) -> None:
        if slices[0].offset == 0:
            hung.set()
            link.hang(deadline_s)

    script.act = act
    engine = engine_of(script, path("a"))
    first = engine.submit(read(bytearray(PAGE)), soon(60))
    assert hung.wait(5)
    got = bytearray(PAGE)
    second = engine.submit(read(got, PAGE), soon(60))
    first.cancel()
    assert first.wait() == [TransferLost(0, 0, PAGE, "late")]
    assert second.wait() == []
    assert got == script.memory[PAGE : 2 * PAGE]
    first.cancel()
    assert first.wait() == [TransferLost(0, 0, PAGE, "late")]
    assert not engine.stats()[0].on_probation
    engine.close()


def test_a_run_no_thread_has_taken_up_is_taken_back(script: Script) -> None:
    """With all threads busy, a late batch ends in time, and is not carried afterwards."""
    script.act = lambda link, slices, deadline_s, done: link.hang(deadline_s)
    engine = engine_of(script, path("a"), path("b"), threads=1)
    first = engine.submit(read(bytearray(PAGE)), soon(60))
    second = engine.submit(read(bytearray(PAGE), 7 * PAGE), soon(0.1))
    assert second.wait() == [TransferLost(0, 0, PAGE, "late")]
    first.cancel()
    first.wait()
    engine.close()
    assert [offsets for _, offsets in script.carried] == [[0]]


def test_a_run_is_carried_once_where_no_thread_can_be_started(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has queued it all the same: the thread that finds it there leaves it alone."""
    engine = engine_of(script, path("a"), threads=2)
    assert engine.submit(read(bytearray(PAGE)), soon()).wait() == []

    def none() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine._pool, "_adjust_thread_count", none)
    assert engine.submit(read(bytearray(PAGE), PAGE), soon()).wait() == []
    engine.close()
    assert [offsets for _, offsets in script.carried] == [[0], [PAGE]]


def test_bytes_in_flight_are_bounded(script: Script) -> None:
    """Over the bound, submit waits for others to end, in turn; by its deadline it gives up."""
    release = threading.Event()
    script.act = lambda link, slices, deadline_s, done: release.wait(10) and None
    engine = engine_of(script, path("a"), in_flight_bytes=4 * PAGE)
    first = engine.submit(read(bytearray(3 * PAGE)), soon())
    started = time.monotonic()
    refused = engine.submit(read(bytearray(2 * PAGE)), soon(0.1))
    assert time.monotonic() - started >= 0.1
    assert refused.wait() == [TransferLost(0, 0, 2 * PAGE, "late")]
    assert engine.in_flight_bytes() == 3 * PAGE
    ends: list[list[TransferLost]] = []
    large = threading.Thread(
        target=lambda: ends.append(engine.submit(read(bytearray(9 * PAGE)), soon()).wait())
    )
    large.start()  # more than all: goes alone
    time.sleep(0.05)
    assert not ends
    release.set()
    large.join(10)
    assert ends == [[]]
    assert first.wait() == []
    assert engine.in_flight_bytes() == 0
    engine.close()


def test_what_is_forgotten_is_cut_off(script: Script) -> None:
    """Forgetting a segment ends what is under way to it, and what comes after is unknown."""
    hung = threading.Event()

    def act(
        link: ScriptedLink, slices: Sequence[Slice], deadline_s: float, done: list[bool]
    ) -> None:
        hung.set()
        link.hang(deadline_s)

    script.act = act
    engine = engine_of(script, path("a"))
    queued = engine.submit(read(bytearray(3 * PAGE)), soon(60))
    assert hung.wait(5)
    engine.forget(FAR)
    assert [it.why for it in queued.wait()] == ["late"] * 3
    assert engine.submit(read(bytearray(9)), soon()).wait() == [TransferLost(0, 0, 9, "unknown")]
    assert engine.transfer("read", FAR, [Slice(0, memoryview(bytearray(9)))], soon()) == [False]
    hung.clear()
    engine.register(FAR, [path("a")])
    answers: list[list[bool]] = []
    one = [Slice(0, memoryview(bytearray(9)))]
    direct = threading.Thread(
        target=lambda: answers.append(engine.transfer("read", FAR, one, soon(60)))
    )
    direct.start()
    assert hung.wait(5)
    engine.close()
    direct.join(10)
    assert answers == [[False]]
    assert all(link.closed for link in script.links)


def test_a_bug_in_a_transport_ends_the_batch_all_the_same(script: Script) -> None:
    """What nobody expects breaks the run off, is not swallowed, and leaves no ledger open."""

    def act(
        link: ScriptedLink, slices: Sequence[Slice], deadline_s: float, done: list[bool]
    ) -> None:
        raise AssertionError("a bug")

    script.act = act
    engine = engine_of(script, path("a"))
    with pytest.raises(AssertionError, match="a bug"):
        engine.transfer("read", FAR, [Slice(0, memoryview(bytearray(9)))], soon())
    assert engine.submit(read(bytearray(9)), soon(1)).wait() != []
    assert engine.in_flight_bytes() == 0
    engine.close()


def test_idle_connections_are_bounded(script: Script) -> None:
    """Over the bound the lane that has been idle for longest is closed; it may connect again."""
    engine = engine_of(script, path("a"), max_idle=2)
    for number in range(4):
        engine.register(f"n{number}:s", [path(f"n{number}-")])
        assert engine.transfer("read", f"n{number}:s", [Slice(0, memoryview(bytearray(9)))], soon())
    assert [link.closed for link in script.links] == [1, 1, 0, 0]
    assert engine.transfer("read", "n0:s", [Slice(0, memoryview(bytearray(9)))], soon()) == [True]
    assert [link.closed for link in script.links] == [1, 1, 1, 0]
    engine.close()


@pytest.mark.parametrize("location", ["", "node", "node:", ":segment"])
def test_a_location_names_a_node_and_a_segment(location: str) -> None:
    """Anything but node:segment is said to be wrong."""
    with pytest.raises(ConfigError, match="node:segment"):
        parse_location(location)
    assert parse_location("node:a:b") == ("node", "a:b")


@pytest.fixture
def memory() -> Iterator[Region]:
    """A region with a pattern in it."""
    made = Region.create(1 << 20)
    made.view[:] = bytes(range(256)) * 4096
    yield made
    made.close()


def test_one_dead_card_of_two_costs_nothing(memory: Region) -> None:
    """Over TCP: with one of a peer's addresses gone in the middle, all bytes come by the other."""
    cards = [TransferServer(memory, TOKEN) for _ in range(2)]
    settings = EngineSettings(slice_bytes=PAGE, terms=LaneTerms(spread_bytes=PAGE))
    engine = TransferEngine({"tcp": TcpTransport(TOKEN)}, settings)
    engine.register(FAR, [Path("tcp", it.address("127.0.0.1")) for it in cards])
    for dead in (False, True):
        if dead:
            cards[0].close()
        for _ in range(3):
            got = bytearray(1 << 20)
            assert engine.submit(read(got), soon()).wait() == []
            assert got == memory.view
    by_port = {it.path.address.port: it for it in engine.stats()}
    assert all(it.counters.bytes for it in by_port.values())
    assert by_port[cards[0].port].on_probation
    engine.close()
    cards[1].close()


def test_a_peer_that_stops_in_the_middle_is_left_for_another(memory: Region) -> None:
    """A card that goes silent is given up after the stall time, long before the deadline."""
    card = TransferServer(memory, TOKEN)
    with TransferServerThatStops(memory) as stuck:
        transport = TcpTransport(TOKEN, stall_s=0.2)
        engine = TransferEngine({"tcp": transport})
        engine.register(FAR, [Path("tcp", it) for it in (stuck, card.address("127.0.0.1"))])
        got = bytearray(1 << 20)
        started = time.monotonic()
        slices = [Slice(0, memoryview(got))]
        assert engine.transfer("read", FAR, slices, soon(60)) == [True]
        assert time.monotonic() - started < 20
        assert got == memory.view
        engine.close()
    card.close()


class TransferServerThatStops:
    """Greets, takes requests, and never answers."""

    def __init__(self, memory: Region) -> None:
        self._server = TransferServer(memory, TOKEN)
        self._over = threading.Event()

    def __enter__(self) -> Address:
        self._server._answer = lambda channel: self._over.wait(30) and False  # type: ignore[assignment]
        return self._server.address("127.0.0.1")

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._server.close()


def test_tls_carries_the_same_bytes(memory: Region, tmp_path: File) -> None:
    """Both ends speak TLS where told to; who does not, or trusts another, gets nothing."""
    init(tmp_path / "a")
    init(tmp_path / "b")
    ours, theirs = tls_of(tmp_path / "a", "store"), tls_of(tmp_path / "b", "store")
    halves = Tls(TlsFiles(theirs.files.cert, theirs.files.key, ours.files.ca))
    server = TransferServer(memory, TOKEN, tls=ours.server)
    got = bytearray(1 << 20)
    clients = (
        (tls_of(tmp_path / "a", "worker").trust, True),
        (None, False),
        (theirs.trust, False),
        (halves.trust, False),  # it trusts the server, but has another authority's certificate
    )
    for trust, works in clients:
        engine = TransferEngine({"tcp": TcpTransport(TOKEN, trust=trust, stall_s=0.3)})
        engine.register(FAR, [Path("tcp", server.address("127.0.0.1"))])
        slices = [Slice(0, memoryview(got)), Slice(9, memoryview(bytearray(5)))]
        assert engine.transfer("read", FAR, slices, soon()) == [works] * 2
        if works:
            assert got == memory.view
            sent = [Slice(70_000, memoryview(b"secret" * 30_000))]
            assert engine.transfer("write", FAR, sent, soon()) == [True]
            assert memory.view[70_000:250_000] == b"secret" * 30_000
        engine.close()
    server.close()
