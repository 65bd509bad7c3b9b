"""The gateway before real vLLM engines of which one is killed while it streams.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.clusters import SENTENCE
from tests.vllm.engines import MODEL, Engine, Json, running
from tests.vllm.gateways import Gateway, described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]

Read = tuple[str, list[Json]]
_STREAMS, _TOKENS = 16, 96
_ANIMALS = ("fox", "otter", "heron", "lynx", "stoat", "crane", "badger", "marten")


def asked(number: int) -> tuple[str, Json]:
    """Path and body of a greedy stream; every second one is a chat, with text beyond ASCII."""
    greedy = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True}
    greedy |= {"max_tokens": _TOKENS, "stream_options": {"include_usage": True}}
    animal = _ANIMALS[number % len(_ANIMALS)]
    if number % 2:
        wish = f"Write {number} lines about a {animal}: in Japanese, with emoji, then in Greek."
        return "/v1/chat/completions", {**greedy, "messages": [{"role": "user", "content": wish}]}
    prompt = f"{number}. " + SENTENCE.format(animal) * (1 + number % 5)
    return "/v1/completions", {**greedy, "prompt": prompt}


def events(url: str, number: int) -> Iterator[Json]:
    """The events of such a stream; the last one is the usage."""
    path, body = asked(number)
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as reply:
        for line in reply:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield json.loads(data)


def text_of(event: Json) -> str:
    """The text of an event in either form."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in event.get("choices", ())
    )


def read(url: str, number: int, seen: list[int]) -> Read:
    """Text and events of a stream; `seen` counts them as they come."""
    all_events = []
    for event in events(url, number):
        assert "error" not in event, event
        all_events.append(event)
        seen[number] += 1
    return "".join(map(text_of, all_events)), all_events


def counts(event: Json) -> list[int]:
    """The usage without what was cached, which an engine that was killed did not report."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return [event["usage"][name] for name in names]


def at_once(front: Gateway, pool: ThreadPoolExecutor, seen: list[int]) -> list[Future[Read]]:
    """All streams, begun together."""
    return [pool.submit(read, front.url, number, seen) for number in range(_STREAMS)]


def test_streams_of_a_killed_engine_are_those_of_one_that_lives(
    python: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 of one of two engines under 16 greedy streams: all are equal to an undisturbed run,
    and count their tokens once."""
    one, two = (Engine(name, folder, python, tmp_path) for name in ("e0", "e1"))
    with running(one, two):
        instances = [described(it, "both", "none", folder) for it in (one, two)]
        with gateway(instances, tmp_path) as front, ThreadPoolExecutor(_STREAMS) as pool:
            calm = [it.result() for it in at_once(front, pool, [0] * _STREAMS)]
            front.until(front.idle)
            seen = [0] * _STREAMS
            streams = at_once(front, pool, seen)
            until_s = time.monotonic() + 60
            while min(seen) < 12:
                assert time.monotonic() < until_s, seen
                time.sleep(0.02)
            two.kill()
            ended = [it.result() for it in streams]
            resumed = front.count("moonserve_streams_resumed_total")
            assert 0 < resumed < _STREAMS
            for (text, before), (again, after) in zip(calm, ended, strict=True):
                assert again == text
                assert counts(after[-1]) == counts(before[-1])
                assert len({(it["id"], it["created"], it["object"]) for it in after}) == 1
            front.until(front.idle)
