"""The API over a scripted cluster, on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonserve.core.errors import DeadlineExceeded, EngineFailed, NobodyAlive, Overloaded
from moonserve.core.request import Sampling, Slo, Stopping
from moonserve.core.units import seconds_to_us
from moonserve.live.api import limiter as limiter_module
from moonserve.live.api.limiter import Limits, network
from moonserve.live.ports import Output
from tests.support.gateway_rig import Rig, run
from tests.support.serving import ByteText, say

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ONCE: dict[str, Any] = {"model": "m", "prompt": "once"}


_Sent: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def test_chat_whole() -> None:
    """A chat reply has the message, the finish reason, and usage that counts EOS."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(CHAT, HI, x_request_id="mine")
        got = json.loads(reply.body)
        assert got["id"] == "chatcmpl-mine"
        assert reply.headers["x-request-id"] == "mine"
        assert (got["object"], got["model"]) == ("chat.completion", "m")
        assert got["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert got["usage"] == {
            "prompt_tokens": 9,
            "completion_tokens": 6,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        assert bytes(rig.serving.requests[0].prompt) == b"user: hi\n"

    run(use, *say("hello", cached=4))


def test_completion_whole() -> None:
    """A completion's reply has the text."""

    async def use(rig: Rig) -> None:
        got = json.loads((await rig.post(TEXT, ONCE)).body)
        assert got["object"] == "text_completion"
        assert got["choices"] == [
            {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
        ]

    run(use)


def test_chat_stream() -> None:
    """A chat stream is the role, the pieces, the finish reason, [DONE]; no usage unless asked."""

    async def use(rig: Rig) -> None:
        events = await rig.events(CHAT, HI)
        assert events.pop() == "[DONE]"
        assert len({event["id"] for event in events}) == 1
        assert all(event["object"] == "chat.completion.chunk" for event in events)
        assert all("usage" not in event for event in events)
        choices = [event["choices"][0] for event in events]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"] for c in choices[1:-1]] == [{"content": x} for x in ("he", "ll", "o")]
        assert choices[-1]["delta"] == {}
        assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]

    run(use, *say("hello", 2))


def test_completion_stream() -> None:
    """A completion stream is the pieces of text, the last with the finish reason, [DONE]."""

    async def use(rig: Rig) -> None:
        events = await rig.events(TEXT, ONCE)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
        assert [(c["text"], c["finish_reason"]) for c in choices] == [
            ("hel", None),
            ("lo", None),
            ("", "stop"),
        ]

    run(use, *say("hello", 3))


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, ONCE)])
@pytest.mark.parametrize("step", [1, 2])
def test_token_ids_on_request(path: str, body: dict[str, Any], step: int) -> None:
    """return_token_ids (vLLM's) gives every generated id once, streamed or not, EOS included."""

    async def use(rig: Rig) -> None:
        wanting = {**body, "return_token_ids": True}
        whole = json.loads((await rig.post(path, wanting)).body)
        ids = whole["choices"][0]["token_ids"]
        assert bytes(ids[:7]).decode() == "h\u00e9\u4f60l"
        assert len(ids) == whole["usage"]["completion_tokens"]
        events = await rig.events(path, wanting)
        assert events.pop() == "[DONE]"
        streamed = [i for event in events for i in event["choices"][0].get("token_ids") or []]
        assert streamed == ids

    run(use, *say("h\u00e9\u4f60l", step))


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (TEXT, ONCE)])
def test_stream_usage(path: str, body: dict[str, Any]) -> None:
    """include_usage adds a last chunk without choices. Usage is null in the others, and cached is
    at most the prompt."""

    async def use(rig: Rig) -> None:
        events = await rig.events(path, {**body, "stream_options": {"include_usage": True}})
        *chunks, last, done = events
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in chunks)
        prompt = len(rig.serving.requests[0].prompt)
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 6,
            "total_tokens": prompt + 6,
            "prompt_tokens_details": {"cached_tokens": prompt},
        }

    run(use, *say("hello", cached=10_000))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_multibyte_text_is_exact_at_chunk_borders(step: int) -> None:
    """Characters cut by token borders come out whole, streamed and not."""
    text = "naïve 你好, мир 🙂👩‍👩‍👧"

    async def use(rig: Rig) -> None:
        events = await rig.events(TEXT, ONCE)
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == text
        events = await rig.events(CHAT, HI)
        deltas = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
        assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas)
        assert json.loads((await rig.post(TEXT, ONCE)).body)["choices"][0]["text"] == text

    run(use, *say(text, step))


def test_a_character_cut_by_max_tokens_is_marked() -> None:
    """Bytes of a character that never became whole are one U+FFFD at the very end."""

    async def use(rig: Rig) -> None:
        events = await rig.events(TEXT, ONCE)
        assert [e["choices"][0]["text"] for e in events[:-1]] == ["a", "\ufffd"]
        got = json.loads((await rig.post(CHAT, HI)).body)
        assert got["choices"][0]["message"]["content"] == "a\ufffd"

    run(use, Output(tuple(b"a\xe4")), Output(tuple(b"\xbd"), finish_reason="length"))


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", ["END", ["zzz", "END", "!"]])
def test_stop_strings_span_tokens_and_close_the_generation(step: int, stop: Any) -> None:
    """A stop string that spans tokens ends the text before it, and ends the generation at once."""

    async def use(rig: Rig) -> None:
        events = await rig.events(TEXT, {**ONCE, "stop": stop})
        choices = [e["choices"][0] for e in events[:-1]]
        assert "".join(c["text"] for c in choices) == "some EN text"
        assert choices[-1]["finish_reason"] == "stop"
        got = json.loads((await rig.post(CHAT, {**HI, "stop": stop})).body)["choices"][0]
        assert (got["message"]["content"], got["finish_reason"]) == ("some EN text", "stop")
        assert rig.serving.closed_early == 2
        given = rig.serving.requests[0].stopping.stop
        assert given == (("END",) if stop == "END" else tuple(stop))

    # The cluster would send more for a minute: only closing it ends it in time.
    run(use, *say("some EN textEND and more", step)[:-1], 60.0)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("stop", [None, "zzz"])
