"""OpenAI's shapes and the text path: what every reader and writer of replies relies on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from moonserve.live.openai.reply import ReplyWriter, Usage, read_reply, reply_head
from moonserve.live.openai.request import Form
from moonserve.live.openai.text import TextStream


class Letters:
    """A TokenText whose ids are characters; it holds an "é" back until the next call."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, ids: Iterable[int]) -> str:
        text = self._held + "".join(map(chr, ids))
        self._held = "é" if text.endswith("é") else ""
        return text.removesuffix("é")

    def flush(self) -> str:
        return self._held


def ids(text: str) -> list[int]:
    """The ids of a text."""
    return list(map(ord, text))


def test_text_ends_with_what_was_held_back() -> None:
    """Without a stop string, the last piece has the text that the tokens and the stops held."""
    stream = TextStream(Letters(), ["STOP"])
    assert stream.feed(ids("abS")) == "ab"
    assert stream.end(ids("cé")) == "Scé"
    assert stream.met is None


@pytest.mark.parametrize("cut", range(9))
def test_the_reported_stop_string_does_not_depend_on_the_cut(cut: int) -> None:
    """Of two stop strings that begin together, the one that is complete first is reported."""
    stream = TextStream(Letters(), ["xyz", "xy"])
    out = stream.feed(ids("aaaaxyzb"[:cut])) + stream.feed(ids("aaaaxyzb"[cut:])) + stream.end()
    assert (out, stream.met) == ("aaaa", "xy")


class Said:
    """A choice with some ids."""

    met = None

    def __init__(self, finish_reason: str | None, *fresh: int) -> None:
        self.finish_reason = finish_reason
        self._fresh = fresh

    def take_ids(self) -> list[int]:
        return [*self._fresh]


def events(data: bytes) -> list[Any]:
    """The JSON of each event but `[DONE]`."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [msgspec.json.decode(line) for line in lines]


@pytest.mark.parametrize("form", ["chat", "completion"])
def test_what_is_written_is_read(form: Form) -> None:
    """A reader finds tokens, finish reason and usage in the chunks and in the whole reply."""
    usage = Usage.of(prompt=9, generated=2, cached=4)
    writer = ReplyWriter(reply_head("r", form, True, 1, "m"), form, usage=True, ids=True)
    stream = writer.begin(usage) + writer.piece("a", Said(None, 1))
    stream += writer.piece("b", Said("stop", 2))
    chunks = [read_reply(msgspec.json.encode(it)) for it in events(stream + writer.end(usage))]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [token for choice in choices for token in choice.token_ids or ()] == [1, 2]
    assert [it.finish_reason for it in choices if it.finish_reason] == ["stop"]
    assert [chunk.cached_tokens() for chunk in chunks][-2:] == [None, 4]
    writer = ReplyWriter(reply_head("r", form, False, 1, "m"), form, usage=False)
    whole = read_reply(writer.whole([("ab", Said("length"))], usage))
    assert [(it.token_ids, it.finish_reason) for it in whole.choices] == [(None, "length")]
    assert whole.cached_tokens() == 4


def test_an_engine_reports_no_more_cached_tokens_than_the_prompt_has() -> None:
    """A decode instance may report everything that it fetched."""
    reply = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":16}}}'
    assert read_reply(reply).cached_tokens() == 9
    assert read_reply(b'{"usage":{"prompt_tokens":9}}').cached_tokens() is None
