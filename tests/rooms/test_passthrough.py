"""One request through external engines, over real sockets: what passes, what is changed, what
fails.

The engines are tests.support.fake_vllm. Every test ends with a ledger of zeros.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import DeadlineExceeded, EngineFailed
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.schedule.facts import Connector, Fact, PrefillEnded, Role
from moonserve.core.schedule.shown import explained
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId
from moonserve.live.drive import external, lease
from moonserve.live.drive.calls import CallLimits
from moonserve.live.drive.connectors import nixl
from moonserve.live.drive.lost import CallLost, plain, refusal
from moonserve.live.external.member import Page, RankPage
from moonserve.live.external.monitor import POOL
from moonserve.live.http.client import ClientResponse, UpstreamError
from moonserve.live.http.message import HttpRequest, Response
from moonserve.show.explain import lines
from tests.support.external_site import SHORT, Site, run
from tests.support.fake_vllm import FakeVllm, spoken
from tests.support.records import record_of
from tests.support.serving import ByteText

Pool = tuple[str, Role, Connector]
ONE: list[Pool] = [("a", "both", "none")]
NIXL: list[Pool] = [("p", "prefill", "nixl"), ("d", "decode", "nixl")]
MOONCAKE: list[Pool] = [("p", "prefill", "mooncake"), ("d", "decode", "mooncake")]
PROMPT = "the quick brown fox jumps over the lazy dog, and then once more. " * 3
SAID = spoken(list(PROMPT.encode()), 4)
ASK = {"prompt": PROMPT, "max_tokens": 4}


def parsed(reply: ClientResponse) -> dict[str, Any]:
    """The body of a reply with status 200."""
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body)


def text(reply: ClientResponse) -> str:
    """The text of its first choice."""
    return parsed(reply)["choices"][0]["text"]


async def streamed(site: Site, body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The words of a streamed completion, and all of its events."""
    async with site.stream(body) as events:
        seen = [event async for event in events]
    words = [choice["text"] for event in seen for choice in event.get("choices", [])]
    return words, seen


@pytest.mark.parametrize("pools", [ONE, NIXL, MOONCAKE])
def test_what_one_engine_says_is_what_a_pair_says(pools: list[Pool]) -> None:
    """Whole and streamed, the text is the engine's. Usage is in the reply, and counts no more
    cached tokens than there are."""

    async def use(site: Site) -> None:
        reply = parsed(await site.post(ASK, x_request_id="r-1"))
        assert reply["choices"][0]["text"] == "".join(SAID)
        assert reply["id"] == "cmpl-r-1"
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        other = {**ASK, "prompt": "x" + PROMPT, "stream_options": {"include_usage": True}}
        words, events = await streamed(site, other)
        assert words == spoken(list(("x" + PROMPT).encode()), 4)
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert events[-1]["usage"]["completion_tokens"] == 4

    run(use, *pools)


def test_the_record_says_what_an_engine_alone_has_reused() -> None:
    """The record has the cached tokens of the usage at the end: for whole replies, several choices,
    and streams."""

    async def use(site: Site) -> None:
        await site.post({**ASK, "prompt": PROMPT[:100] + "!" * 300})
        bodies: list[dict[str, Any]] = [{}, {"n": 2}]
        for number, more in enumerate(bodies):
            again = {**ASK, "prompt": PROMPT[:100] + str(number) * 300, **more}
            reply = parsed(await site.post(again, x_request_id=f"r-{number}"))
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == record_of(site.conductor, f"r-{number}").measured.cached_tokens == 96
        other = {**ASK, "prompt": PROMPT[:100] + "?" * 300}
        await streamed(site, {**other, "stream_options": {"include_usage": True}})
        await site.settled()
        assert next(site.conductor.account.latest()).measured.cached_tokens == 96

    run(use, *ONE)


def test_mooncakes_decode_does_not_claim_the_whole_prompt_as_cached() -> None:
    """Usage has prefill's count: if a part of the prompt was cached, it counts that part."""

    async def use(site: Site) -> None:
        await site.post({**ASK, "prompt": PROMPT[:100] + "!" * 300})
        reply = parsed(await site.post({**ASK, "prompt": PROMPT[:100] + "?" * 300}))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert site.engines["d"].calls[-1].body["kv_transfer_params"]["do_remote_prefill"]

    run(use, *MOONCAKE)


@pytest.mark.parametrize("pools", [NIXL, MOONCAKE])
def test_where_prefill_does_not_report_what_it_reused_nothing_is_claimed(pools: list[Pool]) -> None:
    """Neither to the client, nor in the record: decode's own number is what it received."""

    async def use(site: Site) -> None:
        site.engines["p"].prompt_details = False
        reply = parsed(await site.post(ASK, x_request_id="r-1"))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] is None
        other = {**ASK, "prompt": "x" + PROMPT, "stream_options": {"include_usage": True}}
        _, events = await streamed(site, other)
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] is None
        await site.settled()
        assert record_of(site.conductor, "r-1").measured.cached_tokens is None

    run(use, *pools)