def test_a_stop_token_has_no_text(step: int, stop: str | None) -> None:
    """The stop token that ended a reply is not in its text, but is among the ids and counted."""

    async def use(rig: Rig) -> None:
        asked = {**ONCE, "stop_token_ids": [33], "return_token_ids": True, "stop": stop}
        got = json.loads((await rig.post(TEXT, asked)).body)
        assert got["choices"][0]["text"] == "a!b"
        assert got["choices"][0]["token_ids"] == list(b"a!b!")
        assert got["usage"]["completion_tokens"] == 4
        events = await rig.events(TEXT, asked)
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "a!b"

    # No engine goes on after the first "!". The test shows that only the last id is left out.
    *first, _ = say("a!b", step)
    run(use, *first, Output((33,), finish_reason="stop"))


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_only_a_stop_token_of_this_request_is_left_out(reason: str) -> None:
    """The last token keeps its text if it is no stop token, or if the reply ended for another
    reason."""

    async def use(rig: Rig) -> None:
        asked = {**ONCE, "stop_token_ids": [33 if reason == "length" else 34]}
        got = json.loads((await rig.post(TEXT, asked)).body)
        assert got["choices"][0]["text"] == "a!"

    run(use, Output(tuple(b"a!"), finish_reason=reason))


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    """Text that could have begun a stop string, and did not, is not lost."""

    async def use(rig: Rig) -> None:
        got = json.loads((await rig.post(TEXT, {**ONCE, "stop": "END"})).body)["choices"][0]
        assert (got["text"], got["finish_reason"]) == ("the EN", "length")

    run(use, Output(tuple(b"the E")), Output(tuple(b"N"), finish_reason="length"))


def test_what_the_cluster_is_asked() -> None:
    """Every field, and the id, reaches the request as sent."""

    async def use(rig: Rig) -> None:
        body = {
            **ONCE,
            "prompt": [1, 2, 3],
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 7,
            "seed": -3,
            "max_tokens": 9,
            "stop": ["a", "b"],
            "stop_token_ids": [5],
            "ignore_eos": True,
            "cache_salt": "A",
        }
        assert (await rig.post(TEXT, body, x_request_id="r1")).status == 200
        (asked,) = rig.serving.requests
        assert (asked.id, asked.model, asked.prompt) == ("r1", "m", (1, 2, 3))
        assert asked.sampling == Sampling(temperature=0, top_p=0.5, top_k=7, seed=-3)
        assert asked.stopping == Stopping(9, ("a", "b"), (5,), True)
        assert asked.cache_salt == "A"

    run(use)


def test_defaults() -> None:
    """Chat may fill the context; completions give 16 tokens; temperature is 1; seeds differ."""

    async def use(rig: Rig) -> None:
        nulls = dict.fromkeys(("temperature", "top_p", "max_tokens", "seed", "stop", "stream", "n"))
        await rig.post(CHAT, {**HI, **nulls, "user": "u", "store": True, "metadata": {"a": "b"}})
        await rig.post(TEXT, {**ONCE, "prompt": ["x"], "new_field": [{}]})
        await rig.post(TEXT, {**ONCE, "prompt": [[1] * 95]})
        await rig.post(CHAT, {**HI, "max_tokens": 5, "max_completion_tokens": 6, "top_k": -1})
        chat, text, near, capped = rig.serving.requests
        assert chat.stopping.max_tokens == 100 - len(chat.prompt)
        assert text.stopping.max_tokens == 16
        assert near.stopping.max_tokens == 5
        assert capped.stopping.max_tokens == 6
        assert (chat.sampling.temperature, chat.sampling.top_p, capped.sampling.top_k) == (1, 1, 0)
        assert chat.sampling.seed != text.sampling.seed

    run(use)


def test_message_forms() -> None:
    """Text parts are joined by line feeds, and a developer's message is a system message."""

    async def use(rig: Rig) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
        assert (await rig.post(CHAT, {"model": "m", "messages": messages})).status == 200
        assert bytes(rig.serving.requests[0].prompt) == b"system: d\nuser: a\nb\n"

    run(use)


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {**HI, **fields}


def _text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {**ONCE, **fields}


def _said(message: Any) -> tuple[str, dict[str, Any]]:
    return _chat(messages=[HI["messages"][0], message])


