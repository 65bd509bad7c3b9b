"""A whole gateway with external engines, on sockets, with fake engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import RegistryError
from moonserve.live.control import control
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.process.fronts import ConductorProcess
from moonserve.live.process.gateway import Gateway
from moonserve.live.registry.entries import ENGINES
from tests.support.engines import QUICK, Engine
from tests.support.fake_vllm import Fabric
from tests.support.registry import MemoryRegistry, Shared


class Client:
    """A client of one gateway."""

    def __init__(self, gateway: Gateway, http: HttpClient) -> None:
        self.gateway = gateway
        self._http, self._url = http, f"http://127.0.0.1:{gateway.port}"

    async def call(
        self, method: str, path: str, body: Any = None, token: str = "t0ken"
    ) -> ClientResponse:
        """Make one call and return any answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        url = self._url + path
        return await self._http.request(method, url, headers=headers, body=data, timeout_s=10)

    async def get(self, path: str) -> Any:
        """The JSON of a page."""
        reply = await self.call("GET", path)
        assert reply.status == 200, reply
        return msgspec.json.decode(reply.body)

    async def until(self, true: Callable[[], Awaitable[Any]]) -> None:
        """Poll until the condition holds."""
        async with asyncio.timeout(10):
            while not await true():
                await asyncio.sleep(0.02)

    async def up(self, *names: str) -> None:
        """Wait until exactly these instances are up."""

        async def there() -> bool:
            rows = await self.get("/api/instances")
            return [row["id"] for row in rows if row["state"] == "up"] == [*names]

        await self.until(there)

    async def complete(self, prompt: str) -> ClientResponse:
        """Send a completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 3}
        return await self.call("POST", "/v1/completions", body)


@contextlib.asynccontextmanager
async def site(
    *engines: Engine,
    specs: bool = True,
    registry: str = "",
    down: str = "",
    ready_s: float = 60.0,
    alone: bool = False,
) -> AsyncIterator[Client]:
    """A gateway with these engines; specs False: none is described at the start. down: the name of
    one that is described and does not answer. alone: a Conductor alone, which may be a standby."""
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        named = [InstanceSpec(name=it.name, url=it.url, events="off") for it in engines]
        if down:
            named.append(InstanceSpec(name=down, url="http://127.0.0.1:9", events="off"))
        config = GatewayConfig(
            model="", port=0, token="t0ken", registry=registry, ready_s=ready_s, wait_ready=1
        )
        described = named if specs else []
        gateway: Gateway | ConductorProcess
        if alone:
            gateway = await ConductorProcess.start(config, described)
        else:
            gateway = await Gateway.start(config, described, QUICK)
        stack.push_async_callback(gateway.stop, 0)
        http = HttpClient()
        stack.push_async_callback(http.close)
        yield Client(gateway, http)


def test_a_gateway_without_model_files_serves_with_engines() -> None:
    """Without tokenizer and events, requests are served, and alarms report that KV is guessed."""

    async def body() -> None:
        async with site(Engine("a"), Engine("b")) as it:
            await it.up("a", "b")
            for _ in range(3):
                assert (await it.complete("once upon a time " * 8)).status == 200
            health = await it.get("/health")
            assert health["instances"] == {"a": "up", "b": "up"}
            assert all("events: off" in said for said in health["alarms"])
            metrics = (await it.call("GET", "/metrics")).body.decode()
            assert 'moonserve_instance_up{instance_id="a"} 1.0' in metrics
            assert 'moonserve_instance_events_followed{instance_id="b"} 0.0' in metrics
            assert 'moonserve_instance_trust{instance_id="b"} 1.0' in metrics
            assert "moonserve_alarms 1.0" in metrics
            stats = await it.get("/api/stats")
            assert (stats["requests"], stats["store"]) == (0, {"backend": "none"})

    asyncio.run(body())


def test_what_clients_do_wrong_costs_no_engine_its_standing() -> None:
    """An engine's 4xx goes to the client; the engine stays, in the same epoch."""

    async def body() -> None:
        async with site(Engine("a")) as it:
            await it.up("a")
            (before,) = await it.get("/api/instances")
            for _ in range(5):
                bad = {"model": "m", "prompt": "x", "max_tokens": 2, "min_tokens": 9}
                assert (await it.call("POST", "/v1/completions", bad)).status == 400
            await asyncio.sleep(0.1)
            (after,) = await it.get("/api/instances")
            assert (after["state"], after["epoch"]) == ("up", before["epoch"])
            assert (await it.complete("x")).status == 200

    asyncio.run(body())


