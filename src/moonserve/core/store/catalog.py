"""Stock: the objects of the pool and the shelves they lie on. The ledger under core.store.master.

For core.store.placement, core.store.copies, core.store.recovery and core.store.master. Here are
the primitive changes, each of which keeps all ledgers in balance: extents, what is evictable, what
each tenant has, the events, and what owners are to hear. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from moonserve.core.kv.facts import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, merged
from moonserve.core.store.chains import Chains
from moonserve.core.store.extents import aligned
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.words import Found, Held, Key, Medium, PutOptions, Replica, Terms
from moonserve.core.units import BlockKey, Bytes, SegmentId


@dataclass(slots=True)
class Object:
    """One object that exists."""

    found: Found
    parent: Key | None
    options: PutOptions
    leases: int = 0
    holds: int = 0
    """Leases, a pin, and copies being made of it: while there are any, it is not evicted."""


class Stock:
    """Shelves, objects, tenants' bytes and events of one pool."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.shelves: dict[SegmentId, Shelf] = {}
        self.objects: dict[Key, Object] = {}
        self.tenants: dict[str, Bytes] = {}
        """Bytes in use: replicas and what is being written."""
        self.own = {tenant: Chains("lru") for tenant in terms.quotas}
        """What a tenant with a quota has, oldest first."""
        self._events: list[BlockEvent] = []

    def drain_events(self) -> list[BlockEvent]:
        """What appeared and disappeared since the last call, in order; runs of a kind as one."""
        events, self._events = self._events, []
        return merged(events)

    def inventory(self) -> list[BlockEvent]:
        """The events that told all that there is now, to whoever has heard none."""
        events: list[BlockEvent] = []
        for shelf in self.shelves.values():
            for key in shelf.objects:
                of = self.objects[key]
                if of.options.blocks:
                    events.append(self._stored(of, shelf))
        return merged(events)

    # Extents

    def take(self, shelf: Shelf, size: Bytes, tenant: str) -> Bytes | None:
        """An extent for something of `tenant`; None: no hole fits."""
        offset = shelf.extents.allocate(size)
        if offset is not None:
            self.tenants[tenant] = self.tenants.get(tenant, 0) + aligned(size)
        return offset

    def reserve(self, shelf: Shelf, offset: Bytes, size: Bytes, tenant: str) -> bool:
        """Exactly this extent. False: it is not free."""
        if not shelf.extents.reserve(offset, size):
            return False
        self.tenants[tenant] = self.tenants.get(tenant, 0) + aligned(size)
        return True

    def give(self, shelf: Shelf, offset: Bytes, size: Bytes, tenant: str) -> None:
        """Free an extent."""
        shelf.extents.free(offset)
        self._forget_bytes(size, tenant)

    def _forget_bytes(self, size: Bytes, tenant: str) -> None:
        self.tenants[tenant] -= aligned(size)
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    # Objects and replicas

    def create(
        self, found: Found, parent: Key | None, options: PutOptions, shelf: Shelf, id: int
    ) -> Object:
        """An object whose first replica is `found.replicas[0]`, in an extent taken before.

        It is in no order of eviction until used.
        """
        made = Object(found, parent, options, holds=int(options.pin))
        key = found.key
        self.objects[key] = made
        own = self.own.get(options.tenant)
        if own is not None and parent is not None:
            own.add(key, parent)
        self._appear(made, shelf, id)
        return made

    def add_replica(self, of: Object, shelf: Shelf, offset: Bytes, id: int) -> None:
        """Another replica, in an extent taken before; in memory before on disk."""
        found = of.found
        replicas = [*found.replicas, Replica(shelf.name, offset)]
        replicas.sort(key=lambda it: self.shelves[it.segment].tier == "disk")
        of.found = msgspec.structs.replace(found, replicas=tuple(replicas))
        self._appear(of, shelf, id)
        shelf.chains.enter(found.key)

    def _appear(self, of: Object, shelf: Shelf, id: int) -> None:
        key, parent = of.found.key, of.parent
        shelf.objects[key] = id
        if parent is not None:
            shelf.chains.add(key, parent)
        shelf.note(key, id)
        if not of.holds:
            shelf.evictable_bytes += aligned(of.found.size)
        if of.options.blocks:
            self._events.append(self._stored(of, shelf))

    def _stored(self, of: Object, shelf: Shelf) -> BlocksStored:
        keys = (BlockKey(of.found.key),)
        parent = None if of.parent is None else BlockKey(of.parent)
        return BlocksStored(shelf.name, keys, parent, shelf.tier, shelf.mount.epoch)

    def drop(self, of: Object, shelf: Shelf) -> None:
        """Remove the replica on `shelf`; the object goes with its last."""
        found = of.found
        offset = self._offset(of, shelf)
        self._disappear(of, shelf)
        self.give(shelf, offset, found.size, of.options.tenant)
        if of.options.blocks:
            self._events.append(
                BlocksRemoved(shelf.name, (BlockKey(found.key),), shelf.tier, shelf.mount.epoch)
            )

    def _disappear(self, of: Object, shelf: Shelf) -> None:
        key, parent = of.found.key, of.parent
        shelf.note(key, shelf.objects.pop(key))
        shelf.chains.remove(key, parent)
        if not of.holds:
            shelf.evictable_bytes -= aligned(of.found.size)
        if len(of.found.replicas) > 1:
            left = tuple(it for it in of.found.replicas if it.segment != shelf.name)
            of.found = msgspec.structs.replace(of.found, replicas=left)
            return
        del self.objects[key]
        own = self.own.get(of.options.tenant)
        if own is not None:
            own.remove(key, parent)

    def remove(self, of: Object) -> None:
        """Remove an object with all its replicas."""
        for replica in of.found.replicas:
            self.drop(of, self.shelves[replica.segment])

    def drop_shelf(self, shelf: Shelf) -> list[Object]:
        """Forget a shelf and its replicas; the objects that have others are returned."""
        left = []
        for key in list(shelf.objects):
            of = self.objects[key]
            self._disappear(of, shelf)
            self._forget_bytes(of.found.size, of.options.tenant)
            if self.objects.get(key) is of:
                left.append(of)
        self._events.append(BlocksCleared(shelf.name, shelf.tier, shelf.mount.epoch))
        del self.shelves[shelf.name]
        return left

    def held(self, shelf: Shelf, key: Key) -> Held:
        """What the owner of `shelf` is to know of a replica there."""
        of = self.objects[key]
        found = of.found
        id, offset = shelf.objects[key], self._offset(of, shelf)
        return Held(
            key, found.size, found.checksum, found.version, id, offset, of.parent, of.options
        )

    def _offset(self, of: Object, shelf: Shelf) -> Bytes:
        return next(it.offset for it in of.found.replicas if it.segment == shelf.name)

    def short(self) -> list[Key]:
        """The objects with fewer replicas than they want, or some that may share a node."""
        found = []
        for key, of in self.objects.items():
            if of.options.replicas > 1:
                nodes = {self.shelves[it.segment].node for it in of.found.replicas}
                if len(nodes) < of.options.replicas:
                    found.append(key)
        return found

    # What may be evicted, and in which order

    def hold(self, of: Object) -> None:
        """Keep an object from eviction once more."""
        of.holds += 1
        if of.holds == 1:
            for replica in of.found.replicas:
                self.shelves[replica.segment].evictable_bytes -= aligned(of.found.size)

    def unhold(self, of: Object) -> None:
        """End one hold. The caller sees to it that the object is in its orders, by use or enter."""
        of.holds -= 1
        if of.holds == 0:
            for replica in of.found.replicas:
                self.shelves[replica.segment].evictable_bytes += aligned(of.found.size)

    def pin(self, of: Object, pinned: bool) -> None:
        """Keep an object from eviction until it is unpinned."""
        if of.options.pin == pinned:
            return
        of.options = msgspec.structs.replace(of.options, pin=pinned)
        if pinned:
            self.hold(of)
        else:
            self.unhold(of)
            self.enter(of)
        for replica in of.found.replicas:
            shelf = self.shelves[replica.segment]
            shelf.note(of.found.key, shelf.objects[of.found.key])

    def use(self, objects: Iterable[Object]) -> None:
        """The objects of one request, first block first, are used now, on all their shelves."""
        by_segment: dict[SegmentId, list[Key]] = {}
        by_tenant: dict[str, list[Key]] = {}
        for of in objects:
            key = of.found.key
            for replica in of.found.replicas:
                by_segment.setdefault(replica.segment, []).append(key)
            if of.options.tenant in self.own:
                by_tenant.setdefault(of.options.tenant, []).append(key)
        for name, keys in by_segment.items():
            self.shelves[name].chains.use(keys)
        for tenant, keys in by_tenant.items():
            self.own[tenant].use(keys)

    def enter(self, of: Object) -> None:
        """See that an object is in its orders of eviction; no use of it."""
        for replica in of.found.replicas:
            self.shelves[replica.segment].chains.enter(of.found.key)
        if of.options.tenant in self.own:
            self.own[of.options.tenant].enter(of.found.key)

    def is_free(self, key: Key) -> bool:
        """Whether an object may be evicted."""
        of = self.objects.get(key)
        return of is not None and of.holds == 0

    def next_victim(self, shelf: Shelf) -> Object | None:
        """What is to be evicted next from a shelf, out of its order now; None: there is nothing."""
        objects, here = self.objects, shelf.objects
        key = shelf.chains.pop(lambda key: key in here and objects[key].holds == 0)
        return None if key is None else objects[key]

    def usable(self, tier: Medium) -> Sequence[Shelf]:
        """The shelves of a tier that take new replicas."""
        return [it for it in self.shelves.values() if it.tier == tier and not it.draining]
