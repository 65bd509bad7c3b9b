"""Roster: the owners' side of the master. Who is mounted, what owners are told and answer.

For core.store.master, whose methods these are to the outside. It keeps the master from answering
while it recovers, and lets a segment go together with all that hangs on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from moonserve.core.errors import BadRequest, Recovering
from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.copies import Copies
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.puts import Puts
from moonserve.core.store.recovery import Recovery
from moonserve.core.store.repair import Repair
from moonserve.core.store.tiers import Tiers
from moonserve.core.store.words import (
    UNSEEN,
    Address,
    Change,
    Claim,
    Gone,
    Held,
    Holder,
    Key,
    Mount,
    Orders,
    Seen,
)
from moonserve.core.units import Micros, SegmentId

_SILENT_US: Micros = 2_000_000
"""An owner that lives beats several times meanwhile: twice a second, or four times a segment's time
to live."""
_MAX_KNOWN = 4_096


class Roster:
    """Segments, and the copies and recovery that their owners work for."""

    def __init__(
        self,
        stock: Stock,
        puts: Puts,
        copies: Copies,
        repair: Repair,
        tiers: Tiers,
        new_id: Callable[[], int],
        recovering_until_us: Micros | None,
    ) -> None:
        self._stock = stock
        self._puts = puts
        self._copies = copies
        self._repair = repair
        self._tiers = tiers
        self._new_id = new_id
        self._first_id = new_id()
        self._until_us = recovering_until_us
        self._recovery = Recovery(stock)
        self._known: OrderedDict[SegmentId, None] = OrderedDict()
        """Names of segments that are mounted or were, the latest last."""
        self._told: list[tuple[Shelf, Held]] = []
        """What catalogues told while recovering."""

    # Segments

    def mount(
        self,
        now_us: Micros,
        mount: Mount,
        held: Sequence[Change] = (),
        page: int = 0,
        last: bool = True,
    ) -> bool:
        """Add a segment: empty, or with what lies on it, told in pages from 0 on.

        False: refused. Another start of it is mounted (`holder` says where) or, after page 0, pages
        are missing: start again. The same mount again is a repeated message. It is mounted with
        its last page.

        A name has one holder: whoever else asks for it gets it once that one is silent for longer
        than any beat takes, all it held being dropped first, or has left. So a restarted owner is
        back soon, and of two that live the second is refused. Older epochs never take over: theirs
        may be late messages.
        """
        old = self._stock.shelves.get(mount.id)
        if old is not None:
            if old.mount == mount:
                old.heard_us = now_us
                return True
            silent_us = min(_SILENT_US, self._stock.terms.segment_ttl_us // 2)
            if mount.epoch < old.mount.epoch or now_us < old.heard_us + silent_us:
                return False
        self._drop(mount.id)
        whole = self._recovery.page(now_us, mount, held, page, last)
        if whole is None or not last:
            return whole is not None
        shelf = Shelf(mount, self._stock.terms.eviction, self._new_id(), now_us)
        self._stock.shelves[mount.id] = shelf
        self._known[mount.id] = None
        self._known.move_to_end(mount.id)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        for it in whole:
            if isinstance(it, Gone):
                shelf.gone[it.key] = it.id
            else:
                self._told.append((shelf, it))
        if not self.recovering:
            self._restore(now_us)
        return True

    def holder(self, segment: SegmentId) -> Holder | None:
        """Who holds this name, if anybody does."""
        shelf = self._stock.shelves.get(segment)
        return None if shelf is None else Holder(shelf.mount.address, shelf.beats)

    def check_known(self, segment: SegmentId) -> None:
        """Raise BadRequest if no segment of this name is mounted, nor was since this start."""
        if segment not in self._known:
            there = ", ".join(self._stock.shelves) or "none"
            raise BadRequest(f"preferred: no segment {segment!r}; there are: {there}", "preferred")

    def hear(self, now_us: Micros, segment: SegmentId, epoch: int) -> bool:
        """The owner lives, as who holds its beat's answer back may know. False: not mounted."""
        shelf = self._shelf(segment, epoch)
        if shelf is not None:
            shelf.heard_us = now_us
        return shelf is not None

    def beat(
        self, now_us: Micros, segment: SegmentId, epoch: int, seen: Seen = UNSEEN
    ) -> Orders | None:
        """The owner lives, and knows what changed up to `seen`. None: mount this epoch again."""
        shelf = self._shelf(segment, epoch)
        if shelf is None:
            return None
        shelf.heard_us = now_us
        shelf.beats += 1
        changes, now_seen, more = shelf.changes(seen, lambda key: self._stock.held(shelf, key))
        return Orders(seen, changes, now_seen, more, self._copies.orders(now_us, segment))

    def copied(
        self, now_us: Micros, segment: SegmentId, epoch: int, results: Sequence[tuple[int, bool]]
    ) -> list[bool]:
        """Copies to a segment ended, each (id, whether the bytes are there and verified).

        Per copy, whether it is a replica now; else its extent may be another's already. May be
        asked again where the answer was lost.
        """
        if self._shelf(segment, epoch) is None:
            return [False] * len(results)
        became = [self._end_copy(now_us, segment, id, done) for id, done in results]
        self._repair.plan(now_us)
        return became

    def unmount(self, segment: SegmentId, epoch: int) -> None:
        """Drop a segment and all it holds; another epoch's is left alone."""
        if self._shelf(segment, epoch) is not None:
            self._drop(segment)

    def drain(self, now_us: Micros, segment: SegmentId) -> bool:
        """Put nothing more onto a segment, and move away what is there. False: it is unknown.

        It is empty when its stats say so, and may be unmounted then.
        """
        self.serve(now_us)
        shelf = self._stock.shelves.get(segment)
        if shelf is None:
            return False
        shelf.draining = True
        self._repair.look_at(shelf.objects)
        self._repair.plan(now_us)
        return True

    def addresses(self) -> dict[SegmentId, Address]:
        """Where the mounted segments are reached."""
        return {name: shelf.mount.address for name, shelf in self._stock.shelves.items()}

    def reap(self, now_us: Micros) -> list[SegmentId]:
        """Drop segments not heard of (returned), give up overdue copies, end recovering in time.

        What a silent owner has not heard of is claimed for it, should it come back.
        """
        silent_us = now_us - self._stock.terms.segment_ttl_us
        shelves = self._stock.shelves
        lost = [name for name, shelf in shelves.items() if shelf.heard_us <= silent_us]
        for name in lost:
            shelf = shelves[name]
            untold = [self._stock.held(shelf, key) for key in shelf.untold()]
            epoch = shelf.mount.epoch
            self._drop(name)
            self._recovery.claim(now_us, [Claim(name, epoch, it, False) for it in untold])
        for shelf in shelves.values():
            if shelf.draining:  # puts and copies to it may have ended since
                self._repair.look_at(shelf.objects)
        self._recovery.reap(now_us, silent_us)
        for task in self._copies.overdue(now_us):
            self._end_copy(now_us, task.target.segment, task.id, False)
        self._end_recovering(now_us)
        return lost

    # Recovery

    @property
    def recovering(self) -> bool:
        """Whether the master does not know yet what exists."""
        return self._until_us is not None

    def serve(self, now_us: Micros | None) -> None:
        """To be called before anything that needs to know what exists. Raises Recovering."""
        if self._until_us is not None:
            if now_us is not None:
                self._end_recovering(now_us)
            if self.recovering:
                raise Recovering("the store's master has just started and gathers what there is")

    def claim(
        self, now_us: Micros, claims: Sequence[Claim], removed: Sequence[tuple[Key, int]]
    ) -> None:
        """What a client knows from an earlier master: puts, and removals as (key, version)."""
        for key, version in removed:
            self.note_removal(key, version)
            of = self._stock.objects.get(key)
            if of is not None and of.found.version <= version:
                self._stock.remove(of)
        self._recovery.claim(now_us, [it for it in claims if it.held.id < self._first_id])
        if not self.recovering:
            self._restore(now_us)

    def note_removal(self, key: Key, version: int) -> None:
        """This version is removed: no segment that comes back brings it again."""
        self._recovery.removed(key, version)

    def _end_recovering(self, now_us: Micros) -> None:
        """Owners amid their pages are waited for, up to what makes a segment silent."""
        if self._until_us is None or now_us < self._until_us:
            return
        if self._recovery.is_loading and now_us < self._until_us + self._stock.terms.segment_ttl_us:
            return
        self._until_us = None
        self._restore(now_us)

    def _restore(self, now_us: Micros) -> None:
        """Make objects and puts of all that was told and claimed of mounted segments."""
        shelves = self._stock.shelves
        told = [(shelf, it) for shelf, it in self._told if shelves.get(shelf.name) is shelf]
        self._told = []
        puts = self._recovery.restore(told)
        for shelf, held in puts:
            self._puts.claimed(shelf, held, now_us + self._stock.terms.put_ttl_us)
        self._repair.look_at(self._stock.short())

    # Inside

    def _shelf(self, segment: SegmentId, epoch: int) -> Shelf | None:
        shelf = self._stock.shelves.get(segment)
        return shelf if shelf is not None and shelf.mount.epoch == epoch else None

    def _end_copy(self, now_us: Micros, segment: SegmentId, id: int, done: bool) -> bool:
        ended = self._copies.end(segment, id, done)
        if ended is None:
            return self._copies.became(segment, id)
        task, became = ended
        if became:
            self._tiers.ended(task)
        elif task.why in ("repair", "drain"):
            self._repair.failed(now_us, task.of.found.key, segment)
        return became

    def _drop(self, name: SegmentId) -> None:
        """Forget a segment, its replicas, every put and copy onto it and every put by its owner."""
        shelf = self._stock.shelves.get(name)
        if shelf is None:
            return
        self._puts.abort_of(name)
        self._copies.drop_target(shelf)
        left: list[Object] = self._stock.drop_shelf(shelf)
        self._repair.look_at([of.found.key for of in left])
