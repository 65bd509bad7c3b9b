"""A gateway that is not ours asks where to go, makes the calls and tells what came of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.inproc import TOKEN, Site, site

pytestmark = pytest.mark.model

PROMPT = list(range(100, 200))


async def post(at: Site, url: str, body: dict[str, Any], request: str = "") -> dict[str, Any]:
    """The reply, which is a good one."""
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    if request:
        headers["x-request-id"] = request
    reply = await at.http.request(
        "POST", url, headers=headers, body=json.dumps(body).encode(), timeout_s=10
    )
    assert reply.status == 200, reply.body
    told: dict[str, Any] = json.loads(reply.body)
    return told


async def served(at: Site, name: str, count: int) -> tuple[dict[str, Any], list[int]]:
    """Reserve, prefill, decode, release; the placement and the tokens."""
    common = {
        "model": DEFAULT_MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    asked = {"model": DEFAULT_MODEL, "token_ids": PROMPT, "max_tokens": count, "id": name}
    placed = await post(at, at.url + "/api/reserve", asked)
    params = placed["prefill"]["kv_transfer_params"]
    body = {**common, "max_tokens": 1, "kv_transfer_params": params}
    first = await post(at, placed["prefill"]["url"] + "/v1/completions", body, name)
    ended = {"id": name, "outcome": "prefill_ended"}
    went_on = await post(at, at.url + "/api/release", ended)
    params = first["kv_transfer_params"]
    body = {**common, "max_tokens": count, "kv_transfer_params": params}
    whole = await post(at, went_on["decode"]["url"] + "/v1/completions", body, name)
    tokens: list[int] = whole["choices"][0]["token_ids"]
    over = {"id": name, "outcome": "decode_ended", "tokens": len(tokens)}
    assert (await post(at, at.url + "/api/release", over))["released"]
    return placed, tokens


def test_anothers_requests_are_served_and_counted() -> None:
    """The tokens are one engine's; the second finds the first one's prefix; no ledger keeps any."""

    async def main() -> None:
        async with asyncio.timeout(60), site() as at:
            for name in ("p0", "p1"):
                await at.add(name, "prefill")
            await at.add("d0", "decode")
            text = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 4}
            assert (await post(at, at.url + "/api/select", text))["prompt_tokens"] > 0
            placed, tokens = await served(at, "one", 20)
            assert placed["reused_tokens"] == 0
            assert tokens == at.reference(PROMPT, 20)
            again, tokens = await served(at, "two", 20)
            assert again["reused_tokens"] == 96
            assert tokens == at.reference(PROMPT, 20)
            await at.settle()

    asyncio.run(main())
