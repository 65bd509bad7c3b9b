"""Responses, Messages, embeddings, reranking, scores and tokenizers before external engines.

Over real sockets, with tests.support.fake_vllm. Every test ends with a ledger of zeros.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import openai
import pytest

from moonserve.core.schedule.facts import Connector, Role
from moonserve.core.units import InstanceId
from moonserve.live.http.client import ClientResponse
from moonserve.live.openai.request import PATHS
from tests.support.external_site import Site, run
from tests.support.fake_forms import MESSAGES, RESPONSES
from tests.support.fake_vllm import spoken
from tests.support.records import record_of
from tests.support.serving import ByteText

Pool = tuple[str, Role, Connector]
ONE: list[Pool] = [("a", "both", "none")]
TWO: list[Pool] = [*ONE, ("b", "both", "none")]
NIXL: list[Pool] = [("p", "prefill", "nixl"), ("d", "decode", "nixl")]
MOONCAKE: list[Pool] = [("p", "prefill", "mooncake"), ("d", "decode", "mooncake")]
LONG = "the quick brown fox jumps over the lazy dog, and then once more. " * 3
USER = {"role": "user", "content": LONG}
ASKS: dict[str, dict[str, Any]] = {
    MESSAGES: {"system": "Be kind.", "messages": [USER], "max_tokens": 4},
    RESPONSES: {"instructions": "Be kind.", "input": LONG, "max_output_tokens": 4},
}
PROMPT = ByteText().encode(
    ByteText().render_chat([{"role": "system", "content": "Be kind."}, USER]), add_bos=False
)
SAID = spoken(PROMPT, 4)


def parsed(reply: ClientResponse) -> dict[str, Any]:
    """The body of a reply with status 200."""
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body)


def fault(reply: ClientResponse) -> dict[str, Any]:
    """The error in a body."""
    found: dict[str, Any] = msgspec.json.decode(reply.body)["error"]
    return found


async def events(site: Site, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its name."""
    raw = msgspec.json.encode({"model": "m", "stream": True, **body})
    async with site.http.stream(
        "POST", site.url + path, body=raw, timeout_s=20, idle_timeout_s=20
    ) as reply:
        assert reply.status == 200, await reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = b"".join([chunk async for chunk in reply]).decode()
    found = []
    for event in data.removesuffix("\n\n").split("\n\n"):
        name, _, fields = event.partition("\n")
        found.append((name.removeprefix("event: "), msgspec.json.decode(fields[6:])))
    return found


def text_of(path: str, reply: dict[str, Any]) -> str:
    """The text of a whole reply."""
    if path == MESSAGES:
        return reply["content"][0]["text"]
    return reply["output"][0]["content"][0]["text"]


def reused(path: str, reply: dict[str, Any]) -> Any:
    """Prompt tokens that were reused, as the reply's usage has them."""
    usage = reply["usage"]
    if path == MESSAGES:
        return usage["cache_read_input_tokens"]
    return usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("pools", [ONE, NIXL, MOONCAKE])
def test_a_pair_answers_as_one_engine_does(pools: Sequence[Pool], path: str) -> None:
    """Whole and streamed: text, end and usage are those of the engine, and of its prefill what was
    reused."""

    async def use(site: Site) -> None:
        reply = parsed(await site.send(path, ASKS[path], x_request_id="r-1"))
        assert text_of(path, reply) == "".join(SAID)
        assert reused(path, reply) == 0
        again = parsed(await site.send(path, ASKS[path]))
        assert reused(path, again) == 192
        seen = await events(site, path, ASKS[path])
        await site.settled()
        record = record_of(site.conductor, "r-1")
        assert record.measured.tokens == 4
        assert record.outcome == "length"
        streamed = next(site.conductor.account.latest())
        assert streamed.measured.cached_tokens == 192
        assert streamed.measured.tokens == 4
        if path == MESSAGES:
            words = [it["delta"]["text"] for name, it in seen if name == "content_block_delta"]
            whole = {"usage": seen[-2][1]["usage"]}
            first = seen[0][1]["message"]["usage"]
            assert first["input_tokens"] + first["cache_read_input_tokens"] == len(PROMPT)
            assert seen[-1][0] == "message_stop"
        else:
            words = [it["delta"] for name, it in seen if name == "response.output_text.delta"]
            whole = seen[-1][1]["response"]
            assert seen[0][0] == "response.created"
            assert seen[-1][0] == "response.completed"
        assert words == SAID
        assert reused(path, whole) == 192

    run(use, *pools)


