"""The HTTP server seen from raw sockets and from our client."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest, ConfigError, NobodyAlive, Overloaded
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    decode_json,
    json_response,
)
from moonserve.live.http.server import App, Server, address_of, serve
from tests.support.loops import both_loops  # noqa: F401 - autouse


class Doc(msgspec.Struct):
    n: int


class Rig:
    """An app with one handler of every kind, and what happened in them."""

    def __init__(self, **limits: Any) -> None:
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()
        self.release = asyncio.Event()
        self.cleanup_s = 0.0
        self.first_s = 0.0
        self.seen: dict[str, str] = {}
        self.address = "none"
        self.body = b""
        self.begun = 0
        self.buffered: Callable[[], int] = lambda: 0
        self.app = App(
            {
                ("GET", "/"): self.hello,
                ("POST", "/echo"): self.echo,
                ("POST", "/echo/big"): self.echo,
                ("POST", "/echo/big/not"): self.echo,
                ("POST", "/json"): self.doc,
                ("GET", "/bug"): self.bug,
                ("GET", "/busy"): self.busy,
                ("GET", "/dead"): self.dead,
                ("GET", "/bad"): self.bad,
                ("POST", "/wait"): self.wait,
                ("POST", "/late"): self.late,
                ("POST", "/stream"): self.stream,
                ("POST", "/soon"): self.soon,
                ("GET", "/broken"): self.broken,
                ("GET", "/flood"): self.flood,
                ("GET", "/big"): self.big,
                ("GET", "/breaks"): self.breaks,
            },
            {("GET", "/things/"): self.thing, ("GET", "/things/deep/"): self.hello},
            **limits,
        )

    async def late(self, request: HttpRequest) -> Response:
        self.buffered = lambda: request._size
        self.waiting.set()
        await self.release.wait()
        return Response(body=str(len(await request.body())).encode())

    async def hello(self, request: HttpRequest) -> Response:
        self.seen = request.headers
        self.address = request.address
        return Response(body=b"hello", content_type="text/plain")

    async def soon(self, request: HttpRequest) -> Response:
        await request.soon()
        return Response(body=b"on its way" if request.unread() else await request.body())

    async def broken(self, request: HttpRequest) -> Response:
        return Response(headers={"x-a": "line\nbreak"})

    async def big(self, request: HttpRequest) -> Response:
        self.begun += 1
        return Response(body=self.body)

    async def answered(self, count: int) -> None:
        while self.begun < count:
            await asyncio.sleep(0.01)

    async def echo(self, request: HttpRequest) -> Response:
        body = await request.body()
        self.seen = request.headers
        return Response(body=body, headers={"x-q": request.query.get("q", "")})

    async def doc(self, request: HttpRequest) -> Response:
        return json_response({"n": decode_json(await request.body(), Doc).n + 1})

    async def thing(self, request: HttpRequest) -> Response:
        return Response(body=request.path.encode())

    async def bug(self, request: HttpRequest) -> Response:
        raise KeyError("secret detail")

    async def busy(self, request: HttpRequest) -> Response:
        raise Overloaded("too much", "prefill_load", 2.3)

    async def dead(self, request: HttpRequest) -> Response:
        raise NobodyAlive("nobody")

    async def bad(self, request: HttpRequest) -> Response:
        raise BadRequest("wrong", "field", "fault")

    async def wait(self, request: HttpRequest) -> Response:
        await request.body()
        request.cancel_on_disconnect()
        try:
            self.waiting.set()
            await self.release.wait()
        finally:
            await asyncio.sleep(self.cleanup_s)
            self.closed.set()
        return Response(body=b"waited")

    async def stream(self, request: HttpRequest) -> StreamingResponse:
        await request.body()
        await asyncio.sleep(self.first_s)
        return StreamingResponse(self._slow())

    async def _slow(self) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            self.waiting.set()
            await self.release.wait()
            yield b"last"
        finally:
            await asyncio.sleep(self.cleanup_s)
            self.closed.set()

    async def flood(self, request: HttpRequest) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(1 << 20)
            finally:
                self.closed.set()

        return StreamingResponse(chunks())

    async def breaks(self, request: HttpRequest) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"half"
            raise KeyError("secret detail")

        return StreamingResponse(chunks())


Use = Callable[[Rig, Server, str], Awaitable[None]]


def run(use: Use, **limits: Any) -> None:
    """Run `use` with a served rig."""

    async def main() -> None:
        async with asyncio.timeout(20):
            rig = Rig(**limits)
            server = await serve(rig.app, "127.0.0.1", 0)
            try:
                await use(rig, server, f"http://127.0.0.1:{server.port}")
            finally:
                await server.stop(0)

    asyncio.run(main())


async def raw(server: Server, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a socket and send these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    return reader, writer


async def ask(url: str, method: str = "GET", **more: Any) -> Any:
    """One request by our own client."""
    client = HttpClient()
    try:
        return await client.request(method, url, timeout_s=10, **more)
    finally:
        await client.close()


def test_routes_bodies_and_queries() -> None:
    """Exact paths win, then the longest prefix; bodies and queries arrive as sent."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        assert (await ask(url + "/")).body == b"hello"
        reply = await ask(url + "/echo?q=%41&q=b", "POST", body=b"\0\xff")
        assert (reply.body, reply.headers["x-q"]) == (b"\0\xff", "b")
        assert (await ask(url + "/json", "POST", body=b'{"n": 1}')).body == b'{"n":2}'
        bom = b'\xef\xbb\xbf{"n": 1}'
        assert (await ask(url + "/json", "POST", body=bom)).body == b'{"n":2}'
        assert (await ask(url + "/things/a%2Fb")).body == b"/things/a/b"
        assert (await ask(url + "/things/deep/a")).body == b"hello"

    run(use)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "param", "code"),
    [
        ("GET", "/none", b"", 404, "invalid_request_error", None, None),
        ("DELETE", "/echo", b"", 405, "invalid_request_error", None, None),
        ("POST", "/json", b"{", 400, "invalid_request_error", None, "invalid_json"),
        ("POST", "/json", b'{"x":' * 2_000, 400, "invalid_request_error", None, "invalid_json"),
        ("POST", "/json", b'{"n": "\xff"}', 400, "invalid_request_error", "n", None),
        ("POST", "/json", b'{"n": "x"}', 400, "invalid_request_error", "n", None),
        ("POST", "/json", b"{}", 400, "invalid_request_error", "n", None),
        ("POST", "/echo", b"x" * 10_001, 413, "invalid_request_error", None, None),
        ("GET", "/bug", b"", 500, "internal_error", None, None),
        ("GET", "/busy", b"", 429, "overloaded_error", None, "prefill_load"),
        ("GET", "/dead", b"", 503, "unavailable_error", None, None),
        ("GET", "/bad", b"", 400, "invalid_request_error", "field", "fault"),
    ],
)
def test_errors_have_openai_shape_and_the_request_id(
    method: str,
    path: str,
    body: bytes,
    status: int,
    kind: str,
    param: str | None,
    code: str | None,
) -> None:
    """Every failure is a JSON error with status, type, param, code and the caller's request id."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        sent = {"x-request-id": "mine"}
        reply = await ask(url + path, method, body=body, headers=sent)
        error = json.loads(reply.body)["error"]
        assert reply.status == status
        assert (error["type"], error["param"], error["code"]) == (kind, param, code)
        assert error["message"]
        assert "secret" not in error["message"]
        assert reply.headers["x-request-id"] == "mine"
        if status == 429:
            assert reply.headers["retry-after"] == "3"
            assert reply.headers["x-moonserve-reject-reason"] == "prefill_load"
        elif status == 503:
            assert reply.headers["retry-after"] == "2"

    run(use, max_body_bytes=10_000)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/echo", "there is no path /v1/echo for POST; did you mean /echo?"),
        ("/echo/", "there is no path /echo/ for POST; did you mean /echo?"),
        ("//v1/v1//echo", "there is no path //v1/v1//echo for POST; did you mean /echo?"),
        ("/openai/v1/echo", "there is no path /openai/v1/echo for POST; did you mean /echo?"),
        ("/v1/bug", "there is no path /v1/bug for POST; did you mean GET /bug?"),
        ("/v1", "there is no path /v1 for POST"),
        (
            "/v1/elsewhere/",
            "there is no path /v1/elsewhere/ for POST; nor is /elsewhere here: use /echo",
        ),
        ("/nowhere", "there is no path /nowhere for POST"),
        ("/" + "x" * 60_000, f"there is no path /{'x' * 199}… for POST"),
        ("/elsewhere", "there is no path /elsewhere here: use /echo"),
    ],
)
def test_a_path_that_is_not_here_names_the_one_that_is(path: str, message: str) -> None:
    """Clients often leave out /v1, or add it twice, and some paths are of other processes."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reply = await ask(url + path, "POST", body=b"{}")
        assert reply.status == 404
        assert json.loads(reply.body)["error"]["message"] == message

    run(use, absent={"/elsewhere": "use /echo"})


