"""KV that decode stored: a whole cluster on one loop, fake engines that notice any wrong byte."""

from __future__ import annotations

import asyncio

from moonserve.core.schedule.cost import Cost
from moonserve.core.units import RequestId
from moonserve.live.engine.fake import fake_cost
from tests.support.inproc import BLOCK, Site, site
from tests.support.records import record_of

SLOW = fake_cost(200, 10, 4_000)


async def hits(it: Site, name: str) -> int:
    """Prompt tokens that a worker loaded from the store so far."""
    reply = await it.http.request("GET", it.workers[name].info.url + "/metrics", timeout_s=5)
    for line in reply.body.decode().splitlines():
        if line.startswith("vllm:external_prefix_cache_hits_total"):
            return round(float(line.rsplit(" ", 1)[1]))
    raise AssertionError("no such metric")


async def cluster(it: Site, decode_kv: str | int, cost: Cost | None = None) -> None:
    """One prefill worker, two decode workers."""
    await it.add("p0", "prefill")
    for name in ("d0", "d1"):
        await it.add(name, "decode", cost, decode_kv=decode_kv)


def test_the_next_turn_finds_the_answer() -> None:
    """A prompt that continues with the answer computes none of its full blocks again."""

    async def main() -> None:
        for decode_kv, reused in (("end", 8), (2, 8), ("off", 5)):
            async with site() as it:
                await cluster(it, decode_kv)
                prompt = list(range(5_000, 5_000 + 5 * BLOCK + 3))
                answer = await it.tokens(prompt, 3 * BLOCK)
                assert answer == it.reference(prompt, 3 * BLOCK)
                await it.settle()
                before = await hits(it, "p0")
                longer = [*prompt, *answer, 7, 8, 9]
                assert await it.tokens(longer, 5) == it.reference(longer, 5)
                assert await hits(it, "p0") - before == reused * BLOCK
                await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_lost_decode_worker_is_resumed_from_what_it_stored() -> None:
    """A stream whose worker is killed continues elsewhere, with no token twice and none missing.

    Of the tokens that were sent, only those in no full block are computed again.
    """

    async def main() -> None:
        async with site() as it:
            await cluster(it, 1, SLOW)
            prompt = list(range(5_000, 5_000 + 5 * BLOCK + 3))
            count = 8 * BLOCK
            id = RequestId("resumed")
            stream = asyncio.create_task(it.tokens(prompt, count, **{"x-request-id": id}))
            master = it.gateway.pool.service.master
            while master.stats().objects < 5 + 3:  # the prompt's, and some of the answer's
                await asyncio.sleep(0.01)
            [name] = it.busy_decode()
            before = await hits(it, "p0")
            await it.lose(name)
            assert await stream == it.reference(prompt, count)
            resumed = await hits(it, "p0") - before
            print(f"\n{name} lost: {resumed} tokens reused, the prompt has {len(prompt)}")
            assert resumed >= (5 + 2) * BLOCK
            record = record_of(it.gateway.conductor, id)
            assert record.attempts == 2
            assert record.decision is not None
            assert record.decision.reused_tokens == resumed
            assert record.outcome == "length"
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))
