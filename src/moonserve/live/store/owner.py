"""A segment's owner: its memory, the server for peers, its beats, and the copies made to it.

live.store.client has one per segment. core.store.owners decides which objects are here and which
copies are to be made. The owner exchanges this with the master, and moves the bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Literal, NamedTuple, Protocol

import msgspec
import xxhash

from moonserve.core.errors import ConfigError, StoreError
from moonserve.core.store.owners import CopyQueue, SegmentContents
from moonserve.core.store.words import Change, Copy, Gone, Held, Holder, Medium, Mount, Orders
from moonserve.core.units import MICROS_PER_SECOND, Micros, SegmentId
from moonserve.live.store import operations, wire
from moonserve.live.store.link import FAILURES, MasterLink, now_us, text
from moonserve.live.store.settings import StoreSettings
from moonserve.live.transfer.client import Slice, Transfer
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 32
_COPIES_A_BATCH = 8
_BEATS_PER_TTL = 4
_BUSY_S = 0.001  # between beats while the master has more changes
_HELD_S = 0.1  # between looks whether the holder of the name is alive
_BEATS_OF_LIFE = 2  # one beat of a dead holder may still be under way
_NEWS = 3  # failed beats in a row


class _Job(NamedTuple):
    """Copies from one segment, made by one thread."""

    copies: list[Copy]
    until_us: Micros
    mounts: int
    """The number of the mount in which they were ordered."""


_Pulled = Literal["here", "lost", "corrupt"]


class Journal(Protocol):
    """Keeps a segment's contents longer than its owner lives."""

    def write(self, changes: Sequence[Change]) -> None:
        """Write changes, in order. Raises nothing: a change that cannot be written is lost."""

    def flush(self, held: Sequence[Held]) -> None:
        """Make the bytes of objects survive a crash of the machine; blocks. May raise OSError."""

    def close(self) -> None:
        """Finish all writes."""


