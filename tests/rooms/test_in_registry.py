"""Conductors and workers on one event loop, over a registry in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from moonserve.core.errors import ConfigError, NobodyAlive, RegistryError, StoreError
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad, PassSample
from moonserve.core.units import BlockKey
from moonserve.live import tasks
from moonserve.live.access.guard import Guard
from moonserve.live.control import in_registry
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import Control, conductor_and_pool
from moonserve.live.control.in_registry import InRegistry
from moonserve.live.control.index_copy import INDEX_PATH, first_of
from moonserve.live.control.join import Internal
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.listed import settled
from moonserve.live.external.registry_engines import RegistryEngines
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts.road import road_of
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.kvevents.follower import Followers
from moonserve.live.registry.entries import (
    CONDUCTORS,
    ENGINES,
    INSTANCES,
    ConductorEntry,
    decoded,
    find_master,
)
from moonserve.live.store.reports import POOL
from moonserve.live.worker import conductors as worker_conductors
from moonserve.live.worker.conductors import Conductors
from moonserve.live.worker.join import BeatTimes
from tests.support.cluster import info
from tests.support.engines import Engine, rig
from tests.support.registry import MemoryRegistry, Shared

TOKEN = "a-secret"
KEYS = tuple(BlockKey(bytes([n // 256, n % 256])) for n in range(3_000))


class Site:
    """Conductors of one registry, on real sockets."""

    def __init__(self) -> None:
        self.shared = Shared()
        self.registry = MemoryRegistry(self.shared)
        self.http = HttpClient()
        self._stack = contextlib.AsyncExitStack()

    async def conductor(
        self,
        name: str,
        known: Callable[[], Awaitable[object]] | None = None,
        token: str = TOKEN,
        model: str = "m",
    ) -> Place:
        """Start one more Conductor and register it."""
        place = Place(self, known, token, model)
        self._stack.push_async_callback(place.close)
        await place.start(name)
        return place

    async def close(self) -> None:
        """End all Conductors."""
        await self._stack.aclose()
        await self.http.close()


class Place:
    """The parts of a Conductor that a registry needs."""

    def __init__(
        self,
        site: Site,
        known: Callable[[], Awaitable[object]] | None,
        token: str = TOKEN,
        model: str = "m",
    ) -> None:
        self.loop = ConductorLoop(Conductor(), lambda lease: None)
        self.internal = Internal(self.loop, [model])
        self.registry = MemoryRegistry(site.shared)
        self.place = InRegistry(self.registry, self.loop, self.internal, site.http, token, known)
        self.server: Server | None = None
        self.url = ""
        self._token, self._model = token, model

    async def start(self, name: str) -> None:
        routes = self.internal.routes() | self.place.routes()
        self.server = await serve(App(routes, gate=Guard(self._token)), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.port}"
        await self.place.start(ConductorEntry(name, 1, self.url, self._model))

    def knows(self, name: str) -> bool:
        """Whether this Conductor knows that instance."""
        return name in self.loop.core.view.instances

    async def close(self) -> None:
        await self.place.close()
        if self.server is not None:
            await self.server.stop(0)
        self.loop.stop()


def run(test: Callable[[Site], Awaitable[None]]) -> None:
    """Run one test on a site."""

    async def main() -> None:
        site = Site()
        try:
            async with asyncio.timeout(20):
                await test(site)
        finally:
            await site.close()

    asyncio.run(main())


async def until(true: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    while not true():
        await asyncio.sleep(0.01)


BAD = [b"\x91\xa2\xff\xfe", b"\x85\xa2id\xa2\xff\xfe", b"\x91" * 100_000, b"\xc1", b""]
"""Text that is no UTF-8, also in a field; arrays too deep; a byte that msgpack does not have."""


@pytest.mark.parametrize("path", ["join", "beat", "leave", "blocks"])
def test_a_body_that_cannot_be_decoded_is_a_400(path: str) -> None:
    """Whatever the bytes are, the reply names the body; no trace is logged."""

    async def test(site: Site) -> None:
        one = await site.conductor("g1")
        for body in BAD:
            reply = await site.http.request(
                "POST",
                f"{one.url}/internal/{path}",
                headers={"authorization": f"Bearer {TOKEN}"},
                body=body,
                timeout_s=5,
            )
            assert (reply.status, b'"param":"body"' in reply.body) == (400, True), reply.body

    run(test)


@pytest.mark.parametrize("value", [b'{"name":"\xff\xfe","epoch":1,"url":""}', b"[" * 100_000, b"1"])
def test_an_entry_that_cannot_be_decoded_is_skipped(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are used; one line names it, however often the entries are read."""
    good = ConductorEntry("g1", 1, "http://127.0.0.1:1")
    entries = {CONDUCTORS + "bad": value, CONDUCTORS + "g1": msgspec.json.encode(good)}
    for _ in range(3):
        assert decoded(entries, CONDUCTORS, ConductorEntry) == {"g1": good}
    [line] = [record for record in caplog.records if "conductors/bad" in record.message]
    assert line.levelname == "WARNING"