@pytest.mark.parametrize("path", ASKS)
def test_prefill_is_asked_for_one_token_and_decode_gets_the_body(path: str) -> None:
    """The prefill's limit is 1, and nothing of it is streamed or kept; decode's body is the
    client's with the parameters at its end."""

    async def use(site: Site) -> None:
        await events(site, path, {**ASKS[path], "unheard_of": [1, None]})
        (prefill,), (decode,) = site.engines["p"].calls, site.engines["d"].calls
        assert prefill.path == decode.path == path
        limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
        assert (prefill.body[limit], prefill.body["stream"]) == (1, False)
        assert prefill.body.get("store") is (None if path == MESSAGES else False)
        assert prefill.body["unheard_of"] == decode.body["unheard_of"] == [1, None]
        assert (decode.body[limit], decode.body["stream"]) == (4, True)
        assert decode.body["kv_transfer_params"]["do_remote_prefill"]

    run(use, *NIXL)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (MESSAGES, {"tool_choice": {"type": "any"}, "tools": [{"name": "f"}]}),
        (MESSAGES, {"tools": [{"name": "f", "type": "web_search_20250305"}]}),
        (RESPONSES, {"tool_choice": "required", "tools": [{"type": "function", "name": "f"}]}),
        (RESPONSES, {"tools": [{"type": "code_interpreter"}]}),
        (RESPONSES, {"tools": "nonsense"}),
    ],
)
def test_what_two_engines_cannot_serve_goes_to_one(path: str, more: dict[str, Any]) -> None:
    """A tool that must be called, or that the engine runs, is for one engine."""

    async def use(site: Site) -> None:
        parsed(await site.send(path, {**ASKS[path], **more}))
        assert site.calls == ["d"]
        assert "kv_transfer_params" not in site.engines["d"].calls[0].body

    run(use, *NIXL)


def test_free_tools_go_through_a_pair() -> None:
    """Tools that the client runs need no second prompt."""

    async def use(site: Site) -> None:
        tools = [{"type": "function", "name": "f", "parameters": {}}]
        await site.send(RESPONSES, {**ASKS[RESPONSES], "tools": tools, "tool_choice": "auto"})
        tool = {"name": "f", "input_schema": {"type": "object"}}
        auto = {"type": "auto", "disable_parallel_tool_use": True}
        await site.send(MESSAGES, {**ASKS[MESSAGES], "tools": [tool], "tool_choice": auto})
        assert site.calls == ["p", "d"] * 2

    run(use, *NIXL)


@pytest.mark.parametrize("path", ASKS)
def test_a_conversation_goes_where_its_beginning_is(path: str) -> None:
    """By its text, tools and system first; what coding agents change in each turn does not
    count."""

    def turn(number: int, *said: dict[str, Any]) -> dict[str, Any]:
        block = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        if path == RESPONSES:
            return {**ASKS[path], "input": [USER, *said]}
        last = {"role": "user", "content": [{"type": "text", "text": LONG}]}
        if not said:
            last["content"][0]["cache_control"] = {"type": "ephemeral"}
        system = [block, {"type": "text", "text": "Be kind."}]
        return {"system": system, "messages": [last, *said], "max_tokens": 4}

    async def use(site: Site) -> None:
        await site.send(path, turn(1))
        first = site.calls[0]
        answer = [{"role": "assistant", "content": "".join(SAID)}, {**USER, "content": "more"}]
        await site.send(path, turn(2, *answer), x_request_id="r-2")
        assert site.calls == [first, first]
        assert record_of(site.conductor, "r-2").decision.reused_tokens >= 32

    run(use, *TWO)


@pytest.mark.parametrize("path", ASKS)
def test_an_engine_makes_the_tokens_where_events_are_read(path: str) -> None:
    """Only the engine knows how it makes a chat of such a body: vLLM's /render says it."""

    async def use(site: Site) -> None:
        site.fleet.exact = ByteText()
        parsed(await site.send(path, ASKS[path], x_request_id="r-1"))
        assert site.backend.reader.read == {"engine": 1}
        assert record_of(site.conductor, "r-1").prompt_tokens == len(PROMPT)

    run(use, *ONE)


