"""Rows in the order of a number that changes now and then.

core.schedule.view keeps one Ranking for each number by which a decision looks for instances, so
that a decision finds the first ones without a look at all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

_BITS = 20
MOST_ROWS = 1 << _BITS
_ROW = MOST_ROWS - 1


class Ranking:
    """Rows 0, 1, ... by their numbers, the lowest first; of equal numbers the first row.

    Numbers are integers, 0 or more.
    """

    __slots__ = ("_of", "entries")

    def __init__(self, numbers: Sequence[int]) -> None:
        assert len(numbers) <= MOST_ROWS
        self._of = [number << _BITS | row for row, number in enumerate(numbers)]
        """The entry of each row."""
        self.entries = sorted(self._of)
        """Read them by `row_of` and `number_of`."""

    def put(self, row: int, number: int) -> None:
        """The number of a row is another one. O(log rows), and one move within a list."""
        entry = number << _BITS | row
        before = self._of[row]
        if entry != before:
            self._of[row] = entry
            del self.entries[bisect_left(self.entries, before)]
            insort(self.entries, entry)

    def entry(self, row: int) -> int:
        """The entry of a row."""
        return self._of[row]

    def rows(self, count: int) -> list[int]:
        """The first so many rows."""
        return [entry & _ROW for entry in self.entries[:count]]

    def until(self, number: int) -> int:
        """How many rows have this number or a lower one."""
        return bisect_left(self.entries, first_entry(number + 1))


def row_of(entry: int) -> int:
    """The row of an entry."""
    return entry & _ROW


def number_of(entry: int) -> int:
    """The number of an entry."""
    return entry >> _BITS


def first_entry(number: int) -> int:
    """The lowest entry of a number: a bound for entries."""
    return number << _BITS
