"""Streaming text: however tokens and text are cut, the pieces join to the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.text.stops import StopMatcher
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer
from moonserve.live.text.tools import Detokenizer
from moonserve.live.text.vocab import vocabulary_of_gguf

BYTE = 3


def spm() -> Tokenizer:
    """A vocabulary of 256 byte tokens (ids from BYTE), "▁", "▁a" and three special tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 3,
    }
    prefixed = {"tokenizer.ggml." + key: value for key, value in metadata.items()}
    return Tokenizer(vocabulary_of_gguf(prefixed), (2,))


SPM = spm()


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What comes out when the ids arrive in pieces of these sizes, the rest one by one."""
    detokenizer = Detokenizer(tokenizer)
    out: list[str] = []
    at = 0
    for size in [*sizes, *([1] * len(ids))]:
        out.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return [*out, detokenizer.flush()]


@given(st.lists(st.integers(0, SPM.vocab_size - 1)), st.lists(st.integers(0, 5)))
def test_any_ids_in_any_cut_join_to_the_whole(ids: list[int], sizes: list[int]) -> None:
    """Streamed pieces join to decode() of all ids, valid UTF-8 or not."""
    assert "".join(streamed(SPM, ids, sizes)) == SPM.decode(ids)


@given(st.text(), st.lists(st.integers(0, 5)))
def test_text_is_never_cut_inside_a_character(text: str, sizes: list[int]) -> None:
    """Real text in byte tokens comes back, and no piece has U+FFFD that the text has not."""
    ids = [BYTE + byte for byte in (" " + text).encode()]
    pieces = streamed(SPM, ids, sizes)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@pytest.mark.model
def test_real_tokens_of_multi_byte_text() -> None:
    """SmolLM2 spells emoji and Chinese in parts of characters; one token at a time is whole."""
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).path)
    text = "家 👩‍👩‍👧 ok 🇩🇪é\u0301\r\n一二"
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, [])
    assert len(ids) > len(text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_special_tokens_have_no_text_and_an_unfinished_character_shows_at_the_end() -> None:
    """Special tokens are skipped even inside a character; a cut-off character is one U+FFFD."""
    detokenizer = Detokenizer(SPM)
    assert [detokenizer.feed([BYTE + 0xC3]), detokenizer.feed([2, BYTE + 0xA9])] == ["", "é"]
    assert [detokenizer.feed([BYTE + 0xE4, BYTE + 0xB8]), detokenizer.flush()] == ["", "\ufffd"]


def test_the_leading_space_of_a_text_and_of_a_continuation() -> None:
    """SentencePiece's first space is dropped at a text's start and kept after a prompt."""
    word = SPM.encode("a")
    assert Detokenizer(SPM).feed([1, *word, *word]) == "a a"
    assert Detokenizer(SPM, at_start=False).feed(word) == " a"


def first_stop(text: str, stops: list[str]) -> str:
    """The rule, naively: grow the text by a character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


few = st.text(alphabet="ab\n", max_size=30)
some_stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


@given(few, some_stops, st.lists(st.integers(0, 6)))
def test_output_ends_before_the_first_stop_in_any_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    """The output is the text before the first stop string, however the text arrives."""
    matcher = StopMatcher(stops)
    out, at = "", 0
    for size in [*sizes, *([1] * len(text))]:
        before = matcher.met
        emitted = matcher.feed(text[at : at + size])
        at += size
        assert before is None or (matcher.met == before and not emitted)
        out += emitted
    assert (matcher.met is not None) == any(stop in text for stop in stops)
    if matcher.met is not None:
        assert matcher.met in stops
        assert text.startswith(out + matcher.met)
    assert out + matcher.flush() == first_stop(text, stops)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    """Text goes out at once, except an end that could still become a stop string."""
    matcher = StopMatcher(["</s>", "\n\n"])
    assert matcher.feed("one <") == "one "
    assert matcher.feed("/b>\n") == "</b>"
    assert matcher.feed("two </") == "\ntwo "
    assert matcher.met is None
    assert matcher.feed("s> three") == ""
    assert matcher.feed("more") == ""
    assert matcher.met == "</s>"
    assert matcher.flush() == ""
