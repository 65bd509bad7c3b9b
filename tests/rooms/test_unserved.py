"""Fields that our own workers do not serve, and those of other APIs, are refused with a remedy."""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest
from moonserve.live.openai import messages, request, responses, unserved
from moonserve.live.openai.tokenizing import parse_tokenize

SAID = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "chat": (lambda raw: request.parse_chat(raw, 9), {"messages": SAID}),
    "completion": (lambda raw: request.parse_completion(raw, 99), {"prompt": "a"}),
    "responses": (lambda raw: responses.parse_response(raw, 9), {"input": "a"}),
    "messages": (
        lambda raw: messages.parse_messages(raw, 9),
        {"messages": SAID, "max_tokens": 9},
    ),
    "count_tokens": (lambda raw: messages.parse_count(raw, 9), {"messages": SAID}),
    "tokenize": (lambda raw: parse_tokenize(raw, 9, 99), {"prompt": "a"}),
}


def refusal(api: str, field: str, value: Any) -> BadRequest:
    """Why a body with this field is refused."""
    parse, body = APIS[api]
    with pytest.raises(BadRequest) as caught:
        parse(json.dumps({"model": "m", **body, field: value}).encode())
    return caught.value


@pytest.mark.parametrize(
    ("api", "field", "value", "remedy"),
    [
        ("chat", "prompt", "a", "use messages"),
        ("chat", "include", ["a"], "leave it out; for log probabilities use logprobs"),
        ("chat", "truncation", "auto", "send fewer messages"),
        ("chat", "max_output_tokens", 9, "use max_completion_tokens"),
        ("chat", "stop_sequences", ["a"], "use stop"),
        ("chat", "system", "a", "send it as a message of the role system"),
        ("completion", "max_completion_tokens", 9, "use max_tokens"),
        ("completion", "top_logprobs", 2, "use logprobs, with a number"),
        ("completion", "truncation", "auto", "send a shorter prompt"),
        ("responses", "function_call", {"name": "f"}, "use tool_choice"),
        ("responses", "max_tokens", 9, "use max_output_tokens"),
        ("responses", "max_completion_tokens", 9, "use max_output_tokens"),
        ("responses", "n", 2, "use /v1/chat/completions, which has it"),
        ("responses", "stop", "a", "use /v1/chat/completions, which has it"),
        ("messages", "prompt", "a", "use messages"),
        ("messages", "functions", [{}], "use tools"),
        ("messages", "parallel_tool_calls", False, "use tool_choice.disable_parallel_tool_use"),
        ("messages", "stop", ["a"], "use stop_sequences"),
        ("messages", "n", 2, "use /v1/chat/completions, which has it"),
        ("messages", "logprobs", True, "use /v1/chat/completions, which has it"),
        ("messages", "max_completion_tokens", 9, "use max_tokens"),
        ("messages", "instructions", "a", "use system"),
        ("count_tokens", "prompt", "a", "use messages"),
        ("count_tokens", "instructions", "a", "use system"),
        ("tokenize", "stop_sequences", ["a"], "use stop"),
    ],
)
def test_a_field_of_another_api_is_refused_with_the_one_that_does_it(
    api: str, field: str, value: Any, remedy: str
) -> None:
    """To ignore it would change the answer without a word."""
    error = refusal(api, field, value)
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert str(error) == f"{field}: is no field of this API; {remedy}"


@pytest.mark.parametrize(
    ("api", "field", "value", "says"),
    [
        ("chat", "best_of", 2, "only 1 is supported here; use n"),
        ("chat", "functions", [{}], "only [] is supported here; use tools"),
        ("completion", "functions", [{}], "only [] is supported here; use tools in /v1/chat/compl"),
        ("tokenize", "tools", [{}], "goes with messages, not with a prompt; send messages, or"),
        ("tokenize", "tool_choice", "required", "goes with messages, not with a prompt; send mess"),
        ("chat", "skip_special_tokens", False, "only true is supported here; leave it out"),
        ("completion", "truncate_prompt_tokens", 4, "not supported here; send a shorter prompt"),
        ("responses", "store", True, "only false is supported here; leave it out: responses are"),
        ("responses", "previous_response_id", "r", "not supported here; send the whole conversat"),
        ("messages", "output_format", {}, "not supported here; use response_format in /v1/chat/c"),
        ("tokenize", "add_special_tokens", False, "only true is supported here; leave it out"),
    ],
)
def test_a_field_that_workers_do_not_serve_is_refused_with_a_remedy(
    api: str, field: str, value: Any, says: str
) -> None:
    """With the values that are allowed, if there are any."""
    error = refusal(api, field, value)
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert str(error).startswith(f"{field}: {says}")