def test_a_front_passes_on_what_is_not_like_a_path_of_its_own() -> None:
    """Another process answers that. OPTIONS of a prefix makes no path exist."""

    async def other(request: HttpRequest) -> Response:
        return Response(body=b"other")

    async def use(rig: Rig, server: Server, url: str) -> None:
        rig.app.prefixes["OPTIONS", "/v1/"] = other
        assert (await ask(url + "/v1/none/", "POST")).body == b"other"
        reply = await ask(url + "/v1/bug", "POST")
        assert (reply.status, b"did you mean GET /bug?" in reply.body) == (404, True)

    run(use, fallback=other)


def test_errors_below_messages_have_anthropics_shape() -> None:
    """Also where nothing is served: Anthropic's clients read no other."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        for path, kind in (
            ("/v1/messages/batches", "not_found_error"),
            ("/v1/messages/", "not_found_error"),
            ("/v1/messages2", None),
        ):
            said = json.loads((await ask(url + path, "POST")).body)
            assert said.get("type") == (kind and "error")
            assert said["error"]["type"] == (kind or "invalid_request_error")

    run(use)


@pytest.mark.parametrize("given", ["x" * 128, "a.b_c:d@e-F9", "...", ".a"])
def test_sane_request_ids_are_kept(given: str) -> None:
    """A request id of letters, digits and ._:@- is the client's."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reply = await ask(url + "/", headers={"x-request-id": given})
        assert reply.headers["x-request-id"] == given

    run(use)


