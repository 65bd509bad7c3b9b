"""The pool's vocabulary: what the store's master, segment owners, clients and transfer tell.

Frozen structs and nothing else; they travel as msgpack on the control plane.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from moonserve.core.units import Bytes, Micros, SegmentId

Key: TypeAlias = bytes
"""Names an object: 1..256 bytes; that of a KV block is its BlockKey."""
Medium: TypeAlias = Literal["dram", "disk"]
"""What a segment is made of: G2 or G3 of KV events."""


class Card(msgspec.Struct, frozen=True):
    """One network address of an owner's host."""

    host: str
    rail: str = ""
    """Cards of one rail reach each other faster than those of two; empty: not said."""


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a segment's bytes are served: a TCP listener, and a shared-memory region beside it.

    `identity` is drawn at random by the owner; whoever reaches the memory by either way checks it
    there, so that a reused port or file name is never taken for the segment.
    """

    host: str
    port: int
    region: str
    """File name of the shared-memory region, useful on the owner's host only."""
    identity: bytes
    cards: tuple[Card, ...] = ()
    """All that the port is listened on at, `host` included; empty: `host` alone."""
    location: str = ""
    """`node:segment`, as its owner names it."""
    rack: str = ""
    mooncake: Address | None = None
    """Where Mooncake's engine serves the same bytes: its handshake, and as `region` the memory."""


class Mount(msgspec.Struct, frozen=True):
    """A segment as its owner offers it to the pool; fixed for one epoch of the owner."""

    id: SegmentId
    epoch: int
    """Grows at every start of the owner: an older one is a late message."""
    capacity_bytes: Bytes
    address: Address
    node: str = ""
    """What fails together: replicas of one object avoid a common node. Empty: `id`."""
    tier: Medium = "dram"
    rack: str = ""
    """Nodes of one rack reach each other faster; empty: not said."""


class Holder(msgspec.Struct, frozen=True):
    """The start of a segment that is mounted, as another start of it is told."""

    address: Address
    beats: int
    """How many were heard of it: while they grow, it lives."""


class Terms(msgspec.Struct, frozen=True):
    """How the master keeps the pool: what it waits for, what it evicts, who may have how much."""

    lease_ttl_us: Micros = 120_000_000
    """For holders that crashed: every other lease is released. Longer than a decode may queue."""
    put_ttl_us: Micros = 20_000_000
    """A put or a copy that lasts longer is given up; its extent is used again."""
    segment_ttl_us: Micros = 10_000_000
    """A segment not heard of for so long is dropped."""
    eviction: str = "lru"
    """One of core.store.evict.EVICTIONS, for every segment."""
    high: float = 0.95
    """The share of a segment in use above which `reap` makes room ahead of need."""
    low: float = 0.90
    """The share in use that it then stops at."""
    quotas: dict[str, Bytes] = {}
    """The most bytes, all replicas counted, that a tenant may have; others have no bound."""


class PutOptions(msgspec.Struct, frozen=True):
    """What holds for every object of one put."""

    replicas: int = 1
    """Copies wanted, the primary one included; the others are made after the put has ended."""
    preferred: SegmentId | None = None
    """Where the primary should lie, if there is room and that segment has not left meanwhile; None:
    on the owner's own segment."""
    tenant: str = ""
    pin: bool = False
    """Never evicted, until unpinned."""
    blocks: bool = True
    """The keys are BlockKeys along one chain, told of by KV events; False: any bytes."""


class Replica(msgspec.Struct, frozen=True):
    """Where one copy of an object lies."""

    segment: SegmentId
    offset: Bytes


class Found(msgspec.Struct, frozen=True):
    """One object that exists: complete, readable, leased to the finder."""

    key: Key
    size: Bytes
    checksum: int
    """XXH3-64 of its bytes."""
    version: int
    """The id of the put that made it; never used again, also by a later put of the same key."""
    replicas: tuple[Replica, ...]
    """Those in memory first."""


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Leave to write one object at `offset` of `segment`, and then to end the put."""

    id: int
    segment: SegmentId
    offset: Bytes
    epoch: int
    """The segment's, for claims."""


class Exists(msgspec.Struct, frozen=True, tag=True):
    """The object is there already (and leased, if a lease was named): nothing to write."""


class Full(msgspec.Struct, frozen=True, tag=True):
    """No segment has room, and what could be evicted does not make room."""


class OverQuota(msgspec.Struct, frozen=True, tag=True):
    """The tenant has no room left, and nothing of its own could be evicted for it."""

    tenant: str
    quota_bytes: Bytes


class TooLarge(msgspec.Struct, frozen=True, tag=True):
    """It is larger than any segment that takes objects; 0: there is none."""

    largest_bytes: Bytes


Outcome: TypeAlias = Ticket | Exists | Full | OverQuota | TooLarge


class Removal(msgspec.Struct, frozen=True):
    """What became of one key that was to be removed."""

    outcome: Literal["removed", "missing", "leased"]
    version: int | None = None
    """Of the removed object, or the latest that may be away: the remover claims it towards a master
    that restarts."""


class Held(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """One object on one segment, as its owner must know it to tell a restarted master."""

    key: Key
    size: Bytes
    checksum: int
    version: int
    id: int
    """Of the put or the copy that wrote this replica. Never repeats: of two that overlap, the
    larger is the later."""
    offset: Bytes
    parent: Key | None
    options: PutOptions


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The segment no longer holds this key, unless by a put or copy later than `id`."""

    key: Key
    id: int


Change: TypeAlias = Held | Gone
Seen: TypeAlias = tuple[int, int]
"""How much of its segment's changes an owner knows: (a mounting's id, a change's number)."""
UNSEEN: Seen = (0, 0)


class Copy(msgspec.Struct, frozen=True):
    """A task for a segment's owner: pull an object's bytes from `source` to `held.offset` of its
    own, verify the checksum, answer whether they are there. The one way of replication, repair,
    drain, demotion and promotion.
    """

    held: Held
    """What the segment then holds; its id names the task."""
    source: Replica
    left_us: Micros
    """To be ended within this time of asking for it, or left: the extent may be another's then."""


class Orders(msgspec.Struct, frozen=True):
    """The master's answer to a beat."""

    after: Seen
    changes: tuple[Change, ...]
    """What changed on the segment after `after`, oldest first."""
    seen: Seen
    """To be told at the next beat, once `changes` are applied."""
    more: bool
    """There are more changes: beat again at once."""
    copies: tuple[Copy, ...]
    """All that are to be made now, those told before and not yet answered included."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """An object, or with `writing` a put under way, that a client knows on another's segment."""

    segment: SegmentId
    epoch: int
    held: Held
    writing: bool


class SegmentStats(msgspec.Struct, frozen=True):
    """One segment's ledger."""

    id: SegmentId
    epoch: int
    address: Address
    node: str
    tier: Medium
    capacity_bytes: Bytes
    used_bytes: Bytes
    evictable_bytes: Bytes
    objects: int
    draining: bool


class MasterStats(msgspec.Struct, frozen=True):
    """The master's ledgers: after every release and reap, leases and pending puts are zero."""

    segments: tuple[SegmentStats, ...]
    objects: int
    leases: int
    pending_puts: int
    pending_copies: int
    waiting: int
    """Objects with fewer replicas than wanted since a segment left, or to leave a draining one."""
    tenants: dict[str, Bytes]
    """Bytes in use by tenant, all replicas and what is being written."""
    evicted: int
    """Replicas evicted since the start; so are the next two counted."""
    demoted: int
    promoted: int
    recovering: bool
