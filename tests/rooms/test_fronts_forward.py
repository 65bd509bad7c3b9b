"""Requests that a front forwards, with replies of any length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonserve.core.errors import BadRequest, Unauthorized
from moonserve.live.fronts.forward import Forward
from moonserve.live.http.client import HttpClient, UpstreamError
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse
from moonserve.live.http.server import App, serve

PIECE = bytes(range(256)) * 256


def at(port: int, client: Callable[[], HttpClient] = HttpClient) -> Any:
    """A Conductor at this port, with the token `secret`."""
    url = f"http://127.0.0.1:{port}"
    return SimpleNamespace(url=url, road=SimpleNamespace(token="secret", client=client))


def test_a_reply_longer_than_a_front_may_hold_passes_and_what_breaks_off_breaks_off() -> None:
    """Long replies pass as they come, short ones whole; status and type are kept."""
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
        there = await serve(App({("GET", "/l"): long, ("GET", "/s"): short}), "127.0.0.1", 0)
        small = lambda: HttpClient(max_reply_bytes=1 << 20, max_per_host=1)  # noqa: E731
        forward = Forward(at(there.port, small))
        here = await serve(App({}, fallback=cast(Any, forward)), "127.0.0.1", 0)
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
        for one in (client, forward):
            await one.close()
        for server in (here, there):
            await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_what_is_under_way_ends_with_the_conductor() -> None:
    """Waiting clients get a 503 at once, on new and on kept connections; a reply that had begun
    breaks off. Clients that come after the Conductor is back are served."""
    hangs = asyncio.Event()
    hung = 0

    async def half() -> AsyncIterator[bytes]:
        yield PIECE
        await asyncio.Event().wait()

    async def streams(request: HttpRequest) -> StreamingResponse:
        return StreamingResponse(half())

    async def waits(request: HttpRequest) -> Response:
        nonlocal hung
        if hangs.is_set():
            hung += 1
            await asyncio.Event().wait()
        return Response()

    async def test() -> None:
        there = await serve(App({("GET", "/s"): streams, ("GET", "/w"): waits}), "127.0.0.1", 0)
        forward = Forward(at(there.port))
        here = await serve(App({}, fallback=cast(Any, forward)), "127.0.0.1", 0)
        client, url = HttpClient(), f"http://127.0.0.1:{here.port}"
        assert (await client.request("GET", url + "/w", timeout_s=10)).status == 200
        hangs.set()
        async with client.stream("GET", url + "/s", timeout_s=10, idle_timeout_s=10) as begun:
            await anext(begun)
            get = lambda: client.request("GET", url + "/w", timeout_s=10)  # noqa: E731
            waiting = [asyncio.create_task(get()) for _ in range(2)]
            while hung < 2:
                await asyncio.sleep(0.001)
            forward.cut()
            for reply in await asyncio.gather(*waiting):
                assert (reply.status, reply.headers["retry-after"]) == (503, "2")
                assert b"the Conductor's process does not answer" in reply.body
            with pytest.raises(UpstreamError):
                async for _ in begun:
                    pass
        hangs.clear()
        assert (await client.request("GET", url + "/w", timeout_s=10)).status == 200
        for one in (client, forward):
            await one.close()
        for server in (here, there):
            await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("path", ["/short", "/long", "/none"])
def test_head_through_a_front_has_gets_headers_and_no_body(path: str) -> None:
    """A front answers HEAD as GET without its body, as the Conductor's own process does."""

    async def short(request: HttpRequest) -> Response:
        return Response(200, b"short", {"x-why": "because"}, "text/plain")

    async def long(request: HttpRequest) -> Response:
        return Response(200, bytes(3 << 20))

    async def none(request: HttpRequest) -> Response:
        return Response(204)

    async def test() -> None:
        routes = {("GET", "/short"): short, ("GET", "/long"): long, ("GET", "/none"): none}
        there = await serve(App(cast(Any, routes)), "127.0.0.1", 0)
        forward = Forward(at(there.port))
        here = await serve(App({}, fallback=cast(Any, forward)), "127.0.0.1", 0)
        client = HttpClient()
        url = f"http://127.0.0.1:{here.port}{path}"
        heads = []
        for method in ("HEAD", "GET", "HEAD"):
            reply = await client.request(method, url, timeout_s=5, headers={"x-request-id": "a"})
            assert (reply.body == b"") == (method == "HEAD" or path == "/none")
            heads.append((reply.status, {**reply.headers, "date": ""}))
        assert heads[0] == heads[1] == heads[2]
        assert "content-length" in heads[0][1] or path != "/short"
        for one in (client, forward):
            await one.close()
        for server in (here, there):
            await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_front_looks_at_the_token_before_it_takes_a_body() -> None:
    """Without the token a request is refused by its head; the Conductor's process sees nothing."""
    seen: list[HttpRequest] = []
    taken: list[HttpRequest] = []

    class Gate:
        def admit(self, request: HttpRequest) -> None:
            seen.append(request)
            raise Unauthorized("no token", "authorization")

        def headers(self, request: HttpRequest) -> dict[str, str]:
            return {}

    async def join(request: HttpRequest) -> Response:
        taken.append(request)
        return Response()

    async def test() -> None:
        there = await serve(App({("POST", "/internal/join"): join}), "127.0.0.1", 0)
        forward = Forward(at(there.port))
        limits = {"/internal/": 64 << 20}
        app = App({}, fallback=cast(Any, forward), gate=Gate(), body_limits=limits)
        here = await serve(app, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(b"POST /internal/join HTTP/1.1\r\nhost: a\r\ncontent-length: 60000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.write(bytes(8 << 20))
        await writer.drain()
        await asyncio.sleep(0.05)
        assert sum(len(chunk) for chunk in seen[0]._chunks) <= 1 << 20
        assert not taken
        writer.close()
        await forward.close()
        for server in (here, there):
            await server.stop(0)

    asyncio.run(asyncio.wait_for(test(), 30))
