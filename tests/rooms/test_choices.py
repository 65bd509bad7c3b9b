"""n, several prompts, logprobs and logit_bias at the gateway, over a scripted cluster."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from moonserve.core.errors import EngineFailed, Overloaded
from moonserve.core.request import Penalties, Request, Shaping, TokenLogprobs
from moonserve.core.units import RequestId
from moonserve.live.api.limiter import Limits
from moonserve.live.ports import Output
from tests.support.gateway_rig import Rig, run
from tests.support.serving import EOS, FakeServing, say

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ONCE: dict[str, Any] = {"model": "m", "prompt": "once"}


def play(rig: Rig, *scripts: list[Any]) -> None:
    """Request number i gets script number i."""
    left = list(scripts)
    plain = FakeServing.generate

    async def scripted(request: Request) -> AsyncGenerator[Output, None]:
        rig.serving.script = left.pop(0)
        async for output in plain(rig.serving, request):
            yield output

    rig.serving.generate = scripted  # type: ignore[method-assign]


def test_choices_of_a_whole_reply() -> None:
    """In the order of their indices, with seeds one after the other and usage of all."""

    async def use(rig: Rig) -> None:
        play(rig, say("abc", cached=4), say("de"), say("f"))
        body = {**HI, "n": 3, "seed": 5, "return_token_ids": True}
        got = json.loads((await rig.post(CHAT, body, x_request_id="r")).body)
        said = [(it["index"], it["message"]["content"]) for it in got["choices"]]
        assert said == [(0, "abc"), (1, "de"), (2, "f")]
        assert [len(it["token_ids"]) for it in got["choices"]] == [4, 3, 2]
        assert got["usage"] == {
            "prompt_tokens": 9,
            "completion_tokens": 9,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        asked = rig.serving.requests
        assert [it.id for it in asked] == ["r", "r.1", "r.2"]
        assert [it.sampling.seed for it in asked] == [5, 6, 7]
        assert rig.gateway.metrics.prompt_tokens == 9

    run(use)


def test_choices_of_a_stream() -> None:
    """Each has its role, its text and its end; there is one id, one usage and one [DONE]."""

    async def use(rig: Rig) -> None:
        play(rig, say("abc"), say("de"))
        body = {**HI, "n": 2, "stream_options": {"include_usage": True}}
        events = await rig.events(CHAT, body)
        assert events.pop() == "[DONE]"
        assert events.pop()["usage"]["completion_tokens"] == 7
        assert len({event["id"] for event in events}) == 1
        choices = [choice for event in events for choice in event["choices"]]
        for index, text in ((0, "abc"), (1, "de")):
            mine = [it for it in choices if it["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            assert "".join(it["delta"].get("content", "") for it in mine) == text
            assert [it["finish_reason"] for it in mine if it["finish_reason"]] == ["stop"]

    run(use)


def test_several_prompts() -> None:
    """Choices go by prompt, then by n; usage has each prompt once."""

    async def use(rig: Rig) -> None:
        play(rig, say("a"), say("b"), say("c"), say("d"))
        body = {"model": "m", "prompt": ["one", "three"], "n": 2}
        got = json.loads((await rig.post(TEXT, body, x_request_id="r")).body)
        prompts = [bytes(it.prompt).decode() for it in rig.serving.requests]
        said = dict(zip([it.id for it in rig.serving.requests], "abcd", strict=True))
        assert sorted(prompts) == ["one", "one", "three", "three"]
        names = ("r", "r.1", "r-2", "r-2.1")
        assert [it["text"] for it in got["choices"]] == [said[RequestId(name)] for name in names]
        assert got["usage"]["prompt_tokens"] == 8
        ids = {"model": "m", "prompt": [[1, 2], [3]]}
        play(rig, *[say("a")] * 6)
        assert len(json.loads((await rig.post(TEXT, ids)).body)["choices"]) == 2

    run(use)


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_gets_all_choices_or_none(stream: bool) -> None:
    """If one is refused, the reply is that refusal, and the others are given up."""

    async def use(rig: Rig) -> None:
        play(rig, [*say("a"), 60.0], [Overloaded("full", "queue_full", 2)], [60.0])
        reply = await rig.post(CHAT, {**HI, "n": 3, "stream": stream})
        assert reply.status == 429
        assert reply.headers["retry-after"] == "2"

    run(use)


def test_a_choice_that_fails_later_ends_the_stream() -> None:
    """The last event is its error."""

    async def use(rig: Rig) -> None:
        play(rig, [*say("a")[:1], 0.01, EngineFailed("it broke")], say("b"))
        events = await rig.events(CHAT, {**HI, "n": 2})
        assert events[-1]["error"]["message"] == "it broke"

    run(use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_ends_the_request_too(stream: bool) -> None:
    """The client does not wait for a choice that will never come."""

    async def use(rig: Rig) -> None:
        play(rig, [*say("a"), 60.0], [ZeroDivisionError("a bug")])
        reply = await rig.post(CHAT, {**HI, "n": 2, "stream": stream})
        assert reply.status == 500

    run(use)


def test_each_choice_takes_a_place_of_the_gateway() -> None:
    """A request with more choices than places is refused, and all places are free again."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(CHAT, {**HI, "n": 9})
        assert reply.headers["x-moonserve-reject-reason"] == "gateway_in_flight"
        assert rig.gateway.metrics.in_flight == 0
        assert not rig.serving.requests
        play(rig, say("a"), say("b"))
        assert (await rig.post(CHAT, {**HI, "n": 2})).status == 200

    run(use, limits=Limits(max_in_flight=4))


