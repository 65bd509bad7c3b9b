"""kill -9 of an external engine under streams. The engines are processes of their own, and fake."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient, sse_events
from tests.support.fake_vllm import spoken
from tests.support.fronts import before_engines

_STREAMS, _TOKENS = 16, 40
_TOKEN_S = "0.02"
_ROOT = Path(__file__).parents[2]


async def engine(stack: contextlib.AsyncExitStack) -> tuple[asyncio.subprocess.Process, str]:
    """An engine's process and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fake_vllm", _TOKEN_S),
        cwd=_ROOT,
        stdout=asyncio.subprocess.PIPE,
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def read(http: HttpClient, url: str, number: int, seen: list[int]) -> None:
    """Read a stream and judge it; `seen` counts events as they come."""
    prompt = f"{number}, and what is after it"
    body = {"model": "m", "prompt": prompt, "max_tokens": _TOKENS, "stream": True}
    body["stream_options"] = {"include_usage": True}
    events: list[dict[str, Any]] = []
    async with http.stream(
        "POST",
        url + "/v1/completions",
        body=msgspec.json.encode(body),
        timeout_s=20,
        idle_timeout_s=20,
    ) as reply:
        assert reply.status == 200, await reply.read()
        async for event in sse_events(reply):
            events.append(msgspec.json.decode(event))
            seen[number] += 1
    words = [choice["text"] for event in events for choice in event["choices"]]
    assert words == spoken(list(prompt.encode()), _TOKENS)
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), _TOKENS)


@pytest.mark.parametrize("role", ["gateway", "front"])
def test_streams_of_a_killed_engine_lose_no_token(role: str) -> None:
    """All of 16 streams are whole. A front learns from its Conductor what the engines report."""

    async def main() -> None:
        async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
            (first, one), (_, two) = await asyncio.gather(engine(stack), engine(stack))
            named = {"e0": one, "e1": two}
            specs = [InstanceSpec(name=it, url=named[it], events="off") for it in named]
            decides, serves = await before_engines(role, specs)
            if serves is not decides:
                stack.push_async_callback(serves.stop, 0)
            stack.push_async_callback(decides.stop, 0)
            http = HttpClient()
            stack.push_async_callback(http.close)
            while len(serves.conductor.instances()) < 2:
                await asyncio.sleep(0.02)
            url = f"http://127.0.0.1:{serves.port}"
            seen = [0] * _STREAMS
            streams = asyncio.gather(*[read(http, url, it, seen) for it in range(_STREAMS)])
            while min(seen) < 5:
                assert not streams.done(), streams.result()
                await asyncio.sleep(0.01)
            first.kill()
            await streams
            account = decides.conductor.account
            attempts = [record.attempts for record in account.latest()]
            assert 0 < attempts.count(2) < _STREAMS
            assert sum(attempts) == _STREAMS + attempts.count(2)

    asyncio.run(main())
