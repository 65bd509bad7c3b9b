"""Spans of requests at an OTLP receiver: one tree for each, and no request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.request import Request, TraceContext
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import DecodeEnded, Joined, PrefillEnded
from moonserve.core.schedule.record import Measured
from moonserve.core.units import RequestId
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.openai.trace_context import SamplingRule
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from moonserve.live.process.gateway import Gateway
from moonserve.live.record import traces as module
from moonserve.live.record.traces import Traces, TraceSettings, trace_settings
from tests.support.cluster import exact, info
from tests.support.engines import QUICK, Engine
from tests.support.inproc import site
from tests.support.otlp import OtlpReceiver, attributes

TRACE, SPAN = "a" * 32, "b" * 16
SAMPLED = f"00-{TRACE}-{SPAN}-01"
STAGES = ["schedule", "prefill", "transfer", "decode"]


@contextlib.asynccontextmanager
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpReceiver]:
    """A receiver; spans are sent to it without a pause."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.02)
    it = await OtlpReceiver().start()
    try:
        yield it
    finally:
        await it.stop()


class OneConductor:
    """Requests of a Conductor with two instances, whose spans are exported."""

    def __init__(self, url: str) -> None:
        self.health = Health()
        self.loop = ConductorLoop(Conductor(cost_of=exact), lambda lease: None)
        self.loop.core.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
        self.traces = Traces(self.loop, self.health, TraceSettings(url, SamplingRule()))

    def serve(self, name: str, trace: TraceContext | None) -> None:
        """Serve one request."""
        who = RequestId(name)
        self.loop.open(Request(who, "m", 9, trace=trace), (), asyncio.Queue())
        self.loop.settle()
        self.loop.tell(PrefillEnded(who, 1, final=False))
        self.loop.settle()
        self.loop.tell(DecodeEnded(who, 2, 5))
        self.loop.settle()
        self.loop.close(who, "length", Measured(tokens=5))

    def counts(self) -> dict[str, float]:
        """The metrics, by name and cause."""
        [collector] = self.traces.collectors()
        samples = [it for family in collector.collect() for it in family.samples]
        return {it.labels.get("cause", "exported"): it.value for it in samples}

    async def stop(self) -> None:
        """Stop both."""
        await self.traces.stop()
        self.loop.stop()


def context(number: int) -> TraceContext:
    """The root of a trace."""
    return TraceContext(f"{number:032x}", f"{number:016x}")


