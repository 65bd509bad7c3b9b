"""Terms: a standby that takes over, and who refuses the orders of a Conductor that was deposed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from moonserve.core.request import Request
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Joined
from moonserve.core.schedule.view import Promised
from moonserve.core.units import LeaseId, RequestId
from moonserve.live.access.guard import Guard
from moonserve.live.control import in_registry
from moonserve.live.control.in_registry import InRegistry
from moonserve.live.control.join import Internal
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.lost import CallLost
from moonserve.live.drive.wire import OrderedBy, WireClient
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.fronts.server import FrontServer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, Server, serve
from moonserve.live.openai.headers import TERM
from moonserve.live.process.worker import Worker
from moonserve.live.registry.entries import ConductorEntry
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.fence import Fence, TermIsOver
from moonserve.live.worker.join import ConductorClient, ConductorMember
from tests.support.cluster import exact, info
from tests.support.fronts import TOKEN, WELCOME, served
from tests.support.registry import MemoryRegistry, Shared

R = RequestId("r")


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test, with a deadline."""
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def until(true: Callable[[], object]) -> None:
    """Poll until it holds."""
    while not true():
        await asyncio.sleep(0.005)


def loop_of(released: list[LeaseId]) -> ConductorLoop:
    """A Conductor with an instance of each role."""
    loop = ConductorLoop(Conductor(cost_of=exact), released.append)
    loop.tell(Joined(info("p0", "prefill")), Joined(info("d0", "decode")))
    return loop


def test_a_fence_lets_only_the_highest_term_pass() -> None:
    """A call without a term is no Conductor's order, and passes."""
    fence = Fence()
    fence.check({TERM: "5"})
    fence.check({})
    fence.heard(7)
    fence.heard(6)
    with pytest.raises(TermIsOver, match="another Conductor leads in term 7"):
        fence.check({TERM: "5"})
    fence.check({TERM: "7"})


def test_a_worker_refuses_a_call_of_a_lower_term() -> None:
    """It learns terms from the calls of fronts and from the replies to its heartbeats. Its reply
    has the term that it knows, and the front leaves its Conductor."""

    async def test() -> None:
        fence = Fence()
        config = WorkerConfig(name="w", role="both", model="m", token=TOKEN)
        worker = await Worker.start(config, FakeEngine(), None, model="m", fence=fence)
        http, heard = HttpClient(), list[int]()
        loop = ConductorLoop(Conductor(), lambda lease: None)
        internal = Internal(loop, ["m"], lambda: 9)
        server = await serve(App(internal.routes(), gate=Guard(TOKEN)), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}"
        member = ConductorMember(
            ConductorClient(http, url, TOKEN, fence.heard), worker.info, worker.load
        )
        beating = asyncio.create_task(member.run(lambda: None))
        try:
            await until(lambda: fence.term == 9)
            request = Request(R, "m", 4, (1, 2, 3, 4))
            body = msgspec.json.encode(
                {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 1, "return_token_ids": True}
            )
            old = WireClient(http, TOKEN, 5, 5, OrderedBy(lambda: 8, heard.append))
            with pytest.raises(CallLost, match="answered 409"):
                await old.prefill(worker.info, request, body)
            assert heard == [9]
            now = WireClient(http, TOKEN, 5, 5, OrderedBy(lambda: 10, heard.append))
            assert len((await now.prefill(worker.info, request, body)).token_ids) == 1
            assert fence.term == 10
        finally:
            beating.cancel()
            await server.stop(0)
            await worker.stop(0)
            await http.close()
            loop.stop()

    run(test)


def test_a_front_obeys_no_lower_term(tmp_path: Path) -> None:
    """It leaves its Conductor when it hears of a higher term, and waits for the one that has it."""

    async def test() -> None:
        loop = loop_of([])
        leadership = Leadership(confirm=_yes)
        leadership.set_term(5)
        server = FrontServer(loop, WELCOME, leadership=leadership)
        server.open()
        async with served(lambda: server, str(tmp_path / "link")) as at:
            front = RemoteConductor(at.road())
            assert (await front.start(5)).term == 5
            inbox: asyncio.Queue[object] = asyncio.Queue()
            front.open(Request(R, "m", 9), (), inbox)
            assert isinstance(await inbox.get(), Prefill)
            front.leads(4)
            assert front._link is not None
            front.leads(6)
            await until(lambda: front._link is None)
            await asyncio.sleep(0.3)
            assert front._link is None
            assert "led before another one" in front._why
            leadership.set_term(6)
            await until(lambda: front._link is not None)
            await until(lambda: loop.promised().requests == 1)
            await front.leave()
            server.close()
        loop.stop()

    run(test)


async def _yes() -> bool:
    return True


async def _no() -> bool:
    return False


