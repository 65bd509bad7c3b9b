"""logit_bias, min_tokens, penalties, logprobs and n through a cluster of fake engines on one loop.

Each token is compared with what one engine alone samples, so that prefill, decode and a decode that
takes over agree.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moonserve.core.request import Penalties, Sampling, Shaping
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.http.client import sse_events
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.worker.counts import Counts
from tests.support.inproc import BLOCK, Site, site
from tests.support.records import record_of

SLOW = fake_cost(200, 10, 4_000)
PROMPT = list(range(5_000, 5_000 + 3 * BLOCK + 5))
EOS = 2


def engine(**more: Any) -> FakeEngine:
    """One engine alone."""
    return FakeEngine(block_size=BLOCK, num_blocks=64, max_len=8192, **more)


async def streamed(it: Site, losing: int, **more: Any) -> list[dict[str, Any]]:
    """The choices of a stream; after so many of them the decode worker that runs it is lost."""
    body = {"model": DEFAULT_MODEL, "prompt": PROMPT, "stream": True, "return_token_ids": True}
    choices: list[dict[str, Any]] = []
    async with it.http.stream(
        "POST",
        it.url + "/v1/completions",
        body=json.dumps({**body, **more}).encode(),
        timeout_s=20,
        idle_timeout_s=20,
    ) as reply:
        assert reply.status == 200, await reply.read()
        async for event in sse_events(reply):
            choices += json.loads(event)["choices"]
            if len(choices) == losing:
                (busy,) = it.busy_decode()
                await it.lose(busy)
    return choices


def test_a_lost_worker_changes_no_bias_no_minimum_and_no_logprob() -> None:
    """The stream has the tokens and the log probabilities of one process, each token once."""
    bias = {4_000: 5.0, 4_001: 5.0, 4_002: 1.0, EOS: 0.0}
    least = 12
    shaping = Shaping(tuple(bias.items()), (EOS,), len(PROMPT) + least)
    one = engine(eos_one_in=3)
    tokens = one.reference(PROMPT, 60, Sampling(temperature=0.0, shaping=shaping))
    end = tokens.index(EOS)
    assert end >= least
    assert EOS in one.reference(PROMPT, least, Sampling(temperature=0.0))

    async def main() -> None:
        async with site() as it:
            await it.add("p0", "prefill")
            for name in ("d0", "d1"):
                await it.add(name, "decode", SLOW)
            for running in it.engines.values():
                running._eos_one_in = 3
            choices = await streamed(
                it,
                4,
                max_tokens=60,
                temperature=0,
                logit_bias={str(token): added for token, added in bias.items()},
                min_tokens=least,
                logprobs=2,
            )
            assert [id for choice in choices for id in choice["token_ids"]] == tokens[: end + 1]
            assert choices[-1]["finish_reason"] == "stop"
            given = [x for it in choices for x in it["logprobs"]["token_logprobs"]]
            assert given == [one.logprobs(token, 2).logprob for token in tokens[: end + 1]]
            assert all(len(x) == 2 for it in choices for x in it["logprobs"]["top_logprobs"])
            await it.settle()

    asyncio.run(main())


def penalised(prompt: list[int], count: int, how: Penalties) -> list[int]:
    """The tokens of one engine alone, whose text is counted anew for each."""
    one = engine(words=range(5_000, 5_060))
    text: list[int] = []
    while len(text) < count:
        counts = Counts(prompt if how.repetition != 1 else (), text).taken()
        shaping = Shaping(penalties=how, counts=counts)
        text += one.reference(prompt + text, 1, Sampling(temperature=0.0, shaping=shaping))
    return text


@pytest.mark.parametrize("how", [Penalties(presence=0.5), Penalties(0.0, 0.1, 1.5)])
def test_a_lost_worker_changes_no_count_of_a_penalty(how: Penalties) -> None:
    """Prefill, decode and the decode that takes over count all tokens of the text, and those of the
    prompt for repetition alone. The fake engine avoids each token that has a penalty."""
    prompt = list(range(5_000, 5_011)) * 3
    tokens = penalised(prompt, 40, how)
    assert len(set(tokens)) == 40
    assert set(tokens).isdisjoint(prompt) == (how.repetition != 1)

    async def main() -> None:
        async with site() as it:
            await it.add("p0", "prefill")
            for name in ("d0", "d1"):
                await it.add(name, "decode", SLOW)
            for running in it.engines.values():
                running._words = range(5_000, 5_060)
            choices = await streamed(
                it,
                9,
                prompt=prompt,
                max_tokens=40,
                temperature=0,
                presence_penalty=how.presence,
                frequency_penalty=how.frequency,
                repetition_penalty=how.repetition,
            )
            assert [id for choice in choices for id in choice["token_ids"]] == tokens
            await it.settle()

    asyncio.run(main())


def test_choices_share_the_prompt() -> None:
    """Each has the tokens of its own seed; the further ones load the prompt's KV, and usage counts
    the prompt once."""

    async def main() -> None:
        async with site() as it:
            await it.add("p0", "prefill")
            await it.add("d0", "decode")
            body = {
                "model": DEFAULT_MODEL,
                "prompt": PROMPT,
                "n": 3,
                "seed": 7,
                "max_tokens": 6,
                "return_token_ids": True,
            }
            reply = await it.http.request(
                "POST",
                it.url + "/v1/completions",
                headers={"x-request-id": "r"},
                body=json.dumps(body).encode(),
                timeout_s=20,
            )
            got = json.loads(reply.body)
            assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
            for choice in got["choices"]:
                how = Sampling(seed=7 + choice["index"])
                assert choice["token_ids"] == engine().reference(PROMPT, 6, how)
            usage = got["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 18)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            await it.settle()
            for name in ("r.1", "r.2"):
                assert record_of(it.gateway.conductor, name).measured.cached_tokens == 3 * BLOCK

    asyncio.run(main())
