"""The transports that are plain copies: this process's memory, and shared memory of this host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonserve.live.transfer.ports import Op, Path, Slice, Transport
from moonserve.live.transfer.region import Region

_SMALL_BYTES = 32 << 10
"""Below this size a copy takes less time than to release the interpreter's lock."""


class MemoryLink:
    """A segment's bytes in this process's address space. A copy cannot fail, hang or be cut."""

    def __init__(self, view: memoryview, owner: object) -> None:
        """`owner` lives at least as long as the link."""
        self.view = view
        self._owner = owner

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """See Link.run."""
        view = self.view
        for index, (offset, memory) in enumerate(slices):
            end = offset + len(memory)
            if offset < 0 or end > len(view):
                continue
            there = view[offset:end]
            target, source = (memory, there) if op == "read" else (there, memory)
            if len(memory) <= _SMALL_BYTES:
                target[:] = source
            else:  # numpy copies without holding the interpreter's lock
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            done[index] = True

    def arm(self) -> None:
        """See Link.arm."""

    def cut(self) -> None:
        """See Link.cut. Nothing to do: a copy ends by itself."""

    def close(self) -> None:
        """See Link.close. Nothing to do: the mapping ends with the last reference to it."""


class LocalTransport(Transport):
    """Segments of this process."""

    def __init__(self) -> None:
        self._regions: dict[bytes, Region] = {}

    def adopt(self, region: Region) -> None:
        """Use a region of this process; its owner closes it after the engine."""
        self._regions[region.identity] = region

    def open(self, path: Path) -> MemoryLink | None:
        """See Transport.open."""
        region = self._regions.get(path.address.identity)
        return None if region is None else MemoryLink(region.view, region)


class ShmTransport(Transport):
    """Segments of other processes on this host."""

    def open(self, path: Path) -> MemoryLink | None:
        """See Transport.open."""
        region = Region.attach(path.address.region, path.address.identity)
        return None if region is None else MemoryLink(region.view, region)
