"""Lru: order of use, and what is not in it is not evicted."""

from moonserve.core.evict import Lru
from moonserve.core.units import BlockKey


def test_order_is_that_of_last_use() -> None:
    """Using an object again moves it behind all others."""
    lru = Lru()
    a, b = BlockKey(b"a"), BlockKey(b"b")
    lru.add(a, 64)
    lru.add(b, 128)
    lru.add(a, 64)
    assert lru.oldest() == b
    assert lru.evictable_bytes == 192


def test_discarded_objects_are_never_named() -> None:
    """A leased object leaves the order and its bytes leave the sum; an unknown one is no error."""
    lru = Lru()
    lru.add(BlockKey(b"a"), 64)
    lru.discard(BlockKey(b"a"))
    lru.discard(BlockKey(b"a"))
    assert lru.oldest() is None
    assert (len(lru), lru.evictable_bytes) == (0, 0)
