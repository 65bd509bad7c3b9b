"""People's questions about the pool, and the pool's events for a gateway elsewhere, by HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest, MoonserveError, StoreError
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.store.master import Master
from moonserve.core.store.words import Address, Mount, Terms
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.access.guard import Guard
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.store import wire
from moonserve.live.store.admin import lookup
from moonserve.live.store.local import EventLog, LocalPool
from moonserve.live.store.remote import HttpRpc, RemotePool
from moonserve.live.store.server import MasterService
from tests.support.pools import key, replay

ADDRESS = Address("127.0.0.1", 1, "", bytes(16))
LEASE = LeaseId("l")


def master(recovering: bool = False) -> Master:
    """A master with one segment mounted."""
    made = Master(Terms(), 1, 10**9 if recovering else None)
    made.mount(0, Mount(SegmentId("w"), 1, 1 << 20, ADDRESS))
    return made


def put(into: Master, *numbers: int, parent: int | None = None) -> None:
    """Put blocks of a chain, without bytes."""
    before = None if parent is None else key(parent)
    items = [(key(n), 10) for n in numbers]
    tickets = into.put_start(0, SegmentId("w"), items, LEASE, before)
    assert all(into.put_end(0, [(it.id, 7) for it in tickets], LEASE))  # type: ignore[union-attr]


def test_lookup_has_the_segments_of_a_key() -> None:
    """The ledgers without a query, one object's place with a key, objects in order by prefix."""
    pool = master()
    put(pool, 0, 1, 2)
    everything = lookup(pool, {})
    assert everything["segments"][0]["id"] == "w"
    assert (everything["objects"], everything["leases"]) == (3, 1)
    one = lookup(pool, {"key": key(0).hex()})
    assert one["exists"]
    assert one["replicas"] == [{"segment": "w", "offset": 0}]
    assert lookup(pool, {"key": "00"}) == {"key": "00", "exists": False, "replicas": []}
    listed = lookup(pool, {"prefix": "00", "after": key(0).hex(), "limit": "1"})
    assert [it["key"] for it in listed["objects"]] == [key(1).hex()]
    assert msgspec.json.encode([everything, one, listed])


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"key": ""}, "key"),
        ({"key": "xyz"}, "key"),
        ({"key": "00" * 257}, "key"),
        ({"prefix": "0"}, "prefix"),
        ({"prefix": "", "after": "x"}, "after"),
        ({"prefix": "", "limit": "0"}, "limit"),
        ({"prefix": "", "limit": "many"}, "limit"),
        ({"prefix": "", "limit": "1001"}, "limit: must be 1000 or less"),
        ({"prefix": "", "limit": "9" * 5_000}, "limit: integer value out of range"),
        ({"prefix": "", "limit": "\u0661"}, "limit: must be a whole number"),
        ({"limit": "many"}, "limit: must be a whole number"),
        ({"prefx": "00"}, "prefx: there is no such field; did you mean prefix"),
        ({"limit": "5"}, "limit goes with prefix"),
        ({"after": "00"}, "after goes with prefix"),
    ],
)
def test_wrong_questions_are_refused(query: dict[str, str], named: str) -> None:
    """A malformed key or limit is a bad request that names it."""
    with pytest.raises(BadRequest, match=named):
        lookup(master(), query)


class Site:
    """A master's process and a gateway's side of it, in one loop, by real HTTP."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.http = HttpClient()
        self.port = 0

    async def start(self, pool: Master, start: int, most: int = 100) -> None:
        """Serve this master, on the port of the one before."""
        self.log = log = EventLog(start, pool.inventory, most)
        self.local = LocalPool(MasterService(pool, lambda: 0), log.add, log)
        app = App(self.local.routes(), gate=Guard("secret"), name="store")
        self.server: Server = await serve(app, "127.0.0.1", self.port)
        self.port = self.server.port

    def tell(self, events: Any) -> None:
        """The gateway receives events."""
        told: list[BlockEvent] = list(events)
        replay(self.index, told)

    async def knows(self, *lengths: int) -> None:
        """Wait until the index has this many leading blocks of each chain: 0.., 10.., ..."""
        chains = [[key(10 * i + n) for n in range(10)] for i in range(len(lengths))]
        async with asyncio.timeout(5):
            while [self.index.match(chain).pool for chain in chains] != list(lengths):
                await asyncio.sleep(0.005)


def run(test: Callable[[Site, RemotePool], Awaitable[None]]) -> None:
    """Run a test with a site and the gateway's side."""

    async def body() -> None:
        site = Site()
        await site.start(master(), 1)
        pool = RemotePool(site.http, f"http://127.0.0.1:{site.port}", "secret", site.tell)
        try:
            await test(site, pool)
        finally:
            await pool.close()
            await site.server.stop(0)
            await site.http.close()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_gateway_elsewhere_receives_every_block() -> None:
    """Blocks from before it connected, later ones and removed ones; it can end leases, too."""

    async def test(site: Site, pool: RemotePool) -> None:
        it = site.local.service.master
        put(it, 0, 1, 2)
        site.local.tick()
        await site.knows(3)
        put(it, 3, parent=2)
        put(it, 10, 11)
        site.local.tick()
        await site.knows(4, 2)
        found = it.locate(key(1))
        assert found is not None
        it.discard(key(1), found.version)
        site.local.tick()
        await site.knows(1, 2)
        assert it.stats().leases == 1
        pool.release(LEASE)
        async with asyncio.timeout(5):
            while it.stats().leases:
                await asyncio.sleep(0.005)
        assert (await pool.lookup({"key": key(0).hex()}))["exists"]
        with pytest.raises(BadRequest, match="limit"):
            await pool.lookup({"prefix": "", "limit": "x"})

    run(test)


