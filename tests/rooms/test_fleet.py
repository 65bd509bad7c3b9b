"""External engines: the handshake at join, health, restarts, load, alarms and logs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonserve.core.errors import ConfigError, NobodyAlive
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, InstanceId, SegmentId
from moonserve.live.external.fleet import Taken, Unknown
from moonserve.live.external.member import RankPage, read_page
from moonserve.live.external.monitor import ConductorIndexer, EngineMonitor
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.kvevents.follower import BlockIndexer, Feed, FeedCounts
from moonserve.live.kvevents.wire import EventAddress
from tests.support.engines import Engine, rig
from tests.support.kvevents import fixture
from tests.support.serving import ByteText

KEYS = (BlockKey(b"a" * 32), BlockKey(b"b" * 32))


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


class Feeds:
    """Feeds that a test speaks through: `sinks` by instance, `opened` and `closed` in order."""

    def __init__(self) -> None:
        self.sinks: dict[InstanceId, EngineMonitor] = {}
        self.opened: list[tuple[InstanceId, int, str]] = []
        self.closed = 0
        self.said = FeedCounts(connected=True, trusted=True)

    async def follow(self, address: EventAddress, indexer: BlockIndexer) -> Feed:
        """See kvevents.follower.Follow."""
        assert isinstance(indexer, ConductorIndexer)
        info = indexer.info
        self.sinks[info.id] = indexer.sink
        self.opened.append((info.id, info.epoch, address.endpoint))
        return self

    def counts(self) -> FeedCounts:
        """See Feed."""
        return self.said

    async def close(self) -> None:
        """See Feed."""
        self.closed += 1


def hold(feeds: Feeds, info: InstanceInfo) -> None:
    """Let its engine report two blocks."""
    segment = SegmentId(info.id)
    feeds.sinks[info.id].blocks(BlocksStored(segment, KEYS, None, "device", info.epoch))


def test_an_engine_joins_as_it_is() -> None:
    """What the file leaves out comes from the engine: model, block size, KV, context length."""

    async def body() -> None:
        async with rig(Engine("a", model="smol", block_size=16, max_len=900)) as it:
            engine = Engine("b", model="smol", block_size=16, dp_size=2)
            await engine.start()
            monitor = await it.up(engine, dp_size=2, role="prefill", connector="nixl", rack="r1")
            info = it.views[InstanceId("b/dp1")].info
            assert (info.model, info.namespace.block_size, info.max_len) == ("smol", 16, 2048)
            assert (info.kv_blocks, info.dp_rank, info.role) == (100, 1, "prefill")
            assert (info.connector, info.rack, info.segment) == ("nixl", "r1", "b/dp1")
            assert (info.fetches, info.layers, info.epoch) == (False, 0, 1_001_000)
            assert monitor.facts is not None
            assert (monitor.facts.version, monitor.facts.hash_algorithm) == (
                "0.32.0",
                "sha256_cbor",
            )
            assert it.fleet.member(InstanceId("b/dp1")).url == engine.url
            await engine.stop()

    run(body)


@pytest.mark.parametrize(
    ("engine", "described", "says"),
    [
        (
            {"block_size": 16},
            {"block_size": 32},
            "block_size: its KV blocks have 16 tokens, not 32",
        ),
        ({"max_len": 512}, {"max_len": 1024}, "max_len: it takes 512 tokens, not 1024"),
        ({"model": "x"}, {"model": "y"}, "model: it serves x, not y: correct model"),
        ({"dp_size": 2}, {"dp_size": 3}, "dp_size: it has 2 data-parallel ranks, not 3"),
        ({}, {"tokenizer": "t", "events": "tcp://127.0.0.1:1"}, "tokenizer: it makes other tokens"),
        (
            {"connector": "mooncake"},
            {"connector": "mooncake", "role": "prefill", "bootstrap": "http://127.0.0.1:1"},
            "bootstrap: 127.0.0.1:1: cannot connect",
        ),
    ],
)
def test_a_mismatch_is_refused_by_name(
    engine: dict[str, Any], described: dict[str, Any], says: str
) -> None:
    """An engine that contradicts its description is not used; the reason has field and remedy."""

    class Shouting(ByteText):
        def encode(self, text: str, *, add_bos: bool) -> list[int]:
            return list(text.upper().encode())

    async def body() -> None:
        fake = Engine("a", **engine)
        async with rig(fake, text=Shouting()) as it:
            fields = {"name": "a", "url": fake.url, "events": "off", **described}
            await it.fleet.add("test", InstanceSpec(**fields))
            await it.until(lambda: it.monitor("a").state == "refused")
            assert it.monitor("a").why.startswith(says), it.monitor("a").why
            assert not it.views
            assert says in it.fleet.alarms()[0]

    run(body)


@pytest.mark.parametrize(
    ("connector", "shared_store", "hints"),
    [("mooncake", False, True), ("nixl", True, True), ("nixl", False, False)],
)
def test_an_engine_that_does_not_come_up_may_lack_a_library(
    connector: Any, shared_store: bool, hints: bool
) -> None:
    """vLLM's connectors of Mooncake end without it, and its log does not name it. NIXL's wheel has
    one of its own."""

    async def body() -> None:
        async with rig() as it:
            spec = InstanceSpec(
                name="a",
                url="http://127.0.0.1:1",
                role="decode",
                connector=connector,
                shared_store=shared_store,
            )
            await it.fleet.add("test", spec)
            await it.until(lambda: it.monitor("a").why)
            found = [said for said in it.fleet.alarms() if said.startswith("a: asking")]
            assert ["apt install libibverbs1" in said for said in found] == [hints]

    run(body)


def test_a_bug_keeps_no_engine_out_for_ever() -> None:
    """The engine is given up with an alarm, and asked again; then its events are followed."""
    opened: list[str] = []

    async def follow(*of: Any) -> Any:
        opened.append(of[1].info.id)
        if len(opened) == 1:
            raise ValueError("of no kind that anybody foresaw")
        return Feed()

    class Feed:
        def counts(self) -> FeedCounts:
            return FeedCounts(connected=True, trusted=True)

        async def close(self) -> None:
            pass

    async def body() -> None:
        fake = Engine("a")
        async with rig(fake, follow=follow) as it:
            fields = {"events": "tcp://127.0.0.1:1", "tokenizer": "bytes"}
            await it.fleet.add("test", InstanceSpec(name="a", url=fake.url, **fields))
            await it.until(lambda: it.monitor("a").state == "lost")
            assert "ValueError" in it.fleet.alarms()[0]
            await it.until(lambda: it.monitor("a").state == "up" and it.monitor("a").feeds)
            assert opened == ["a", "a"]
            assert InstanceId("a") in it.views

    run(body)


def test_blocks_of_two_sizes_do_not_go_together() -> None:
    """The second engine of a model with another block size is refused, and used once mended."""

    async def body() -> None:
        first, second = Engine("a", block_size=16), Engine("b", block_size=32)
        async with rig(first, second) as it:
            await it.up(first)
            spec = InstanceSpec(name="b", url=second.url, events="off")
            await it.fleet.add("test", spec)
            await it.until(lambda: it.monitor("b").state == "refused")
            assert "those of a 16: start all of m with one --block-size" in it.monitor("b").why
            second.block_size = 16
            await it.until(lambda: InstanceId("b") in it.views)

    run(body)


def test_what_goes_by_halves_only_is_an_alarm() -> None:
    """Contexts that differ are a warning; a half without its other half serves nobody."""

    async def body() -> None:
        first, second = Engine("a", max_len=100), Engine("b", max_len=200)
        async with rig(first, second) as it:
            await it.up(first, role="prefill", connector="nixl")
            serves = "a: no decode engine of its model has connector nixl: it serves no request"
            assert serves in it.fleet.alarms()
            await it.up(second, role="decode", connector="nixl")
            assert serves not in it.fleet.alarms()
            assert any("it takes 200 tokens, a 100" in said for said in it.fleet.alarms())

    run(body)


def test_engines_that_share_a_store_name_blocks_alike() -> None:
    """Another hash algorithm finds nothing in the store: refused."""

    class Cbor(Engine):
        async def _metrics(self, request: HttpRequest) -> Response:
            page = (await super()._metrics(request)).body
            return Response(body=page.replace(b"sha256_cbor", b"xxhash"))

    async def body() -> None:
        first, second = Engine("a"), Cbor("b")
        async with rig(first, second) as it:
            await it.up(first, shared_store=True)
            fields = {"name": "b", "url": second.url, "events": "off", "shared_store": True}
            await it.fleet.add("test", InstanceSpec(**fields))
            await it.until(lambda: it.monitor("b").state == "refused")
            assert "start both with one --prefix-caching-hash-algo" in it.monitor("b").why

    run(body)


def test_another_chat_template_is_a_warning() -> None:
    """Chats whose text differs cost hits, not answers: the engine is used, the alarm is raised."""

    class Terse(ByteText):
        def render_chat(self, messages: Any) -> str:
            return "terse"

    async def body() -> None:
        fake = Engine("a")
        async with rig(fake, text=Terse(), follow=Feeds().follow) as it:
            await it.up(fake, tokenizer="t", events="tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2")
            assert "its chat template is not that of t" in it.fleet.alarms()[0]

    run(body)


def test_an_engine_restarted_at_the_same_address_is_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A new process is a new epoch: what the old one held is forgotten, its bootstrap asked again,
    and its events are followed anew; the log says so."""
    caplog.set_level("INFO")

    async def body() -> None:
        fake, feeds = Engine("a", "mooncake"), Feeds()
        async with rig(fake, follow=feeds.follow) as it:
            where = {"events": "tcp://127.0.0.1:5557", "bootstrap": fake.bootstrap}
            monitor = await it.up(
                fake, tokenizer="t", role="prefill", connector="mooncake", **where
            )
            info = it.views[InstanceId("a")].info
            assert monitor.member.engine_id(None) == "a-1-dp0"
            hold(feeds, info)
            await it.until(lambda: len(it.conductor.core.index))
            await fake.restart()
            await it.until(
                lambda: (
                    it.views.get(InstanceId("a"), None) is not None
                    and it.views[InstanceId("a")].info.epoch > info.epoch
                )
            )
            assert monitor.member.engine_id(None) == "a-2-dp0"
            await it.until(lambda: not len(it.conductor.core.index))
            hold(feeds, info)  # a late word of the old one
            await asyncio.sleep(0.05)
            assert not len(it.conductor.core.index)
            assert [epoch for _, epoch, _ in feeds.opened] == [1_001_000, 1_002_000]
            assert feeds.closed == 1
            said = [it.split(" at http")[0] for it in caplog.messages if " at http" in it]
            assert said == ["a: up (epoch 1001000)", "a: restarted (epoch 1002000)"]

    run(body)


