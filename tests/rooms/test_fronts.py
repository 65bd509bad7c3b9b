"""Fronts and the Conductor's process: messages, requests of several fronts, lost processes."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.actions import Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Arrived, ClientGone, Fact, Joined
from moonserve.core.units import RequestId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.fronts import wire
from moonserve.live.fronts.counts import Family, lasting, summed
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.fronts.server import FrontServer
from moonserve.live.ports import DriverFact
from moonserve.live.rpc.connection import HEAD, HELLO, NOTICES, ConnectionLimits
from tests.support.cluster import exact, info

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

    def __init__(self, path: Path, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.path = str(path / "link")
        self.loop = ConductorLoop(Conductor(cost_of=exact), lambda lease: None)
        self.loop.tell(Joined(info("p0", "prefill")), Joined(info("d0", "decode")))
        self.server = FrontServer(self.loop, "http://127.0.0.1:1", limits=limits)
        self.fronts: list[RemoteConductor] = []

    async def front(self) -> RemoteConductor:
        """Connect one more front, which knows the instances."""
        front = RemoteConductor(self.path, lambda: [COUNTER, GAUGE], limits=self.limits)
        self.fronts.append(front)
        await front.start()
        await until(lambda: len(front.instances()) == 2)
        return front

    @property
    def requests(self) -> int:
        """Number of requests under way at the Conductor."""
        return self.loop.core.promised().requests


async def until(true: Callable[[], object]) -> None:
    """Poll until it holds."""
    while not true():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def site(path: Path, limits: ConnectionLimits) -> AsyncIterator[Site]:
    """All of it, within a deadline."""
    async with asyncio.timeout(10):
        it = Site(path, limits)
        await it.server.listen(it.path)
        yield it
        for front in it.fronts:
            await front.leave()
        await it.server.close()


def run(
    use: Callable[[Site], Awaitable[None]], path: Path, limits: ConnectionLimits = wire.LIMITS
) -> None:
    """Run a test at a site."""

    async def main() -> None:
        async with site(path, limits) as it:
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
    told = wire.opened(kept, ()).request()
    for field in Request.__struct_fields__:
        mine, theirs = getattr(kept, field), getattr(told, field)
        assert mine == theirs
        changed = mine != getattr(Request(R, "m", 0), field)
        unread = ("id", "model", "prompt", "sampling", "cache_salt")  # the salt is in the keys
        assert changed or field in unread, f"{field} is not looked at"


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


def test_a_message_that_cannot_be_encoded_ends_the_connection(tmp_path: Path) -> None:
    """Dropping only that message would leave the requests of that turn waiting for ever."""

    async def use(it: Site) -> None:
        front = await it.front()
        inbox = opened(front)
        front.first_token(R, 1 << 70)
        assert isinstance(await inbox.get(), Refuse)
        front.close(R, "failed")
        await until(lambda: len(front.instances()) == 2)  # it is back
        assert isinstance(await opened(front).get(), Prefill)

    run(use, tmp_path)


def test_a_front_that_does_not_read_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes that wait for it are bounded."""

    async def use(it: Site) -> None:
        _, writer = await asyncio.open_unix_connection(it.path)
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


def test_without_a_conductor_requests_fail_and_are_refused_until_it_is_back(
    tmp_path: Path,
) -> None:
    """Requests under way fail, no instance is known, new requests are refused; then all works."""

    async def use(it: Site) -> None:
        front = await it.front()
        inbox = opened(front)
        assert isinstance(await inbox.get(), Prefill)
        await it.server.close()
        assert isinstance(await inbox.get(), Refuse)
        assert "does not answer" in front.missing()
        front.tell(ClientGone(R))
        front.close(R, "failed")
        assert front.instances() == []
        refuse = await opened(front).get()
        assert isinstance(refuse, Refuse)
        assert (refuse.reason, "started again" in refuse.why) == ("nobody_alive", True)
        front.close(R, "refused")
        it.server = FrontServer(it.loop, "http://127.0.0.1:2")
        await it.server.listen(it.path)
        await until(lambda: len(front.instances()) == 2)
        assert (front.url, front.missing()) == ("http://127.0.0.1:2", "")
        assert isinstance(await opened(front).get(), Prefill)

    run(use, tmp_path)


def test_a_front_that_leaves_has_not_lost_the_conductor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a front logs no warning: nothing has failed."""

    async def use(it: Site) -> None:
        front = await it.front()
        await front.leave()
        await until(lambda: it.server.fronts == 0)
        assert "the Conductor is gone" not in caplog.text

    run(use, tmp_path)


def test_a_conductor_that_hangs_is_as_one_that_is_gone(tmp_path: Path) -> None:
    """Requests under way fail and new ones are refused until the Conductor answers again, though
    connections to it succeed."""

    async def use(it: Site) -> None:
        path, hangs, alive = str(tmp_path / "hangs"), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            said = msgspec.msgpack.encode([wire.Welcome("u"), wire.Instances([info("p0", "both")])])
            if hangs.is_set():
                await alive.wait()
            writer.write(GREETING + frame(NOTICES, said))
            hangs.set()
            while alive.is_set():
                await asyncio.sleep(0.01)
                writer.write(frame(NOTICES, b"\x90"))

        async with await asyncio.start_unix_server(serve, path):
            front = RemoteConductor(path, list, limits=HASTY)
            await front.start()
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
        _, writer = await asyncio.open_unix_connection(it.path)
        hung = Request(RequestId("hung"), "m", len(tuple(range(9))), tuple(range(9)))
        said = msgspec.msgpack.encode([wire.opened(hung, ())])
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
        reader, writer = await asyncio.open_unix_connection(it.path)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        assert isinstance(await opened(front).get(), Prefill)

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