@pytest.mark.parametrize("path", ["/", "/things/a", "/bad", "/flood"])
def test_head_is_get_without_its_body(path: str) -> None:
    """HEAD has GET's status and headers and no body, and leaves the connection usable."""

    def ask_both(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        heads = []
        for method in ("HEAD", "GET") if path != "/flood" else ("HEAD", "HEAD"):
            connection.request(method, path, headers={"x-request-id": "mine"})
            reply = connection.getresponse()
            body = reply.read()
            assert (body == b"") == (method == "HEAD")
            heads.append((reply.status, {**dict(reply.getheaders()), "date": ""}))
        assert heads[0] == heads[1]
        assert heads[0][0] == (400 if path == "/bad" else 200)
        connection.close()

    async def use(rig: Rig, server: Server, url: str) -> None:
        await asyncio.to_thread(ask_both, server.port)
        if path == "/flood":
            await rig.closed.wait()

    run(use)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/echo", "POST"),
        ("HEAD", "/echo", "POST"),
        ("POST", "/", "GET, HEAD"),
        ("PUT", "/things/deep/a", "GET, HEAD"),
    ],
)
def test_405_says_what_is_allowed(method: str, path: str, allow: str) -> None:
    """A 405 has the methods its path takes in Allow, HEAD wherever GET is, each once."""

    def ask_one(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request(method, path)
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("allow")) == (405, allow)
        connection.close()

    async def use(rig: Rig, server: Server, url: str) -> None:
        await asyncio.to_thread(ask_one, server.port)

    run(use)


@pytest.mark.parametrize(
    "given",
    ["", "has space", "x" * 129, "naïve", "../../x", "a/b", "a\\b", '"a"', "a%2Fb", ".", ".."],
)
def test_insane_request_ids_are_replaced(given: str) -> None:
    """A request id that is no safe part of a path, or too long, is replaced by a fresh one."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        ids = {
            (await ask(url + "/", headers={"x-request-id": given})).headers["x-request-id"]
            for _ in range(2)
        }
        assert len(ids) == 2
        assert all(name.startswith("req-") for name in ids)

    run(use)


def test_oversized_body_is_refused_before_it_is_sent() -> None:
    """A content-length over the limit is answered at once, with no byte of the body read."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 101\r\n\r\n"
        reader, writer = await raw(server, head)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()

    run(use, max_body_bytes=100)


