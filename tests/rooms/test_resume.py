"""A stream whose engine is lost goes on at another one, or ends with an error that says why not.

The engines are tests.support.fake_vllm. Every test ends with a ledger of zeros.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Connector, Role
from moonserve.live.external.member import Member
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import sse_events
from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.external_site import Site, run
from tests.support.fake_vllm import FakeVllm, spoken
from tests.support.inproc import TOKEN
from tests.support.inproc import site as own_site
from tests.support.records import record_of
from tests.support.serving import ByteText

Pool = tuple[str, Role, Connector]
TWO: list[Pool] = [("a", "both", "none"), ("b", "both", "none")]
NIXL: list[Pool] = [("p", "prefill", "nixl"), ("d", "decode", "nixl"), ("e", "decode", "nixl")]
MOONCAKE: list[Pool] = [
    ("p", "prefill", "mooncake"),
    ("d", "decode", "mooncake"),
    ("e", "decode", "mooncake"),
]
V = "0.32.0"
SLOW = Cost((20_000, 0, 0, 0, 20_000, 0, 0), learns=False)
"""A pass of a worker of ours takes 20 ms."""
PROMPT = "the quick brown fox jumps over the lazy dog, and then once more. " * 3
MESSAGES = [{"role": "user", "content": PROMPT}]
TEXT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12}
USAGE = {"stream_options": {"include_usage": True}}


def said(body: dict[str, Any], count: int = 12) -> str:
    """What an engine that is not disturbed says."""
    if "prompt" in body:
        return "".join(spoken(list(PROMPT.encode()), count))
    text = ByteText()
    ids = text.encode(text.render_chat(MESSAGES), add_bos=False)
    return "".join(spoken(ids, count))


def text_of(event: dict[str, Any]) -> str:
    """The text of an event in either form."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in event.get("choices", ())
    )


