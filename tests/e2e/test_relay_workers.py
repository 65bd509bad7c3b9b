"""Our own workers as foreign engines: the relay before them, and no token made at the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.schedule.facts import Connector, Role
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId
from moonserve.live.external.member import Member
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support import inproc
from tests.support.external_site import SHORT, Site

pytestmark = pytest.mark.model  # for its tokenizer and chat template

PROMPT = list(range(100, 200))


@contextlib.asynccontextmanager
async def relay_before(it: inproc.Site, ways: dict[str, Connector]) -> AsyncIterator[Site]:
    """A relay that knows these workers as engines that hand KV on this way."""
    relay = Site(Tuning(), SHORT)
    await relay.start()
    try:
        for name, connector in ways.items():
            info = it.workers[name].info
            spec = InstanceSpec(
                name=name,
                url=info.url,
                role=info.role,
                connector=connector,  # type: ignore[arg-type]
            )
            relay.fleet.members[InstanceId(name)] = Member(spec, relay.http, inproc.TOKEN)
            relay.join(msgspec.structs.replace(info, connector=connector, fetches=False, layers=0))
        await asyncio.sleep(0)
        yield relay
    finally:
        await relay.stop()


def run(
    roles: dict[str, Role],
    ways: dict[str, Connector],
    test: Callable[[inproc.Site, Site], Awaitable[None]],
) -> None:
    """Workers with fake engines around one store, and the relay."""

    async def main() -> None:
        async with asyncio.timeout(60), inproc.site() as it:
            for name, role in roles.items():
                await it.add(name, role)
            async with relay_before(it, ways) as relay:
                await test(it, relay)
                await relay.settled()

    asyncio.run(main())


def ask(stream: bool, count: int = 8) -> dict[str, Any]:
    """A greedy completion by token ids."""
    return {
        "model": DEFAULT_MODEL,
        "prompt": PROMPT,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


async def ids(relay: Site, stream: bool) -> list[int]:
    """What the relay's client gets."""
    if not stream:
        reply = await relay.post(msgspec.json.encode(ask(stream)))
        assert reply.status == 200, reply.body
        return msgspec.json.decode(reply.body)["choices"][0]["token_ids"]
    got: list[int] = []
    async with relay.stream(ask(stream)) as events:
        async for event in events:
            got += event["choices"][0]["token_ids"] or []
    return got


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_serves_whole_requests(stream: bool) -> None:
    """Connector none: one call, and what one engine alone says."""

    async def test(it: inproc.Site, relay: Site) -> None:
        assert await ids(relay, stream) == it.reference(PROMPT, 8)
        assert [note.part for note in relay.fleet.notes] == ["whole"]

    run({"a": "both"}, {"a": "none"}, test)


@pytest.mark.parametrize("way", ["none", "nixl"])
def test_workers_behind_the_relay_share_kv_within_a_salt(way: Connector) -> None:
    """It goes through to them, whole or by pairs."""

    async def test(it: inproc.Site, relay: Site) -> None:
        for salt, shared in (("A", False), ("A", True), ("B", False), (None, False)):
            body = ask(stream=False) | {"cache_salt": salt}
            reply = await relay.post(msgspec.json.encode(body))
            usage = msgspec.json.decode(reply.body)["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == shared, salt
            await it.settle()

    if way == "none":
        run({"a": "both"}, {"a": way}, test)
    else:
        run({"p": "prefill", "d": "decode"}, {"p": way, "d": way}, test)


@pytest.mark.parametrize("stream", [False, True])
def test_workers_hand_over_through_their_store(stream: bool) -> None:
    """Connector nixl: a worker's reply parameters are passed on verbatim, as NIXL's are.

    They name the lease under which prefill has published.
    """

    async def test(it: inproc.Site, relay: Site) -> None:
        assert await ids(relay, stream) == it.reference(PROMPT, 8)
        assert [note.part for note in relay.fleet.notes] == ["prefill", "decode"]
        if not stream:  # else usage was not asked for
            assert relay.fleet.notes[1].last == len(PROMPT)  # decode fetched all of it
        await it.settle()

    run({"p": "prefill", "d": "decode"}, {"p": "nixl", "d": "nixl"}, test)
