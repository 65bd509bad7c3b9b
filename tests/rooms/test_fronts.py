"""Fronts and the Conductor's process: messages, requests of several fronts, lost processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.request import Request, Slo, Stopping, TraceContext
from moonserve.core.schedule.actions import Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    Arrived,
    ClientGone,
    DecodeEnded,
    Fact,
    Joined,
    PrefillEnded,
)
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId, RequestId, lease_of
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family, lasting, summed
from moonserve.live.fronts.remote import AbsenceLimits, RemoteConductor
from moonserve.live.fronts.road import Road, road_of
from moonserve.live.fronts.server import FrontServer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve, serve_socket
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.ports import DriverFact
from moonserve.live.process.fronts import FrontProcess
from moonserve.live.rpc.connection import HEAD, HELLO, NOTICES, ConnectionLimits
from moonserve.live.tls.authority import init
from moonserve.live.tls.contexts import ServerTrust, Tls
from tests.support.certificates import tls_of
from tests.support.cluster import exact, info
from tests.support.fronts import ASK, TOKEN, WELCOME, Served, served

R = RequestId("r")
HASTY = msgspec.structs.replace(wire.LIMITS, beat_s=0.01)
"""A process that hangs is noticed in 50 ms."""
COUNTER = Family("c", "counter", "", [("c_total", (("route", "/a"),), 2.0)])
GAUGE = Family("g", "gauge", "", [("g", (), 3.0)])


def frame(kind: int, body: bytes) -> bytes:
    """A frame made by hand."""
    return HEAD.pack(len(body), 0, kind) + body


GREETING = frame(HELLO, wire.PROTOCOL.encode())


class Site:
    """A front server with two instances behind it, and fronts."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.at: Served
        self.loop: ConductorLoop
        self.released: list[str] = []
        self.leadership = Leadership()
        self.restart()
        self.server = self.listen()
        self.fronts: list[RemoteConductor] = []

    def listen(self) -> FrontServer:
        """A new front server, which accepts fronts."""
        self.server = FrontServer(
            self.loop, WELCOME, limits=self.limits, leadership=self.leadership
        )
        self.server.open()
        return self.server

    def restart(self, joins: bool = True) -> None:
        """The next front server has a Conductor that knows nothing but, perhaps, the instances."""
        self.released = []
        self.loop = ConductorLoop(Conductor(cost_of=exact), self.released.append)
        if joins:
            self.loop.tell(Joined(info("p0", "prefill")), Joined(info("d0", "decode")))

    async def front(
        self,
        by: str = "socket",
        absence: AbsenceLimits = AbsenceLimits(),  # noqa: B008 - frozen
    ) -> RemoteConductor:
        """Connect one more front, which knows the instances."""
        front = RemoteConductor(self.at.road(by), limits=self.limits, absence=absence)
        self.fronts.append(front)
        assert await front.start(5) == WELCOME
        front.attach(lambda: [COUNTER, GAUGE], lambda engines: None, lambda: None)
        await until(lambda: len(front.instances()) == 2)
        return front

    @property
    def requests(self) -> int:
        """Number of requests under way at the Conductor."""
        return self.loop.core.promised().requests