def test_fields_that_engines_know_pass_through_whole() -> None:
    """Logprobs, several choices and tools reach the engine as the client wrote them."""

    async def use(site: Site) -> None:
        ask = {**ASK, "n": 2, "logprobs": 1, "unheard_of": {"a": [1, None]}}
        reply = parsed(await site.post(ask))
        assert [choice["text"] for choice in reply["choices"]] == [
            "".join(spoken(list(PROMPT.encode()), 4, n)) for n in range(2)
        ]
        assert len(reply["choices"][1]["logprobs"]["token_logprobs"]) == 4
        [call] = site.engines["d"].calls
        assert call.body == {"model": "m", **ask}
        assert not site.engines["p"].calls  # KV is handed to one reader only
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        messages = [{"role": "user", "content": "hi"}]
        chat = {"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 3}
        reply = parsed(await site.post(chat, chat=True))
        said = reply["choices"][0]["message"]["tool_calls"][0]["function"]
        assert said == {"name": "look", "arguments": '{"usage": {"a": 1}}'}
        assert site.engines["p"].calls[0].body["tools"] == [tool]

    run(use, *NIXL)


def test_a_body_for_one_engine_goes_as_it_came() -> None:
    """Not a byte of the body changes if one engine does all."""

    async def use(site: Site) -> None:
        raw = b' { "prompt" : "hi there" ,\n "max_tokens":3, "model":"m", "stop": ["\\u00e9"] } '
        assert (await site.post(raw)).status == 200
        assert site.engines["a"].calls[0].raw == raw

    run(use, *ONE)


def test_a_pair_gets_the_same_id_and_each_its_rank() -> None:
    """X-Request-Id goes to both engines. A header names the data-parallel rank."""

    async def use(site: Site) -> None:
        await site.add("p", "prefill", "nixl", dp_size=2)
        await site.add("d", "decode", "nixl")
        await asyncio.sleep(0)
        texts = [text(await site.post({**ASK, "prompt": f"{n} " + PROMPT})) for n in range(4)]
        assert texts[3] == "".join(spoken(list(f"3 {PROMPT}".encode()), 4))
        firsts, seconds = site.engines["p"].calls, site.engines["d"].calls
        ids = [call.headers["x-request-id"] for call in firsts]
        assert ids == [call.headers["x-request-id"] for call in seconds]
        assert {call.headers["x-data-parallel-rank"] for call in firsts} <= {"0", "1"}
        assert all("x-data-parallel-rank" not in call.headers for call in seconds)

    run(use)


def test_the_trace_context_goes_on_to_both_engines() -> None:
    """So their spans join the client's trace. Other headers of clients do not go on."""
    context = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1", "baggage": "y=2"}

    async def use(site: Site) -> None:
        assert (await site.post(ASK, **context, cookie="secret")).status == 200
        for name in ("p", "d"):
            [call] = site.engines[name].calls
            assert {key: call.headers[key] for key in context} == context
            assert "cookie" not in call.headers
        await site.post({**ASK, "prompt": "another"})
        assert "traceparent" not in site.engines["p"].calls[1].headers

    run(use, *NIXL)


def test_a_decode_instance_that_has_the_prompt_gets_it_alone() -> None:
    """The second request for a prompt is one call, because the decode instance has its KV."""

    async def use(site: Site) -> None:
        for _ in range(2):
            assert text(await site.post(ASK)) == "".join(SAID)
        assert [len(site.engines[name].calls) for name in "pd"] == [1, 2]
        alone = site.engines["d"].calls[1].body
        assert "kv_transfer_params" not in alone
        note = site.fleet.notes[-1]
        assert (note.instance, note.part, note.last) == ("d", "whole", 192)

    run(use, *NIXL)


def test_a_token_that_ends_it_hands_nothing_over() -> None:
    """If prefill's first token was the last, there is no KV to fetch, and decode's body names
    none."""

    async def use(site: Site) -> None:
        end = {"choices": [{"finish_reason": "stop"}], "kv_transfer_params": None}
        site.engines["p"].script.append(end)
        assert text(await site.post(ASK)) == "".join(SAID)
        assert "kv_transfer_params" not in site.engines["d"].calls[0].body

    for pools in (NIXL, MOONCAKE):
        run(use, *pools)


def test_sglang_halves_meet_in_a_room() -> None:
    """Both engines get one body with host, port and room at the same time; the text is decode's."""
    pools: list[Pool] = [("p", "prefill", "sglang"), ("d", "decode", "sglang")]

    async def use(site: Site) -> None:
        assert text(await site.post(ASK)) == "".join(SAID)
        words, _ = await streamed(site, {**ASK, "prompt": "other " + PROMPT})
        assert words == spoken(list(("other " + PROMPT).encode()), 4)
        first, second = site.engines["p"].calls[0], site.engines["d"].calls[0]
        assert first.raw == second.raw
        room = first.body.pop("bootstrap_room")
        assert first.body == {
            "model": "m",
            **ASK,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": site.engines["p"].bootstrap_port,
        }
        assert 0 <= room < 1 << 63
        site.engines["d"].statuses.append(500)
        assert text(await site.post({**ASK, "prompt": "third " + PROMPT}))
        site.engines["d"].statuses.append(400)
        assert (await site.post({**ASK, "prompt": "fourth " + PROMPT})).status == 400

    run(use, *pools)


def test_sglangs_room_says_which_rank_prefills() -> None:
    """The rank that is called is the one that the room's number selects, and decode's body names
    it.

    Cached tokens are prefill's count, whole and streamed. Of several choices, each has a room.
    """

    async def use(site: Site) -> None:
        prefill = await site.add("p", "prefill", "sglang", dp_size=3)
        decode = await site.add("d", "decode", "sglang", dp_size=2)
        asks = [{**ASK, "prompt": f"{number} {PROMPT}"} for number in range(9)]
        for ask, reply in zip(asks, await asyncio.gather(*map(site.post, asks)), strict=True):
            assert text(reply) == "".join(spoken(list(str(ask["prompt"]).encode()), 4))
        second = {call.body["bootstrap_room"]: call for call in decode.calls}
        for first in prefill.calls:
            rank = int(first.headers["x-data-parallel-rank"])
            assert first.body["bootstrap_room"] % 3 == rank
            told = second[first.body["bootstrap_room"]]
            assert told.body == first.body | {"disagg_prefill_dp_rank": rank}
            assert told.headers["x-data-parallel-rank"] in ("0", "1")
        assert len({call.headers["x-data-parallel-rank"] for call in prefill.calls}) > 1
        ask = {**asks[0], "prompt": "9 " + PROMPT}
        await site.post(ask)
        again = parsed(await site.post(ask))["usage"]["prompt_tokens_details"]
        assert again["cached_tokens"] > 64
        _, events = await streamed(site, {**ask, "stream_options": {"include_usage": True}})
        assert events[-1]["usage"]["prompt_tokens_details"] == again
        several = parsed(await site.post({**ask, "prompt": "10 " + PROMPT, "n": 3}))["choices"]
        assert [it["text"] for it in several] == [
            "".join(spoken(list(f"10 {PROMPT}".encode()), 4, choice)) for choice in range(3)
        ]
        noted = [note.said for note in site.fleet.notes if note.part == "prefill"][:-1]
        assert noted[-2:] == [[again["cached_tokens"]]] * 2

    run(use)


def test_sglangs_decode_that_is_gone_is_to_blame_not_its_prefill() -> None:
    """Prefill waits in the room for decode: prefill stays a member, and another decode is found."""
    pools: list[Pool] = [("p", "prefill", "sglang"), ("c", "decode", "sglang")]

    async def use(site: Site) -> None:
        await site.add("d", "decode", "sglang")
        await site.engines["c"].stop()
        for number in range(3):
            assert text(await site.post({**ASK, "prompt": f"{number} {PROMPT}"}))
        assert {info.id for info in site.conductor.instances()} >= {"p", "d"}

    run(use, *pools)


# Failures.


def test_what_is_the_gateways_to_say_is_refused() -> None:
    """A client may not send parameters of KV transfer, a body without a prompt, or invalid JSON."""

    async def use(site: Site) -> None:
        for body, param in (
            ({**ASK, "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
            ({**ASK, "bootstrap_room": 3}, "bootstrap_room"),
            ({**ASK, "disagg_prefill_dp_rank": 0}, "disagg_prefill_dp_rank"),
            ({**ASK, "data_parallel_rank": 1}, "data_parallel_rank"),
            ({**ASK, "routed_dp_rank": 1}, "routed_dp_rank"),
            ({**ASK, "ec_transfer_params": {}}, "ec_transfer_params"),
            ({**ASK, "vllm_xargs": {"routed_dp_rank": "1"}}, "vllm_xargs"),
            ({**ASK, "vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
            ({"max_tokens": 1}, "prompt"),
            ({**ASK, "max_tokens": "x"}, "max_tokens"),
            ({**ASK, "model": None}, "model"),
            ({**ASK, "prompt": None}, "prompt"),
            ({**ASK, "prompt": 5}, "prompt"),
            ({**ASK, "prompt": {}}, "prompt"),
        ):
            reply = await site.post(body)
            assert (reply.status, msgspec.json.decode(reply.body)["error"]["param"]) == (400, param)
        for messages in (None, "hi", {}):
            reply = await site.post({"messages": messages}, chat=True)
            error = msgspec.json.decode(reply.body)["error"]
            assert (reply.status, error["param"]) == (400, "messages")
            assert error["message"] == "messages: must be a list of messages"
        assert (await site.post(b"{")).status == 400
        assert (await site.post({**ASK, "model": "other"})).status == 404
        assert not site.engines["a"].calls

    run(use, *ONE)


@pytest.mark.parametrize("pools", [ONE, NIXL])
def test_a_clients_4xx_is_the_clients(pools: list[Pool]) -> None:
    """The client gets the engine's message. The engine is not called again, and stays a member."""

    async def use(site: Site) -> None:
        reply = await site.post({**ASK, "max_tokens": 4_000, "prompt": "y" * 2_048})
        assert reply.status == 400
        error = msgspec.json.decode(reply.body)["error"]
        assert error["message"] == "maximum context length is 2048 tokens"
        assert error["type"] == "BadRequestError"
        assert sum(len(engine.calls) for engine in site.engines.values()) == 1
        assert len(site.conductor.instances()) == len(pools)
        assert text(await site.post(ASK)) == "".join(SAID)

    run(use, *pools)


@pytest.mark.parametrize("stream", [False, True])
def test_a_5xx_is_retried_elsewhere_at_most_three_times(stream: bool) -> None:
    """Another engine is called. After three failed attempts the client gets a 502."""
    pools: list[Pool] = [("a", "both", "none"), ("b", "both", "none")]

    async def use(site: Site) -> None:
        site.engines["a"].statuses.append(500)
        site.engines["b"].statuses.append(503)
        assert (await site.post({**ASK, "stream": stream})).status == 200
        assert sum(len(engine.calls) for engine in site.engines.values()) == 3
        for engine in site.engines.values():
            engine.statuses += [500, 500, 500]
        reply = await site.post({**ASK, "stream": stream})
        assert reply.status == 502
        assert sum(len(engine.calls) for engine in site.engines.values()) == 6

    run(use, *pools)


@pytest.mark.parametrize("pools", [[("a", "both", "none")], NIXL, MOONCAKE])
@pytest.mark.parametrize("stream", [False, True])
def test_engines_that_take_no_more_say_so_themselves(
    pools: list[Pool], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If all attempts end in 429 or 503, the client gets that status, with the engine's
    Retry-After, or one second. The engine's text is only in the log."""

    async def use(site: Site) -> None:
        name, engine = list(site.engines.items())[-1]  # the decode engine of a pair
        for status, headers, wait in ((429, {"retry-after": "7"}, "7"), (503, {}, "1")):
            engine.statuses += [status] * 3
            engine.headers = headers
            reply = await site.post({**ASK, "stream": stream})
            assert (reply.status, reply.headers["retry-after"]) == (status, wait), name
            assert b"no engine takes more requests now" in reply.body
            assert b"told to" not in reply.body
            assert "told to" in caplog.text
            caplog.clear()
            assert not engine.statuses
        engine.statuses += [429, 500, 500]
        assert (await site.post({**ASK, "stream": stream})).status == 502
        assert not site.conductor.core.promised().requests

    run(use, *pools)


@pytest.mark.parametrize("status", [401, 403])
def test_an_engine_that_does_not_take_our_key_is_no_fault_of_the_client(status: int) -> None:
    """Another engine is called."""

    async def use(site: Site) -> None:
        site.engines["a"].statuses.append(status)
        assert text(await site.post(ASK)) == "".join(SAID)
        assert site.calls == ["a", "b"]

    run(use, ("a", "both", "none"), ("b", "both", "none"))


def test_a_wrong_key_everywhere_is_a_502() -> None:
    """The client never gets the engine's 401."""

    async def use(site: Site) -> None:
        site.engines["a"].statuses += [401] * 4
        assert (await site.post(ASK)).status == 502

    run(use, ("a", "both", "none"))


def test_the_same_engine_is_not_called_again_at_once() -> None:
    """The only engine is called again after a pause; another one without a pause."""
    limits = msgspec.structs.replace(SHORT, again_s=3600.0)

    async def elsewhere(site: Site) -> None:
        site.engines["a"].statuses.append(500)
        assert (await site.post(ASK)).status == 200

    async def nowhere_else(site: Site) -> None:
        site.engines["a"].statuses.append(500)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await site.post(ASK)
        assert site.calls == ["a"]

    run(elsewhere, ("a", "both", "none"), ("b", "both", "none"), limits=limits)
    run(nowhere_else, ("a", "both", "none"), limits=limits)


ADDRESSES = ("10.0.0.5:8000", "[::1]:80", "a-b.c:1", "host:8000", "[fe80::1]:8000", "127.0.0.1:1")


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_of_engines_stay_here(address: str) -> None:
    """The error text that a client gets has the engine's name, and no address."""
    name = InstanceId("e")
    lost = UpstreamError(f"{address}: closed in the middle of its reply", sent=True)
    assert plain(CallLost.of(lost), name) == "e: closed in the middle of its reply"
    away = CallLost.of(UpstreamError(f"{address}: cannot connect: x", sent=False))
    assert (plain(away, name), away.unreachable) == ("e: it cannot be reached", True)
    assert address in away.in_full
    late = DeadlineExceeded(f"POST http://{address}/v1/completions: no reply within 60 s")
    assert plain(CallLost.of(late), name) == "e: POST (an address): no reply within 60 s"
    gone = CallLost(f"instance e is gone: lost: {address}: silent for 5 s")
    assert plain(gone, name) == "instance e is gone: lost: silent for 5 s"
    assert plain(CallLost("e answered 500"), name) == "e answered 500"


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        ("out of memory\n at 10.0.0.1:80", "out of memory at (an address)"),
        ('{"error":{"message":"it can\'t load \\"m\\"","code":500}}', 'it can\'t load "m"'),
        ('{"detail":"x' + "y" * 500, "x" + "y" * 299),
        (f"wrong input='{PROMPT}' here", "wrong input=(a quotation) here"),
        (f'{{"detail":[{{"input":"{PROMPT}"', '{"detail":[{"input":(a quotation)'),
        ("", ""),
    ],
)
def test_operators_see_an_engines_message_without_what_may_be_the_prompt(
    detail: str, said: str
) -> None:
    """It is short, and has no addresses and no long quotation."""
    assert CallLost("e answered 500", detail=detail).said == said


def test_an_engine_without_the_path_is_named_as_that() -> None:
    """Frameworks answer so for a path that they do not have; a missing model has a message."""
    said = msgspec.json.decode(refusal(404, b'{"detail":"Not Found"}', "rerank"))["error"]
    assert said["message"] == (
        "the engine has no path /v1/rerank: engines serve it if they have a reranking model; with"
        " others compare /v1/embeddings"
    )
    model = b'{"error":{"message":"The model `x` does not exist."}}'
    said = msgspec.json.decode(refusal(404, model, "rerank"))["error"]
    assert said["message"] == "The model `x` does not exist."


@pytest.mark.parametrize(
    ("body", "message", "param", "code"),
    [
        (
            b'{"error":{"message":"too long for 10.0.0.5:8000","param":"prompt","code":400}}',
            "too long for (an address)",
            "prompt",
            400,
        ),
        (b'{"object":"error","message":"too long","code":400}', "too long", None, 400),
        (b'{"error":"see http://vllm-0.ns.svc:8000/docs."}', "see (an address).", None, None),
        (
            b"<html>proxy 10.0.0.7</html>",
            "the engine refused the request with status 422",
            *[None] * 2,
        ),
        (b'{"error":{"message":["10.0.0.7"]}}', "the engine refused", None, None),
        (b"\xff\xfe", "the engine refused the request", None, None),
        (b'{"message":"%b"}' % (b"x" * 9_000), "x" * 4_000, None, None),
        (b'{"message":"at 12:30:45, version 1.2, f(x[0:2]), a.b, 3.5"}', "at 12:30:45", None, None),
    ],
)
def test_a_4xx_of_an_engine_has_no_address(
    body: bytes, message: str, param: str | None, code: int | None
) -> None:
    """Its message reaches the client in OpenAI's shape, whatever shape the engine's answer has."""
    error = msgspec.json.decode(refusal(422, body, "chat"))["error"]
    assert error["message"].startswith(message)
    assert "10.0.0" not in error["message"]
    assert (error["param"], error["code"]) == (param, code)
    if b"12:30" in body:
        assert error["message"] == msgspec.json.decode(body)["message"]


@pytest.mark.parametrize("status", [401, 403, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_an_engines_failure_is_for_operators_only(
    status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a text may have parts of keys and paths. The log names the request, and so may its
    explanation."""

    async def use(site: Site) -> None:
        site.engines["a"].statuses += [status] * 3
        reply = await site.post({**ASK, "stream": stream}, x_request_id="r-9")
        assert reply.status == (status if status == 503 else 502)
        assert b"told to" not in reply.body
        assert b"127.0.0.1" not in reply.body
        [line, *_] = [it.getMessage() for it in caplog.records if "told to" in it.getMessage()]
        assert line.startswith(f"r-9: the call to a failed: a answered {status}: ")
        shown = explained(record_of(site.conductor, "r-9"), lambda us: us)
        assert shown.said == "a: told to"
        assert "the instance that refused it, or whose call failed last, said: a: told to" in lines(
            shown
        )
        assert (shown.output_tokens, shown.actual_ttft_ms) == (0, None)

    run(use, *ONE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_an_engine_refuses_has_no_token_and_is_not_cancelled(stream: bool) -> None:
    """Operators see what the engine said. A timer may have taken its prefill for ended."""

    async def use(site: Site) -> None:
        site.engines["a"].statuses.append(400)
        reply = await site.post({**ASK, "stream": stream}, x_request_id="r-9")
        assert reply.status == 400
        await site.settled()
        record = record_of(site.conductor, "r-9")
        shown = explained(record, lambda us: us)
        assert (record.outcome, record.fate) == ("engine answered 400", "engine_refused")
        assert (shown.output_tokens, shown.actual_ttft_ms, shown.in_time) == (0, None, None)
        assert shown.said == "a: told to"

    run(use, *ONE)


@pytest.mark.parametrize(
    ("stream", "body", "why"),
    [
        (False, b"<html>told to</html>", b"a answered 200 with a reply that is no JSON"),
        (False, b'data: {"error":"told to"}\n\n', b"a answered 200 with a reply that is no JSON"),
        (True, b"data: [DONE]\n\n", b"a ended its stream before its first token"),
    ],
)
def test_a_reply_that_answers_nothing_is_a_failed_call(
    stream: bool, body: bytes, why: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status is 200. The client gets a 502 without it, and no token is counted."""

    async def answer(engine: FakeVllm, request: HttpRequest, chat: bool) -> Response:
        await request.body()
        return Response(200, body, content_type="text/html")

    async def use(site: Site) -> None:
        monkeypatch.setattr(FakeVllm, "_generate", answer)
        reply = await site.post({**ASK, "stream": stream}, x_request_id="r-9")
        assert reply.status == 502
        assert why in reply.body
        assert b"told to" not in reply.body
        record = record_of(site.conductor, "r-9")
        assert (record.fate, record.measured.tokens, record.ttft_us) == ("failed", 0, None)
        assert record.failed[-1].instance == "a"

    run(use, *ONE)


def test_an_estimated_length_refuses_nobody() -> None:
    """Images are much text and few tokens, so the engine decides whether a prompt is too long."""

    async def use(site: Site) -> None:
        reply = await site.post({**ASK, "prompt": "y" * 1_000_000})
        assert b"maximum context length is 2048" in reply.body
        assert len(site.engines["a"].calls) == 1

    run(use, *ONE)


def test_a_slow_engine_is_left_only_before_its_first_byte() -> None:
    """If the first token is late, another engine is called. If a later one is, the stream ends with
    an error."""
    pools: list[Pool] = [("a", "both", "none"), ("b", "both", "none")]

    async def use(site: Site) -> None:
        site.engines["a"].delay_s = 5
        words, _ = await streamed(site, ASK)
        assert words == SAID
        assert [engine.aborted for engine in site.engines.values()] == [1, 0]
        site.engines["a"].delay_s = 0
        for engine in site.engines.values():
            engine.token_s = 0.5
        words, events = await streamed(site, ASK)
        assert words == SAID[:1]
        assert events[-1]["error"]["type"] == "engine_error"

    run(use, *pools, limits=CallLimits(0.7, 0.7, 0.2, 0.1))


def test_who_failed_in_mid_stream_is_named() -> None:
    """The error event has the engine's name, not its address."""

    async def use(site: Site) -> None:
        site.engines["a"].cut_after = 2
        _, events = await streamed(site, ASK)
        message = events[-1]["error"]["message"]
        assert message.startswith("a: ")
        assert "127.0.0.1" not in message

    run(use, *ONE)


@pytest.mark.parametrize("pools", [NIXL, MOONCAKE])
def test_prefill_dies_before_its_kv_is_fetched(pools: list[Pool]) -> None:
    """Decode cannot get the KV any more: the gateway prefills again, and the text is right."""

    async def use(site: Site) -> None:
        first, second = site.engines["p"], site.engines["d"]
        second.hold = asyncio.Event()
        asking = asyncio.create_task(site.post(ASK))
        while not second.calls:
            await asyncio.sleep(0.01)
        await first.restart()
        second.hold.set()
        second.hold = None
        assert text(await asking) == "".join(SAID)
        assert [len(first.calls), len(second.calls)] == [2, 2]
        used = [call.body["kv_transfer_params"] for call in second.calls]
        assert used[0]["remote_engine_id"] != used[1]["remote_engine_id"]
        name = "remote_request_id" if pools is NIXL else "transfer_id"
        assert used[0][name] != used[1][name]

    run(use, *pools)


def once_prefilled(site: Site, do: Callable[[], None]) -> None:
    """Do this when the gateway first reports that a prefill has ended."""
    tell = site.conductor.tell
    happened: list[bool] = []

    def told(*facts: Fact) -> None:
        tell(*facts)
        if isinstance(facts[0], PrefillEnded) and not happened:
            happened.append(True)
            do()

    site.conductor.tell = told  # type: ignore[method-assign]


@pytest.mark.parametrize("pools", [NIXL, MOONCAKE])
def test_prefill_that_is_another_start_is_not_asked_for_old_kv(pools: list[Pool]) -> None:
    """Once the gateway knows of the restart, it does not call decode with the old parameters."""

    async def use(site: Site) -> None:
        once_prefilled(site, lambda: site.rejoin("p"))
        assert text(await site.post(ASK)) == "".join(SAID)
        assert [len(site.engines[name].calls) for name in "pd"] == [2, 1]

    run(use, *pools)


def test_a_bad_engine_id_is_asked_for_again() -> None:
    """Mooncake's prefill restarted unnoticed: decode answers 500, the gateway asks the bootstrap
    server, and retries once."""

    async def use(site: Site) -> None:
        assert text(await site.post(ASK)) == "".join(SAID)
        await site.engines["p"].restart()
        other = {**ASK, "prompt": "again, " + PROMPT}
        assert text(await site.post(other)) == "".join(spoken(list(other["prompt"].encode()), 4))
        names = [c.body["kv_transfer_params"]["remote_engine_id"] for c in site.engines["d"].calls]
        assert names == ["p-1-dp0", "p-1-dp0", "p-2-dp0"]

    run(use, *MOONCAKE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hung_transfer_ends_by_our_deadline(stream: bool) -> None:
    """Decode would wait for minutes for a transfer id that prefill does not know: the gateway
    cancels the call and starts anew."""

    async def use(site: Site) -> None:
        site.engines["p"].lost_handovers = 1
        reply = await site.post({**ASK, "stream": stream})
        assert reply.status == 200
        assert reply.body.count(SAID[0].encode()) >= 1
        assert site.engines["d"].aborted == 1
        assert len(site.engines["p"].calls) == 2

    run(use, *MOONCAKE, limits=CallLimits(5, 0.3, 5, 0.05))


def test_nixl_parameters_are_not_used_after_their_lease() -> None:
    """Old parameters give wrong text with status 200: a decode that comes too late prefills
    again."""

    async def use(site: Site) -> None:
        now_us = site.conductor.now_us

        def time_passes() -> None:
            site.conductor.now_us = lambda: now_us() + 26_000_000

        once_prefilled(site, time_passes)
        assert text(await site.post(ASK)) == "".join(SAID)
        assert [len(site.engines[name].calls) for name in "pd"] == [2, 1]

    run(use, *NIXL)


def slow_decode(site: Site, *pages: tuple[int, int, int] | None) -> None:
    """The decode engine takes a second for a whole reply.

    pages: its counts at each look: waiting, running and finished requests; None: it returns none.
    """
    engine, left = site.engines["d"], list(pages)
    engine.delay_s = 1.0

    def page() -> Page:
        said = left.pop(0) if len(left) > 1 else left[0]
        if said is None:
            raise EngineFailed("no page")
        waiting, running, finished = said
        return Page(ranks={"0": RankPage(waiting=waiting, running=running, finished=finished)})

    async def load() -> Page:
        return page()

    site.fleet.members[InstanceId("d")].load = load  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("pages", "prefills"),
    [
        ([(1, 3, 9)], 2),  # it waits until the KV is held no longer
        ([(2, 3, 9), None, (3, 3, 10)], 2),  # one of two has started, and a look failed
        ([(0, 4, 9)], 1),
        ([(2, 3, 9), (2, 4, 10)], 1),  # two have started: the call is one of them
        ([None], 1),  # the engine returns no counts
    ],
)
def test_a_whole_reply_is_not_waited_for_beyond_the_time_of_its_kv(
    pages: list[tuple[int, int, int] | None], prefills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's counts show whether a call has begun whose reply does not stream.

    If the engine kept it waiting, its KV may be another request's by now, and the gateway prefills
    again.
    """
    monkeypatch.setattr(lease, "_LOOK_S", 0.05)

    async def use(site: Site) -> None:
        slow_decode(site, *pages)

        def again() -> None:
            site.engines["d"].delay_s = 0.0

        loop = asyncio.get_running_loop()
        loop.call_later(0.3, again)
        assert text(await site.post(ASK)) == "".join(SAID)
        assert len(site.engines["p"].calls) == prefills
        assert site.engines["d"].aborted == prefills - 1

    run(use, *NIXL, limits=CallLimits(5, 0.4, 5, 0.5))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("renews", "prefills"), [(True, 1), (False, 2)])
def test_a_lease_that_decode_renews_does_not_end_while_it_waits(
    renews: bool, prefills: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer vLLM renews the lease as soon as decode's engine has the request. With older ones the
    first token must come within the lease."""
    monkeypatch.setattr(lease, "_LOOK_S", 0.05)
    monkeypatch.setattr(nixl, "LEASE_US", 300_000)

    async def use(site: Site) -> None:
        slow_decode(site, (1, 3, 9))
        site.engines["p"].renews = renews
        asyncio.get_running_loop().call_later(0.2, setattr, site.engines["d"], "delay_s", 0.0)
        assert (await site.post({**ASK, "stream": stream})).status == 200
        assert len(site.engines["p"].calls) == prefills

    run(use, *NIXL)


def test_the_time_to_a_first_token_is_noted_where_it_is_known() -> None:
    """For streams; for a pair's whole reply by prefill's end; for one engine's whole reply if it
    has a single token."""

    async def use(site: Site) -> None:
        def count() -> int:
            return sum(ttft._counts)

        ttft = site.front.metrics.ttft
        last = site.engines[list(site.engines)[-1]]
        paired = len(site.engines) > 1
        await streamed(site, ASK)
        assert (count(), len(site.fleet.notes[-1].said)) == (1, 1)
        last.delay_s = 0.3
        await site.post({**ASK, "prompt": "another " + PROMPT})
        assert (count(), len(site.fleet.notes[-1].said)) == (1 + paired, 1)
        before = ttft._sum_s
        assert not paired or before < 0.3, "prefill's end, not the reply's"
        await site.post({"prompt": "a third " + PROMPT, "max_tokens": 1})
        assert count() == 2 + paired
        assert ttft._sum_s - before >= 0.3
        assert site.fleet.notes[-1].streams == (not paired)

    for pools in (ONE, NIXL, MOONCAKE):
        run(use, *pools)


def test_an_engine_that_says_in_its_stream_that_it_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the first token it is a failed call, as a 5xx is. After it, the client gets an error
    event without the engine's text, which is in the log."""
    pools: list[Pool] = [("a", "both", "none"), ("b", "both", "none")]

    async def use(site: Site) -> None:
        site.engines["a"].error_after = 0
        assert (await streamed(site, ASK))[0] == SAID
        assert [len(engine.calls) for engine in site.engines.values()] == [1, 1]
        for engine in site.engines.values():
            engine.error_after = 2
        words, events = await streamed(site, ASK)
        message = events[-1]["error"]["message"]
        assert words == SAID[:2]
        assert ": the engine reported an error in its stream; " in message
        assert "EngineCore died" in caplog.text
        assert [record.outcome for record in site.conductor.account.latest()] == [
            "failed",
            "length",
        ]

    run(use, *pools)


def test_decode_dies_before_a_whole_reply() -> None:
    """The client has received nothing, so another engine decodes."""

    async def use(site: Site) -> None:
        await site.add("e", "decode", "nixl")
        asked = site.engines["d"], site.engines["e"]
        for engine in asked:
            engine.token_s = 0.1
        asking = asyncio.create_task(site.post(ASK))
        while not any(engine.running for engine in asked):
            await asyncio.sleep(0.01)
        at = next(engine for engine in asked if engine.running)
        await at.stop()
        assert text(await asking) == "".join(SAID)

    run(use, *NIXL)


def test_a_client_that_leaves_in_mid_stream_ends_it() -> None:
    """Its engine sees the end of the connection; nothing stays promised."""

    async def use(site: Site) -> None:
        site.engines["d"].token_s = 0.05
        async with site.stream({**ASK, "max_tokens": 50}) as events:
            await anext(events)
        async with asyncio.timeout(5):
            while not site.engines["d"].aborted:
                await asyncio.sleep(0.01)

    run(use, *NIXL)


def test_an_instance_that_is_lost_in_mid_stream_ends_the_stream() -> None:
    """The stream's last event has the reason."""

    async def use(site: Site) -> None:
        site.engines["a"].token_s = 0.1
        async with site.stream(ASK) as events:
            seen = [await anext(events)]
            site.rejoin("a")
            seen += [event async for event in events]
        assert "restarted" in seen[-1]["error"]["message"]

    run(use, *ONE)


# Prompts.


def test_prompts_are_read_as_well_as_may_be() -> None:
    """By the client's ids, our tokenizer, an engine's, or the text. The metrics count each way."""

    async def use(site: Site) -> None:
        tool = {"type": "function", "function": {"name": "look"}}
        messages = [{"role": "user", "content": "hello there"}]
        await site.post({"prompt": [1, 2, 3], "max_tokens": 1})
        await site.post({"prompt": "text", "max_tokens": 1})
        site.fleet.exact = ByteText()  # type: ignore[assignment]
        await site.post({"messages": messages, "max_tokens": 1}, chat=True)
        await site.post({"messages": messages, "tools": [tool], "max_tokens": 1}, chat=True)
        assert [note.prompt for note in site.fleet.notes] == [3, 1, 18, 66]
        await site.post({"prompt": ["one", "two"], "max_tokens": 1})
        how = site.backend.reader.read
        assert how == {"ids": 1, "text": 1, "tokens": 1, "engine": 1, "unread": 1}
        page = await site.front.metrics.text()
        assert b'moonserve_prompts_read_total{how="engine"} 1.0' in page

    run(use, *ONE)


def test_the_next_engine_makes_tokens_where_one_did_not() -> None:
    """An engine that does not answer is not asked twice in a row."""
    pools: list[Pool] = [("a", "both", "none"), ("b", "both", "none")]

    async def use(site: Site) -> None:
        tools = [{"type": "function", "function": {"name": "look"}}]
        ask = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 1}
        site.fleet.exact = ByteText()  # type: ignore[assignment]
        site.fleet.members[InstanceId("a")].url = "http://127.0.0.1:9"
        for _ in range(3):
            parsed(await site.post(ask, chat=True))
        assert site.backend.reader.read == {"unread": 1, "engine": 2}

    run(use, *pools)


def test_what_follows_a_streams_end_is_read_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine goes on sending after its last event, the gateway stops reading when the
    client's stream has ended."""
    monkeypatch.setattr(external, "_DRAIN_S", 0.2)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        said = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + said)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b": more\n\n")
                await writer.drain()
                await asyncio.sleep(0.05)

    async def use(site: Site) -> None:
        async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            site.fleet.members[InstanceId("a")].url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(5):
                reply = await site.post(ASK | {"stream": True})
            assert b"data: [DONE]\n\n" in reply.body

    run(use, *ONE)


def test_where_nothing_is_told_the_index_follows_what_was_sent() -> None:
    """A prompt that shares a long beginning goes to the engine that has it, and the reused tokens
    confirm that."""
    pools: list[Pool] = [("a", "both", "none"), ("b", "both", "none"), ("c", "both", "none")]

    async def use(site: Site) -> None:
        head = PROMPT * 6
        for tail in ("one", "two", "three", "four"):
            await site.post({**ASK, "prompt": head + tail})
            await site.post({**ASK, "prompt": tail * 40})
        asked = {
            name: sum(call.body["prompt"].startswith(head) for call in engine.calls)
            for name, engine in site.engines.items()
        }
        assert sorted(asked.values()) == [0, 0, 4]
        assert site.conductor.core.index.entries > 0

    run(use, *pools, tuning=Tuning(policy="cache_aware"))


def test_tbt_and_tokens_are_noted_for_the_fleet() -> None:
    """Each call is reported from its sending to its end, with its tokens and cached tokens."""

    async def use(site: Site) -> None:
        await streamed(site, {**ASK, "stream_options": {"include_usage": True}})
        first, second = site.fleet.notes
        assert (first.instance, first.part, first.count, first.said) == ("p", "prefill", 1, [0])
        assert (second.instance, second.part, second.count) == ("d", "decode", 4)
        assert (first.over, second.over) == (1, 1)

    run(use, *NIXL)


def test_blocks_that_a_shared_store_has_lost_are_told() -> None:
    """An engine that loads from a shared store and reports less cached than expected did not find
    the rest."""

    async def use(site: Site) -> None:
        site.fleet.exact = ByteText()  # type: ignore[assignment]
        info = site.fleet.members[InstanceId("a")].infos[InstanceId("a")]
        site.join(msgspec.structs.replace(info, epoch=2, fetches=True))
        ids, size = list(range(1, 100)), info.namespace.block_size
        keys = tuple(chain_keys(info.namespace.root(), ids, size))
        site.conductor.tell(BlocksStored(POOL, keys, None, "dram", 0))
        for _ in range(2):  # the second time, the engine has it in its own cache
            await site.post({"prompt": ids, "max_tokens": 1})
            assert tuple(site.fleet.lacking) == keys

    run(use, *ONE)
