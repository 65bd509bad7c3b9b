"""The main job on the real model, by real processes: equality, reuse, concurrency.

One cluster of two prefill and two decode workers, float32, for each store; the reference is one
process with the same engine that decodes the whole prompt. Shows its figures with -s.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from moonserve.core.engine.batch import Chunk
from moonserve.core.request import Sampling
from moonserve.core.units import RequestId
from moonserve.live.engine.inputs import build_inputs
from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.prompts import PROMPTS
from tests.support.up import Up, send

pytestmark = [pytest.mark.model]

NEW_TOKENS = 16
BLOCK = 32


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The model's tokenizer."""
    return load_tokenizer(resolve(DEFAULT_MODEL).path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The twenty prompts as token ids."""
    return {name: tokenizer.encode(text) for name, text in PROMPTS}


@pytest.fixture(scope="module")
def alone() -> TorchEngine:
    """The engine of the one process."""
    return TorchEngine.load(resolve(DEFAULT_MODEL).path, dtype="float32", num_blocks=128)


@pytest.fixture(scope="module")
def reference(alone: TorchEngine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy tokens of one process, before the cluster takes the cores."""
    return {name: greedy_reference(alone, ids, NEW_TOKENS) for name, ids in prompts.items()}


class Turns(NamedTuple):
    """Two turns of a chat, as one process continues them."""

    first: list[int]
    answer: list[int]
    second: list[int]
    after: list[int]


@pytest.fixture(scope="module")
def turns(alone: TorchEngine, prompts: dict[str, list[int]]) -> Turns:
    """The second one goes on from the answer to the first."""
    first = [17, 19, 23, *prompts["chat-list"]]  # another chain than the other tests'
    answer = greedy_reference(alone, first, 3 * BLOCK)
    second = [*first, *answer, *prompts["chat-capital"]]
    return Turns(first, answer, second, greedy_reference(alone, second, NEW_TOKENS))


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def penalised(alone: TorchEngine, prompts: dict[str, list[int]]) -> list[int]:
    """Greedy tokens of one process whose logits are changed by PENALTIES, token by token."""
    prompt = prompts["chat-list"]
    text: list[int] = []
    blocks = tuple(range(-(-(len(prompt) + NEW_TOKENS) // BLOCK)))
    while len(text) < NEW_TOKENS:
        chunk = Chunk(RequestId("one"), tuple(prompt + text), 0, blocks, Sampling())
        with torch.inference_mode():
            inputs = build_inputs((chunk,), alone._model.layout)
            row = alone._model.forward(inputs, None)[0].tolist()
        for token in {*prompt, *text}:
            row[token] *= 1.3 if row[token] < 0 else 1 / 1.3
            row[token] -= 0.25 * text.count(token) + 0.5 * (token in text)
        text.append(row.index(max(row)))
    return text


on_both_stores = pytest.mark.parametrize(
    "up", ["embedded", pytest.param("mooncake", marks=pytest.mark.mooncake)], indirect=True
)
"""For tests of what a store keeps."""
on_one_store = pytest.mark.parametrize("up", ["embedded"], indirect=True)


@pytest.fixture(scope="module")
def up(
    reference: dict[str, list[int]],
    turns: Turns,
    penalised: list[int],
    request: pytest.FixtureRequest,
) -> Iterator[Up]:
    """Two prefill and two decode workers."""
    cluster = Up(
        "--prefill", "2", "--decode", "2", "--dtype", "float32", "--block-size", str(BLOCK),
        "--segment-bytes", "1GiB", "--store", request.param,
    )  # fmt: skip
    yield cluster
    cluster.end()


def completion(ids: list[int], **more: Any) -> dict[str, Any]:
    """A greedy request that gives its token ids back."""
    return {
        "model": DEFAULT_MODEL,
        "prompt": ids,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more


def greedy(up: Up, ids: list[int]) -> tuple[list[int], int]:
    """Token ids through the gateway, and how many of the prompt were cached."""
    reply = up.post("/v1/completions", completion(ids))
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["token_ids"], cached


def instance_urls(up: Up) -> dict[str, str]:
    """Where each instance listens."""
    return {instance["id"]: instance["url"] for instance in up.get("/api/instances")}


def most_cached(ids: list[int]) -> int:
    """What a warm prefill may reuse of a prompt: whole blocks, never the last token."""
    return (len(ids) - 1) // BLOCK * BLOCK


def test_prompts_are_what_the_issue_asks_for(prompts: dict[str, list[int]]) -> None:
    """Twenty prompts, one of at least 3,000 tokens."""
    assert len(prompts) == 20
    assert max(map(len, prompts.values())) >= 3_000


@on_both_stores
def test_tokens_equal_one_process_cold_and_warm(
    up: Up,
    prompts: dict[str, list[int]],
    reference: dict[str, list[int]],
    request: pytest.FixtureRequest,
) -> None:
    """Greedy token ids through the cluster equal one process's, cold and with a warm prefix."""
    if request.node.callspec.params["up"] == "mooncake":  # a third of them is enough there
        prompts = dict([*prompts.items()][::3])
        reference = {name: reference[name] for name in prompts}
    with ThreadPoolExecutor(4) as pool:
        cold = dict(
            zip(prompts, pool.map(lambda ids: greedy(up, ids), prompts.values()), strict=True)
        )
        warm = dict(
            zip(prompts, pool.map(lambda ids: greedy(up, ids), prompts.values()), strict=True)
        )
    assert {name: tokens for name, (tokens, _) in cold.items()} == reference
    assert {name: tokens for name, (tokens, _) in warm.items()} == reference
    for name, ids in prompts.items():
        assert warm[name][1] == most_cached(ids), name
    up.settle()


@on_one_store
def test_penalties_are_those_of_one_process(
    up: Up,
    prompts: dict[str, list[int]],
    reference: dict[str, list[int]],
    penalised: list[int],
) -> None:
    """Prefill and decode count the same tokens: the text is the one of plain loops over logits."""
    body = completion(prompts["chat-list"], **PENALTIES)
    reply = up.post("/v1/completions", body)
    assert reply["choices"][0]["token_ids"] == penalised
    assert penalised != reference["chat-list"]


@on_both_stores
def test_tokens_equal_with_the_prefix_of_another_prefill_worker(
    up: Up, prompts: dict[str, list[int]], reference: dict[str, list[int]]
) -> None:
    """KV that p0 published serves p1's prefill: p1 loads it, and the tokens stay the same.

    Speaks vLLM's wire to the workers as a foreign router would, with fresh prompts for p0.
    """
    urls = instance_urls(up)
    for name in ("chat-capital", "chat-list", PROMPTS[-1][0]):
        ids = [7, 11, 13, *prompts[name]]  # another chain than the tests before
        first = prefill_at(up, urls["p0"], ids, f"{name}-p0")
        second = prefill_at(up, urls["p1"], ids, f"{name}-p1")
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == most_cached(ids)
        replies = [decode_at(up, urls["d0"], ids, reply, name) for reply in (first, second)]
        alone = greedy(up, [*ids])[0]
        assert replies[0] == replies[1] == alone
    up.settle()


@on_both_stores
def test_the_next_turn_reuses_the_answer(up: Up, turns: Turns) -> None:
    """KV that decode made serves the next turn's prefill; the tokens are still one process's."""
    answer = up.post("/v1/completions", completion(turns.first, max_tokens=len(turns.answer)))
    assert answer["choices"][0]["token_ids"] == turns.answer
    up.settle()
    tokens, cached = greedy(up, turns.second)
    assert tokens == turns.after
    held = len(turns.first) + len(turns.answer) - 1  # the last token's KV was never made
    assert cached == held // BLOCK * BLOCK
    assert cached > len(turns.first)
    up.settle()


def prefill_at(up: Up, url: str, ids: list[int], lease: str) -> Any:
    """One prefill on one worker."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "lease": lease}
    body = completion(ids, max_tokens=1, stream=False, kv_transfer_params=params)
    return up.post("/v1/completions", body, url)


def decode_at(up: Up, url: str, ids: list[int], prefilled: Any, name: str) -> list[int]:
    """The decode that follows it, on one worker; its prompt was never computed there."""
    body = completion(ids, stream=False, kv_transfer_params=prefilled["kv_transfer_params"])
    reply = up.post("/v1/completions", body, url)
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def chat(up: Up, system: str, user: str) -> tuple[float, dict[str, Any]]:
    """A streamed chat: seconds to the first content, and the usage."""
    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = up.url  # which waits until the cluster is ready
    began_s = time.monotonic()
    ttft_s = 0.0
    usage: dict[str, Any] = {}
    with send(url, "/v1/chat/completions", body, {}) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content") and not ttft_s:
                ttft_s = time.monotonic() - began_s
            usage = event.get("usage") or usage
    return ttft_s, usage


@on_one_store
def test_a_shared_system_prompt_is_computed_once(up: Up, tokenizer: Tokenizer) -> None:
    """The second request computes only its new tokens, counted by the engine, not guessed."""
    words = "You answer in the style of a lighthouse keeper who counts every passing ship. "
    system = words * 130
    while len(tokenizer.encode(system)) < 2_048:
        system += words
    first_s, first = chat(up, system, "How many ships?")
    up.settle()
    before = computed_tokens(up)
    second_s, second = chat(up, system, "And how many gulls?")
    up.settle()
    computed = computed_tokens(up) - before
    cached = second["prompt_tokens_details"]["cached_tokens"]
    print(
        f"\nshared system prompt: {first['prompt_tokens']} tokens cold, TTFT {first_s:.3f} s; "
        f"{second['prompt_tokens']} with {cached} cached, {computed} computed, "
        f"TTFT {second_s:.3f} s"
    )
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached >= 2_048
    assert computed == second["prompt_tokens"] - cached


def computed_tokens(up: Up) -> int:
    """Prompt tokens that the prefill workers' engines computed so far, from their /metrics."""
    total = 0
    for name, url in instance_urls(up).items():
        if name.startswith("p"):
            with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
                text = reply.read().decode()
            for line in text.splitlines():
                if (
                    line.startswith("vllm:prompt_tokens_by_source_total")
                    and "local_compute" in line
                ):
                    total += round(float(line.rsplit(" ", 1)[1]))
    return total


@on_one_store
def test_sixteen_streams_at_once_through_two_and_two(
    up: Up, prompts: dict[str, list[int]], reference: dict[str, list[int]]
) -> None:
    """See sixteen_streams; 2P + 2D."""
    sixteen_streams(up, prompts, reference)


def test_sixteen_streams_at_once_through_one_and_one(
    prompts: dict[str, list[int]], reference: dict[str, list[int]]
) -> None:
    """See sixteen_streams; 1P + 1D."""
    small = Up("--dtype", "float32", "--block-size", str(BLOCK))
    try:
        sixteen_streams(small, prompts, reference)
    finally:
        small.end()


def sixteen_streams(up: Up, prompts: dict[str, list[int]], reference: dict[str, list[int]]) -> None:
    """All finish with their own tokens; those that disconnect half way leave nothing behind."""
    names = [name for name, ids in prompts.items() if len(ids) < 500][:16]
    assert len(names) == 16
    assert streams(up, prompts, names, {}) == {name: reference[name] for name in names}
    up.settle()
    leaving = dict.fromkeys(names[::2], 5)
    results = streams(up, prompts, names, leaving)
    for name in names:
        wanted = reference[name][: leaving.get(name)]
        assert results[name][: leaving.get(name)] == wanted, name
    up.settle()


def streams(
    up: Up, prompts: dict[str, list[int]], names: list[str], leaving: dict[str, int]
) -> dict[str, list[int]]:
    """All at once; those in `leaving` hang up after so many tokens."""
    with ThreadPoolExecutor(len(names)) as pool:
        got = pool.map(lambda name: stream(up, prompts[name], leaving.get(name)), names)
        return dict(zip(names, got, strict=True))


def stream(up: Up, ids: list[int], leave_after: int | None) -> list[int]:
    """Token ids of a streamed completion; hangs up after `leave_after` of them."""
    tokens: list[int] = []
    with send(up.url, "/v1/completions", completion(ids, stream=True), {}) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tokens