def test_embeddings_and_documents_are_one_call_to_an_engine() -> None:
    """They pass as they came; the Conductor counts their prompt, and no token of an answer."""

    async def use(site: Site) -> None:
        body = {"input": [LONG, "b"], "encoding_format": "float"}
        reply = parsed(await site.send("/v1/embeddings", body, x_request_id="r-1"))
        assert [it["embedding"] for it in reply["data"]] == [[195.0, 0.5], [1.0, 0.5]]
        documents = ["a cat", "the sea at night"]
        ask = {"query": "sea night", "documents": documents}
        ranked = parsed(await site.send("/v1/rerank", ask))
        assert [it["index"] for it in ranked["results"]] == [1, 0]
        pair = {"text_1": "sea", "text_2": ["a cat", "the sea"]}
        scored = parsed(await site.send("/score", pair))
        assert [it["score"] for it in scored["data"]] == [0, 0.5]
        assert site.engines["a"].calls[0].body == {"model": "m", **body}
        await site.settled()
        record = record_of(site.conductor, "r-1")
        assert (record.outcome, record.measured.tokens) == ("done", 0)
        assert site.front.metrics.completion_tokens == 0
        others = "sea night" + "".join(documents) + "sea" + "a cat" + "the sea"
        assert site.front.metrics.prompt_tokens == 196 + len(others)

    run(use, *ONE)


def test_embeddings_of_a_pair_are_one_call() -> None:
    """No KV is handed over for them."""

    async def use(site: Site) -> None:
        parsed(await site.send("/v1/embeddings", {"input": "a"}))
        assert site.calls == ["d"]

    run(use, *NIXL)


def test_tokens_are_made_by_any_engine() -> None:
    """Nothing is promised for them; a chat is as good as text; the next engine answers where one
    does not."""

    async def use(site: Site) -> None:
        made = parsed(await site.send("/tokenize", {"prompt": "sea"}))
        assert (made["count"], made["tokens"]) == (3, [115, 101, 97])
        chat = parsed(await site.send("/tokenize", {"messages": [USER]}))
        assert chat["count"] > len(LONG)
        text = parsed(await site.send("/detokenize", {"tokens": made["tokens"]}))
        assert text == {"prompt": "sea"}
        asked = {"system": "Be kind.", "messages": [USER]}
        counted = parsed(await site.send("/v1/messages/count_tokens", asked))
        assert counted == {"input_tokens": len(PROMPT)}
        await site.engines["p"].stop()
        for _ in range(8):
            assert parsed(await site.send("/tokenize", {"prompt": "sea"}))["count"] == 3
        assert not [*site.conductor.account.latest()]
        page = await site.front.metrics.text()
        assert b'moonserve_requests_total{route="/tokenize",status="200"} 10.0' in page
        await site.engines["d"].stop()
        reply = await site.send("/tokenize", {"prompt": "sea"})
        assert reply.status == 502

    run(use, *NIXL)


def test_a_list_of_prompts_is_one_request() -> None:
    """It passes as it came, to one engine of a pair."""

    async def use(site: Site) -> None:
        reply = await site.send("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2})
        assert site.calls == ["d"]
        assert reply.status != 502

    run(use, *NIXL)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": {}}, "input"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": "a", "max_output_tokens": "x"}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "kv_transfer_params": {}}, "kv_transfer_params"),
        (RESPONSES, {"input": "a", "vllm_xargs": {"kv_transfer_params": 1}}, "vllm_xargs"),
        (MESSAGES, {"max_tokens": 1}, "messages"),
        (MESSAGES, {"messages": "a", "max_tokens": 1}, "messages"),
        (MESSAGES, {"messages": [], "max_tokens": "x"}, "max_tokens"),
        (MESSAGES, {"messages": [], "kv_transfer_params": {}}, "kv_transfer_params"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": 1}, "input"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/v1/messages/count_tokens", {"messages": "a"}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(path: str, body: dict[str, Any], param: str) -> None:
    """400 before any engine is called, in the shape of the path."""

    async def use(site: Site) -> None:
        reply = await site.send(path, body)
        assert reply.status == 400
        error = fault(reply)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param)
        is_anthropics = path.startswith(MESSAGES)
        assert (msgspec.json.decode(reply.body).get("type") == "error") == is_anthropics
        assert not site.calls

    run(use, *ONE)


def test_errors_of_messages_have_anthropics_shape() -> None:
    """Of the gateway and of engines, whole and in a stream."""

    async def use(site: Site) -> None:
        def said(reply: ClientResponse) -> tuple[int, str, str]:
            body = msgspec.json.decode(reply.body)
            return reply.status, body["type"], body["error"]["type"]

        ask = ASKS[MESSAGES]
        other = await site.send(MESSAGES, {**ask, "model": "x"})
        assert said(other) == (404, "error", "not_found_error")
        assert said(await site.send(MESSAGES, {**ask, "max_tokens": -1})) == (
            400,
            "error",
            "invalid_request_error",
        )
        site.engines["a"].statuses.extend([429] * 3)
        site.engines["a"].headers = {"retry-after": "7"}
        busy = await site.send(MESSAGES, ask)
        assert said(busy) == (429, "error", "rate_limit_error")
        assert busy.headers["retry-after"] == "7"

    run(use, *ONE)