def test_a_cluster_has_one_conductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused with the remedy; so are those of another model or another token,
    which are other clusters. One that died is waited for, and the first may come back."""
    monkeypatch.setattr(in_registry, "_AGAIN_S", 0.05)

    async def test(site: Site) -> None:
        one = await site.conductor("g1")
        await until(lambda: one.loop.core.hot.leads)
        for token, model, why in (
            (
                TOKEN,
                "m",
                f"registry: has a Conductor at {one.url} already, .* gateways with --conductor",
            ),
            (
                TOKEN,
                "other",
                f"registry: has a Conductor at {one.url} for m already, not for o",
            ),
            (
                "another",
                "m",
                f"token: is not that of the Conductor at {one.url}, .* set MOONSERVE",
            ),
        ):
            with pytest.raises(ConfigError, match=why):
                await site.conductor("g2", token=token, model=model)
        assert list(await site.registry.read(CONDUCTORS)) == ["conductors/g1"]
        assert one.place.leadership.term
        assert one.server is not None
        await one.server.stop(0)  # it died: its entry is there for some time
        starting = asyncio.create_task(site.conductor("g3"))
        await asyncio.sleep(0.2)
        assert not starting.done()
        await one.registry.close()
        three = await starting
        await until(lambda: three.loop.core.hot.leads)
        again = await site.conductor("g3")
        await until(lambda: again.place.gathered.is_set())

    run(test)


def test_a_conductor_that_does_not_answer_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It renews its entry: the start ends with its address."""
    monkeypatch.setattr(in_registry, "_GONE_S", 0.1)
    monkeypatch.setattr(in_registry, "_AGAIN_S", 0.02)

    async def test(site: Site) -> None:
        entry = ConductorEntry("g0", 1, "http://127.0.0.1:1", "m")
        await site.registry.put(CONDUCTORS + "g0", msgspec.json.encode(entry))
        with pytest.raises(ConfigError, match=r"registry: has a Conductor at http://127.0.0.1:1 t"):
            await site.conductor("g1")

    run(test)


def test_a_front_finds_the_conductor_that_leads() -> None:
    """It reads the leader's name and its entry; while the registry is away, it knows the last."""

    async def test(site: Site) -> None:
        registry = MemoryRegistry(site.shared)
        road = road_of("etcd://e", TOKEN, None, registry)
        with pytest.raises(NobodyAlive, match="no Conductor leads in the registry"):
            await road.find()
        one = await site.conductor("g1")
        assert await road.find() == one.url

        async def away(prefix: str) -> dict[str, bytes]:
            raise RegistryError("etcd is away")

        registry.read = away  # type: ignore[method-assign]
        assert await road.find() == one.url
        with pytest.raises(NobodyAlive, match="etcd is away"):
            await road_of("etcd://e", TOKEN, None, registry).find()
        await road.close()

    run(test)


