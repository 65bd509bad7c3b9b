"""The engine's paged block pool: which blocks are free, and how many holders each has.

One Batch and its driver own it. A block is held by the request that allocated it and, for a while,
by readers such as a background publish. It is free when its last holder frees it. Nothing here
touches bytes, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonserve.core.units import BlockKey


class BlockPool:
    """`num_blocks` blocks with ids 0..num_blocks-1; the last one freed is the first one reused."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def free_count(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Number of blocks with a holder."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, each held once; None: fewer are free, and nothing is taken."""
        assert count >= 0, count
        free = self._free
        if count > len(free):
            return None
        if not count:
            return ()
        taken = tuple(free[: -count - 1 : -1])
        del free[-count:]
        holders = self._holders
        for block in taken:
            holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each allocated block; a matching `free` removes it."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be held"
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block."""
        holders = self._holders
        free = self._free
        for block in blocks:
            left = holders[block] - 1
            assert left >= 0, f"block {block} is freed twice"
            holders[block] = left
            if not left:
                free.append(block)


class SharedBlocks(BlockPool):
    """The pool of an external engine, as the simulator has it: requests with a common prefix hold
    the same blocks. It knows which key's KV a held block has; a free block has none.

    Workers of ours have no such blocks: they load a copy of their own of each prefix.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}

    def shared(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """The blocks of the leading run of these keys that requests hold now."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def name(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """These held blocks have the KV of these keys, one each. A key that another block has
        stays with that block."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._blocks:
                self._blocks[key] = block
                self._keys[block] = key

    def free(self, blocks: Iterable[int]) -> None:
        """See BlockPool. A block without a holder loses its key."""
        freed = tuple(blocks)
        super().free(freed)
        for block in freed if self._keys else ():
            if not self._holders[block]:
                key = self._keys.pop(block, None)
                if key is not None:
                    del self._blocks[key]