def test_a_gateway_is_ready_when_all_engines_of_its_file_are_up() -> None:
    """Or after a time: one that is down must not keep the others from their clients."""

    async def body() -> None:
        async with site(Engine("a"), down="b") as it:
            await it.up("a")
            ready = await it.call("GET", "/ready")
            assert ready.status == 503
            assert b"this server is not ready: 1 of 2 instances have joined" in ready.body
            assert (await it.complete("x")).status == 200, "requests are served all the same"
        async with site(Engine("a"), down="b", ready_s=0.5) as it:
            await it.up("a")

            async def ready_soon() -> bool:
                return (await it.call("GET", "/ready")).status == 200

            await it.until(ready_soon)
        async with site(Engine("a"), Engine("b")) as it:
            await it.up("a", "b")
            assert (await it.call("GET", "/ready")).status == 200

    asyncio.run(body())


def test_engines_are_described_and_let_go_over_http() -> None:
    """POST adds or changes an engine, DELETE removes it; both need the token, and may repeat."""

    async def body() -> None:
        fake = Engine("a")
        async with site(fake, specs=False) as it:
            ready = await it.call("GET", "/ready")
            assert ready.status == 503
            assert (await it.complete("a")).status == 503  # which models there will be: not known
            spec = {"name": "a", "url": fake.url, "events": "off"}
            refused = await it.call("POST", "/api/instances", spec, token="wrong")
            assert refused.status == 401
            for changed in ([b"a"], []):
                reply = await it.call("POST", "/api/instances", [spec])
                wanted = [name.decode() for name in changed]
                assert msgspec.json.decode(reply.body) == {"changed": wanted}, reply
            await it.up("a")
            assert (await it.call("GET", "/ready")).status == 200
            await it.call("POST", "/api/instances", spec | {"rack": "r2"})
            await it.up("a")
            (row,) = await it.get("/api/instances")
            assert (row["rack"], row["source"], row["engine"]) == ("r2", "HTTP", "vllm")
            for changed in ([b"a"], []):
                reply = await it.call("DELETE", "/api/instances/a")
                wanted = [name.decode() for name in changed]
                assert msgspec.json.decode(reply.body) == {"changed": wanted}, reply
            assert await it.get("/api/instances") == []

    asyncio.run(body())


