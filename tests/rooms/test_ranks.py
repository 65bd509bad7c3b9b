"""Engines of several data-parallel ranks, behind a whole gateway: one address, a cache per rank.

Stands in for real ones, which were not run with ranks here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moonserve.core.kv.keys import chain_keys
from moonserve.core.units import InstanceId
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.process import gateway as gateway_process
from moonserve.live.process.gateway import Gateway
from tests.support.engines import QUICK
from tests.support.fake_vllm import Fabric, spoken
from tests.support.ranks import Ranks
from tests.support.serving import ByteText

WORDS = "the quick brown fox jumps over the lazy dog, and then once more. " * 6


class Site:
    """A gateway before engines of ranks."""

    def __init__(self, gateway: Gateway, http: HttpClient) -> None:
        self.gateway, self._http = gateway, http

    async def ask(self, prompt: str, stream: bool = False) -> ClientResponse:
        """A completion."""
        asked = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": stream}
        url = f"http://127.0.0.1:{self.gateway.port}/v1/completions"
        return await self._http.request("POST", url, body=msgspec.json.encode(asked), timeout_s=20)

    async def cached(self, prompt: str) -> int:
        """The same, whole: what of its prompt was cached; its words must be the engine's."""
        reply = await self.ask(prompt)
        assert reply.status == 200, reply
        said = msgspec.json.decode(reply.body)
        assert said["choices"][0]["text"] == "".join(spoken(list(prompt.encode()), 3))
        return int(said["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def up(self, *names: str) -> None:
        """Wait until just these instances are, each with its events."""

        def there() -> bool:
            feeds = {i: f for _, it in self.gateway.fleet.monitors() for i, f in it.feeds.items()}
            views = self.gateway.conductor.core.view.instances
            fed = all(InstanceId(it) in feeds for it in names)
            return {*names} == {*views} and fed and all(f.counts().trusted for f in feeds.values())

        await self.until(there)

    async def until(self, true: Any) -> None:
        """Wait for it."""
        async with asyncio.timeout(15):
            while not true():
                await asyncio.sleep(0.02)

    def held(self, prompt: str) -> dict[str, int]:
        """Blocks of a prompt by instance, as the gateway knows."""
        core = self.gateway.conductor.core
        namespace = next(iter(core.view.instances.values())).info.namespace
        keys = chain_keys(namespace.root(), list(prompt.encode()), namespace.block_size)
        return {str(it): count for it, count in core.index.match(keys).by_holder.items() if count}


@contextlib.asynccontextmanager
async def site(
    monkeypatch: pytest.MonkeyPatch, *engines: Ranks, **described: Any
) -> AsyncIterator[Site]:
    """A gateway that follows these engines' events."""
    monkeypatch.setattr(gateway_process, "read_text", lambda ref: SimpleNamespace(tools=ByteText()))
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        specs = [
            InstanceSpec(
                name=it.name,
                url=it.url,
                tokenizer="t",
                events=it.events,
                replay=it.replay,
                **({"dp_size": it.dp_size} | described.get(it.name, {})),
            )
            for it in engines
        ]
        gateway = await Gateway.start(GatewayConfig(model="", port=0), specs, QUICK)
        stack.push_async_callback(gateway.stop, 0)
        http = HttpClient()
        stack.push_async_callback(http.close)
        yield Site(gateway, http)


async def spread(it: Site, engine: Ranks, count: int = 4) -> list[str]:
    """Prompts that were sent at once, so that every rank has some."""
    prompts = [f"{number}: {WORDS}" for number in range(count)]
    await asyncio.gather(*map(it.cached, prompts))
    assert all(engine.asked(rank) for rank in range(engine.dp_size)), "each rank got some"
    return prompts


def test_the_rank_that_holds_a_prefix_gets_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's events are its own, on its port; what continues a prompt goes to the rank that
    has it, by the header, and finds all of it cached."""

    async def body() -> None:
        engine = Ranks("e", 3)
        async with site(monkeypatch, engine) as it:
            await it.up("e/dp0", "e/dp1", "e/dp2")
            prompts = await spread(it, engine, 6)
            at = {p: rank for rank in range(3) for p in engine.asked(rank)}
            blocks = len(prompts[0]) // engine.block_size
            await it.until(lambda: all(it.held(p).get(f"e/dp{at[p]}") == blocks for p in prompts))
            assert all(len([n for n in it.held(p).values() if n == blocks]) == 1 for p in prompts)
            for prompt in prompts:
                assert await it.cached(prompt + "and so on") == blocks * engine.block_size
                assert engine.asked(at[prompt])[-1] == prompt + "and so on"

    asyncio.run(body())


def test_a_pair_hands_over_from_the_rank_that_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's engine id is that of the rank; decode fetches what that rank has."""

    async def body() -> None:
        fabric = Fabric()
        p, d = Ranks("p", 2, connector="mooncake", fabric=fabric), Ranks("d", 2, fabric=fabric)
        d.connector = "mooncake"
        await p.start()
        bootstrap, connector = p.bootstrap, {"connector": "mooncake"}
        await p.stop()
        roles = {
            "p": {"role": "prefill", "bootstrap": bootstrap, **connector},
            "d": {"role": "decode", **connector},
        }
        async with site(monkeypatch, p, d, **roles) as it:
            await it.up("d/dp0", "d/dp1", "p/dp0", "p/dp1")
            await spread(it, p)
            by_id = {call.headers["x-request-id"]: call for call in p.calls}
            for call in d.calls:
                params = call.body["kv_transfer_params"]
                rank = by_id[call.headers["x-request-id"]].headers["x-data-parallel-rank"]
                assert params["remote_engine_id"] == f"p-{p.starts}-dp{rank}"

    asyncio.run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_rank_that_dies_alone_costs_no_request(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers and says that it is well, one core fails: its requests go to the other."""

    async def body() -> None:
        engine = Ranks("e")
        async with site(monkeypatch, engine) as it:
            await it.up("e/dp0", "e/dp1")
            prompts = await spread(it, engine)
            engine.dead = {1}
            replies = await asyncio.gather(*(it.ask(prompt, stream) for prompt in prompts * 3))
            assert [reply.status for reply in replies] == [200] * len(replies)
            assert all(b'"error"' not in reply.body for reply in replies)
            assert len(it.gateway.conductor.core.view.instances) == 2, (
                "what calls come to is no sign"
            )

    asyncio.run(body())


def test_an_engine_that_says_that_it_is_ill_is_lost_with_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM does when one core dies; what they held is forgotten once it is another process."""

    async def body() -> None:
        engine, other = Ranks("e"), Ranks("f")
        async with site(monkeypatch, engine, other) as it:
            await it.up("e/dp0", "e/dp1", "f/dp0", "f/dp1")
            prompts = [f"{number}: {WORDS}" for number in range(8)]
            await asyncio.gather(*map(it.cached, prompts))
            engine.dead, engine.health = {0, 1}, 503
            views = it.gateway.conductor.core.view.instances
            await it.until(lambda: {*views} == {"f/dp0", "f/dp1"})
            for prompt in prompts:
                await it.cached(prompt)
            await engine.restart()
            engine.dead, engine.health = set(), 200  # earlier, the old process would join again
            await it.up("e/dp0", "e/dp1", "f/dp0", "f/dp1")
            assert all(not name.startswith("e") for p in prompts for name in it.held(p))

    asyncio.run(body())


@pytest.mark.parametrize(("has", "told"), [(1, 2), (3, 2), (2, 1)])
def test_another_number_of_ranks_is_refused(
    has: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that it does not have would be answered with 400, and that would be the client's."""

    async def body() -> None:
        engine = Ranks("e", has)
        async with site(monkeypatch, engine, e={"dp_size": told}) as it:
            monitor = it.gateway.fleet.monitors()[0][1]
            await it.until(lambda: monitor.state == "refused")
            assert f"it has {has} data-parallel ranks, not {told}" in monitor.why

    asyncio.run(body())
