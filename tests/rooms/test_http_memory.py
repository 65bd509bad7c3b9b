"""Closed connections are freed at once: none is a reference cycle, which would wait for the gc.

A gateway collects rarely, so that a body in a cycle stays for hundreds of requests.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from moonserve.core.errors import BadRequest, DeadlineExceeded, MoonserveError
from moonserve.live.fronts.forward import Forward
from moonserve.live.fronts.road import Road
from moonserve.live.http.client import HttpClient, UpstreamError
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse
from moonserve.live.http.server import App, Server, serve
from moonserve.live.http.switch import Switch
from moonserve.live.rpc.connection import RpcConnection
from moonserve.live.tls.authority import init
from tests.support.certificates import tls_of
from tests.support.loops import both_loops  # noqa: F401 - autouse

HEAD = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(autouse=True)
def no_gc() -> Iterator[None]:
    """No collection runs but those of the test."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def cycles() -> list[object]:
    """The objects of moonserve that only a collection would free."""
    await asyncio.sleep(0.05)  # both ends see that their connection has ended
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [it for it in gc.garbage if type(it).__module__.startswith("moonserve.")]
    gc.garbage.clear()
    return found


async def answer(op: str, body: bytes) -> bytes:
    """An operation that waits for ever, unless it is `ping`."""
    if op != "ping":
        await asyncio.sleep(60)
    return body


class Site:
    """A server with one handler of each kind."""

    def __init__(self) -> None:
        self.bodies = 0
        routes = {
            ("POST", "/echo"): self.echo,
            ("POST", "/stream"): self.stream,
            ("POST", "/bad"): self.bad,
            ("POST", "/long"): self.long,
            ("GET", "/rpc"): self.rpc,
        }
        self.app = App(routes, max_body_bytes=32 << 20)

    async def echo(self, request: HttpRequest) -> Response:
        body = await request.body()
        self.bodies += 1
        return Response(body=body[:10])

    async def bad(self, request: HttpRequest) -> Response:
        raise BadRequest("always")

    async def long(self, request: HttpRequest) -> Response:
        await request.body()
        request.cancel_on_disconnect()
        await asyncio.sleep(60)
        return Response()

    async def stream(self, request: HttpRequest) -> StreamingResponse:
        await request.body()

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(1_000):
                yield b"piece"
                await asyncio.sleep(0.001)

        return StreamingResponse(chunks())

    async def rpc(self, request: HttpRequest) -> Switch:
        return Switch("test", RpcConnection("a client", "test", answer=answer, accepted=True))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Site, Server, str]]:
    """A site that listens, within a time."""
    async with asyncio.timeout(30):
        site = Site()
        server = await serve(site.app, "127.0.0.1", 0)
        try:
            yield site, server, f"http://127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HEAD % 9_000 + bytes(100), id="a part of a body"),
        pytest.param(HEAD % 100 + bytes(100), id="a whole body"),
        pytest.param((HEAD % 100 + bytes(100)) * 20, id="pipelined"),
        pytest.param(HEAD[:20], id="a part of a head"),
        pytest.param(b"no http\r\n\r\n", id="no HTTP"),
        pytest.param((HEAD % 100 + bytes(100)).replace(b"/echo", b"/long"), id="amid a handler"),
        pytest.param((HEAD % 2 + b"hi").replace(b"/echo", b"/stream"), id="amid a stream"),
        pytest.param((HEAD % 99).replace(b"/echo", b"/bad"), id="an error before the body"),
        pytest.param((HEAD % 99).replace(b"/echo", b"/none"), id="no such path"),
        pytest.param((HEAD % 99).replace(b" /echo", b" /rpc").replace(b"POST", b"GET"), id="rpc"),
    ],
)
@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_that_its_client_leaves_is_no_cycle(sent: bytes, resets: bool) -> None:
    """The server's memory for it is free as soon as it is closed, whatever was sent before."""

    async def main() -> None:
        async with served() as (_, server, _):
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(sent)
                await writer.drain()
                await asyncio.sleep(0.02)
                if resets:
                    writer.transport.abort()
                writer.close()
                del writer
            while server._connections.open or server._connections.tasks:
                await asyncio.sleep(0.01)
            assert await cycles() == []

    asyncio.run(main())


