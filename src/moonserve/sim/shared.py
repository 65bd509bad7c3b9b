"""The block pool of an external engine, in which requests with a common prefix hold the same
blocks.

sim.node has one for each instance. Workers of ours have no such blocks: they load a copy of their
own of each prefix. It touches no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonserve.core.engine.blocks import BlockPool
from moonserve.core.units import BlockKey


class SharedBlocks(BlockPool):
    """A BlockPool that knows which key's KV a held block has. A free block has no key."""

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