def test_a_gateway_elsewhere_has_copies_made() -> None:
    """The master orders copies of the target's owner, and returns how many will come."""

    async def test(site: Site, pool: RemotePool) -> None:
        it = site.local.service.master
        it.mount(0, Mount(SegmentId("v"), 1, 1 << 20, ADDRESS))
        put(it, 0, 1, 2)
        keys = [BlockKey(key(n)) for n in (0, 1, 2, 3)]
        for asked in (pool, site.local):
            assert await asked.copy(keys, SegmentId("v"), SegmentId("w")) == 3
        assert await pool.copy(keys, SegmentId("nobody"), None) == 0
        orders = it.beat(0, SegmentId("v"), 1)
        assert orders is not None
        assert [copy.held.key for copy in orders.copies] == [key(0), key(1), key(2)]

    run(test)


def test_a_listener_too_far_behind_or_of_another_start_receives_everything() -> None:
    """Blocks that are gone are forgotten; while a new master recovers, nothing is forgotten."""

    async def test(site: Site, pool: RemotePool) -> None:
        put(site.local.service.master, 0, 1, 2)
        site.local.tick()
        await site.knows(3)
        await site.server.stop(0)
        again = master(recovering=True)
        await site.start(again, 2, most=2)
        await asyncio.sleep(0.7)
        await site.knows(3)
        again.reap(10**9)
        again.mount(10**9, Mount(SegmentId("w"), 1, 1 << 20, ADDRESS))
        put(again, 0, 10)
        site.local.tick()
        await site.knows(1, 1)
        for number in (1, 2, 3):
            put(again, number, parent=number - 1)
            site.local.tick()
        await site.knows(4, 1)
        behind = await site.log.answer(wire.EventsCall(2, 1, 0.0))
        assert behind.anew

    run(test)


def test_operations_need_the_token_and_a_gateway_says_where_the_master_is() -> None:
    """Without the token an operation is refused; the gateway of a remote pool runs none."""

    async def test(site: Site, pool: RemotePool) -> None:
        url = f"http://127.0.0.1:{site.port}"
        body = msgspec.msgpack.encode([[key(0)]])
        with pytest.raises(MoonserveError, match="does not accept it; set MOONSERVE_TOKEN"):
            await HttpRpc(site.http, url, "guess")("exists", body, math.inf)
        reply = await HttpRpc(site.http, url, "secret")("exists", body, math.inf)
        assert msgspec.msgpack.decode(reply) == [False]

    run(test)


@pytest.mark.parametrize(
    ("status", "text"), [(200, b"<html>"), (400, b"<html>"), (400, b'{"detail":"no"}')]
)
def test_a_url_that_is_no_master_is_a_clear_error(status: int, text: bytes) -> None:
    """The error names another server that answers there, in HTML or in JSON of its own."""

    async def body() -> None:
        async def page(request: HttpRequest) -> Response:
            return Response(status, text, content_type="text/html")

        server = await serve(App({("GET", "/api/segments"): page}), "127.0.0.1", 0)
        http = HttpClient()
        url = f"http://127.0.0.1:{server.port}"
        pool = RemotePool(http, url, "secret", lambda events: None)
        try:
            with pytest.raises(StoreError, match=f"{url}.* is no store's master"):
                await pool.lookup({})
        finally:
            await pool.close()
            await server.stop(0)
            await http.close()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_beat_counts_though_its_answer_is_lost() -> None:
    """An owner whose connections break before each held answer is still alive for the master."""
    now_us = 0

    async def body() -> None:
        nonlocal now_us
        pool = LocalPool(MasterService(master(), lambda: now_us), lambda events: None)
        beat = msgspec.msgpack.encode(wire.BeatCall(SegmentId("w"), 1, wait_s=60.0))
        for _ in range(6):
            now_us += 4_000_000
            answer = pool.answer("beat", beat)
            assert not isinstance(answer, bytes)
            held = asyncio.create_task(answer)
            await asyncio.sleep(0)
            held.cancel()
            pool.tick()
            assert "w" in pool.service.master.addresses()
        now_us += 10_000_000
        pool.tick()
        assert "w" not in pool.service.master.addresses()

    asyncio.run(body())


def test_nothing_is_kept_of_segments_that_are_not_mounted() -> None:
    """The beat of an unmounted segment is answered at once; a segment that left is forgotten."""

    async def body() -> None:
        pool = LocalPool(MasterService(master(), lambda: 0), lambda events: None)
        for name in ("w", "stranger"):
            call = wire.BeatCall(SegmentId(name), 1, wait_s=60.0 if name == "stranger" else 0.01)
            async with asyncio.timeout(5):
                answer = pool.answer("beat", msgspec.msgpack.encode(call))
                assert not isinstance(answer, bytes)
                await answer
        assert list(pool._new_copies) == ["w"]
        pool.service.master.unmount(SegmentId("w"), 1)
        pool.tick()
        assert pool._new_copies == {}

    asyncio.run(body())
