"""Tools with our own workers, over a scripted cluster whose template has them.

The openai package reads chats and Responses. Messages are compared with the shapes of their API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import openai
import pytest

from moonserve.live.ports import Output
from tests.support.gateway_rig import Rig, parsed, run
from tests.support.serving import TOOL_TEMPLATE, ToolText, say

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: Any = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Look outside.", "parameters": SCHEMA}
CHAT_TOOL: Any = {"type": "function", "function": {**FUNCTION, "strict": False}}
RESPONSES_TOOL: Any = {"type": "function", **FUNCTION, "strict": False}
MESSAGES_TOOL: Any = {
    "name": "weather", "description": "Look outside.", "input_schema": SCHEMA,
    "cache_control": {"type": "ephemeral"},
}  # fmt: skip
ASKS: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [HI], "tools": [CHAT_TOOL]},
    RESPONSES: {"model": "m", "input": "hi", "tools": [RESPONSES_TOOL]},
    MESSAGES: {"model": "m", "messages": [HI], "max_tokens": 900, "tools": [MESSAGES_TOOL]},
    COUNT: {"model": "m", "messages": [HI], "tools": [MESSAGES_TOOL]},
}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f"Let me look.\n{OSLO}\n{ROME}"
CITIES = ['{"city":"Oslo"}', '{"city":"Rome"}']


def rendered(messages: list[Any], tools: bool = True) -> bytes:
    """The prompt of a conversation, as the template makes it of OpenAI's form."""
    function = {"type": "function", "function": FUNCTION}
    return ToolText().render_chat(messages, [function] if tools else None).encode()


