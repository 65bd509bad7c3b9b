"""Two fronts and the Conductor's process with external engines, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.schedule.observed import CallWatch
from moonserve.core.units import InstanceId
from moonserve.live.access.keys import ApiKey, KeyLimits, hash_of
from moonserve.live.access.scopes import Scope
from moonserve.live.access.sources import changed_file
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.fleet import WatchedCall
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from tests.support.fake_vllm import Fabric, FakeVllm, spoken

PROMPT = list(range(1, 100))
TOKEN = "the-secret-of-this-test"


class Site:
    """All of it; made by `run`."""

    def __init__(self) -> None:
        self.http = HttpClient()
        self.fabric = Fabric()
        self.engines: dict[str, FakeVllm] = {}
        self.fronts: list[FrontProcess] = []
        self.conductor: ConductorProcess
        self.specs: list[InstanceSpec] = []

    async def start(self, path: Path, stack: AsyncExitStack, keys: str = "") -> None:
        """A prefill and a decode engine, joined by mooncake, and two fronts."""
        specs = self.specs
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            engine = await FakeVllm(name, "mooncake", self.fabric).start()
            stack.push_async_callback(engine.stop)
            self.engines[name] = engine
            said: dict[str, Any] = {"name": name, "role": role, "connector": "mooncake"}
            specs.append(
                InstanceSpec(url=engine.url, bootstrap=engine.bootstrap, events="off", **said)
            )
        stack.push_async_callback(self.http.close)
        self.config = GatewayConfig(
            model="",
            port=0,
            token=TOKEN,
            keys=keys,
            socket=str(path / "link"),
            wait_ready=3_000_000,
        )
        self.kept = path / "engines"
        self.conductor = await ConductorProcess.start(self.config, specs, self.kept)
        stack.push_async_callback(self.conductor.stop, 0)
        ways = (str(path / "link"), f"127.0.0.1:{self.conductor.port}")
        for way in ways:  # each on a port of its own
            config = msgspec.structs.replace(self.config, socket="", conductor=way)
            front = await FrontProcess.start(config)
            stack.push_async_callback(front.stop, 0)
            self.fronts.append(front)
        for front in self.fronts:
            while len(front.conductor.instances()) < 2:
                await asyncio.sleep(0.01)

    async def complete(
        self,
        front: int,
        prompt: list[int],
        count: int = 4,
        id: str | None = None,
        key: str = "",
    ) -> tuple[int, str]:
        """Status, and text or error."""
        headers = ({"x-request-id": id} if id else {}) | bearer(key)
        body = msgspec.json.encode(
            {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0}
        )
        url = f"http://127.0.0.1:{self.fronts[front].port}/v1/completions"
        reply = await self.http.request("POST", url, headers=headers, body=body, timeout_s=10)
        if reply.status != 200:
            return reply.status, reply.body.decode()
        return 200, msgspec.json.decode(reply.body)["choices"][0]["text"]

    async def states(self, front: int) -> dict[str, str]:
        """Engines by name, as /health reports them; empty if it is not 200."""
        url = f"http://127.0.0.1:{self.fronts[front].port}/health"
        reply = await self.http.request("GET", url, timeout_s=10)
        said = msgspec.json.decode(reply.body)
        return said.get("instances", {}) if reply.status == 200 else {}

    async def metrics(self, front: int) -> dict[str, float]:
        """Samples by name with labels."""
        url = f"http://127.0.0.1:{self.fronts[front].port}/metrics"
        reply = await self.http.request("GET", url, timeout_s=10)
        lines = [line for line in reply.body.decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in (it.rpartition(" ") for it in lines)}

    async def settled(self) -> None:
        """No reservation is left at the one Conductor."""
        while self.conductor.conductor.core.promised().requests:
            await asyncio.sleep(0.01)


def run(use: Callable[[Site], Awaitable[None]], path: Path, keys: str = "") -> None:
    """Run a test with a site, within a deadline."""

    async def main() -> None:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            site = Site()
            await site.start(path, stack, keys)
            await use(site)

    asyncio.run(main())


def test_both_fronts_hand_kv_from_prefill_to_decode(tmp_path: Path) -> None:
    """At either front a client gets the same tokens; there is one ledger, and sums for all."""

    async def use(site: Site) -> None:
        wanted = "".join(spoken(PROMPT, 4))
        calls = [site.complete(i % 2, PROMPT) for i in range(40)]
        assert await asyncio.gather(*calls) == [(200, wanted)] * 40
        await site.settled()
        counted = [await site.metrics(front) for front in (0, 1)]
        name = 'moonserve_requests_total{route="/v1/completions",status="200"}'
        assert [it[name] for it in counted] == [40, 40]
        assert counted[0]['moonserve_prompts_read_total{how="ids"}'] == 40
        assert counted[0]["moonserve_good_requests_total"] == 40
        assert {call.path for call in site.engines["d0"].calls} == {"/v1/completions"}

    run(use, tmp_path)


def test_one_id_at_all_fronts_at_once_is_several_requests(tmp_path: Path) -> None:
    """No request is refused because another client uses its id; engines see ids of their own."""

    async def use(site: Site) -> None:
        wanted = (200, "".join(spoken(PROMPT, 4)))
        calls = [site.complete(i % 2, PROMPT, id="mine") for i in range(8)]
        assert await asyncio.gather(*calls) == [wanted] * 8
        ids = [call.headers["x-request-id"] for call in site.engines["d0"].calls]
        assert len(set(ids)) == 8
        assert all(it.startswith("mine-") for it in ids)

    run(use, tmp_path)


def test_the_next_conductor_has_the_engines_of_the_one_before(tmp_path: Path) -> None:
    """Engines described over HTTP are asked again, removed ones are not. A front reports their
    state, and meanwhile that no Conductor is there, rather than that the model is unknown."""

    async def use(site: Site) -> None:
        wanted = (200, "".join(spoken(PROMPT, 4)))
        url = f"http://127.0.0.1:{site.fronts[0].port}/api/instances"
        for name in ("a", "b"):
            engine = await FakeVllm(name).start()
            site.engines[name] = engine
            spec = {"name": name, "url": engine.url, "events": "off"}
            reply = await site.http.request(
                "POST", url, headers=bearer(TOKEN), body=msgspec.json.encode(spec), timeout_s=10
            )
            assert reply.status == 200
        reply = await site.http.request("DELETE", url + "/b", headers=bearer(TOKEN), timeout_s=10)
        assert reply.status == 200
        await site.conductor.stop(0)
        while site.fronts[1].conductor.instances():
            await asyncio.sleep(0.01)
        status, said = await site.complete(1, PROMPT)
        assert (status, "unavailable_error" in said) == (503, True)
        assert await site.states(1) == {}
        config = msgspec.structs.replace(site.config, port=site.conductor.port)
        again = await ConductorProcess.start(config, site.specs, site.kept)
        try:
            while await site.states(1) != {"a": "up", "d0": "up", "p0": "up"}:
                await asyncio.sleep(0.01)
            while len(site.fronts[1].conductor.instances()) < 3:
                await asyncio.sleep(0.01)
            assert await site.complete(1, PROMPT) == wanted
        finally:
            await again.stop(0)
            for name in ("a", "b"):
                await site.engines[name].stop()

    run(use, tmp_path)


def test_the_loss_of_the_conductor_is_no_fault_of_an_engine(tmp_path: Path) -> None:
    """The request under way is served; a new one waits, gets a 503 with the reason, and may
    return."""

    async def use(site: Site) -> None:
        engine = site.engines["d0"]
        engine.hold = asyncio.Event()
        waiting = asyncio.create_task(site.complete(0, PROMPT))
        while not engine.calls:
            await asyncio.sleep(0.01)
        await site.conductor.stop(0)
        status, said = await site.complete(0, PROMPT)
        assert (status, "Conductor does not answer" in said) == (503, True), said
        engine.hold.set()
        assert await waiting == (200, "".join(spoken(PROMPT, 4)))

    run(use, tmp_path)


def test_fronts_learn_that_prefill_restarted(tmp_path: Path) -> None:
    """Another start has another name for its transfers: a front asks for it again, and goes on."""

    async def use(site: Site) -> None:
        wanted = (200, "".join(spoken(PROMPT, 4)))
        assert [await site.complete(front, PROMPT) for front in (0, 1)] == [wanted] * 2
        await site.engines["p0"].restart()
        for front in (0, 1):
            assert await site.complete(front, PROMPT) == wanted
        await site.settled()

    run(use, tmp_path)


def test_calls_teach_the_fleet(tmp_path: Path) -> None:
    """The durations of all fronts' calls are used where costs are fitted."""

    async def use(site: Site) -> None:
        for i in range(12):
            assert (await site.complete(i % 2, [i + 1] * 200))[0] == 200
        fleet = site.conductor.fleet
        assert fleet is not None
        watches = {id: it for _, monitor in fleet.monitors() for id, it in monitor.watches.items()}
        conductor = site.conductor.conductor
        passes, _ = watches[InstanceId("p0")].take(conductor.now_us())
        assert passes or conductor.core.view.instances[InstanceId("p0")].cost.known

    run(use, tmp_path)


