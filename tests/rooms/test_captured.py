"""Exchanges captured from real vLLM, made again by the gateway: the same bodies in the same order.

Reads the exchanges in tests/fixtures/vllm-0.32.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.units import InstanceId
from tests.support.external_site import Site, run
from tests.support.fake_vllm import Call

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


def trace(name: str) -> list[dict[str, Any]]:
    """The exchanges of a capture."""
    return msgspec.json.decode((FIXTURES / name).read_bytes())


def client_body(decode: dict[str, Any]) -> dict[str, Any]:
    """The client's request, before the fields for decode were added."""
    return {name: value for name, value in decode["request"].items() if name != _PARAMS}


_PARAMS = "kv_transfer_params"


def same(call: Call, exchange: dict[str, Any]) -> None:
    """Body byte for byte, and the headers that were captured."""
    assert call.raw == msgspec.json.encode(exchange["request"])
    for name, value in exchange["headers"].items():
        assert call.headers[name.lower()] == value


async def exchanged(
    site: Site, first: dict[str, Any], second: dict[str, Any], ask: dict[str, Any]
) -> dict[str, Any]:
    """Have the engines answer as captured; return the reply to the client."""
    chat = first["url"].endswith("/chat/completions")
    for engine, exchange in (("p", first), ("d", second)):
        site.engines[engine].script.append(exchange["response"])
    request_id = first["headers"]["X-Request-Id"]
    reply = await site.post(ask, chat, x_request_id=request_id)
    assert reply.status == 200, reply.body
    assert site.calls == ["p", "d"]
    return msgspec.json.decode(reply.body)


@pytest.mark.parametrize("at", [0, 3, 5])
def test_nixl_as_captured(at: int) -> None:
    """Prefill, then decode with prefill's parameters unchanged: completions and chat.

    The two later captures have fewer fields in prefill's parameters; there the rest is compared.
    """
    first, second = trace("pd_nixl_trace.json")[at : at + 2]

    async def use(site: Site) -> None:
        await site.add("p", "prefill", "nixl", model="smol")
        await site.add("d", "decode", "nixl", model="smol")
        reply = await exchanged(site, first, second, client_body(second))
        [one], [two] = site.engines["p"].calls, site.engines["d"].calls
        if at == 0:
            same(one, first)
        else:
            sent, captured = dict(one.body), dict(first["request"])
            assert captured.pop(_PARAMS).items() <= sent.pop(_PARAMS).items()
            assert sent.pop("stream") is False
            assert list(sent.items()) == list(captured.items())
        same(two, second)
        cached = first["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        expected = msgspec.json.decode(msgspec.json.encode(second["response"]))
        expected["usage"]["prompt_tokens_details"]["cached_tokens"] = cached
        assert reply == expected

    run(use)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_mooncake_as_captured(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines get one transfer id, and decode the engine's id. Usage is prefill's count, not
    the whole prompt."""
    first, second = trace("pd_mooncake_trace.json")[at : at + 2]
    told = second["request"][_PARAMS]
    new_id = told["transfer_id"].removeprefix("xfer-")

    async def use(site: Site) -> None:
        await site.add("p", "prefill", "mooncake", model="smol", dp_size=2)
        await site.add("d", "decode", "mooncake", model="smol")
        member = site.fleet.member(InstanceId("p/dp0"))
        member.bootstrap = told["remote_bootstrap_addr"]
        monkeypatch.setattr(member, "_engine_ids", {0: told["remote_engine_id"]})
        monkeypatch.setattr("moonserve.live.drive.calls.uuid4", lambda: _Id(new_id))
        reply = await exchanged(site, first, second, client_body(second))
        same(site.engines["p"].calls[0], first)
        same(site.engines["d"].calls[0], second)
        said = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert said == first["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert said != second["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert reply["choices"] == second["response"]["choices"]

    run(use)


class _Id:
    def __init__(self, text: str) -> None:
        self.hex = text


def test_failures_as_captured() -> None:
    """An unknown engine is 500, a bad rank 400 in vLLM's words, an unknown transfer hangs."""
    nixl, mooncake = trace("pd_nixl_trace.json"), trace("pd_mooncake_trace.json")

    async def use(site: Site) -> None:
        await site.add("p", "prefill", "nixl", model="smol")
        await site.add("d", "decode", "mooncake", model="smol")
        for exchange, engine in ((nixl[15], "p"), (mooncake[9], "d"), (nixl[19], "p")):
            at = site.engines[engine]
            reply = await site.http.request(
                "POST",
                at.url + "/v1/completions",
                headers={name.lower(): value for name, value in exchange["headers"].items()},
                body=msgspec.json.encode(exchange["request"]),
                timeout_s=5,
            )
            assert reply.status == exchange["status"]
            assert msgspec.json.decode(reply.body) == exchange["response"]
        hangs = mooncake[12]["request"]
        hangs[_PARAMS]["remote_engine_id"] = site.engines["d"].engine_ids[0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await site.http.request(
                    "POST",
                    site.engines["d"].url + "/v1/completions",
                    body=msgspec.json.encode(hangs),
                    timeout_s=5,
                )

    run(use)