async def by_hand(it: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was switched, without a front behind it."""
    reader, writer = await asyncio.open_unix_connection(it.at.path)
    writer.write(ASK)
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def until(true: Callable[[], object]) -> None:
    """Poll until it holds."""
    while not true():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def site(path: Path, limits: ConnectionLimits, tls: Tls | None = None) -> AsyncIterator[Site]:
    """All of it, within a deadline."""
    async with asyncio.timeout(10):
        it = Site(limits)
        async with served(lambda: it.server, str(path / "link"), tls) as it.at:
            yield it
            for front in it.fronts:
                await front.leave()
            it.server.close()


def run(
    use: Callable[[Site], Awaitable[None]],
    path: Path,
    limits: ConnectionLimits = wire.LIMITS,
    tls: Tls | None = None,
) -> None:
    """Run a test at a site."""

    async def main() -> None:
        async with site(path, limits, tls) as it:
            await use(it)

    asyncio.run(main())


def opened(front: RemoteConductor, name: RequestId = R) -> asyncio.Queue[Any]:
    """Open a request and return its inbox."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    front.open(Request(name, "m", len(tuple(range(9))), tuple(range(9))), (), inbox)
    return inbox


def test_every_fact_can_be_sent() -> None:
    """The wire's union has all facts about requests; an arrival travels as Opened."""
    facts = {it for it in typing.get_args(Fact) if "request" in it.__struct_fields__}
    assert facts - {Arrived} <= set(typing.get_args(DriverFact))


def test_a_request_arrives_whole_but_for_its_prompt() -> None:
    """Every field that the Conductor may read travels; of the prompt, only its length."""
    stopping = Stopping(9, ("x",), (7,), ignore_eos=True)
    kept = Request(R, "m", 5, stopping=stopping, slo=Slo(1, 2), priority=-1)
    kept = msgspec.structs.replace(kept, arrived_us=3, whole=True, tenant="t", address="a")
    kept = msgspec.structs.replace(
        kept, trace=TraceContext("a" * 32, "b" * 16), among=(InstanceId("p0"),)
    )
    told = wire.opened(kept, (), 10).request(10)
    for field in Request.__struct_fields__:
        mine, theirs = getattr(kept, field), getattr(told, field)
        assert mine == theirs
        changed = mine != getattr(Request(R, "m", 0), field)
        unread = ("id", "model", "prompt", "sampling", "cache_salt")  # the salt is in the keys
        assert changed or field in unread, f"{field} is not looked at"


def test_an_age_travels_between_two_clocks() -> None:
    """Of two hosts with other clocks, the Conductor finds the arrival by its own."""
    told = wire.opened(Request(R, "m", 5, arrived_us=900), (), 1_000)
    assert told.request(70_000).arrived_us == 69_900
    late = Request(R, "m", 5, arrived_us=2_000)  # cannot be: then it arrives now
    assert wire.opened(late, (), 1_000).request(70_000).arrived_us == 70_000


@pytest.mark.parametrize("by", ["socket", "tcp"])
def test_a_front_with_another_token_or_version_is_told_so(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying again cannot help: the start ends with an error that names the remedy."""

    async def use(it: Site) -> None:
        front = RemoteConductor(it.at.road(by, token="another"))
        with pytest.raises(ConfigError, match=r"token: .* set MOONSERVE_TOKEN to that of the proc"):
            await front.start(5)
        await front.leave()
        here = wire.PROTOCOL
        monkeypatch.setattr(wire, "PROTOCOL", "moonserve-fronts/1")
        front = RemoteConductor(it.at.road(by))
        connecting = asyncio.create_task(front.start(5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has asked with the old version
        monkeypatch.setattr(wire, "PROTOCOL", here)
        with pytest.raises(ConfigError, match=f"conductor: .* a front has to speak {here} here"):
            await connecting
        await front.leave()
        assert it.server.fronts == 0

    run(use, tmp_path)


def test_a_gateway_with_a_conductor_of_its_own_takes_no_fronts(tmp_path: Path) -> None:
    """A front at the wrong address is told what has to run there."""

    async def use(it: Site) -> None:
        other = await serve(App({}), "127.0.0.1", 0)
        road = road_of(f"127.0.0.1:{other.port}", TOKEN, None, None)
        front = RemoteConductor(road)
        with pytest.raises(ConfigError, match=r"is no Conductor .*; run `moonserve conductor` th"):
            await front.start(5)
        await front.leave()
        await other.stop(0)

    run(use, tmp_path)


@pytest.mark.model
def test_a_front_for_another_model_is_told_so(tmp_path: Path) -> None:
    """It ends with both models and leaves nothing at the Conductor."""

    async def use(it: Site) -> None:
        config = GatewayConfig(model=DEFAULT_MODEL, port=0, token=TOKEN, conductor=it.at.path)
        why = f"model: is {DEFAULT_MODEL} here, but the Conductor at .* has workers of m: give both"
        with pytest.raises(ConfigError, match=why):
            await FrontProcess.start(config)
        await until(lambda: it.server.fronts == 0)

    run(use, tmp_path)


def test_a_front_waits_so_long_for_its_conductor(tmp_path: Path) -> None:
    """A Conductor that is not ready yet is waited for; the error says why it did not come."""

    async def use(it: Site) -> None:
        it.server.close()
        front = RemoteConductor(it.at.road("tcp"))
        with pytest.raises(ConfigError, match=r"at http\S+ within 0.3 s: .* not know"):
            await front.start(0.3)
        await front.leave()
        front = RemoteConductor(it.at.road("tcp"))
        connecting = asyncio.create_task(front.start(5))
        await asyncio.sleep(0.2)
        it.server.open()
        assert await connecting == WELCOME
        await front.leave()

    run(use, tmp_path)


def test_fronts_over_tls_show_a_certificate_of_the_cluster(tmp_path: Path) -> None:
    """A front with one is served; one that speaks in clear, or has no certificate, is not."""
    init(tmp_path / "tls")
    mine = tls_of(tmp_path / "tls", "gateway")

    async def use(it: Site) -> None:
        front = await it.front("tcp")
        assert front.url.startswith("https://")
        assert isinstance(await opened(front).get(), Prefill)
        where = f"127.0.0.1:{it.at.port}"
        for road in (
            road_of(where, TOKEN, None, None),
            Road("stranger", lambda: HttpClient(stranger), TOKEN, f"https://{where}"),
        ):
            other = RemoteConductor(road)
            with pytest.raises(ConfigError, match="no Conductor accepts fronts at"):
                await other.start(0.5)
            await other.leave()
        assert it.server.fronts == 1

    ca = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.crt"))
    stranger = ServerTrust(lambda: ca, "")
    run(use, tmp_path, tls=mine)


def test_a_socket_of_another_process_is_not_taken(tmp_path: Path) -> None:
    """One that listens keeps its socket; what a killed one has left is replaced. Only this user
    may connect."""

    async def main() -> None:
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
        first = await serve_socket(App({}), path, "socket")
        assert os.stat(path).st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="socket: another process listens at"):
            await serve_socket(App({}), path, "socket")
        await first.stop(0)
        with pytest.raises(FileNotFoundError):
            os.stat(path)
        (tmp_path / "plain").write_text("kept")
        for wrong, why in (
            (tmp_path / "no" / "s", "cannot listen at .*No such file.*; choose a path in a folder"),
            (tmp_path / ("x" * 200), "has [0-9]+ bytes, and the path of a unix socket has at most"),
            (tmp_path / "plain", "is there and is no socket; remove it, or choose another path"),
            (tmp_path, "is there and is no socket"),
        ):
            with pytest.raises(ConfigError, match=f"socket: .*{why}"):
                await serve_socket(App({}), str(wrong), "socket")
        assert (tmp_path / "plain").read_text() == "kept"

    asyncio.run(main())


def test_an_id_that_another_front_serves_is_refused(tmp_path: Path) -> None:
    """The second is refused as a duplicate; its messages do not touch the first."""

    async def use(it: Site) -> None:
        one, two = await it.front(), await it.front()
        first = opened(one)
        assert isinstance(await first.get(), Prefill)
        refuse = await opened(two).get()
        assert isinstance(refuse, Refuse)
        assert refuse.reason == "duplicate_request_id"
        two.tell(ClientGone(R))
        two.close(R, "refused")
        other = opened(two, RequestId("other"))
        assert isinstance(await other.get(), Prefill)
        assert it.requests == 2
        assert first.empty()

    run(use, tmp_path)


def test_a_front_that_is_gone_has_left_all_its_requests(tmp_path: Path) -> None:
    """Its reservations are free again; another front's requests go on."""

    async def use(it: Site) -> None:
        one, two = await it.front(), await it.front()
        inboxes = [opened(one, RequestId(f"r{i}")) for i in range(5)]
        await opened(two).get()
        for inbox in inboxes:
            await inbox.get()
        assert it.requests == 6
        await one.leave()
        await until(lambda: it.requests == 1)
        assert it.loop.known(R)
        assert not it.loop.known(RequestId("r0"))

    run(use, tmp_path)


def test_a_message_that_cannot_be_encoded_ends_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropping only that message would leave the requests of that turn waiting for ever."""

    async def use(it: Site) -> None:
        front = await it.front()
        inbox = opened(front)
        front.first_token(R, 1 << 70)
        assert isinstance(await inbox.get(), Prefill), "by the next connection"
        assert "cannot encode" in caplog.text

    run(use, tmp_path)


def test_a_front_that_does_not_read_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes that wait for it are bounded."""

    async def use(it: Site) -> None:
        _, writer = await by_hand(it)
        writer.write(GREETING)
        await until(lambda: it.server.fronts)
        number = 0
        while it.server.fronts:
            number += 1
            it.loop.tell(Joined(info(f"p{number}", "prefill")))
            await asyncio.sleep(0)
        writer.close()

    run(use, tmp_path, msgspec.structs.replace(wire.LIMITS, unread_bytes=1 << 18))
    assert "peer does not read; write buffer over limit" in caplog.text


def test_a_conductor_that_comes_back_adopts_what_is_under_way(tmp_path: Path) -> None:
    """A running call goes on; what ends meanwhile is reported to the next Conductor, which frees
    all at the end. New requests wait for it."""

    async def use(it: Site) -> None:
        front = await it.front()
        prefilling, decoding, ended = (opened(front, RequestId(name)) for name in "pde")
        calls = [await inbox.get() for inbox in (prefilling, decoding, ended)]
        assert [call.number for call in calls] == [1, 1, 1]
        front.tell(PrefillEnded(RequestId("d"), 1, final=False))
        decode = await decoding.get()
        it.server.close()
        it.restart()
        await until(lambda: front.now_us() and not it.requests and front._link is None)
        fresh = opened(front, RequestId("new"))
        assert front.missing() == ""
        assert len(front.instances()) == 2
        front.tell(PrefillEnded(RequestId("p"), 1, final=False))
        front.tell(PrefillEnded(RequestId("e"), 1, final=True))
        front.close(RequestId("e"), "length")
        assert fresh.empty()
        it.listen()
        assert isinstance(await fresh.get(), Prefill)
        again = await prefilling.get()
        assert isinstance(again, Decode)
        assert again.number == 2
        assert it.requests == 3
        assert decoding.empty(), "its call goes on"
        front.tell(DecodeEnded(RequestId("d"), decode.number, 5))
        front.tell(DecodeEnded(RequestId("p"), again.number, 5))
        front.tell(ClientGone(RequestId("new")))
        await until(lambda: it.loop.promised() == Promised(0, 0, 0, 0))
        assert sorted(it.released) == sorted(
            lease_of(RequestId(name), 1) for name in ("p", "d", "e", "new")
        )

    run(use, tmp_path)


def test_new_requests_wait_so_long_for_a_conductor(tmp_path: Path) -> None:
    """Then they are refused, as are those that come later; then it is back, and all works."""

    async def use(it: Site) -> None:
        front = await it.front(absence=AbsenceLimits(new_s=0.1, placed_s=0.2))
        placed = opened(front, RequestId("placed"))
        assert isinstance(await placed.get(), Prefill)
        running = opened(front, RequestId("running"))
        assert isinstance(await running.get(), Prefill)
        it.server.close()
        await until(lambda: front._link is None)
        refuse = await opened(front).get()
        assert isinstance(refuse, Refuse)
        assert "connects to it again" in refuse.why
        front.close(R, "refused")
        assert "does not answer" in front.missing()
        assert front.instances() == []
        late = await opened(front).get()
        assert isinstance(late, Refuse)
        front.close(R, "refused")
        front.tell(PrefillEnded(RequestId("placed"), 1, final=False))
        gave_up = await placed.get()
        assert isinstance(gave_up, GiveUp)
        front.close(RequestId("placed"), "failed")
        assert running.empty(), "nothing ends a call that runs"
        it.listen()
        await until(lambda: len(front.instances()) == 2)
        assert (front.url, front.missing()) == ("http://localhost", "")
        assert isinstance(await opened(front).get(), Prefill)
        assert it.requests == 2

    run(use, tmp_path)


def test_new_requests_wait_for_the_instances_to_join_the_next_conductor(tmp_path: Path) -> None:
    """A Conductor that has just started would refuse them, since no instance has joined it."""

    async def use(it: Site) -> None:
        front = await it.front()
        it.server.close()
        it.restart(joins=False)
        await until(lambda: front._link is None)
        fresh = opened(front)
        it.listen()
        it.loop.tell(Joined(info("p0", "prefill")))
        await until(lambda: front.missing() == "" and front._link is not None)
        await asyncio.sleep(0.05)
        assert fresh.empty()
        it.loop.tell(Joined(info("d0", "decode")))
        assert isinstance(await fresh.get(), Prefill)

    run(use, tmp_path)


def test_a_front_that_connects_twice_is_counted_once(tmp_path: Path) -> None:
    """The Conductor may not have noticed that the first connection is over."""

    async def use(it: Site) -> None:
        front = await it.front()
        inbox, fresh = opened(front, RequestId("old")), opened(front)
        for one in (inbox, fresh):
            assert isinstance(await one.get(), Prefill)
        [link] = it.server._links
        link.lost = lambda: None  # type: ignore[method-assign]
        assert front._link is not None
        front._link.close()
        await until(lambda: len(it.server._links) == 1 and link not in it.server._links)
        await until(lambda: it.requests == 2)
        front.tell(PrefillEnded(RequestId("old"), 1, final=False))
        assert isinstance(await inbox.get(), Decode)
        assert it.loop.promised().decodes == 2
        front.tell(ClientGone(RequestId("old")), ClientGone(R))
        await until(lambda: it.loop.promised() == Promised(0, 0, 0, 0))

    run(use, tmp_path)


def test_a_request_under_way_precedes_a_later_one_of_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While the Conductor was away, another front may have accepted the same id. The log has the
    end of the absence too."""

    async def use(it: Site) -> None:
        caplog.set_level(logging.INFO)
        first, second = await it.front(), await it.front()
        inbox = opened(first)
        assert isinstance(await inbox.get(), Prefill)
        it.server.close()
        it.restart()
        await until(lambda: first._link is None and second._link is None)
        late = opened(second)
        it.listen()
        refusals = [action for action in [await late.get()] if isinstance(action, Refuse)]
        if not refusals:
            refusals = [await late.get()]
        assert refusals[0].reason == "duplicate_request_id"
        first.tell(PrefillEnded(R, 1, final=False))
        assert isinstance(await inbox.get(), Decode)
        assert it.requests == 1
        lines = [line.getMessage() for line in caplog.records]
        assert sum("is gone; requests under way wait" in line for line in lines) == 2
        back = [line for line in lines if "a Conductor is there again, in term 1, at" in line]
        assert [line.endswith("requests under way: 1") for line in back] == [True, True]

    run(use, tmp_path)


def test_a_front_that_leaves_has_not_lost_the_conductor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a front logs no warning: nothing has failed."""

    async def use(it: Site) -> None:
        front = await it.front()
        await front.leave()
        await until(lambda: it.server.fronts == 0)
        assert "is gone" not in caplog.text

    run(use, tmp_path)


def test_a_conductor_that_hangs_is_as_one_that_is_gone(tmp_path: Path) -> None:
    """Requests without a call are refused until the Conductor answers again, though connections to
    it succeed."""

    async def use(it: Site) -> None:
        path, hangs, alive = str(tmp_path / "hangs"), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = msgspec.msgpack.encode([WELCOME, wire.Instances([info("p0", "both")], [])])
            await reader.readuntil(b"\r\n\r\n")
            if hangs.is_set():
                await alive.wait()
            head = f"HTTP/1.1 101 x\r\nupgrade: {wire.PROTOCOL}\r\nconnection: upgrade\r\n\r\n"
            writer.write(head.encode())
            await reader.readexactly(len(GREETING))
            writer.write(GREETING + frame(NOTICES, said))
            hangs.set()
            while alive.is_set():
                await asyncio.sleep(0.01)
                writer.write(frame(NOTICES, b"\x90"))

        async with await asyncio.start_unix_server(serve, path):
            short = AbsenceLimits(new_s=0.05)
            front = RemoteConductor(road_of(path, TOKEN, None, None), HASTY, short)
            await front.start(5)
            await until(front.instances)
            inbox = opened(front)
            assert isinstance(await inbox.get(), Refuse)
            front.close(R, "failed")
            for _ in range(3):
                assert isinstance(await opened(front).get(), Refuse)
                front.close(R, "refused")
                await asyncio.sleep(0.05)
            alive.set()
            await until(front.instances)
            await asyncio.sleep(0.1)
            assert front.instances()
            await front.leave()
            alive.clear()

    run(use, tmp_path)


def test_a_front_that_hangs_has_left_its_requests(tmp_path: Path) -> None:
    """Its reservations are free after the beats are missed; the requests of other fronts go on."""

    async def use(it: Site) -> None:
        front = await it.front()
        await opened(front).get()
        _, writer = await by_hand(it)
        hung = Request(RequestId("hung"), "m", len(tuple(range(9))), tuple(range(9)))
        said = msgspec.msgpack.encode([wire.opened(hung, (), 0)])
        writer.write(GREETING + frame(NOTICES, said))
        await until(lambda: it.requests == 2)
        await until(lambda: it.requests == 1)
        assert it.loop.known(R)
        assert it.server.fronts == 1
        writer.close()

    run(use, tmp_path, HASTY)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * HEAD.size,
        frame(HELLO, b"moonserve-fronts/1"),
        frame(NOTICES, b"\x90"),
        GREETING + frame(NOTICES, b"abc"),
        GREETING + frame(NOTICES, b"\x01"),
    ],
)
def test_another_protocol_is_cut_off(tmp_path: Path, said: bytes) -> None:
    """A frame that is too large, or has no messages, ends that connection and nothing else."""

    async def use(it: Site) -> None:
        front = await it.front()
        reader, writer = await by_hand(it)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        assert isinstance(await opened(front).get(), Prefill)

    run(use, tmp_path)


