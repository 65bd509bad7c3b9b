"""Draining instances over HTTP, in a whole cluster on one event loop, and in a registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Joined
from moonserve.core.units import SegmentId
from moonserve.live.control.drains import Drains, stuck
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve
from moonserve.live.registry.entries import DRAINS
from moonserve.live.store.external import ExternalPool
from tests.support.cluster import info
from tests.support.inproc import TOKEN, Site, site
from tests.support.registry import MemoryRegistry, Shared

PROMPT = list(range(2, 66))
SLOW = Cost((20_000, 0, 0, 0, 20_000, 0, 0), learns=False)
"""A pass takes 20 ms."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


async def call(at: Site, method: str, path: str, token: str = TOKEN) -> tuple[int, Any]:
    """A call of the admin API: its status and JSON."""
    reply = await at.http.request(method, at.url + path, headers=bearer(token), timeout_s=5)
    return reply.status, json.loads(reply.body)


async def until_idle(at: Site, name: str) -> dict[str, Any]:
    """Repeat the order, as the command does, until the instance is idle."""
    while True:
        _, status = await call(at, "POST", f"/api/instances/{name}/drain")
        if status["state"] == "idle":
            return dict(status)
        await asyncio.sleep(0.02)


def test_a_drained_decode_worker_ends_its_stream_and_gives_its_blocks_away() -> None:
    """The stream ends there, token for token. The blocks move to others, where they are found."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            await at.add("d0", "decode", SLOW)
            stream = asyncio.create_task(at.tokens(PROMPT, 30))
            while not at.busy_decode():
                await asyncio.sleep(0.005)
            await at.add("d1", "decode")
            status, said = await call(at, "POST", "/api/instances/d0/drain")
            assert (status, said["state"]) == (200, "draining")
            assert said["requests"] == 1
            assert await at.tokens(PROMPT[:20], 4) == at.reference(PROMPT[:20], 4)
            assert at.busy_decode() == ["d0"], "the other request went to d1 and has ended"
            assert await stream == at.reference(PROMPT, 30)
            await at.settle()
            said = await until_idle(at, "d0")
            assert said == {
                "instance": "d0",
                "state": "idle",
                "requests": 0,
                "blocks": 0,
                "warning": "",
            }
            assert not at.stores["d0"].owners[0].catalogue.held
            _, rows = await call(at, "GET", "/api/instances")
            assert {it["id"]: it["drained"] for it in rows} == {
                "d0": True,
                "d1": False,
                "p0": False,
            }

    run(test)


def test_the_blocks_of_a_drained_prefill_worker_are_still_reused() -> None:
    """Its prefix moves to another segment; after it has gone, a request finds it there."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            await at.add("d0", "decode")
            first = await at.tokens(PROMPT, 2)
            await at.settle()
            await at.add("p1", "prefill")
            await until_idle(at, "p0")
            await at.lose("p0")
            assert await at.tokens(PROMPT, 2) == first
            _, decision = await call(at, "GET", "/api/decisions?limit=1")
            assert decision[0]["prefill"] == "p1"
            assert decision[0]["actual_cached_tokens"] > 0

    run(test)


def test_an_order_may_be_taken_back() -> None:
    """After `resume` the instance serves, and its segment takes blocks."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            await at.add("d0", "decode")
            await until_idle(at, "d0")
            with pytest.raises(
                AssertionError,
                match=r"no decode instance .*; drained: d0; `moonserve drain d0 --resume`",
            ):
                await at.tokens(PROMPT, 2)
            await until_idle(at, "p0")
            with pytest.raises(
                AssertionError,
                match=r"no instance .*; drained: d0, p0; `moonserve drain NAME --resume` for each",
            ):
                await at.tokens(PROMPT, 2)
            await call(at, "POST", "/api/instances/p0/resume")
            status, said = await call(at, "POST", "/api/instances/d0/resume")
            assert (status, said["state"]) == (200, "serving")
            _, shown = await call(at, "GET", "/api/instances/d0")
            assert shown["state"] == "serving"
            assert await at.tokens(PROMPT, 2) == at.reference(PROMPT, 2)
            segments = at.gateway.pool.service.master.stats().segments
            assert not any(it.draining for it in segments)

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/api/instances/x/drain", 404, "'x' has joined, or it was lost; joined: p0;"),
        ("GET", "/api/instances/x", 404, "'x' has joined, or it was lost; joined: p0;"),
        ("POST", "/api/instances/p0/stop", 400, "neither with /drain nor with /resume"),
        ("POST", "/api/instances/drain", 404, "no instance named '' has joined"),
    ],
)
def test_wrong_orders_are_errors(method: str, path: str, status: int, text: str) -> None:
    """They name what is wrong."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            got, said = await call(at, method, path)
            assert got == status
            assert text in said["error"]["message"]

    run(test)


