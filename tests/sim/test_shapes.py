"""Made-up loads: the same seed gives the same trace, and every row keeps the rules of a trace."""

import io
from pathlib import Path

import pytest
from bench.paper.shapes import MOST_TOKENS, SHAPES, TUNED, at_load, shape

from moonserve.sim.axes import setup_of
from moonserve.sim.plan import prefill_bound
from moonserve.sim.trace import read_trace, write_trace


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_valid_trace(name: str, tmp_path: Path) -> None:
    """It begins at 0, shares blocks, and can be read back from its file."""
    trace = shape(name, 1, 300)
    assert trace == shape(name, 1, 300)
    assert trace.rows != shape(name, 2, 300).rows
    assert trace.rows[0].at_us == 0
    assert max(row.input_tokens for row in trace.rows) <= MOST_TOKENS
    blocks = [block for row in trace.rows for block in row.blocks]
    assert len(set(blocks)) < len(blocks)
    text = io.StringIO()
    write_trace(trace, text)
    path = tmp_path / f"{trace.name}.jsonl"
    path.write_text(text.getvalue())
    assert read_trace(path) == trace


def test_clients_bring_the_load_that_was_asked_for() -> None:
    """At load 1 eight ideally cached nodes have as much to prefill as they can, about."""
    setup = setup_of({})
    assert set(TUNED) < set(SHAPES)
    assert prefill_bound(at_load("rag", 1, 400, 1.0, setup), setup) == pytest.approx(1, rel=0.15)
