"""response_format with our own workers: JSON by a schema, in a cluster of fake engines.

The fake engine samples any allowed token, so only the grammar makes its text JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moonserve.core.errors import EngineFailed
from moonserve.core.schedule.facts import Role
from moonserve.live.engine.fake import fake_cost
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import sse_events
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.text.grammar import Grammars, check_schema
from moonserve.live.text.tokenizer import load_tokenizer
from tests.support.gateway_rig import Rig, run
from tests.support.inproc import TOKEN, Site, site

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WORDS = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 9, "maxItems": 9}
FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}}

CHAIN: dict[str, Any] = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
LATER = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a", "b"],
    "$defs": {"b": {**CHAIN, "properties": {"n": {"$ref": "#/$defs/b"}}}},
}
ALL_OF = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}


@asynccontextmanager
async def unchecked(patch: pytest.MonkeyPatch, *names: str) -> AsyncIterator[Site]:
    """A cluster whose gateway lets every schema through to the workers with these names: p0 is a
    prefill worker, d0 a decode worker."""
    patch.setattr("moonserve.live.api.own_text.check_schema", lambda *asked: None)
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)
    async with site() as it:
        for name in names:
            role: Role = "prefill" if name.startswith("p") else "decode"
            await it.add(name, role, tokenizer=tokenizer)
        yield it


async def said(it: Site, losing: int = -1) -> str:
    """The text of a stream; after so many chunks the decode worker that runs it is lost."""
    body = {"model": DEFAULT_MODEL, **HI, "stream": True, "temperature": 0, "max_tokens": 200}
    chunks = []
    async with it.http.stream(
        "POST",
        it.url + CHAT,
        body=json.dumps({**body, "response_format": FORMAT}).encode(),
        timeout_s=20,
        idle_timeout_s=20,
    ) as reply:
        assert reply.status == 200, await reply.read()
        async for event in sse_events(reply):
            chunks.append(json.loads(event)["choices"][0])
            if len(chunks) == losing:
                (busy,) = it.busy_decode()
                await it.lose(busy)
    assert chunks[-1]["finish_reason"] == "stop"
    return "".join(it["delta"].get("content", "") for it in chunks)


def test_the_text_follows_its_schema_also_after_a_lost_worker() -> None:
    """The worker that takes over knows how far the text is in its schema: the text is that of an
    undisturbed stream."""
    pytest.importorskip("llguidance")

    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)

    async def main() -> None:
        async with site() as it:
            await it.add("p0", "prefill", tokenizer=tokenizer)
            for name in ("d0", "d1"):
                await it.add(name, "decode", fake_cost(200, 10, 4_000), tokenizer=tokenizer)
            text = await said(it)
            words = json.loads(text)
            assert len(words) == 9
            assert set(words) == {"yes", "no"}
            assert await said(it, losing=6) == text
            await it.settle()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_without_the_package_is_named(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets a 501 that says what to install at which worker, at once."""
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def main() -> None:
        async with unchecked(monkeypatch, "p0", "d0") as it:
            body = {"model": DEFAULT_MODEL, **HI, "stream": stream, "response_format": FORMAT}
            reply = await it.http.request(
                "POST", it.url + CHAT, body=json.dumps(body).encode(), timeout_s=20
            )
            assert reply.status == 501, reply.body
            said = json.loads(reply.body)["error"]["message"]
            assert said.startswith(
                "p0: response_format and tool_choice need the package llguidance"
            )
            assert "pip install 'moonserve[grammar]'" in said

    asyncio.run(main())


