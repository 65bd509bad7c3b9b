"""Engines that say little, or say it in SGLang's way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from moonserve.live.external.handshake import EngineFacts, handshake
from moonserve.live.external.member import Member, Mismatch
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import App, Handler, serve

MODELS = {"data": [{"id": "m"}]}


def shake(pages: Mapping[str, Any], **described: Any) -> EngineFacts:
    """A handshake with a server of these pages: bytes as they are, else JSON."""

    def page(said: Any) -> Handler:
        async def handler(request: HttpRequest) -> Response:
            return Response(body=said) if isinstance(said, bytes) else json_response(said)

        return handler

    async def main() -> EngineFacts:
        app = App({("GET", path): page(said) for path, said in pages.items()}, name="engine")
        server, http = await serve(app, "127.0.0.1", 0), HttpClient()
        try:
            fields = {"name": "a", "events": "off", **described}
            spec = InstanceSpec(url=f"http://127.0.0.1:{server.port}", **fields)
            return await handshake(Member(spec, http), None)
        finally:
            await http.close()
            await server.stop(0)

    return asyncio.run(main())


def test_sglang_is_asked_where_it_says_what_vllm_says_elsewhere() -> None:
    """Page size, KV and context come from its server info; its small pages are a warning."""
    info = {
        "page_size": 1,
        "max_total_num_tokens": 5_000,
        "context_length": 4_096,
        "version": "0.5",
    }
    page = b'sglang:num_running_reqs{model_name="m"} 0.0\n'
    pages = {"/health": b"", "/v1/models": MODELS, "/metrics": page}
    for name in ("/server_info", "/get_server_info"):
        found = shake(pages | {name: info}, engine="sglang")
        assert (found.block_size, found.kv_tokens, found.max_len) == (1, 5_000, 4_096)
        assert (found.version, found.started_s, found.events) == ("0.5", None, False)
        assert any("start it with --page-size 16" in said for said in found.warnings)
        assert not any("not checked" in said for said in found.warnings)


@pytest.mark.parametrize(
    ("said", "described", "says"),
    [
        ({"disaggregation_mode": "decode"}, {}, "role: it runs with --disaggregation-mode decode"),
        ({"disaggregation_mode": "null"}, {"role": "prefill"}, "null, not prefill: set it to both"),
        ({"dp_size": 4}, {}, "dp_size: it has 4 data-parallel ranks, not 1"),
        (
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9_000},
            {"role": "prefill"},
            "bootstrap: its bootstrap server is at port 9000: set it to http://127.0.0.1:9000",
        ),
    ],
)
def test_an_sglang_of_another_kind_is_refused(
    said: dict[str, Any], described: dict[str, Any], says: str
) -> None:
    """Its role, number of ranks and bootstrap address must match; otherwise calls would fail."""
    info = {"page_size": 16, "context_length": 4_096, **said}
    pages = {"/health": b"", "/v1/models": MODELS, "/metrics": b"", "/server_info": info}
    if "role" in described:
        described = described | {"connector": "sglang"}
    with pytest.raises(Mismatch, match=re.escape(says)):
        shake(pages, engine="sglang", **described)
    fits = {"role": "prefill", "connector": "sglang", "bootstrap": "http://10.0.0.9:1"}
    fine = info | {"disaggregation_mode": "prefill", "dp_size": 1, "enable_cache_report": False}
    found = shake(pages | {"/server_info": fine}, engine="sglang", **fits)
    assert any("start it with --enable-cache-report" in it for it in found.warnings)
    assert any("start it with --enable-metrics" in it for it in found.warnings)


@pytest.mark.parametrize("said", [None, b"<html>"])
def test_what_could_not_be_checked_is_named(said: Any) -> None:
    """An engine that does not say how it is joins as described, and every field that nobody
    compared is in a warning."""
    pages = {"/health": b"", "/v1/models": MODELS}
    pages |= {"/server_info": said} if said else {}
    described = {"max_len": 100, "block_size": 64, "kv_tokens": 640}
    found = shake(pages, engine="sglang", **described)
    assert found.block_size == 64
    status = 404
    assert f"no server info of SGLang at /server_info or /get_server_info ({status}): " in (
        "\n".join(found.warnings)
    )
    assert "its block_size is unknown: 64, as described, was not checked" in found.warnings
    found = shake(pages, **described, dp_size=2, shared_store=True)
    assert "its ranks are unknown: dp_size 2 was not checked" in found.warnings
    assert any("its hash algorithm is unknown" in it for it in found.warnings)


def test_what_an_engine_does_not_say_is_described_or_guessed_aloud() -> None:
    """Without a page of metrics: the description counts, and what it lacks is a warning."""
    pages = {"/health": b"", "/v1/models": MODELS}
    found = shake(pages, max_len=100, block_size=64, kv_tokens=640)
    assert (found.model, found.max_len, found.block_size, found.kv_tokens) == ("m", 100, 64, 640)
    assert found.warnings[0].startswith("/metrics has no load")
    guessed = shake(pages, max_len=100)
    assert (guessed.block_size, guessed.kv_tokens) == (16, 1 << 20)
    assert any("set kv_tokens" in said for said in guessed.warnings)
    assert any("block_size is unknown: 16 is assumed" in said for said in guessed.warnings)
    with pytest.raises(Mismatch, match="max_len: its context length is unknown"):
        shake(pages)


@pytest.mark.parametrize("models", [b"<html>", {"data": 3}, {"data": []}, [1]])
def test_what_is_no_openai_server_is_refused(models: Any) -> None:
    """Another server at the address is named, not crashed on."""
    with pytest.raises(Mismatch):
        shake({"/health": b"", "/v1/models": models}, max_len=100)


def test_a_hash_block_size_of_its_own_is_that_of_the_keys() -> None:
    """Hybrid models hash blocks of another size than they allocate."""
    page = (
        b'vllm:cache_config_info{block_size="400",hash_block_size="16",num_gpu_blocks="10"} 1.0\n'
    )
    found = shake({"/health": b"", "/v1/models": MODELS, "/metrics": page}, max_len=100)
    assert (found.block_size, found.kv_tokens) == (16, 4_000)


@pytest.mark.parametrize("said", [b'{"data": [{"id": "\xff"}]}', b"[" * 100_000, b"no"])
def test_what_is_no_list_of_models_is_a_mismatch(said: bytes) -> None:
    """Bytes that are no JSON, no text or no end: the monitor must live on."""
    with pytest.raises(Mismatch, match="gave no list of models"):
        shake({"/health": b"", "/v1/models": said, "/metrics": b""})