async def events(rig: Rig, path: str, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream whose events have names."""
    reply = await rig.post(path, {**ASKS[path], "stream": True, **more})
    assert reply.status == 200, reply.body
    whole = reply.body.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(event.partition("\ndata: ")[2]) for event in whole]


def tool_run(use: Any, text: str = TWO, step: int = 3, template: str = TOOL_TEMPLATE) -> None:
    """Run `use` where the model says this text, so many bytes each."""

    async def with_room(rig: Rig) -> None:
        rig.serving.cards = [type(rig.serving.cards[0])("m", 4_000, True)]
        await use(rig)

    run(with_room, *say(text, step), text=ToolText(template))


@pytest.mark.parametrize("step", [1, 7, 400])
def test_openais_client_reads_calls(step: int) -> None:
    """Of chats and Responses, whole and streamed: the text before them, names, arguments, why the
    answer ended, and ids that are not equal."""

    def work(url: str) -> None:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=10)
        ask = ASKS[CHAT]
        whole = client.chat.completions.create(**ask).choices[0]
        with client.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me look.\n"
            calls = choice.message.tool_calls or []
            assert [call.function.name for call in calls] == ["weather"] * 2
            assert [call.function.arguments for call in calls] == CITIES
            assert len({call.id for call in calls}) == 2
        response = client.responses.create(**ASKS[RESPONSES])
        with client.responses.stream(**ASKS[RESPONSES]) as stream:
            kinds = [event.type.removeprefix("response.") for event in stream]
            last = stream.get_final_response()
        for reply in (response, last):
            items = reply.output[1:]
            assert reply.status == "completed"
            assert reply.output_text == "Let me look.\n"
            assert [item.type for item in items] == ["function_call"] * 2
            assert [item.arguments for item in items] == CITIES
            assert len({item.call_id for item in items}) == 2
            assert reply.tools[0].name == "weather"
        call = ["output_item.added", "function_call_arguments.delta",
                "function_call_arguments.done", "output_item.done"]  # fmt: skip
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-12]) == {"output_text.delta"}
        ended = ["output_text.done", "content_part.done", "output_item.done"]
        assert kinds[-12:] == [*ended, *call, *call, "completed"]

    async def use(rig: Rig) -> None:
        await asyncio.to_thread(work, rig.url)
        for request in rig.serving.requests:
            assert bytes(request.prompt) == rendered([HI])

    tool_run(use, step=step)


@pytest.mark.parametrize("step", [1, 400])
def test_calls_of_a_message(step: int) -> None:
    """Each is a block of its own, whole and streamed, and the stop reason says that it waits."""

    async def use(rig: Rig) -> None:
        got = parsed(await rig.post(MESSAGES, ASKS[MESSAGES]))
        text, *calls = got["content"]
        assert text == {"type": "text", "text": "Let me look.\n"}
        assert [(it["type"], it["name"], it["input"]["city"]) for it in calls] == [
            ("tool_use", "weather", "Oslo"),
            ("tool_use", "weather", "Rome"),
        ]
        assert len({it["id"] for it in calls}) == 2
        assert got["stop_reason"] == "tool_use"
        seen = await events(rig, MESSAGES)
        begun = [it["content_block"] for it in seen if it["type"] == "content_block_start"]
        assert [it["type"] for it in begun] == ["text", "tool_use", "tool_use"]
        assert [it.get("input") for it in begun] == [None, {}, {}]
        deltas = [it for it in seen if it["type"] == "content_block_delta"]
        said = [it["delta"].get("text", "") for it in deltas if it["index"] == 0]
        assert "".join(said) == "Let me look.\n"
        inputs = [(it["index"], it["delta"]["partial_json"]) for it in deltas if it["index"]]
        assert inputs == [(1, CITIES[0]), (2, CITIES[1])]
        ends = [it["index"] for it in seen if it["type"] == "content_block_stop"]
        assert ends == [0, 1, 2]
        assert seen[-2]["delta"]["stop_reason"] == "tool_use"
        counted = parsed(await rig.post(COUNT, ASKS[COUNT]))
        assert counted["input_tokens"] == got["usage"]["input_tokens"] == len(rendered([HI]))

    tool_run(use, step=step)


def test_an_answer_of_one_call_has_no_text() -> None:
    """In no API: the content is null, and there is no block and no item of text."""

    async def use(rig: Rig) -> None:
        (choice,) = parsed(await rig.post(CHAT, ASKS[CHAT]))["choices"]
        assert choice["message"]["content"] is None
        chunks = await rig.events(CHAT, ASKS[CHAT])
        assert not any(it["choices"][0]["delta"].get("content") for it in chunks[:-1])
        for path, field, kind in (
            (RESPONSES, "output", "function_call"),
            (MESSAGES, "content", "tool_use"),
        ):
            (item,) = parsed(await rig.post(path, ASKS[path]))[field]
            assert item["type"] == kind
        (item,) = (await events(rig, RESPONSES))[-1]["response"]["output"]
        assert item["type"] == "function_call"
        starts = [it for it in await events(rig, MESSAGES) if it["type"] == "content_block_start"]
        assert len(starts) == 1

    tool_run(use, OSLO)


def test_an_answer_without_a_call_is_text() -> None:
    """Also a call that is no JSON; and all text where tools must not be called."""

    async def use(rig: Rig) -> None:
        for text, more in (
            ("<tool_call>{broken}</tool_call>", {}),
            ("hello", {}),
            (OSLO, {"tool_choice": "none"}),
        ):
            rig.serving.script = say(text, 3)
            (choice,) = parsed(await rig.post(CHAT, {**ASKS[CHAT], **more}))["choices"]
            message = {"role": "assistant", "content": text}
            assert (choice["message"], choice["finish_reason"]) == (message, "stop")
            asked = {**ASKS[RESPONSES], **more}
            (item,) = parsed(await rig.post(RESPONSES, asked))["output"]
            assert item["content"][0]["text"] == text
            last = (await events(rig, RESPONSES, **more))[-1]["response"]
            assert last["output"] == [{**item, "id": last["output"][0]["id"]}]
            more = {"tool_choice": {"type": "none"}} if more else {}
            got = parsed(await rig.post(MESSAGES, {**ASKS[MESSAGES], **more}))
            assert (got["content"], got["stop_reason"]) == (
                [{"type": "text", "text": text}],
                "end_turn",
            )
            seen = await events(rig, MESSAGES, **more)
            said = [it["delta"].get("text", "") for it in seen if "delta" in it]
            assert "".join(said) == text

    tool_run(use)


def test_an_empty_answer_has_one_empty_text() -> None:
    """Also where the first thing could have been a call."""

    async def use(rig: Rig) -> None:
        rig.serving.script = [Output((256,), finish_reason="stop")]
        last = (await events(rig, RESPONSES))[-1]["response"]
        assert [it["content"][0]["text"] for it in last["output"]] == [""]
        kinds = [it["type"] for it in await events(rig, MESSAGES)]
        assert kinds[1:3] == ["content_block_start", "content_block_stop"]

    tool_run(use)


def test_a_limit_keeps_its_finish_reason() -> None:
    """The calls that are whole are given."""

    async def use(rig: Rig) -> None:
        script = say(f"{OSLO}{ROME[:20]}")[:-1]
        script[-1] = Output(script[-1].token_ids, "length")
        rig.serving.script = script
        (choice,) = parsed(await rig.post(CHAT, ASKS[CHAT]))["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["message"]["content"] == ROME[:20]
        got = parsed(await rig.post(MESSAGES, ASKS[MESSAGES]))
        assert got["stop_reason"] == "max_tokens"

    tool_run(use)


def test_one_call_at_a_time() -> None:
    """Where the client wants no parallel calls, it gets the first."""

    async def use(rig: Rig) -> None:
        ask = {**ASKS[CHAT], "parallel_tool_calls": False}
        (choice,) = parsed(await rig.post(CHAT, ask))["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        choose = {"type": "auto", "disable_parallel_tool_use": True}
        got = parsed(await rig.post(MESSAGES, {**ASKS[MESSAGES], "tool_choice": choose}))
        assert [it["type"] for it in got["content"]] == ["text", "tool_use"]

    tool_run(use)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_their_own_calls(stream: bool) -> None:
    """Each is read for itself; token ids come once, also beside calls."""

    async def use(rig: Rig) -> None:
        ask = {**ASKS[CHAT], "n": 2, "return_token_ids": True}
        if stream:
            events = await rig.events(CHAT, ask)
            chunks = [choice for it in events[:-1] for choice in it["choices"]]
        else:
            chunks = parsed(await rig.post(CHAT, ask))["choices"]
            chunks = [{**it, "delta": it["message"]} for it in chunks]
        for index in (0, 1):
            own = [it for it in chunks if it["index"] == index]
            calls = [call for it in own for call in it["delta"].get("tool_calls") or ()]
            assert [it["function"]["arguments"] for it in calls] == CITIES
            if stream:
                assert [it["index"] for it in calls] == [0, 1]
            ids = [id for it in own for id in it.get("token_ids") or ()]
            assert bytes(ids[:-1]).decode() == TWO
            assert own[-1]["finish_reason"] == "tool_calls"

    tool_run(use)


MUST = {
    CHAT: ("required", {"type": "function", "function": {"name": "weather"}}),
    RESPONSES: ("required", {"type": "function", "name": "weather"}),
    MESSAGES: ({"type": "any"}, {"type": "tool", "name": "weather"}),
}


@pytest.mark.parametrize("path", MUST)
def test_a_call_that_is_demanded_is_json_from_its_first_token(path: str) -> None:
    """The workers get the schema of one call of the tools that may be called, and what it makes is
    a call without tags."""
    pytest.importorskip("llguidance")
    any_one, named = MUST[path]
    other = json.loads(json.dumps(ASKS[path]["tools"][0]).replace("weather", "other"))
    body = '{"name":"weather","arguments":{"city":"Oslo"}}'

    async def use(rig: Rig) -> None:
        for choice, names in ((any_one, ["weather", "other"]), (named, ["weather"])):
            asked = {**ASKS[path], "tools": [*ASKS[path]["tools"], other], "tool_choice": choice}
            got = parsed(await rig.post(path, asked))
            assert '"weather"' in json.dumps(got)
            assert "Oslo" in json.dumps(got)
            shaping = rig.serving.requests[-1].sampling.shaping
            assert shaping is not None
            calls = json.loads(shaping.schema)["anyOf"]
            assert [it["properties"]["name"]["const"] for it in calls] == names
            assert [it["properties"]["arguments"] for it in calls] == [SCHEMA] * len(names)
            if path == CHAT:
                (choice,) = got["choices"]
                assert choice["message"]["content"] is None
                assert choice["finish_reason"] == "tool_calls"
            elif path == MESSAGES:
                assert got["stop_reason"] == "tool_use"
                assert [it["type"] for it in got["content"]] == ["tool_use"]
            else:
                assert [it["type"] for it in got["output"]] == ["function_call"]

    tool_run(use, body)


def test_what_the_schemas_of_tools_refer_to() -> None:
    """Definitions move to the root, where references count from; two that differ are a 400."""
    pytest.importorskip("llguidance")

    def tool(name: str, kind: str) -> Any:
        place = {"$defs": {"Place": {"type": kind}}, "type": "object"}
        place["properties"] = {"at": {"$ref": "#/$defs/Place"}}
        return {"type": "function", "function": {"name": name, "parameters": place}}

    async def use(rig: Rig) -> None:
        ask = {**ASKS[CHAT], "tool_choice": "required"}
        asked = {**ask, "tools": [tool("a", "string"), tool("b", "string")]}
        parsed(await rig.post(CHAT, asked))
        shaping = rig.serving.requests[-1].sampling.shaping
        assert shaping is not None
        schema = json.loads(shaping.schema)
        assert schema["$defs"] == {"Place": {"type": "string"}}
        assert "$defs" not in schema["anyOf"][0]["properties"]["arguments"]
        reply = await rig.post(CHAT, {**ask, "tools": [tool("a", "string"), tool("b", "number")]})
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["param"]) == (400, "tools")
        reply = await rig.post(CHAT, {**ask, "tools": [tool("a", "strng")]})
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["param"]) == (400, "tools")

    tool_run(use)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "X"}}}
TURNS: list[Any] = [
    HI,
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    {"role": "tool", "content": "sun", "tool_call_id": "c2"},
    {"role": "user", "content": "So?"},
]
"""A conversation with calls, as templates see it."""


def test_a_conversation_with_calls_is_rendered() -> None:
    """In each API, calls and their results come into the prompt as the template writes them, with
    or without tools now."""
    text = '{"city": "X"}'
    sent = {**CALL, "function": {"name": "weather", "arguments": text}}
    chat = [*TURNS]
    chat[1] = {**TURNS[1], "tool_calls": [sent, {**sent, "id": "c2"}]}
    used = {"type": "tool_use", "name": "weather", "input": {"city": "X"}}
    messages = [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Hm."},
                {**used, "id": "c1"},
                {**used, "id": "c2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "sun"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    call = {"type": "function_call", "name": "weather", "arguments": text, "id": "fc"}
    items = [
        HI,
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "sun"},
        {"role": "user", "content": "So?"},
    ]

    async def use(rig: Rig) -> None:
        for tools in (True, False):
            for path, field, turns in (
                (CHAT, "messages", chat),
                (MESSAGES, "messages", messages),
                (RESPONSES, "input", items),
            ):
                ask = {**ASKS[path], field: turns}
                if not tools:
                    del ask["tools"]
                parsed(await rig.post(path, ask))
                assert bytes(rig.serving.requests[-1].prompt) == rendered(TURNS, tools)
            asked = {**ASKS[CHAT], "messages": chat} if tools else {"model": "m", "messages": chat}
            got = parsed(await rig.post("/tokenize", asked))
            assert bytes(got["tokens"]) == rendered(TURNS, tools)

    tool_run(use)


def test_a_message_of_calls_alone_needs_no_content() -> None:
    """As clients send back what they got."""

    async def use(rig: Rig) -> None:
        call = {"id": "a", "function": {"name": "f", "arguments": ""}}
        for content in ({}, {"content": None}):
            said = {"role": "assistant", "tool_calls": [call], **content}
            parsed(await rig.post(CHAT, {**ASKS[CHAT], "messages": [HI, said]}))
        prompt = bytes(rig.serving.requests[-1].prompt)
        assert b'<tool_call>{"name": "f", "arguments": {}}</tool_call>' in prompt

    tool_run(use)


def _said(**message: Any) -> dict[str, Any]:
    return {"messages": [HI, message]}


def _call(**more: Any) -> dict[str, Any]:
    return {"id": "a", "function": {"name": "f", "arguments": "{}"}, **more}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOO_BIG = {"a": msgspec.Raw(b"1e999")}


def _used(input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "a", "name": "f", "input": input}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"tools": {}}, "tools"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [_named("")]}, "tools[0].function.name"),
        (CHAT, {"tools": [_named("a" * 65)]}, "tools[0].function.name"),
        (CHAT, {"tools": [_named("a.b")]}, "tools[0].function.name"),
        (CHAT, {"tools": [CHAT_TOOL, _named("f"), CHAT_TOOL]}, "tools[2].function.name"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (RESPONSES, {"tools": [RESPONSES_TOOL] * 2}, "tools[1].name"),
        (MESSAGES, {"tools": [{**MESSAGES_TOOL, "name": "a" * 129}]}, "tools[0].name"),
        (MESSAGES, {"tools": [MESSAGES_TOOL] * 2}, "tools[1].name"),
        (COUNT, {"tools": [MESSAGES_TOOL] * 2}, "tools[1].name"),
        (CHAT, _said(role="tool", content="x"), "messages[1].tool_call_id"),
        (CHAT, _said(role="tool", content="x", tool_call_id="b"), "messages[1].tool_call_id"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "tool", "content": "x", "tool_call_id": "a"},
                    *_said(role="assistant", tool_calls=[_call()])["messages"],
                ]
            },
            "messages[0].tool_call_id",
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "input[0].call_id",
        ),
        (
            MESSAGES,
            _said(role="user", content=[{"type": "tool_result", "tool_use_id": "a"}]),
            "messages[1].content[0].tool_use_id",
        ),
        (CHAT, {"tools": [CHAT_TOOL] * 257}, "tools"),
        (CHAT, {"tools": [{**CHAT_TOOL, "x": "y" * 600_000}]}, "tools"),
        (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (CHAT, {"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        (CHAT, {"tool_choice": "always"}, "tool_choice"),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        (CHAT, _said(role="assistant", tool_calls=[1]), "messages[1].tool_calls[0]"),
        (CHAT, _said(role="user", content="", tool_calls=[_call()]), "messages[1].tool_calls"),
        (
            CHAT,
            _said(role="assistant", tool_calls=[_call(type="custom")]),
            "messages[1].tool_calls[0].type",
        ),
        (
            CHAT,
            _said(
                role="assistant",
                tool_calls=[_call(), _call(function={"name": "f", "arguments": "[]"})],
            ),
            "messages[1].tool_calls[1].function.arguments",
        ),
        (CHAT, _said(role="assistant", function_call={"name": "f"}), "messages[1].function_call"),
        (CHAT, _said(role="tool", tool_call_id="a"), "messages[1].content"),
        ("/v1/completions", {"prompt": "a", "tools": [CHAT_TOOL]}, "tools"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            RESPONSES,
            {
                "instructions": "a",
                "input": [
                    HI,
                    {"type": "function_call", "name": "f", "call_id": "a", "arguments": "{"},
                ],
            },
            "input[1].arguments",
        ),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "a"}]},
            "input[0].output",
        ),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (MESSAGES, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGES, {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        (
            MESSAGES,
            _said(role="user", content=[{"type": "tool_use", "id": "a"}]),
            "messages[1].content[0].type",
        ),
        (
            MESSAGES,
            _said(role="assistant", content=[{"type": "tool_use", "id": "a", "name": "f"}]),
            "messages[1].content[0].input",
        ),
        (
            MESSAGES,
            _said(role="assistant", content=[{"type": "text", "text": "a"}, _used("{}")]),
            "messages[1].content[1].input",
        ),
        (
            MESSAGES,
            _said(role="assistant", content=[{"type": "text", "text": "a"}, _used(TOO_BIG)]),
            "messages[1].content[1].input",
        ),
        (
            MESSAGES,
            _said(role="user", content=[{"type": "tool_result"}]),
            "messages[1].content[0].tool_use_id",
        ),
        (
            MESSAGES,
            _said(
                role="user",
                content=[
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                ],
            ),
            "messages[1].content[0].content[0].type",
        ),
    ],
)
def test_a_400_names_the_field(path: str, more: dict[str, Any], param: str) -> None:
    """Before any work is spent."""

    async def use(rig: Rig) -> None:
        body = {**ASKS.get(path, {"model": "m"}), **more}
        reply = await rig.post(path, msgspec.json.encode(body))
        assert reply.status == 400, reply.body
        error = json.loads(reply.body)["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
        assert "request body" not in error["message"]
        assert not rig.serving.requests

    tool_run(use)


def test_a_model_whose_calls_cannot_be_read_is_refused() -> None:
    """The 400 says what to do; without tools the model is served."""
    source = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"

    async def use(rig: Rig) -> None:
        for path in (CHAT, RESPONSES, MESSAGES, COUNT):
            error = json.loads((await rig.post(path, ASKS[path])).body)["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
            assert "--tool-call-parser" in error["message"]
        assert not rig.serving.requests
        parsed(await rig.post(CHAT, {"model": "m", "messages": [HI]}))

    tool_run(use, "hello", template=source)