def test_an_index_is_taken_over_whole() -> None:
    """The blocks of Mooncake's pool come from another Conductor; reported twice they count once."""

    async def test(site: Site) -> None:
        one = await site.conductor("g1")
        stored = BlocksStored(POOL, KEYS, None, "dram", 0)
        one.internal.seen([stored])
        await until(lambda: len(one.loop.core.index) == len(KEYS))
        other = Place(site, None)
        take = lambda event: other.internal.seen([event])  # noqa: E731
        told = await first_of(site.http, [one.url], TOKEN, take)
        assert told == f"{len(KEYS)} blocks from {one.url}"
        index = other.loop.core.index
        await until(lambda: len(index) == len(KEYS))
        assert index.match(KEYS).by_holder == {POOL: len(KEYS)}
        other.internal.seen([stored])
        await asyncio.sleep(0.01)
        assert index.inventory(POOL) == [(KEYS, None, "dram", 0)]
        other.loop.stop()

    run(test)


def test_a_registry_that_is_away_at_the_start_keeps_nobody_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the registry does not answer, the gateway has no index and reports it."""

    async def away(self: MemoryRegistry, prefix: str) -> dict[str, bytes]:
        raise RegistryError("etcd is away")

    async def test(site: Site) -> None:
        one = Place(site, None)
        monkeypatch.setattr(MemoryRegistry, "read", away)
        gathering = asyncio.create_task(one.place._gather())
        await one.place.gathered.wait()
        assert one.place.index == "incomplete: etcd is away"
        assert not one.place.not_ready
        await gathering

    run(test)


def test_a_bug_in_a_task_of_the_registry_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed task is logged and goes on: workers that come later are found."""
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)

    async def test(site: Site) -> None:
        one = await site.conductor("one")
        follow, failed = in_registry.decoded, list[str]()

        def fails(entries: Any, prefix: str, shape: Any) -> Any:
            if prefix == INSTANCES and not failed:
                failed.append(prefix)
                raise RuntimeError("a bug")
            return follow(entries, prefix, shape)

        monkeypatch.setattr(in_registry, "decoded", fails)
        await site.registry.put(INSTANCES + "p0", msgspec.json.encode(info("p0", "prefill")))
        await until(lambda: one.knows("p0"))
        assert "a bug" in caplog.text

    run(test)


@pytest.mark.parametrize("body", [b"", b"\x05\x00\x00\x00oops!", b"\xff\xff\xff\x7f", b"\x05\x00"])
def test_a_conductor_that_tells_nonsense_is_named_and_the_next_one_asked(body: bytes) -> None:
    """Without a next one the index is incomplete."""

    async def test(site: Site) -> None:
        async def index(request: HttpRequest) -> Response:
            return Response(body=body)

        server = await serve(App({("GET", INDEX_PATH): index}), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}"
        one = await site.conductor("g1")
        take = lambda event: None  # noqa: E731
        told = await first_of(site.http, [url], TOKEN, take)
        assert told.startswith(f"incomplete: {url}/internal/index")
        told = await first_of(site.http, [url, one.url], TOKEN, take)
        assert told == f"0 blocks from {one.url}"
        await server.stop(0)

    run(test)