@pytest.mark.model  # for its tokenizer
def test_a_request_on_our_own_workers_is_one_tree_below_the_clients_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All stages, with what the worker reported of prefill, and the decision. Traces that the
    client does not sample have no spans, and those without a parent begin here."""

    async def body() -> None:
        async with (
            receiver(monkeypatch) as got,
            site(otlp_traces_endpoint=got.url.removesuffix("/v1/traces")) as it,
        ):
            await it.add("p0", "prefill")
            await it.add("d0", "decode")
            dark = f"00-{'d' * 32}-{SPAN}-00"
            await it.tokens(list(range(50)), 4, traceparent=dark)
            await it.tokens(list(range(50)), 4, traceparent=SAMPLED, **{"x-request-id": "mine"})
            await it.tokens(list(range(60)), 4)
            await got.until(lambda: sum(span.name == "gateway" for span in got.spans) == 2)
            assert not got.of("d" * 32)
            check_tree(got.of(TRACE), got.parents(TRACE, "compute"))
            [root] = [x for x in got.spans if x.name == "gateway" and x.trace_id.hex() != TRACE]
            assert root.parent_span_id == b""
            assert got.resources[0]["service.name"] == "moonserve"

    asyncio.run(body())


def check_tree(spans: dict[str, Any], computed: set[bytes]) -> None:
    """The spans of the request of that test. computed: the parents of passes; decode has one if its
    first took any time."""
    root = spans["gateway"]
    assert root.parent_span_id.hex() == SPAN
    assert {"compute", *STAGES} <= spans.keys()
    last = root.start_time_unix_nano
    for name in STAGES:
        span = spans[name]
        assert span.parent_span_id == root.span_id
        assert last <= span.start_time_unix_nano <= span.end_time_unix_nano
        last = span.end_time_unix_nano
    assert last <= root.end_time_unix_nano
    assert spans["prefill"].span_id in computed <= {spans[it].span_id for it in STAGES}
    assert [it.name for it in root.events] == ["first_token"]
    about = attributes(root)
    assert about["gen_ai.request.id"] == "mine"
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (50, 4)
    assert about["gen_ai.usage.cache_read.input_tokens"] == 48  # of the first one
    assert about["gen_ai.latency.time_to_first_token"] > 0
    decided = attributes(spans["schedule"])
    assert decided["moonserve.policy"] == "kvcache_centric"
    assert (decided["moonserve.prefill_instance"], decided["moonserve.decode_instance"]) == (
        "p0",
        "d0",
    )
    assert decided["moonserve.reused_tokens"] == 48
    assert decided["moonserve.predicted_ttft_s"] > 0


def test_an_engines_parent_is_the_span_that_the_conductor_exports_for_a_front(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A front draws the ids, and the Conductor has the record. An engine's own spans would hang
    below ours."""

    async def body() -> None:
        async with contextlib.AsyncExitStack() as stack:
            got = await stack.enter_async_context(receiver(monkeypatch))
            engine = Engine("a")
            await engine.start()
            stack.push_async_callback(engine.stop)
            common = GatewayConfig(model="", port=0, token="t0ken")
            socket = str(tmp_path / "c.sock")
            config = msgspec.structs.replace(
                common, socket=socket, otlp_traces_endpoint=got.url, store="none"
            )
            spec = InstanceSpec(name="a", url=engine.url, events="off")
            conductor = await ConductorProcess.start(config, [spec])
            stack.push_async_callback(conductor.stop, 0)
            front = await FrontProcess.start(msgspec.structs.replace(common, conductor=socket))
            stack.push_async_callback(front.stop, 0)
            http = HttpClient()
            stack.push_async_callback(http.close)
            async with asyncio.timeout(20):
                while not front.conductor.instances():
                    await asyncio.sleep(0.02)
            asked = msgspec.json.encode({"model": "m", "prompt": "once", "max_tokens": 3})
            reply = await http.request(
                "POST",
                f"http://127.0.0.1:{front.port}/v1/completions",
                headers={"content-type": "application/json", "traceparent": SAMPLED},
                body=asked,
                timeout_s=10,
            )
            assert reply.status == 200, reply.body
            await got.until(lambda: bool(got.of(TRACE)))
            root = got.of(TRACE)["gateway"]
            assert root.parent_span_id.hex() == SPAN
            [call] = [it for it in engine.calls if "traceparent" in it.headers]
            assert call.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"

    asyncio.run(body())


def test_a_refusal_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the span of the request and of its schedule."""

    async def body() -> None:
        async with receiver(monkeypatch) as got:
            it = OneConductor(got.url)
            await it.traces.prepare()
            who = RequestId("r")
            long = Request(who, "m", 100_000, trace=context(1))
            it.loop.open(long, (), asyncio.Queue())
            it.loop.settle()
            it.loop.close(who, "refused")
            await got.until(lambda: bool(got.spans))
            for span in got.spans:
                assert span.status.code == 2  # ERROR
                assert attributes(span)["moonserve.refusal_reason"] == "kv_memory"
            assert {span.name for span in got.spans} == {"gateway", "schedule"}
            await it.stop()

    asyncio.run(body())


def test_what_finds_no_room_is_counted_and_the_loop_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receiver that does not answer holds the thread only; the queue has a bound."""
    monkeypatch.setattr(module, "_MOST_WAITING", 5)

    async def body() -> None:
        async with receiver(monkeypatch) as got:
            got.paused.clear()
            it = OneConductor(got.url)
            await it.traces.prepare()
            it.serve("first", context(1))
            await got.until(lambda: got.calls == 1)
            for number in range(8):
                it.serve(f"r{number}", context(number + 2))
            it.serve("untraced", None)
            assert it.counts()["full"] == 3
            got.paused.set()
            await got.until(lambda: it.counts()["exported"] == 6)
            assert {it.name for it in got.spans} >= {"gateway", "schedule", "prefill"}
            await it.stop()

    asyncio.run(body())


