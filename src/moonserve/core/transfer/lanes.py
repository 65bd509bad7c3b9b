"""Which slice of a transfer goes over which lane next, and which lanes are out of use.

A lane is one way to one segment's memory: a socket between a pair of network cards. Slices come in
groups (one direction, one deadline). A lane carries one run at a time: slices of one group that
share a round trip. Slices wait in one queue and not at lanes; the nearest idle lane takes the next
ones. Groups take turns.

The Transfer Engine has one Lanes per segment: it reports what happened and carries out the runs.
Nothing here knows sockets, memory or the time. Every slice ends exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from moonserve.core.units import Bytes, Micros

Fault: TypeAlias = Literal["lane", "late"]
"""Why a run broke off. "lane": the lane failed. "late": the deadline passed, or the group was
dropped."""
SPARE: Final = 100
"""The distance from which a lane is a spare: it retries slices that failed on other lanes, and
carries the others only while no nearer lane is healthy."""
Loss: TypeAlias = Literal["failed", "late", "refused", "no lane"]
"""Why a slice ended without its bytes. "failed": its tries are used up. "late": the deadline
passed, or it was dropped. "refused": the peer refused it. "no lane": no lane is healthy or due for
a trial."""


class LaneTerms(msgspec.Struct, frozen=True):
    """When a lane is put out of use, and how much it carries at once."""

    tries: int = 3
    """The most lanes that carry a slice before it fails, the first included."""
    failures: int = 2
    """After this many failures in a row a lane is put on probation."""
    probation_us: Micros = 200_000
    """The first probation. Each failed trial doubles it, up to `probation_max_us`."""
    probation_max_us: Micros = 30_000_000
    run_bytes: Bytes = 16 << 20
    """The most bytes of one run; a single slice may be larger."""
    spread_bytes: Bytes = 4 << 20
    """A larger group is spread evenly over the healthy lanes, in runs of at least this size."""
    run_slices: int = 256


class Run(NamedTuple):
    """Slices of one group, by their index in it, that `lane` carries together."""

    lane: int
    group: int
    slices: tuple[int, ...]


class SliceEnd(NamedTuple):
    """The end of one slice; `loss` None: all its bytes arrived."""

    group: int
    slice: int
    loss: Loss | None


class LaneCounters(msgspec.Struct):
    """What one lane has carried since its start."""

    bytes: Bytes = 0
    slices: int = 0
    """Slices that arrived."""
    failures: int = 0
    """Runs that broke off because the lane failed."""
    retries: int = 0
    """Slices that had failed on some lane before."""
    probations: int = 0


class _Slice:
    __slots__ = ("avoid", "group", "index", "size", "tries")

    def __init__(self, group: int, index: int, size: Bytes) -> None:
        self.group = group
        self.index = index
        self.size = size
        self.tries = 0
        self.avoid = 0
        """Bitmask of the lanes it failed on."""


class _Lane:
    def __init__(self, id: int, distance: int) -> None:
        self.id = id
        self.distance = distance
        self.run: tuple[_Slice, ...] = ()
        self.lent = False
        self.failures = 0  # in a row
        self.delay_us: Micros = 0
        self.until_us: Micros | None = None  # on probation until then, and in the trial after it
        self.counters = LaneCounters()

    def usable(self, now_us: Micros) -> bool:
        return not self.run and not self.lent and (self.until_us is None or self.until_us <= now_us)


class _Group:
    def __init__(self, deadline_us: Micros, slices: list[_Slice]) -> None:
        self.deadline_us = deadline_us
        self.fresh = deque(slices)
        self.bytes = sum([slice.size for slice in slices])
        self.left = len(slices)
        self.dropped = False


class Lanes:
    """All lanes to one segment, and the slices that wait for them."""

    def __init__(self, distances: Sequence[int], terms: LaneTerms) -> None:
        """Make one lane per distance, with ids from 0 up.

        A smaller distance is nearer (the same card or rack). From SPARE on, a lane is a spare.
        """
        assert distances
        self._terms = terms
        self._lanes = [_Lane(id, distance) for id, distance in enumerate(distances)]
        self._nearest = sorted(self._lanes, key=lambda it: (it.distance, it.id))
        self._groups: dict[int, _Group] = {}
        self._turns: deque[int] = deque()
        """Groups with slices that no lane has taken yet; the first is next."""
        self._retries: list[_Slice] = []
        self._ends: list[SliceEnd] = []

    @property
    def waiting(self) -> int:
        """Slices in the queue."""
        fresh = sum(len(self._groups[id].fresh) for id in self._turns)
        return fresh + len(self._retries)

    @property
    def running(self) -> int:
        """Slices on lanes."""
        return sum(len(lane.run) for lane in self._lanes)

    @property
    def groups(self) -> list[int]:
        """Groups with a slice that has not ended."""
        return list(self._groups)

    def counters(self, lane: int) -> LaneCounters:
        """Return a lane's counters, which go on counting."""
        return self._lanes[lane].counters

    def on_probation(self, lane: int) -> bool:
        """Whether the lane is out of use, or gets one slice as a trial at most."""
        return self._lanes[lane].until_us is not None

    def submit(self, group: int, sizes: Sequence[Bytes], deadline_us: Micros) -> None:
        """Queue the slices of a new group: index i has sizes[i] bytes."""
        assert group not in self._groups
        if sizes:
            slices = [_Slice(group, index, size) for index, size in enumerate(sizes)]
            self._groups[group] = _Group(deadline_us, slices)
            self._turns.append(group)

    def drop(self, group: int) -> None:
        """End a group's waiting slices as late, and those on lanes once their runs have ended."""
        it = self._groups.get(group)
        if it is None or it.dropped:
            return
        it.dropped = True
        mine = [slice for slice in self._retries if slice.group == group]
        self._retries = [slice for slice in self._retries if slice.group != group]
        if it.fresh:
            self._turns.remove(group)
            mine += it.fresh
            it.fresh.clear()
        for slice in mine:
            self._end(slice, "late")

    def assign(self, now_us: Micros) -> list[Run]:
        """Return the runs to start now. The engine answers each by one `ended`."""
        runs: list[Run] = []
        if not self._turns and not self._retries:
            return runs
        for group in self.groups:
            if self._groups[group].deadline_us <= now_us:
                self.drop(group)
        usable = [lane for lane in self._nearest if lane.usable(now_us)]
        # Due trials come first: a lane that is never tried never returns to use.
        due = [lane for lane in usable if lane.until_us is not None]
        for lane in due + [lane for lane in usable if lane.until_us is None]:
            lane.run = self._take(lane)
            if lane.run:
                indices = tuple([slice.index for slice in lane.run])
                runs.append(Run(lane.id, lane.run[0].group, indices))
        if not any(lane.run or lane.lent for lane in self._lanes):
            # All lanes are on probation: the caller should know now, not at the deadline.
            for group in list(self._turns):
                self._retries += self._groups[group].fresh
                self._groups[group].fresh.clear()
            self._turns.clear()
            waiting = self._retries
            self._retries = []
            for slice in waiting:
                self._end(slice, "no lane")
        return runs

    def ended(self, lane: int, now_us: Micros, done: Sequence[bool], fault: Fault | None) -> None:
        """A lane's run is over; done[i]: its i-th slice arrived.

        If the lane failed, another lane retries the slices that did not arrive. Without a fault,
        the peer refused them.
        """
        it = self._lanes[lane]
        assert len(done) == len(it.run) > 0
        run = it.run
        it.run = ()
        self._judge(it, now_us, fault)
        for slice, arrived in zip(run, done, strict=True):
            if arrived:
                it.counters.bytes += slice.size
                it.counters.slices += 1
                self._end(slice, None)
            elif fault is None:
                self._end(slice, "refused")
            elif fault == "late" or self._groups[slice.group].dropped:
                self._end(slice, "late")
            else:
                slice.tries += 1
                slice.avoid |= 1 << lane
                if slice.tries < self._terms.tries:
                    self._retries.append(slice)
                else:
                    self._end(slice, "failed")

    def lend(self, size: Bytes, slices: int) -> int | None:
        """Reserve the nearest lane for a run that needs no queue; `give_back` ends it.

        None: the run is too large for one lane, other slices wait, all lanes are busy, or a lane on
        probation needs a trial.
        """
        terms = self._terms
        most = (
            terms.run_bytes if len(self._lanes) == 1 else min(terms.run_bytes, terms.spread_bytes)
        )
        if size > most or not 0 < slices <= terms.run_slices or self._turns or self._retries:
            return None
        free: _Lane | None = None
        for lane in self._nearest:
            if lane.until_us is not None:
                return None
            if free is None and not lane.run and not lane.lent and not self._rests(lane):
                free = lane
        if free is None:
            return None
        free.lent = True
        return free.id

    def give_back(
        self, lane: int, now_us: Micros, slices: int, size: Bytes, fault: Fault | None
    ) -> None:
        """The reserved lane's run is over, with what arrived. The caller calls `assign` next."""
        it = self._lanes[lane]
        assert it.lent
        it.lent = False
        it.counters.slices += slices
        it.counters.bytes += size
        self._judge(it, now_us, fault)

    def take_ends(self) -> list[SliceEnd]:
        """Return the slices that ended since the last call."""
        ends = self._ends
        self._ends = []
        return ends

    def _judge(self, lane: _Lane, now_us: Micros, fault: Fault | None) -> None:
        if fault is None:
            lane.failures = 0
            lane.delay_us = 0
            lane.until_us = None
        elif fault == "lane":
            lane.failures += 1
            lane.counters.failures += 1
            if lane.until_us is not None or lane.failures >= self._terms.failures:
                longer_us = max(2 * lane.delay_us, self._terms.probation_us)
                lane.delay_us = min(longer_us, self._terms.probation_max_us)
                lane.until_us = now_us + lane.delay_us
                lane.counters.probations += 1
        elif lane.until_us is not None:  # a trial without a result
            lane.until_us = now_us + lane.delay_us

    def _take(self, lane: _Lane) -> tuple[_Slice, ...]:
        """Return the lane's next run: slices that failed elsewhere, else the next group's."""
        most = 1 if lane.until_us is not None else self._terms.run_slices
        run: list[_Slice] = []
        size = 0
        for slice in self._retries:
            same = not run or slice.group == run[0].group
            fits = not run or size + slice.size <= self._terms.run_bytes
            if same and fits and len(run) < most and self._may(slice, lane):
                run.append(slice)
                size += slice.size
        if run:
            taken = {id(slice) for slice in run}
            self._retries = [slice for slice in self._retries if id(slice) not in taken]
            lane.counters.retries += len(run)
            return tuple(run)
        if not self._turns or self._rests(lane):
            return ()
        id_ = self._turns.popleft()
        group = self._groups[id_]
        healthy = sum(it.until_us is None and not self._rests(it) for it in self._lanes)
        share = max(self._terms.spread_bytes, -(-group.bytes // max(healthy, 1)))
        while group.fresh and len(run) < most:
            if run and size + group.fresh[0].size > min(share, self._terms.run_bytes):
                break
            size += group.fresh[0].size
            run.append(group.fresh.popleft())
        if group.fresh:
            self._turns.append(id_)
        return tuple(run)

    def _rests(self, lane: _Lane) -> bool:
        """Whether this spare lane is not needed: a nearer lane is healthy, busy or not."""
        return lane.distance >= SPARE and any(
            it.until_us is None and it.distance < SPARE for it in self._lanes
        )

    def _may(self, slice: _Slice, lane: _Lane) -> bool:
        """Whether a lane may retry a slice: not if it failed there and may go to a healthy lane."""
        if not slice.avoid >> lane.id & 1:
            return True
        return not any(it.until_us is None and not slice.avoid >> it.id & 1 for it in self._lanes)

    def _end(self, slice: _Slice, loss: Loss | None) -> None:
        self._ends.append(SliceEnd(slice.group, slice.index, loss))
        group = self._groups[slice.group]
        group.left -= 1
        if not group.left:
            del self._groups[slice.group]