def test_an_index_that_does_not_come_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the deadline the gateway serves with the index that it has, and reports it."""
    monkeypatch.setattr(in_registry, "_BOOT_S", 0.05)

    async def test(site: Site) -> None:
        one = await site.conductor("g1", asyncio.Event().wait)
        assert one.place.not_ready
        await one.place.gathered.wait()
        assert one.place.not_ready == ""
        assert one.place.index.startswith("incomplete")
        metrics = {m.name: m.samples[0].value for m in one.place.metrics()}
        assert metrics["moonserve_index_complete"] == 0
        assert metrics["moonserve_conductor_leads"] == 1

    run(test)


def test_entries_that_cannot_be_used_are_named_and_the_others_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No JSON, another model, another layout of KV."""

    async def test(site: Site) -> None:
        good = info("p1", "prefill")
        other_layout = msgspec.structs.replace(good.namespace, layout="x")
        entries = {
            "p1": msgspec.json.encode(good),
            "p2": b"{",
            "p3": msgspec.json.encode(msgspec.structs.replace(good, id="p3", model="other")),
            "p4": msgspec.json.encode(
                msgspec.structs.replace(good, id="p4", namespace=other_layout)
            ),
        }
        await site.registry.put(INSTANCES + "p1", entries["p1"])
        one = await site.conductor("g1")
        await until(lambda: one.knows("p1"))
        for name, entry in entries.items():
            await site.registry.put(INSTANCES + name, entry)
        await until(lambda: "p4 is not used" in caplog.text)
        assert list(one.loop.core.view.instances) == ["p1"]
        assert "instances/p2 is no InstanceInfo" in caplog.text
        assert "p3 is not used: this Conductor serves m, not other; start the worker" in caplog.text

    run(test)


# The worker's side.


