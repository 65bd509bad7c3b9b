"""The engine's paged block pool: which blocks are free and how often each is held.

Owned by one Batch and its driver. A block is held by the request that allocated it and, for a
while, by whoever still reads it (a background publish); it is free when the last holder let go.
Nothing here touches bytes, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks named 0..num_blocks-1; the last one freed is the first one reused."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def free_count(self) -> int:
        """How many blocks could be allocated now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """How many blocks are held by someone."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, each held once; None, and nothing taken, if fewer are free."""
        assert count >= 0, count
        if count > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold each allocated block once more; a matching `free` ends it."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free: nobody may hold it"
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Let go of each block once."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} freed twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
