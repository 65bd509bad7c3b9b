"""Bytes at the HTTP server, and OpenAI's bodies at a gateway: a 4xx at worst, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import example
from hypothesis import strategies as st

from moonserve.live.api.front import Front
from moonserve.live.api.own_text import OwnText
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, decode_json
from moonserve.live.http.server import App, Server, serve
from moonserve.live.openai.request import _ChatBody, _CompletionBody
from tests.fuzz.cases import Looped, damaged, fuzz, no_bug_logged, numbers, words
from tests.support.serving import ByteText, FakeServing, say

Close = Callable[[], Awaitable[None]]


async def echo(request: HttpRequest) -> Response:
    """The body, and what the query says."""
    decoded = json.dumps([request.query, request.headers]).encode()
    return Response(body=await request.body() + decoded)


async def parsed(request: HttpRequest) -> Response:
    """A body as JSON."""
    decode_json(await request.body(), dict[str, Any])
    return Response()


async def streamed(request: HttpRequest) -> StreamingResponse:
    """A few chunks."""
    await request.body()

    async def chunks() -> Any:
        yield b"a"
        yield b"b"

    return StreamingResponse(chunks())


ROUTES = {
    ("GET", "/"): echo,
    ("POST", "/echo"): echo,
    ("POST", "/json"): parsed,
    ("POST", "/stream"): streamed,
}
REQUESTS = tuple(
    text.replace("\n", "\r\n").encode()
    for text in (
        "GET / HTTP/1.1\nhost: a\n\n",
        "GET /?a=%ff&b=1 HTTP/1.0\nhost: a\nconnection: keep-alive\n\n",
        "POST /echo HTTP/1.1\nhost: a\ncontent-length: 5\n\nhello",
        "POST /echo HTTP/1.1\nhost: a\ntransfer-encoding: chunked\n\n5\nhello\n0\nx: y\n\n",
        'POST /json HTTP/1.1\nhost: a\ncontent-length: 8\nexpect: 100-continue\n\n{"a": 1}',
        "POST /stream HTTP/1.1\nhost: a\ncontent-length: 0\nx-request-id: r\n\n",
        "HEAD / HTTP/1.1\nhost: a\n\n",
        "OPTIONS * HTTP/1.1\nhost: a\norigin: http://b\n\n",
        "GET / HTTP/1.1\nhost: a\nupgrade: websocket\nconnection: upgrade\n\n",
        "PRI * HTTP/2.0\n\nSM\n\n",
    )
)
PARTS = st.sampled_from([
    b"GET", b"POST", b" ", b"/", b"/echo", b"%", b"%zz", b"%00", b"..", b"?", b"#", b"HTTP/1.1",
    b"HTTP/1.0", b"HTTP/9.9", b"\r\n", b"\n", b"\r", b"\0", b"\t", b":", b"host: a",
    b"content-length: ", b"0", b"1", b"-1", b"00000001", b"9" * 30, b"9" * 5_000, b"1, 1",
    b"transfer-encoding: chunked", b"transfer-encoding: identity", b"connection: close",
    b"connection: upgrade", b"expect: 100-continue", b"content-encoding: gzip", b"\xff",
    b"ffffffffffffffff", b"5\r\nhello\r\n", b"0\r\n\r\n", b"{}", b"[" * 3_000,
    b"x-request-id: ", b"a" * 70_000,
])  # fmt: skip
SENT = st.lists(
    st.sampled_from(REQUESTS)
    | st.sampled_from(REQUESTS).flatmap(damaged)
    | st.lists(PARTS, max_size=12).map(b"".join)
    | st.binary(max_size=30),
    min_size=1,
    max_size=4,
)
"""Pieces, as one client sends them."""


async def talk(port: int, pieces: list[bytes]) -> bytes:
    """Send the pieces, then close our half, and read to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
        with contextlib.suppress(OSError):
            return await reader.read()
        return b""
    finally:
        writer.transport.abort()