@pytest.mark.parametrize("schema", [CHAIN, LATER], ids=["prefill", "decode"])
def test_a_schema_that_fails_at_a_worker_is_the_fault_of_the_request(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets a 400 after one attempt, with the field, and the cluster has not failed:
    every other worker would fail as well."""
    pytest.importorskip("llguidance")

    async def main() -> None:
        async with unchecked(monkeypatch, "p0", "p1", "d0") as it:
            wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"model": DEFAULT_MODEL, **HI, "response_format": wanted, "max_tokens": 50}
            reply = await it.http.request(
                "POST", it.url + CHAT, body=json.dumps(body).encode(), timeout_s=20
            )
            assert reply.status == 400, reply.body
            error = json.loads(reply.body)["error"]
            assert error["code"] == "json_schema_failed"
            field = "response_format.json_schema.schema"
            assert error["param"] == field
            assert error["message"].startswith(f"{field}: the JSON schema")
            assert "its text would have no end" in error["message"]
            path = f"/api/decisions/{reply.headers['x-request-id']}"
            shown = await it.http.request("GET", it.url + path, headers=bearer(TOKEN), timeout_s=20)
            record = json.loads(shown.body)
            assert (record["outcome"], record["attempts"]) == ("engine answered 400", 1)

    asyncio.run(main())


def test_tokens_that_do_not_fit_are_an_error() -> None:
    """They cannot come from a worker that kept to the schema."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)
    grammars = Grammars(tokenizer)
    grammar = grammars.grammar(json.dumps(WORDS), tokenizer.encode('["yes"'))
    (next_item,) = tokenizer.encode(',"')
    assert grammar.allowed()[next_item // 8] >> next_item % 8 & 1
    with pytest.raises(EngineFailed, match="JSON schema"):
        grammar.take(tokenizer.encode("{"))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {**FORMAT, "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "text", "x": "y" * 70_000}}, "response_format"),
    ],
)
def test_a_400_names_the_field(more: dict[str, Any], param: str) -> None:
    """Also of what cannot be kept together."""

    async def use(rig: Rig) -> None:
        reply = await rig.post(CHAT, {"model": "m", **HI, **more})
        assert reply.status == 400, reply.body
        assert json.loads(reply.body)["error"]["param"] == param
        assert not rig.serving.requests

    run(use)


def flat(count: int) -> dict[str, Any]:
    """The schema of an object that has so many properties, all optional."""
    return {"type": "object", "properties": {f"p{i}": {} for i in range(count)}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strng"}, "cannot be followed: Invalid type: strng"),
        ({"$ref": "#/nope"}, "cannot be followed: Pointer '/nope' does not exist"),
        ([], "must be an object"),
        (5, "must be an object"),
        ({"pattern": "(abc["}, "regex parse error: (abc[ error: unclosed character class"),
        ({"$ref": "#"}, "its text would have no end"),
        (ALL_OF, "its text would have no end"),
        (CHAIN, "its text would have no end"),
        (LATER, "its text would have no end"),
        (flat(2001), "an object has 2001 properties, and 2000 are the most"),
        ({"anyOf": [flat(1300), flat(1301)]}, "too much may come next"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: Any, why: str) -> None:
    """With what is wrong with it in one line, before any worker is asked."""
    pytest.importorskip("llguidance")

    async def use(rig: Rig) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        reply = await rig.post(CHAT, {"model": "m", **HI, "response_format": wanted})
        assert reply.status == 400, reply.body
        error = json.loads(reply.body)["error"]
        assert error["param"] == "response_format.json_schema.schema"
        assert error["message"].startswith("response_format.json_schema.schema: ")
        assert why in error["message"]
        assert "\n" not in error["message"]
        assert not rig.serving.requests

    run(use)


EXPRESSION = {
    "$defs": {
        "e": {
            "anyOf": [
                {"type": "object", "properties": {"l": {"$ref": "#/$defs/e"}}, "required": ["l"]},
                {"type": "object", "properties": {"v": {"type": "number"}}, "required": ["v"]},
            ]
        }
    },
    "$ref": "#/$defs/e",
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        WORDS,
        EXPRESSION,
        {"type": "string", "minLength": 3000},
        {"type": "string", "pattern": "^[a-z]{5}[0-9]+$"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"const": "x" * 20_000},
    ],
)
def test_a_schema_that_has_texts_is_accepted(schema: dict[str, Any]) -> None:
    """Also a recursive one, and one whose shortest text is long."""
    pytest.importorskip("llguidance")
    check_schema(json.dumps(schema), "response_format", "schema")


def test_a_worker_follows_the_largest_object_that_the_gateway_accepts() -> None:
    """To its last property: there most of them may come next."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)
    schema = json.dumps(flat(2000))
    check_schema(schema, "response_format", "schema")
    grammar = Grammars(tokenizer).grammar(schema, tokenizer.encode('{"p0":"a","p1999":"b'))
    grammar.take(tokenizer.encode('"}'))
    (closing,) = tokenizer.eos_ids[:1]
    assert grammar.allowed()[closing // 8] >> closing % 8 & 1


def test_without_the_package_the_reply_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests without a response_format, or with text, need no package."""
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def use(rig: Rig) -> None:
        body = {"model": "m", **HI, "response_format": {"type": "json_object"}}
        error = json.loads((await rig.post(CHAT, body)).body)["error"]
        assert error["code"] == "unsupported_parameter"
        assert "pip install 'moonserve[grammar]'" in error["message"]
        assert (await rig.post(CHAT, {**body, "response_format": {"type": "text"}})).status == 200

    run(use)