def test_the_rest_of_refused_bodies_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gets its refusal, but its body keeps the loop busy for a bounded number of bytes."""
    monkeypatch.setattr("moonserve.live.http.server._DISCARDED_BYTES_PER_S", 4 << 20)
    monkeypatch.setattr("moonserve.live.http.server._DISCARD_S", 0.5)

    async def use(rig: Rig, server: Server, url: str) -> None:
        size = 60 << 20
        head = f"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n".encode()
        reader, writer = await raw(server, head)
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(size))
        with pytest.raises(ConnectionError):
            await writer.drain()
        writer.close()

    run(use, max_body_bytes=100)


def test_oversized_chunked_body_is_refused_while_reading() -> None:
    """A body without a length is refused when it passes the limit, and the reply still arrives."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await raw(server, head + b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()

    run(use, max_body_bytes=100)


def test_a_client_that_sends_everything_first_reads_the_413() -> None:
    """A client that writes all of a far too large body before it reads still gets the reply."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        def ask_all_first() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            try:
                connection.request("POST", "/echo", body=bytes(20 << 20))
                return connection.getresponse().status
            finally:
                connection.close()

        assert await asyncio.to_thread(ask_all_first) == 413

    run(use, max_body_bytes=100)


def test_body_limits_by_prefix() -> None:
    """A path's body limit is that of the longest prefix it has, else max_body_bytes."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        for path, limit in (("/echo", 100), ("/echo/big", 5_000), ("/echo/big/not", 10)):
            assert (await ask(url + path, "POST", body=bytes(limit))).status == 200
            assert (await ask(url + path, "POST", body=bytes(limit + 1))).status == 413

    run(use, max_body_bytes=100, body_limits={"/echo/big/not": 10, "/echo/big": 5_000})


def test_slow_body_ends_in_408() -> None:
    """A body that does not arrive in time is a 408."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf"
        reader, writer = await raw(server, head)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        writer.close()

    run(use, body_timeout_s=0.05)


@pytest.mark.parametrize("framing", ["content-length: 10000", "transfer-encoding: chunked"])
def test_a_body_that_comes_too_slowly_ends_in_408(framing: str) -> None:
    """After the grace it must come with a least rate, long before the whole time is over."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = f"POST /echo HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n"
        reader, writer = await raw(server, head.encode())
        reply = asyncio.create_task(reader.readuntil(b"\r\n"))
        while not reply.done():
            writer.write(b"0" if "length" in framing else b"1\r\n0\r\n")
            await asyncio.sleep(0.02)
        assert reply.result().startswith(b"HTTP/1.1 408 ")
        writer.close()

    run(use, body_grace_s=0.2)


