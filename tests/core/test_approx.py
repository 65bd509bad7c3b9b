"""What engines without KV events should hold, guessed from their prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.inferred import Guess, Ratio, text_keys
from moonserve.core.units import BlockKey, SegmentId

ROOT = b"r" * 32


def guess(blocks: int) -> Guess:
    """Of an instance with so many blocks."""
    return Guess(SegmentId("e"), 1, blocks)


def test_texts_share_keys_as_far_as_they_agree() -> None:
    """Equal text gives equal keys up to the piece where it parts; a partial piece has none."""
    one, two = text_keys(ROOT, b"a" * 100, 32), text_keys(ROOT, b"a" * 70 + b"b" * 30, 32)
    assert len(one) == len(two) == 3
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert text_keys(b"x" * 32, b"a" * 100, 32)[0] != one[0]


def test_prompts_with_images_do_not_bend_the_ratio() -> None:
    """A megabyte that was a thousand tokens was no text."""
    ratio = Ratio(16)
    for _ in range(100):
        ratio.learn(1_000_000, 1_000)
        ratio.learn(100, 1_000)
    assert (ratio.piece, ratio.tokens(400)) == (64, 100)


def test_the_ratio_follows_what_engines_count() -> None:
    """Two bytes a token, seen often enough, halve the piece; little is no reason to change it."""
    ratio = Ratio(16)
    assert (ratio.piece, ratio.tokens(400), ratio.tokens(0)) == (64, 100, 1)
    ratio.learn(380, 100)
    assert ratio.piece == 64
    for _ in range(200):
        ratio.learn(200, 100)
    ratio.learn(100, 0)
    assert ratio.tokens(200) == pytest.approx(100, rel=0.1)
    assert ratio.piece == pytest.approx(32, abs=9)


@given(
    st.lists(st.tuples(st.text("abc", max_size=9), st.booleans()), max_size=40),
    st.integers(1, 12),
)
def test_the_index_holds_what_is_guessed(history: list[tuple[str, bool]], blocks: int) -> None:
    """After any history the index has exactly the keys that are held, never more than fit: those
    used last, and of one chain the first."""
    it, index = guess(blocks), PrefixIndex()
    used: dict[BlockKey, None] = {}
    """What should be held, the latest used last."""
    for text, wrong in history:
        keys = text_keys(ROOT, text.encode(), 1)
        for key in reversed(keys[: it.room]):
            used.pop(key, None)
            used[key] = None
        facts, before = it.served(keys), it.room
        used = dict([*used.items()][-before:])
        facts += it.said(100, 0 if wrong else 100)
        for fact in facts:
            if isinstance(fact, BlocksStored):
                index.stored(fact.segment, fact.keys, fact.parent, fact.tier, fact.epoch)
            else:
                index.removed(fact.segment, fact.keys, fact.tier, fact.epoch)
        assert len(index) == len(it) <= it.room <= blocks
        used = dict([*used.items()][-it.room :])
        assert {key for run in index.inventory(SegmentId("e")) for key in run[0]} == used.keys()
        found = index.match(keys).by_holder.get(SegmentId("e"), 0)
        assert found == min(len(keys), before, it.room)


def test_the_oldest_go_first_and_from_their_ends() -> None:
    """With no room left, the chain used longest ago loses its last pieces."""
    it = guess(4)
    old, new = [BlockKey(b"o%d" % n) for n in range(3)], [BlockKey(b"n%d" % n) for n in range(2)]
    it.served(old)
    _, removed = it.served(new)
    assert removed.keys == (old[2],)


def test_misses_shrink_what_it_is_taken_to_keep() -> None:
    """An engine that reused nothing of what was predicted keeps less; hits restore that."""
    it = guess(100)
    for _ in range(50):
        it.said(64, 0)
    assert it.room == 10
    for _ in range(200):
        it.said(64, 64)
    assert it.room == 100
