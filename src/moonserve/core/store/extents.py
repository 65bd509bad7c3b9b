"""Extents: which stretches of one segment's memory are taken.

For core.store.master. It only counts: no byte of a segment is ever touched from here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from moonserve.core.units import Bytes

ALIGN: Bytes = 64
"""Extents start and end on cache lines, so that two writers never share one."""


def aligned(size: Bytes) -> Bytes:
    """The bytes an object of `size` takes up: the next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


class Extents:
    """First-fit allocator over one segment; free neighbours are always joined.

    KV blocks are nearly all of one size, so the first hole nearly always fits.
    """

    def __init__(self, capacity_bytes: Bytes) -> None:
        self.capacity_bytes = capacity_bytes // ALIGN * ALIGN
        self.free_bytes = self.capacity_bytes
        self._starts: list[Bytes] = [0] if self.capacity_bytes else []
        """Offsets of the holes, ascending; never more than extents in use plus one."""
        self._holes: dict[Bytes, Bytes] = dict.fromkeys(self._starts, self.capacity_bytes)
        self._used: dict[Bytes, Bytes] = {}

    @property
    def used_bytes(self) -> Bytes:
        """Bytes in use, alignment included."""
        return self.capacity_bytes - self.free_bytes

    def allocate(self, size: Bytes) -> Bytes | None:
        """The offset of a fresh extent of at least `size` (> 0) bytes; None: no hole fits."""
        assert size > 0, "an extent holds something"
        need = aligned(size)
        if need > self.free_bytes:
            return None
        for index, start in enumerate(self._starts):
            length = self._holes[start]
            if length < need:
                continue
            del self._holes[start]
            if length > need:
                self._starts[index] = start + need
                self._holes[start + need] = length - need
            else:
                del self._starts[index]
            self._used[start] = need
            self.free_bytes -= need
            return start
        return None

    def free(self, offset: Bytes) -> None:
        """Give back the extent that `allocate` placed at `offset`."""
        length = self._used.pop(offset)
        self.free_bytes += length
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + length:
            length += self._holes.pop(self._starts.pop(index))
        if index > 0 and self._starts[index - 1] + self._holes[self._starts[index - 1]] == offset:
            self._holes[self._starts[index - 1]] += length
        else:
            self._starts.insert(index, offset)
            self._holes[offset] = length

    def reserve(self, offset: Bytes, size: Bytes) -> bool:
        """Take exactly the extent of `size` (> 0) bytes at `offset`. False: not all of it is free.

        For what an owner says lies there already.
        """
        need = aligned(size)
        index = bisect_right(self._starts, offset) - 1
        if offset % ALIGN or index < 0:
            return False
        start = self._starts[index]
        end = start + self._holes[start]
        if offset + need > end:
            return False
        del self._holes[start], self._starts[index]
        for hole, length in ((offset + need, end - offset - need), (start, offset - start)):
            if length:
                self._starts.insert(index, hole)
                self._holes[hole] = length
        self._used[offset] = need
        self.free_bytes -= need
        return True
