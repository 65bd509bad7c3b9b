"""A made-up fleet of engines behind 1, 2, 4 and 8 fronts: what is found cached, CPU, latency.

    python bench/fleet.py [--fronts 1,2,4,8] [--engines 120] [--rate 40] [--secs 20] [--alone]

Sessions of two turns come at --rate requests a second. Each request goes to a front by chance, as
behind a load balancer, so the second turn mostly comes through another front than the first. One
process pretends to be all engines: each has a prefix cache of its own, prefills 30 us a token that
is not cached, one prompt after the other, and decodes 5 ms a token, 32 tokens in two events. Their
KV events are off: the Conductor knows what they hold from what it sent there.

With --alone the same is measured with gateways that have a Conductor each and know nothing of each
other, as routers with a tree of their own.

  cached    share of the tokens of second turns that their engine had; at most: what was sent before
  front     CPU of all fronts per request, microseconds
  decision  CPU of the Conductor per request, less what it takes without requests; decisions a
            second are what one core of it could take at this price
  added     latency at the client, less what the engine says that it took, milliseconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from common import machine_line
from gateway import cpu_us, free_port, text
from moonserve.core.errors import DeadlineExceeded
from moonserve.live.http.client import HttpClient, UpstreamError, sse_events
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import App, serve

MODEL = "made-up"
TOKEN = "the-token-of-this-benchmark"
CHARACTERS = 4
"""Of one token."""
PIECE = 16
"""Tokens of one block of a cache."""
CACHE_BLOCKS = 4_000
PREFILL_S = 30e-6
DECODE_S = 5e-3
ANSWER = 32
READY_S = 60.0
CALL_S = 60.0


class Engine:
    """One made-up engine: a cache of prefixes, and the time that it takes."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.turn = asyncio.Lock()
        self.running = 0

    def routes(self) -> dict[tuple[str, str], Any]:
        """What a gateway asks of a vLLM server."""
        return {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/chat/completions"): self._chat,
        }

    async def _health(self, request: HttpRequest) -> Response:
        return Response()

    async def _models(self, request: HttpRequest) -> Response:
        return json_response({"data": [{"id": MODEL, "max_model_len": 32_768}]})

    async def _metrics(self, request: HttpRequest) -> Response:
        page = (
            f"vllm:num_requests_running {self.running}.0\nvllm:num_requests_waiting 0.0\n"
            f'vllm:cache_config_info{{block_size="{PIECE}",enable_prefix_caching="True",'
            f'num_gpu_blocks="{CACHE_BLOCKS}"}} 1.0\n'
        )
        return Response(body=page.encode(), content_type="text/plain")

    async def _chat(self, request: HttpRequest) -> StreamingResponse:
        body = json.loads(await request.body())
        said = "".join(it["content"] for it in body["messages"])
        return StreamingResponse(self._tokens(said), content_type="text/event-stream")

    async def _tokens(self, said: str) -> AsyncIterator[bytes]:
        """The first token, and then the others in one piece."""
        began_s = time.monotonic()
        count = len(said) // CHARACTERS
        self.running += 1
        async with self.turn:
            cached = self._found(said) * PIECE
            await asyncio.sleep((count - cached) * PREFILL_S)
        yield event([choice("one ")])
        await asyncio.sleep(ANSWER * DECODE_S)
        self.running -= 1
        took_us = round((time.monotonic() - began_s) * 1e6)
        answer = text(ANSWER * CHARACTERS - 16, took_us) + f" {took_us:011d}"
        self._found(said + "one " + answer)
        yield event([choice(answer, "stop")])
        usage = {"prompt_tokens": count, "completion_tokens": ANSWER}
        usage["total_tokens"] = count + ANSWER
        yield event([], {**usage, "prompt_tokens_details": {"cached_tokens": cached}})
        yield b"data: [DONE]\n\n"

    def _found(self, said: str) -> int:
        """How many leading blocks the cache has; it has all of them from now on."""
        raw, step, key, found, whole = said.encode(), PIECE * CHARACTERS, b"", 0, True
        for at in range(0, len(raw) - step + 1, step):
            key = blake2b(key + raw[at : at + step], digest_size=16).digest()
            whole = whole and key in self.blocks
            found += whole
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > CACHE_BLOCKS:
            self.blocks.popitem(last=False)
        return found


