"""The Indexer API over real sockets: an engine publishes, the API follows it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonserve.core.kv.events import ClearedEvent
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve
from tests.support.kvevents import stored

pytest.importorskip("zmq", reason="pyzmq is not installed")

from moonserve.live.kvevents.publisher import Publisher

SIZE = 4
TOKENS = list(range(4 * SIZE))
ANY = "tcp://127.0.0.1:0"


async def until(url: str, client: HttpClient, tokens: int) -> None:
    """Wait until the answer about the instance has so many tokens."""
    body = json.dumps({"model": "m", "block_size": SIZE, "token_ids": TOKENS}).encode()
    while True:
        reply = await client.request("POST", url + "/query", body=body, timeout_s=5)
        assert reply.status == 200, reply.body
        found: dict[str, Any] = json.loads(reply.body)
        if found["default"]["e"]["longest_matched"] == tokens:
            return
        await asyncio.sleep(0.01)


def test_an_engine_is_followed_from_what_it_told_before() -> None:
    """What it published before it was registered is replayed; then each batch counts at once."""

    async def main() -> None:
        async with asyncio.timeout(20):
            client, api, engine = HttpClient(), IndexerApi(), Publisher(ANY, ANY, "kv")
            server = await serve(App(api.routes()), "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.port}"
            engine.publish([stored(TOKENS[: 3 * SIZE], SIZE)])
            body = {
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "type": "vLLM",
                "topic": "kv",
                "modelname": "m",
                "instance_id": "e",
                "block_size": SIZE,
                "dp_rank": 0,
            }
            data = json.dumps(body).encode()
            reply = await client.request("POST", url + "/register", body=data, timeout_s=5)
            assert reply.status == 200, reply.body
            await until(url, client, 3 * SIZE)
            engine.publish([stored(TOKENS, SIZE, 3)])
            await until(url, client, 4 * SIZE)
            engine.publish([ClearedEvent()])
            await until(url, client, 0)
            await api.close()
            await engine.close()
            await client.close()
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    """400 names the field, and nothing of it stays registered."""

    async def main() -> None:
        async with asyncio.timeout(20):
            client, api = HttpClient(), IndexerApi()
            server = await serve(App(api.routes()), "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.port}"
            body = {"endpoint": endpoint, "instance_id": "e", "model_name": "m", "block_size": SIZE}
            data = json.dumps(body).encode()
            reply = await client.request("POST", url + "/register", body=data, timeout_s=5)
            assert reply.status == 400, reply.body
            assert json.loads(reply.body)["error"]["param"] == "endpoint"
            listed = await client.request("GET", url + "/services", timeout_s=5)
            assert json.loads(listed.body) == {"count": 0, "services": []}
            await api.close()
            await client.close()
            await server.stop(0)

    asyncio.run(main())
