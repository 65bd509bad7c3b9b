"""The store's master: which objects exist in the pool, where they are, and what keeps them there.

live.store.server calls it with a clock and carries its answers. It is pure and synchronous, and it
never touches a byte of an object: it knows only keys, extents and checksums.

What holds at every moment:
- An object exists once its put has ended: complete and readable. `drain_events` reports every new
  and every dropped replica, so a replay of the events gives the same answers as `find`.
- Objects never change. A key that is removed and put again is a new version. Ids of puts and copies
  never repeat, so a stale ticket names nothing. Two owners may put one key at the same time: each
  has its own extent, the first put to end makes the object, and the other extent is freed. Neither
  owner then depends on the other one's being alive.
- A leased or pinned object is not evicted. It goes only when its last segment goes, when all its
  replicas are found corrupt, or when it is removed.
- A released lease is dead: later calls under its name succeed and hold nothing. Such calls happen,
  because a client releases a lease without waiting for the calls it has cancelled.
- An extent may be reused while a reader with an expired lease, or a writer with an expired put or
  copy, still touches it. So readers verify the checksum after the copy: the reader sees a wrong
  checksum and discards the bytes.
- A master that restarts first gathers what segment owners and clients remember, and answers no
  question about objects until then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nsmallest
from itertools import compress, takewhile

from moonserve.core.errors import BadRequest, Recovering, UnknownSegment
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.store.catalog import Catalog, Leases, SegmentLedger
from moonserve.core.store.owners import Recovery
from moonserve.core.store.placement import Placement, Put, Puts
from moonserve.core.store.replicas import Copies, Repair, Tiers
from moonserve.core.store.words import (
    UNSEEN,
    Address,
    Change,
    Claim,
    Exists,
    Found,
    Full,
    Holder,
    Key,
    MasterStats,
    Mount,
    Orders,
    Outcome,
    OverQuota,
    PutOptions,
    Removal,
    Seen,
    SegmentStats,
    Terms,
    Ticket,
    TooLarge,
)
from moonserve.core.units import Bytes, LeaseId, Micros, SegmentId

_SILENT_US: Micros = 2_000_000
"""A new start of an owner may take over its segment after this time without a beat, or after half
of a segment's time to live if that is shorter. Owners beat several times meanwhile:
twice a second, or four times in a time to live if that is more often."""
_MAX_KNOWN = 4_096
"""The most names of segments that are remembered after they left."""


class Master:
    """Segments, objects, puts, copies and leases of one pool.

    Bounds: objects, puts and copies by the mounted bytes; leases by their time to live; names of
    dead leases by that and by their number; events by the driver, which drains them after every
    call. `first_id` must be larger than every id that an earlier master of this pool gave out; a
    start time in microseconds is. Until `recovering_until_us` the master gathers what segments
    hold, and calls that need to know the objects raise Recovering. None: the pool is new.
    """

    def __init__(
        self, terms: Terms, first_id: int, recovering_until_us: Micros | None = None
    ) -> None:
        self.terms = terms
        self._catalog = catalog = Catalog(terms, first_id)
        self._leases = Leases(catalog)
        self._placement = Placement(catalog)
        self._puts = Puts(catalog)
        self._copies = Copies(catalog, self._placement)
        self._repair = Repair(catalog, self._copies)
        self._tiers = Tiers(catalog, self._copies)
        self._recovery = Recovery(catalog, recovering_until_us)
        self._known: OrderedDict[SegmentId, None] = OrderedDict()
        """Names of segments that are mounted or were, the latest last."""

    # Segments and their owners

    def mount(
        self,
        now_us: Micros,
        mount: Mount,
        held: Sequence[Change] = (),
        page: int = 0,
        last: bool = True,
    ) -> bool:
        """Add a segment, empty or with its replicas, which its owner reports in pages from 0 on.

        The segment is mounted with its last page. The same mount again is a repeated message and
        succeeds. False: refused, because another start of the owner is mounted (`holder` says
        where), or because a page is missing: the owner has to start again.

        One owner has a name at a time. A new start takes the name when the old one has left or was
        silent too long (_SILENT_US). The old replicas are then dropped. So a
        restarted owner is back soon, and of two live owners the second is refused. An older epoch
        never takes over: it may be a late message.
        """
        old = self._catalog.segments.get(mount.id)
        if old is not None:
            if old.mount == mount:
                old.last_contact_us = now_us
                return True
            silent_us = min(_SILENT_US, self.terms.segment_ttl_us // 2)
            if mount.epoch < old.mount.epoch or now_us < old.last_contact_us + silent_us:
                return False
        self._drop_segment(mount.id)
        whole = self._recovery.page(now_us, mount, held, page, last)
        if whole is None or not last:
            return whole is not None
        ledger = self._catalog.mount(mount, now_us)
        self._known[mount.id] = None
        self._known.move_to_end(mount.id)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self._recovery.mounted(ledger, whole)
        if not self._recovery.running:
            self._restore(now_us)
        return True

    def unmount(self, segment: SegmentId, epoch: int) -> None:
        """Drop a segment and all its replicas; nothing happens if its epoch is another."""
        if self._ledger(segment, epoch) is not None:
            self._drop_segment(segment)

    def holder(self, segment: SegmentId) -> Holder | None:
        """Return the owner that has this name now, if any."""
        ledger = self._catalog.segments.get(segment)
        return None if ledger is None else Holder(ledger.mount.address, ledger.beats)

    def addresses(self) -> dict[SegmentId, Address]:
        """Return the addresses of the mounted segments."""
        return {name: ledger.mount.address for name, ledger in self._catalog.segments.items()}

    def keep_alive(self, now_us: Micros, segment: SegmentId, epoch: int) -> bool:
        """The owner is alive, though the answer to its beat is still held back.

        False: it is not mounted.
        """
        ledger = self._ledger(segment, epoch)
        if ledger is not None:
            ledger.last_contact_us = now_us
        return ledger is not None

    def beat(
        self, now_us: Micros, segment: SegmentId, epoch: int, seen: Seen = UNSEEN
    ) -> Orders | None:
        """The owner is alive and has received the changes up to `seen`.

        Returns further changes and the copies to make. None: the owner has to mount this epoch.
        """
        ledger = self._ledger(segment, epoch)
        if ledger is None:
            return None
        ledger.last_contact_us = now_us
        ledger.beats += 1
        changes, now_seen, more = ledger.changes_after(
            seen, lambda key: self._catalog.held(segment, key)
        )
        return Orders(seen, changes, now_seen, more, self._copies.orders(now_us, segment))

    def copied(
        self, now_us: Micros, segment: SegmentId, epoch: int, results: Sequence[tuple[int, bool]]
    ) -> list[bool]:
        """End copies to a segment, each (id, whether the bytes are there and verified).

        Returns per copy whether it is a replica now. If not, its extent may be reused already. The
        owner may repeat the call if it did not receive the answer.
        """
        if self._ledger(segment, epoch) is None:
            return [False] * len(results)
        made = [self._end_copy(now_us, segment, id, done) for id, done in results]
        self._repair.plan(now_us)
        return made

    def drain_new_targets(self) -> list[SegmentId]:
        """Return the segments to which a copy was started since the last call."""
        return self._copies.drain_new_targets()

    def drain(self, now_us: Micros, segment: SegmentId, drains: bool = True) -> bool:
        """Place nothing more on a segment, and move its replicas away. False: it is unknown.

        When its stats say that it is empty, it may be unmounted. drains False: it is used again;
        copies that are under way still move what they move.
        """
        self._check_recovered(now_us)
        ledger = self._catalog.segments.get(segment)
        if ledger is None:
            return False
        ledger.draining = drains
        self._repair.look_at(ledger.keys())
        self._repair.plan(now_us)
        return True

    def claim(
        self, now_us: Micros, claims: Sequence[Claim], removed: Sequence[tuple[Key, int]]
    ) -> None:
        """Take in what a client did under an earlier master: puts, and removals (key, version)."""
        for key, version in removed:
            self._recovery.removed(key, version)
            now = self._catalog.version(key)
            if now is not None and now <= version:
                self._catalog.remove(key)
        self._recovery.claim_of_earlier(now_us, claims)
        if not self._recovery.running:
            self._restore(now_us)

    # Puts

    def put_start(
        self,
        now_us: Micros,
        owner: SegmentId | None,
        items: Sequence[tuple[Key, Bytes]],
        lease: LeaseId | None,
        parent: Key | None = None,
        options: PutOptions = PutOptions(),  # noqa: B008 - frozen
    ) -> list[Outcome]:
        """Start one put per (key, size > 0). Objects that exist are leased, unless `lease` is dead.

        A put goes onto the preferred segment, by default the owner's own, or where
        Placement.place finds room. Blocks are a piece of a chain: `parent` is the key before the
        first, None if the first heads its chain. UnknownSegment: the owner is not mounted.
        BadRequest: the preferred segment was never mounted. For blocks it is ignored instead,
        because a hint about blocks may be old.
        """
        self._check_recovered(now_us)
        segments = self._catalog.segments
        if owner is not None and owner not in segments:
            raise UnknownSegment(f"segment {owner!r} starts a put, but it is not mounted")
        if options.preferred is not None and not options.blocks:
            self._check_known(options.preferred)
        own = None if owner is None else segments[owner]
        first = own if options.preferred is None else segments.get(options.preferred, own)
        outcomes: list[Outcome] = []
        deadline_us = now_us + self.terms.put_ttl_us
        objects = self._catalog.objects
        quota = self.terms.quotas.get(options.tenant)
        for key, size in items:
            if key in objects:
                self._use(now_us, (key,), lease)
                outcomes.append(Exists())
            elif quota is not None and not self._placement.fits_quota(
                options.tenant, size * options.replicas
            ):
                outcomes.append(OverQuota(options.tenant, quota))
            elif (place := self._placement.place(first, size, options.tenant)) is None:
                largest = self._placement.largest(first)
                outcomes.append(TooLarge(largest) if size > largest else Full())
            else:
                ledger, offset = place
                id = self._catalog.new_id()
                put = Put(key, parent, size, owner, ledger, offset, deadline_us, options)
                self._puts.add(id, put)
                outcomes.append(Ticket(id, ledger.name, offset, ledger.mount.epoch))
            parent = key if options.blocks else None
        if first is not None:
            self._tiers.lower(now_us, first, evict=False)
        return outcomes

    def put_end(
        self, now_us: Micros, ends: Sequence[tuple[int, int]], lease: LeaseId | None
    ) -> list[int | None]:
        """End puts, each (ticket id, checksum of the written bytes).

        Returns per put the version of the object that exists now: the ticket's id, or the id of
        another put of this key that ended first. None: the ticket is stale and its extent is lost.
        The objects are leased, unless `lease` is dead.
        """
        self._check_recovered(now_us)
        ended = [self._puts.end(ticket, checksum) for ticket, checksum in ends]
        exist = [key for key in ended if key is not None]
        self._use(now_us, exist, lease)
        catalog = self._catalog
        self._repair.look_at(
            key
            for key in exist
            if (wanted := catalog.objects[key].options.replicas) > 1
            and wanted > len(catalog.runs_of(key))
        )
        versions = [None if key is None else catalog.version(key) for key in ended]
        self._repair.plan(now_us)
        return versions

    def put_abort(self, tickets: Sequence[int]) -> None:
        """Abort puts; stale tickets are no error."""
        self._puts.abort(tickets)

    # Reads

    def find(
        self,
        now_us: Micros,
        keys: Sequence[Key],
        lease: LeaseId,
        reader: SegmentId | None = None,
    ) -> list[Found]:
        """Return the leading run of `keys` that exist. Each is leased; the lease starts anew.

        Under a dead lease the answer is the same, but nothing is held: the objects may be gone, or
        their extents reused, before the client reads them. Readers verify the checksum anyway.
        Objects that are only on disk are promoted to the segment `reader`, if it has room.
        """
        self._check_recovered(now_us)
        there = list(takewhile(self._catalog.objects.__contains__, keys))
        self._use(now_us, there, lease, reader)
        return self._catalog.found(there)

    def get(
        self,
        now_us: Micros,
        keys: Sequence[Key],
        lease: LeaseId,
        reader: SegmentId | None = None,
    ) -> list[Found | None]:
        """Do the same as `find`, but do not stop at a missing key."""
        self._check_recovered(now_us)
        there = [key for key in keys if key in self._catalog.objects]
        self._use(now_us, there, lease, reader)
        found = dict(zip(there, self._catalog.found(there), strict=True))
        return [found.get(key) for key in keys]

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return whether each key names an object. This does not count as a use."""
        self._check_recovered()
        return [key in self._catalog.objects for key in keys]

    def locate(self, key: Key) -> Found | None:
        """Return an object. This does not count as a use."""
        self._check_recovered()
        existing = self._catalog.get(key)
        return None if existing is None else existing.found

    def scan(self, prefix: Key, after: Key | None, limit: int) -> list[Found]:
        """Return the first objects, by key, that start with `prefix` and come after `after`.

        It looks at every key of the pool: it is for operators, not for requests.
        """
        self._check_recovered()
        objects = self._catalog.objects
        keys = (it for it in objects if it.startswith(prefix) and (after is None or it > after))
        return self._catalog.found(nsmallest(limit, keys))

    def release(self, lease: LeaseId) -> None:
        """End a lease; an unknown one is no error. The name is dead for a lease's time to live.

        Its objects count as used now, the last key first. So a chain is evicted from its tail, and
        what is left of it stays a usable prefix.
        """
        self._leases.release(lease)

    def copy(
        self, now_us: Micros, keys: Sequence[Key], to: SegmentId, source: SegmentId | None
    ) -> int:
        """Make replicas on `to` in the background; see Repair.ask."""
        self._check_recovered(now_us)
        return self._repair.ask(now_us, keys, to, source)

    # Removal

    def remove(self, now_us: Micros, keys: Sequence[Key], force: bool = False) -> list[Removal]:
        """Remove objects, pinned ones too; leased ones only with `force`.

        A missing object may be on a segment that is away: it will not come back with that segment.
        """
        self._check_recovered(now_us)
        removals = []
        putting = self._puts.oldest()  # these puts may still end after the removal
        for key in keys:
            now = self._catalog.version(key)
            if now is None:
                version = putting.get(key, self._catalog.next_id) - 1
                self._recovery.removed(key, version)
                removals.append(Removal("missing", version))
            elif (hold := self._catalog.holds.get(key)) and hold.leases and not force:
                removals.append(Removal("leased"))
            else:
                self._catalog.remove(key)
                self._recovery.removed(key, now)
                removals.append(Removal("removed", now))
        return removals

    def discard(self, key: Key, version: int, segment: SegmentId | None = None) -> None:
        """Drop the replica on `segment` that a reader found corrupt (None: all replicas).

        With its last replica the object is gone. A newer version is left alone.
        """
        if self._catalog.version(key) != version:
            return
        for run in self._catalog.runs_of(key):
            if segment is None or run.segment == segment:
                self._catalog.drop(key, run.segment)
                self._repair.look_at((key,))

    def pin(self, keys: Sequence[Key], pinned: bool) -> list[bool]:
        """Pin objects against eviction, or unpin them; return whether each exists."""
        self._check_recovered()
        found = [key in self._catalog.objects for key in keys]
        for key in compress(keys, found):
            self._catalog.pin(key, pinned)
        return found

    def evict(self, now_us: Micros, segment: SegmentId, size: Bytes) -> tuple[Bytes, bool]:
        """Free `size` bytes of a segment, by copies to a disk of its node if there is one.

        Returns the bytes that are free now or will be after the copies, and whether copies are
        under way. If the bytes are too few and copies are under way, ask again later for the rest.
        """
        self._check_recovered(now_us)
        ledger = self._catalog.segments.get(segment)
        if ledger is None:
            return 0, False
        before = ledger.extents.used_bytes - ledger.leaving_bytes
        self._tiers.shrink(now_us, ledger, before - size, evict=True)
        after = ledger.extents.used_bytes - ledger.leaving_bytes
        return before - after, ledger.leaving_bytes > 0

    # Time and ledgers

    def reap(self, now_us: Micros) -> list[SegmentId]:
        """Do what is due at this time; return the silent segments that were dropped.

        Overdue puts and copies and expired leases end; a full segment is brought down to its low
        water mark; missing replicas are copied. An expired lease is not dead: its holder may be
        slow, and may use it again.
        """
        lost = self._drop_silent(now_us)
        for ledger in self._catalog.segments.values():
            if ledger.draining:  # puts and copies to it may have ended since
                self._repair.look_at(ledger.keys())
        self._recovery.reap(now_us)
        for task in self._copies.overdue(now_us):
            self._end_copy(now_us, task.target.segment, task.id, False)
        self._end_recovery_if_due(now_us)
        self._puts.abort_overdue(now_us)
        self._leases.reap(now_us)
        for ledger in list(self._catalog.segments.values()):
            self._tiers.lower(now_us, ledger, evict=True)
        self._repair.plan(now_us)
        return lost

    def drain_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order; runs of one kind are merged."""
        return self._catalog.drain_events()

    def inventory(self) -> list[BlockEvent]:
        """Return events that describe every block replica now, for a new follower of the events.

        Raises Recovering.
        """
        self._check_recovered()
        return self._catalog.inventory()

    def stats(self) -> MasterStats:
        """Return the ledgers as they are now."""
        return MasterStats(
            segments=tuple(
                SegmentStats(
                    id=name,
                    epoch=ledger.mount.epoch,
                    address=ledger.mount.address,
                    node=ledger.node,
                    tier=ledger.tier,
                    capacity_bytes=ledger.extents.capacity_bytes,
                    used_bytes=ledger.extents.used_bytes,
                    evictable_bytes=ledger.evictable_bytes,
                    objects=ledger.replicas,
                    draining=ledger.draining,
                )
                for name, ledger in self._catalog.segments.items()
            ),
            objects=len(self._catalog.objects),
            leases=len(self._leases),
            pending_puts=len(self._puts),
            pending_copies=len(self._copies),
            waiting=len(self._repair),
            tenants=dict(self._catalog.tenant_bytes),
            evicted=self._catalog.evicted,
            demoted=self._catalog.demoted,
            promoted=self._catalog.promoted,
            recovering=self._recovery.running,
        )

    # Inside

    def _ledger(self, segment: SegmentId, epoch: int) -> SegmentLedger | None:
        ledger = self._catalog.segments.get(segment)
        return ledger if ledger is not None and ledger.mount.epoch == epoch else None

    def _check_known(self, segment: SegmentId) -> None:
        """Raise BadRequest if no segment of this name was mounted since the master started."""
        if segment not in self._known:
            mounted = ", ".join(self._catalog.segments) or "none"
            raise BadRequest(
                f"preferred: there is no segment {segment!r}; mounted segments: {mounted}",
                "preferred",
            )

    def _use(
        self,
        now_us: Micros,
        keys: Sequence[Key],
        lease: LeaseId | None,
        reader: SegmentId | None = None,
    ) -> None:
        """Hold objects under `lease`, or only mark them as used now; promote them to `reader`."""
        if not keys:
            return
        self._leases.use(now_us, keys, lease)
        near = None if reader is None else self._catalog.segments.get(reader)
        if near is not None:
            for key in keys:
                self._tiers.promote(now_us, key, near)

    def _end_copy(self, now_us: Micros, segment: SegmentId, id: int, done: bool) -> bool:
        """End one copy; return whether it is a replica now."""
        ended = self._copies.end(segment, id, done)
        if ended is None:
            return self._copies.was_made(segment, id)
        task, made = ended
        if made:
            self._tiers.copied(task)
        elif task.why in ("repair", "drain"):
            self._repair.failed(now_us, task.stored.found.key, segment)
        return made

    def _drop_silent(self, now_us: Micros) -> list[SegmentId]:
        """Drop the segments whose owners have been silent for a segment's time to live.

        The changes that an owner has not received are claimed for it, in case it comes back.
        """
        silent_us = now_us - self.terms.segment_ttl_us
        segments = self._catalog.segments
        lost = [name for name, it in segments.items() if it.last_contact_us <= silent_us]
        for name in lost:
            ledger = segments[name]
            unreported = [self._catalog.held(name, key) for key in ledger.unreported()]
            self._drop_segment(name)
            epoch = ledger.mount.epoch
            claims = [Claim(name, epoch, it, False) for it in unreported if it is not None]
            self._recovery.claim(now_us, claims)
        return lost

    def _drop_segment(self, name: SegmentId) -> None:
        """Drop a segment, its replicas, every put and copy onto it and every put by its owner."""
        ledger = self._catalog.segments.get(name)
        if ledger is None:
            return
        self._puts.abort_of(name)
        self._copies.drop_target(ledger)
        self._repair.look_at(self._catalog.drop_segment(ledger))

    def _check_recovered(self, now_us: Micros | None = None) -> None:
        """Raise Recovering if the master does not know yet which objects exist."""
        if self._recovery.running:
            if now_us is not None:
                self._end_recovery_if_due(now_us)
            if self._recovery.running:
                raise Recovering(
                    "the store's master has just started; it still gathers what the segments hold"
                )

    def _end_recovery_if_due(self, now_us: Micros) -> None:
        if self._recovery.is_due(now_us):
            self._recovery.running = False
            self._restore(now_us)

    def _restore(self, now_us: Micros) -> None:
        """Make objects and puts from what owners reported and clients claimed."""
        for ledger, held in self._recovery.restore():
            self._puts.add_claimed(ledger, held, now_us + self.terms.put_ttl_us)
        self._repair.look_at(self._catalog.short())