def test_a_body_that_comes_slowly_enough_is_served() -> None:
    """A client far above the least rate may take longer than the grace."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n"
        reader, writer = await raw(server, head)
        for _ in range(100):
            writer.write(bytes(1_000))
            await asyncio.sleep(0.005)
        assert await replies(reader, 1) == [bytes(100_000)]
        writer.close()

    run(use, body_grace_s=0.1)


@pytest.mark.parametrize(
    ("size", "reply"), [(2, b"hi"), (3, b"on its way"), (1 << 20, b"on its way")]
)
def test_a_small_body_comes_just_behind_its_head(size: int, reply: bytes) -> None:
    """A handler can wait a moment for it, before it counts a body that is on its way."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /soon HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        reader, writer = await raw(server, head % size)
        await asyncio.sleep(0.02)
        writer.write(b"hi" if size < 9 else bytes(size // 2))
        assert await replies(reader, 1) == [reply]
        writer.close()

    run(use)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip", "GZIP"])
def test_compressed_bodies_are_refused(coding: str) -> None:
    """A 415 names the header and the remedy; nothing is decompressed, so that no bomb can grow."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        bomb = gzip.compress(bytes(50 << 20))
        reply = await ask(url + "/json", "POST", body=bomb, headers={"content-encoding": coding})
        assert reply.status == 415
        error = json.loads(reply.body)["error"]
        assert error["param"] == "content-encoding"
        assert coding in error["message"]
        assert reply.headers["accept-encoding"] == "identity"
        plain = {"content-encoding": "identity"}
        reply = await ask(url + "/json", "POST", body=b'{"n":1}', headers=plain)
        assert reply.status == 200
        assert (await ask(url + "/", headers={"content-encoding": coding})).status == 200

    run(use)


@pytest.mark.parametrize(("sent", "left"), [(b"", True), (b"GET / HTTP", False)])
def test_a_head_must_come_sooner_than_an_idle_connection_ends(sent: bytes, left: bool) -> None:
    """A connection may be idle for long; a head that has begun must end in time."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await replies(reader, 1) == [b"hello"]
        writer.write(sent)
        await asyncio.sleep(0.5)
        assert bool(server._connections.open) == left
        writer.close()

    run(use, head_timeout_s=0.1, keep_alive_s=5)


def test_idle_connections_end() -> None:
    """A connection without a request is closed after the time to keep it."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await replies(reader, 1) == [b"hello"]
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()

    run(use, keep_alive_s=0.2)


def test_endless_head_is_cut() -> None:
    """A request head over 64 KiB is a 400 and the end of the connection."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 66_000)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(use)


@pytest.mark.parametrize("path", ["/stream", "/wait"])
def test_disconnect_reaches_the_handler_while_it_waits(path: str) -> None:
    """A client that leaves cancels what its handler waits on, streaming or not."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi".encode()
        _, writer = await raw(server, head)
        await rig.waiting.wait()
        assert not rig.closed.is_set()
        writer.close()
        async with asyncio.timeout(1):
            await rig.closed.wait()

    run(use)


def test_endless_trailers_are_cut() -> None:
    """What comes behind the last chunk is bounded as a head is."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await raw(server, head + b"3\r\nabc\r\n0\r\n")
        for number in range(67):
            writer.write(b"t%d: %b\r\n" % (number, b"x" * 1_000))
            await writer.drain()
            await asyncio.sleep(0.001)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(use)


@pytest.mark.parametrize(
    ("framing", "body"),
    [("Content-Length: 3", b"abc"), ("Transfer-Encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n")],
)
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_a_body_behind_an_upgrade_that_is_not_taken(
    framing: str, body: bytes, pause_s: float
) -> None:
    """It is the request's, not lost, and not read as the next request; the connection goes on."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = f"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n{framing}"
        reader, writer = await raw(server, head.encode() + b"\r\nUpgrade: h2c\r\n\r\n")
        await asyncio.sleep(pause_s)
        writer.write(body + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        first, second = await replies(reader, 2)
        assert first.endswith(b"abc")
        assert second.endswith(b"hello")
        reader, writer = await raw(server, head.encode() + b"\r\nUpgrade: h2c\r\n\r\n" + body)
        assert (await replies(reader, 1))[0].endswith(b"abc")
        writer.close()

    run(use)


def test_disconnect_while_the_server_sends() -> None:
    """A client that leaves in mid-flood closes the iterator."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        client = HttpClient()
        async with client.stream("GET", url + "/flood", timeout_s=5, idle_timeout_s=5) as reply:
            await anext(reply)
        async with asyncio.timeout(1):
            await rig.closed.wait()
        await client.close()

    run(use)


def test_stalled_reader_is_cut() -> None:
    """A client that stays but reads nothing is cut after the stall limit."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        _, writer = await raw(server, b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(5):
            await rig.closed.wait()
        writer.close()

    run(use, stall_timeout_s=0.05)


def test_stream_that_breaks_is_not_ended_as_if_whole() -> None:
    """A bug in mid-stream leaves the chunked body unfinished, so that no client takes it whole."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET /breaks HTTP/1.1\r\nhost: a\r\n\r\n")
        whole = await reader.read()
        assert b"half" in whole
        assert not whole.endswith(b"0\r\n\r\n")
        writer.close()

    run(use)


def test_stream_whole_and_connection_kept() -> None:
    """A stream that ends leaves the connection usable."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        rig.release.set()
        client = HttpClient()
        for _ in range(2):
            async with client.stream("POST", url + "/stream", timeout_s=5, idle_timeout_s=5) as r:
                assert r.headers["content-type"].startswith("text/event-stream")
                assert await r.read() == b"firstlast"
        assert len(client._open) == 1
        await client.close()

    run(use)


def test_stop_lets_running_requests_finish() -> None:
    """stop refuses new connections at once and lets a running request end whole."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        running = asyncio.create_task(ask(url + "/wait", "POST"))
        await rig.waiting.wait()
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.02)
        with pytest.raises(OSError, match=r"[Rr]efused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert not stopping.done()
        rig.release.set()
        assert (await running).body == b"waited"
        await stopping

    run(use)


@pytest.mark.parametrize("path", ["/stream", "/wait"])
def test_stop_cuts_after_the_drain(path: str) -> None:
    """What still runs after the drain is cancelled and cleaned up before stop returns."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n".encode()
        rig.cleanup_s = 0.2
        reader, writer = await raw(server, head)
        await rig.waiting.wait()
        await server.stop(0.05)
        assert rig.closed.is_set()
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()

    run(use)


def test_idle_connections_do_not_hold_stop_up() -> None:
    """An idle keep-alive connection does not delay stop."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"hello")
        async with asyncio.timeout(2):
            await server.stop(30)
        assert await reader.read() == b""
        writer.close()

    run(use)


def test_a_server_that_parts_answers_once_more() -> None:
    """A kept connection gets one more reply, which says that it is the last; new ones get none."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        ask_once = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        reader, writer = await raw(server, ask_once)
        await reader.readuntil(b"hello")
        idle, other = await raw(server, ask_once)
        await idle.readuntil(b"hello")
        stopping = asyncio.create_task(server.stop(30, part_s=0.2))
        await asyncio.sleep(0.05)
        with pytest.raises(OSError, match=r"[Rr]efused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(ask_once)
        said = await reader.read()
        assert b"connection: close" in said
        assert said.endswith(b"hello")
        await stopping
        assert await idle.read() == b""
        for it in (writer, other):
            it.close()

    run(use)


def test_port_in_use_names_the_field() -> None:
    """A port that is taken is a ConfigError that names the field and the remedy."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        with pytest.raises(ConfigError, match=r"^port: .* in use; stop the process that"):
            await serve(rig.app, "127.0.0.1", server.port)
        with pytest.raises(ConfigError, match=r"^metrics_port: .* in use"):
            await serve(rig.app, "127.0.0.1", server.port, "metrics_port")
        with pytest.raises(ConfigError, match=r"^host: "):
            await serve(rig.app, "192.0.2.1", 0)

    run(use)


def test_a_repeated_header_is_one_with_commas() -> None:
    """RFC 9110, 5.3: so what takes one value sees that there are two, rather than the last."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"GET / HTTP/1.1\r\nhost: a\r\nX-SLO: 5\r\naccept: a\r\nx-slo: 9\r\n\r\n"
        reader, writer = await raw(server, head)
        await reader.readuntil(b"hello")
        assert rig.seen == {"host": "a", "x-slo": "5, 9", "accept": "a"}
        writer.close()

    run(use)


def test_a_request_has_the_address_of_its_client() -> None:
    """It is the other end's IP address as text, and no header changes it."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        await ask(url + "/", headers={"x-forwarded-for": "10.9.9.9"})
        assert rig.address == "127.0.0.1"

    run(use)
    assert address_of(("::ffff:10.0.0.7", 5, 0, 0)) == "10.0.0.7"
    assert address_of(("fe80::1", 5, 0, 2)) == "fe80::1"
    assert [address_of(peer) for peer in ("", b"", None)] == ["", "", ""]


def test_replies_that_the_client_does_not_read_hold_back_the_next() -> None:
    """Of pipelined requests only as many are answered as the client reads replies of."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        get = b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n"
        reader, writer = await raw(server, get * 2_000)
        rig.body = bytes(1 << 20)
        await rig.answered(3)
        await asyncio.sleep(0.2)
        begun = rig.begun
        assert begun < 20
        assert len((await replies(reader, 12))[11]) == 1 << 20
        await rig.answered(begun + 1)
        writer.close()

    run(use)


def test_a_client_that_reads_nothing_of_a_whole_reply_is_cut() -> None:
    """It is cut after the stall time; a client that reads slowly is not."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        rig.body = bytes(16 << 20)
        get = b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n"
        slow, writer = await raw(server, get * 2)
        _, stalled = await raw(server, get * 2)
        for _ in range(32):
            await slow.readexactly(1 << 20)
            await asyncio.sleep(0.02)
        assert len(server._connections.open) == 1
        writer.close()
        stalled.close()

    run(use, stall_timeout_s=0.3)


def test_too_many_pipelined_requests_are_refused() -> None:
    """A client that sends requests without end before its first reply gets a 400 at their end."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        wait = b"POST /wait HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        reader, writer = await raw(server, wait + b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 300)
        await rig.waiting.wait()
        (connection,) = server._connections.open
        assert len(connection._behind) == 256
        rig.release.set()
        assert len(await replies(reader, 257)) == 257
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(use)


HELLO = b"HTTP/1.1 200 "


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET /\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %b1\r\n\r\nx" % (b"0" * 5_000), 400),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 0001\r\n\r\nx", 200),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %b\r\n\r\n" % (b"9" * 19), 413),
        (b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc", 400),
    ],
)
def test_heads_and_chunks_that_are_not_http(sent: bytes, status: int) -> None:
    """Each gets one reply with its status, never a 500 and never no reply."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        for cut in (len(sent), sent.find(b"\r\n\r\n") + 4):
            reader, writer = await raw(server, sent[:cut])
            await writer.drain()
            await asyncio.sleep(0.02)
            if sent[cut:]:
                writer.write(sent[cut:])
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)
            writer.close()

    run(use)


