"""What is known of the public traces, counted by others: a simulator that differs is wrong."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.store.evict import EVICTIONS
from moonserve.sim.stats import hits, stats
from moonserve.sim.trace import Trace, read_trace, scale
from tests.support.traces import public_trace

TRUTHS = {
    "conversation": (12_031, 3_536_999, 144_793_823, 4_122_048, 288_500, 182_790),
    "synthetic": (3_993, 1_022_025, 61_194_628, 595_432, 121_877, 43_924),
}


@pytest.fixture(scope="module")
def conversation() -> Trace:
    """The conversation trace."""
    return read_trace(public_trace("conversation"))


@pytest.mark.parametrize("name", TRUTHS)
def test_counts_are_those_published(name: str) -> None:
    """Requests, span, tokens and blocks are exactly what the traces' table says."""
    found = stats(read_trace(public_trace(name)))
    counts = (found.requests, found.span_ms, found.input_tokens, found.output_tokens)
    assert (*counts, found.block_touches, found.unique_blocks) == TRUTHS[name]


def test_an_infinite_cache_hits_what_is_there(conversation: Trace) -> None:
    """Without eviction every order hits 105,710 blocks: .3664 of blocks, .3736 of tokens."""
    found = stats(conversation)
    for policy in EVICTIONS:
        there = hits(conversation, None, policy)
        assert (there.block_hits, there.token_hits) == (105_710, found.infinite_hit_tokens)
    assert round(found.infinite_hits / found.block_touches, 4) == 0.3664
    assert round(found.infinite_hit_tokens / found.input_tokens, 4) == 0.3736


def test_the_program_prints_the_truths() -> None:
    """`moonserve trace stats` tells the hits of a global LRU of 10,000 and of 50,000 blocks."""
    path = str(public_trace("conversation"))
    argv = ["trace", "stats", path, "--lru", "10000", "--lru", "50000", "--json"]
    printed = json.loads(CliRunner().invoke(cli, argv).stdout)
    assert printed["lru_hits"] == {"10000": 61_046, "50000": 102_290}
    assert printed["infinite_hits"] == 105_710


def test_more_room_never_hits_less(conversation: Trace) -> None:
    """LRU keeps its inclusion property: hits only grow with capacity, up to the infinite."""
    found = [hits(conversation, room).block_hits for room in (100, 1_000, 10_000, None)]
    assert found == sorted(found)


def test_divided_lengths_keep_every_hit(conversation: Trace) -> None:
    """Lengths divided by 16 hit the same blocks, of 32 tokens."""
    small = scale(conversation, lengths=16)
    assert small.block_size == 32
    assert hits(small, 10_000).block_hits == 61_046