def test_a_body_is_free_when_its_handler_has_used_it() -> None:
    """A request under way keeps no second reference to the body that its handler took."""

    async def main() -> None:
        taken = asyncio.Event()
        held: list[int] = []

        async def handler(request: HttpRequest) -> Response:
            body = await request.body()
            size = len(body)
            del body
            held.append(sum(len(chunk) for chunk in request._chunks))
            taken.set()
            return Response(body=str(size).encode())

        async with asyncio.timeout(20):
            server = await serve(App({("POST", "/echo"): handler}), "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(HEAD % 500_000 + bytes(500_000))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert held == [0]
            writer.close()
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_cuts_its_call_is_gone_at_once(streams: bool) -> None:
    """Our client resets the connection of a call that it gives up, so that its peer stops work."""

    async def main() -> None:
        async with served() as (_, server, url):
            client = HttpClient()
            path = url + ("/stream" if streams else "/long")
            with suppress(DeadlineExceeded):
                async with client.stream(
                    "POST", path, body=b"hi", timeout_s=0.1, idle_timeout_s=5
                ) as reply:
                    await anext(reply)
            await asyncio.sleep(0.02)
            assert not server._connections.tasks
            await client.close()

    asyncio.run(main())


def test_a_body_in_part_is_free_when_its_client_leaves() -> None:
    """Of large bodies that never become whole, nothing is left after the client has gone."""

    async def main() -> None:
        kept: list[HttpRequest] = []

        async def handler(request: HttpRequest) -> Response:
            kept.append(request)
            return Response(body=(await request.body())[:1])

        async with asyncio.timeout(20):
            server = await serve(App({("POST", "/echo"): handler}), "127.0.0.1", 0)
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(HEAD % 5_000_000 + bytes(1_000_000))
                await writer.drain()
                while not kept or kept[-1]._size < 1_000_000:
                    await asyncio.sleep(0.01)
                writer.close()
            while not all(request.gone for request in kept):
                await asyncio.sleep(0.01)
            assert [request._chunks for request in kept] == [[]] * 5
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["whole", "left", "late", "cut", "refused", "silent"])
def test_a_connection_of_the_client_is_no_cycle(ending: str) -> None:
    """However a call ends, its closed connection is free at once."""

    async def main() -> None:
        async with served() as (_, server, url):
            client = HttpClient()
            for _ in range(3):
                if ending == "whole":
                    await client.request("POST", url + "/echo", body=b"hi", timeout_s=5)
                elif ending == "late":
                    with pytest.raises(DeadlineExceeded):
                        await client.request("POST", url + "/long", body=b"hi", timeout_s=0.05)
                elif ending == "refused":
                    with pytest.raises(UpstreamError):
                        await client.request("GET", "http://127.0.0.1:1/", timeout_s=5)
                elif ending == "left":
                    async with client.stream(
                        "POST", url + "/stream", body=b"hi", timeout_s=5, idle_timeout_s=5
                    ) as reply:
                        await anext(reply)
                elif ending == "silent":
                    with pytest.raises(DeadlineExceeded):
                        async with client.stream(
                            "POST", url + "/long", body=b"hi", timeout_s=0.05, idle_timeout_s=5
                        ):
                            pass
                else:
                    async with client.stream(
                        "POST", url + "/stream", body=b"hi", timeout_s=5, idle_timeout_s=5
                    ) as reply:
                        for connection in list(server._connections.open):
                            connection.abort()
                        with pytest.raises(UpstreamError):
                            await reply.read()
            await client.close()
            assert await cycles() == []

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["closed", "cut", "amid a call"])
def test_an_rpc_connection_is_no_cycle(ending: str) -> None:
    """Both ends of a connection that was switched are free when it has ended."""

    async def main() -> None:
        async with served() as (_, _, url):
            for _ in range(3):
                client = HttpClient()
                rpc = RpcConnection("the server", "test")
                assert (
                    await client.upgrade(url + "/rpc", "test", rpc, headers={}, timeout_s=5) is None
                )
                deadline_s = asyncio.get_running_loop().time() + 5
                assert await rpc.call("ping", b"1", deadline_s) == b"1"
                if ending == "closed":
                    rpc.close()
                elif ending == "cut":
                    rpc.transport.abort()
                else:
                    call = asyncio.create_task(rpc.call("wait", b"", deadline_s))
                    await asyncio.sleep(0.02)
                    rpc.transport.abort()
                    with pytest.raises(UpstreamError):
                        await call
                    del call
                del rpc
                await client.close()
            assert await cycles() == []

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["whole", "left", "in part"])
def test_a_tls_connection_is_no_cycle(ending: str, tmp_path: Path) -> None:
    """Both ends of a connection by TLS are free when it has ended."""
    init(tmp_path / "ours")
    tls = tls_of(tmp_path / "ours", "gateway")

    async def main() -> None:
        async with asyncio.timeout(20):
            server = await serve(Site().app, "127.0.0.1", 0, tls=tls.listener("none"))
            url = f"https://127.0.0.1:{server.port}"
            for _ in range(3):
                client = HttpClient(tls.trust)
                if ending == "whole":
                    await client.request("POST", url + "/echo", body=b"hi", timeout_s=5)
                elif ending == "left":
                    async with client.stream(
                        "POST", url + "/stream", body=b"hi", timeout_s=5, idle_timeout_s=5
                    ) as reply:
                        await anext(reply)
                else:
                    _, writer = await asyncio.open_connection(
                        "127.0.0.1", server.port, ssl=tls.trust.context()
                    )
                    writer.write(HEAD % 9_000 + bytes(100))
                    await writer.drain()
                    await asyncio.sleep(0.02)
                    writer.close()
                    del writer
                await client.close()
                del client
            while server._connections.open or server._connections.tasks:
                await asyncio.sleep(0.01)
            assert await cycles() == []
            await server.stop(0)

    asyncio.run(main())


class Conductor:
    """Where a Forward finds the Conductor's process."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.road = Road(url, HttpClient, "secret")


@pytest.mark.parametrize("ending", ["whole", "left", "switched"])
def test_a_forwarded_connection_is_no_cycle(ending: str) -> None:
    """Both connections of a request that a front forwards are free when it has ended."""

    async def main() -> None:
        async with served() as (_, _, url):
            forward = Forward(Conductor(url))  # type: ignore[arg-type]
            front = await serve(App({}, fallback=forward), "127.0.0.1", 0)
            here = f"http://127.0.0.1:{front.port}"
            for _ in range(3):
                client = HttpClient()
                if ending == "whole":
                    await client.request("POST", here + "/echo", body=b"hi", timeout_s=5)
                elif ending == "left":
                    with suppress(MoonserveError):
                        await client.request("POST", here + "/long", body=b"hi", timeout_s=0.05)
                else:
                    rpc = RpcConnection("the server", "test")
                    await client.upgrade(here + "/rpc", "test", rpc, headers={}, timeout_s=5)
                    deadline_s = asyncio.get_running_loop().time() + 5
                    assert await rpc.call("ping", b"1", deadline_s) == b"1"
                    del rpc
                await client.close()
            await forward.close()
            assert await cycles() == []
            await front.stop(0)

    asyncio.run(main())
