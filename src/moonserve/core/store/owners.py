"""What segment owners and clients remember, and how a restarted master learns it from them.

live/store and the simulated store of the tests use the first part: an owner keeps SegmentContents
and a CopyQueue; every client, owner or not, keeps RecentWrites, because the owners may not have
received its latest puts yet. core.store.master uses the second part, Recovery. All of it is pure,
and nothing here touches the bytes of a segment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from moonserve.core.store.catalog import Catalog, SegmentLedger
from moonserve.core.store.words import (
    UNSEEN,
    Change,
    Claim,
    Copy,
    Found,
    Gone,
    Held,
    Key,
    Mount,
    Orders,
    PutOptions,
    Replica,
    Seen,
    Ticket,
)
from moonserve.core.units import Bytes, Micros, SegmentId

_MAX_LATEST = 4_096
"""The most keys that left a segment, and the most ended copies, that an owner remembers."""
_MAX_REMOVED = 65_536
"""The most removed keys that a master remembers."""
_CLAIMS_KEPT_US: Micros = 60_000_000


# Owners and clients


class SegmentContents:
    """The replicas on one segment, as its owner knows them. Bounded by the segment."""

    def __init__(self, held: Sequence[Held] = ()) -> None:
        self.held: dict[Key, Held] = {it.key: it for it in held}
        self.seen: Seen = UNSEEN
        """For the next beat."""
        self._gone: dict[Key, int] = {}
        """The latest keys that the master reported as gone, with their ids. An `add` of such an id
        may come later."""

    def add(self, held: Held) -> None:
        """A put has ended here, or a copy is made.

        The owner notes a copy before it reports it: the master's answer may be lost.
        """
        known = self.held.get(held.key)
        gone = self._gone.get(held.key)
        if (known is None or known.id < held.id) and (gone is None or gone < held.id):
            self.held[held.key] = held

    def drop(self, key: Key, id: int) -> None:
        """The put or copy `id` made no replica; nor is there an older one of this key."""
        known = self.held.get(key)
        if known is not None and known.id <= id:
            del self.held[key]

    def apply(self, orders: Orders) -> None:
        """Take in the changes in a beat's answer, unless it answers an earlier beat."""
        if orders.after != self.seen:
            return
        self.seen = orders.seen
        for change in orders.changes:
            self._apply(change)
        _keep_latest(self._gone)

    def _apply(self, change: Change) -> None:
        known = self.held.get(change.key)
        if isinstance(change, Gone):
            self.drop(change.key, change.id)
            self._gone[change.key] = change.id
        elif known is None or known.id <= change.id:
            self.held[change.key] = change

    def restart(self) -> None:
        """The segment is not mounted any more: after the next mount, changes start anew."""
        self.seen = UNSEEN

    def pages(self, most: int) -> list[tuple[Change, ...]]:
        """Return everything in pages of up to `most`, to mount with; at least one page.

        Keys that are gone are part of it, because clients that put them may claim them for a while.
        """
        changes: list[Change] = [*self.held.values()]
        changes += [Gone(key, id) for key, id in self._gone.items()]
        rest = iter(changes)
        pages = []
        while page := tuple(islice(rest, most)):
            pages.append(page)
        return pages or [()]


@dataclass(slots=True)
class _Queued:
    copy: Copy
    until_us: Micros