def test_a_restart_is_noticed_by_the_events_and_by_the_bootstrap_too() -> None:
    """Without a start time in /metrics, events that begin anew or new engine ids show it."""

    async def body() -> None:
        fake, feeds = Engine("a", "mooncake"), Feeds()
        fake.started_s = None
        async with rig(fake, follow=feeds.follow) as it:
            where = {"events": "tcp://127.0.0.1:5557", "bootstrap": fake.bootstrap}
            monitor = await it.up(
                fake, tokenizer="t", role="prefill", connector="mooncake", **where
            )
            first = monitor.epoch
            feeds.sinks[InstanceId("a")].restarted()
            await it.until(lambda: monitor.epoch > first)
            second = monitor.epoch
            fake.engine_ids = ["other"]
            assert await monitor.member.requery()
            await it.until(lambda: monitor.epoch > second)

    run(body)


def test_a_silent_engine_is_lost_and_comes_back_with_what_it_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three looks without an answer: it is not used; the same process again keeps its index."""
    caplog.set_level("INFO")

    async def body() -> None:
        fake, feeds = Engine("a"), Feeds()
        async with rig(fake, follow=feeds.follow) as it:
            monitor = await it.up(fake, tokenizer="t", events="tcp://127.0.0.1:5557")
            hold(feeds, it.views[InstanceId("a")].info)
            await it.until(lambda: len(it.conductor.core.index))
            fake.health = 503
            await it.until(lambda: not it.views)
            assert (monitor.state, monitor.why) == ("lost", "GET /health answered 503")
            fake.health = 200
            await it.until(lambda: it.views)
            assert len(it.conductor.core.index) == 2
            assert len(feeds.opened) == 1
            assert any("a: up again (epoch 1001000) at" in said for said in caplog.messages)

    run(body)


def test_who_calls_badly_makes_nobody_unhealthy() -> None:
    """4xx for clients' requests do not touch an engine's standing; it is asked itself."""

    async def body() -> None:
        fake = Engine("a")
        async with rig(fake) as it:
            monitor = await it.up(fake)
            epoch = monitor.epoch
            for _ in range(10):
                bad = b'{"model":"m","prompt":[1],"min_tokens":99}'
                reply = await it.http.request(
                    "POST", fake.url + "/v1/completions", body=bad, timeout_s=5
                )
                assert reply.status == 400
                call = it.fleet.began(InstanceId("a"), "whole", 1, 0)
                call.ended()
            await asyncio.sleep(0.1)
            assert (monitor.state, monitor.epoch, [*it.views]) == ("up", epoch, ["a"])

    run(body)


def test_load_of_others_reaches_the_view() -> None:
    """What the engine counts beyond our promises is others', and costs time and room."""

    async def body() -> None:
        fake = Engine("a")
        async with rig(fake) as it:
            await it.up(fake)
            view = it.views[InstanceId("a")]
            fake.running, fake.waiting, fake.usage, fake.deferred = 3, 2, 0.25, 9
            await it.until(lambda: view.external.waiting == 2)
            assert (view.external.running, view.external.context) == (3, 800)
            assert view.queue_us(it.conductor.now_us()) > 0
            fake.running, fake.waiting, fake.usage = 0, 0, 0.0
            await it.until(lambda: not view.external.running)

    run(body)