def choice(content: str, reason: str | None = None) -> dict[str, Any]:
    """A piece of the one choice."""
    return {"index": 0, "delta": {"content": content}, "finish_reason": reason}


def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    """One event of a stream."""
    of = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return b"data: " + json.dumps(of | {"choices": choices, "usage": usage}).encode() + b"\n\n"


async def pretend(count: int) -> None:
    """Be so many engines until stdin ends; print their ports first."""
    ports = [(await serve(App(Engine().routes()), "127.0.0.1", 0)).port for _ in range(count)]
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)


class Reply(NamedTuple):
    """One request, as its client saw it."""

    second: bool
    prompt: int
    cached: int
    known: int
    """Tokens of the prompt that were sent or generated before."""
    added_ms: float


class Load:
    """Sessions of two turns at random fronts."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self._urls = urls
        self._draw = random.Random(seed)
        self._heads = [text(400, seed) for seed in range(8)]
        self._http = HttpClient()
        self.replies: list[Reply] = []

    async def run(self, rate: float, secs: float) -> None:
        """Begin sessions for so long, and wait for the last."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + secs
        next_s, sessions = loop.time(), list[asyncio.Task[None]]()
        while next_s < end_s:
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            sessions.append(asyncio.create_task(self._session(len(sessions))))
            next_s += self._draw.expovariate(rate / 2)
        await asyncio.gather(*sessions)
        await self._http.close()

    async def _session(self, number: int) -> None:
        said = [("system", self._heads[number % 8]), ("user", text(6_000, 10_000 + number))]
        answer = await self._ask(said, 0, second=False)
        await asyncio.sleep(self._draw.uniform(0.5, 2.0))
        said.append(("assistant", answer))
        known = sum(len(content) for _, content in said) // CHARACTERS
        await self._ask([*said, ("user", text(400, 90_000 + number))], known, second=True)

    async def _ask(self, said: list[tuple[str, str]], known: int, *, second: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in said]
        asked = {"model": MODEL, "messages": messages, "max_tokens": ANSWER, "stream": True}
        body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
        url = self._draw.choice(self._urls) + "/v1/chat/completions"
        began_s, answer, usage = time.monotonic(), "", dict[str, Any]()
        stream = self._http.stream("POST", url, body=body, timeout_s=CALL_S, idle_timeout_s=CALL_S)
        async with stream as reply:
            if reply.status != 200:
                sys.exit(f"{url} answers {reply.status}: {(await reply.read())[:300]!r}")
            async for data in sse_events(reply):
                found = json.loads(data)
                usage = found.get("usage") or usage
                answer += "".join(it["delta"]["content"] for it in found["choices"])
        took_s = time.monotonic() - began_s
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        added_ms = took_s * 1e3 - int(answer[-11:]) / 1e3
        self.replies.append(Reply(second, usage["prompt_tokens"], cached, known, added_ms))
        return answer