def test_with_a_registry_all_conductors_are_told_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """POST puts an engine there as `moonserve register` does, for whoever comes later too; DELETE
    at any Conductor takes it away from all, standbys included. What cannot be used is refused, and
    not there."""
    shared = Shared()

    async def open_one(*_: object) -> MemoryRegistry:
        return MemoryRegistry(shared)

    monkeypatch.setattr(control, "open_registry", open_one)

    async def body() -> None:
        fake = Engine("a")
        async with contextlib.AsyncExitStack() as stack:
            one = await stack.enter_async_context(
                site(fake, specs=False, registry="etcd://x", alone=True)
            )
            other = await stack.enter_async_context(
                site(specs=False, registry="etcd://x", alone=True)
            )
            spec = {"name": "a", "url": fake.url, "events": "off"}
            for changed in (["a"], []):
                reply = await one.call("POST", "/api/instances", [spec])
                assert msgspec.json.decode(reply.body) == {"changed": changed}, reply
                assert [row["id"] for row in await one.get("/api/instances")] == ["a"]
            entry = msgspec.json.decode(shared.entries[ENGINES + "a"], type=InstanceSpec)
            assert entry == InstanceSpec(name="a", url=fake.url, events="off")
            late = await stack.enter_async_context(
                site(specs=False, registry="etcd://x", alone=True)
            )
            for it in (one, other, late):
                await it.up("a")
                (row,) = await it.get("/api/instances")
                assert row["source"] == "the registry"
            for wrong, status, says in (
                (
                    {"name": "b", "url": fake.url + "/"},
                    409,
                    "is a, described by the registry: remove one",
                ),
                (
                    {"name": "b", "url": "http://b:1", "role": "prefill"},
                    400,
                    "b.connector: role prefill",
                ),
                (
                    {"name": "b", "url": "http://b:1", "api_key_env": "MOONSERVE_KEY_B"},
                    400,
                    "not set",
                ),
            ):
                reply = await other.call("POST", "/api/instances", [spec | {"rack": "r"}, wrong])
                assert (reply.status, says in reply.body.decode()) == (status, True), reply
                assert [it for it in shared.entries if it.startswith(ENGINES)] == [ENGINES + "a"]
                assert msgspec.json.decode(shared.entries[ENGINES + "a"])["rack"] == ""
            for changed in (["a"], []):
                reply = await other.call("DELETE", "/api/instances/a")
                assert msgspec.json.decode(reply.body) == {"changed": changed}, reply
                assert await other.get("/api/instances") == []
            await one.up()
            assert await late.get("/api/instances") == []

    asyncio.run(body())


