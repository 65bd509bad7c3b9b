"""Engines and a gateway before them, and what must hold of any such cluster."""

from __future__ import annotations

import json
import urllib.request
from typing import NamedTuple

from tests.vllm.engines import MODEL, Engine, Json, get, post
from tests.vllm.gateways import Gateway

SENTENCE = "The quick brown {} jumps over the lazy dog near the old bridge. "
PROMPTS = [
    SENTENCE.format("fox") * 12 + "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
    "def fibonacci(n):\n    ",
]


class Cluster(NamedTuple):
    """Engines and the gateway before them."""

    prefills: tuple[Engine, ...]
    decode: Engine
    front: Gateway

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them."""
        return (*self.prefills, self.decode)


def alone(engine: Engine, prompt: str, tokens: int = 16, **more: object) -> str:
    """What one engine says by itself, whole request, greedily."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return str(post(engine.url + "/v1/completions", body | more)["choices"][0]["text"])


def same_as_one_engine(cluster: Cluster, fresh: bool) -> None:
    """Each prompt: the gateway's text is one engine's, whole and streamed, usage included.

    fresh: whether these prompts are new to the engines.
    """
    for prompt in PROMPTS:
        want = alone(cluster.prefills[0], prompt)
        reply = cluster.front.complete(prompt)
        assert reply["choices"][0]["text"] == want
        decision = cluster.front.decision(reply)
        assert decision["decode"] == cluster.decode.name
        # What decode has all but the end of, of some blocks, it gets without a prefill elsewhere.
        held = not fresh and prompt is PROMPTS[0]
        apart = {it.name for it in cluster.prefills}
        assert decision["prefill"] in ({cluster.decode.name} if held else apart)
        usage = reply["usage"]
        assert usage["completion_tokens"] == 16
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert cached < usage["prompt_tokens"]
        assert streamed(cluster.front, prompt) == want


def streamed(front: Gateway, prompt: str) -> str:
    """The same as a stream, put together."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    head = {"content-type": "application/json"}
    url = front.url + "/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        events = [line[6:] for line in reply.read().decode().split("\n") if line[:6] == "data: "]
    assert events.pop() == "[DONE]"
    return "".join(choice["text"] for it in events for choice in json.loads(it)["choices"])


def same_by_other_apis(cluster: Cluster) -> None:
    """Responses and Messages, whole and streamed: prefilled and decoded apart, the texts are one
    engine's."""
    chat = [{"role": "user", "content": PROMPTS[0]}]
    fixed = {"model": MODEL, "temperature": 0}
    for path, body, texts, deltas in (
        ("/v1/responses", {"input": PROMPTS[0], "max_output_tokens": 16}, _of_response, _of_event),
        ("/v1/messages", {"messages": chat, "max_tokens": 16}, _of_message, _of_block),
    ):
        asked = fixed | body
        want = texts(post(cluster.prefills[0].url + path, asked))
        assert want
        for at, stream in enumerate((False, True)):
            name = f"{path[4:]}-{at}"
            if stream:
                events = cluster.front.events(path, asked | {"stream": True}, name)
                said = "".join(map(deltas, events))
            else:
                said = texts(post(cluster.front.url + path, asked, **{"x-request-id": name}))
            assert said == want
            decision = get(f"{cluster.front.url}/api/decisions/{name}")
            assert decision["prefill"] in {it.name for it in cluster.prefills}
            assert decision["decode"] == cluster.decode.name


def _of_response(reply: Json) -> str:
    parts = [part for item in reply["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts)


def _of_event(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _of_message(reply: Json) -> str:
    return "".join(block["text"] for block in reply["content"])


def _of_block(event: Json) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def frees_both(cluster: Cluster) -> None:
    """Who hangs up in mid-stream leaves no work on any engine and no promise in the ledger."""
    before = cluster.decode.count("vllm:generation_tokens_total")
    cluster.front.leave(SENTENCE.format("hare") * 20, after=3)
    assert all(engine.idle() for engine in cluster.engines)
    assert cluster.decode.count("vllm:generation_tokens_total") - before < 900
    cluster.front.until(cluster.front.idle)