def test_that_the_registry_is_away_is_an_alarm_of_a_gateway_with_workers() -> None:
    """An alarm of the registry is in /health, which stays 200, and counts in /metrics."""

    class Away(MemoryRegistry):
        def alarms(self) -> list[str]:
            return ["etcd etcd://e does not answer"]

    async def test(site: Site) -> None:
        config = GatewayConfig(model="m", token=TOKEN)
        conductor, pool = conductor_and_pool(config, site.http)
        control = Control(
            config,
            site.http,
            conductor,
            pool,
            Health(),
            Followers().follow,
            model="m",
            tools=lambda model: None,
            registry=Away(site.shared),
        )
        server = await serve(App(control.routes()), "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{server.port}/health"
            reply = await site.http.request("GET", url, timeout_s=2)
            said = {"status": "ok", "alarms": ["etcd (an address) does not answer"]}
            assert (reply.status, msgspec.json.decode(reply.body)) == (200, said)
            counted = CollectorRegistry()
            for collector in control.collectors():
                counted.register(collector)
            assert counted.get_sample_value("moonserve_alarms") == 1
        finally:
            await server.stop(0)
            await control.stop()

    run(test)


class Listener:
    """A gateway that notes which workers join, beat and leave."""

    def __init__(self, answer: int = 200) -> None:
        self.said: list[tuple[str, Any]] = []
        self.answer = answer
        self.server: Server | None = None

    async def start(self, site: Site, name: str) -> ConductorEntry:
        paths = ("join", "beat", "leave", "blocks")
        routes = {("POST", f"/internal/{what}"): self._note for what in paths}

        async def health(request: HttpRequest) -> Response:
            return Response()

        self.server = await serve(App(routes | {("GET", "/health"): health}), "127.0.0.1", 0)
        return ConductorEntry(name, 1, f"http://127.0.0.1:{self.server.port}")

    async def _note(self, request: HttpRequest) -> Response:
        what = request.path.rpartition("/")[2]
        self.said.append((what, msgspec.msgpack.decode(await request.body())))
        return Response(self.answer, b"because")

    def heard(self, what: str) -> list[Any]:
        """The bodies of these calls."""
        return [body for it, body in self.said if it == what]


@contextlib.asynccontextmanager
async def worker(
    site: Site, load: Callable[[], InstanceLoad], joined: list[str]
) -> AsyncIterator[tuple[Conductors, InstanceInfo]]:
    """A worker's membership, running; at the end it leaves."""
    registry = MemoryRegistry(site.shared)
    times = BeatTimes(beat_s=0.05)
    gateways = Conductors(site.http, TOKEN, "http://127.0.0.1:1", registry, times)
    who = info("p0", "prefill")
    running = asyncio.create_task(gateways.run(who, load, joined.append))
    try:
        yield gateways, who
    finally:
        running.cancel()
        await gateways.leave()


def sample(number: int) -> PassSample:
    """A pass sample that differs from others."""
    return PassSample(number, 0, 0, 0, 0, 1)


def test_a_worker_joins_all_gateways_there_are_and_each_hears_every_pass() -> None:
    """A worker beats at every gateway that is there now, and leaves all of them at the end."""

    async def test(site: Site) -> None:
        count = 0

        def load() -> InstanceLoad:
            nonlocal count
            count += 1
            return InstanceLoad(passes=(sample(count),))

        one, other, late = Listener(), Listener(409), Listener()
        entries = [await it.start(site, f"g{n}") for n, it in enumerate((one, other, late))]
        kept = [
            await site.registry.register(CONDUCTORS + it.name, msgspec.json.encode(it))
            for it in entries[:2]
        ]
        joined: list[str] = []
        async with worker(site, load, joined) as (gateways, who):
            await until(lambda: len(one.heard("beat")) >= 2)
            assert other.heard("join"), "asked, and it refuses: the first does not mind"
            assert joined == [entries[0].url]
            stored = await site.registry.read(INSTANCES)
            assert msgspec.json.decode(stored["instances/p0"], type=InstanceInfo) == who
            await site.registry.put(CONDUCTORS + "g2", msgspec.json.encode(entries[2]))
            await until(lambda: len(late.heard("beat")) >= 2)
            for listener in (one, late):
                told = [
                    it["prefill_new"]
                    for body in listener.heard("beat")
                    for it in body["load"]["passes"]
                ]
                assert told == sorted(set(told)), "none twice"
                assert len(told) >= 2
            assert late.server is not None
            await late.server.stop(0)
            await site.registry.remove(CONDUCTORS + "g2")
            await until(lambda: entries[2] not in gateways._tasks)
            await kept[0].close()
            beats = len(one.heard("beat"))
            await until(lambda: len(one.heard("beat")) > beats), "unlisted, but it answers"
        assert len(one.heard("leave")) == 1
        assert await site.registry.read(INSTANCES) == {}
        for it in (one, other):
            assert it.server is not None
            await it.server.stop(0)

    run(test)


def test_what_a_worker_saw_of_a_foreign_pool_all_gateways_are_told() -> None:
    """A report that misses a gateway is an error, so that it is repeated; so is one to none."""

    async def test(site: Site) -> None:
        gateways = Conductors(site.http, TOKEN, "http://127.0.0.1:1", MemoryRegistry(site.shared))
        with pytest.raises(NobodyAlive):
            await gateways.ping()
        one, other = Listener(), Listener()
        for n, it in enumerate((one, other)):
            entry = await it.start(site, f"g{n}")
            await site.registry.put(CONDUCTORS + entry.name, msgspec.json.encode(entry))
        await gateways.ping()
        events = [BlocksStored(POOL, KEYS[:2], None, "dram", 0)]
        await gateways.blocks(events)
        assert [len(it.heard("blocks")) for it in (one, other)] == [1, 1]
        other.answer = 500
        with pytest.raises(StoreError):
            await gateways.blocks(events)
        for it in (one, other):
            assert it.server is not None
            await it.server.stop(0)

    run(test)


def test_a_worker_that_cannot_serve_any_more_says_so_whoever_listens() -> None:
    """An error of `load` ends the membership at all gateways."""

    async def test(site: Site) -> None:
        class Broken(Exception):
            pass

        def load() -> InstanceLoad:
            raise Broken

        one = Listener()
        entry = await one.start(site, "g0")
        await site.registry.put(CONDUCTORS + "g0", msgspec.json.encode(entry))
        gateways = Conductors(site.http, TOKEN, "http://127.0.0.1:1", site.registry)
        with pytest.raises(Broken):
            await gateways.run(info("p0", "prefill"), load, print)
        await gateways.leave()
        assert one.server is not None
        await one.server.stop(0)

    run(test)


def test_a_worker_that_all_conductors_refuse_ends_with_their_reason() -> None:
    """So a worker of another model ends. One that has been let in before goes on without those that
    refuse it now."""

    async def test(site: Site) -> None:
        for n, it in enumerate((one := Listener(400), other := Listener(409))):
            entry = await it.start(site, f"g{n}")
            await site.registry.put(CONDUCTORS + entry.name, msgspec.json.encode(entry))
        joined: list[str] = []
        async with worker(site, InstanceLoad, joined) as (_, who):
            await until(lambda: one.heard("join") and other.heard("join"))
            other.answer = 200
            await until(lambda: joined)
        other.answer = 400
        times = BeatTimes(beat_s=0.05)
        late = Conductors(site.http, TOKEN, "", MemoryRegistry(site.shared), times)
        with pytest.raises(ConfigError, match=r"worker: http.* refuses this worker: 400 because"):
            await late.run(who, InstanceLoad, print)
        await late.leave()
        for it in (one, other):
            assert it.server is not None
            await it.server.stop(0)

    run(test)


def test_refusals_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker tries an address again where a gateway had refused it."""
    monkeypatch.setattr(worker_conductors, "_REFUSED_S", 0.05)

    async def test(site: Site) -> None:
        one = Listener(409)
        entry = await one.start(site, "g0")
        await site.registry.put(CONDUCTORS + "g0", msgspec.json.encode(entry))
        joined: list[str] = []
        async with worker(site, InstanceLoad, joined):
            await until(lambda: len(one.heard("join")) >= 2)
            one.answer = 200
            await until(lambda: joined)
        assert one.server is not None
        await one.server.stop(0)

    run(test)


# Foreign engines.


def test_engines_in_the_registry_are_the_fleets_as_long_as_they_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fleet follows the entries: added, changed, removed; unusable entries are left out."""

    async def test() -> None:
        engine = Engine()
        async with rig(engine) as site:
            registry = MemoryRegistry()
            found = RegistryEngines(registry, site.fleet)
            following = asyncio.create_task(found.follow())
            await settled(site.fleet, [found.read])  # there is none
            spec = InstanceSpec(name="e0", url=engine.url, events="off")
            entries = {
                "e0": msgspec.json.encode(spec),
                "e1": b'{"name": "e1", "url": "http://127.0.0.1:1", "colour": 1}',
                "e2": msgspec.json.encode(spec),
                "e3": msgspec.json.encode(msgspec.structs.replace(spec, name="e3", role="prefill")),
            }
            for name, entry in entries.items():
                await registry.put(ENGINES + name, entry)
            await site.until(lambda: list(site.views) == ["e0"])
            await settled(site.fleet, [found.read])
            assert [source for source, _ in site.fleet.monitors()] == ["the registry"]
            again = msgspec.structs.replace(spec, rack="r1")
            await registry.put(ENGINES + "e0", msgspec.json.encode(again))
            await site.until(lambda: [it.member.spec for _, it in site.fleet.monitors()] == [again])
            await registry.remove(ENGINES + "e0")
            await site.until(lambda: not site.views)
            assert "e0: removed by the registry" in caplog.text
            said = [text.partition(" is not used")[0] for text in found.alarms()]
            assert said == [f"registry: engines/e{n}" for n in (1, 2, 3)]
            assert site.fleet.alarms() == ["no engines are known"]
            assert caplog.text.count("engines/e1 is not used") == 1
            following.cancel()

    asyncio.run(test())


def test_a_wait_for_the_stores_master_is_told_before_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A gateway that waits for the master logs that, and then that it gave up."""
    caplog.set_level("INFO", "moonserve")
    with pytest.raises(ConfigError, match="start `moonserve store serve`"):
        asyncio.run(find_master(MemoryRegistry(), 0.05))
    assert "waiting 0.05 s for a store's master to register" in caplog.text
