"""Responses, Messages and tokenizers with our own workers, over a scripted cluster.

The shapes are those of the APIs' documents; tests/clients reads them with the real packages.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from moonserve.core.errors import EngineFailed, MoonserveError, Overloaded
from moonserve.core.request import Sampling
from tests.support.gateway_rig import Rig, parsed, run
from tests.support.serving import ByteText, say

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
ASKS: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "m", "input": "hi", "max_output_tokens": 50},
    MESSAGES: {"model": "m", "messages": [HI], "max_tokens": 50},
    COUNT: {"model": "m", "messages": [HI]},
}
PROMPT = b"user: hi\n"


async def events(rig: Rig, path: str, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is its type."""
    reply = await rig.post(path, {**ASKS[path], "stream": True, **more})
    assert reply.status == 200, reply.body
    found = []
    for event in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        found.append(fields)
    return found


def test_a_whole_response() -> None:
    """The text, the status, what the client asked for, and usage with what was reused."""

    async def use(rig: Rig) -> None:
        more = {"instructions": "Be kind.", "temperature": 0.5, "metadata": {"a": "b"}}
        got = parsed(await rig.post(RESPONSES, {**ASKS[RESPONSES], **more}, x_request_id="r"))
        assert (got["id"], got["object"], got["status"]) == ("resp_r", "response", "completed")
        (item,) = got["output"]
        assert item == {
            "id": "msg_r",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
            ],
        }
        assert got["usage"] == {
            "input_tokens": 26,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 32,
        }
        assert (got["instructions"], got["metadata"]) == ("Be kind.", {"a": "b"})
        assert (got["temperature"], got["max_output_tokens"], got["store"]) == (0.5, 50, False)
        request = rig.serving.requests[0]
        assert bytes(request.prompt) == b"system: Be kind.\n" + PROMPT
        assert request.stopping.max_tokens == 50
        assert request.sampling == Sampling(0.5, seed=request.sampling.seed)

    run(use, *say("hello", cached=4))


def test_a_response_whose_text_is_cut_is_incomplete() -> None:
    """It names the reason, whole and streamed."""
    script = say("hello")[:-1]
    script[-1] = type(script[-1])(script[-1].token_ids, "length")

    async def use(rig: Rig) -> None:
        got = parsed(await rig.post(RESPONSES, ASKS[RESPONSES]))
        assert got["status"] == got["output"][0]["status"] == "incomplete"
        assert got["incomplete_details"] == {"reason": "max_output_tokens"}
        last = (await events(rig, RESPONSES))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["output"][0]["content"][0]["text"] == "hello"

    run(use, *script)


def test_a_conversation_of_items() -> None:
    """Messages with parts of text, of every role, are the conversation that chat would have."""
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
    ]

    async def use(rig: Rig) -> None:
        parsed(await rig.post(RESPONSES, {**ASKS[RESPONSES], "input": items}))
        assert bytes(rig.serving.requests[0].prompt) == b"system: d\nuser: a\nassistant: b\n"

    run(use)


def test_the_events_of_a_response() -> None:
    """They come in the API's order with numbers without a gap, and the deltas are the text."""

    async def use(rig: Rig) -> None:
        seen = await events(rig, RESPONSES)
        assert [it["sequence_number"] for it in seen] == list(range(len(seen)))
        kinds = [it["type"].removeprefix("response.") for it in seen]
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * 3,
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert [it["delta"] for it in seen if "delta" in it] == ["he", "ll", "o"]
        assert seen[0]["response"]["status"] == "in_progress"
        assert seen[0]["response"]["output"] == []
        assert seen[0]["response"]["usage"] is None
        places = [(it["item_id"], it["content_index"]) for it in seen if "content_index" in it]
        assert set(places) == {(seen[2]["item"]["id"], 0)}
        assert seen[-1]["response"]["output"] == [seen[-2]["item"]]
        assert seen[-2]["item"]["content"] == [seen[-3]["part"]]
        assert seen[-3]["part"]["text"] == seen[-4]["text"] == "hello"
        assert seen[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 4

    run(use, *say("hello", 2, cached=4))


def test_a_whole_message() -> None:
    """The text, why it ended, and usage whose input tokens are those that were not reused."""

    async def use(rig: Rig) -> None:
        more = {"system": [{"type": "text", "text": "Be kind."}], "top_k": 3}
        got = parsed(await rig.post(MESSAGES, {**ASKS[MESSAGES], **more}, x_request_id="r"))
        assert got == {
            "id": "msg_r",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 22,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 0,
                "output_tokens": 6,
            },
        }
        request = rig.serving.requests[0]
        assert bytes(request.prompt) == b"system: Be kind.\n" + PROMPT
        assert (request.sampling.top_k, request.stopping.max_tokens) == (3, 50)

    run(use, *say("hello", cached=4))