def test_what_the_receiver_does_not_take_is_counted_and_is_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alarm ends when it takes spans again."""

    async def body() -> None:
        async with receiver(monkeypatch) as got:
            got.status = 400
            it = OneConductor(got.url)
            await it.traces.prepare()
            it.serve("a", context(1))
            await got.until(lambda: it.counts()["receiver"] == 1)
            assert any("spans are not exported" in said for said in it.health.alarms())
            got.status = 200
            it.serve("b", context(2))
            await got.until(lambda: it.counts()["exported"] == 1)
            assert it.health.alarms() == []
            await it.stop()

    asyncio.run(body())


def test_the_last_spans_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait when the process stops."""

    async def body() -> None:
        async with receiver(monkeypatch) as got:
            monkeypatch.setattr(module, "_PAUSE_S", 60.0)
            it = OneConductor(got.url)
            await it.traces.prepare()
            it.serve("a", context(1))
            await it.stop()
            assert [span.name for span in got.spans][:2] == ["gateway", "schedule"]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("endpoint", "environ", "wanted"),
    [
        ("", {}, None),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://c:4318", {"OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://c:4318", {}, TraceSettings("http://c:4318/v1/traces", SamplingRule())),
        ("http://c/here", {}, TraceSettings("http://c/here", SamplingRule())),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, TraceSettings(None, SamplingRule())),
        (
            "http://c/x",
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            TraceSettings("http://c/x", SamplingRule(0.5, follows_parent=False)),
        ),
        (
            "http://c/x",
            {"OTEL_TRACES_SAMPLER": "parentbased_always_off"},
            TraceSettings("http://c/x", SamplingRule(0.0)),
        ),
    ],
)
def test_the_setting_and_opentelemetrys_variables_are_read(
    endpoint: str, environ: dict[str, str], wanted: TraceSettings | None
) -> None:
    """The flag is a whole URL; without a path it gets the usual one."""
    assert trace_settings(endpoint, environ) == wanted


@pytest.mark.parametrize(
    ("endpoint", "environ", "said"),
    [
        ("c:4318", {}, "otlp_traces_endpoint: write it like"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: write it"),
        ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf, not 'grpc'"),
        ("http://c", {"OTEL_TRACES_SAMPLER": "half"}, "OTEL_TRACES_SAMPLER: must be one of"),
        (
            "http://c",
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG: must be a number from 0 to 1, not '2'",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(
    endpoint: str, environ: dict[str, str], said: str
) -> None:
    """And says what to write."""
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        trace_settings(endpoint, environ)


def test_without_the_package_the_setting_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The variables give a warning only: some platforms set them for every program."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moonserve\[otel\]'"):
        trace_settings("http://c:4318", {})
    assert trace_settings("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}) is None
    assert "pip install 'moonserve[otel]'" in caplog.text


def test_a_damaged_package_is_an_error_that_says_how_to_repair_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some packages bring old files of opentelemetry-proto, which replace the right ones."""
    monkeypatch.setitem(sys.modules, "moonserve.live.record.otlp", None)

    async def body() -> None:
        it = OneConductor("http://127.0.0.1:9/v1/traces")
        with pytest.raises(ConfigError, match="pip install --force-reinstall"):
            await it.traces.prepare()

    asyncio.run(body())


def test_where_traces_are_off_opentelemetry_is_not_loaded() -> None:
    """Nor its client for HTTP."""
    script = (
        "import asyncio, sys\n"
        "from moonserve.live.control.config import GatewayConfig\n"
        "from moonserve.live.process.gateway import Gateway\n"
        "async def main():\n"
        "    gateway = await Gateway.start(GatewayConfig(model='', port=0), [])\n"
        "    await gateway.stop(0)\n"
        "asyncio.run(main())\n"
        "assert not {'opentelemetry', 'requests', 'google.protobuf'} & sys.modules.keys()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_gateway_with_a_wrong_endpoint_does_not_start() -> None:
    """It says so before it listens."""
    config = GatewayConfig(model="", port=0, otlp_traces_endpoint="c:4318")
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        asyncio.run(Gateway.start(config, [], QUICK))