def test_thousands_of_repeated_headers_are_refused() -> None:
    """They would be joined one by one; a hundred are enough."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        for count, status in ((100, 200), (16_000, 400)):
            head = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * (count + 1) + b"\r\n"
            reader, writer = await raw(server, head)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)
            writer.close()

    run(use)


def test_a_reply_that_cannot_be_sent_ends_its_connection() -> None:
    """A bug in a reply's headers leaves no client waiting."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET /broken HTTP/1.1\r\nhost: a\r\n\r\n")
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert not server._connections.tasks

    run(use)


def test_what_is_not_http_is_refused_after_the_replies_before_it() -> None:
    """A request that was whole gets its reply, though rubbish follows it."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        wait = b"POST /wait HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        reader, writer = await raw(server, wait + b"no http at all\r\n\r\n")
        await rig.waiting.wait()
        writer.write(b"and more\r\n\r\n" * 10)
        rig.release.set()
        assert await replies(reader, 1) == [b"waited"]
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(use)


def test_trailers_are_no_headers() -> None:
    """What comes after the last chunk changes no header of the request."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        trailers = b"authorization: Bearer x\r\nhost: b\r\nx-new: 1\r\n\r\n"
        reader, writer = await raw(server, head + b"1\r\nx\r\n0\r\n" + trailers)
        assert await replies(reader, 1) == [b"x"]
        assert rig.seen == {"host": "a", "transfer-encoding": "chunked"}
        writer.write(b"GET / HTTP/1.1\r\nhost: c\r\n\r\n")
        assert await replies(reader, 1) == [b"hello"]
        assert rig.seen == {"host": "c"}
        writer.close()

    run(use)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_half_closed_client_gets_its_replies(count: int, version: bytes) -> None:
    """A client that sends no more after its requests gets all replies, however long they take."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * (count - 1)
        wait = b"POST /wait HTTP/%b\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi" % version
        reader, writer = await raw(server, get + wait)
        writer.write_eof()
        await rig.waiting.wait()
        await asyncio.sleep(0.3)
        rig.release.set()
        whole = await reader.read()
        assert whole.count(b"hello") == count - 1
        assert whole.endswith(b"waited")
        assert (b"100 Continue" in whole) == (version == b"1.1")
        assert b"\r\nconnection: close\r\n" in whole
        writer.close()

    run(use)


def test_a_half_closed_client_gets_its_stream() -> None:
    """It reads the stream to its end."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = b"POST /stream HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        rig.first_s = 0.02
        reader, writer = await raw(server, head)
        writer.write_eof()
        await rig.waiting.wait()
        await asyncio.sleep(0.1)
        rig.release.set()
        whole = await reader.read()
        assert b"100 Continue" not in whole
        assert whole.endswith(b"4\r\nlast\r\n0\r\n\r\n")
        writer.close()

    run(use)