@pytest.mark.parametrize(
    ("api", "body", "field", "remedy"),
    [
        ("chat", {"prompt": "a"}, "prompt", "use messages"),
        ("completion", {"messages": SAID, "max_completion_tokens": 9}, "messages", "use prompt"),
        ("responses", {"messages": SAID, "max_tokens": 9}, "messages", "use input"),
        ("responses", {"prompt": "a"}, "prompt", "write it into input"),
        ("messages", {"prompt": "a", "max_tokens": 9}, "prompt", "use messages"),
        (
            "messages",
            {"messages": SAID, "max_completion_tokens": 9},
            "max_completion_tokens",
            "use max_tokens",
        ),
        ("count_tokens", {"input": "a"}, "input", "use messages"),
    ],
)
def test_a_body_for_another_api_is_refused_by_the_field_to_rename(
    api: str, body: dict[str, Any], field: str, remedy: str
) -> None:
    """Not by the field that it lacks: that does not say what to do with the one it has."""
    parse, _ = APIS[api]
    with pytest.raises(BadRequest) as caught:
        parse(json.dumps({"model": "m", **body}).encode())
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")
    assert str(caught.value).endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("api", "missing"),
    [
        ("chat", "messages"),
        ("completion", "prompt"),
        ("responses", "input"),
        ("messages", "messages"),
        ("count_tokens", "messages"),
    ],
)
def test_a_missing_field_is_named_where_no_other_api_has_it(api: str, missing: str) -> None:
    """Fields that ask for nothing do not hide it."""
    parse, _ = APIS[api]
    with pytest.raises(BadRequest) as caught:
        parse(b'{"model": "m", "instructions": null, "of_no_api": 3}')
    assert (str(caught.value), caught.value.param) == (f"{missing}: is missing", missing)


@pytest.mark.parametrize(
    ("api", "kind"), [("chat", "function"), ("responses", "function"), ("messages", "custom")]
)
def test_a_tool_of_another_type_is_refused_as_not_served(api: str, kind: str) -> None:
    """With the type that is."""
    error = refusal(api, "tools", [{"type": "web_search", "name": "a", "input_schema": {}}])
    assert (error.param, error.code) == ("tools[0].type", "unsupported_parameter")
    assert str(error) == f"tools[0].type: must be {kind}; only such tools are served here"


def test_a_function_call_in_a_message_is_refused_with_what_replaced_it() -> None:
    """Its harmless values are no remedy, so the 400 does not list them."""
    said = [*SAID, {"role": "assistant", "content": "a", "function_call": {"name": "f"}}]
    assert str(refusal("chat", "messages", said)) == (
        "messages[1].function_call: not supported here; use tool_calls"
    )


@pytest.mark.parametrize(
    ("api", "more", "param"),
    [
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format.type"),
        ("responses", {"text": {"format": 3}}, "text.format"),
        ("chat", {"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ("chat", {"messages": [SAID[0] | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
    ],
)
def test_a_nested_field_is_named_whole(api: str, more: dict[str, Any], param: str) -> None:
    """As a path from the body's top, and the message begins with it."""
    [(field, value)] = more.items()
    error = refusal(api, field, value)
    assert error.param == param
    assert str(error).startswith(f"{param}: ")


@pytest.mark.parametrize("api", APIS)
def test_what_asks_for_nothing_is_accepted(api: str) -> None:
    """Null, a value that is the default, and fields that no API has."""
    parse, body = APIS[api]
    nothing = {"n": 1, "stop": None, "logprobs": None, "tools": [], "of_no_api": 3, "user": "u"}
    if api == "responses":
        nothing["text"] = {"format": {"type": "text"}, "verbosity": "low"}
    parse(json.dumps({"model": "m", **nothing, **body}).encode())


@pytest.mark.parametrize(
    ("refused", "served"),
    [
        (unserved.CHAT, request.ChatRequest),
        (unserved.COMPLETION, request.CompletionRequest),
        (unserved.RESPONSES, responses.ResponseRequest),
        (unserved.MESSAGES, messages.MessagesRequest),
        (unserved.COUNT_TOKENS, messages.CountTokensRequest),
    ],
)
def test_a_remedy_names_a_field_that_is_served(
    refused: unserved.RefusedFields, served: type[msgspec.Struct]
) -> None:
    """A client that obeys must not be refused again, and no served field is refused."""
    for name, field in refused._fields.items():
        assert name not in served.__struct_fields__
        in_chat = "/v1/chat/completions" in field.remedy
        known = (request.ChatRequest if in_chat else served).__struct_fields__
        for named in re.findall(r"use (\w+)(?: or (\w+))?", field.remedy):
            assert {*named} - {""} <= {*known}, (name, field.remedy)
        if "which has it" in field.remedy:
            assert name in known
