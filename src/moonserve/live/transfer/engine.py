"""The Transfer Engine: batches of reads and writes between local memory and named segments.

The engine cuts a batch into slices; core.transfer.lanes chooses the lane of each slice, and threads
carry them. Any thread may call it; an event loop only where `is_near` is true, because that is a
plain copy. A lost peer is no error: the batch ends with a list of slices that did not arrive. The
bytes that arrived may be stale or torn, so callers verify checksums.

Once `wait` or `transfer` has returned, that batch touches the caller's memory no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moonserve.core.errors import DeadlineExceeded, MoonserveError, TransferFailed
from moonserve.core.transfer.lanes import Fault
from moonserve.core.units import MICROS_PER_SECOND, Bytes, Micros
from moonserve.live.transfer.batch import (
    EngineSettings,
    LaneStats,
    Peer,
    Task,
    TransferBatch,
    TransferGroup,
    TransferLost,
    TransferRequest,
)
from moonserve.live.transfer.in_flight import InFlightBudget
from moonserve.live.transfer.memory import MemoryLink
from moonserve.live.transfer.ports import Link, Op, Path, Slice, Transport, parse_location

log = logging.getLogger(__name__)


class TransferEngine:
    """Reads and writes every registered segment."""

    def __init__(
        self, transports: Mapping[str, Transport], settings: EngineSettings | None = None
    ) -> None:
        """`transports` by name, as in Path.transport."""
        self.settings = settings or EngineSettings()
        self._transports = transports
        self._lock = threading.Lock()
        self._budget = InFlightBudget(self._lock, self.settings.in_flight_bytes)
        self._peers: dict[str, Peer] = {}
        self._groups: dict[int, TransferGroup] = {}
        self._next_group = 0
        self._idle: dict[Link, None] = {}
        """Links that may be connected and carry nothing; the longest idle is first."""
        self._pool = ThreadPoolExecutor(self.settings.threads, "kv-lane")

    def register(self, location: str, paths: Sequence[Path]) -> None:
        """Register a segment as `node:segment`; nothing changes if the paths are the same."""
        parse_location(location)
        assert paths
        known = self._peers.get(location)
        if known is not None and known.paths == tuple(paths):
            return
        self.forget(location)
        with self._lock:
            self._peers[location] = Peer(tuple(paths))

    def forget(self, location: str) -> None:
        """Drop a segment and cut off its transfers. Views of it stay valid."""
        with self._lock:
            peer = self._peers.pop(location, None)
            if peer is None:
                return
            peer.gone = True
            if peer.lanes is None:
                return
            for group in peer.lanes.groups:
                self._drop(self._groups[group])
            self._take_ends(peer)
            for lane, link in enumerate(peer.links):
                self._idle.pop(link, None)
                if lane in peer.lent:
                    link.cut()
                elif lane not in peer.tasks:
                    link.close()

    def close(self) -> None:
        """Forget every segment, and wait for the transfers under way."""
        with self._lock:
            self._budget.close()
        for location in self.locations():
            self.forget(location)
        self._pool.shutdown()

    def locations(self) -> list[str]:
        """The registered segments."""
        return list(self._peers)

    def in_flight_bytes(self) -> Bytes:
        """Bytes of batches that have started and not ended."""
        return self._budget.taken

    def stats(self) -> list[LaneStats]:
        """Return every lane of every segment that was used."""
        with self._lock:
            return [it for location, peer in self._peers.items() for it in peer.stats(location)]

    def is_near(self, location: str) -> bool:
        """Whether the segment's memory is mapped: then a transfer is a copy and cannot wait."""
        peer = self._peers.get(location)
        return peer is not None and peer.near is not None

    def _near(self, peer: Peer | None) -> MemoryLink | None:
        if peer is not None and peer.lanes is None:
            peer.open(self._transports, self.settings)
        return peer.near if peer is not None else None

    def view(self, location: str, offset: Bytes, length: Bytes) -> memoryview:
        """Return the bytes themselves, read-only, of a segment of this process or host.

        They belong to the object while the caller's lease lasts, and stay mapped while the view
        exists. Raises TransferFailed if the segment is elsewhere or the range is out of bounds.
        """
        peer = self._peers.get(location)
        near = self._near(peer)
        if near is None:
            raise TransferFailed(f"segment {location!r} is not in this host's memory")
        if offset < 0 or length < 0 or offset + length > len(near.view):
            raise TransferFailed(
                f"bytes {offset} to {offset + length} are out of segment {location!r}"
            )
        return near.view[offset : offset + length].toreadonly()

    def transfer(
        self, op: Op, location: str, slices: Sequence[Slice], deadline_s: float
    ) -> list[bool]:
        """Carry slices of one segment; return for each whether all its bytes arrived.

        This thread does one lane's share: a transfer that needs one lane needs no other thread.
        """
        peer = self._peers.get(location)
        near = self._near(peer)
        if peer is not None and near is not None:
            done = [False] * len(slices)
            if op == "write" and time.monotonic() >= deadline_s:
                return done  # another object may have the extent by now
            near.run(op, slices, deadline_s, done)
            with self._lock:
                peer.count(_arrived(slices, done))
            return done
        done = [False] * len(slices)
        if peer is not None:
            self._express(peer, op, slices, deadline_s, done)
        left = [index for index, arrived in enumerate(done) if not arrived]
        if left:
            requests = [
                TransferRequest(op, slices[i].memory, location, slices[i].offset) for i in left
            ]
            lost = {left[it.request] for it in self._queued(requests, deadline_s)}
            for index in left:
                done[index] = index not in lost
        return done

    def _queued(self, requests: Sequence[TransferRequest], deadline_s: float) -> list[TransferLost]:
        """Do the same as submit and wait, but let this thread do one lane's share."""
        batch, tasks = self._start(requests, deadline_s)
        try:
            self._drive(tasks, batch)
            return batch.wait()
        except BaseException:
            self._stop(batch)
            batch.wait()
            raise

    def submit(self, requests: Sequence[TransferRequest], deadline_s: float) -> TransferBatch:
        """Start a batch. It ends by `deadline_s` (time.monotonic), complete or with losses.

        It waits while too many bytes are in flight. A batch without a turn by then is lost.
        """
        batch, tasks = self._start(requests, deadline_s)
        self._spawn(tasks)
        return batch

    # Starting and ending. The methods down to _take_ends run under the lock, except _start.

    def _start(
        self, requests: Sequence[TransferRequest], deadline_s: float
    ) -> tuple[TransferBatch, list[Task]]:
        batch = TransferBatch(sum(len(it.memory) for it in requests), deadline_s, self._stop)
        for location in dict.fromkeys(it.location for it in requests):
            peer = self._peers.get(location)
            if peer is not None:
                peer.open(self._transports, self.settings)
        with self._lock:
            if not self._budget.take(batch.size, deadline_s):
                batch.lose(requests, "late")
                batch.end()
                return batch, []
            groups: dict[tuple[str, Op], TransferGroup] = {}
            for number, request in enumerate(requests):
                group = groups.get((request.location, request.op))
                if group is None:
                    peer = self._peers.get(request.location)
                    if peer is None or peer.lanes is None:
                        batch.lost.append(TransferLost(number, 0, len(request.memory), "unknown"))
                        continue
                    self._next_group += 1
                    group = TransferGroup(self._next_group, batch, peer, request.op)
                    groups[request.location, request.op] = self._groups[group.id] = group
                group.add(number, request, self.settings.slice_bytes)
            batch.groups = list(groups.values())
            return batch, self._enqueue(batch)

    def _enqueue(self, batch: TransferBatch) -> list[Task]:
        for group in batch.groups:
            group.left = len(group.slices)
            batch.left += group.left
        if not batch.left:
            self._finish(batch)
        tasks: list[Task] = []
        deadline_us = int(batch.deadline_s * MICROS_PER_SECOND)
        for group in batch.groups:
            assert group.peer.lanes is not None
            sizes = [len(it.memory) for it in group.slices]
            group.peer.lanes.submit(group.id, sizes, deadline_us)
            tasks += self._turn(group.peer)
        return tasks

    def _turn(self, peer: Peer) -> list[Task]:
        """Start the runs that the lanes assign now, and account for the slices that ended."""
        assert peer.lanes is not None
        tasks: list[Task] = []
        for run in peer.lanes.assign(_now_us()) if not peer.gone else ():
            task = Task(self._groups[run.group], run)
            task.link.arm()
            self._idle.pop(task.link, None)
            peer.tasks[run.lane] = task
            tasks.append(task)
        self._take_ends(peer)
        return tasks

    def _drop(self, group: TransferGroup) -> None:
        """End a group's waiting slices, and cut off its runs on lanes."""
        peer = group.peer
        assert peer.lanes is not None
        peer.lanes.drop(group.id)
        for lane, task in list(peer.tasks.items()):
            if task.group is group and task.started:
                task.link.cut()
            elif task.group is group:
                task.revoked = True
                del peer.tasks[lane]
                peer.lanes.ended(lane, _now_us(), [False] * len(task.run.slices), "late")

    def _take_ends(self, peer: Peer) -> None:
        assert peer.lanes is not None
        for end in peer.lanes.take_ends():
            group = self._groups[end.group]
            batch = group.batch
            if end.loss is not None:
                batch.lost.append(group.lost(end.slice, end.loss))
            group.left -= 1
            batch.left -= 1
            if not group.left:
                del self._groups[end.group]
            if not batch.left:
                self._finish(batch)

    def _finish(self, batch: TransferBatch) -> None:
        self._budget.free(batch.size)
        batch.end()

    def _stop(self, batch: TransferBatch) -> None:
        """End a batch early. It takes the lock itself."""
        with self._lock:
            batch.cancelled = True
            tasks: list[Task] = []
            for group in batch.groups:
                self._drop(group)
                tasks += self._turn(group.peer)
        self._spawn(tasks)

    # Carrying

    def _express(
        self,
        peer: Peer,
        op: Op,
        slices: Sequence[Slice],
        deadline_s: float,
        done: list[bool],
    ) -> None:
        """Carry the slices at once if they fit one run and a lane is idle.

        This saves the bookkeeping of the queue. The caller queues the slices that are not done.
        """
        size = sum([len(it.memory) for it in slices])
        with self._lock:
            if peer.gone or peer.lanes is None or not self._budget.take_at_once(size):
                return
            lane = peer.lanes.lend(size, len(slices))
            if lane is None:
                self._budget.free(size)
                return
            link = peer.lent[lane] = peer.links[lane]
            link.arm()
            self._idle.pop(link, None)
        fault: Fault | None = "lane"
        try:
            fault = _run(link, op, slices, deadline_s, done)
        finally:
            here = _arrived(slices, done)
            with self._lock:
                del peer.lent[lane]
                self._budget.free(size)
                peer.lanes.give_back(lane, _now_us(), len(here), sum(here), fault)
                self._rest(peer, link)
                follow = self._turn(peer)
            self._spawn(follow)

    def _spawn(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            try:
                self._pool.submit(self._drive, [task]).add_done_callback(_log_bug)
            except RuntimeError:  # the engine was closed meanwhile, and the task was revoked
                self._drive([task])

    def _drive(self, tasks: Sequence[Task], batch: TransferBatch | None = None) -> None:
        """Carry a task, then the tasks that its end starts: all of them, or only the batch's."""
        mine = tasks[0] if tasks else None
        self._spawn(tasks[1:])
        while mine is not None:
            follow = self._carry(mine)
            mine = None
            for index, task in enumerate(follow):
                if batch is None or task.group.batch is batch:
                    mine = follow.pop(index)
                    break
            self._spawn(follow)

    def _carry(self, task: Task) -> list[Task]:
        """Run one task to its end; return the tasks that can start then."""
        group, batch = task.group, task.group.batch
        with self._lock:
            if task.revoked or task.started:  # queued twice, because no thread could be started
                return []
            task.started = True
        slices = [group.slices[index] for index in task.run.slices]
        done = [False] * len(slices)
        fault: Fault | None = "lane"
        try:
            fault = _run(task.link, group.op, slices, batch.deadline_s, done)
            if fault is not None and batch.cancelled:
                fault = "late"
        finally:
            with self._lock:
                follow = self._ended(task, done, fault)
        return follow

    def _ended(self, task: Task, done: list[bool], fault: Fault | None) -> list[Task]:
        peer = task.group.peer
        assert peer.lanes is not None
        del peer.tasks[task.run.lane]
        peer.lanes.ended(task.run.lane, _now_us(), done, fault)
        self._rest(peer, task.link)
        return self._turn(peer)

    def _rest(self, peer: Peer, link: Link) -> None:
        """A link has become idle. It stays connected, unless too many idle links do."""
        if peer.gone:
            link.close()
            return
        self._idle[link] = None
        if len(self._idle) > self.settings.max_idle:
            longest = next(iter(self._idle))
            del self._idle[longest]
            longest.close()


def _run(
    link: Link, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]
) -> Fault | None:
    """Carry slices; return why the run broke off, if it did."""
    try:
        link.run(op, slices, deadline_s, done)
    except DeadlineExceeded:
        return "late"
    except (MoonserveError, OSError) as error:
        log.debug("a lane failed: %s", error)
        return "lane"
    return None


def _arrived(slices: Sequence[Slice], done: Sequence[bool]) -> list[Bytes]:
    """Return the sizes of the slices that arrived."""
    return [len(it.memory) for it, here in zip(slices, done, strict=True) if here]


def _now_us() -> Micros:
    return int(time.monotonic() * MICROS_PER_SECOND)


def _log_bug(ended: Future[None]) -> None:
    """Log an unexpected error of a lane's thread, because no caller waits for that thread."""
    error = ended.exception()
    if error is not None:
        log.critical("a transfer broke off by an unexpected error", exc_info=error)