def test_a_registry_that_is_away_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API answers 503, and no engine is used that other gateways do not know."""

    class Away(MemoryRegistry):
        async def put(self, key: str, value: bytes) -> None:
            if key.startswith(ENGINES):
                raise RegistryError("etcd is away")
            await super().put(key, value)

    async def open_one(*_: object) -> Away:
        return Away()

    monkeypatch.setattr(control, "open_registry", open_one)

    async def body() -> None:
        async with site(specs=False, registry="etcd://x") as it:
            spec = {"name": "a", "url": "http://127.0.0.1:1", "events": "off"}
            reply = await it.call("POST", "/api/instances", spec)
            assert (reply.status, b"etcd is away" in reply.body) == (503, True), reply
            assert await it.get("/api/instances") == []

    asyncio.run(body())


def test_a_wrong_description_over_http_names_its_field() -> None:
    """400 with the field and the remedy; 409 where the cluster file has the name, and for workers
    of ours."""

    async def body() -> None:
        fake = Engine("a")
        async with site(fake) as it:
            for spec, status, says in (
                ({"name": "b", "url": fake.url, "role": "prefill"}, 400, "set connector to nixl"),
                ({"name": "b", "url": fake.url, "roles": "both"}, 400, "did you mean role?"),
                (
                    {"name": "b", "url": fake.url, "connector": "nxl"},
                    400,
                    "connector: must be mooncake, nixl, none or sglang",
                ),
                (
                    [{"name": "b", "url": fake.url, "engine": "trt"}],
                    400,
                    "[0].engine: must be sglang or vllm",
                ),
                ({"name": "b", "url": fake.url, "events": "1.2.3.4:5"}, 400, "like tcp://10.0"),
                (
                    {"name": "b", "url": fake.url, "api_key_env": "MOONSERVE_KEY_B"},
                    400,
                    "MOONSERVE_KEY_B is not set",
                ),
                (
                    {"name": "b", "url": fake.url, "api_key_env": "HOME"},
                    400,
                    "HOME may not be sent",
                ),
                ({"name": "b"}, 400, "url"),
                ({"name": "a", "url": fake.url}, 409, "a is described by the cluster file"),
            ):
                reply = await it.call("POST", "/api/instances", spec)
                assert (reply.status, says in reply.body.decode()) == (status, True), reply
            reply = await it.call("DELETE", "/api/instances/a")
            assert reply.status == 409
            reply = await it.call("POST", "/internal/join", {})
            assert (reply.status, b"external engines" in reply.body) == (409, True), reply

    asyncio.run(body())


def test_health_is_open_to_clients_and_shows_no_address() -> None:
    """An alarm names the engine; the list of instances, which needs the token, has the address."""

    async def body() -> None:
        async with site(Engine("a"), down="gone") as it:
            await it.up("a")

            async def alarms() -> list[str]:
                found: list[str] = (await it.get("/health"))["alarms"]
                return [text for text in found if text.startswith("gone: asking: ")]

            await it.until(alarms)
            [alarm] = await alarms()
            assert "127.0.0.1" not in alarm
            [row] = [row for row in await it.get("/api/instances") if row["id"] == "gone"]
            assert "127.0.0.1:9" in row["why"]

    asyncio.run(body())


def test_a_refused_engine_is_shown_with_the_reason() -> None:
    """It stands in the list and in /health with the reason, and serves no request."""

    async def body() -> None:
        first, second = Engine("a", block_size=16), Engine("b", block_size=32)
        async with site(first, second) as it:

            async def refused() -> bool:
                states = (await it.get("/health"))["instances"].values()
                return sorted(states) == ["refused", "up"]

            await it.until(refused)
            rows = await it.get("/api/instances")
            (row,) = [row for row in rows if row["state"] == "refused"]
            assert "--block-size" in row["why"]
            (alarm,) = [it for it in (await it.get("/health"))["alarms"] if "refused" in it]
            assert row["why"] in alarm
            assert (await it.complete("x")).status == 200
            used = first if row["id"] == "b" else second
            assert len(used.calls) == 1

    asyncio.run(body())


def test_whatever_engines_do_requests_are_answered_and_the_ledger_is_zero() -> None:
    """Prefill and decode engines that restart, answer 503 and are busy with others' requests: every
    client gets an answer, and nothing of it is promised or noted after."""

    async def body() -> None:
        rng, fabric, answers = Random(7), Fabric(), Counter[int]()
        fakes = [Engine(name, "mooncake", fabric) for name in ("p0", "p1", "d0", "d1")]
        async with site(*fakes, specs=False) as it:
            for fake in fakes:
                fake.token_s, fake.delay_s = 0.002, 0.005
                role = {"role": "prefill", "bootstrap": fake.bootstrap}
                role = role if fake.name.startswith("p") else {"role": "decode"}
                spec = {"name": fake.name, "url": fake.url, "events": "off", **role}
                await it.call("POST", "/api/instances", spec | {"connector": "mooncake"})
            await it.up("d0", "d1", "p0", "p1")

            async def client(number: int) -> None:
                await asyncio.sleep(rng.random() * 2)
                body = {"model": "m", "prompt": f"{number % 7} " * 40, "max_tokens": 8}
                reply = await it.call("POST", "/v1/completions", body | {"stream": number % 2 > 0})
                answers[reply.status] += 1

            async def faults() -> None:
                for fault in ("restart", "503", "busy", "restart"):
                    await asyncio.sleep(0.4)
                    fake = rng.choice(fakes)
                    fake.health, fake.waiting = (
                        503 if fault == "503" else 200,
                        5 * (fault == "busy"),
                    )
                    if fault == "restart":
                        await fake.restart()
                    await asyncio.sleep(0.1)
                    fake.health, fake.waiting = 200, 0

            await asyncio.gather(faults(), *map(client, range(60)))
            assert answers == {200: 60}
            stats = await it.get("/api/stats")
            assert not any(stats[name] for name in ("requests", "prefill_us_promised"))
            assert not any(stats[f"{part}s_promised"] for part in ("prefill", "decode"))
            for _, monitor in it.gateway.fleet.monitors():
                for watch in monitor.watches.values():
                    assert not {**watch._prefilling, **watch._decoding, **watch._hidden}

    asyncio.run(body())
