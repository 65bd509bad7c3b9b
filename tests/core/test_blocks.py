"""BlockPool: who holds which block."""

from __future__ import annotations

import pytest

from moonserve.core.engine.blocks import BlockPool


def test_allocates_all_or_nothing() -> None:
    """A request for more blocks than are free takes none."""
    pool = BlockPool(3)
    assert pool.allocate(2) == (0, 1)
    assert pool.allocate(2) is None
    assert pool.free_count == 1
    assert pool.allocate(0) == ()


def test_free_twice_is_a_bug() -> None:
    """A block freed more often than held trips an assert."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="is free"):
        pool.hold(blocks)


def test_held_block_outlives_its_request() -> None:
    """A block is free only when its last holder let go."""
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.hold(blocks)
    pool.free(blocks)
    assert pool.allocate(1) is None
    pool.free(blocks)
    assert pool.allocate(1) == blocks
