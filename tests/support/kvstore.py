"""A KVStore of a dict, which workers in one process share; it can lose blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moonserve.core.store.words import Found
from moonserve.core.units import BlockKey, LeaseId, SegmentId


class DictStore:
    """Holds copies; `lost` says which keys cannot be read though they are found."""

    def __init__(self, lost: Callable[[BlockKey], bool] = lambda key: False) -> None:
        self.data: dict[BlockKey, bytes] = {}
        self.leases: list[LeaseId] = []
        self.lost = lost
        self.delay_s = 0.0
        self.puts = 0
        self.near: list[SegmentId | None] = []
        """The segment that each put asked for."""
        self.reads = 0

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        await asyncio.sleep(self.delay_s)
        found: list[Found] = []
        for key in keys:
            if key not in self.data:
                break
            found.append(Found(key, len(self.data[key]), 0, 1, ()))
        if found:
            self._take(lease)
        return found

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        for done, (item, buffer) in enumerate(zip(found, into, strict=True)):
            await asyncio.sleep(self.delay_s)
            if self.lost(item.key):
                return done
            buffer[:] = self.data[item.key]
            self.reads += 1
        return len(found)

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        self.near.append(near)
        await asyncio.sleep(self.delay_s)
        for key, view in items:
            self.data.setdefault(key, bytes(view))
            self.puts += 1
        if lease is not None:
            self._take(lease)
        return len(items)

    async def release(self, lease: LeaseId) -> None:
        if lease in self.leases:
            self.leases.remove(lease)

    async def close(self) -> None:
        pass

    def _take(self, lease: LeaseId) -> None:
        if lease not in self.leases:
            self.leases.append(lease)