def test_the_events_of_a_message() -> None:
    """They come in the API's order, and the deltas are the text."""

    async def use(rig: Rig) -> None:
        seen = await events(rig, MESSAGES)
        assert [it["type"] for it in seen] == [
            *("message_start", "content_block_start"),
            *["content_block_delta"] * 3,
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        started = seen[0]["message"]
        assert (started["content"], started["stop_reason"]) == ([], None)
        usage = started["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 4)
        words = [it["delta"]["text"] for it in seen if it["type"] == "content_block_delta"]
        assert words == ["he", "ll", "o"]
        assert seen[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert seen[-2]["usage"]["output_tokens"] == 6

    run(use, *say("hello", 2, cached=4))


def test_a_message_names_the_stop_sequence_that_ended_it() -> None:
    """Whole and streamed; and a message that reached its limit says so."""

    async def use(rig: Rig) -> None:
        stops = {"stop_sequences": ["x", "ll"]}
        got = parsed(await rig.post(MESSAGES, {**ASKS[MESSAGES], **stops}))
        assert got["content"] == [{"type": "text", "text": "he"}]
        assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "ll")
        seen = await events(rig, MESSAGES, **stops)
        assert seen[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "ll"}
        rig.serving.script = [type(it)(it.token_ids, "length") for it in say("a")[:1]]
        assert parsed(await rig.post(MESSAGES, ASKS[MESSAGES]))["stop_reason"] == "max_tokens"

    run(use, *say("hello"))


BLOCK = {"role": "user", "content": [{"type": "image", "source": {}}]}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": 3}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        (RESPONSES, {"input": [{}]}, "input[0].role"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (RESPONSES, {"input": "forbidden"}, "input"),
        (RESPONSES, {"input": "a" * 99}, "input"),
        (RESPONSES, {"input": "a" * 999}, "input"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"store": True}, "store"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format.type"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"metadata": {"a": 1}}, "metadata[...]"),
        (RESPONSES, {"temperature": 3}, "temperature"),
        (RESPONSES, {"max_tokens": 3}, "max_tokens"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "text"}]}]},
         "input[0].content[0].text"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [HI, BLOCK]}, "messages[1].content[0].type"),
        (MESSAGES, {"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        (MESSAGES, {"system": [{"type": "image"}]}, "system[0].type"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
        (MESSAGES, {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        (COUNT, {"messages": [BLOCK]}, "messages[0].content[0].type"),
        (MESSAGES, {"stop": "a"}, "stop"),
        (COUNT, {"instructions": "a"}, "instructions"),
        ("/tokenize", {"model": "m"}, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "a", "messages": [HI]}, "prompt"),
        ("/tokenize", {"model": "m", "prompt": "a", "add_special_tokens": False},
         "add_special_tokens"),
        ("/detokenize", {"model": "m", "tokens": [1, 999]}, "tokens[1]"),
        ("/detokenize", {"model": "m", "tokens": [1] * 1_000_001}, "tokens"),
        ("/detokenize", {"model": "m", "tokens": ["a"]}, "tokens[0]"),
    ],
)  # fmt: skip
def test_a_400_names_the_field(path: str, more: dict[str, Any], param: str) -> None:
    """In the shape of its API, before any work is spent."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(path, {**ASKS.get(path, {}), **more})
        assert reply.status == 400, reply.body
        got = json.loads(reply.body)
        assert got.get("type") == ("error" if path in (MESSAGES, COUNT) else None)
        assert got["error"]["param"] == param
        assert got["error"]["type"] == "invalid_request_error"
        assert not rig.serving.requests

    run(use)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/embeddings", "engines serve it if they have an embedding model"),
        ("/v1/rerank", "reranking model; with others compare /v1/embeddings"),
        ("/score", "with others use /v1/rerank"),
    ],
)
def test_a_path_of_external_engines_names_them(path: str, remedy: str) -> None:
    """The 404 says which gateway and which engines serve it."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(path, {"model": "m", "input": "a"})
        message = json.loads(reply.body)["error"]["message"]
        assert reply.status == 404
        assert message.startswith(f"there is no path {path} here: workers of moonserve do not")
        assert "moonserve gateway --url ENGINE" in message
        assert message.endswith(remedy)

    run(use)


TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
    RESPONSES: {"type": "function", "name": "f"},
    MESSAGES: {"name": "f", "input_schema": {}},
    COUNT: {"name": "f", "input_schema": {}},
}


