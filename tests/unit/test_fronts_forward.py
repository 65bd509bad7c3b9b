"""What a front passes on: replies of any length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonserve.core.errors import BadRequest
from moonserve.live.fronts.forward import Forward
from moonserve.live.http.client import HttpClient
from moonserve.live.http.connection import UpstreamError
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse
from moonserve.live.http.server import App, serve

PIECE = bytes(range(256)) * 256


def test_a_reply_longer_than_a_front_may_hold_passes_and_what_breaks_off_breaks_off() -> None:
    """Long ones as they come, short ones whole; status and type are theirs; no place is kept."""
    breaks = False

    async def pieces() -> AsyncIterator[bytes]:
        for n in range(64):
            if breaks and n > 32:
                raise BadRequest("no more")
            yield PIECE

    async def long(request: HttpRequest) -> StreamingResponse:
        return StreamingResponse(pieces(), 203, {}, "application/octet-stream")

    async def short(request: HttpRequest) -> Response:
        return Response(404, b"no", {"x-why": "because"}, "text/plain")

    async def test() -> None:
        nonlocal breaks
        http = HttpClient(max_reply_bytes=1 << 20, max_per_host=1)
        there = await serve(App({("GET", "/l"): long, ("GET", "/s"): short}), "127.0.0.1", 0)
        conductor: Any = SimpleNamespace(url=f"http://127.0.0.1:{there.port}")
        forward = cast(Any, Forward(conductor, http))
        here = await serve(App({}, fallback=forward), "127.0.0.1", 0)
        client = HttpClient()
        url = f"http://127.0.0.1:{here.port}"
        for _ in range(3):
            reply = await client.request("GET", url + "/l", timeout_s=10)
            assert (reply.status, reply.body) == (203, PIECE * 64)
            assert reply.headers["content-type"] == "application/octet-stream"
            reply = await client.request("GET", url + "/s", timeout_s=10)
            assert (reply.status, reply.body) == (404, b"no")
            assert (reply.headers["x-why"], reply.headers["content-type"]) == (
                "because",
                "text/plain",
            )
            async with client.stream("GET", url + "/l", timeout_s=10, idle_timeout_s=10) as left:
                await anext(left)
        breaks = True
        with pytest.raises(UpstreamError):
            await client.request("GET", url + "/l", timeout_s=10)
        reply = await client.request("GET", url + "/s", timeout_s=10)
        assert reply.status == 404
        for one in (client, http):
            await one.close()
        for server in (here, there):
            await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), 30))
