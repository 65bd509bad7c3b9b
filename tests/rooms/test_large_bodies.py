"""Bodies that are much structure and little text: nothing large is made of them."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.errors import BadRequest
from moonserve.live.drive import prompt_info
from moonserve.live.openai import request as openai
from moonserve.live.openai import structure
from moonserve.live.openai.external import ExternalRequest

SIZE = 1 << 20
MAX_IDS = 8_192


def _list(item: bytes) -> bytes:
    return b"[%b]" % b",".join([item] * (SIZE // (len(item) + 1)))


def _object() -> bytes:
    return b"{%b}" % b",".join(b'"f%d":1' % i for i in range(SIZE // 12))


def _chat(fields: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}' % fields


def _text(fields: bytes) -> bytes:
    return b'{"model":"m","prompt":"x",%b}' % fields


LISTS = [_list(item) for item in (b"[]", b"1", b"12345", b'""', b"{}", b"[1]")]
CHATS = [
    *(b'{"model":"m","messages":%b}' % many for many in [*LISTS, _object()]),
    b'{"model":"m","messages":%b}' % _list(b'{"role":"user"}'),
    b'{"model":"m","messages":[{"role":"user","content":%b}]}' % _list(b'{"type":"text"}'),
    b'{"model":"m","messages":[{"role":"user","tool_calls":%b}]}' % LISTS[0],
    _chat(b'"stop":%b' % _list(b'""')),
    *(_chat(b'"%b":%b' % (name, LISTS[0])) for name in (b"stop", b"tools", b"unknown")),
    _chat(_object()[1:-1]),
]
TEXTS = [
    *(b'{"model":"m","prompt":%b}' % many for many in [*LISTS, _object()]),
    b'{"model":"m","prompt":[%b]}' % LISTS[1],
    _text(b'"stop_token_ids":%b' % LISTS[1]),
    _text(b'"logit_bias":%b' % _object()),
    _text(b'"stop":%b,"stop":null' % _list(b'""')),
    _text(_object()[1:-1]),
]
TO_ENGINES = [
    b'{"model":"m","messages":%b}' % LISTS[0],
    _chat(b'"tools":%b' % LISTS[0]),
    _chat(b'"vllm_xargs":%b' % _object()),
    _chat(_object()[1:-1]),
]


def _peak(use: Callable[[], Any]) -> int:
    """The most bytes that Python held at a time while it ran."""
    tracemalloc.start()
    try:
        use()
    except BadRequest:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("body", CHATS, ids=range(len(CHATS)))
def test_no_chat_makes_many_objects(body: bytes) -> None:
    """A conversation of a MiB of brackets is refused, or read, without an object for each."""
    assert _peak(lambda: openai.parse_chat(body, 4_096)) < 4 * SIZE


@pytest.mark.parametrize("body", TEXTS, ids=range(len(TEXTS)))
def test_no_completion_makes_many_objects(body: bytes) -> None:
    """The same for a completion."""
    assert _peak(lambda: openai.parse_completion(body, MAX_IDS)) < 4 * SIZE


@pytest.mark.parametrize("body", TO_ENGINES, ids=range(len(TO_ENGINES)))
def test_no_body_for_engines_makes_many_objects(body: bytes) -> None:
    """The same for bodies that pass through to external engines."""

    def read() -> None:
        asked = ExternalRequest("chat", body)
        prompt_info._canonical(asked)
        asked.for_prefill(b"{}")

    assert _peak(read) < 5 * SIZE


@pytest.mark.parametrize("prompt", [*LISTS, b"[%b]" % LISTS[1]], ids=range(len(LISTS) + 1))
def test_no_prompt_for_engines_makes_many_objects(prompt: bytes) -> None:
    """Of a list that is no prompt of token ids, nothing is kept."""
    if prompt_info._begins_with_ids(prompt) and prompt.count(b",") > MAX_IDS:
        return  # it is not decoded at all
    assert _peak(lambda: prompt_info._only_ids(prompt)) < SIZE


PIECES = st.lists(st.sampled_from(['"', "\\", ",", "[", "é", "x" * 100, "\n"]), max_size=60)


@given(st.lists(PIECES.map("".join), max_size=8), st.integers(1, 40))
def test_structure_is_what_is_outside_strings(texts: list[str], size: int) -> None:
    """However text is escaped and the body is cut, the bytes outside strings count, and strings."""
    body = json.dumps(texts, ensure_ascii=False).encode()
    count = len(json.dumps([""] * len(texts))) + (16 - 2) * len(texts)

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(structure, "_PIECE_BYTES", size)
            assert await structure.check_structure(body, count) == count
            if count:
                with pytest.raises(BadRequest, match="outside strings"):
                    await structure.check_structure(body, count - 1)

    asyncio.run(main())


def test_a_prompt_of_token_ids_is_read() -> None:
    """A long list of ids is decoded as before, flat or in a list."""
    ids = [*range(8_000)]
    body = b'{"model":"m","prompt":%s}' % str(ids).encode()
    assert openai.parse_completion(body, MAX_IDS).prompt == ids
    nested = b'{"model":"m","prompt":[ %s ]}' % str(ids).encode()
    assert openai.parse_completion(nested, MAX_IDS).prompt == [ids]
    assert prompt_info._only_ids(str(ids).encode()) == ids
    assert prompt_info._only_ids(b"[%s]" % str(ids).encode()) == ids
    assert prompt_info._count_prompts(b'["a"]') == 1
    assert prompt_info._count_prompts(b'["a","b"]') == 2


def test_text_may_have_any_characters() -> None:
    """Commas, brackets and quotation marks in text are no structure."""
    text = ',[{"' * 50_000
    one = openai.parse_completion(openai_body(prompt=[text]), MAX_IDS)
    assert one.prompt == [text]
    assert openai.parse_completion(openai_body(prompt=text), MAX_IDS).prompt == text
    chat = openai_body(messages=[{"role": "user", "content": text}])
    assert openai.parse_chat(chat, 4_096).messages[0].content == text
    assert prompt_info._canonical(ExternalRequest("chat", chat))


def openai_body(**fields: Any) -> bytes:
    """A body with these fields."""

    return json.dumps({"model": "m", **fields}).encode()