class Owner:
    """One mounted segment. Made and closed by its client; `mount` it, then `start_beats`."""

    def __init__(
        self,
        link: MasterLink,
        transfer: Transfer,
        threads: Executor,
        region: Region,
        settings: StoreSettings,
        tier: Medium = "dram",
        held: Sequence[Held] = (),
        journal: Journal | None = None,
    ) -> None:
        """Listen for peers. Takes `region` and `journal` over, also if it raises ConfigError: it
        cannot listen there."""
        self.region = region
        self.catalogue = SegmentContents(held)
        self.tasks = CopyQueue(_COPIES_AT_ONCE)
        self._link = link
        self._transfer = transfer
        self._threads = threads
        self._journal = journal
        also = [it.host for it in settings.listened()]
        try:
            self.server = TransferServer(
                region,
                settings.token,
                settings.host,
                settings.port,
                also=also,
                tls=settings.tls.server if settings.tls else None,
            )
        except OSError as error:
            if journal is not None:
                journal.close()
            region.close()
            at = f"{error.filename}:{settings.port}"
            if error.errno == errno.EADDRINUSE:
                why = f"{at} is in use; choose another, or 0 for any that is free"
                raise ConfigError(why, "listen") from None
            field = "card" if error.filename in also else "host"
            raise ConfigError(f"cannot listen on {at}: {error.strerror}", field) from None
        try:  # a network card cannot use the pages of a disk
            mooncake = transfer.offer(region) if tier == "dram" else None
        except ConfigError:
            self.close()
            raise
        node = settings.node or settings.segment
        address = msgspec.structs.replace(
            self.server.address(settings.advertise_host or settings.host),
            cards=settings.cards,
            location=f"{node}:{settings.segment}",
            rack=settings.rack,
            mooncake=mooncake,
        )
        self.mounting = Mount(
            settings.segment, settings.epoch, len(region.view), address, node, tier, settings.rack
        )
        transfer.adopt(region)
        self._one_mount = asyncio.Lock()
        self._mounts = 0
        self._left = False
        self._times = settings.times
        self._beat_s = settings.times.beat_s
        self._reporting = asyncio.Lock()
        self._copying: set[asyncio.Task[None]] = set()
        self._pulling: set[asyncio.Future[list[_Pulled]]] = set()
        """Copies that may be writing to the memory now."""
        self._beats: asyncio.Task[None] | None = None
        self._watchers: list[Callable[[Sequence[bytes]], None]] = []
        self._reached = True
        """Whether the last beat succeeded; if not, the failure is logged already."""

    async def mount(self) -> None:
        """Mount the segment with all its objects. Raises MoonserveError or OSError."""
        seen = self._mounts
        async with self._one_mount:
            if self._mounts != seen:  # another call has mounted it meanwhile
                return
            self._mounts += 1
            self.tasks.forget()
            self.catalogue.restart()
            if self._pulling:  # they would write into extents that may soon be reused
                await asyncio.wait(self._pulling, timeout=self._times.stop_copies_s)
            if self._pulling:  # they end by their own deadlines
                raise StoreError(f"segment {self.mounting.id!r} is still being copied to")
            if not await self._offer() and not await self._offer():
                raise StoreError(f"segment {self.mounting.id!r} was refused")
            self._mounts += 1
        await self._link.claim()

    async def _offer(self) -> bool:
        """Send all pages. False: the mount was refused, or the master has lost some pages."""
        pages = self.catalogue.pages(wire.MAX_BATCH)
        for number, page in enumerate(pages):
            if self._left:
                raise StoreError(f"segment {self.mounting.id!r} has left the pool")
            last = number == len(pages) - 1
            call = wire.MountCall(self.mounting, page, number, last)
            reply = await self._link.call(operations.MOUNT, call)
            if reply.holder is not None:
                reply = await self._wait_for(reply.holder, call)
            if not reply.accepted:
                return False
            ttl_s = reply.terms.segment_ttl_us / MICROS_PER_SECOND
            self._beat_s = min(self._times.beat_s, ttl_s / _BEATS_PER_TTL)
        return True

    async def _wait_for(self, holder: Holder, call: wire.MountCall) -> wire.Mounted:
        """Mount again until the holder of the name is dropped. Raises ConfigError: the holder is
        alive."""
        name, lives = self.mounting.id, holder.beats + _BEATS_OF_LIFE
        level = logging.INFO if self._reached else logging.DEBUG
        log.log(
            level, "segment %s is held by another start of it: waiting whether that is alive", name
        )
        while True:
            reply = await self._link.call(operations.MOUNT, call)
            if reply.holder is None:
                return reply
            if reply.holder.address != holder.address:
                holder, lives = reply.holder, reply.holder.beats + _BEATS_OF_LIFE
            if reply.holder.beats >= lives:
                at = f"{holder.address.host}:{holder.address.port}"
                raise ConfigError(
                    f"{name} is held by {at}; choose another name, or stop that process", "name"
                )
            await asyncio.sleep(_HELD_S)

    def start_beats(self, heard: Callable[[], None], pause_s: float = 0.0) -> None:
        """Keep the segment mounted from now on, also at a master that restarts.

        heard: called after each beat; the link then has the addresses of all segments. pause_s:
        time before the first beat.
        """
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat_forever(heard, pause_s))
            self._beats.add_done_callback(lambda task: self._beats_ended(task, heard))

    def watch_changes(self, changed: Callable[[Sequence[bytes]], None]) -> None:
        """Call `changed` with keys that may have come or gone; the catalogue has those here."""
        self._watchers.append(changed)

    async def stop_beats(self) -> None:
        """Beat no more. The master drops the segment once it has been silent for long."""
        beats, self._beats = self._beats, None
        if beats is not None:
            beats.cancel()
            await asyncio.wait([beats])

    def wrote(self, held: Held) -> None:
        """A put of this process to this segment, or a copy to it, has ended."""
        self.catalogue.add(held)
        if self.catalogue.held.get(held.key) is held:  # else it was removed before this was known
            self._note([held])

    async def leave(self) -> None:
        """Stop beating and unmount: the objects of this segment leave the pool."""
        did_beat = self._beats is not None
        await self.stop_beats()
        if self._journal is not None and did_beat:
            try:  # else objects removed a moment ago would be back at the next start
                await self.catch_up()
            except FAILURES as error:
                log.debug("store master: no last beat: %s", text(error))
        self._left = True  # else a put that is under way would mount it again
        self.tasks.forget()  # running copies are awaited, and no more begin
        await self._link.attempt(
            operations.UNMOUNT, wire.SegmentCall(self.mounting.id, self.mounting.epoch)
        )

    async def idle(self) -> None:
        """Return once no copy is running."""
        while self._copying:  # a copy that ends may begin others
            await asyncio.wait(self._copying)

    def close(self) -> None:
        """Stop serving and free the memory; blocks. No copy may be running."""
        self.server.close()
        if self._journal is not None:
            self._journal.close()
        self._transfer.withdraw(self.region)
        self.region.close()

    # Beats

    async def _beat_forever(self, heard: Callable[[], None], pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        loop = asyncio.get_running_loop()
        missed = 0
        while True:
            next_s = loop.time() + self._beat_s  # the answer may take most of this time
            try:
                await self._report_results()
                orders = await self._beat(self._beat_s)
                heard()
                if orders is None or orders.more or orders.copies:
                    next_s = loop.time() + _BUSY_S
                self._reached, missed = True, 0
            except FAILURES as error:
                # one failure is not logged: when a cluster stops, its master ends first
                missed += 1
                level = logging.WARNING if missed == _NEWS else logging.DEBUG
                log.log(level, "store master: beat failed: %s; still trying", text(error))
                self._reached = False
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def catch_up(self) -> None:
        """Receive all changes of this segment up to now."""
        while (orders := await self._beat(0.0)) is not None:
            if orders.seen == self.catalogue.seen and not orders.more:
                return  # else a beat meanwhile was answered first

    async def _beat(self, wait_s: float) -> Orders | None:
        """Send one beat and apply its answer. None: the segment had to be mounted again."""
        me = self.mounting
        asked_us, mounts = now_us(), self._mounts
        call = wire.BeatCall(me.id, me.epoch, self.catalogue.seen, wait_s)
        reply = await self._link.call(operations.BEAT, call, self._times.beat_call_s)
        orders = reply.orders
        if mounts != self._mounts:
            return orders  # it belongs to an earlier mount
        if orders is None:
            level = logging.WARNING if self._reached else logging.DEBUG
            log.log(level, "the store's master does not know segment %s: mounting it again", me.id)
            await self.mount()
            return None
        self._link.addresses = reply.addresses
        if orders.after == self.catalogue.seen:
            self.catalogue.apply(orders)
            self._note(orders.changes)
        self.take_copies(asked_us, orders.copies)
        return orders

    def _beats_ended(self, task: asyncio.Task[None], heard: Callable[[], None]) -> None:
        """Log a bug that ended the beats, and start them again, so that the segment is not lost."""
        if task is self._beats and not task.cancelled():
            log.critical(
                "a bug ended the beats of a segment; they start again", exc_info=task.exception()
            )
            self._beats = None
            self.start_beats(heard, self._beat_s)

    def _note(self, changes: Sequence[Change]) -> None:
        if self._journal is not None and changes:
            self._journal.write(changes)
        if self._watchers and changes:
            keys = [change.key for change in changes]
            for changed in self._watchers:
                changed(keys)

    # Copies

    def take_copies(self, asked_us: Micros, copies: Sequence[Copy]) -> None:
        """Begin copies that the master ordered in answer to a beat of `asked_us`."""
        self.tasks.take(asked_us, copies)
        self._start_copies()

    def _start_copies(self) -> None:
        jobs: dict[SegmentId, list[Copy]] = {}
        at_us = now_us()
        while (copy := self.tasks.next(at_us)) is not None:
            jobs.setdefault(copy.source.segment, []).append(copy)
        for copies in jobs.values():
            for start in range(0, len(copies), _COPIES_A_BATCH):
                batch = copies[start : start + _COPIES_A_BATCH]
                until_us = at_us + min(copy.left_us for copy in batch)
                task = asyncio.create_task(self._copy(_Job(batch, until_us, self._mounts)))
                self._copying.add(task)
                task.add_done_callback(self._copying.discard)

    async def _copy(self, job: _Job) -> None:
        """Make some copies and note the results, which the next beat reports."""
        loop = asyncio.get_running_loop()
        end_s = time.monotonic() + (job.until_us - now_us()) / MICROS_PER_SECOND
        pulled: list[_Pulled] = ["lost"] * len(job.copies)
        corrupt = []
        try:
            if job.mounts == self._mounts:
                pull = loop.run_in_executor(self._threads, self._pull, job.copies, end_s)
                self._pulling.add(pull)
                pull.add_done_callback(self._pulling.discard)
                pulled = await pull
        finally:
            for copy, outcome in zip(job.copies, pulled, strict=True):
                held = copy.held
                if outcome == "here" and job.mounts == self._mounts:
                    self.wrote(held)
                elif outcome == "corrupt":
                    corrupt.append((held.key, held.version, copy.source.segment))
                self.tasks.end(held.id, outcome == "here")
        if corrupt:
            await self._link.attempt(operations.DISCARD, wire.DiscardCall(corrupt))
        try:
            await self._report_results()
        except FAILURES as error:
            log.debug("store master: copied failed: %s", text(error))  # the next beat reports them
        self._start_copies()

    def _pull(self, copies: Sequence[Copy], end_s: float) -> list[_Pulled]:
        """Copy bytes from one segment to this one and verify them; in a thread.

        If the thread was busy until `end_s`, nothing is copied: the extents may be reused by then.
        """
        address = self._link.addresses.get(copies[0].source.segment)
        if address is None or time.monotonic() >= end_s:
            return ["lost"] * len(copies)
        slices = []
        for copy in copies:
            held = copy.held
            memory = self.region.view[held.offset : held.offset + held.size]
            slices.append(Slice(copy.source.offset, memory))
        arrived = self._transfer.read(address, slices, end_s)
        pulled: list[_Pulled] = []
        for copy, piece, here in zip(copies, slices, arrived, strict=True):
            if here and xxhash.xxh3_64_intdigest(piece.memory) != copy.held.checksum:
                pulled.append("corrupt")
            else:
                pulled.append("here" if here else "lost")
        if self._journal is not None:
            try:
                self._journal.flush([copy.held for copy in copies])
            except OSError as error:
                log.error("segment %s: %s", self.mounting.id, text(error))
                return ["lost"] * len(copies)
        return pulled

    async def _report_results(self) -> None:
        """Report which copies have ended, one call at a time."""
        async with self._reporting:
            await self._report_some()

    async def _report_some(self) -> None:
        results = self.tasks.results()[: wire.MAX_BATCH]
        if not results:
            return
        call = wire.CopiedCall(self.mounting.id, self.mounting.epoch, results)
        became = await self._link.call(operations.COPIED, call)
        self.tasks.reported([id for id, _ in results])
        stale = [id for (id, done), yes in zip(results, became, strict=True) if done and not yes]
        if not stale:  # nearly always: it avoids a look at all objects here
            return
        gone = [Gone(it.key, it.id) for it in self.catalogue.held.values() if it.id in stale]
        for it in gone:
            self.catalogue.drop(it.key, it.id)
        self._note(gone)