class CopyQueue:
    """The copies that one owner has to make: at most `at_once` at a time, each once and in time."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._queue: dict[int, _Queued] = {}
        self._running: dict[int, _Queued] = {}
        self._results: dict[int, bool] = {}
        self._finished: dict[int, None] = {}
        """The latest ids that ended: a late answer to an earlier beat may name them again."""

    def take(self, asked_us: Micros, copies: Sequence[Copy]) -> None:
        """Queue the copies in the answer to a beat that was sent at `asked_us`."""
        for copy in copies:
            id = copy.held.id
            if id not in self._running and id not in self._finished and id not in self._results:
                self._queue.setdefault(id, _Queued(copy, asked_us + copy.left_us))

    def next(self, now_us: Micros) -> Copy | None:
        """Return the copy to start now, with the time left for it; None: none, or enough run.

        After that time its extent may be reused, so the owner must write no more bytes of it.
        Copies whose time ran out before they could start are skipped.
        """
        while self._queue and len(self._running) < self._at_once:
            id = next(iter(self._queue))
            queued = self._queue.pop(id)
            if queued.until_us > now_us:
                self._running[id] = queued
                return msgspec.structs.replace(queued.copy, left_us=queued.until_us - now_us)
        return None

    def end(self, id: int, done: bool) -> None:
        """A running copy ended; `done`: its bytes are there and verified."""
        if self._running.pop(id, None) is not None:
            self._results[id] = done

    def results(self) -> list[tuple[int, bool]]:
        """Return the results to report to the master, each (id, done)."""
        return list(self._results.items())

    def reported(self, ids: Sequence[int]) -> None:
        """The master has answered the report of these."""
        for id in ids:
            self._results.pop(id, None)
            self._finished[id] = None
        _keep_latest(self._finished)

    def forget(self) -> list[Copy]:
        """The master dropped the segment: all copies are void. Return the running ones, to stop."""
        running = [it.copy for it in self._running.values()]
        self.reported([*self._queue, *self._running, *self._results])
        self._queue.clear()
        self._running.clear()
        return running


@dataclass(slots=True)
class _Written:
    claim: Claim
    began_us: Micros
    at_us: Micros
    acknowledged: bool = False


class RecentWrites:
    """What one client put and removed lately. Bounded by its rate and by `forget`."""

    def __init__(self) -> None:
        self._puts: dict[int, _Written] = {}
        self._removed: dict[Key, tuple[int, Micros]] = {}

    def writing(
        self,
        now_us: Micros,
        ticket: Ticket,
        key: Key,
        size: Bytes,
        parent: Key | None,
        options: PutOptions,
    ) -> None:
        """A put, asked for at `now_us`, begins. Call this before the first byte is written."""
        held = Held(key, size, 0, ticket.id, ticket.id, ticket.offset, parent, options)
        claim = Claim(ticket.segment, ticket.epoch, held, True)
        self._puts[ticket.id] = _Written(claim, now_us, now_us)

    def ended(self, now_us: Micros, ticket: int, checksum: int) -> None:
        """All bytes are written.

        Call this before the put is ended at the master: the answer may be lost.
        """
        written = self._puts.get(ticket)
        if written is not None:
            claim = written.claim
            held = msgspec.structs.replace(claim.held, checksum=checksum)
            written.claim = Claim(claim.segment, claim.epoch, held, False)
            written.at_us = now_us

    def acknowledged(self, now_us: Micros, ticket: int) -> None:
        """The master answered that the object exists by this put."""
        written = self._puts.get(ticket)
        if written is not None:
            written.acknowledged = True
            written.at_us = now_us

    def drop(self, ticket: int) -> None:
        """The put was aborted, or the master answered that its ticket is stale."""
        self._puts.pop(ticket, None)

    def removed(self, now_us: Micros, key: Key, version: int) -> None:
        """The master removed this version for this client, or noted that it must not come back."""
        known, _ = self._removed.get(key, (version, now_us))
        self._removed[key] = (max(version, known), now_us)

    def held(self, ticket: int) -> Held | None:
        """Return what a put wrote. An owner adds it to its contents once the master confirms."""
        written = self._puts.get(ticket)
        return None if written is None else written.claim.held

    def claims(
        self, now_us: Micros, put_ttl_us: Micros
    ) -> tuple[list[Claim], list[tuple[Key, int]]]:
        """Return puts and removals to report to a master that may have restarted.

        The client repeats them until the master answers. All of them count as new again, because
        that master has not reported them to the owners yet. A put without an acknowledgement for a
        put's time to live is left out: the master gave it up, and its extent may be reused.
        """
        old_us = now_us - put_ttl_us
        claimed = [it for it in self._puts.values() if it.acknowledged or it.began_us > old_us]
        for written in claimed:
            written.at_us = now_us
        self._removed = {key: (version, now_us) for key, (version, _) in self._removed.items()}
        claims = [it.claim for it in claimed]
        return claims, [(key, version) for key, (version, _) in self._removed.items()]

    def forget(self, before_us: Micros) -> None:
        """Forget what is older: the owners have received it, or the master gave it up.

        Do not call it while the master is silent. Call it after a good answer, with the time that
        is a segment's and a put's time to live ago.
        """
        for id in [id for id, it in self._puts.items() if it.at_us < before_us]:
            del self._puts[id]
        for key in [key for key, (_, at_us) in self._removed.items() if at_us < before_us]:
            del self._removed[key]


def _keep_latest(names: dict[Any, Any]) -> None:
    """Forget the oldest names beyond _MAX_LATEST."""
    for name in list(islice(names, max(0, len(names) - _MAX_LATEST))):
        del names[name]


# The master's side


@dataclass(slots=True)
class _Loading:
    mount: Mount
    heard_us: Micros
    held: list[Change] = field(default_factory=list)
    pages: int = 0


class Recovery:
    """What owners report and clients claim, and how it becomes objects of the catalog.

    It runs when a master starts among segments that outlived the earlier one, and whenever a
    dropped segment comes back. Owners report their contents in pages. Clients claim what the owners
    may not have received.

    Conflicts have one rule: the later wins, which is the larger id. So of two overlapping extents,
    and of two versions of a key, the later is true; a removal voids all versions up to its own. A
    claim is void if the owner knows that its replica is gone, because the extent was reused since.
    Versions with equal bytes are replicas of one object.
    """

    def __init__(self, catalog: Catalog, until_us: Micros | None) -> None:
        self.running = until_us is not None
        """Whether the master does not know yet which objects exist."""
        self._catalog = catalog
        self._first_id = catalog.new_id()
        self._until_us = until_us
        self._loading: dict[SegmentId, _Loading] = {}
        self._mounted: list[tuple[SegmentLedger, Held]] = []
        """Replicas of mounted segments that are not objects of the catalog yet."""
        self._claims: dict[tuple[SegmentId, int], tuple[Micros, list[Claim]]] = {}
        """Segment and epoch -> the time of the first claim, and all claims."""
        self._removed: OrderedDict[Key, int] = OrderedDict()
        """Removed key -> version: no owner brings this version back."""

    def page(
        self, now_us: Micros, mount: Mount, held: Sequence[Change], page: int, last: bool
    ) -> list[Change] | None:
        """Take one page; return all of them after the last, and an empty list before that.

        None: the page is out of sequence, or of an older epoch.
        """
        loading = self._loading.get(mount.id)
        if page == 0:
            if loading is not None and loading.mount.epoch > mount.epoch:
                return None
            loading = self._loading[mount.id] = _Loading(mount, now_us)
        if loading is None or loading.mount != mount or loading.pages != page:
            return None
        loading.heard_us = now_us
        loading.held += held
        loading.pages += 1
        if not last:
            return []
        del self._loading[mount.id]
        return loading.held

    def mounted(self, ledger: SegmentLedger, changes: Sequence[Change]) -> None:
        """A segment is mounted with these replicas, and without those that are gone."""
        for change in changes:
            if isinstance(change, Gone):
                ledger.gone[change.key] = change.id
            else:
                self._mounted.append((ledger, change))

    def claim(self, now_us: Micros, claims: Sequence[Claim]) -> None:
        """Keep claims until their segments are mounted, or have not been mounted for long."""
        for claim in claims:
            _, kept = self._claims.setdefault((claim.segment, claim.epoch), (now_us, []))
            kept.append(claim)

    def claim_of_earlier(self, now_us: Micros, claims: Sequence[Claim]) -> None:
        """Keep those claims whose ids an earlier master gave out; this master knows its own."""
        self.claim(now_us, [it for it in claims if it.held.id < self._first_id])

    def removed(self, key: Key, version: int) -> None:
        """This version of a key and older ones must not come back."""
        self._removed[key] = max(version, self._removed.get(key, version))
        self._removed.move_to_end(key)
        if len(self._removed) > _MAX_REMOVED:
            self._removed.popitem(last=False)

    def reap(self, now_us: Micros) -> None:
        """Give up owners that stopped between two pages, and claims whose segments do not come."""
        silent_us = now_us - self._catalog.terms.segment_ttl_us
        for name in [it for it, load in self._loading.items() if load.heard_us <= silent_us]:
            del self._loading[name]
        old_us = now_us - _CLAIMS_KEPT_US
        for at in [it for it, (first_us, _) in self._claims.items() if first_us <= old_us]:
            del self._claims[at]

    def is_due(self, now_us: Micros) -> bool:
        """Whether the time to gather has just ended.

        The master waits for owners between two pages, for one segment's time to live more.
        """
        if not self.running or self._until_us is None or now_us < self._until_us:
            return False
        latest_us = self._until_us + self._catalog.terms.segment_ttl_us
        return not self._loading or now_us >= latest_us

    def restore(self) -> list[tuple[SegmentLedger, Held]]:
        """Make objects of the replicas on mounted segments, and of the claims on these segments.

        Returns the puts under way; their extents are taken. Owners receive what was not true as
        changes.
        """
        placed: list[tuple[SegmentLedger, Held]] = []
        latest: set[tuple[SegmentId, Key]] = set()
        puts: list[tuple[SegmentLedger, Held]] = []
        for ledger, held, writing in self._latest_first():
            at = (ledger.name, held.key)
            void = at in latest or self._removed.get(held.key, -1) >= held.version
            if void or not self._catalog.reserve(
                ledger, held.offset, held.size, held.options.tenant
            ):
                ledger.note_change(held.key, held.id)
            elif writing:
                puts.append((ledger, held))
            else:
                placed.append((ledger, held))
                latest.add(at)
        placed.sort(key=lambda it: (it[1].version, -it[1].id))
        for ledger, held in placed:
            self._place(ledger, held)
        return puts

    def _latest_first(self) -> list[tuple[SegmentLedger, Held, bool]]:
        """Return and forget all that mounted segments have, each with whether it is being put."""
        segments = self._catalog.segments
        found = [(it, held, False) for it, held in self._mounted if segments.get(it.name) is it]
        self._mounted = []
        for name, epoch in list(self._claims):
            ledger = segments.get(name)
            if ledger is not None and ledger.mount.epoch == epoch:
                _, claims = self._claims.pop((name, epoch))
                gone = ledger.gone
                true = [it for it in claims if it.held.id > gone.get(it.held.key, -1)]
                found += [(ledger, it.held, it.writing) for it in true]
        found.sort(key=lambda it: (it[1].id, not it[2]), reverse=True)
        return found

    def _place(self, ledger: SegmentLedger, held: Held) -> None:
        """Make a replica of an extent that is taken, or free it if it is out of date."""
        catalog = self._catalog
        stored = catalog.get(held.key)
        same = stored is not None and (stored.found.size, stored.found.checksum) == (
            held.size,
            held.checksum,
        )
        if stored is not None and not same and stored.found.version < held.version:
            catalog.remove(held.key)
            stored = None
        if stored is None:
            replica = Replica(ledger.name, held.offset)
            found = Found(held.key, held.size, held.checksum, held.version, (replica,))
            catalog.create(found, held.parent, held.options, ledger, held.id)
            catalog.enter(held.key)
        elif same and catalog.replica(held.key, ledger.name) is None:
            catalog.give(ledger, held.offset, held.size, held.options.tenant)
            catalog.reserve(ledger, held.offset, held.size, stored.options.tenant)
            catalog.add_replica(stored, ledger, held.offset, held.id)
        else:
            catalog.give(ledger, held.offset, held.size, held.options.tenant)
            ledger.note_change(held.key, held.id)
