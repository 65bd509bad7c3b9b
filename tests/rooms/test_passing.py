"""Bodies and replies as they pass: which bytes of them change."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.errors import BadRequest
from moonserve.live.drive.passing import Passing, passing
from moonserve.live.openai import usage
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.request import Form

CHUNK = b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"text":" \\"usage\\":","finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":150,"total_tokens":158,'
    b'"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":150}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = CHUNK * 7 + LAST + USAGE + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.none() | st.integers(0, 200))
def test_a_stream_passes_whole_however_it_is_cut(cuts: list[int], cached: int | None) -> None:
    """Each output ends with an event's end, and together they are the input.

    Only cached_tokens change: they are prefill's, and at most the prompt's tokens.
    """
    reply = Passing(cached)
    out = []
    for begin, end in pairwise(sorted({0, len(STREAM), *cuts})):
        if whole := reply.whole(STREAM[begin:end]):
            assert whole.endswith(b"\n\n")
            out.append(reply.passed(whole))
    said = 150 if cached is None else min(cached, 150)
    assert b"".join(out) == STREAM.replace(b'cached_tokens":150', b'cached_tokens":%d' % said)
    assert (reply.done, reply.error, reply.finish) == (True, b"", "stop")
    assert (reply.cached, reply.tokens, reply.counted.prompt) == (said, 8, 150)


@given(st.lists(st.integers(0, len(STREAM) + STREAM.count(b"\n")), max_size=12))
def test_lines_may_end_in_two_bytes(cuts: list[int]) -> None:
    """The standard has three line ends: events with CRLF pass at once too, however they are cut."""
    crlf = STREAM.replace(b"\n", b"\r\n")
    reply, out = Passing(), b""
    for begin, end in pairwise(sorted({0, len(crlf), *cuts})):
        whole = reply.whole(crlf[begin:end])
        out += reply.passed(whole)
        assert len(crlf[:end].split(b"\r\n\r\n")) == len(out.split(b"\n\n"))
    assert out == STREAM
    assert (reply.done, reply.finish, reply.tokens) == (True, "stop", 8)


def test_an_event_that_ends_like_the_one_before_is_read_all_the_same() -> None:
    """Usage, an end and an error are seen wherever they stand between events that end alike."""
    counts = b'"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}'
    early = b'data: {"id":"c",%b,"choices":[{"text":" b","finish_reason":null}]}\n\n' % counts
    reply = Passing()
    for event in (CHUNK, CHUNK, early, CHUNK):
        assert reply.passed(event) == event
    assert reply.counted.completion == 2
    assert reply.finish is None
    assert reply.passed(LAST + CHUNK) == LAST + CHUNK  # another choice goes on
    assert reply.finish is None
    reply.passed(CHUNK + LAST)
    assert reply.finish == "stop"
    assert not reply.done
    reply.passed(DONE)
    assert reply.done
    assert reply.events == 9


def test_without_usage_tokens_are_counted_by_events() -> None:
    """Eight events without usage are eight tokens, whatever the text says about usage."""
    reply = Passing()
    reply.passed(CHUNK * 7 + LAST + DONE)
    assert (reply.tokens, reply.cached, reply.counted) == (8, None, usage.SeenUsage())


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_where_nothing_of_an_answer_came_there_is_no_token(form: Form) -> None:
    """The mark of the end is no event of the answer. An answer without usage has a token."""
    reply = passing(form)
    assert (reply.begun, reply.tokens) == (False, 0)
    reply.passed(DONE)
    assert (reply.begun, reply.tokens) == (False, 0)
    reply.answered(b"{}")
    assert (reply.begun, reply.tokens) == (True, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_what_decode_received_is_not_what_was_cached(stream: bool) -> None:
    """If prefill does not report what it reused, the client gets null, and not decode's number."""
    reply = Passing(None, elsewhere=True)
    out = reply.passed(STREAM) if stream else reply.answered(USAGE)
    assert out == (STREAM if stream else USAGE).replace(
        b'cached_tokens":150', b'cached_tokens":null'
    )
    assert (reply.cached, reply.counted.cached) == (None, 150)


