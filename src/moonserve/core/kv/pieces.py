"""Pieces of chains: what PrefixIndex is made of. For core.kv.index, which alone changes them.

A piece never has a key twice, and is in `pieces` of exactly the holders in its `counts`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from moonserve.core.units import SegmentId


class HolderState:
    """One holder: its bit, and its pieces."""

    __slots__ = ("bit", "epoch", "name", "pieces")

    def __init__(self, name: SegmentId, epoch: int, bit: int) -> None:
        self.name = name
        self.epoch = epoch
        self.bit = bit
        self.pieces: dict[ChainPiece, None] = {}


class ChainPiece:
    """A run of keys that the same holders hold, each with one count for all of it."""

    __slots__ = ("counts", "keys", "mask", "next", "parent")

    def __init__(
        self,
        keys: list[Hashable],
        parent: Hashable | None,
        mask: int,
        counts: dict[HolderState, int],
    ) -> None:
        self.keys = keys
        self.parent = parent
        """The key before keys[0]; None at a chain's head."""
        self.next: Hashable | None = None
        """The first key of a piece that came after this one when last seen: a hint for joining."""
        self.mask = mask
        self.counts = counts
        for holder in counts:
            holder.pieces[self] = None


def span(own: list[Hashable], keys: list[Hashable]) -> tuple[int, int]:
    """Which part of a piece begins `keys`, forwards or backwards; keys[0] is in it."""
    start = own.index(keys[0]) if keys[0] != own[-1] else len(own) - 1
    stop = start + 1
    if start and len(keys) > 1 and own[start - 1] == keys[1]:
        start = stop - _common(own[max(0, stop - len(keys)) : stop][::-1], keys)
    else:
        stop = start + _common(own[start : start + len(keys)], keys)
    return start, stop


def _common(one: list[Hashable], other: list[Hashable]) -> int:
    """How many leading keys are the same."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def parting(
    own: Sequence[Hashable], start: int, keys: Sequence[Hashable], at: int, most: int
) -> int:
    """How many keys of a chain, from `start` on, are those of another from `at` on, up to `most`.

    At least the first is. By bisection: what comes before equal keys is equal.
    """
    low, high = 1, min(most, len(keys) - at)
    if own[start + high - 1] == keys[at + high - 1]:  # mostly
        return high
    while low < high:
        middle = (low + high + 1) >> 1
        if own[start + middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