@pytest.mark.parametrize("path", TOOLS)
def test_a_model_whose_template_has_no_place_for_tools(path: str) -> None:
    """A 400 blames the model, for tools and for a conversation that had them."""
    chat = {"model": "m", "messages": [HI]}

    class NoTools(ByteText):
        knows_tools = False

    async def use(rig: Rig) -> None:
        body = {**ASKS.get(path, chat), "tools": [TOOLS[path]]}
        error = json.loads((await rig.post(path, body)).body)["error"]
        assert (error["code"], error["param"]) == ("model_without_tools", "tools")
        assert "chat template of 'm'" in error["message"]
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        result = {"role": "tool", "content": "x", "tool_call_id": "a"}
        turns = [HI, {"role": "assistant", "tool_calls": [call]}, result]
        reply = await rig.post("/v1/chat/completions", {**chat, "messages": turns})
        error = json.loads(reply.body)["error"]
        assert (error["code"], error["param"]) == ("model_without_tools", "messages")
        assert error["message"].endswith("; leave tool calls and their results out")
        assert not rig.serving.requests

    run(use, text=NoTools())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", "ttft_slo", 3), 429, "rate_limit_error"),
        (EngineFailed("it broke"), 502, "api_error"),
    ],
)
def test_errors_of_messages_have_their_shape(error: MoonserveError, status: int, kind: str) -> None:
    """Before a stream has begun it is a status; after that an event with the name error."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(MESSAGES, {**ASKS[MESSAGES], "stream": True})
        assert reply.status == status
        assert json.loads(reply.body)["error"]["type"] == kind
        rig.serving.script = [*say("hello", 5)[:1], error]
        for path in (MESSAGES, RESPONSES):
            seen = await events(rig, path)
            assert seen[-1]["type"] == "error"
            assert seen[-1]["error"]["message"] == str(error)

    run(use, error)


def test_tokens_are_counted_and_shown_without_an_instance() -> None:
    """/v1/messages/count_tokens, /tokenize and /detokenize ask no cluster."""

    async def use(rig: Rig) -> None:
        got = parsed(await rig.post(COUNT, {**ASKS[COUNT], "system": "Be kind."}))
        assert got == {"input_tokens": len(b"system: Be kind.\n" + PROMPT)}
        asked = {"model": "m", "messages": [HI], "return_token_strs": True}
        got = parsed(await rig.post("/tokenize", asked))
        assert bytes(got["tokens"]) == PROMPT
        assert (got["count"], got["max_model_len"]) == (9, 100)
        assert "".join(got["token_strs"]) == PROMPT.decode()
        got = parsed(await rig.post("/tokenize", {"model": "m", "prompt": "hé"}))
        assert bytes(got["tokens"]).decode() == "hé"
        assert got["token_strs"] is None
        back = {"model": "m", "tokens": got["tokens"]}
        assert parsed(await rig.post("/detokenize", back)) == {"prompt": "hé"}
        unknown = await rig.post("/detokenize", {**back, "model": "n"})
        assert unknown.status == 404
        assert not rig.serving.requests

    run(use)


def test_openais_client_reads_responses() -> None:
    """Whole and streamed."""

    def work(url: str) -> None:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=10)
        assert client.responses.create(model="m", input="hi").output_text == "hello"
        with client.responses.stream(model="m", input="hi") as stream:
            assert stream.get_final_response().output_text == "hello"

    async def use(rig: Rig) -> None:
        await asyncio.to_thread(work, rig.url)

    run(use, *say("hello", 2))
