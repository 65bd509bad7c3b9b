"""A live cluster with little to do: when it is ready, and which of equal workers it uses."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from moonserve.live.http.client import ClientResponse
from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.inproc import Site, site

pytestmark = pytest.mark.model  # for its tokenizer


async def post(it: Site, number: int) -> ClientResponse:
    """A completion of a prompt of its own."""
    prompt = [1 + (number * 97 + i) % 5_000 for i in range(100)]
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return await it.http.request(
        "POST", it.url + "/v1/completions", body=json.dumps(body).encode(), timeout_s=30
    )


def test_forty_prompts_one_after_another_use_all_workers() -> None:
    """Each worker fits its own costs, which differ a little; none draws all requests by that."""

    async def main() -> None:
        async with asyncio.timeout(60), site() as it:
            for number in range(4):
                await it.add(f"p{number}", "prefill")
                await it.add(f"d{number}", "decode")
            for number in range(40):
                assert (await post(it, number)).status == 200
            records = list(it.gateway.conductor.account.latest())
            decisions = [record.decision for record in records]
            prefills = Counter(one.prefill for one in decisions if one is not None)
            decodes = Counter(one.decode for one in decisions if one is not None)
            assert prefills.keys() == {"p0", "p1", "p2", "p3"}
            assert decodes.keys() == {"d0", "d1", "d2", "d3"}
            assert max(prefills.values()) <= 30, prefills
            assert max(decodes.values()) <= 30, decodes

    asyncio.run(main())


def test_ready_when_all_workers_have_joined() -> None:
    """A pair can serve before; a worker that leaves later does not make it unready again."""

    async def ready(it: Site) -> tuple[int, bytes]:
        reply = await it.http.request("GET", it.url + "/ready", timeout_s=5)
        return reply.status, reply.body

    async def main() -> None:
        async with asyncio.timeout(60), site(ready_instances=3) as it:
            await it.add("p0", "prefill")
            await it.add("d0", "decode")
            assert (await post(it, 0)).status == 200
            status, body = await ready(it)
            assert (status, b"2 of 3 instances have joined" in body) == (503, True)
            await it.add("p1", "prefill")
            assert (await ready(it))[0] == 200
            await it.lose("p1")
            assert (await ready(it))[0] == 200

    asyncio.run(main())
