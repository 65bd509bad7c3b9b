"""API keys before a picker: who may ask, for what, how much, and what engines learn of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from moonserve.core.units import InstanceId, RequestId
from moonserve.live.access.keys import ApiKey, KeyLimits, Keys, hash_of
from tests.support.picker_proxy import (
    BUFFERED,
    DUPLEX,
    destinations,
    reply_body,
    reply_head,
    request_body,
    request_head,
)
from tests.support.picker_site import TOKEN, PickerSite, completion, run

E0 = ("e0", "both", "none")


def keys(**more: Any) -> Keys:
    """Three keys, whose secrets are their names; `more` are limits of the first."""
    made = Keys()
    made.use(
        [
            ApiKey(name="alice", hash=hash_of("alice"), tenant="a", limits=KeyLimits(**more)),
            ApiKey(name="metrics", hash=hash_of("metrics"), tenant="m", scopes=("metrics",)),
            ApiKey(name="root", hash=hash_of("root"), tenant="r", scopes=("admin",)),
        ]
    )
    return made


def bearing(secret: str, **more: str) -> dict[str, str]:
    """Headers of a client with this key."""
    return {"authorization": f"Bearer {secret}", **more}


async def status(site: PickerSite, fields: dict[str, str], **head: Any) -> tuple[int, str]:
    """What a client gets, and the error's message; 200: an endpoint was picked."""
    exchange = site.exchange()
    reply = await exchange.ask(completion(), fields=fields, **head)
    exchange.cancel()
    if reply.WhichOneof("response") != "immediate_response":
        return 200, ""
    immediate = reply.immediate_response
    return immediate.status.code, str(msgspec.json.decode(immediate.body)["error"]["message"])


def refusals(site: PickerSite) -> dict[tuple[str, str], float]:
    """The refusals on the page of metrics, by key and reason."""
    assert site.picker._guard is not None
    [family] = site.picker._guard.refusals.collect()
    return {(it.labels["key"], it.labels["reason"]): it.value for it in family.samples}


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_request_needs_a_key(mode: int) -> None:
    """Without one it is a 401, before its body is asked for; with one, or the token, it is
    placed."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.send(request_head(mode=mode))  # and no body
        immediate = (await exchange.reply()).immediate_response
        assert immediate.status.code == 401
        fields = {it.header.key: it.header.raw_value for it in immediate.headers.set_headers}
        assert fields["www-authenticate"] == b"Bearer"
        assert await exchange.ended()
        code, text = await status(site, bearing("mallory"))
        assert (code, "unknown or was revoked" in text) == (401, True)
        assert (await status(site, {"x-api-key": "alice"}))[0] == 200
        assert (await status(site, bearing("alice")))[0] == 200
        assert (await status(site, bearing(TOKEN)))[0] == 200
        code, text = await status(site, bearing("metrics"))
        assert (code, "has no scope infer" in text) == (403, True)
        assert refusals(site) == {("", "unknown"): 2, ("metrics", "scope"): 1}

    run(use, E0, keys=keys())


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/models", 200),
        ("/v1/models/m", 200),
        ("/tokenize", 200),
        ("/v1/load_lora_adapter", 403),
        ("/v1/models_x", 403),
        ("/metrics", 403),
        ("/health", 403),
        ("/%761/models", 200),
    ],
)
def test_a_key_for_models_opens_their_paths_only(path: str, code: int) -> None:
    """Engines have paths that change them: those need the scope admin."""

    async def use(site: PickerSite) -> None:
        assert (await status(site, bearing("alice"), path=path))[0] == code
        if code == 403:
            said = (await status(site, bearing("alice"), path=path))[1]
            assert "has no scope admin, which" in said
        assert (await status(site, bearing("root"), path=path))[0] == 200
        assert (await status(site, {}, path=path))[0] == 401

    run(use, E0, keys=keys())


def test_engines_do_not_see_the_key() -> None:
    """Both headers are removed, unless the engine has a key of its own."""

    async def use(site: PickerSite) -> None:
        for path in ("/v1/completions", "/v1/models"):
            exchange = site.exchange()
            reply = await exchange.ask(completion(), fields=bearing("alice"), path=path)
            mutation = reply.request_headers.response.header_mutation
            assert {"authorization", "x-api-key"} <= set(mutation.remove_headers)
            exchange.cancel()
        site.fleet.members[InstanceId("e0")].headers["authorization"] = "Bearer the-engines"
        exchange = site.exchange()
        reply = await exchange.ask(completion(), fields=bearing("alice", **{"x-api-key": "alice"}))
        mutation = reply.request_headers.response.header_mutation
        assert "authorization" not in mutation.remove_headers
        assert "x-api-key" in mutation.remove_headers
        exchange.cancel()

    run(use, E0, keys=keys())


def test_the_tenant_is_the_keys() -> None:
    """Also if the proxy names another one; a client that does so itself is refused, as is one that
    asks for more than its key allows."""

    async def use(site: PickerSite) -> None:
        more = {"x-gateway-inference-fairness-id": "b", "x-request-id": "r1"}
        assert (await status(site, bearing("alice", **more)))[0] == 200
        await site.settled()
        found = site.conductor.account.find(RequestId("r1"))
        assert found is not None
        assert found.tenant == "a"
        for field, value in (("x-moonserve-tenant", "b"), ("x-moonserve-priority", "5")):
            code, text = await status(site, bearing("alice", **{field: value}))
            assert (code, field in text) == (403, True)
        assert refusals(site) == {("alice", "terms"): 2}

    run(use, E0, keys=keys(highest_priority=4))


def test_limits_of_a_key_hold() -> None:
    """Requests under way, and tokens a minute, as far as they pass by."""

    async def use(site: PickerSite) -> None:
        held = site.exchange()
        destinations(await held.ask(completion(), fields=bearing("alice"), reply_mode=BUFFERED))
        code, text = await status(site, bearing("alice"))
        assert (code, "1 requests are under way, its limit" in text) == (429, True)
        await held.reply()  # the body
        body = b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":'
        body += b'{"prompt_tokens":16,"completion_tokens":4000}}'
        await held.send(reply_head(), reply_body(body, True))
        for _ in range(2):
            await held.reply()
        held.cancel()
        await site.settled()
        code, text = await status(site, bearing("alice"))
        assert (code, "its limit is 100 tokens a minute" in text) == (429, True)
        assert refusals(site) == {("alice", "key_limit"): 2}

    run(use, E0, keys=keys(under_way=1, tokens_per_minute=100))


def test_an_unwanted_body_is_not_read() -> None:
    """A client without a key cannot make the picker keep a body."""

    async def use(site: PickerSite) -> None:
        exchange = site.exchange()
        await exchange.send(request_head(), request_body(b"x" * 1_000, ends=False))
        assert (await exchange.reply()).immediate_response.status.code == 401
        await site.settled()
        async with asyncio.timeout(5):
            while site.server._serving.calls:
                await asyncio.sleep(0.005)

    run(use, E0, keys=keys())
