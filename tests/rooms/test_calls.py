"""Calls of tools in a text: what is a call, what is text, and that no cut changes either."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.live.text.calls import CallReader, FoundCall

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = FoundCall("add", '{"a":1,"b":"é"}')
BARE = '<tool_call>{"name":"now"}</tool_call>'
NOW = FoundCall("now", "{}")


def read(*pieces: str, most: int | None = None) -> tuple[str, list[FoundCall]]:
    """The text and the calls of a text that comes in these pieces."""
    reader = CallReader(most)
    said = "".join(map(reader.feed, pieces)) + reader.end()
    return said, reader.take()


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("no call", "no call", []),
        ("", "", []),
        (" \n", " \n", []),
        (ONE, "", [ADD]),
        (f"\n {ONE}\n", "", [ADD]),
        (f"Let me add.\n{ONE}", "Let me add.\n", [ADD]),
        (f"{ONE}\n{BARE}", "", [ADD, NOW]),
        (f"{ONE}\nDone.", "\nDone.", [ADD]),
        (ONE.removesuffix("</tool_call>"), "", [ADD]),
        (ONE.removesuffix("call>"), ONE.removesuffix("call>"), []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("<tool_call>{'name': 1}</tool_call> x", "<tool_call>{'name': 1}</tool_call> x", []),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>',) * 2 + ([],),
        (f" <tool_call>[</tool_call> {BARE}", " <tool_call>[</tool_call> ", [NOW]),
        ('<tool_call>{"name": "add", "argum', '<tool_call>{"name": "add", "argum', []),
        ("a <tool_ca", "a <tool_ca", []),
        ("a <tool_cat> </tool_call>", "a <tool_cat> </tool_call>", []),
        (f"<tool_call>{ONE}", f"<tool_call>{ONE}", []),
    ],
)
def test_a_text_and_its_calls(text: str, said: str, calls: list[FoundCall]) -> None:
    """Whole, in single characters, and in two pieces, wherever it is cut."""
    assert read(text) == (said, calls)
    assert read(*text) == (said, calls)
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:]) == (said, calls)


PARTS = [
    ONE,
    BARE,
    "<tool_call>",
    "</tool_call>",
    "<tool_call",
    '{"name":"x"}',
    "x",
    "\n",
    " ",
    "<",
]


@given(st.lists(st.sampled_from(PARTS), max_size=9), st.lists(st.integers(0, 400), max_size=5))
def test_no_cut_changes_text_or_calls(parts: list[str], cuts: list[int]) -> None:
    """Of any text, in any pieces; and no call is made of what is not between the tags."""
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    said, calls = read(*(text[begin:end] for begin, end in pairwise(places)))
    assert (said, calls) == read(text)
    assert len(calls) <= text.count("<tool_call>")
    if not calls:
        assert said == text


def test_text_is_not_held_back_longer_than_it_may_be_a_tag() -> None:
    """What cannot begin a call goes on at once; of what can, nothing does."""
    reader = CallReader()
    assert [reader.feed(it) for it in ("a <", "b", " <tool", "_x", "<tool_call>{", "}")] == [
        "a ", "<b", " ", "<tool_x", "", "",
    ]  # fmt: skip


def test_further_calls_are_dropped_where_one_is_wanted() -> None:
    """The first one counts."""
    assert read(f"{ONE}\n{BARE}", most=1) == ("", [ADD])


@pytest.mark.parametrize("cut", range(30))
def test_a_text_that_begins_within_a_call(cut: int) -> None:
    """It is a call without a begin tag; if it is none, it is text as it came."""
    for text, said, calls in (
        ('{"name":"now"}', "", [NOW]),
        ('{"name":"now"}</tool_call>' + BARE, "", [NOW, NOW]),
        ('{"name":"no', '{"name":"no', []),
    ):
        reader = CallReader(is_call=True)
        assert reader.feed(text[:cut]) + reader.feed(text[cut:]) + reader.end() == said
        assert reader.take() == calls
