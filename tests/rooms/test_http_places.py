"""How many connections a server accepts, and which clients get in when there are too many."""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moonserve.live.http import places as http_places
from moonserve.live.http import server as http_server
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.places import PlaceLimits, Places
from moonserve.live.http.server import App, Server, serve
from tests.support.loops import both_loops  # noqa: F401 - autouse

GET = b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n"


def test_the_address_with_the_most_connections_makes_room() -> None:
    """Its connection that is idle the longest is closed for a new one; busy ones never are."""
    places: Places[int] = Places(PlaceLimits(connections=5, per_address=9))
    assert [places.enter(n, "10.0.0.1") for n in range(4)] == [("own", None)] * 4
    assert places.enter(4, "10.0.0.2") == ("own", None)
    places.busy(0)
    assert places.enter(5, "10.0.0.3") == ("own", 1)
    places.leave(1)
    places.idle(0)
    assert places.enter(6, "10.0.0.3") == ("own", 2)
    places.leave(2)
    for busy in (0, 3, 4, 5, 6):
        places.busy(busy)
    assert places.enter(7, "10.0.0.4") == ("reserved", None)
    places.busy(7)
    assert places.enter(8, "10.0.0.5") == ("none", None)
    assert places.refused == 1
    for left in (0, 3, 4, 5, 6, 7, 8):
        places.leave(left)
    assert (places.count, places._peers, places._by) == (0, {}, {})


def test_one_address_has_a_share() -> None:
    """Other addresses keep their places; loopback has no bound, and IPv6 counts by its prefix."""
    places: Places[str] = Places(PlaceLimits(connections=8))
    for address in ("10.0.0.1", "2001:db8:1:2::7"):
        found = [places.enter(f"{address}-{n}", address)[0] for n in range(3)]
        assert found == ["own"] * 3
        places.leave(f"{address}-0")
    assert places.enter("a", "10.0.0.1")[0] == places.enter("b", "10.0.0.1")[0] == "own"
    assert places.enter("c", "10.0.0.1")[0] == "none"
    assert places.enter("d", "2001:db8:1:2:ffff::1%eth0")[0] == "own"
    free: Places[int] = Places(PlaceLimits(connections=8))
    for address in ("127.0.0.1", "::1", ""):
        start = free.count
        assert [free.enter(start + n, address)[0] for n in range(8)].count("none") == 0


def test_counts_balance() -> None:
    """Whatever connections do, all places are free when they have ended."""
    chance = random.Random(5)
    places: Places[int] = Places(PlaceLimits(connections=20, per_address=8))
    here: list[int] = []
    for number in range(3_000):
        step = chance.random()
        if step < 0.4 or not here:
            _, out = places.enter(number, f"10.0.0.{chance.randrange(6)}")
            here.append(number)
            if out is not None:
                here.remove(out)
                places.leave(out)
        elif step < 0.8:
            chance.choice((places.busy, places.idle))(chance.choice(here))
        else:
            left = here.pop(chance.randrange(len(here)))
            places.leave(left)
        assert places.count == len(here) == sum(it.count for it in places._peers.values())
    for left in here:
        places.leave(left)
    assert (places.count, places._peers) == (0, {})


@pytest.mark.parametrize(
    ("files", "each", "most"), [(256, 2, 64), (1_024, 1, 896), (90_000, 2, 16_384)]
)
def test_the_limit_of_files_limits_connections(
    monkeypatch: pytest.MonkeyPatch, files: int, each: int, most: int
) -> None:
    """Without a setting, a process accepts as many connections as it has descriptors for."""
    monkeypatch.setattr(http_places, "descriptors", lambda: files)
    assert Places[int](PlaceLimits(files_each=each)).most == most
    assert Places[int](PlaceLimits(connections=7, files_each=each)).most == 7


def test_the_limit_of_files_is_raised() -> None:
    """A process may open as many files as it is allowed to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert http_places.descriptors() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Rig:
    """A server with few places."""

    def __init__(self) -> None:
        self.waiting = 0
        self.release = asyncio.Event()
        routes = {
            ("GET", "/v1/wait"): self.wait,
            ("GET", "/v1/models"): self.ok,
            ("GET", "/health"): self.ok,
            ("GET", "/api/stats"): self.ok,
        }
        limits = PlaceLimits(connections=8, per_address=6)
        self.app = App(routes, place_limits=limits, head_timeout_s=0.3)
        self.server: Server

    async def wait(self, request: HttpRequest) -> Response:
        self.waiting += 1
        await self.release.wait()
        return Response(body=b"waited")

    async def ok(self, request: HttpRequest) -> Response:
        return Response(body=b"ok")

    async def open(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def status(self, path: bytes) -> int:
        """The status of one request on a connection of its own; 0: it was closed."""
        reader, writer = await self.open(GET % path)
        line = await reader.readline()
        writer.close()
        return int(line.split()[1]) if line else 0

    async def waits(self, count: int) -> None:
        """Return when so many requests wait."""
        while self.waiting < count:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def served() -> AsyncIterator[Rig]:
    """A rig that listens."""
    async with asyncio.timeout(20):
        rig = Rig()
        rig.server = await serve(rig.app, "127.0.0.1", 0)
        try:
            yield rig
        finally:
            await rig.server.stop(0)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET % b"/health"])
def test_idle_connections_and_slow_heads_make_room(sent: bytes) -> None:
    """Clients that open connections without end keep nobody out."""

    async def main() -> None:
        async with served() as rig:
            held = [await rig.open(sent) for _ in range(8)]
            await asyncio.sleep(0.05)
            busy = await rig.open(GET % b"/v1/wait")
            await rig.waits(1)
            for _ in range(30):
                held.append(await rig.open(sent))
                assert await rig.status(b"/v1/models") == 200
            assert len(rig.server._connections.open) <= 9
            rig.release.set()
            assert (await busy[0].readline()).startswith(b"HTTP/1.1 200 ")
            for _, writer in [*held, busy]:
                writer.close()

    asyncio.run(main())


def test_the_reserve_serves_health_and_the_cluster() -> None:
    """If all places have requests under way, a client gets a 429, and probes are answered."""

    async def main() -> None:
        async with served() as rig:
            held = [await rig.open(GET % b"/v1/wait") for _ in range(8)]
            await rig.waits(8)
            for _ in range(3):
                assert await rig.status(b"/v1/models") == 429
                assert await rig.status(b"/health") == 200
                assert await rig.status(b"/api/stats") == 200
                await asyncio.sleep(0.02)
            reader, writer = await rig.open(GET % b"/health" * 2)
            assert b"\r\nconnection: close\r\n" in await reader.read()
            writer.close()
            rig.release.set()
            for reader, writer in held:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            await asyncio.sleep(0.05)
            assert await rig.status(b"/v1/models") == 200

    asyncio.run(main())


def test_an_address_over_its_share_gets_a_429(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed; another address is served."""
    addresses = iter(["10.0.0.1"] * 7 + ["10.0.0.2"])
    monkeypatch.setattr(http_server, "address_of", lambda peer: next(addresses))

    async def main() -> None:
        async with served() as rig:
            held = [await rig.open(GET % b"/v1/wait") for _ in range(6)]
            await rig.waits(6)
            assert await rig.status(b"/health") == 429
            assert await rig.status(b"/v1/models") == 200
            for _, writer in held:
                writer.close()

    asyncio.run(main())
