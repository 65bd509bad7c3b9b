"""A real Envoy with the configuration of docs/how-to/envoy.md, a picker, and fake engines.

ENVOY_STREAMS is the number of streams at once; `make test-envoy` takes 2,000.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.units import InstanceId, RequestId
from moonserve.live.http.client import ClientResponse, sse_events
from tests.support.envoy import binary, config, envoy
from tests.support.picker_site import PickerSite, completion, run

pytestmark = pytest.mark.envoy

E0, E1, E2 = [(f"e{n}", "both", "none") for n in range(3)]
STREAMS = int(os.environ.get("ENVOY_STREAMS", "200"))
LONG = "It was a dark and stormy night. " * 40


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    binary()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Proxied:
    """A site with its Envoy."""

    def __init__(self, site: PickerSite, url: str) -> None:
        self.site = site
        self.url = url

    async def post(self, body: bytes, path: str = "/v1/completions") -> ClientResponse:
        """One request through Envoy, and its whole reply."""
        headers = {"content-type": "application/json"}
        return await self.site.http.request(
            "POST", self.url + path, headers=headers, body=body, timeout_s=60
        )

    @asynccontextmanager
    async def stream(self, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """One stream through Envoy: the data of its events."""
        async with self.site.http.stream(
            "POST", self.url + "/v1/completions", body=body, timeout_s=60, idle_timeout_s=60
        ) as reply:
            assert reply.status == 200, await reply.read()
            yield sse_events(reply)


def proxied(
    use: Callable[[Proxied], Awaitable[None]],
    folder: Path,
    *engines: Any,
    settings: dict[str, Any] | None = None,
    **modes: Any,
) -> None:
    """Run a test with Envoy before a picker and these engines. modes: of `config`."""

    async def main(site: PickerSite) -> None:
        listen = free_port()
        ports = [it.port for it in site.engines.values()]
        made = config(listen, site.server.port, ports, **modes)
        async with envoy(folder, listen, made) as url:
            await use(Proxied(site, url))

    run(main, *engines, **(settings or {}))


def text_of(event: bytes) -> str:
    """The text of a completion's event."""
    return "".join(it["text"] for it in msgspec.json.decode(event)["choices"])


async def told(stream: AsyncIterator[bytes]) -> str:
    """The text of a whole stream."""
    return "".join([text_of(event) async for event in stream])


