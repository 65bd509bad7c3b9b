"""The gateway process with real workers on one event loop: drains, joins, restarts, disorder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import ConfigError
from moonserve.live.engine.fake import fake_cost
from moonserve.live.process.gateway import Gateway
from tests.support.inproc import TOKEN, Site, site

pytestmark = pytest.mark.model  # for its tokenizer and chat template

PROMPT = list(range(100, 150))


def run(test: Callable[[Site], Awaitable[None]], **config: Any) -> None:
    """Run with a gateway, inside a deadline."""

    async def main() -> None:
        async with asyncio.timeout(60), site(**config) as it:
            await test(it)

    asyncio.run(main())


def test_a_drain_outlasts_the_silence_that_means_death() -> None:
    """Workers beat and use the store until the last request has ended: none counts as dead."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode", fake_cost(base_us=50_000))
        stream = asyncio.create_task(it.tokens(PROMPT, 80))
        await asyncio.sleep(0.5)
        stopping = asyncio.create_task(it.gateway.stop(20))
        assert await stream == it.reference(PROMPT, 80)
        await stopping

    run(test, dead_after_us=1_500_000)


def test_who_may_join() -> None:
    """Another model, an older start of a name, other KV, and a missing token are refused."""

    async def test(it: Site) -> None:
        worker = await it.add("p0", "prefill", epoch=10)

        async def join(token: str = TOKEN, **changes: Any) -> tuple[int, str]:
            reply = await it.http.request(
                "POST",
                it.url + "/internal/join",
                headers={"authorization": f"Bearer {token}"},
                body=msgspec.msgpack.encode(msgspec.structs.replace(worker.info, **changes)),
                timeout_s=5,
            )
            return reply.status, reply.body.decode()

        assert await join("wrong") == (401, (await join("wrong"))[1])
        for changes, word in [
            ({"model": "other"}, "serves"),
            ({"epoch": 9}, "newer epoch"),
            ({"url": "nonsense"}, "URL"),
        ]:
            status, text = await join(**changes)
            assert status in (400, 409), text
            assert word in text
        space = msgspec.structs.replace(worker.info.namespace, block_size=999)
        status, text = await join(id="p1", namespace=space)
        assert (status, "block_size" in text) == (409, True)
        older = it.members["p0"]
        await it.stores["p0"].close()  # while its segment lives, it keeps its name
        await it.add("p0", "prefill", epoch=11)
        with pytest.raises(ConfigError, match="newer epoch"):
            await asyncio.wait_for(older, 30)  # it tries for 6 s, and ends rather than flap

    run(test)


def test_disorder_leaves_nothing_behind_and_no_wrong_token() -> None:
    """Cancellations, a worker that comes back as another epoch, small pools: tokens stay exact."""

    async def test(it: Site) -> None:
        random = Random(11)
        for name in ("p0", "p1", "d0", "d1"):
            await it.add(name, "prefill" if name[0] == "p" else "decode", blocks=64)
        shared = [random.randrange(100, 2000) for _ in range(200)]

        async def one(i: int) -> None:
            prompt = [*shared[: random.randrange(1, 200)], 3000 + i]
            wanted = it.reference(prompt, 30)
            if i % 3 == 0:
                task = asyncio.create_task(it.tokens(prompt, 30))
                await asyncio.sleep(random.random() * 0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert await it.tokens(prompt, 30) == wanted

        for start in range(0, 90, 15):
            await asyncio.gather(*[one(i) for i in range(start, start + 15)])
        await it.settle()

    run(test)


def test_a_restarted_gateway_finds_its_workers_again() -> None:
    """Workers and segments come back by themselves; index and store agree; requests are served."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        wanted = it.reference(PROMPT, 10)
        assert await it.tokens(PROMPT, 10) == wanted
        config = msgspec.structs.replace(it.gateway._config, port=it.gateway.port)
        await it.gateway.stop(0)
        it.gateway = await Gateway.start(config)
        async with asyncio.timeout(20):
            while (
                len(it.gateway.pool.service.master.stats().segments) < 2
                or len(it.gateway.conductor.core.view.instances) < 2
            ):
                await asyncio.sleep(0.05)
        assert await it.tokens(PROMPT, 10) == wanted
        await it.settle()
        stats = it.gateway.pool.service.master.stats()
        assert len(it.gateway.conductor.core.index) == stats.objects > 0
        await it.gateway.stop(0)

    run(test)
