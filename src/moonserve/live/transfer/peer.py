"""A segment as the Transfer Engine knows it: its paths, and the lanes made of them at first use."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from moonserve.core.transfer.lanes import LaneCounters, Lanes, LaneTerms
from moonserve.core.units import Bytes
from moonserve.live.transfer.batch import Task
from moonserve.live.transfer.memory import MemoryLink
from moonserve.live.transfer.ports import Link, Path, Transport


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one engine."""

    lanes: int = 2
    """The most lanes per path of a segment."""
    slice_bytes: Bytes = 1 << 20
    """What is retried, and spread over lanes, as one."""
    in_flight_bytes: Bytes = 1 << 30
    """A batch over this waits until others have ended; a larger one goes alone."""
    threads: int = 32
    max_idle: int = 64
    """Lanes that stay connected while they carry nothing."""
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
        """None until a way was found."""
        self.near: MemoryLink | None = None
        """The only link, where the segment's memory is in reach."""
        self.links: list[Link] = []
        """One per lane."""
        self.ways: list[Path] = []
        """The path of each link."""
        self.tasks: dict[int, Task] = {}
        """What is on each busy lane."""
        self.lent: dict[int, Link] = {}
        """Busy lanes that carry what was never queued."""
        self._opening = threading.Lock()

    def open(self, transports: Mapping[str, Transport], settings: EngineSettings) -> None:
        """Make the lanes unless there are some: one by memory if in reach, else of all paths."""
        with self._opening:
            if self.lanes is not None:
                return
            found = self._first_links(transports)
            # All paths have one lane before any has its second: idle cards are used first.
            for turn in range(1, 1 if self.near is not None else settings.lanes):
                for path in dict.fromkeys(path for path, _ in found):
                    transport = transports[path.transport]
                    link = transport.open(path) if turn < transport.most_lanes(path) else None
                    if link is not None:
                        found.append((path, link))
            self.ways = [path for path, _ in found]
            self.links = [link for _, link in found]
            if found:  # last: others look at this one without a lock
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
        """Note slices that were copied without asking the lanes."""
        assert self.lanes is not None
        counters = self.lanes.counters(0)
        counters.slices += len(sizes)
        counters.bytes += sum(sizes)

    def stats(self, location: str) -> list[LaneStats]:
        """Every lane as it is now; none before first use."""
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