def test_costs_and_trust_are_learned_from_calls() -> None:
    """Reported calls become passes for the cost fit, and claims that are judged."""

    async def body() -> None:
        fake = Engine("a")
        async with rig(fake) as it:
            await it.up(fake)
            view = it.views[InstanceId("a")]
            for _ in range(4):
                call = it.fleet.began(InstanceId("a"), "prefill", 1_000, 960)
                await asyncio.sleep(0.002)
                call.answered(0)
                call.ended()
            await it.until(lambda: not view.trust.trusted)
            assert (view.trust.claimed, view.trust.found) == (3_840, 0)
            assert any(
                "finds less cached than its events claim" in said for said in it.fleet.alarms()
            )

    run(body)


def test_a_decode_engine_tells_its_steps_by_itself() -> None:
    """Times between tokens in /metrics teach decode's cost, though no reply streams; an instance
    that prefills too has other passes in them."""

    async def body() -> None:
        decode, both = Engine("d"), Engine("e")
        async with rig(decode, both) as it:
            await it.up(decode, role="decode", connector="nixl")
            await it.up(both)
            views = [it.views[InstanceId(name)] for name in "de"]
            for fake in (decode, both):
                fake.running = 4
            for _ in range(60):
                for fake in (decode, both):
                    fake.gaps += 100
                await asyncio.sleep(0.02)
            step_us, untaught_us = (view.cost.decode_step_us(4, 0) for view in views)
            assert 20_000 < step_us < 30_000
            assert untaught_us == views[1].cost.__class__().decode_step_us(4, 0)

    run(body)


