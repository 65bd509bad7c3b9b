"""The row of a recording: a trace row that shares blocks where prompts share them, and no text."""

from __future__ import annotations

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.record import Measured, Record
from moonserve.core.schedule.recorded import RecordedRequest, cluster_of, recorded
from moonserve.core.schedule.shown import explained
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import BlockKey, RequestId, Tokens
from tests.support.cluster import info

SALT = b"secret"


def record(name: str, prompt: Tokens, tokens: Tokens, served: bool = True) -> Record:
    """A request that is over."""
    return Record(
        RequestId(name),
        "m",
        "team",
        3,
        prompt,
        (),
        Slo(None, None),
        5_000,
        measured=Measured(tokens=tokens),
        outcome="length" if served else "refused",
        is_good=True if served else None,
        is_closed=True,
    )


def keys(*names: str) -> list[BlockKey]:
    """Keys of successive blocks."""
    return [BlockKey(name.encode()) for name in names]


def row(it: Record, of: list[BlockKey], block_size: Tokens, salt: bytes = SALT) -> RecordedRequest:
    """Its row, from keys of 16 tokens each."""
    return recorded(it, of, 16, block_size, salt, lambda us: 1_000_000 + us // 1_000, 40)


def test_a_row_has_the_fields_of_a_trace_and_of_the_explanation() -> None:
    """Times since 1970; of a request that was not served, a guess of its output."""
    made = row(record("a", 40, 7), keys("k1", "k2"), 16)
    assert (made.timestamp, made.input_length, made.output_length) == (1_000_005, 40, 7)
    assert (made.tenant, made.priority, made.request, made.outcome) == ("team", 3, "a", "length")
    assert (made.block_size, made.output_guessed, made.output_tokens) == (16, False, 7)
    refused = row(record("b", 40, 0, served=False), keys("k1", "k2"), 16)
    assert (refused.output_length, refused.output_guessed) == (40, True)
    assert msgspec.json.decode(msgspec.json.encode(made), type=RecordedRequest) == made


def test_a_row_has_no_words_of_an_instance() -> None:
    """Operators see in `explain` what an engine said; a recording has no text."""
    refused = record("a", 40, 0, served=False)
    refused.measured = Measured(said="e0: the prompt 'secret' is too long")
    assert explained(refused, lambda us: us).said == refused.measured.said
    assert row(refused, keys("k1"), 16).said is None


def test_equal_prefixes_have_equal_ids_and_what_has_no_key_is_shared_with_nobody() -> None:
    """The last block is a partial one. Larger blocks take the key of their last part."""
    one = row(record("a", 40, 1), keys("k1", "k2"), 16).hash_ids
    two = row(record("b", 40, 1), keys("k1", "k2"), 16).hash_ids
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert len({*one, *two}) == 4
    assert len(row(record("c", 32, 1), keys("k1", "k2"), 16).hash_ids) == 2
    wide = row(record("d", 70, 1), keys("k1", "k2", "k3", "k4"), 32).hash_ids
    assert wide[0] == one[1]
    assert len(wide) == 3
    assert len(row(record("e", 70, 1), [], 32).hash_ids) == 3


def test_ids_need_the_secret() -> None:
    """With another one nothing is equal; all ids are below 2^64."""
    mine = row(record("a", 40, 1), keys("k1", "k2"), 16).hash_ids
    other = row(record("a", 40, 1), keys("k1", "k2"), 16, b"other").hash_ids
    assert not set(mine) & set(other)
    assert max(mine + other) < 1 << 64


def test_a_cluster_is_recorded_while_it_can_serve() -> None:
    """Both roles, or instances that do both."""
    prefill, decode, both = info("p0", "prefill"), info("d0", "decode"), info("b0", "both")
    found = cluster_of([prefill, decode], Tuning())
    assert found is not None
    assert [it.id for it in found.instances] == ["p0", "d0"]
    assert found.instances[0].block_size == prefill.namespace.block_size
    assert cluster_of([both], Tuning()) is not None
    assert cluster_of([prefill], Tuning()) is None
    assert cluster_of([], Tuning()) is None