@contextlib.asynccontextmanager
async def deciding(
    leadership: Leadership, path: str
) -> AsyncIterator[tuple[ConductorLoop, FrontServer, RemoteConductor, list[LeaseId]]]:
    """A Conductor that leads in term 5 and has placed request R of a front; the leases that it
    releases are in the list."""
    released: list[LeaseId] = []
    loop = loop_of(released)
    leadership.set_term(5)
    server = FrontServer(loop, WELCOME, leadership=leadership)
    server.open()
    async with served(lambda: server, path) as at:
        front = RemoteConductor(at.road())
        await front.start(5)
        inbox: asyncio.Queue[object] = asyncio.Queue()
        front.open(Request(R, "m", 9), (), inbox)
        assert isinstance(await inbox.get(), Prefill)
        yield loop, server, front, released
    loop.stop()


def test_a_deposed_conductor_forgets_all_requests_and_releases_nothing(tmp_path: Path) -> None:
    """Another one has adopted them. A standby accepts no front, and says who leads."""

    async def test() -> None:
        leadership = Leadership(confirm=_yes)
        async with deciding(leadership, str(tmp_path / "link")) as (loop, server, front, released):
            leadership.leader = "http://other"
            leadership.set_term(0)
            assert loop.promised() == Promised(0, 0, 0, 0)
            loop.core.view.check()
            await until(lambda: front._link is None)
            assert server.fronts == 0
            await until(lambda: "standby; the one at http://other leads" in front._why)
            await front.leave()
            assert released == []

    run(test)


@pytest.mark.parametrize("leads", [True, False])
def test_the_requests_of_a_lost_front_end_if_this_conductor_still_leads(
    tmp_path: Path, leads: bool
) -> None:
    """It may have slept, while the front went to another Conductor, which has them now."""

    async def test() -> None:
        leadership = Leadership(confirm=_yes if leads else _no)
        async with deciding(leadership, str(tmp_path / "link")) as (_, server, front, released):
            await front.leave()
            await until(lambda: server.fronts == 0)
            await asyncio.sleep(0.05)
            assert [str(it) for it in released] == (["r/1"] if leads else [])

    run(test)


class Place:
    """A Conductor that takes fronts, in a registry."""

    def __init__(self, shared: Shared, http: HttpClient, name: str) -> None:
        self.name = name
        self.loop = ConductorLoop(Conductor(), lambda lease: None)
        self.registry = MemoryRegistry(shared)
        internal = Internal(self.loop, ["m"])
        self.it = InRegistry(
            self.registry, self.loop, internal, http, TOKEN, _known, takes_fronts=True
        )
        self.routes = internal.routes() | self.it.routes()
        self.server: Server

    async def start(self) -> None:
        """Listen and register."""
        self.server = await serve(App(self.routes, gate=Guard(TOKEN)), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self.server.port}"
        await self.it.start(ConductorEntry(self.name, 1, url, "m"))

    @property
    def term(self) -> int:
        """In which it leads; 0: it does not."""
        return self.it.leadership.term

    async def close(self) -> None:
        """End it in order."""
        await self.it.close()
        await self.server.stop(0)
        self.loop.stop()


async def _known() -> None:
    """What others hold is known at once."""


def test_a_standby_deposes_a_leader_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first leads; a second stands by. When the first does not answer, the second leads, in a
    higher term; and the first learns of it when it is back."""
    monkeypatch.setattr(in_registry, "_PATIENCE_S", 0.1)

    async def test() -> None:
        shared, http = Shared(), HttpClient()
        one, two = Place(shared, http, "one"), Place(shared, http, "two")
        await one.start()
        await two.start()
        await until(lambda: two.it.leadership.leader.endswith(str(one.server.port)))
        first = one.term
        assert first > 0
        assert two.term == 0
        assert one.loop.core.hot.leads
        assert not two.loop.core.hot.leads
        port = one.server.port
        await one.server.stop(0)
        await until(lambda: two.term > first)
        await until(lambda: two.loop.core.hot.leads)
        await until(lambda: one.term == 0)
        one.server = await serve(App(one.routes, gate=Guard(TOKEN)), "127.0.0.1", port)
        await until(lambda: one.it.leadership.leader.endswith(str(two.server.port)))
        await two.close()
        await until(lambda: one.term > first + 1)
        await one.close()
        await http.close()

    run(test)


def test_a_leader_that_is_told_of_a_higher_term_gives_way() -> None:
    """It may be cut off from the registry. A lower term changes nothing."""

    async def test() -> None:
        shared, http = Shared(), HttpClient()
        one = Place(shared, http, "one")
        await one.start()
        url = f"http://127.0.0.1:{one.server.port}/internal/term"
        for term, leads in ((one.term, True), (one.term + 1, False)):
            reply = await http.request(
                "POST",
                url,
                headers={"authorization": f"Bearer {TOKEN}"},
                body=msgspec.json.encode({"term": term}),
                timeout_s=5,
            )
            assert (reply.status, bool(one.term)) == (200, leads)
        await one.close()
        await http.close()

    run(test)