@pytest.mark.parametrize(
    "sent",
    [b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx", b"GET / HTTP/1.1\r\nho", b""],
)
def test_a_client_that_half_closes_amid_its_request_is_done(sent: bytes) -> None:
    """What it sent can never become whole: its connection is closed."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, sent)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write_eof()
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()

    run(use)


async def replies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """So many bodies, each with a content-length."""
    found = []
    for _ in range(count):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(await reader.readexactly(size))
    return found


def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent before the replies to those before them are answered one after the other."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        post = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n%02d"
        wait = b"POST /wait HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        sent = wait + b"".join(post % i for i in range(50))
        reader, writer = await raw(server, sent)
        await rig.waiting.wait()
        rig.release.set()
        assert await replies(reader, 51) == [b"waited", *(b"%02d" % i for i in range(50))]
        writer.write(post % 77)
        assert await replies(reader, 1) == [b"77"]
        writer.close()

    run(use)


def test_a_body_that_nobody_reads_yet_is_not_taken_in_whole() -> None:
    """A client that sends much more than was read is held back, and goes on when it is read."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        size = 32 << 20
        reader, writer = await raw(
            server, b"POST /late HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
        )
        writing = asyncio.create_task(_write(writer, bytes(size)))
        await rig.waiting.wait()
        await asyncio.sleep(0.05)
        assert rig.buffered() < 1 << 20
        rig.release.set()
        assert await replies(reader, 1) == [str(size).encode()]
        await writing
        writer.close()

    run(use, max_body_bytes=64 << 20)


def test_a_body_that_was_whole_before_anybody_read_it_holds_nothing_back() -> None:
    """After it, the connection's next requests are read as before."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        size = 200 << 10
        post = b"POST /late HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
        reader, writer = await raw(server, b"")
        rig.release.set()
        for _ in range(20):
            await _write(writer, post)
            assert await replies(reader, 1) == [str(size).encode()]
        writer.close()

    run(use, max_body_bytes=1 << 20)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def test_who_asks_whether_to_send_its_body_is_told() -> None:
    """`Expect: 100-continue` is answered when the body is wanted, and not when it is too large."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        head = (
            b"POST /echo HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        )
        reader, writer = await raw(server, head % 2)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert await replies(reader, 1) == [b"hi"]
        writer.write(head % 200)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()

    run(use, max_body_bytes=100)


@pytest.mark.parametrize(
    ("head", "reply"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"hello"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", b"hello"),
        (b"POST /stream HTTP/1.0\r\ncontent-length: 0\r\n\r\n", b"\r\n\r\nfirstlast"),
        (b"NO HTTP\r\n\r\n", b"Invalid HTTP request received."),
    ],
)
def test_replies_that_end_with_their_connection(head: bytes, reply: bytes) -> None:
    """HTTP/1.0, `connection: close` and what is no HTTP get a last reply that says it is that."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        rig.release.set()
        reader, writer = await raw(server, head)
        whole = await reader.read()
        assert whole.endswith(reply)
        assert b"\r\nconnection: close\r\n" in whole
        writer.close()

    run(use)


def test_targets_are_decoded() -> None:
    """A target may be percent-encoded or a whole URL; the path is the same."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        for target in (b"/things/%C3%A4", b"http://x/things/%C3%A4?q=1"):
            reader, writer = await raw(server, b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
            assert await replies(reader, 1) == ["/things/ä".encode()]
            writer.close()

    run(use)


def test_nothing_waits_for_an_acknowledgement() -> None:
    """Nagle's delay is off on accepted connections: no piece of a stream waits for the last one."""

    async def use(rig: Rig, server: Server, url: str) -> None:
        reader, writer = await raw(server, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await replies(reader, 1)
        (connection,) = server._connections.open
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

    run(use)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (dict[str, int | None], "must be a whole number"),
        (dict[str, float], "must be a number"),
        (dict[str, bool], "must be true or false"),
    ],
)
def test_a_wrong_type_is_said_in_words(shape: type[dict[str, object]], says: str) -> None:
    """Not in a library's."""
    with pytest.raises(BadRequest, match=says):
        decode_json(b'{"a": "x"}', shape)
