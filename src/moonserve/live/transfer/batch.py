"""What one batch of transfers is made of, and how it ends. Made and kept by the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from moonserve.core.transfer.lanes import Run
from moonserve.core.units import Bytes
from moonserve.live.transfer.ports import Op, Slice

if TYPE_CHECKING:
    from moonserve.live.transfer.peer import Peer


class Request(NamedTuple):
    """Read or write `memory` (contiguous, format "B") at `offset` of the segment at `location`."""

    op: Op
    memory: memoryview
    location: str
    offset: Bytes


class Lost(NamedTuple):
    """Bytes start..stop of a batch's request that are not known to have arrived, and why not."""

    request: int
    start: Bytes
    stop: Bytes
    why: str
    """A core.transfer.lanes.Loss, or "unknown": no such segment is registered."""


class Batch:
    """Requests under way; made by TransferEngine.submit."""

    def __init__(self, size: Bytes, deadline_s: float, stop: Callable[[Batch], None]) -> None:
        """`stop` is the engine's way to end it before its time."""
        self.size = size
        self.deadline_s = deadline_s
        self.groups: list[Group] = []
        self.left = 0
        """Slices that have not ended."""
        self.cancelled = False
        self.lost: list[Lost] = []
        self._stop = stop
        self._under_way = threading.Lock()  # a lock alone is lighter than an Event
        self._under_way.acquire()

    def wait(self) -> list[Lost]:
        """What did not arrive, once all is over: at about the deadline at the latest."""
        if not self._under_way.acquire(timeout=max(0.0, self.deadline_s - time.monotonic())):
            self._stop(self)
            self._under_way.acquire()
        self._under_way.release()  # for whoever else waits
        return sorted(self.lost)

    def end(self) -> None:
        """All slices have ended: the engine's, once."""
        self._under_way.release()

    def cancel(self) -> None:
        """End the batch soon; `wait` says when that is, and what had not arrived."""
        self._stop(self)

    def lose(self, requests: Sequence[Request], why: str) -> None:
        """None of these was started."""
        self.lost += [Lost(i, 0, len(it.memory), why) for i, it in enumerate(requests)]


class Group:
    """The slices of one batch that go in one direction to one segment."""

    def __init__(self, id: int, batch: Batch, peer: Peer, op: Op) -> None:
        self.id = id
        self.batch = batch
        self.peer = peer
        self.op: Op = op
        self.slices: list[Slice] = []
        self.origins: list[tuple[int, Bytes]] = []
        """Request and start within it, of each slice."""
        self.left = 0

    def add(self, number: int, request: Request, slice_bytes: Bytes) -> None:
        """Cut the batch's request of this number into slices."""
        memory = request.memory
        if len(memory) <= slice_bytes:
            self.slices.append(Slice(request.offset, memory))
            self.origins.append((number, 0))
            return
        for start in range(0, len(memory), slice_bytes):
            part = memory[start : start + slice_bytes]
            self.slices.append(Slice(request.offset + start, part))
            self.origins.append((number, start))

    def lost(self, index: int, why: str) -> Lost:
        """The loss of one slice."""
        number, start = self.origins[index]
        return Lost(number, start, start + len(self.slices[index].memory), why)


class Task:
    """A run on a lane, from its assignment to its end."""

    def __init__(self, group: Group, run: Run) -> None:
        self.group = group
        self.run = run
        self.link = group.peer.links[run.lane]
        self.started = False
        self.revoked = False
        """Ended before a thread took it up, which then leaves it alone."""