def test_events_auto_is_on_where_somebody_listens() -> None:
    """`auto` tries the port; `off`, and `auto` without a connection, are alarms."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            fake, feeds = Engine("a"), Feeds()
            async with rig(fake, follow=feeds.follow) as it:
                await it.up(fake, tokenizer="t", events="auto")
                assert not it.fleet.follows_events("m")
                assert "events: tcp://127.0.0.1:5557 accepts no connection" in it.fleet.alarms()[0]
                assert it.fleet.text("m") is not None
                where = f"tcp://127.0.0.1:{port}"
                await it.up(fake, tokenizer="t", events=where, replay=where)
                assert it.fleet.follows_events("m")
                assert it.fleet.follows_events_of(InstanceId("a"))
                assert it.fleet.alarms() == []
                feeds.said = FeedCounts(connected=True)
                assert it.fleet.alarms() == [
                    "a: KV events were lost: what it holds is not fully known"
                ]
                await it.up(fake, events="off")
                assert "events: off" in it.fleet.alarms()[0]
                assert it.fleet.text("m") is None

    run(body)


def test_sources_do_not_touch_each_others_engines() -> None:
    """A name belongs to its source; the same again changes nothing; a source's list is its
    whole truth."""

    async def body() -> None:
        fake, other = Engine("a"), Engine("b")
        async with rig(fake, other) as it:
            a = InstanceSpec(name="a", url=fake.url, events="off")
            b = InstanceSpec(name="b", url=other.url, events="off")
            await it.fleet.described("file", [a, b])
            assert not await it.fleet.add("file", a)
            with pytest.raises(Taken, match="a is described by file"):
                await it.fleet.add("HTTP", a)
            with pytest.raises(Taken):
                await it.fleet.remove("HTTP", "a")
            with pytest.raises(Unknown):
                await it.fleet.remove("HTTP", "c")
            await it.until(lambda: len(it.views) == 2)
            await it.fleet.described("file", [b])
            await it.until(lambda: [*it.views] == ["b"])
            with pytest.raises(NobodyAlive):
                it.fleet.member(InstanceId("a"))

    run(body)


def test_one_engine_does_not_count_twice() -> None:
    """A URL, however it is written, has one name, of whichever source: both are named."""

    async def body() -> None:
        async with rig() as it:
            await it.fleet.add("file", InstanceSpec(name="a", url="http://Host:80/", events="off"))
            twin = InstanceSpec(name="b", url="http://host", events="off")
            for source in ("file", "HTTP"):
                with pytest.raises(Taken, match=r"is a, described by file: remove one of a and b"):
                    await it.fleet.add(source, twin)
            await it.fleet.add("file", InstanceSpec(name="a", url="http://host:81", events="off"))
            await it.fleet.add("HTTP", twin)

    run(body)


def test_a_warning_of_many_is_one_alarm() -> None:
    """A warning of all engines is one alarm, with the first names and the number of the others."""

    async def body() -> None:
        fakes = [Engine(name) for name in "abcde"]
        async with rig(*fakes) as it:
            for fake in fakes:
                await it.up(fake)
            said = [text for text in it.fleet.alarms() if "events: off" in text]
            assert [text.partition(": ")[0] for text in said] == ["a, b, c and 2 more"]

    run(body)


def test_a_half_that_did_not_say_its_model_yet_has_its_other_half() -> None:
    """A refused engine is an alarm by itself, and none about the engines that would go with it."""

    async def body() -> None:
        decode = Engine("d")
        async with rig(decode) as it:
            await it.fleet.add(
                "test",
                InstanceSpec(name="p", url="http://127.0.0.1:9", role="prefill", connector="nixl"),
            )
            await it.up(decode, role="decode", connector="nixl")
            assert not [text for text in it.fleet.alarms() if "serves no request" in text]

    run(body)


def test_a_key_is_sent_and_a_missing_one_is_named() -> None:
    """Keys come from the environment by name; without one, the engine's 401 names what to set."""

    async def body() -> None:
        fake = Engine("a")
        fake.key = "s3cret"
        async with rig(fake, environ={"ENGINE_KEY": "s3cret"}) as it:
            with pytest.raises(ConfigError, match="api_key_env: OTHER is not set"):
                await it.up(fake, api_key_env="OTHER")
            spec = InstanceSpec(name="a", url=fake.url, events="off")
            await it.fleet.add("test", spec)
            await it.until(lambda: it.monitor("a").state == "refused")
            assert "name the variable with its key in api_key_env" in it.monitor("a").why
            monitor = await it.up(fake, api_key_env="ENGINE_KEY")
            fake.key = "another"
            await it.until(lambda: monitor.state == "refused")
            assert "correct the key in ENGINE_KEY" in it.fleet.alarms()[0]

    run(body)