def test_bytes_at_the_server() -> None:
    """Whatever a client sends, it gets whole replies below 500, and the server serves others."""
    server: Server

    async def opening() -> Close:
        nonlocal server
        server = await serve(App(ROUTES), "127.0.0.1", 0)
        return lambda: server.stop(0)

    with Looped(opening) as loop, no_bug_logged():

        @example(
            [b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"0" * 5_000 + b"1\r\n\r\nx"]
        )
        @fuzz(SENT)
        def check(pieces: list[bytes]) -> None:
            got = loop.run(talk(server.port, pieces))
            assert got == b"" or got.startswith(b"HTTP/1.1 "), got[:100]
            assert b"HTTP/1.1 5" not in got, got[:300]

        check()
        assert b" 200 " in loop.run(talk(server.port, [REQUESTS[0]]))


VALUES = (
    st.none() | st.booleans() | numbers | st.floats() | words
    | st.lists(numbers | words | st.lists(numbers, max_size=2), max_size=3)
    | st.dictionaries(words, numbers | words, max_size=2)
)  # fmt: skip
CHAT_FIELDS = sorted({*_ChatBody.__struct_fields__, "user", "metadata"})
TEXT_FIELDS = sorted({*_CompletionBody.__struct_fields__, "kv_transfer_params"})
PART = st.fixed_dictionaries({"type": words | st.just("text")}, optional={"text": VALUES})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", ""]) | VALUES},
    optional={
        "content": words | st.lists(PART, max_size=2) | VALUES,
        "name": VALUES,
        "tool_calls": VALUES,
    },
)
CHATS = st.builds(
    lambda messages, more: {"model": "m", "messages": messages} | more,
    st.lists(MESSAGE, max_size=3),
    st.dictionaries(st.sampled_from(CHAT_FIELDS), VALUES, max_size=3),
)
PROMPTS = words | st.lists(numbers | st.integers(0, 256), max_size=4) | VALUES
TEXTS = st.builds(
    lambda prompt, more: {"model": "m", "prompt": prompt} | more,
    PROMPTS,
    st.dictionaries(st.sampled_from(TEXT_FIELDS), VALUES, max_size=3),
)
GOOD = (
    b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3,'
    b' "stop": ["x"]}'
)
NAMES = (
    "content-type", "content-encoding", "x-request-id", "x-moonserve-priority", "authorization",
    "x-moonserve-tenant", "x-moonserve-ttft-slo-ms", "x-moonserve-tbt-slo-ms", "origin",
    "accept-encoding",
)  # fmt: skip
LATIN = st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f")
HEADERS = st.dictionaries(
    st.sampled_from(NAMES),
    st.text(LATIN, max_size=8)
    | numbers.map(str)
    | st.sampled_from(["gzip", "nan", "inf", "1e999", "9" * 5_000]),
    max_size=2,
)


def encoded(body: Any) -> bytes:
    """JSON, with lone surrogates and numbers that are none, as clients may write them."""
    return json.dumps(body).encode()


def test_openai_bodies() -> None:
    """Each body is served, or refused by a 4xx in OpenAI's shape; nothing stays open."""
    client: HttpClient
    serving = FakeServing(*say("hi"))
    url = ""

    async def opening() -> Close:
        nonlocal client, url
        client = HttpClient()
        gateway = Front(OwnText(serving, lambda model: ByteText()))
        server = await serve(App(gateway.routes(), gateway.prefixes()), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}"

        async def close() -> None:
            await client.close()
            await server.stop(0)
            assert gateway.metrics.in_flight == 0

        return close

    with Looped(opening) as loop, no_bug_logged():

        @fuzz(
            st.tuples(st.just("/v1/chat/completions"), CHATS.map(encoded) | damaged(GOOD))
            | st.tuples(st.just("/v1/completions"), TEXTS.map(encoded)),
            HEADERS,
        )
        def check(request: tuple[str, bytes], headers: dict[str, str]) -> None:
            path, body = request
            reply = loop.run(
                client.request("POST", url + path, headers=headers, body=body, timeout_s=15)
            )
            assert reply.status < 500, (reply.status, reply.body, body)
            if reply.status != 200:
                assert json.loads(reply.body)["error"]["message"]
            serving.requests.clear()

        check()
        assert serving.open == 0
