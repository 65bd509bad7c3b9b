"""The store's machine: what exists in the pool, where, and who keeps it there.

For live.store.server, which feeds it calls with a clock. Pure and synchronous; it never sees a
byte of any object, only keys, extents and checksums.

What holds at every moment:
- An object exists once its put has ended: complete and readable. `drain_events` tells every
  appearance and disappearance of a replica, so a replay of the events is what `find` would say.
- Objects never change; a key removed and put anew is another version. Ids of puts and copies never
  repeat, so a stale ticket names nothing. Two owners may put one key at the same time; each has an
  extent of its own, the first to end wins and the other's is freed. (Keys name contents; neither
  owner then depends on the other's being alive.)
- What is leased or pinned is not evicted. It goes only with its last segment, when all of it is
  found corrupt, or when it is removed.
- A released lease is dead: calls under its name that come late go on, and hold nothing. They may
  come after the release, since whoever releases does not wait for who was told to stop.
- An extent may be reused while a reader whose lease ran out, or a writer whose put or copy ran out,
  still touches it. Hence readers verify the checksum after the copy: such an object is lost, never
  wrong.
- A master that restarts asks the owners of segments first, and answers nothing until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from moonserve.core.errors import UnknownSegment
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.store.catalog import Object, Stock
from moonserve.core.store.copies import Copies
from moonserve.core.store.leases import Leases
from moonserve.core.store.owners import Roster
from moonserve.core.store.placement import Room
from moonserve.core.store.puts import Put, Puts
from moonserve.core.store.repair import Repair
from moonserve.core.store.tiers import Tiers
from moonserve.core.store.words import (
    Exists,
    Found,
    Full,
    Key,
    MasterStats,
    Outcome,
    OverQuota,
    PutOptions,
    Removal,
    SegmentStats,
    Terms,
    Ticket,
    TooLarge,
)
from moonserve.core.units import Bytes, LeaseId, Micros, SegmentId


class Master:
    """Segments, objects, puts, copies and leases of one pool.

    Bounds: objects, pending puts and copies by the mounted bytes, leases by their time to live,
    names of dead leases by that and by their number, events by the driver, which drains them after
    every call. `first_id` must be larger than every id an earlier master of this pool gave out (a
    start time in microseconds will do). Until `recovering_until_us` (None: the pool is fresh) it
    gathers what segments hold; what needs to know what exists raises Recovering meanwhile.
    """

    def __init__(
        self, terms: Terms, first_id: int, recovering_until_us: Micros | None = None
    ) -> None:
        self.terms = terms
        self._next_id = first_id
        self._stock = stock = Stock(terms)
        self._room = Room(stock)
        self._puts = Puts(stock)
        self._copies = Copies(stock, self._room)
        self._repair = Repair(stock, self._copies, self._new_id)
        self._tiers = Tiers(stock, self._room, self._copies, self._new_id)
        self._leases = Leases(terms.lease_ttl_us)
        self._roster = roster = Roster(
            stock,
            self._puts,
            self._copies,
            self._repair,
            self._tiers,
            self._new_id,
            recovering_until_us,
        )
        # The owners' side is the roster's; see there.
        self.mount, self.unmount, self.drain = roster.mount, roster.unmount, roster.drain
        self.beat, self.hear, self.copied = roster.beat, roster.hear, roster.copied
        self.claim, self.addresses, self.holder = roster.claim, roster.addresses, roster.holder
        self.drain_called = self._copies.drain_called

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
        """Start one put per (key, size > 0), onto the preferred segment where there is room.

        That is the owner's own unless the options say otherwise. Blocks are a piece of a chain;
        `parent` comes before it, None where it heads the chain. Else onto the segment with most
        free bytes, else in place of what the first one evicts, else of what another does. Objects
        that exist are leased, unless the lease is dead. UnknownSegment: the owner is not mounted.
        BadRequest: the segment that should have them never was, and they are no blocks, whose
        hints may be old.
        """
        self._roster.serve(now_us)
        shelves = self._stock.shelves
        if owner is not None and owner not in shelves:
            raise UnknownSegment(f"put by {owner!r}, which is not mounted")
        if options.preferred is not None and not options.blocks:
            self._roster.check_known(options.preferred)
        own = None if owner is None else shelves[owner]
        first = own if options.preferred is None else shelves.get(options.preferred, own)
        outcomes: list[Outcome] = []
        deadline_us = now_us + self.terms.put_ttl_us
        objects = self._stock.objects
        quota = self.terms.quotas.get(options.tenant)
        for key, size in items:
            existing = objects.get(key)
            if existing is not None:
                self._use(now_us, (existing,), lease)
                outcomes.append(Exists())
            elif quota is not None and not self._room.fits_quota(
                options.tenant, size * options.replicas
            ):
                outcomes.append(OverQuota(options.tenant, quota))
            elif (place := self._room.place(first, size, options.tenant)) is None:
                largest = self._room.largest(first)
                outcomes.append(TooLarge(largest) if size > largest else Full())
            else:
                shelf, offset = place
                id = self._new_id()
                put = Put(key, parent, size, owner, shelf, offset, deadline_us, options)
                self._puts.add(id, put)
                outcomes.append(Ticket(id, shelf.name, offset, shelf.mount.epoch))
            parent = key if options.blocks else None
        if first is not None:
            self._tiers.lower(now_us, first, evict=False)
        return outcomes

    def put_end(
        self, now_us: Micros, ends: Sequence[tuple[int, int]], lease: LeaseId | None
    ) -> list[int | None]:
        """End puts, each (ticket id, checksum of the bytes written).

        The version of the object that exists now, and is leased unless the lease is dead: the
        ticket's id, or another's whose put of the same key ended first. None: the ticket is stale,
        its extent was lost.
        """
        self._roster.serve(now_us)
        ended = [self._puts.end(ticket, checksum) for ticket, checksum in ends]
        exist = [of for of in ended if of is not None]
        self._use(now_us, exist, lease)
        self._repair.look_at(
            of.found.key for of in exist if of.options.replicas > len(of.found.replicas)
        )
        self._repair.plan(now_us)
        return [None if of is None else of.found.version for of in ended]

    def put_abort(self, tickets: Sequence[int]) -> None:
        """Give up puts; stale tickets are no error."""
        self._puts.abort(tickets)

    # Reads

    def find(
        self,
        now_us: Micros,
        keys: Sequence[Key],
        lease: LeaseId,
        reader: SegmentId | None = None,
    ) -> list[Found]:
        """The leading run of `keys` that exist, each leased; the whole lease lasts anew.

        Under a dead lease they are told all the same, but not held: they may be gone, or another's
        bytes, before they are read. Readers verify the checksum anyway. What lies on disk only is
        promoted to the segment `reader`, if that has room.
        """
        self._roster.serve(now_us)
        run: list[Object] = []
        for key in keys:
            existing = self._stock.objects.get(key)
            if existing is None:
                break
            run.append(existing)
        self._use(now_us, run, lease, reader)
        return [it.found for it in run]

    def get(
        self,
        now_us: Micros,
        keys: Sequence[Key],
        lease: LeaseId,
        reader: SegmentId | None = None,
    ) -> list[Found | None]:
        """What each key names, as `find` does it but without stopping at a missing one."""
        self._roster.serve(now_us)
        there = [self._stock.objects.get(key) for key in keys]
        self._use(now_us, [it for it in there if it is not None], lease, reader)
        return [None if it is None else it.found for it in there]

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key names an object; no use of it."""
        self._roster.serve(None)
        return [key in self._stock.objects for key in keys]

    def locate(self, key: Key) -> Found | None:
        """Look an object up without using it."""
        self._roster.serve(None)
        existing = self._stock.objects.get(key)
        return None if existing is None else existing.found

    def scan(self, prefix: Key, after: Key | None, limit: int) -> list[Found]:
        """The first objects, in the order of keys, that start with `prefix` and come after `after`.

        It looks at every key of the pool: for people, not for requests.
        """
        self._roster.serve(None)
        objects = self._stock.objects
        keys = (it for it in objects if it.startswith(prefix) and (after is None or it > after))
        return [objects[key].found for key in nsmallest(limit, keys)]

    def release(self, lease: LeaseId) -> None:
        """End a lease; an unknown one is no error. The name is dead for a lease's time to live.

        What it held counts as used now, its last key first: a chain is then evicted from its tail,
        and what is left of it stays a usable prefix.
        """
        self._let_go(self._leases.release(lease))

    def copy(
        self, now_us: Micros, keys: Sequence[Key], to: SegmentId, source: SegmentId | None
    ) -> int:
        """Make replicas of these on `to`, in the background; see Repair.ask."""
        self._roster.serve(now_us)
        return self._repair.ask(now_us, keys, to, source)

    # Taking away

    def remove(self, now_us: Micros, keys: Sequence[Key], force: bool = False) -> list[Removal]:
        """Remove objects, pinned ones too; leased ones only with `force`.

        What is missing may lie on a segment that is away: it does not come back with it.
        """
        self._roster.serve(now_us)
        removals = []
        putting = self._puts.oldest()  # these may still end, after the removal
        for key in keys:
            of = self._stock.objects.get(key)
            if of is None:
                version = putting.get(key, self._next_id) - 1
                self._roster.note_removal(key, version)
                removals.append(Removal("missing", version))
            elif of.leases and not force:
                removals.append(Removal("leased"))
            else:
                self._stock.remove(of)
                self._roster.note_removal(key, of.found.version)
                removals.append(Removal("removed", of.found.version))
        return removals

    def discard(self, key: Key, version: int, segment: SegmentId | None = None) -> None:
        """Drop the replica whose bytes a reader found corrupt (None: all); the object goes with its
        last. A newer version is left alone."""
        of = self._stock.objects.get(key)
        if of is None or of.found.version != version:
            return
        for replica in of.found.replicas:
            if segment is None or replica.segment == segment:
                self._stock.drop(of, self._stock.shelves[replica.segment])
                self._repair.look_at((key,))

    def pin(self, keys: Sequence[Key], pinned: bool) -> list[bool]:
        """Keep objects from eviction, or no longer; whether each exists."""
        self._roster.serve(None)
        found = [self._stock.objects.get(key) for key in keys]
        for of in found:
            if of is not None:
                self._stock.pin(of, pinned)
        return [of is not None for of in found]

    def evict(self, now_us: Micros, segment: SegmentId, size: Bytes) -> tuple[Bytes, bool]:
        """Let go of `size` bytes of a segment: to a disk of its node, where there is one.

        How many are free now or will be when their copies are made, and whether any are on their
        way: where these are too few, ask again for the rest when the disk is less busy.
        """
        self._roster.serve(now_us)
        shelf = self._stock.shelves.get(segment)
        if shelf is None:
            return 0, False
        before = shelf.extents.used_bytes - shelf.leaving_bytes
        self._tiers.shrink(now_us, shelf, before - size, evict=True)
        after = shelf.extents.used_bytes - shelf.leaving_bytes
        return before - after, shelf.leaving_bytes > 0

    # Time and ledgers

    def reap(self, now_us: Micros) -> list[SegmentId]:
        """Take back what ran out: segments not heard of (returned), overdue puts and copies, old
        leases. Make room where a segment is too full, and copies where replicas lack.

        A lease that ran out is not dead: its holder may be slow, and use it again.
        """
        lost = self._roster.reap(now_us)
        self._puts.abort_overdue(now_us)
        for held in self._leases.reap(now_us):
            self._let_go(held)
        for shelf in list(self._stock.shelves.values()):
            self._tiers.lower(now_us, shelf, evict=True)
        self._repair.plan(now_us)
        return lost

    def drain_events(self) -> list[BlockEvent]:
        """What appeared and disappeared since the last call, in order; runs of a kind as one."""
        return self._stock.drain_events()

    def inventory(self) -> list[BlockEvent]:
        """What is told, as events, to a listener that has heard none. Raises Recovering."""
        self._roster.serve(None)
        return self._stock.inventory()

    def stats(self) -> MasterStats:
        """The ledgers now."""
        return MasterStats(
            segments=tuple(
                SegmentStats(
                    id=name,
                    epoch=shelf.mount.epoch,
                    address=shelf.mount.address,
                    node=shelf.node,
                    tier=shelf.tier,
                    capacity_bytes=shelf.extents.capacity_bytes,
                    used_bytes=shelf.extents.used_bytes,
                    evictable_bytes=shelf.evictable_bytes,
                    objects=len(shelf.objects),
                    draining=shelf.draining,
                )
                for name, shelf in self._stock.shelves.items()
            ),
            objects=len(self._stock.objects),
            leases=len(self._leases),
            pending_puts=len(self._puts),
            pending_copies=len(self._copies),
            waiting=len(self._repair),
            tenants=dict(self._stock.tenants),
            evicted=self._room.evicted,
            demoted=self._tiers.demoted,
            promoted=self._tiers.promoted,
            recovering=self._roster.recovering,
        )

    # Inside

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _use(
        self,
        now_us: Micros,
        objects: Sequence[Object],
        lease: LeaseId | None,
        reader: SegmentId | None = None,
    ) -> None:
        """Keep objects under `lease`, or only mark them as used now; promote them to `reader`."""
        if not objects:
            return
        stock = self._stock
        held = None if lease is None else self._leases.take(now_us, lease)
        if held is None:
            stock.use(objects)
        else:
            for of in objects:
                key = of.found.key
                if held.get(key) is not of:
                    held[key] = of
                    of.leases += 1
                    stock.hold(of)
        near = None if reader is None else stock.shelves.get(reader)
        if near is not None:
            for of in objects:
                self._tiers.promote(now_us, of, near)

    def _let_go(self, held: dict[Key, Object]) -> None:
        """End a lease of these; those that still exist are used now."""
        objects = self._stock.objects
        let_go = [of for key, of in held.items() if objects.get(key) is of]
        for of in let_go:
            of.leases -= 1
            self._stock.unhold(of)
        self._stock.use(let_go)