def test_a_front_that_connects_again_is_counted_once(tmp_path: Path) -> None:
    """A front reports all that it ever counted. If another Conductor leads, that one has it all."""

    async def use(it: Site) -> None:
        front = await it.front()

        async def counted() -> list[float]:
            return [f.samples[0][2] for f in await it.server.counts() if f.name == "c"]

        async def lost(cut: Callable[[], None]) -> None:
            link = front._link
            cut()
            await until(lambda: front._link not in (None, link))
            await until(lambda: it.server.fronts == 1)

        assert await counted() == [2.0]
        await lost(lambda: front._link.transport.abort())  # type: ignore[union-attr]
        assert await counted() == [2.0]
        await lost(lambda: it.leadership.set_term(2))
        assert await counted() == [2.0]
        it.leadership.set_term(0)
        assert await counted() == []

    run(use, tmp_path)


def test_counts_of_long_gone_fronts_are_kept_as_one_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for each front is bounded; no count is lost."""
    monkeypatch.setattr("moonserve.live.fronts.server._PARTED", 1)

    async def use(it: Site) -> None:
        for _ in range(3):
            front = await it.front()
            assert await it.server.counts()
            await front.leave()
            await until(lambda: it.server.fronts == 0)
        assert [f.samples[0][2] for f in await it.server.counts()] == [6.0]

    run(use, tmp_path)


def test_counts_are_those_of_all_fronts_there_have_been(tmp_path: Path) -> None:
    """Counters of a front that is gone stay, its gauges go; labels are summed apart."""

    async def use(it: Site) -> None:
        one, _ = await it.front(), await it.front()

        async def values() -> dict[str, float]:
            return {f.name: f.samples[0][2] for f in await it.server.counts()}

        assert await values() == {"c": 4.0, "g": 6.0}
        await one.leave()
        await until(lambda: it.server.fronts == 1)
        assert await values() == {"c": 4.0, "g": 3.0}

    run(use, tmp_path)
    other = msgspec.structs.replace(COUNTER, samples=[("c_total", (("route", "/b"),), 5.0)])
    [both] = summed([[COUNTER], [other], [COUNTER]])
    assert [(dict(labels)["route"], value) for _, labels, value in both.samples] == [
        ("/a", 4.0),
        ("/b", 5.0),
    ]
    assert lasting([COUNTER, GAUGE]) == [COUNTER]