LIKELY = TokenLogprobs(-0.5, ((97, -0.5), (EOS, -2.0)))


def script() -> list[Output]:
    """ "é" in two tokens, "a" and the end, each with log probabilities."""
    ids = [*"é".encode(), 97]
    outputs = [Output((id,), None, 0 if at == 0 else None, (LIKELY,)) for at, id in enumerate(ids)]
    return [*outputs, Output((EOS,), "stop", None, (TokenLogprobs(-1.0, ()),))]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(stream: bool) -> None:
    """Every token once, with its bytes and the likeliest ones, streamed or not."""

    async def use(rig: Rig) -> None:
        body = {**HI, "logprobs": True, "top_logprobs": 2}
        if stream:
            events = (await rig.events(CHAT, body))[1:-1]
            choices = [event["choices"][0] for event in events]
        else:
            choices = json.loads((await rig.post(CHAT, body)).body)["choices"]
        given = [it["logprobs"] for it in choices if it["logprobs"] is not None]
        found = [it for one in given for it in one["content"]]
        assert [it["bytes"] for it in found] == [[195], [169], [97], [*b"<eos>"]]
        assert [it["logprob"] for it in found] == [-0.5, -0.5, -0.5, -1.0]
        assert found[2]["token"] == "a"
        assert [(x["token"], x["logprob"]) for x in found[2]["top_logprobs"]] == [
            ("a", -0.5),
            ("<eos>", -2.0),
        ]
        (request,) = rig.serving.requests
        assert request.sampling.shaping == Shaping(logprobs=2)

    run(use, *script())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(stream: bool) -> None:
    """Lists of tokens, numbers, the likeliest ones and where each token begins."""

    async def use(rig: Rig) -> None:
        body = {**ONCE, "logprobs": 2}
        if stream:
            choices = [it["choices"][0] for it in (await rig.events(TEXT, body))[:-1]]
        else:
            choices = json.loads((await rig.post(TEXT, body)).body)["choices"]
        found: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in choice["logprobs"].items():
                found.setdefault(name, []).extend(values)
        assert found["token_logprobs"] == [-0.5, -0.5, -0.5, -1.0]
        assert found["tokens"][2:] == ["a", "<eos>"]
        assert found["text_offset"] == [0, 1, 2, 3]
        assert found["top_logprobs"][2] == {"a": -0.5, "<eos>": -2.0}

    run(use, *script())


def test_biases_and_minimum_travel_with_the_request() -> None:
    """As numbers, like penalties; a stop string in the text of the first tokens does not end it."""

    async def use(rig: Rig) -> None:
        body = {**HI, "logit_bias": {"97": -100, "98": 2.5}, "min_tokens": 3, "stop": "l"}
        body |= {"presence_penalty": -1, "repetition_penalty": 1.5}
        got = json.loads((await rig.post(CHAT, body)).body)
        assert got["choices"][0]["message"]["content"] == "hel"
        (request,) = rig.serving.requests
        penalties = Penalties(-1, 0, 1.5)
        assert request.sampling.shaping == Shaping(((97, -100), (98, 2.5)), penalties=penalties)
        assert request.stopping.min_tokens == 3

    run(use)


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 33}, "n"),
        (TEXT, {"n": 2, "prompt": ["a"] * 17}, "n"),
        (TEXT, {"prompt": ["a"] * 33}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt[1]"),
        (TEXT, {"prompt": ["a", ""]}, "prompt"),
        (TEXT, {"prompt": [[1]] * 33}, "prompt"),
        (TEXT, {"prompt": [[1], [999]]}, "prompt[1][0]"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"257": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
        (CHAT, {"logit_bias": {str(i): 1 for i in range(1_025)}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1" * 70_000: 1}}, "logit_bias"),
        (CHAT, {"min_tokens": -1}, "min_tokens"),
    ],
)
def test_a_400_names_the_field(path: str, more: dict[str, Any], param: str) -> None:
    """Before any choice begins."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(path, {**(HI if path == CHAT else ONCE), **more})
        assert reply.status == 400, reply.body
        assert json.loads(reply.body)["error"]["param"] == param
        assert not rig.serving.requests

    run(use)
