"""A server that stops while requests run: after their time they end with an error that says so."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.schedule.cost import Cost
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient, UpstreamError, sse_events
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from moonserve.live.process.gateway import Gateway
from tests.support.engines import Engine
from tests.support.fronts import before_engines
from tests.support.inproc import site

SLOW = Cost((20_000, 0, 0, 0, 20_000, 0, 0), learns=False)
"""A pass takes 20 ms."""
STOPPING = "this server is stopping, and running requests have had their time"


async def events_of(
    http: HttpClient, url: str, body: dict[str, Any], first: asyncio.Event
) -> list[dict[str, Any]]:
    """The events of a streamed completion; `first` is set with the first one."""
    raw = msgspec.json.encode({"prompt": "once upon a time", "stream": True, **body})
    seen: list[dict[str, Any]] = []
    async with http.stream(
        "POST", url + "/v1/completions", body=raw, timeout_s=20, idle_timeout_s=20
    ) as reply:
        assert reply.status == 200, await reply.read()
        async for event in sse_events(reply):
            seen.append(msgspec.json.decode(event))
            first.set()
    return seen


async def before_engine(
    role: str, token_s: float, stack: contextlib.AsyncExitStack
) -> tuple[Engine, Gateway | ConductorProcess, Gateway | FrontProcess]:
    """An engine, and what before_engines starts before it; `stack` stops all but what serves."""
    engine = Engine("a", token_s=token_s)
    await engine.start()
    stack.push_async_callback(engine.stop)
    specs = [InstanceSpec(name="a", url=engine.url, events="off")]
    decides, serves = await before_engines(role, specs, shared=True)
    stack.push_async_callback(decides.stop, 0)
    return engine, decides, serves


def assert_stopping(error: dict[str, Any]) -> None:
    """It names no engine as failed, and no page of the server that stops."""
    assert STOPPING in error["message"]
    assert "/ui" not in error["message"]
    assert error["type"] == "unavailable_error"


def test_a_stream_of_workers_ends_with_an_error_and_counts_as_failed() -> None:
    """What a worker does for it ends too, and nothing stays promised."""

    async def main() -> None:
        async with asyncio.timeout(30), site() as at:
            await at.add("p0", "prefill")
            await at.add("d0", "decode", SLOW)
            first = asyncio.Event()
            model = at.gateway.conductor.instances()[0].model
            body = {"model": model, "max_tokens": 1_000, "ignore_eos": True}
            asking = asyncio.create_task(events_of(at.http, at.url, body, first))
            await first.wait()
            await at.gateway.stop(0.05)
            assert_stopping((await asking)[-1]["error"])
            [record] = at.gateway.conductor.account.latest()
            assert (record.outcome, record.fate) == ("failed", "failed")
            assert not at.gateway.conductor.core.promised().requests

    asyncio.run(main())


@pytest.mark.parametrize("role", ["gateway", "front"])
def test_requests_on_engines_end_with_an_error(role: str, tmp_path: Path) -> None:
    """A stream gets an error event, a reply that is not streamed a 503; no engine is said to have
    failed. A front that shares its
    port does the same."""

    async def main() -> None:
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
            engine, decides, serves = await before_engine(role, 0.05, stack)
            http = HttpClient()
            stack.push_async_callback(http.close)
            url = f"http://127.0.0.1:{serves.port}"
            first = asyncio.Event()
            body = {"model": "m", "max_tokens": 500}
            asking = asyncio.create_task(events_of(http, url, body, first))
            raw = msgspec.json.encode({**body, "prompt": "another"})
            path = url + "/v1/completions"
            whole = asyncio.create_task(http.request("POST", path, body=raw, timeout_s=20))
            await first.wait()
            while engine.running < 2:
                await asyncio.sleep(0.01)
            await serves.stop(0.05)
            assert_stopping((await asking)[-1]["error"])
            reply = await whole
            assert (reply.status, STOPPING in reply.body.decode()) == (503, True)
            while engine.running:
                await asyncio.sleep(0.01)
            account = decides.conductor.account
            while any(record.outcome == "running" for record in account.latest()):
                await asyncio.sleep(0.01)
            assert [record.outcome for record in account.latest()] == ["failed", "failed"]

    asyncio.run(main())


@pytest.mark.parametrize("others_go_on", [True, False])
def test_fronts_that_all_end_listen_until_their_streams_have_ended(others_go_on: bool) -> None:
    """Workers report to the Conductor at their port: without, instances of streams seem lost. A
    front that ends alone leaves the port to the others."""

    async def main() -> None:
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
            _, _, serves = await before_engine("front", 0.02, stack)
            http = HttpClient()
            stack.push_async_callback(http.close)
            url = f"http://127.0.0.1:{serves.port}"
            first = asyncio.Event()
            body = {"model": "m", "max_tokens": 100}
            asking = asyncio.create_task(events_of(http, url, body, first))
            await first.wait()
            stopping = asyncio.create_task(serves.stop(20, others_go_on))
            another = HttpClient()
            stack.push_async_callback(another.close)
            while True:
                try:
                    reply = await another.request("GET", url + "/ready", timeout_s=5)
                except UpstreamError:
                    assert others_go_on
                    break
                if not others_go_on and b"shutting down" in reply.body:
                    break
                await asyncio.sleep(0.01)
            assert not asking.done()
            assert len(await asking) == 100
            await stopping

    asyncio.run(main())