@pytest.mark.parametrize("request_mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
@pytest.mark.parametrize("reply_mode", ["NONE", "FULL_DUPLEX_STREAMED"])
def test_replies_are_whole_and_a_prefix_goes_to_its_holder(
    tmp_path: Path, request_mode: str, reply_mode: str
) -> None:
    """Through Envoy a client reads what the engine says, streamed or not, and later requests with
    the prompt go where it is. Prompts of 220 kB are no exception."""

    async def use(via: Proxied) -> None:
        body = {"model": "m", "prompt": LONG, "max_tokens": 24}
        direct = await via.site.http.request(
            "POST",
            via.site.engines["e0"].url + "/v1/completions",
            body=msgspec.json.encode(body),
            timeout_s=20,
        )
        [choice] = msgspec.json.decode(direct.body)["choices"]
        via.site.engines["e0"].calls.clear()
        for _ in range(2):
            reply = await via.post(msgspec.json.encode(body))
            assert msgspec.json.decode(reply.body)["choices"][0]["text"] == choice["text"]
            async with via.stream(msgspec.json.encode({**body, "stream": True})) as events:
                assert await told(events) == choice["text"]
        large = await via.post(completion(LONG + "x" * 220_000))
        assert large.status == 400, large.body  # the engine's context is shorter: it has seen it
        calls = via.site.calls
        assert len(calls) == 5
        assert len(set(calls)) == 1
        [call] = [it for it in via.site.engines[calls[0]].calls if len(it.raw) > 200_000]
        assert call.body["prompt"] == LONG + "x" * 220_000

    proxied(use, tmp_path, E0, E1, E2, request_mode=request_mode, reply_mode=reply_mode)


def test_a_refusal_reaches_the_client(tmp_path: Path) -> None:
    """429 with Retry-After and the reason, made by the picker and answered by Envoy."""

    async def use(via: Proxied) -> None:
        site = via.site
        engine = site.engines["e0"]
        info = site.fleet.members[InstanceId("e0")].infos[InstanceId("e0")]
        site.join(msgspec.structs.replace(info, epoch=2, max_requests=1))
        engine.hold = asyncio.Event()
        holder = asyncio.create_task(via.post(completion()))
        while not engine.calls:
            await asyncio.sleep(0.01)
        reply = await via.post(completion())
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert msgspec.json.decode(reply.body)["error"]["code"] == "instances_full"
        assert len(engine.calls) == 1
        engine.hold.set()
        assert (await holder).status == 200

    proxied(use, tmp_path, E0)


def test_an_engine_that_is_away_is_passed_over(tmp_path: Path) -> None:
    """Envoy tries the next endpoint of the pick, and says so; the ledger and the index follow."""

    async def use(via: Proxied) -> None:
        site = via.site
        first = await via.post(completion(LONG))
        assert first.status == 200
        [holder] = site.calls
        await site.engines[holder].stop()
        again = await via.post(completion(LONG))
        assert again.status == 200, again.body
        other = site.calls[-1]
        assert other != holder
        site.join(
            msgspec.structs.replace(
                site.fleet.members[InstanceId(holder)].infos[InstanceId(holder)], epoch=2
            )
        )
        assert (await via.post(completion(LONG))).status == 200
        assert site.calls[-1] == other

    proxied(use, tmp_path, E0, E1)


def test_envoy_may_allow_some_endpoints_only(tmp_path: Path) -> None:
    """The subset hint from a filter of Envoy; without an engine in it the client gets a 503."""

    async def use(via: Proxied) -> None:
        reply = await via.post(completion())
        assert reply.status == 503
        assert b"none of the 1 endpoints that the proxy allows" in reply.body

    proxied(use, tmp_path, E0, subset=["10.9.9.9:80"])


@pytest.mark.parametrize(
    ("fail_open", "request_mode", "status"),
    [
        (False, "FULL_DUPLEX_STREAMED", 500),
        (False, "BUFFERED", 500),
        (True, "BUFFERED", 200),
        (True, "FULL_DUPLEX_STREAMED", 500),
    ],
)
def test_a_picker_that_is_gone(
    tmp_path: Path, fail_open: bool, request_mode: str, status: int
) -> None:
    """A stream under way goes on whole. New requests get an error or, if Envoy fails open, any
    engine; but Envoy cannot fail open where it streams bodies to the picker."""

    async def use(via: Proxied) -> None:
        site = via.site
        site.engines["e0"].token_s = 0.02
        body = completion(stream=True, max_tokens=20)
        async with via.stream(body) as events:
            pieces = [text_of(await anext(events))]
            await site.server.stop()
            pieces += [text_of(event) async for event in events]
        assert len("".join(pieces).split()) == 20
        reply = await via.post(completion())
        assert reply.status == status
        assert len(site.calls) == 1 + (status == 200)

    proxied(use, tmp_path, E0, fail_open=fail_open, request_mode=request_mode)


def test_a_client_that_leaves_ends_its_call(tmp_path: Path) -> None:
    """The engine's call is aborted, and the ledger is free again."""

    async def use(via: Proxied) -> None:
        engine = via.site.engines["e0"]
        engine.token_s = 0.02
        async with via.stream(completion(stream=True, max_tokens=2_000)) as events:
            await anext(events)
            assert via.site.conductor.core.promised().decodes == 1
        await via.site.settled()
        while not engine.aborted:
            await asyncio.sleep(0.01)

    proxied(use, tmp_path, E0)


@pytest.mark.parametrize("shared_s", [None, 1.0], ids=["alone", "shared port"])
def test_many_streams_at_once(tmp_path: Path, shared_s: float | None) -> None:
    """Every one of them is whole, none gets a 5xx, and the engines share them. Where pickers share
    a port, Envoy opens further connections, even if most streams begin before one says how many it
    takes."""

    async def use(via: Proxied) -> None:
        async def one(number: int) -> int:
            body = completion(f"{number} " + LONG, stream=True, max_tokens=8)
            async with via.stream(body) as events:
                return len((await told(events)).split())

        await one(STREAMS)  # all of this runs on one loop: Envoy connects while it has time
        counts = await asyncio.gather(*(one(number) for number in range(STREAMS)))
        assert counts == [8] * STREAMS
        shares = [len(it.calls) for it in via.site.engines.values()]
        assert min(shares) > STREAMS // 6, shares
        requests = via.site.picker.metrics.requests
        while requests["/v1/completions", 200] < STREAMS + 1:
            await asyncio.sleep(0.01)
        assert [status for _, status in requests] == [200]
        connections = len(via.site.server._serving.open)
        assert connections == 1 if shared_s is None else connections > 1

    settings = {"streams": 2 * STREAMS, "within_s": 60.0, "shared_s": shared_s}
    proxied(use, tmp_path, E0, E1, E2, settings=settings)


def test_replies_that_pass_by_are_counted(tmp_path: Path) -> None:
    """With a mode for replies' bodies the record has the tokens of a stream."""

    async def use(via: Proxied) -> None:
        body = completion(stream=True, max_tokens=12)
        async with via.site.http.stream(
            "POST",
            via.url + "/v1/completions",
            headers={"x-request-id": "r1"},
            body=body,
            timeout_s=20,
            idle_timeout_s=20,
        ) as reply:
            await reply.read()
            name = reply.headers["x-request-id"]
        await via.site.settled()
        found = via.site.conductor.account.find(RequestId(name))
        assert found is not None
        assert (found.outcome, found.measured.tokens) == ("length", 12)

    proxied(use, tmp_path, E0, reply_mode="FULL_DUPLEX_STREAMED")