async def broken(site: Site, body: dict[str, Any], *after: int) -> list[dict[str, Any]]:
    """The events of a stream whose engine is killed after so many events; then the next one, if the
    stream has not ended by then."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    raw = msgspec.json.encode({"model": "m", "stream": True, **body})
    for engine in site.engines.values():
        engine.token_s = 0.01
    left, seen = [*after], []
    async with site.http.stream(
        "POST",
        site.url + path,
        headers={"x-request-id": "r-1"},
        body=raw,
        timeout_s=20,
        idle_timeout_s=20,
    ) as reply:
        assert reply.status == 200, await reply.read()
        async for data in sse_events(reply):
            seen.append(msgspec.json.decode(data))
            if left and len(seen) >= left[0]:
                left.pop(0)
                for engine in site.engines.values():
                    if engine.running:
                        await engine.stop()
    return seen


def streaming(site: Site) -> FakeVllm:
    """The engine that streams now."""
    [engine] = [it for it in site.engines.values() if it.running]
    return engine


@pytest.mark.parametrize("pools", [TWO, NIXL, MOONCAKE])
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_a_stream_goes_on_at_another_engine(body: dict[str, Any], pools: list[Pool]) -> None:
    """No token comes twice and none is missing; head, role and usage are those of one request."""

    async def use(site: Site) -> None:
        events = await broken(site, {**body, **USAGE}, 5)
        assert "".join(map(text_of, events)) == said(body)
        assert len({(it["id"], it["created"], it["object"], it["model"]) for it in events}) == 1
        roles = [it for it in events if "role" in str(it.get("choices"))]
        assert len(roles) == ("messages" in body)
        [usage] = [it["usage"] for it in events if it.get("usage")]
        prompt = len(ByteText().encode(ByteText().render_chat(MESSAGES), add_bos=False))
        prompt = len(PROMPT) if "prompt" in body else prompt
        counts = [usage[f"{it}_tokens"] for it in ("prompt", "completion", "total")]
        assert counts == [prompt, 12, prompt + 12]
        finishes = [c.get("finish_reason") for it in events for c in it["choices"]]
        assert [it for it in finishes if it] == ["length"]
        assert "token_ids" not in re.sub(r"'(prompt_)?token_ids': None", "", str(events))
        await site.settled()
        measured = record_of(site.conductor, "r-1").measured
        assert (measured.tokens, record_of(site.conductor, "r-1").outcome) == (12, "length")
        assert site.backend.metrics.resumed == 1
        first, *_, last = [it for name in site.engines for it in site.engines[name].calls]
        assert {first.path, last.path} >= {"/v1/completions"}

    run(use, *pools, version=V)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_clients_get_the_bytes_that_they_would_get_without(
    body: dict[str, Any], stream_options: dict[str, Any] | None, wanted: bool
) -> None:
    """The ids that the gateway asks for do not reach clients that have not asked for them."""
    seen: list[bytes] = []

    async def use(site: Site) -> None:
        asked = {**body, "stream": True, "stream_options": stream_options}
        if wanted:
            asked["return_token_ids"] = True
        reply = await site.post(asked, chat="messages" in body, x_request_id="r-1")
        seen.append(re.sub(rb'"created":\d+', b"", reply.body))
        [call] = [it for name in site.engines for it in site.engines[name].calls]
        assert call.body.pop("return_token_ids", False) is (wanted or bool(site.version))
        asked.pop("return_token_ids", None)
        assert call.body == {"model": "m", **asked}
        if site.version:  # else tokens are counted by events
            assert [note.count for note in site.fleet.notes] == [12]

    for version in ("", V):
        run(use, ("a", "both", "none"), version=version)
    assert seen[0] == seen[1]
    assert (b'token_ids":[' in seen[0]) is wanted


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_no_character_is_torn_where_engines_change(body: dict[str, Any], together: int) -> None:
    """Tokens whose text has not come are generated again; text that has come is not repeated."""

    async def use(site: Site) -> None:
        for engine in site.engines.values():
            engine.halves, engine.together = True, together
        events = await broken(site, {**body, **USAGE, "max_tokens": 30}, 3, 5)
        assert "".join(map(text_of, events)) == said(body, 15)
        assert events[-1]["usage"]["completion_tokens"] == 30
        assert site.backend.metrics.resumed == 2

    run(use, *TWO, ("c", "both", "none"), version=V)


def test_a_client_that_wants_the_ids_gets_each_once() -> None:
    """The prompt's ids come with the first event only."""

    async def use(site: Site) -> None:
        events = await broken(site, {**TEXT, "return_token_ids": True}, 4)
        choices = [choice for it in events for choice in it["choices"]]
        ids = [it for choice in choices for it in choice["token_ids"]]
        whole = await site.post(
            {**TEXT, "stream": True, "return_token_ids": True, "prompt": PROMPT}
        )
        undisturbed = re.findall(rb'"token_ids":\[(\d+)\]', whole.body)
        assert ids == list(map(int, undisturbed))
        assert [bool(it["prompt_token_ids"]) for it in choices] == [True] + [False] * 11

    run(use, *TWO, version=V)