class Site:
    """The processes of one measurement."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, *words: str, **pipes: Any) -> subprocess.Popen[str]:
        """Start a process that ends with the measurement."""
        log = self._stack.enter_context((self._folder / "log").open("a"))
        env = {**os.environ, "MOONSERVE_TOKEN": TOKEN}
        started = subprocess.Popen(words, stderr=log, text=True, env=env, **pipes)
        self._stack.callback(started.wait)
        self._stack.callback(started.kill)
        return started

    def engines(self, count: int) -> Path:
        """Start the engines; the file of settings that describes them."""
        words = (sys.executable, __file__, "--pretend", str(count))
        started = self.start(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert started.stdout is not None
        ports = json.loads(started.stdout.readline())
        file = self._folder / "fleet.yaml"
        lines = [
            f"- {{name: e{n}, url: 'http://127.0.0.1:{port}', events: 'off'}}"
            for n, port in enumerate(ports)
        ]
        file.write_text("instances:\n" + "\n".join(lines) + "\n")
        return file

    def role(self, command: str, *words: str) -> tuple[subprocess.Popen[str], str]:
        """Start a gateway or a Conductor; it, and its URL."""
        port = str(free_port())
        argv = (sys.executable, "-m", "moonserve", command, "--port", port, *words)
        return self.start(*argv, stdout=subprocess.DEVNULL), f"http://127.0.0.1:{port}"


async def unready(urls: Sequence[str]) -> str:
    """Wait until all of them have all engines; why they have not. Empty: they have."""
    http, end_s = HttpClient(), time.monotonic() + READY_S
    why = ""
    for url in urls:
        why = "it does not answer"
        while why and time.monotonic() < end_s:
            await asyncio.sleep(0.2)
            with contextlib.suppress(UpstreamError, DeadlineExceeded):
                reply = await http.request("GET", url + "/ready", timeout_s=5)
                why = "" if reply.status == 200 else reply.body.decode()
        if why:
            why = f"{url} is not ready after {READY_S:g} s: {why}"
            break
    await http.close()
    return why


async def measure(args: argparse.Namespace, fronts: int, alone: bool) -> dict[str, float]:
    """One row: so many fronts around one Conductor, or so many gateways that are alone."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site = Site(folder, stack)
        file = site.engines(args.engines)
        deciding: list[int] = []
        if alone:
            serving = [site.role("gateway", "--config", str(file)) for _ in range(fronts)]
        else:
            conductor, at = site.role("conductor", "--config", str(file))
            deciding = [conductor.pid]
            where = at.removeprefix("http://")
            serving = [site.role("gateway", "--conductor", where) for _ in range(fronts)]
        urls = [url for _, url in serving]
        if why := await unready(urls):
            log = (folder / "log").read_text().splitlines()[-10:]
            sys.exit("\n".join([why, *log]))
        pids = [process.pid for process, _ in serving]

        async def spent(secs: float, load: Load | None) -> tuple[float, float, float]:
            """CPU of the fronts and of the Conductor meanwhile, and how long it took."""
            before = [sum(map(cpu_us, them)) for them in (pids, deciding)]
            began_s = time.monotonic()
            await (asyncio.sleep(secs) if load is None else load.run(args.rate, secs))
            after = [sum(map(cpu_us, them)) for them in (pids, deciding)]
            took_s = time.monotonic() - began_s
            return after[0] - before[0], after[1] - before[1], took_s

        await Load(urls, 1).run(args.rate, 3.0)  # warm: connections, costs, caches of code
        idle = await spent(3.0, None)
        load = Load(urls, 2)
        busy = await spent(args.secs, load)
    count = len(load.replies)
    followed = [reply for reply in load.replies if reply.second]
    front, decision = ((busy[at] - idle[at] / idle[2] * busy[2]) / count for at in (0, 1))
    added = sorted(reply.added_ms for reply in load.replies)
    prompt = sum(reply.prompt for reply in followed)
    return {
        "requests": count,
        "cached": sum(reply.cached for reply in followed) / prompt,
        "at most": sum(reply.known for reply in followed) / prompt,
        "front": front,
        "decision": decision,
        "p50": statistics.median(added),
        "p99": added[round(0.99 * (count - 1))],
    }


def rows(args: argparse.Namespace) -> Iterator[tuple[int, bool]]:
    """What is measured, in order."""
    for fronts in map(int, args.fronts.split(",")):
        yield fronts, False
        if args.alone:
            yield fronts, True


def main() -> None:
    """Measure, and print one row after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fronts", default="1,2,4,8")
    parser.add_argument("--engines", type=int, default=120)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--secs", type=float, default=20.0)
    parser.add_argument("--alone", action="store_true", help="also gateways that know no other")
    parser.add_argument("--pretend", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pretend:
        asyncio.run(pretend(args.pretend))
        return
    print(machine_line())
    print(
        f"{args.engines} engines, sessions of two turns, {args.rate:g} requests a second for"
        f" {args.secs:g} s\n"
    )
    print("| fronts | requests | cached | at most | front us | decision us | decisions/s |"
          " added p50 ms | p99 ms |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for fronts, alone in rows(args):
        got = asyncio.run(measure(args, fronts, alone))
        what = f"{fronts} alone" if alone else f"{fronts}"
        price = "in front" if alone else f"{got['decision']:.0f}"
        pace = "" if alone else f"{1e6 / got['decision']:,.0f}"
        print(
            f"| {what} | {got['requests']:.0f} | {got['cached']:.3f} | {got['at most']:.3f} |"
            f" {got['front']:.0f} | {price} | {pace} | {got['p50']:.1f} | {got['p99']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