@pytest.mark.parametrize(("seen_us", "learned"), [(48_000, True), (50_000, True), (300, False)])
def test_reports_that_came_late_or_again_teach_no_time(seen_us: int, learned: bool) -> None:
    """A front's clock says how long an engine took. If the reports came with another time between
    them, the process was held up, or another Conductor led before."""
    now_us = [0]
    watch = CallWatch(256)
    call = WatchedCall("prefill", 1_000, 0, True, watch, lambda: now_us[0])
    now_us[0] = seen_us
    call.answered_after(48_000, 0)
    assert bool(watch.take(seen_us)[0]) is learned


def test_limits_of_a_key_hold_for_all_fronts_together(tmp_path: Path) -> None:
    """Not for each: the Conductor's process counts. A front that is gone leaves nothing under way.
    An admin key works at a front as the token does, and /metrics needs a key."""

    async def use(site: Site) -> None:
        wanted = (200, "".join(spoken(PROMPT, 4)))
        for at in (0, 1, 0):
            assert await site.complete(at, PROMPT, key="a") == wanted
        status, said = await site.complete(1, PROMPT, key="a")
        assert (status, "3 requests a minute" in said) == (429, True), said
        assert (await site.complete(0, PROMPT))[0] == 401

        engine = site.engines["d0"]
        engine.hold, before = asyncio.Event(), len(engine.calls)
        waiting = asyncio.create_task(site.complete(0, PROMPT, key="b"))
        while len(engine.calls) == before:
            await asyncio.sleep(0.01)
        status, said = await site.complete(1, PROMPT, key="b")
        assert (status, "1 requests are under way" in said) == (429, True), said
        engine.hold.set()
        assert await waiting == wanted
        engine.hold = None
        assert await site.complete(1, PROMPT, key="b") == wanted

        url = f"http://127.0.0.1:{site.fronts[0].port}"
        for path, key, status in (
            ("/api/instances", "", 401),
            ("/api/instances", "a", 403),
            ("/api/instances", "ops", 200),
            ("/api/instances", TOKEN, 200),
            ("/metrics", "", 401),
            ("/metrics", "ops", 200),
            ("/new", "", 401),
            ("/new", "ops", 404),
            ("/v1/new", "a", 404),
        ):
            reply = await site.http.request("GET", url + path, headers=bearer(key), timeout_s=10)
            assert (path, key, reply.status) == (path, key, status)

    file = tmp_path / "keys"
    with changed_file(file) as keys:
        for name, limits in (
            ("a", KeyLimits(requests_per_minute=3)),
            ("b", KeyLimits(under_way=1)),
            ("ops", KeyLimits()),
        ):
            scope: Scope = "admin" if name == "ops" else "infer"
            made = ApiKey(
                name=name, hash=hash_of(name), tenant=name, scopes=(scope,), limits=limits
            )
            keys.append(made)
    run(use, tmp_path, str(file))