def test_refusals_are_of_the_path_and_name_a_time() -> None:
    """A 429 of the Conductor, with Retry-After, for each form that needs an instance."""

    async def use(site: Site) -> None:
        engine = site.engines["a"]
        info = site.fleet.members[InstanceId("a")].infos[InstanceId("a")]
        site.join(msgspec.structs.replace(info, epoch=2, max_requests=1))
        engine.hold = asyncio.Event()
        first = asyncio.create_task(site.send(MESSAGES, ASKS[MESSAGES]))
        while not engine.running:
            await asyncio.sleep(0)
        for path in (RESPONSES, MESSAGES, "/v1/embeddings", "/v1/rerank"):
            body = ASKS.get(path, {"input": LONG, "query": "a", "documents": [LONG]})
            reply = await site.send(path, body)
            assert reply.status == 429, (path, reply.body)
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["x-moonserve-reject-reason"] == "instances_full"
            kind = "rate_limit_error" if path == MESSAGES else "overloaded_error"
            assert fault(reply)["type"] == kind
        engine.hold.set()
        assert (await first).status == 200
        assert len(site.calls) == 1

    run(use, *ONE)


@pytest.mark.parametrize("path", ASKS)
def test_a_stream_that_breaks_ends_with_an_event_of_its_api(path: str) -> None:
    """Its name is error; before the first token another engine is called instead."""

    async def use(site: Site) -> None:
        site.engines["a"].cut_after = 0
        site.engines["b"].cut_after = 2
        for _ in range(2):
            seen = await events(site, path, ASKS[path])
            assert seen[-1][0] == "error"
            assert seen[-1][1]["type"] == "error"
            assert "b" in seen[-1][1]["error"]["message"]
            deltas = [name for name, _ in seen if name.endswith("delta")]
            assert len(deltas) == 2
            assert [name for name, _ in seen].count(seen[0][0]) == 1

    run(use, *TWO)


@pytest.mark.parametrize("path", [*ASKS, "/v1/embeddings", "/v1/rerank"])
def test_a_client_that_leaves_frees_what_was_promised(path: str) -> None:
    """Its engine stops, and the ledger is zero."""

    async def use(site: Site) -> None:
        engine = site.engines["a"]
        engine.hold = asyncio.Event()
        body = ASKS.get(path, {"input": LONG, "query": "a", "documents": [LONG]})
        task = asyncio.create_task(site.send(path, body))
        while not engine.running:
            await asyncio.sleep(0)
        task.cancel()
        await site.settled()
        assert engine.aborted == 1

    run(use, *ONE)


def test_sglangs_pairs_are_for_chat_and_completions() -> None:
    """Other forms would not meet in their room: a 400 that says what to use."""

    async def use(site: Site) -> None:
        for path in (RESPONSES, MESSAGES, "/v1/embeddings"):
            reply = await site.send(path, {**ASKS.get(path, {"input": "a"})})
            assert reply.status == 400
            assert fault(reply)["param"] == "model"
            assert PATHS["chat"] in fault(reply)["message"]

    run(use, ("p", "prefill", "sglang"), ("d", "decode", "sglang"))


def test_openais_client_reads_responses_and_embeddings() -> None:
    """Whole and streamed through a pair; a stream that breaks raises an error there."""

    def work(site: Site) -> None:
        base = site.url + "/v1"
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=10)
        ask: Any = {"model": "m", "input": LONG, "instructions": "Be kind.", "max_output_tokens": 4}
        assert client.responses.create(**ask).output_text == "".join(SAID)
        seen = list(client.responses.create(stream=True, **ask))
        assert [it.delta for it in seen if it.type == "response.output_text.delta"] == SAID
        assert seen[-1].type == "response.completed"
        vectors = client.embeddings.create(model="m", input=["a", "bc"], encoding_format="float")
        assert [it.embedding for it in vectors.data] == [[1.0, 0.5], [2.0, 0.5]]
        site.engines["d"].cut_after = 2
        with pytest.raises(openai.APIError, match="closed in the middle"):
            list(client.responses.create(stream=True, **ask))

    async def use(site: Site) -> None:
        await asyncio.to_thread(work, site)

    run(use, *NIXL)
