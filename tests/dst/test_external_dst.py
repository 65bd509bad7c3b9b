"""External engines under seeded faults: they answer errors, hang, die and restart; clients leave.

Safety while faults last: the part of a reply that a client gets is right, and a whole reply is
complete. Liveness after: every request is answered, nothing stays promised, no engine works. A
failing seed is the test's parameter.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId
from moonserve.live.drive.calls import CallLimits
from moonserve.live.http.client import sse_events
from tests.support.external_site import Site
from tests.support.fake_vllm import FakeVllm, spoken

LIMITS = CallLimits(first_byte_s=1.0, handover_s=0.4, token_s=0.4, slow_token_s=0.05)
_REQUESTS, _TOKENS = 60, 6
_REFUSED = (429, 502, 503)
"""429 and 503 may also be an engine's own answer, if it was the last."""


async def one(site: Site, rng: Random, number: int) -> str:
    """Send a request and judge its reply; returns how it ended."""
    prompt = f"{'a shared beginning of some length ' * rng.randrange(8)}request {number}"
    stream, leaves_s = rng.random() < 0.6, rng.choice([None, None, None, 0.02])
    body = {"model": "m", "prompt": prompt, "max_tokens": _TOKENS, "stream": stream}
    right = spoken(list(prompt.encode()), _TOKENS)
    try:
        async with asyncio.timeout(leaves_s):
            if not stream:
                reply = await site.post(body)
                if reply.status != 200:
                    assert reply.status in _REFUSED, reply.body
                    return "refused"
                text = msgspec.json.decode(reply.body)["choices"][0]["text"]
                assert text == "".join(right)
                return "whole"
            return await streamed(site, body, right)
    except TimeoutError:
        return "left"


async def streamed(site: Site, body: dict[str, Any], right: list[str]) -> str:
    """Stream a request and judge its events; returns how it ended."""
    raw, words, failed = msgspec.json.encode(body), "", False
    async with site.http.stream(
        "POST", site.url + "/v1/completions", body=raw, timeout_s=20, idle_timeout_s=20
    ) as reply:
        if reply.status != 200:
            assert reply.status in _REFUSED
            return "refused"
        async for data in sse_events(reply):
            assert not failed, "an error event is the last"
            event = msgspec.json.decode(data)
            failed = "error" in event
            for choice in event.get("choices", []):
                words += choice["text"]
                # streams of engines whose tokens are not known pass as they are
                failed = failed or choice["finish_reason"] == "abort"
    assert "".join(right).startswith(words)
    assert failed or words == "".join(right)
    return "cut" if failed else "whole"


async def trouble(site: Site, rng: Random, engines: list[FakeVllm], calm: asyncio.Event) -> None:
    """Faults, one after the other; the last restart ends before this does."""
    while not calm.is_set():
        await asyncio.sleep(rng.uniform(0.0, 0.04))
        engine = rng.choice(engines)
        match rng.randrange(11):
            case 0:
                engine.statuses.append(rng.choice([500, 503, 429]))
            case 1:
                engine.delay_s = rng.choice([0.0, 0.0, 1.5])
            case 2:
                engine.cut_after = rng.choice([None, None, 0, 2])
            case 3:
                engine.lost_handovers += 1
            case 4:
                engine.token_s = rng.choice([0.0, 0.01, 0.6])
            case 5:
                await engine.restart()
            case 6:
                await engine.restart()
                if InstanceId(engine.name) in site.conductor.core.view.instances:
                    site.rejoin(engine.name)
            case 7:
                rejoin(site, engines)
            case 8:
                engine.error_after = rng.choice([None, None, 0, 3])
            case 9:
                engine.abort_after = rng.choice([None, None, 1])
            case 10:
                engine.together = rng.choice([1, 1, 2, 3])


def rejoin(site: Site, engines: list[FakeVllm]) -> None:
    """The fleet finds the engines again that the Conductor has forgotten."""
    for engine in engines:
        if InstanceId(engine.name) not in site.conductor.core.view.instances:
            site.rejoin(engine.name)


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang"])
@pytest.mark.parametrize("seed", range(3))
def test_faults(connector: Any, seed: int) -> None:
    """Two pairs and one engine that does all, under all faults."""

    async def main() -> None:
        rng, site = Random(seed), Site(Tuning(patience_us=300_000), LIMITS)
        site.version = "0.32.0"
        await site.start()
        try:
            for name in ("p0", "p1", "d0", "d1"):
                role: Any = "prefill" if name[0] == "p" else "decode"
                await site.add(name, role, connector)
            await site.add("a", "both", "none")
            engines = list(site.engines.values())
            calmed = asyncio.Event()
            faults = asyncio.create_task(trouble(site, rng, engines, calmed))
            clients = []
            for number in range(_REQUESTS):
                clients.append(asyncio.create_task(one(site, rng, number)))
                await asyncio.sleep(rng.uniform(0, 0.02))
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(*clients)
            assert not faults.done(), faults.result()
            calmed.set()
            await faults
            assert outcomes.count("whole") > _REQUESTS // 4, outcomes
            for engine in engines:
                engine.statuses.clear()
                engine.delay_s, engine.cut_after, engine.token_s = 0.0, None, 0.0
                engine.lost_handovers, engine.error_after, engine.abort_after = 0, None, None
            rejoin(site, engines)
            await site.settled()
            calm = [one(site, Random(seed), 1_000 + number) for number in range(10)]
            assert set(await asyncio.gather(*calm)) <= {"whole", "left"}
            await site.settled()
        finally:
            await site.stop()

    asyncio.run(main())
