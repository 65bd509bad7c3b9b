"""CPU of the gateway's front per short request and 64-token stream, beside a bare handler.

    python bench/front.py [--requests 4000] [--rounds 5]

A child serves all arms with our own HTTP server on one loop (uvloop); this process sends from 32
connections and asks the child for its CPU time before and after. "fake": the gateway over a Serving
that has its tokens ready. "upstream": over a Serving that reads them from a third process through
our own client, as from an engine. The bare stream sends the same bytes in the same 64 pieces. Arms
are interleaved; figures are medians over rounds. The whole path, engines and decisions included, is
bench/gateway.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import uvloop

from common import machine_line
from moonserve.core.request import Request
from moonserve.live.api.front import Front
from moonserve.live.api.own_text import OwnText
from moonserve.live.http.client import HttpClient, sse_events
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse
from moonserve.live.http.server import App, serve
from moonserve.live.ports import ModelCard, Output

CONNECTIONS = 32
TOKENS = 64
TOKEN = list(b" word")
PIECE = b'data: {"choices":[{"index":0,"text":" word","token_ids":[32,119,111,114,100]}]}\n\n'
PATH = "/v1/chat/completions"
HELLO = Response(body=b"hello")
CHUNK = b"data: " + bytes(180) + b"\n\n"
BODY = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three moons of Jupiter."},
    ],
    "temperature": 0.7,
}
ARMS = {
    "bare hello": ("/bare", False),
    "gateway, fake": ("/fake", False),
    "gateway, upstream": ("/upstream", False),
    "bare 64-chunk stream": ("/bare", True),
    "gateway 64-token stream, fake": ("/fake", True),
    "gateway 64-token stream, upstream": ("/upstream", True),
}


class _ByteText:
    """Text tools that cost next to nothing, so that the gateway is measured."""

    vocab_size = 257
    longest_token_bytes = 1

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Any, tools: Any = None) -> str:
        return "\n".join(message["content"] for message in messages)

    def detokenizer(self) -> _ByteText:
        return self

    def feed(self, ids: Any) -> str:
        return bytes(ids).decode()

    def flush(self) -> str:
        return ""


class _ReadyServing:
    """Tokens that are ready, each in its own turn of the loop."""

    def models(self) -> list[ModelCard]:
        return [ModelCard("m", 4_096, True)]

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        if request.stopping.max_tokens == 1:
            yield Output(tuple(TOKEN), "length", 0)
            return
        for i in range(TOKENS):
            await asyncio.sleep(0)
            yield Output(tuple(TOKEN), "length" if i == TOKENS - 1 else None, 0)


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Piece(msgspec.Struct):
    choices: list[_Choice]


class _UpstreamServing(_ReadyServing):
    """Tokens from a third process."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._client = HttpClient()
        self._decode = msgspec.json.Decoder(_Piece).decode

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        count = min(request.stopping.max_tokens, TOKENS)
        async with self._client.stream(
            "POST", self._url, body=b"%d" % count, timeout_s=10, idle_timeout_s=10
        ) as reply:
            async for event in sse_events(reply):
                count -= 1
                ids = tuple(self._decode(event).choices[0].token_ids)
                yield Output(ids, None if count else "length", 0)


async def bare(request: HttpRequest) -> Response | StreamingResponse:
    """A plain hello, or its 64 chunks. It reads the body as any server must."""
    body = await request.body()
    return StreamingResponse(pieces(CHUNK, TOKENS)) if b'"stream":true' in body else HELLO


async def engine(request: HttpRequest) -> StreamingResponse:
    """The upstream: as many events as the body asks for, one per turn of the loop."""
    return StreamingResponse(pieces(PIECE, int(await request.body())))


async def pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        await asyncio.sleep(0)
        yield piece
    yield b"data: [DONE]\n\n"


async def serve_arms(upstream_port: int | None) -> None:
    """Be a child: listen, print the ports, run until stdin closes."""
    if upstream_port is None:
        ports = {
            "engine": (await serve(App({("POST", "/v1/completions"): engine}), "127.0.0.1", 0)).port
        }
    else:
        ports = {"/bare": (await serve(App({("POST", PATH): bare}), "127.0.0.1", 0)).port}
        for name, serving in (
            ("/fake", _ReadyServing()),
            ("/upstream", _UpstreamServing(upstream_port)),
        ):
            app = App(Front(OwnText(serving, lambda model: _ByteText())).routes())
            app.routes["GET", "/cpu"] = cpu
            ports[name] = (await serve(app, "127.0.0.1", 0)).port
    print(msgspec.json.encode(ports).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def cpu(request: HttpRequest) -> Response:
    return Response(body=repr(time.process_time()).encode())


async def drive(client: HttpClient, url: str, stream: bool, count: int) -> None:
    """Send `count` requests from all connections."""
    body = msgspec.json.encode({**BODY, "stream": stream, "max_tokens": TOKENS if stream else 1})
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            reply = await client.request("POST", url, body=body, timeout_s=60)
            assert reply.status == 200, reply.body

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))


async def measure(ports: dict[str, int], requests: int, rounds: int) -> None:
    client = HttpClient()
    cpu_url = f"http://127.0.0.1:{ports['/fake']}/cpu"
    costs: dict[str, list[float]] = {arm: [] for arm in ARMS}

    async def cpu_s() -> float:
        return float((await client.request("GET", cpu_url, timeout_s=5)).body)

    for turn in range(rounds + 1):
        for arm, (name, stream) in ARMS.items():
            url = f"http://127.0.0.1:{ports[name]}{PATH}"
            count = requests // 8 if stream else requests
            before = await cpu_s()
            await drive(client, url, stream, count)
            if turn:  # the first turn is a warm-up
                costs[arm].append((await cpu_s() - before) / count * 1e6)
    print(f"{'CPU of the serving process':36} {'us':>7} {'lowest':>7} {'/ bare':>7}")
    for arm, (_, stream) in ARMS.items():
        base = statistics.median(costs["bare 64-chunk stream" if stream else "bare hello"])
        median = statistics.median(costs[arm])
        print(f"{arm:36} {median:7.1f} {min(costs[arm]):7.1f} {median / base:7.2f}")
    await client.close()


def child(*args: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "child", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, msgspec.json.decode(process.stdout.readline(), type=dict[str, int])


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        uvloop.run(serve_arms(int(sys.argv[2]) if sys.argv[2:] else None))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine_line()}; {CONNECTIONS} connections")
    upstream, ports = child()
    front, arms = child(str(ports["engine"]))
    try:
        uvloop.run(measure(arms, args.requests, args.rounds))
    finally:
        front.communicate(timeout=10)
        upstream.communicate(timeout=10)


if __name__ == "__main__":
    main()