def test_a_drain_that_leaves_nobody_for_a_role_warns() -> None:
    """The warning names what no other instance can do, and so does an alarm. Both end with the
    order."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            await at.add("p1", "prefill")
            await at.add("d0", "decode")
            said = {}
            for name in ("p0", "p1", "d0"):
                _, status = await call(at, "POST", f"/api/instances/{name}/drain")
                said[name] = status["warning"]
            assert said["p0"] == ""
            assert said["p1"].startswith("no other instance can prefill for model ")
            assert said["d0"].startswith("no other instance can decode for model ")
            _, health = await call(at, "GET", "/health")
            prefill, decode = health["alarms"]
            assert prefill.startswith("all instances that prefill for model ")
            assert "are drained: p0, p1; new requests wait up to --wait-ready, and" in prefill
            assert "until `moonserve drain NAME --resume` for one of them, or" in prefill
            assert "`moonserve drain d0 --resume`" in decode
            _, status = await call(at, "POST", "/api/instances/p1/resume")
            assert status["warning"] == ""
            _, status = await call(at, "GET", "/api/instances/p0")
            assert status["warning"] == "", "p1 prefills again"
            _, health = await call(at, "GET", "/health")
            assert health["alarms"] == [decode]

    run(test)


def test_a_list_by_an_unknown_outcome_is_an_error() -> None:
    """An outcome that may come, or that a request has, is none."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            await at.add("d0", "decode")
            await at.tokens(PROMPT, 2)
            status, said = await call(at, "GET", "/api/decisions?outcome=foo")
            assert (status, said["error"]["param"]) == (400, "outcome")
            assert "'foo'; use one of under_way, waiting," in said["error"]["message"]
            status, rows = await call(at, "GET", "/api/decisions?outcome=length")
            assert (status, len(rows)) == (200, 1)
            assert await call(at, "GET", "/api/decisions?outcome=refused") == (200, [])

    run(test)


def test_an_order_needs_the_token() -> None:
    """As every change of the cluster does."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            status, _ = await call(at, "POST", "/api/instances/p0/drain", token="wrong")
            assert status == 401

    run(test)


def test_conductors_of_one_registry_know_the_orders_of_each_other() -> None:
    """One that starts later, or stands by, leaves the instance out as soon as it joins there."""

    async def test() -> None:
        shared = Shared()
        one = ConductorLoop(Conductor(), lambda lease: None)
        two = ConductorLoop(Conductor(), lambda lease: None)
        orders = Drains(one, ExternalPool("none"), MemoryRegistry(shared))
        other = Drains(two, ExternalPool("none"), MemoryRegistry(shared))
        server = await serve(App({}, orders.prefixes()), "127.0.0.1", 0)
        http = HttpClient()
        url = f"http://127.0.0.1:{server.port}/api/instances/p0"
        d0, p0 = Joined(info("d0", "decode")), Joined(info("p0", "prefill"))
        try:
            one.tell(d0, p0)
            one.settle()
            orders.start()
            reply = await http.request("POST", url + "/drain", timeout_s=5)
            assert reply.status == 200
            assert [it.id for it in one.instances()] == ["d0"]
            assert [*await MemoryRegistry(shared).read(DRAINS)] == [DRAINS + "p0"]
            other.start()
            two.tell(d0, p0)
            while [it.id for it in two.instances()] != ["d0"]:
                await asyncio.sleep(0.005)
            await http.request("POST", url + "/resume", timeout_s=5)
            while len(two.instances()) != 2:
                await asyncio.sleep(0.005)
            assert not await MemoryRegistry(shared).read(DRAINS)
        finally:
            orders.stop()
            other.stop()
            await http.close()
            await server.stop(0)
            one.stop()
            two.stop()

    run(test)


def test_a_segment_that_is_no_instance_is_left_alone() -> None:
    """Its store's master has no such segment: the order still holds for the instance."""

    async def test() -> None:
        async with site() as at:
            await at.add("p0", "prefill")
            pool = at.gateway.pool
            assert await pool.drain(SegmentId("p0"), True)
            assert not await pool.drain(SegmentId("nobody"), True)

    run(test)


def ledger(id: str, **more: Any) -> dict[str, Any]:
    """A full segment of four blocks of 10 bytes."""
    sizes = {"capacity_bytes": 40, "used_bytes": 40, "evictable_bytes": 0, "objects": 4}
    return {"id": id, "tier": "dram", "draining": False, **sizes, **more}


@pytest.mark.parametrize(
    ("others", "moves"),
    [
        ([], False),
        ([ledger("p1")], False),
        ([ledger("p1", used_bytes=30)], True),
        ([ledger("p1", used_bytes=31)], False),
        ([ledger("p1", evictable_bytes=10)], True),
        ([ledger("p1", used_bytes=0, draining=True)], False),
        ([ledger("p1"), ledger("p2", used_bytes=0)], True),
        ([ledger("disk", used_bytes=0, tier="disk")], False),
    ],
)
def test_a_drain_whose_blocks_have_no_place_says_so(
    others: list[dict[str, Any]], moves: bool
) -> None:
    """They move to free or evictable bytes of other segments in memory that are not drained."""
    own = ledger("p0", draining=True)
    said = stuck(own, [own, *others])
    assert (said == "") == moves
    assert moves or "start one with `moonserve segment`, or stop" in said
    assert stuck(ledger("p0", objects=0), []) == stuck(None, others) == ""
