"""A picker over gRPC, before fake engines: what a proxy gets, and what the Conductor learns."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from moonserve.core.request import Slo
from moonserve.core.schedule.facts import Left
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, RequestId
from moonserve.live.picker import front as picker_front
from moonserve.live.picker.protocol import PREFILLER, RANK
from tests.support.picker_proxy import (
    BUFFERED,
    DUPLEX,
    destinations,
    mutated,
    reply_body,
    reply_head,
    request_body,
    request_head,
)
from tests.support.picker_site import MOST, PickerSite, completion, run

E0, E1, E2 = [(f"e{n}", "both", "none") for n in range(3)]
P0, D0, D1 = ("p0", "prefill", "nixl"), ("d0", "decode", "nixl"), ("d1", "decode", "nixl")
LONG = "It was a dark and stormy night. " * 40


def record(site: PickerSite, name: str) -> Record:
    """What the Conductor's process knows of a request."""
    found = site.conductor.account.find(RequestId(name))
    assert found is not None
    return found


def error(reply: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a refusal."""
    assert reply.WhichOneof("response") == "immediate_response", reply
    immediate = reply.immediate_response
    return immediate.status.code, msgspec.json.decode(immediate.body)["error"]


def first_tokens(site: PickerSite) -> float:
    """How many first tokens have been measured."""
    samples = site.picker.metrics.ttft.family("x", "").samples
    return max(it.value for it in samples if it.name == "x_bucket")


async def asked(site: PickerSite, body: bytes, **head: Any) -> Any:
    """The answer to a request that is then given up."""
    exchange = site.exchange()
    reply = await exchange.ask(body, **head)
    exchange.cancel()
    return reply


def test_a_prefix_goes_to_its_holder_and_others_stand_by() -> None:
    """The engine that has served a prompt gets the next one that begins so; the pick names two
    further endpoints in order."""

    async def use(site: PickerSite) -> None:
        holder = ""
        for turn in range(3):
            exchange = site.exchange()
            names = site.named(destinations(await exchange.ask(completion(LONG + str(turn)))))
            assert sorted(names) == ["e0", "e1", "e2"]
            await exchange.reply()  # the body
            await exchange.send(reply_head())
            await exchange.reply()
            exchange.cancel()
            assert names[0] == holder or not holder
            holder = names[0]

    run(use, E0, E1, E2)


def test_the_ledger_holds_a_request_until_the_proxy_ends_it() -> None:
    """From the pick to the end of the stream one decode is promised; then nothing."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        destinations(await exchange.ask(completion(), fields={"x-request-id": "r1"}))
        await exchange.reply()  # the body
        await exchange.send(reply_head())
        await exchange.reply()
        assert site.conductor.core.promised().decodes == 1
        assert site.picker.metrics.in_flight == 1
        exchange.cancel()
        await site.settled()
        assert record(site, "r1").outcome == "done"
        assert site.picker.metrics.requests["/v1/completions", 200] == 1

    run(use, E0)


def test_a_client_that_leaves_early_frees_its_place() -> None:
    """If the stream ends before a reply began, the request counts as cancelled."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.ask(completion(), fields={"x-request-id": "r1"})
        exchange.cancel()
        await site.settled()
        assert record(site, "r1").outcome == "cancelled"
        assert site.picker.metrics.requests["/v1/completions", 499] == 1
        half = site.exchange()
        await half.send(request_head(), request_body(b"{", ends=False))
        half.cancel()

    run(use, E0)


def test_replies_that_pass_by_are_measured() -> None:
    """If the proxy sends replies' bodies, tokens, cached tokens and first tokens are counted."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        body = completion(stream=True)
        await exchange.ask(body, fields={"x-request-id": "r1"}, reply_mode=DUPLEX)
        await exchange.reply()
        usage = b'{"prompt_tokens":16,"completion_tokens":2,"prompt_tokens_details":'
        events = [
            b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
            b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n',
            b'data: {"choices":[],"usage":' + usage + b'{"cached_tokens":8}}}\n\ndata: [DONE]\n\n',
        ]
        await exchange.send(reply_head())
        await exchange.reply()
        for number, event in enumerate(events):
            await exchange.send(reply_body(event, ends=number == 2))
            passed = (await exchange.reply()).response_body.response.body_mutation
            assert passed.streamed_response.body == event
        exchange.cancel()
        await site.settled()
        found = record(site, "r1")
        assert (found.outcome, found.measured.tokens, found.measured.cached_tokens) == (
            "stop",
            2,
            8,
        )
        metrics = site.picker.metrics
        assert (metrics.prompt_tokens, metrics.completion_tokens) == (16, 2)
        [note] = site.fleet.notes
        assert (note.part, note.said, note.last) == ("whole", [None], 8)

    run(use, E0)


def test_a_whole_reply_that_passes_by_is_measured() -> None:
    """Its usage is at its end; the call's tokens came all at once."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.ask(
            completion(), fields={"x-request-id": "r1"}, mode=BUFFERED, reply_mode=BUFFERED
        )
        await exchange.reply()
        reply = b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":'
        reply += b'{"prompt_tokens":16,"completion_tokens":4}}'
        await exchange.send(reply_head(), reply_body(reply[:20]), reply_body(reply[20:], True))
        for _ in range(3):
            await exchange.reply()
        exchange.cancel()
        await site.settled()
        found = record(site, "r1")
        assert (found.outcome, found.measured.tokens) == ("length", 4)
        [note] = site.fleet.notes
        assert (note.count, note.said) == (4, [None])

    run(use, E0)


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        (b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n', 1),
        (b"data: [DONE]\n\n", 0),
    ],
)
def test_a_stream_that_breaks_off_counts_as_failed(event: bytes, tokens: int) -> None:
    """A reply whose last event did not come is no success, nor is one that has only an end."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        body = completion(stream=True)
        await exchange.ask(body, fields={"x-request-id": "r1"}, reply_mode=DUPLEX)
        await exchange.reply()
        await exchange.send(reply_head(), reply_body(event), reply_body(b"", ends=True))
        for _ in range(3):
            await exchange.reply()
        exchange.cancel()
        await site.settled()
        found = record(site, "r1")
        assert (found.outcome, found.measured.tokens) == ("failed", tokens)
        assert (found.ttft_us is None) is (tokens == 0)

    run(use, E0)


def test_an_engine_that_stood_in_gets_the_credit() -> None:
    """If the proxy says that another endpoint served, the ledger and the prefix index follow."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        picked = site.named(destinations(await exchange.ask(completion(LONG))))
        await exchange.reply()
        await exchange.send(reply_head(served=site.at(picked[1])))
        await exchange.reply()
        views = site.conductor.views()
        async with asyncio.timeout(5):
            while views[InstanceId(picked[1])].decodes != 1:
                await asyncio.sleep(0.005)
        assert views[InstanceId(picked[0])].decodes == 0
        exchange.cancel()
        await site.settled()
        again = await asked(site, completion(LONG))
        assert site.named(destinations(again))[0] == picked[1]

    run(use, E0, E1, tuning=Tuning(policy="kvcache_centric"))


def test_separate_prefill_is_named_for_the_sidecar() -> None:
    """The request goes to a decode engine, and a header says who prefills; the ledger moves to
    decode when the reply begins."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        reply = await exchange.ask(completion(LONG, stream=True), fields={"x-request-id": "r1"})
        names = site.named(destinations(reply))
        assert sorted(names) == ["d0", "d1"]
        assert mutated(reply)[PREFILLER] == site.at("p0")
        await exchange.reply()
        assert site.conductor.core.promised().prefills == 1
        await exchange.send(reply_head())
        await exchange.reply()
        async with asyncio.timeout(5):
            while site.conductor.core.promised().prefills:
                await asyncio.sleep(0.005)
        assert site.conductor.core.promised().decodes == 1
        assert [(it.instance, it.part) for it in site.fleet.notes] == [
            ("p0", "prefill"),
            (names[0], "decode"),
        ]
        exchange.cancel()

    run(use, P0, D0, D1)


def test_a_rank_is_named_in_a_header() -> None:
    """Several instances behind one address are told apart by their data-parallel rank."""

    async def use(site: PickerSite) -> None:
        await site.add("r", dp_size=2)
        await asyncio.sleep(0)
        ranks = set()
        exchanges = [site.exchange() for _ in range(2)]
        for exchange in exchanges:
            reply = await exchange.ask(completion())
            assert destinations(reply) == [site.at("r")]
            ranks.add(mutated(reply)[RANK])
        assert ranks == {"0", "1"}
        for exchange in exchanges:
            exchange.cancel()

    run(use)


def test_only_endpoints_of_the_subset_are_picked() -> None:
    """The pick and its fallbacks are among those that the proxy allows, for other paths too."""

    async def use(site: PickerSite) -> None:
        await asked(site, completion(LONG))
        subset = [site.at("e2"), "10.9.9.9:80", site.at("e1")]
        for _ in range(3):
            reply = await asked(site, completion(LONG), subset=subset)
            assert sorted(site.named(destinations(reply))) == ["e1", "e2"]
        exchange = site.exchange()
        await exchange.send(request_head(path="/v1/models", method="GET", ends=True, subset=subset))
        assert site.named(destinations(await exchange.reply()))[0] in ("e1", "e2")
        exchange.cancel()

    run(use, E0, E1, E2)


def test_a_subset_without_a_known_endpoint_is_503() -> None:
    """Also if it is empty; the message says how many were allowed."""

    async def use(site: PickerSite) -> None:
        for subset in (["10.9.9.9:80"], []):
            status, found = error(await asked(site, completion(), subset=subset))
            assert status == 503
            assert f"none of the {len(subset)} endpoints that the proxy allows" in found["message"]

    run(use, E0)


def test_other_paths_go_to_each_engine_in_turn() -> None:
    """A request without a prompt is placed without the Conductor."""

    async def use(site: PickerSite) -> None:
        names = set()
        for _ in range(2):
            exchange = site.exchange()
            reply = await exchange.ask(b'{"model":"m","input":"x"}', path="/v1/embeddings")
            names.update(site.named(destinations(reply)))
            assert (await exchange.reply()).request_body.response.HasField("body_mutation")
            exchange.cancel()
        assert names == {"e0", "e1"}

    run(use, E0, E1)


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": LONG, "instructions": "Be brief."}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
    ("/v1/embeddings", {"input": LONG}),
    ("/v1/rerank", {"query": "night", "documents": [LONG, "x"]}),
    ("/v1/completions", {"prompt": [LONG]}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_all_forms_are_placed_as_a_gateway_places_them(path: str, body: dict[str, Any]) -> None:
    """Those that generate go to the holder of their prefix, the others where there is room."""

    async def use(site: PickerSite) -> None:
        names = set()
        for turn in range(3):
            exchange = site.exchange()
            raw = msgspec.json.encode({"model": "m", **body})
            reply = await exchange.ask(raw, path=path, fields={"x-request-id": f"r{turn}"})
            names.add(destinations(reply)[0])
            await exchange.reply()  # the body
            assert site.conductor.core.promised().requests == 1
            await exchange.send(reply_head())
            await exchange.reply()
            exchange.cancel()
            await site.settled()
            assert record(site, f"r{turn}").prompt_tokens > 100
        assert len(names) == 1 or path in ("/v1/embeddings", "/v1/rerank")
        assert site.picker.metrics.requests[path, 200] == 3

    run(use, E0, E1, E2)


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_a_sidecar_hands_over_chat_and_completions_only(path: str, body: dict[str, Any]) -> None:
    """Of engines with separate roles, one serves all of a request of another form."""

    async def use(site: PickerSite) -> None:
        reply = await asked(site, msgspec.json.encode({"model": "m", **body}), path=path)
        assert (PREFILLER in mutated(reply)) == (path == "/v1/completions")
        assert set(site.named(destinations(reply))) <= {"d0", "d1"}

    run(use, P0, D0, D1)


def test_several_prompts_of_one_request_have_no_holder() -> None:
    """A completion with a list of prompts is served whole, by any engine."""

    async def use(site: PickerSite) -> None:
        body = msgspec.json.encode({"model": "m", "prompt": [LONG, "b"]})
        assert len(destinations(await asked(site, body))) == 2
        assert site.backend.reader.read["unread"] == 1

    run(use, E0, E1)


@pytest.mark.parametrize(
    ("path", "events", "outcome"),
    [
        (
            "/v1/responses",
            [
                b'event: response.created\ndata: {"type":"response.created"}\n\n',
                b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n',
                b'event: response.completed\ndata: {"response":{"status":"completed","usage":'
                b'{"input_tokens":16,"input_tokens_details":{"cached_tokens":8},"output_tokens":5'
                b"}}}\n\n",
            ],
            "stop",
        ),
        (
            "/v1/messages",
            [
                b'event: message_start\ndata: {"message":{"usage":{"input_tokens":16,'
                b'"output_tokens":0}}}\n\n',
                b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n',
                b'event: message_delta\ndata: {"delta":{"stop_reason":"max_tokens"},"usage":'
                b'{"input_tokens":16,"output_tokens":5}}\n\n'
                b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            ],
            "length",
        ),
    ],
)
def test_replies_with_named_events_are_measured(
    path: str, events: list[bytes], outcome: str
) -> None:
    """The first piece of text is the first token; tokens and the reason of the end are counted."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        said = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "input": said, "messages": said, "max_tokens": 5, "stream": True}
        head = {"fields": {"x-request-id": "r1"}, "path": path, "reply_mode": DUPLEX}
        await exchange.ask(msgspec.json.encode(body), **head)
        await exchange.reply()  # the body
        await exchange.send(reply_head())
        await exchange.reply()
        for number, event in enumerate(events):
            await exchange.send(reply_body(event, ends=number == 2))
            await exchange.reply()
            assert first_tokens(site) == (number > 0)
        exchange.cancel()
        await site.settled()
        found = record(site, "r1")
        assert (found.outcome, found.measured.tokens) == (outcome, 5)

    run(use, E0)


def test_refusals_have_the_shape_of_their_form() -> None:
    """Anthropic's clients read an error in Anthropic's shape."""

    async def use(site: PickerSite) -> None:
        reply = await asked(site, b'{"model":"m"}', path="/v1/messages")
        body = msgspec.json.decode(reply.immediate_response.body)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")

    run(use, E0)


@pytest.mark.parametrize(
    ("body", "head", "status", "text"),
    [
        (b'{"model":"x","prompt":"a"}', {}, 404, "'x' is not served here; known: m"),
        (b'{"model":"m"}', {}, 400, "prompt: is missing"),
        (b"{", {}, 400, "request body"),
        (b'{"model":"m","prompt":"a","kv_transfer_params":{}}', {}, 400, "only the gateway sets"),
        (completion(), {"fields": {"content-encoding": "gzip"}}, 415, "is compressed"),
        (completion(), {"fields": {"x-moonserve-priority": "high"}}, 400, "no whole number"),
        (completion(), {"mode": 1}, 500, "request_body_mode is STREAMED"),
        (b"x" * (MOST + 1), {}, 413, "over the limit"),
        (b'{"model":"y","input":"a"}', {"path": "/v1/embeddings"}, 404, "'y' is not served"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(
    body: bytes, head: dict[str, Any], status: int, text: str
) -> None:
    """The client gets a status and a message in OpenAI's shape, and no engine is asked."""

    async def use(site: PickerSite) -> None:
        found = error(await asked(site, body, **head))
        assert found[0] == status
        assert text in found[1]["message"]

    run(use, E0)


def test_a_generation_without_a_body_is_a_bad_request() -> None:
    """It is refused at once, and the stream ends."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.send(request_head(ends=True))
        status, found = error(await exchange.reply())
        assert (status, found["message"]) == (400, "request body: is missing")
        assert await exchange.ended()

    run(use, E0)


def test_without_an_engine_it_is_503() -> None:
    """For generations and for other requests."""

    async def use(site: PickerSite) -> None:
        for path in ("/v1/completions", "/v1/embeddings"):
            assert error(await asked(site, completion(input="a"), path=path))[0] == 503

    run(use)


def test_a_refusal_says_when_to_return() -> None:
    """A request for which no instance has a place is a 429 with Retry-After."""

    async def use(site: PickerSite) -> None:
        info = site.fleet.members[InstanceId("e0")].infos[InstanceId("e0")]
        site.join(msgspec.structs.replace(info, epoch=2, max_requests=1))
        holder = site.exchange()
        await holder.ask(completion())
        reply = await asked(site, completion())
        assert error(reply)[0] == 429
        mutation = reply.immediate_response.headers
        fields = {it.header.key: it.header.raw_value for it in mutation.set_headers}
        assert int(fields["retry-after"]) >= 1
        assert fields["x-moonserve-reject-reason"] == b"instances_full"
        assert site.picker.metrics.rejected["instances_full"] == 1
        holder.cancel()

    run(use, E0)


def test_waits_for_an_instance_end() -> None:
    """With late binding a request waits at the Conductor, but not for ever."""

    async def use(site: PickerSite) -> None:
        first = site.exchange()
        await first.ask(completion(LONG))
        status, found = error(await asked(site, completion(LONG)))
        assert status == 504
        assert "no instance was free within 0.2 s" in found["message"]
        first.cancel()

    run(use, E0, tuning=Tuning(policy="late_binding", slo=Slo(600_000_000)), within_s=0.2)


def test_a_body_that_never_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picker waits for a body for so long only."""
    monkeypatch.setattr(picker_front, "_BODY_S", 0.05)

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.send(request_head())
        assert error(await exchange.reply())[0] == 504
        assert await exchange.ended()

    run(use, E0)


def test_objectives_and_fairness_have_our_meaning() -> None:
    """The objective's name gives the priority, the fairness id is the tenant; our own headers come
    first, and an unknown objective means nothing."""

    async def use(site: PickerSite) -> None:
        named = {"x-gateway-inference-objective": "chat", "x-gateway-inference-fairness-id": "team"}
        own = {"x-moonserve-priority": "-2", "x-moonserve-tenant": "us"}
        unknown = {"x-gateway-inference-objective": "unknown"}
        for name, fields in (("r1", named), ("r2", {**named, **own}), ("r3", unknown)):
            await asked(site, completion(), fields={**fields, "x-request-id": name})
            await site.settled()
        found = [(record(site, it).priority, record(site, it).tenant) for it in ("r1", "r2", "r3")]
        assert found == [(7, "team"), (-2, "us"), (0, "")]

    run(use, E0, objectives={"chat": 7})


def test_an_instance_that_is_lost_frees_the_ledger() -> None:
    """The stream goes on at the proxy, but nothing is promised any more."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.ask(completion())
        await exchange.reply()
        site.conductor.tell(Left(InstanceId("e0"), 1, "gone"))
        async with asyncio.timeout(5):
            while site.conductor.core.promised().requests:
                await asyncio.sleep(0.005)
        await exchange.send(reply_head())
        assert (await exchange.reply()).WhichOneof("response") == "response_headers"
        exchange.cancel()

    run(use, E0, E1)


def test_health_follows_readiness_and_draining() -> None:
    """liveness is SERVING always; the other services are while requests can be placed."""

    async def use(site: PickerSite) -> None:
        stub = HealthStub(site.channel)

        async def status(service: str) -> int:
            reply = await stub.Check(HealthCheckRequest(service=service), timeout=5)
            return int(reply.status)

        serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        ours = "envoy.service.ext_proc.v3.ExternalProcessor"
        assert [await status(it) for it in ("liveness", "readiness", "", ours)] == [
            serving,
            *[not_serving] * 3,
        ]
        await site.add("e0")
        await asyncio.sleep(0)
        watch = stub.Watch(HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == serving
        site.picker.drain()
        assert (await watch.read()).status == not_serving
        watch.cancel()
        assert await status("liveness") == serving
        assert error(await asked(site, completion()))[0] == 503
        with pytest.raises(grpc.aio.AioRpcError, match="known: liveness, readiness, envoy"):
            await status("other")

    run(use)


def test_requests_over_the_limit_are_429() -> None:
    """The limit of requests under way is the gateway's; it is checked before a body comes."""

    async def use(site: PickerSite) -> None:
        site.picker.metrics.in_flight = 2 * site.backend.limits.max_in_flight
        exchange = site.exchange()
        await exchange.send(request_head())
        status, found = error(await exchange.reply())
        site.picker.metrics.in_flight = 0
        assert (status, found["code"]) == (429, "gateway_in_flight")

    run(use, E0)


def test_a_message_that_cannot_be_read_ends_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """With INVALID_ARGUMENT: it is the proxy's fault, and no bug here."""

    async def use(site: PickerSite) -> None:
        process = site.channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in process(iter([b"\xff\xff"])):
                pass
        assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(use, E0)
    assert "a bug" not in caplog.text
