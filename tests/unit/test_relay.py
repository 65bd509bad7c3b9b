"""One request through foreign engines, over real sockets: what passes, what is changed, what fails.

The engines are tests.support.fake_vllm; every test ends with a ledger of zeros.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moonserve.core.facts import Connector, Role
from moonserve.live.http.client import ClientResponse
from tests.support.fake_vllm import spoken
from tests.support.relay_site import Site, run

Pool = tuple[str, Role, Connector]
ONE: list[Pool] = [("a", "both", "none")]
NIXL: list[Pool] = [("p", "prefill", "nixl"), ("d", "decode", "nixl")]
MOONCAKE: list[Pool] = [("p", "prefill", "mooncake"), ("d", "decode", "mooncake")]
PROMPT = "the quick brown fox jumps over the lazy dog, and then once more. " * 3
SAID = spoken(list(PROMPT.encode()), 4)
ASK = {"prompt": PROMPT, "max_tokens": 4}


def parsed(reply: ClientResponse) -> dict[str, Any]:
    """A reply of 200."""
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body)


def text(reply: ClientResponse) -> str:
    """What its first choice says."""
    return parsed(reply)["choices"][0]["text"]


async def streamed(site: Site, body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The words of a streamed completion, and all events."""
    async with site.stream(body) as events:
        seen = [event async for event in events]
    words = [choice["text"] for event in seen for choice in event.get("choices", [])]
    return words, seen


@pytest.mark.parametrize("pools", [ONE, NIXL, MOONCAKE])
def test_what_one_engine_says_is_what_a_pair_says(pools: list[Pool]) -> None:
    """Whole and streamed, the text is the engine's; usage is there, and no more cached than is."""

    async def use(site: Site) -> None:
        reply = parsed(await site.post(ASK, x_request_id="r-1"))
        assert reply["choices"][0]["text"] == "".join(SAID)
        assert reply["id"] == "cmpl-r-1"
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        other = {**ASK, "prompt": "x" + PROMPT, "stream_options": {"include_usage": True}}
        words, events = await streamed(site, other)
        assert words == spoken(list(("x" + PROMPT).encode()), 4)
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert events[-1]["usage"]["completion_tokens"] == 4

    run(use, *pools)


def test_mooncakes_decode_does_not_claim_the_whole_prompt_as_cached() -> None:
    """Usage is prefill's: a prompt that is there in part says that part."""

    async def use(site: Site) -> None:
        await site.post({**ASK, "prompt": PROMPT[:100] + "!" * 300})
        reply = parsed(await site.post({**ASK, "prompt": PROMPT[:100] + "?" * 300}))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert site.engines["d"].calls[-1].body["kv_transfer_params"]["do_remote_prefill"]

    run(use, *MOONCAKE)