def test_an_engines_error_in_its_stream_is_seen() -> None:
    """vLLM and SGLang report a failure as an event."""
    for error in (
        b'data: {"error":{"message":"EngineCore died","code":500}}\n\n',
        b'data: {"object":"error","message":"EngineCore died","code":500}\n\n',
        b'data: {"object": "error", "message": "EngineCore died"}\n\n',
    ):
        reply = Passing()
        assert reply.passed(CHUNK) == CHUNK
        assert not reply.error
        assert reply.passed(CHUNK + error + DONE) == CHUNK, "the error is not the client's"
        assert (reply.error, reply.done) == (error + DONE, False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}', usage.SeenUsage(9)),
        (b'{"usage":null}', usage.SeenUsage()),
        (b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}', usage.SeenUsage(9, 2)),
        (
            b'{"choices":[{"text":"\\"usage\\":{\\"cached_tokens\\":7}"}],"usage":{"prompt_tokens":9,'
            b'"prompt_tokens_details":{"cached_tokens":12}},"kv":{"remote_prefill_cached_tokens":3}}',
            usage.SeenUsage(9, None, 9),
        ),
        (b"no json", usage.SeenUsage()),
    ],
)
def test_usage_is_read_where_it_stands(body: bytes, said: usage.SeenUsage) -> None:
    """Only the key itself counts, never the same bytes in text. Cached tokens are at most the
    prompt's."""
    assert usage.read(body) == said
    patched = usage.patched(body, 5)
    if said.cached is None:
        assert patched == body
    else:
        assert patched == body.replace(b'"cached_tokens":12', b'"cached_tokens":5')


def test_counts_that_no_engine_can_mean_are_not_read() -> None:
    """Numbers of thousands of digits are ignored."""
    said = usage.read(b'"usage":{"prompt_tokens":%b,"completion_tokens":3}' % (b"9" * 5_000))
    assert said.completion == 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "n2", "logprobs", "seed", "min_tokens"]), VALUES),
    st.sampled_from(["chat", "completion"]),
    st.booleans(),
)
def test_prefill_and_decode_get_what_the_client_asked(
    more: dict[str, object], form: Form, stream: bool
) -> None:
    """Every other field stays as it was, in its place. Decode's body only has fields appended."""
    more = {name: value for name, value in more.items() if name != "n2"}
    asked = {"model": "m", "prompt": "hi", "messages": [], "stream": stream, **more}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    raw = msgspec.json.encode(asked)
    it = ExternalRequest(form, raw)
    params = b'{"do_remote_decode":true,"x":[1,null]}'
    first = msgspec.json.decode(it.for_prefill(params))
    changed = {"max_tokens": 1, "stream": False, "kv_transfer_params": msgspec.json.decode(params)}
    if form == "chat":
        changed["max_completion_tokens"] = 1
    kept = {k: v for k, v in asked.items() if k not in ("min_tokens", "stream_options")}
    assert first == {**kept, **changed}
    assert [k for k in first if k in kept] == list(kept)
    second = it.with_fields({"kv_transfer_params": params})
    assert second == raw[:-1] + b',"kv_transfer_params":' + params + b"}"


@pytest.mark.parametrize(
    ("more", "whole"),
    [
        ({}, False),
        ({"n": 1, "best_of": 1, "logprobs": True}, False),
        ({"n": 2}, True),
        ({"best_of": 3}, True),
        ({"use_beam_search": True}, True),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True}, True),
    ],
)
def test_what_has_several_readers_is_one_engines(more: dict[str, object], whole: bool) -> None:
    """KV that an engine hands on has one reader."""
    raw = msgspec.json.encode({"model": "m", "prompt": "hi", **more})
    assert ExternalRequest("completion", raw).whole is whole


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":1,"prompt":"x"}', b'{"prompt":"x"}', b"{"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    """The answer is 400, before any engine is called."""
    with pytest.raises(BadRequest):
        ExternalRequest("completion", body)