BAD: list[tuple[tuple[str, Any], str | None]] = [
    ((CHAT, b""), None),
    ((CHAT, b"{"), None),
    ((CHAT, b"[]"), None),
    ((CHAT, b"\xff"), None),
    ((CHAT, b'{"a":' * 5_000), None),
    ((CHAT, {"model": "m"}), "messages"),
    ((CHAT, {"messages": []}), "model"),
    (_chat(model=3), "model"),
    (_chat(messages=[]), "messages"),
    (_chat(messages="hi"), "messages"),
    (_chat(messages=[HI["messages"][0]] * 9), "messages"),
    (_said({"content": "x"}), "messages[1].role"),
    (_said({"role": "wizard", "content": "x"}), "messages[1].role"),
    (_said({"role": "function", "content": "x"}), "messages[1].role"),
    (_said({"role": "user"}), "messages[1].content"),
    (_said({"role": "user", "content": 1}), "messages[1].content"),
    (_said({"role": "user", "content": [{"type": "image_url"}]}), "messages[1].content[0].type"),
    (_said({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
    (_said({"role": "user", "content": [{}]}), "messages[1].content[0].type"),
    (_said({"role": "assistant", "tool_calls": [1]}), "messages[1].tool_calls[0]"),
    (_said({"role": "user", "content": "forbidden"}), "messages"),
    (_chat(temperature="hot"), "temperature"),
    (_chat(temperature=-0.1), "temperature"),
    (_chat(temperature=2.1), "temperature"),
    (_chat(top_p=0), "top_p"),
    (_chat(top_p=1.5), "top_p"),
    (_chat(top_k=-2), "top_k"),
    (_chat(top_k=1.5), "top_k"),
    (_chat(cache_salt=5), "cache_salt"),
    (_chat(cache_salt=""), "cache_salt"),
    (_chat(cache_salt="x" * 1_025), "cache_salt"),
    (_chat(seed=2**63), "seed"),
    (_chat(seed=10**40), "seed"),
    (_chat(max_tokens=0), "max_tokens"),
    (_chat(max_tokens=True), "max_tokens"),
    (_chat(max_tokens=4.5), "max_tokens"),
    (_chat(max_tokens=1e300), "max_tokens"),
    (_chat(max_completion_tokens=0), "max_completion_tokens"),
    (_chat(stop=""), "stop"),
    (_chat(stop=["a", ""]), "stop[1]"),
    (_chat(stop=["a"] * 17), "stop"),
    (_chat(stop=[1]), "stop[0]"),
    (_chat(stop="x" * 2_000), "stop"),
    (_chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (_chat(stop_token_ids=[1] * 999), "stop_token_ids"),
    (_chat(stream="yes"), "stream"),
    (_chat(stream_options={"include_usage": True}), "stream_options"),
    (_chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (_chat(n=0), "n"),
    (_chat(logprobs=2), "logprobs"),
    (_chat(tools=[{"type": "function"}]), "tools[0].function"),
    (_chat(tool_choice="required"), "tool_choice"),
    (_chat(response_format={"type": "xml"}), "response_format.type"),
    (_chat(logit_bias={"x": 2}), "logit_bias"),
    (_chat(presence_penalty=2.1), "presence_penalty"),
    (_chat(frequency_penalty=-2.5), "frequency_penalty"),
    (_chat(repetition_penalty=0), "repetition_penalty"),
    (_chat(repetition_penalty=101), "repetition_penalty"),
    (_chat(presence_penalty="much"), "presence_penalty"),
    (_text(best_of=2), "best_of"),
    (_text(echo=True), "echo"),
    (_text(suffix="s"), "suffix"),
    (_text(logprobs=-1), "logprobs"),
    ((TEXT, {"model": "m"}), "prompt"),
    (_text(prompt=""), "prompt"),
    (_text(prompt=[]), "prompt"),
    (_text(prompt=[[]]), "prompt"),
    (_text(prompt=7), "prompt"),
    (_text(prompt=["a", 1]), "prompt[1]"),
    (_text(prompt=[[1], 2]), "prompt[1]"),
    (_text(prompt=[1, "b"]), "prompt[1]"),
    (_text(prompt=[1, -1]), "prompt[1]"),
    (_text(prompt=[1, 257]), "prompt[1]"),
    (_text(prompt=[[1, 10**30]]), "prompt[0][1]"),
    (_text(prompt=[1, None]), "prompt[1]"),
    (_text(prompt=None), "prompt"),
    (_text(prompt={}), "prompt"),
    (_text(model=None), "model"),
    (_chat(messages=None), "messages"),
    (_said(None), "messages[1]"),
    (_said({"role": None, "content": "x"}), "messages[1].role"),
]


def test_bad_requests_name_their_field() -> None:
    """Every bad field is a 400 at once, in OpenAI's shape, with the field's path as param."""

    async def use(rig: Rig) -> None:
        for (path, body), param in BAD:
            reply = await rig.post(path, body)
            error = json.loads(reply.body)["error"]
            assert reply.status == 400, (body, error)
            assert error["param"] == param, (body, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert reply.headers["x-request-id"]
        assert rig.serving.requests == []

    run(use, limits=Limits(max_messages=8))


FINE: list[tuple[str, dict[str, Any]]] = [
    _chat(max_tokens=4.0, top_k=3.0, seed=7.0),
    _chat(max_completion_tokens=4.0, temperature=0),
    _text(max_tokens=4.0, n=1.0, prompt='"max_tokens": 9.0, '),
    _text(max_tokens=4.0, stream_options={}),
    _chat(max_tokens=4, stream_options={}),
    _chat(max_tokens=4, stream_options=None, stream=None),
    _chat(max_tokens=4, stream_options={}, stream=True),
]


@pytest.mark.parametrize("prompt", [b'"\xff"', b'["\xff"]', b'["\xff",1]', b'[[1],"\xff"]'])
def test_text_that_is_no_utf8_is_a_bad_request(prompt: bytes) -> None:
    """Wherever it is in the body; nothing is logged as a bug."""

    async def use(rig: Rig) -> None:
        for body in (
            b'{"model":"m","prompt":%b}' % prompt,
            b'{"model":"m","prompt":"x","stop":%b}' % prompt,
        ):
            assert (await rig.post(TEXT, body)).status == 400
        assert rig.serving.requests == []

    run(use)


def test_what_openai_servers_accept_is_accepted() -> None:
    """Integers may be written as 4.0, and stream options that ask for nothing need no stream."""

    async def use(rig: Rig) -> None:
        for path, body in FINE:
            assert (await rig.post(path, body)).status == 200, body
        asked = [request.stopping.max_tokens for request in rig.serving.requests]
        assert asked == [4] * len(FINE)
        assert all(type(most) is int for most in asked)

    run(use, *say("hi"))


def test_unsupported_fields_say_so() -> None:
    """A field that would change the answer is refused unless it asks for nothing."""

    async def use(rig: Rig) -> None:
        odd: list[Any] = [2, -1, 0, 1.5, [], True, "1"]
        for asked, message in [
            *((_chat(best_of=n), "best_of: only 1 is supported here; use n") for n in odd),
            (_text(echo=0), "echo: only false is supported here; leave it out"),
            (
                _text(tool_choice="x"),
                'tool_choice: only "none" or "auto" is supported here; use /v1/chat/completions',
            ),
            (_chat(guided_regex="x"), "guided_regex: not supported here; leave it out"),
        ]:
            error = json.loads((await rig.post(*asked)).body)["error"]
            assert (error["code"], error["message"]) == ("unsupported_parameter", message)
        assert (await rig.post(*_chat(n=1, tools=[], presence_penalty=0.0))).status == 200

    run(use)


def test_context_length() -> None:
    """A prompt that leaves no room for one more token is a 400 with OpenAI's code and the
    numbers."""

    async def use(rig: Rig) -> None:
        for path, body, param, numbers in [
            (*_chat(messages=_say("x" * 200), max_tokens=999), "messages", ("207", "100")),
            (*_text(prompt=[1] * 100), "prompt", ("100",)),
            # before each id is checked
            (*_text(prompt=[1] * 100 + [999]), "prompt", ("101", "100")),
        ]:
            reply = await rig.post(path, body)
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["param"]) == (400, param)
            assert error["code"] == "context_length_exceeded"
            assert all(number in error["message"] for number in numbers)

    run(use)


def test_no_max_tokens_is_refused_for_its_size() -> None:
    """If a request asks for more than the context leaves, the cluster generates what it leaves."""

    async def use(rig: Rig) -> None:
        for path, body, most in [
            (*_chat(max_tokens=100_000), 91),
            (*_chat(max_tokens=1, max_completion_tokens=100_000), 91),
            (*_chat(max_tokens=91), 91),
            (*_chat(max_tokens=90), 90),
            (*_text(prompt=[1] * 90, max_tokens=100_000), 10),
            (*_text(prompt=[1] * 99, max_tokens=None), 1),
        ]:
            assert (await rig.post(path, body)).status == 200
            assert rig.serving.requests[-1].stopping.max_tokens == most

    run(use)


def _say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_hopeless_text_is_refused_before_any_work() -> None:
    """Text of more bytes than the context's tokens can spell is neither rendered nor encoded."""

    class Untouched(ByteText):
        """Fails if it is used at all. Its context of 100 tokens takes at most 4 bytes a token."""

        def encode(self, text: str, *, add_bos: bool) -> list[int]:
            raise AssertionError("encoded")

        def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
            if len(messages) == 1:
                return "x" * 401
            raise AssertionError("rendered")

    async def use(rig: Rig) -> None:
        parts = [{"type": "text", "text": "x" * 200}] * 2
        for path, body in [
            _text(prompt="x" * 401),
            _text(prompt=["\u4e00" * 134]),
            _said({"role": "user", "content": "x" * 401}),
            _said({"role": "user", "content": parts}),
            _chat(),  # the template makes it long
        ]:
            reply = await rig.post(path, body)
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (400, "context_length_exceeded"), error
            assert error["param"] == ("prompt" if path == TEXT else "messages")
            assert all(number in error["message"] for number in ("400", "100", "4 a token"))
        assert rig.serving.requests == []

    run(use, text=Untouched())


def test_long_prompts_take_turns_on_one_thread() -> None:
    """Long prompts are encoded one at a time, off the loop; over the bound of waiting text, 429."""
    threads: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ByteText):
        """Waits at every long text until the test lets it go on."""

        def encode(self, text: str, *, add_bos: bool) -> list[int]:
            if len(text) > 10:
                threads.append(threading.get_ident())
                begun.set()
                assert go_on.wait(10)
            return super().encode(text, add_bos=add_bos)

    async def use(rig: Rig) -> None:
        long = _text(prompt="y" * 40)
        first = asyncio.create_task(rig.post(*long))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(rig.post(*long))
        while rig.backend._prompts._waiting.used < 80:
            await asyncio.sleep(0.001)
        refused = await rig.post(*long)
        assert refused.status == 429
        assert refused.headers["x-moonserve-reject-reason"] == "tokenizer_queue"
        # Short prompts pass them all, and a client that leaves frees its place.
        assert (await rig.post(*_text(prompt="short"))).status == 200
        second.cancel()
        while rig.backend._prompts._waiting.used > 40:
            await asyncio.sleep(0.001)
        third = asyncio.create_task(rig.post(*long))
        while rig.backend._prompts._waiting.used < 80:
            await asyncio.sleep(0.001)
        assert len(threads) == 1
        go_on.set()
        assert [(await task).status for task in (first, third)] == [200, 200]
        assert len(threads) == 2
        assert len({*threads, threading.get_ident()}) == 2

    run(use, text=Slow(), limits=Limits(offload_bytes=10, max_tokenising_bytes=100))


def test_clients_take_turns_at_the_tokenizer() -> None:
    """A client with one long prompt waits for one text of a client with many, not for all."""
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ByteText):
        """Waits at the first text until the test lets it go on."""

        def encode(self, text: str, *, add_bos: bool) -> list[int]:
            order.append(text[0])
            begun.set()
            assert go_on.wait(10)
            return super().encode(text, add_bos=add_bos)

    async def use(rig: Rig) -> None:
        flood = {"x_moonserve_tenant": "flood"}
        asked = [asyncio.create_task(rig.post(*_text(prompt="f" * 40), **flood)) for _ in range(3)]
        while not begun.is_set() or rig.backend._prompts._waiting.used < 120:
            await asyncio.sleep(0.001)
        asked.append(asyncio.create_task(rig.post(*_text(prompt="c" * 40))))
        while rig.backend._prompts._waiting.used < 160:
            await asyncio.sleep(0.001)
        assert (await rig.post(*_text(prompt="f" * 40), **flood)).status == 429
        go_on.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
        assert order == ["f", "c", "f", "f"]

    run(use, text=Slow(), limits=Limits(offload_bytes=10, max_tokenising_bytes=144))


def test_large_bodies_take_turns_and_small_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large body the loop belongs to the streams for a while; small bodies need no turn."""
    monkeypatch.setattr(limiter_module, "_TEXT_BYTES_PER_S", 1)  # no turn ends by itself

    async def use(rig: Rig) -> None:
        large = json.dumps({**HI, "user": "x" * (1 << 20)}).encode()
        turns = rig.gateway._limiter._decoding
        assert (await rig.post(CHAT, large)).status == 200
        waiting = asyncio.create_task(rig.post(CHAT, large))
        while not turns._futures:
            await asyncio.sleep(0)
        assert (await rig.post(CHAT, HI)).status == 200
        assert not waiting.done()
        turns.end()
        assert (await waiting).status == 200
        left = asyncio.create_task(rig.post(CHAT, large))
        while not turns._futures:
            await asyncio.sleep(0)
        left.cancel()
        while turns._futures:
            await asyncio.sleep(0)
        turns.end()
        assert not turns._taken

    run(use)


def test_the_turn_of_a_large_body_is_as_long_as_its_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text is quick to decode: its turn ends, where that of as many bytes of token ids goes on."""
    monkeypatch.setattr(limiter_module, "_STRUCTURE_BYTES_PER_S", 1 << 10)

    async def use(rig: Rig) -> None:
        turns = rig.gateway._limiter._decoding
        text = json.dumps({**HI, "user": "x" * (80 << 10)}).encode()
        assert (await rig.post(CHAT, text)).status == 200
        async with asyncio.timeout(10):
            while turns._taken:
                await asyncio.sleep(0.001)
        ids = json.dumps({"model": "m", "prompt": [1] * (30 << 10), "max_tokens": 1}).encode()
        assert len(ids) > len(text)
        assert (await rig.post("/v1/completions", ids)).status in {200, 400}
        assert turns._taken

    run(use)


def test_unknown_model_names_the_known() -> None:
    """An unknown model is a 404 that names the known ones."""

    async def use(rig: Rig) -> None:
        for reply in (await rig.post(*_chat(model="gpt-9")), await rig.get("/v1/models/gpt-9")):
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["param"]) == (404, "model")
            assert error["code"] == "model_not_found"
            assert "org/big" in error["message"]

    run(use)


def test_body_over_the_limit() -> None:
    """A body over the limit is a 413 in the same shape."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(*_text(prompt="x" * 2_000))
        assert reply.status == 413
        assert json.loads(reply.body)["error"]["type"] == "invalid_request_error"

    run(use, max_body_bytes=1_000)


def test_objectives_priority_and_tenant_come_by_header() -> None:
    """The request has them; without headers it has none."""

    async def use(rig: Rig) -> None:
        headers = {"x-moonserve-ttft-slo-ms": "500", "x-moonserve-tbt-slo-ms": "20.5"}
        await rig.post(*_chat(), **headers, x_moonserve_priority="-3", x_moonserve_tenant="acme")
        await rig.post(*_chat())
        asked, plain = rig.serving.requests
        assert (asked.slo, asked.priority) == (Slo(500_000, 20_500), -3)
        assert (plain.slo, plain.priority) == (Slo(), 0)
        assert (asked.tenant, plain.tenant) == ("acme", "")
        refused = await rig.post(*_chat(), x_moonserve_priority="1e9")
        assert refused.status == 400
        assert json.loads(refused.body)["error"]["param"] == "x-moonserve-priority"

    run(use)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Overloaded("busy", "prefill_load", 7), 429),
        (NobodyAlive("nobody"), 503),
        (EngineFailed("broke"), 502),
        (DeadlineExceeded("late"), 504),
    ],
)
def test_failures_before_the_first_token_have_their_status(
    failure: Any, status: int, stream: bool
) -> None:
    """A failure before the first token has a real HTTP status, for streams too."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(*_chat(stream=stream))
        assert reply.status == status
        assert json.loads(reply.body)["error"]["message"] == str(failure)
        if status == 429:
            assert reply.headers["retry-after"] == "7"
            assert reply.headers["x-moonserve-reject-reason"] == "prefill_load"

    run(use, failure)


def test_where_no_retry_helps_none_is_told() -> None:
    """A 429 with its reason, and without Retry-After."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(*_chat())
        assert (reply.status, reply.headers["x-moonserve-reject-reason"]) == (429, "tbt_slo")
        assert "retry-after" not in reply.headers

    run(use, Overloaded("never", "tbt_slo", None))


def test_a_client_waits_since_its_headers_came() -> None:
    """The request has the time of its headers, whatever the gateway did since."""

    async def use(rig: Rig) -> None:
        before_us = seconds_to_us(asyncio.get_running_loop().time())
        assert (await rig.post(*_chat())).status == 200
        [request] = rig.serving.requests
        assert request.arrived_us is not None
        assert before_us <= request.arrived_us <= seconds_to_us(asyncio.get_running_loop().time())

    run(use)


@pytest.mark.parametrize("script", [(EngineFailed("broke"),), ()])
def test_failure_in_mid_stream_is_an_error_event(script: Sequence[Any]) -> None:
    """A failure after the first token is an error event, the stream's last; no [DONE]."""

    async def use(rig: Rig) -> None:
        events = await rig.events(CHAT, HI)
        assert events[1]["choices"][0]["delta"] == {"content": "h"}
        assert events[-1]["error"]["type"] == "engine_error"
        assert "[DONE]" not in events
        reply = await rig.post(CHAT, HI)
        assert reply.status == 502

    run(use, say("h")[0], *script)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [(), (Output((104,)),)], ids=["no token yet", "amid"])
def test_disconnect_closes_the_generation(stream: bool, first: Sequence[Any]) -> None:
    """A client that leaves ends the generation at once, streamed or not, first token or not."""

    async def use(rig: Rig) -> None:
        async def ask() -> None:
            body = json.dumps({**HI, "stream": stream}).encode()
            async with rig.client.stream(
                "POST", rig.url + CHAT, body=body, timeout_s=5, idle_timeout_s=5
            ) as reply:
                async for _ in reply:
                    pass

        task = asyncio.create_task(ask())
        await rig.serving.waiting.wait()
        assert rig.serving.open == 1
        task.cancel()
        async with asyncio.timeout(1):
            await rig.serving.ended.wait()
        assert (rig.serving.open, rig.serving.closed_early) == (0, 1)
        async with asyncio.timeout(1):
            while rig.gateway.metrics.in_flight:
                await asyncio.sleep(0.001)
        assert rig.gateway.metrics.disconnects == 1

    run(use, *first, 60.0)


def test_in_flight_bound() -> None:
    """Over the bound of generations at once, 429 with a reason; below it again, served."""

    async def use(rig: Rig) -> None:
        first = asyncio.create_task(rig.post(CHAT, HI))
        await rig.serving.waiting.wait()
        reply = await rig.post(CHAT, HI)
        assert reply.status == 429
        assert reply.headers["x-moonserve-reject-reason"] == "gateway_in_flight"
        assert reply.headers["retry-after"] == "1"
        assert (await first).status == 200
        assert (await rig.post(CHAT, HI)).status == 200

    run(use, 0.1, *say("hello"), limits=Limits(max_in_flight=1))


def test_a_flood_in_flight_leaves_others_some_places() -> None:
    """Over the limit, tenants with less than an equal share may use up to 1/8 more, and no
    further."""

    async def use(rig: Rig) -> None:
        flood, calm = {"x_moonserve_tenant": "flood"}, {"x_moonserve_tenant": "calm"}
        running = [asyncio.create_task(rig.post(CHAT, HI, **flood)) for _ in range(8)]
        while rig.gateway.metrics.in_flight < 8:
            await asyncio.sleep(0)
        assert (await rig.post(CHAT, HI, **flood)).status == 429
        running.append(asyncio.create_task(rig.post(CHAT, HI, **calm)))
        while rig.gateway.metrics.in_flight < 9:
            await asyncio.sleep(0)
        assert (await rig.post(CHAT, HI, **calm)).status == 429
        assert {reply.status for reply in await asyncio.gather(*running)} == {200}
        assert rig.gateway._limiter._in_flight.used == 0

    run(use, 0.1, *say("hello"), limits=Limits(max_in_flight=8))


async def _send(rig: Rig, data: bytes, address: str = "127.0.0.1") -> _Sent:
    """Open a connection from this address and send these bytes."""
    local = (address, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port, local_addr=local)
    writer.write(data)
    return reader, writer


def _head(size: int, tenant: str = "") -> bytes:
    """The head of a request whose body has `size` bytes."""
    named = f"x-moonserve-tenant: {tenant}\r\n" if tenant else ""
    return f"POST {CHAT} HTTP/1.1\r\nhost: m\r\n{named}content-length: {size}\r\n\r\n".encode()


async def _status(sent: _Sent) -> tuple[int, str]:
    """The status of a reply and its reason of refusal."""
    head = (await sent[0].readuntil(b"\r\n\r\n")).decode()
    reason = head.partition("x-moonserve-reject-reason: ")[2].partition("\r")[0]
    return int(head.split()[1]), reason


def test_bodies_that_never_come_take_no_place_of_a_generation() -> None:
    """A client that sends many heads and no body, each for another tenant, locks nobody out."""

    async def use(rig: Rig) -> None:
        heads = [await _send(rig, _head(150, f"t{i}")) for i in range(40)]
        await asyncio.sleep(0.05)
        assert rig.gateway.metrics.in_flight == 0
        assert (await rig.post(CHAT, HI)).status == 200
        for _, writer in heads:
            writer.close()

    run(use, limits=Limits(max_in_flight=8))


@pytest.mark.parametrize("limits", [Limits(max_bodies=8), Limits(max_bodies_bytes=8_000)])
def test_bodies_on_their_way_are_bounded_and_shared(limits: Limits) -> None:
    """One address cannot take all places for bodies, whatever tenants it names."""

    async def use(rig: Rig) -> None:
        sent = [await _send(rig, _head(1_000, f"t{i}")) for i in range(9)]
        await asyncio.sleep(0.05)
        refused = await _send(rig, _head(1_000, "t9"))
        assert await _status(refused) == (429, "gateway_bodies")
        body = json.dumps(HI).encode()
        body += b" " * (1_000 - len(body))
        other = await _send(rig, _head(1_000), "127.0.0.2")
        await asyncio.sleep(0.05)
        other[1].write(body)
        assert await _status(other) == (200, "")
        sent[0][1].write(body)
        assert await _status(sent[0]) == (200, "")
        for _, writer in [*sent, refused, other]:
            writer.close()
        assert rig.gateway.metrics.rejected["gateway_bodies"] == 1
        while rig.gateway._limiter._bodies.used:
            await asyncio.sleep(0.001)
        assert rig.gateway._limiter._bodies_bytes.used == 0

    run(use, limits=limits)


def test_a_full_gateway_refuses_before_the_body_has_come() -> None:
    """A client that will be refused need not send its body first."""

    async def use(rig: Rig) -> None:
        first = asyncio.create_task(rig.post(CHAT, HI))
        await rig.serving.waiting.wait()
        refused = await _send(rig, _head(1_000))
        assert await _status(refused) == (429, "gateway_in_flight")
        refused[1].close()
        assert (await first).status == 200

    run(use, 0.1, *say("hello"), limits=Limits(max_in_flight=1))


def test_a_flood_of_one_address_leaves_others_some_places() -> None:
    """An address that invents tenants takes the tenants' reserve, not the one of addresses."""

    async def use(rig: Rig) -> None:
        body = json.dumps(HI).encode()
        sent = [await _send(rig, _head(len(body), f"t{i}") + body) for i in range(9)]
        while rig.gateway.metrics.in_flight < 9:
            await asyncio.sleep(0)
        assert (await rig.post(CHAT, HI, x_moonserve_tenant="new")).status == 429
        other = await _send(rig, _head(len(body)) + body, "127.0.0.2")
        assert await _status(other) == (200, "")
        for one in sent:
            assert await _status(one) == (200, "")
        for _, writer in [*sent, other]:
            writer.close()

    run(use, 0.2, *say("hello"), limits=Limits(max_in_flight=8))


def test_one_ipv6_network_is_one_address() -> None:
    """A client has 2**64 addresses of IPv6; they count as one."""
    assert network("2001:db8:0:1::5") == network("2001:db8:0:1:ffff::6%eth0")
    assert network("2001:db8:0:1::5") != network("2001:db8:0:2::5")
    assert network("10.0.0.1") == "10.0.0.1"


def test_two_live_requests_never_share_an_id() -> None:
    """An id in use gets a suffix. The reply has the new id in its header and its body."""

    async def use(rig: Rig) -> None:
        replies = await asyncio.gather(*(rig.post(CHAT, HI, x_request_id="r") for _ in range(2)))
        served = {request.id for request in rig.serving.requests}
        assert len(served) == 2
        assert "r" in served
        assert {reply.headers["x-request-id"] for reply in replies} == served
        for reply in replies:
            assert json.loads(reply.body)["id"] == f"chatcmpl-{reply.headers['x-request-id']}"

    run(use, 0.05, *say("hello"))


@pytest.mark.parametrize("stream", [False, True])
def test_draining_refuses_new_generations_and_ends_running_ones_whole(stream: bool) -> None:
    """After drain, new generations get a 503, GETs are served, and idle waits for running ones."""

    async def use(rig: Rig) -> None:
        running = asyncio.create_task(rig.post(*_chat(stream=stream)))
        await rig.serving.waiting.wait()
        rig.gateway.drain()
        for path in (CHAT, TEXT):
            refused = await rig.post(path, HI if path == CHAT else ONCE)
            assert (refused.status, refused.headers["retry-after"]) == (503, "2")
            assert "shutting down" in json.loads(refused.body)["error"]["message"]
        statuses = [(await rig.get(p)).status for p in ("/v1/models", "/metrics")]
        assert statuses == [200, 200]
        assert (await rig.get("/ready")).status == 503
        assert not await rig.gateway.idle(0.01)
        assert not running.done()
        assert await rig.gateway.idle(5)
        # Nothing is left to cut.
        await rig.server.stop(0)
        reply = await running
        assert reply.status == 200
        assert b"[DONE]" in reply.body if stream else b'"hello"' in reply.body

    # The stream is in the middle of its text during the wait.
    first, *rest = say("hello", 5)
    run(use, *((first, 0.2) if stream else (0.2, first)), *rest)


def test_idle_at_once_where_nothing_runs() -> None:
    """With nothing under way, idle does not wait."""

    async def use(rig: Rig) -> None:
        assert (await rig.post(CHAT, HI)).status == 200
        assert await rig.gateway.idle(0)

    run(use)


def test_long_prompts_are_tokenised_off_the_loop() -> None:
    """A prompt over the offload limit gives the same tokens."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(*_text(model="org/big", prompt="y" * 50_000))
        assert reply.status == 200
        assert rig.serving.requests[0].prompt == (121,) * 50_000

    run(use)


def test_a_body_of_structure_is_refused_and_one_of_text_is_not() -> None:
    """Some MiB of brackets are refused before they are decoded; as much text is decoded."""

    async def use(rig: Rig) -> None:
        brackets = b'{"model":"m","prompt":[%b]}' % b",".join([b"[]"] * 6_000_000)
        reply = await rig.post(TEXT, brackets)
        error = json.loads(reply.body)["error"]
        assert (reply.status, "outside strings" in error["message"]) == (400, True)
        text = await rig.post(CHAT, {**HI, "user": "[],{" * 5_000_000})
        assert text.status == 200

    run(use, max_body_bytes=32 << 20)


def test_clients_take_turns_at_the_metrics() -> None:
    """A client that asks for /metrics all the time does not keep others from it."""

    async def use(rig: Rig) -> None:
        asked = b"GET /metrics HTTP/1.1\r\nhost: m\r\n\r\n"
        flood = [await _send(rig, asked * 5) for _ in range(4)]
        other = await _send(rig, asked, "127.0.0.2")
        assert await _status(other) == (200, "")
        rendering = rig.gateway._limiter._rendering
        async with asyncio.timeout(5):
            while rendering._taken:
                await asyncio.sleep(0.001)
        for _, writer in [*flood, other]:
            writer.close()

    run(use)


def test_a_503_says_how_many_instances_have_joined() -> None:
    """While they still join; later it has its own reason only."""

    async def use(rig: Rig) -> None:
        joined = ["1 of 3 instances have joined"]
        rig.gateway._health.report_unready(lambda: joined[0])
        for after in ("; 1 of 3 instances have joined", ""):
            reply = await rig.post(*_chat())
            assert reply.status == 503
            assert json.loads(reply.body)["error"]["message"] == f"no instance{after}"
            joined[0] = ""

    run(use, NobodyAlive("no instance"))


def test_models_ready() -> None:
    """Models are listed with their context; /ready depends on whether any model is alive."""

    async def use(rig: Rig) -> None:
        listed = json.loads((await rig.get("/v1/models")).body)
        assert listed["object"] == "list"
        assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [
            ("m", 100),
            ("org/big", 1_000_000),
        ]
        assert json.loads((await rig.get("/v1/models/org/big")).body)["id"] == "org/big"
        reply = await rig.get("/v1/models/")
        assert (reply.status, b"did you mean /v1/models?" in reply.body) == (404, True)
        assert (await rig.get("/ready")).status == 200
        rig.serving.cards = rig.serving.cards[1:]
        assert (await rig.get("/ready")).status == 503

    run(use)


def test_metrics() -> None:
    """/metrics has the counts of what happened."""

    async def use(rig: Rig) -> None:
        await rig.post(CHAT, HI)
        await rig.events(TEXT, ONCE)
        await rig.post(*_chat(n=0))
        text = (await rig.get("/metrics")).body.decode()
        for line in [
            'moonserve_requests_total{route="/v1/chat/completions",status="200"} 1.0',
            'moonserve_requests_total{route="/v1/chat/completions",status="400"} 1.0',
            'moonserve_requests_total{route="/v1/completions",status="200"} 1.0',
            "moonserve_ttft_seconds_count 2.0",
            "moonserve_tbt_seconds_count 10.0",
            "moonserve_prompt_tokens_total 13.0",
            "moonserve_cached_tokens_total 6.0",
            "moonserve_completion_tokens_total 12.0",
            "moonserve_requests_in_flight 0.0",
            "moonserve_client_disconnects_total 0.0",
        ]:
            assert line in text.splitlines(), line

    run(use, *say("hello", cached=3))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_UNJUDGED = ["ignore_eos", "stream", "stream_options", "n", "tools", "logprobs", "echo"]
_fields = st.sampled_from(
    [*sorted({p.split("[")[0].split(".")[0] for _, p in BAD if p}), *_UNJUDGED]
)
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "x"]), "content": _json}
)
_bodies = st.binary(max_size=40) | st.builds(
    lambda base, odd: json.dumps({**base, **odd}).encode(),
    st.sampled_from([HI, ONCE, {"model": "m"}])
    | st.builds(lambda m: {"model": "m", "messages": m}, st.lists(_message, max_size=3)),
    st.dictionaries(_fields, _json, max_size=3),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([CHAT, TEXT]), _bodies), min_size=1, max_size=5))
def test_no_body_breaks_the_gateway(asks: list[tuple[str, bytes]]) -> None:
    """Whatever the body, the answer is a reply or a 4xx, in time, and nothing stays open."""

    async def use(rig: Rig) -> None:
        for path, body in asks:
            reply = await rig.post(path, body)
            assert reply.status == 200 or 400 <= reply.status < 500, (body, reply.body)

    run(use)
