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
from typing import NamedTuple

import pytest

from tests.vllm.clusters import SENTENCE
from tests.vllm.engines import MODEL, Engine, Json, running
from tests.vllm.gateways import Gateway, described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]

_STREAMS = 16
_ANIMALS = ("fox", "otter", "heron", "lynx", "stoat", "crane", "badger", "marten")
_STOP_CHARACTERS = 30
"""Long, so that many streams are within their stop string when the engine is killed."""


class Read(NamedTuple):
    """A stream that was read to its end."""

    text: str
    events: list[Json]

    @property
    def counts(self) -> list[int]:
        """The usage without what was cached, which an engine that was killed did not report."""
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        return [self.events[-1]["usage"][name] for name in names]

    @property
    def end(self) -> list[str | None]:
        """Why it ended."""
        names = ("finish_reason", "stop_reason")
        return [self.events[-2]["choices"][0].get(name) for name in names]


def asked(number: int, **more: object) -> tuple[str, Json]:
    """Path and body of a greedy stream; every second one is a chat, with text beyond ASCII."""
    greedy = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True}
    greedy |= {"stream_options": {"include_usage": True}, **more}
    animal = _ANIMALS[number % len(_ANIMALS)]
    if number % 2:
        wish = f"Write {number} lines about a {animal}: in Japanese, with emoji, then in Greek."
        return "/v1/chat/completions", {**greedy, "messages": [{"role": "user", "content": wish}]}
    prompt = f"{number}. " + SENTENCE.format(animal) * (1 + number % 5)
    return "/v1/completions", {**greedy, "prompt": prompt}


def events(url: str, path: str, body: Json) -> Iterator[Json]:
    """The events of such a stream; the last one is the usage."""
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as reply:
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


class Streams:
    """The same streams, begun together as often as it is asked; `stops` ends some of them early."""

    def __init__(self, front: Gateway, pool: ThreadPoolExecutor, tokens: int) -> None:
        self.front, self._pool, self._tokens = front, pool, tokens
        self.stops: dict[int, str] = {}
        self.seen = [0] * _STREAMS
        """Events of each since they were begun."""

    def begin(self) -> list[Future[Read]]:
        """All of them."""
        self.front.until(self.front.idle)
        self.seen = [0] * _STREAMS
        return [self._pool.submit(self._read, number) for number in range(_STREAMS)]

    def whole(self) -> list[Read]:
        """All of them, undisturbed."""
        return [it.result() for it in self.begin()]

    def _read(self, number: int) -> Read:
        more: Json = {"max_tokens": self._tokens}
        if number in self.stops:
            more["stop"] = ["not there", self.stops[number]]
        all_events = []
        for event in events(self.front.url, *asked(number, **more)):
            assert "error" not in event, event
            all_events.append(event)
            self.seen[number] += 1
        return Read("".join(map(text_of, all_events)), all_events)

    def until(self, seen: int) -> None:
        """Wait until each has so many events."""
        until_s = time.monotonic() + 120
        while min(self.seen) < seen:
            assert time.monotonic() < until_s, self.seen
            time.sleep(0.02)


def killed_under(streams: Streams, calm: list[Read], engine: Engine, after: int) -> None:
    """kill -9 of an engine under all streams, after so many events of each: they are equal to the
    undisturbed ones, and count their tokens once."""
    before = streams.front.count("moonserve_streams_resumed_total")
    begun = streams.begin()
    streams.until(after)
    engine.kill()
    ended = [it.result() for it in begun]
    resumed = streams.front.count("moonserve_streams_resumed_total") - before
    assert 0 < resumed < _STREAMS
    for one, two in zip(calm, ended, strict=True):
        assert (two.text, two.end, two.counts) == (one.text, one.end, one.counts)
        assert len({(it["id"], it["created"], it["object"]) for it in two.events}) == 1
    streams.front.until(streams.front.idle)


def test_streams_of_a_killed_engine_are_those_of_one_that_lives(
    python: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 of one of two engines that serve whole requests, an event for each token."""
    one, two = (Engine(name, folder, python, tmp_path) for name in ("e0", "e1"))
    with running(one, two):
        instances = [described(it, "both", "none", folder) for it in (one, two)]
        with gateway(instances, tmp_path) as front, ThreadPoolExecutor(_STREAMS) as pool:
            streams = Streams(front, pool, tokens=96)
            killed_under(streams, streams.whole(), two, after=12)


def test_streams_of_a_killed_decode_engine_are_those_of_one_that_lives(
    python: Path, folder: Path, tmp_path: Path
) -> None:
    """kill -9 of one of two decode engines behind prefill, by NIXL. Events have four tokens each,
    and half of the streams end at a stop string, which stands before, across or after the joint."""
    one = Engine("p0", folder, python, tmp_path).by_nixl("kv_producer")
    two, three = (Engine(name, folder, python, tmp_path) for name in ("d0", "d1"))
    decodes = [it.by_nixl("kv_consumer").having("--stream-interval", "4") for it in (two, three)]
    with running(one, *decodes):
        instances = [described(one, "prefill", "nixl", folder)]
        instances += [described(it, "decode", "nixl", folder) for it in decodes]
        with gateway(instances, tmp_path) as front, ThreadPoolExecutor(_STREAMS) as pool:
            streams = Streams(front, pool, tokens=56)
            for number, whole in enumerate(streams.whole()):
                if number % 4 < 2:
                    begin = len(whole.text) * (30 + 3 * number) // 100
                    streams.stops[number] = whole.text[begin : begin + _STOP_CHARACTERS]
            killed_under(streams, streams.whole(), three, after=4)
