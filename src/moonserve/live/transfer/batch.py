"""What the Transfer Engine works with: batches of requests, and the segments that they go to.

The engine makes and keeps them. It cuts a batch into groups, one per direction and segment, and a
group into slices. A Peer is a segment as the engine knows it: its paths, and the lanes that the
engine makes of them at first use. A Task is a run of slices on one lane.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from moonserve.core.transfer.lanes import LaneCounters, Lanes, LaneTerms, Run
from moonserve.core.units import Bytes
from moonserve.live.transfer.memory import MemoryLink
from moonserve.live.transfer.ports import Link, Op, Path, Slice, Transport


class TransferRequest(NamedTuple):
    """Read or write `memory` (contiguous, format "B") at `offset` of the segment at `location`."""

    op: Op
    memory: memoryview
    location: str
    offset: Bytes


class TransferLost(NamedTuple):
    """Bytes start..stop of one request that may not have arrived, and the reason."""

    request: int
    start: Bytes
    stop: Bytes
    why: str
    """A core.transfer.lanes.Loss, or "unknown": no such segment is registered."""


class TransferBatch:
    """Requests under way. TransferEngine.submit makes it."""

    def __init__(
        self, size: Bytes, deadline_s: float, stop: Callable[[TransferBatch], None]
    ) -> None:
        """`stop`: the engine's method that ends a batch early."""
        self.size = size
        self.deadline_s = deadline_s
        self.groups: list[TransferGroup] = []
        self.left = 0
        """Slices that have not ended."""
        self.cancelled = False
        self.lost: list[TransferLost] = []
        self._stop = stop
        self._under_way = threading.Lock()  # a lock alone is lighter than an Event
        self._under_way.acquire()

    def wait(self) -> list[TransferLost]:
        """Wait until all slices have ended, at about the deadline at the latest.

        Returns what did not arrive.
        """
        if not self._under_way.acquire(timeout=max(0.0, self.deadline_s - time.monotonic())):
            self._stop(self)
            self._under_way.acquire()
        self._under_way.release()  # for other waiting threads
        return sorted(self.lost)

    def end(self) -> None:
        """All slices have ended. The engine calls it once."""
        self._under_way.release()

    def cancel(self) -> None:
        """End the batch soon; `wait` returns when it has ended, with what did not arrive."""
        self._stop(self)

    def lose(self, requests: Sequence[TransferRequest], why: str) -> None:
        """Note that none of these requests was started."""
        self.lost += [TransferLost(i, 0, len(it.memory), why) for i, it in enumerate(requests)]


class TransferGroup(msgspec.Struct, eq=False):
    """The slices of one batch that go in one direction to one segment."""

    id: int
    batch: TransferBatch
    peer: Peer
    op: Op
    slices: list[Slice] = []
    origins: list[tuple[int, Bytes]] = []
    """Per slice, its request and where it starts in it."""
    left: int = 0
    """Slices that have not ended."""

    def add(self, number: int, request: TransferRequest, slice_bytes: Bytes) -> None:
        """Cut request number `number` of the batch into slices."""
        memory = request.memory
        if len(memory) <= slice_bytes:
            self.slices.append(Slice(request.offset, memory))
            self.origins.append((number, 0))
            return
        for start in range(0, len(memory), slice_bytes):
            part = memory[start : start + slice_bytes]
            self.slices.append(Slice(request.offset + start, part))
            self.origins.append((number, start))

    def lost(self, index: int, why: str) -> TransferLost:
        """Return the loss of one slice."""
        number, start = self.origins[index]
        return TransferLost(number, start, start + len(self.slices[index].memory), why)


class Task:
    """A run on a lane, from its assignment to its end."""

    def __init__(self, group: TransferGroup, run: Run) -> None:
        self.group = group
        self.run = run
        self.link = group.peer.links[run.lane]
        self.started = False
        self.revoked = False
        """It ended before a thread started it; the thread then does nothing."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one engine."""

    lanes: int = 2
    """The most lanes per path of a segment."""
    slice_bytes: Bytes = 1 << 20
    """The unit that is retried and spread over lanes."""
    in_flight_bytes: Bytes = 1 << 30
    """A batch that exceeds this bound waits until others have ended. A batch larger than the bound
    goes alone."""
    threads: int = 32
    max_idle: int = 64
    """Idle lanes that stay connected."""
    terms: LaneTerms = LaneTerms()


class LaneStats(NamedTuple):
    """One lane as it is now."""

    location: str
    path: Path
    counters: LaneCounters
    on_probation: bool


class Peer:
    """A registered segment. The engine's lock guards it, but for `open`."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self.gone = False
        self.lanes: Lanes | None = None
        """None until a path led to the segment."""
        self.near: MemoryLink | None = None
        """The only link, if the segment's memory is on this host."""
        self.links: list[Link] = []
        """One per lane."""
        self.ways: list[Path] = []
        """The path of each link."""
        self.tasks: dict[int, Task] = {}
        """The task on each busy lane."""
        self.lent: dict[int, Link] = {}
        """Busy lanes whose slices were not queued; see Lanes.lend."""
        self._opening = threading.Lock()

    def open(self, transports: Mapping[str, Transport], settings: EngineSettings) -> None:
        """Make the lanes at first use: one if the memory is on this host, else of all paths."""
        with self._opening:
            if self.lanes is not None:
                return
            found = self._first_links(transports)
            # Every path gets its first lane before any gets a second, to use idle cards first.
            for turn in range(1, 1 if self.near is not None else settings.lanes):
                for path in dict.fromkeys(path for path, _ in found):
                    transport = transports[path.transport]
                    link = transport.open(path) if turn < transport.most_lanes(path) else None
                    if link is not None:
                        found.append((path, link))
            self.ways = [path for path, _ in found]
            self.links = [link for _, link in found]
            if found:  # set last: other threads read `lanes` without a lock
                self.lanes = Lanes([path.distance for path in self.ways], settings.terms)

    def _first_links(self, transports: Mapping[str, Transport]) -> list[tuple[Path, Link]]:
        found: list[tuple[Path, Link]] = []
        for path in self.paths:
            link = transports[path.transport].open(path)
            if isinstance(link, MemoryLink):
                self.near = link
                return [(path, link)]
            if link is not None:
                found.append((path, link))
        return found

    def count(self, sizes: Sequence[Bytes]) -> None:
        """Count slices that were copied without the lanes."""
        assert self.lanes is not None
        counters = self.lanes.counters(0)
        counters.slices += len(sizes)
        counters.bytes += sum(sizes)

    def stats(self, location: str) -> list[LaneStats]:
        """Return every lane as it is now; none before first use."""
        if self.lanes is None:
            return []
        return [
            LaneStats(
                location,
                path,
                msgspec.structs.replace(self.lanes.counters(lane)),
                self.lanes.on_probation(lane),
            )
            for lane, path in enumerate(self.ways)
        ]
