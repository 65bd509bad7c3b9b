"""Copies of prefixes on real workers with fake engines: made, told of, and used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonserve.core.kv.keys import chain_keys
from moonserve.core.units import SegmentId
from moonserve.live.engine.fake import fake_cost
from moonserve.live.http.auth import bearer
from tests.support.inproc import BLOCK, TOKEN, Site, site

pytestmark = pytest.mark.model  # for its tokenizer and chat template

PREFIX = list(range(100, 100 + 10 * BLOCK))
SLOW = fake_cost(base_us=20_000, prefill_us_per_token=500)
"""Loading is sooner done than computing, on any machine."""


def run(test: Callable[[Site], Awaitable[None]], **config: Any) -> None:
    """Two prefill workers and one that decodes, inside a deadline."""

    async def main() -> None:
        async with asyncio.timeout(60), site(**config) as it:
            for name in ("p0", "p1"):
                await it.add(name, "prefill", SLOW)
            await it.add("d0", "decode")
            await test(it)

    asyncio.run(main())


async def get(it: Site, path: str) -> str:
    """The body of a GET on the gateway."""
    reply = await it.http.request("GET", it.url + path, headers=bearer(TOKEN), timeout_s=5)
    assert reply.status == 200, reply.body
    return reply.body.decode()


async def decision(it: Site, request: str) -> dict[str, Any]:
    """What the API says of a request."""
    told: dict[str, Any] = json.loads(await get(it, f"/api/decisions/{request}"))
    return told


async def asked(it: Site, number: int) -> dict[str, Any]:
    """A request for the prefix with a tail of its own, served; its decision."""
    prompt = [*PREFIX, 1_000 + number]
    got = await it.tokens(prompt, 4, **{"x-request-id": f"r{number}"})
    assert got == it.reference(prompt, 4)
    return await decision(it, f"r{number}")


def holders(it: Site) -> list[str]:
    """The segments that have all of the prefix, as the index knows."""
    index = it.gateway.conductor.core.index
    namespace = it.workers["d0"].info.namespace
    keys = list(chain_keys(namespace.root(), PREFIX, BLOCK))
    held = index.match(keys).by_holder
    return sorted(str(name) for name, blocks in held.items() if blocks == len(keys))


async def until_held(it: Site, *names: str) -> None:
    """Wait until these have all of it."""
    async with asyncio.timeout(10):
        while holders(it) != list(names):
            await asyncio.sleep(0.01)


def test_a_hot_prefix_is_copied_and_used() -> None:
    """Asked for often, and by turns of both, it is copied to the other; which then has it, also
    when the first is gone. The decision, the metrics and the ledger tell of it."""

    async def test(it: Site) -> None:
        told = [await asked(it, number) for number in range(16)]
        spreads = [one["spread"] for one in told if one["spread"]]
        assert len(spreads) == 1
        assert spreads[0].startswith("Its first 160 tokens are copied from p1 to p0, in the back")
        await until_held(it, "p0", "p1")
        page = await get(it, "/metrics")
        assert 'moonserve_spread_copies_total{stage="done"} 1.0' in page
        assert "moonserve_spread_copies_under_way 0.0" in page
        block_bytes = it.workers["p1"].info.block_bytes
        assert f"moonserve_spread_copied_bytes_total {float(10 * block_bytes)}" in page
        await it.settle()
        await it.lose("p1")
        last = await asked(it, 99)
        assert (last["prefill"], last["actual_cached_tokens"]) == ("p0", 160)

    run(test, policy="round_robin")


def test_nothing_is_copied_where_that_is_turned_off() -> None:
    """The same requests, and one holder."""

    async def test(it: Site) -> None:
        told = [await asked(it, number) for number in range(16)]
        assert not any(one["spread"] for one in told)
        assert holders(it) == ["p1"]

    run(test, policy="round_robin", spread_bytes=0)


def test_who_fetched_a_prefix_keeps_it() -> None:
    """Algorithm 1: what the chosen worker loaded from another lies in its own segment as well."""

    async def test(it: Site) -> None:
        await asked(it, 0)
        assert holders(it) == ["p0"]
        told = await asyncio.gather(*[asked(it, number) for number in range(1, 5)])
        fetched = [one for one in told if one["prefill"] == "p1"]
        assert any(one["holder"] == "p0" for one in fetched)
        assert "160 of them loaded from p0 and kept" in fetched[0]["why"]
        await until_held(it, "p0", "p1")
        assert it.gateway.conductor.kept_blocks >= 10
        await it.settle()
        await it.lose("p0")
        last = await asked(it, 99)
        assert (last["prefill"], last["actual_cached_tokens"]) == ("p1", 160)

    run(test, policy="kvcache_centric")


def test_a_copy_that_the_store_cannot_make_is_over_at_once() -> None:
    """Nothing stays under way where the store answers that nothing will come."""

    async def test(it: Site) -> None:
        async def copy(keys: Any, to: SegmentId, source: SegmentId | None) -> int:
            raise OSError("no route to the master")

        it.gateway.conductor._copy = copy
        for number in range(16):
            await asked(it, number)
        hot = it.gateway.conductor.core.hot
        assert hot.done["failed"] == hot.done["started"] == 1
        assert len(hot) == hot.bytes_under_way == 0

    run(test, policy="round_robin")