def test_a_page_of_real_vllm_is_read() -> None:
    """A whole page as vLLM 0.32 gives it."""
    page = read_page(fixture("metrics_e1.txt").read_text())
    assert page.started_s == 1.79581777743e9
    assert page.ranks == {"0": RankPage(finished=19, gaps=48, gaps_s=8.361423954999964)}
    assert (page.cache["block_size"], page.cache["kv_cache_size_tokens"]) == ("32", "1280")


@pytest.mark.parametrize("more", ["", " 1795817777.430", ' 1795817777 # {trace_id="a b"} 0.5 1.2'])
def test_a_timestamp_is_not_the_value(more: str) -> None:
    """OpenMetrics allows a timestamp and an exemplar after the value, and any text in a label."""
    label = '{engine="0",model_name="a {b}, \\"c\\" 7 # 8"}'
    page = read_page(
        f"process_start_time_seconds 12.5{more}\n"
        f"vllm:num_requests_running{label} 3.0{more}\n"
        f"vllm:num_requests_waiting{label}\t4{more}\n"
        f'vllm:cache_config_info{{block_size="32"}} 1.0{more}\n# EOF\n'
    )
    assert (page.started_s, page.cache["block_size"]) == (12.5, "32")
    assert page.rank(0) == RankPage(running=3, waiting=4)


def test_a_page_of_sglang_or_nonsense_is_read() -> None:
    """SGLang's names; broken lines are skipped."""
    page = read_page(
        'sglang:num_running_reqs{model_name="a b",dp_rank="10"} 3.0\n'
        'sglang:num_queue_reqs{dp_rank="10"} 4.0\nsglang:token_usage{dp_rank="9"} 0.5\n'
        'vllm:num_requests_running{engine="x" nan\nvllm:num_requests_running NaN\n'
        "process_start_time_seconds\n"
    )
    assert page.rank(1) == RankPage(3, 4)
    assert page.rank(0) == RankPage(usage=0.5)
    assert (page.rank(2), page.started_s) == (None, None)