@pytest.mark.parametrize(
    ("pools", "together", "halves"),
    [
        ([*TWO, ("c", "both", "none")], 1, False),
        ([*TWO, ("c", "both", "none")], 1, True),
        ([*NIXL, ("f", "decode", "nixl")], 3, False),
    ],
)
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_a_stop_string_ends_the_answer_wherever_it_stands(
    body: dict[str, Any], pools: list[Pool], together: int, halves: bool
) -> None:
    """Before, across and after the joint: text, reason and usage are those of one engine. So it is
    where events have several tokens, of which some come after the string."""
    whole, resumed = said(body, 12), []
    for begin in range(8, len(whole) - 9, 7):
        stop = whole[begin : begin + 9]
        asked = {**body, **USAGE, "stop": ["not there, and longer", stop], "max_tokens": 24}

        async def use(site: Site, asked: dict[str, Any] = asked) -> None:
            for engine in site.engines.values():
                engine.halves, engine.together = halves, together
            path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
            calm = await site.send(path, {**asked, "stream": True})
            lines = [it[6:] for it in calm.body.split(b"\n\n") if it.startswith(b"data: {")]
            before = [msgspec.json.decode(it) for it in lines]
            after = await broken(site, asked, 3 // together, 6 // together)
            assert "".join(map(text_of, after)) == "".join(map(text_of, before))
            reasons = [
                [choice.get(name) for event in events for choice in event["choices"]][-1]
                for events in (before, after)
                for name in ("finish_reason", "stop_reason")
            ]
            assert reasons[:2] == reasons[2:]
            usages = [events[-1]["usage"] for events in (before, after)]
            assert usages[0]["completion_tokens"] == usages[1]["completion_tokens"]
            assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
            resumed.append(site.backend.metrics.resumed)

        run(use, *pools, version=V)
    assert sum(resumed) >= len(resumed)


def test_sampling_settings_go_on_and_limits_count_what_was_sent() -> None:
    """The other engine gets the settings of the client, and what is left of its limits."""
    settings = {"temperature": 0.5, "seed": 7, "top_p": 0.9, "stop_token_ids": [3]}
    more = {**settings, "min_tokens": 8, "user": "u", "logit_bias": {"5": -1}}

    async def use(site: Site) -> None:
        await broken(site, {**CHAT, **more, "max_completion_tokens": 10, "max_tokens": 99}, 4)
        first, second = sorted(
            (it for name in site.engines for it in site.engines[name].calls),
            key=lambda it: it.at_s,
        )
        known = len(second.body["prompt"]) - len(ByteText().render_chat(MESSAGES).encode())
        left = {"max_tokens": 10 - known, "min_tokens": 8 - known}
        assert known == 3
        assert {name: second.body[name] for name in left} == left
        expected = {**settings, "user": "u", "logit_bias": {"5": -1}}
        assert {name: second.body[name] for name in expected} == expected
        assert not {"messages", "max_completion_tokens"} & second.body.keys()
        assert second.headers["x-request-id"] == first.headers["x-request-id"] == "r-1"

    run(use, *TWO, version=V)


OBSTACLES: list[tuple[dict[str, Any], str]] = [
    ({**TEXT, "logprobs": 0}, "logprobs"),
    ({**CHAT, "logprobs": True}, "logprobs"),
    ({**TEXT, "stop": ["\n"], "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({**TEXT, "stop": ["\n"], "min_tokens": 3}, "min_tokens"),
    ({**TEXT, "presence_penalty": 0.5}, "presence_penalty"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({**TEXT, "bad_words": ["no"]}, "bad_words"),
    ({**TEXT, "a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "max_tokens": 12},
        "parts of messages that are no text",
    ),
]


@pytest.mark.parametrize(("body", "field"), OBSTACLES)
def test_what_another_engine_cannot_go_on_with_ends_with_the_reason(
    body: dict[str, Any], field: str
) -> None:
    """The error event names the field, and the body passed as it came."""

    async def use(site: Site) -> None:
        events = await broken(site, body, 3)
        message = events[-1]["error"]["message"]
        assert "; the stream cannot go on elsewhere: " in message
        assert field in message
        [call] = [it for name in site.engines for it in site.engines[name].calls]
        assert call.raw == msgspec.json.encode({"model": "m", "stream": True, **body})

    run(use, *TWO, version=V)


FREE: list[dict[str, Any]] = [
    {**TEXT, "logprobs": None, "n": 1, "stop": [], "presence_penalty": 0, "echo": False},
    {**CHAT, "response_format": {"type": "text"}, "logprobs": False, "tools": None},
    {
        **CHAT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
    },
    {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
]


@pytest.mark.parametrize("body", FREE)
def test_fields_without_effect_are_no_obstacle(body: dict[str, Any]) -> None:
    """They have the value that means: not used."""

    async def use(site: Site) -> None:
        events = await broken(site, body, 3)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert site.backend.metrics.resumed == 1

    run(use, *TWO, version=V)


@pytest.mark.parametrize(("version", "on"), [("0.10.1", True), (V, False)])
def test_without_ids_a_stream_ends_with_its_engine(version: str, on: bool) -> None:
    """An engine that does not report ids, and a gateway that is set so, work as without this."""

    async def use(site: Site) -> None:
        if not on:
            caller = msgspec.structs.replace(site.backend.caller, resumes=False)
            site.backend.caller = caller
        message = (await broken(site, TEXT, 3))[-1]["error"]["message"]
        reason = "its engine does not report the ids of tokens" if on else "--no-resume is set"
        assert reason in message

    run(use, *TWO, version=version)


@pytest.mark.parametrize("more", [{}, {"stop": ["not there"]}])
def test_an_engine_that_stops_gives_its_streams_to_others(more: dict[str, Any]) -> None:
    """vLLM ends streams with "abort" at SIGTERM, and with the text that it held back; the client
    does not see it."""

    async def use(site: Site) -> None:
        site.engines["a"].abort_after = site.engines["b"].abort_after = 4
        reading = asyncio.create_task(broken(site, {**TEXT, **more}))
        while not any(engine.calls for engine in site.engines.values()):
            await asyncio.sleep(0.001)
        for engine in site.engines.values():
            if not engine.calls:
                engine.abort_after = None
        events = await reading
        assert "".join(map(text_of, events)) == said(TEXT)
        assert "abort" not in str(events)

    run(use, *TWO, version=V)


def test_a_restarted_engine_is_left_too() -> None:
    """The gateway ends the call itself; no piece that comes meanwhile is lost or sent twice."""

    async def use(site: Site) -> None:
        for engine in site.engines.values():
            engine.token_s = 0.01
        seen = []
        async with site.stream(TEXT) as events:
            async for event in events:
                seen.append(event)
                if len(seen) == 4:
                    site.rejoin(streaming(site).name)
        assert "".join(map(text_of, seen)) == said(TEXT)

    run(use, *TWO, version=V)


def test_parts_that_parsers_make_do_not_go_on() -> None:
    """What a reasoning parser has read so far is known to its engine only."""

    async def use(site: Site) -> None:
        for engine in site.engines.values():
            engine.parsers = True
        message = (await broken(site, CHAT, 3))[-1]["error"]["message"]
        assert "it has parts that its engine's parsers make" in message

    run(use, *TWO, version=V)


def test_an_engine_that_refuses_to_go_on_ends_the_stream() -> None:
    """Its 4xx is not the client's, and nothing is tried again."""

    async def use(site: Site) -> None:
        site.engines["b"].max_len = site.engines["a"].max_len = len(PROMPT) + 16
        reading = asyncio.create_task(broken(site, TEXT, 3))
        while not any(engine.calls for engine in site.engines.values()):
            await asyncio.sleep(0.001)
        for engine in site.engines.values():
            if not engine.calls:
                engine.max_len = 100
        message = (await reading)[-1]["error"]["message"]
        assert "refused to go on with the stream" in message

    run(use, *TWO, version=V)


@pytest.mark.parametrize(
    ("version", "engine", "reports"),
    [
        ("0.10.2", "vllm", True),
        ("0.32.0+cpu", "vllm", True),
        ("v1.0", "vllm", True),
        ("0.10.1.1", "vllm", False),
        ("0.9.2", "vllm", False),
        ("main", "vllm", False),
        ("", "vllm", False),
        ("0.32.0", "sglang", False),
    ],
)
def test_which_engines_report_ids(version: str, engine: Any, reports: bool) -> None:
    """vLLM since 0.10.2 does; of an unknown version, nothing is assumed."""
    member = Member(InstanceSpec(name="a", url="http://a", engine=engine), None)  # type: ignore[arg-type]
    member.version = version
    assert member.reports_ids is reports


def test_a_stream_of_our_own_worker_goes_on_at_another_one() -> None:
    """Workers of ours that serve as engines report their version, and the ids of tokens."""

    async def use(site: Site) -> None:
        async with own_site() as own:
            for name in ("a", "b"):
                worker = await own.add(name, "both", SLOW)
                spec = InstanceSpec(name=name, url=worker.info.url, role="both", connector="none")
                member = Member(spec, site.http, TOKEN)
                reply = await member.ask("/version")
                member.version = msgspec.json.decode(reply.body)["version"]
                site.fleet.members[worker.info.id] = member
                site.join(msgspec.structs.replace(worker.info, connector="none"))
            prompt = list(range(2, 66))
            body = {
                "model": DEFAULT_MODEL,
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                **USAGE,
            }
            events: list[dict[str, Any]] = []
            async with site.http.stream(
                "POST",
                site.url + "/v1/completions",
                body=msgspec.json.encode(body),
                timeout_s=20,
                idle_timeout_s=20,
            ) as stream:
                async for data in sse_events(stream):
                    events.append(msgspec.json.decode(data))
                    if len(events) == 4:
                        workers = own.workers.items()
                        [busy] = [name for name, it in workers if it.runner.ledger().running]
                        await own.lose(busy)
            assert "error" not in str(events)
            assert events[-1]["usage"]["completion_tokens"] == 12
            assert events[-1]["usage"]["prompt_tokens"] == len(prompt)
            assert site.backend.metrics.resumed == 1

    run(use)
