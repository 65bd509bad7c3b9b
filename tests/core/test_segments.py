"""Extents: first fit, joined holes, exact accounting."""

from moonserve.core.store.catalog import Extents
from moonserve.core.store.words import ALIGN


def test_holes_are_joined_when_freed_in_any_order() -> None:
    """After everything is freed, one hole as large as the segment is left."""
    extents = Extents(10 * ALIGN)
    offsets = [extents.allocate(ALIGN) for _ in range(10)]
    assert extents.allocate(1) is None
    for offset in (offsets[i] for i in (3, 1, 2, 9, 0, 5, 4, 8, 6, 7)):
        assert offset is not None
        extents.free(offset, ALIGN)
    assert extents.allocate(10 * ALIGN) == 0


def test_sizes_are_rounded_up_and_capacity_down() -> None:
    """An extent takes whole cache lines, and a partial last line is not given out."""
    extents = Extents(3 * ALIGN - 1)
    assert extents.capacity_bytes == 2 * ALIGN
    assert extents.allocate(1) == 0
    assert extents.used_bytes == ALIGN
    assert extents.allocate(ALIGN + 1) is None
    assert extents.allocate(ALIGN) == ALIGN
    assert extents.free_bytes == 0


def test_first_hole_that_fits_is_taken() -> None:
    """A freed hole is used again before untouched memory, unless it is too small."""
    extents = Extents(10 * ALIGN)
    first, _, third = (extents.allocate(2 * ALIGN) for _ in range(3))
    assert first is not None
    assert third is not None
    extents.free(first, 2 * ALIGN)
    assert extents.allocate(3 * ALIGN) == 6 * ALIGN
    assert extents.allocate(2 * ALIGN) == first
