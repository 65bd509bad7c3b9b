"""The store's vocabulary: what the master, segment owners, clients and transfer exchange.

Frozen structs, which travel as msgpack on the control plane. Nothing here has behaviour.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from moonserve.core.units import Bytes, Micros, SegmentId

Key: TypeAlias = bytes
"""The name of an object, 1..256 bytes. The key of a KV block is its BlockKey."""
Medium: TypeAlias = Literal["dram", "disk"]
"""Where a segment's bytes are: host memory (G2 of KV events) or local disk (G3)."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""An id, a checksum or an offset that another process reports: on the wire at most 64 bits, and the
master keeps them in arrays of such numbers."""

ALIGN: Bytes = 64
"""Extents start and end on cache lines, so that no two writers share one."""


def aligned(size: Bytes) -> Bytes:
    """Return the bytes that an object of `size` takes up: the next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


class Card(msgspec.Struct, frozen=True):
    """One network card of an owner's host, by its address."""

    host: str
    rail: str = ""
    """Cards of one rail reach each other faster than cards of two rails. Empty: unknown."""


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a segment's bytes are served: a TCP listener, and a shared-memory region beside it.

    The owner draws `identity` at random. A reader checks it on either way to the memory, so that a
    reused port or file name is never taken for the segment.
    """

    host: str
    port: int
    region: str
    """File name of the shared-memory region; it is valid on the owner's host only."""
    identity: bytes
    cards: tuple[Card, ...] = ()
    """All cards that the owner listens on, `host` included. Empty: `host` alone."""
    location: str = ""
    """`node:segment`, as the owner names it."""
    rack: str = ""
    mooncake: Address | None = None
    """Where Mooncake's engine serves the same bytes: its handshake address; `region` names the
    memory."""


class Mount(msgspec.Struct, frozen=True):
    """A segment as its owner offers it to the pool; fixed for one epoch of the owner."""

    id: SegmentId
    epoch: int
    """It grows at every start of the owner: a message with an older epoch is late."""
    capacity_bytes: Bytes
    address: Address
    node: str = ""
    """Segments of one node fail together, so replicas of one object avoid a common node. Empty:
    `id`."""
    tier: Medium = "dram"
    rack: str = ""
    """Nodes of one rack reach each other faster. Empty: unknown."""


class Holder(msgspec.Struct, frozen=True):
    """The mounted owner of a segment, as the master reports it to another start of that owner."""

    address: Address
    beats: int
    """Beats that the master received from it: while they grow, it is alive."""


class Terms(msgspec.Struct, frozen=True):
    """The settings of the master: times to live, eviction, and quotas of tenants."""

    lease_ttl_us: Micros = 120_000_000
    """Only leases of crashed clients expire; all others are released. Longer than a decode may
    queue."""
    put_ttl_us: Micros = 20_000_000
    """The master gives up a put or a copy that lasts longer, and reuses its extent."""
    segment_ttl_us: Micros = 10_000_000
    """The master drops a segment without a beat for this time."""
    eviction: str = "lru"
    """One of core.store.evict.EVICTIONS, used for every segment."""
    high: float = 0.95
    """High-water mark: when a larger share of a segment is in use, `reap` frees bytes ahead of
    need."""
    low: float = 0.90
    """Low-water mark: `reap` stops when this share is in use."""
    quotas: dict[str, Bytes] = {}
    """The most bytes that each tenant may have, all replicas counted. Other tenants have no
    bound."""


class PutOptions(msgspec.Struct, frozen=True):
    """Options of every object in one put."""

    replicas: int = 1
    """Replicas wanted. The first is written by the put; the others are made after it has ended."""
    preferred: SegmentId | None = None
    """The segment for the first replica, if it is mounted and has room. None: the owner's own
    segment."""
    tenant: str = ""
    pin: bool = False
    """The object is not evicted until it is unpinned."""
    blocks: bool = True
    """The keys are BlockKeys along one chain, and KV events report them. False: any bytes."""


class Replica(msgspec.Struct, frozen=True):
    """The place of one copy of an object."""

    segment: SegmentId
    offset: Bytes


class Found(msgspec.Struct, frozen=True):
    """One object that exists, complete and readable; `find` and `get` have leased it."""

    key: Key
    size: Bytes
    checksum: int
    """XXH3-64 of its bytes."""
    version: int
    """The id of the put that made it. No other put has this id, also no later put of the key."""
    replicas: tuple[Replica, ...]
    """Replicas in memory come before those on disk."""


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Permission to write one object at `offset` of `segment`, and then to end the put."""

    id: int
    segment: SegmentId
    offset: Bytes
    epoch: int
    """The segment's epoch, for claims."""


class Exists(msgspec.Struct, frozen=True, tag=True):
    """The object exists already, and is leased if the call named a lease: nothing to write."""


class Full(msgspec.Struct, frozen=True, tag=True):
    """No segment has room, and eviction cannot make room."""


class OverQuota(msgspec.Struct, frozen=True, tag=True):
    """The tenant's quota is used up, and none of its objects can be evicted."""

    tenant: str
    quota_bytes: Bytes


class TooLarge(msgspec.Struct, frozen=True, tag=True):
    """The object is larger than every segment that takes objects; 0: there is no such segment."""

    largest_bytes: Bytes


Outcome: TypeAlias = Ticket | Exists | Full | OverQuota | TooLarge


class Removal(msgspec.Struct, frozen=True):
    """The result of the removal of one key."""

    outcome: Literal["removed", "missing", "leased"]
    version: int | None = None
    """The version of the removed object; if it was missing, the latest that may be on a segment
    that is away. The client claims this removal to a restarted master."""


class Held(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """One replica on one segment, with all that its owner reports to a restarted master."""

    key: Key
    size: Bytes
    checksum: Number
    version: Number
    id: Number
    """The id of the put or copy that wrote this replica. Ids never repeat. If two replicas overlap,
    the larger id is the later."""
    offset: Number
    parent: Key | None
    options: PutOptions


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The segment no longer holds this key, unless by a put or copy later than `id`."""

    key: Key
    id: int


Change: TypeAlias = Held | Gone
Seen: TypeAlias = tuple[int, int]
"""The last change of its segment that an owner has received: (mounting id, change number)."""
UNSEEN: Seen = (0, 0)


class Copy(msgspec.Struct, frozen=True):
    """A task for a segment's owner: pull an object's bytes from `source` to its own `held.offset`,
    verify the checksum, and report whether they are there.

    Replication, repair, drain, demotion and promotion are all done by copies.
    """

    held: Held
    """The replica that the segment then has; its id names the task."""
    source: Replica
    left_us: Micros
    """The time left, from the sending of the beat. After it the owner must stop, because the extent
    may be reused."""


class Orders(msgspec.Struct, frozen=True):
    """The master's answer to a beat."""

    after: Seen
    changes: tuple[Change, ...]
    """The changes on the segment after `after`, oldest first."""
    seen: Seen
    """The owner sends it with the next beat, once it has applied `changes`."""
    more: bool
    """There are more changes: beat again at once."""
    copies: tuple[Copy, ...]
    """All copies to make now, including those sent before and not answered yet."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A put that a client knows on some segment: ended, or under way if `writing`."""

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
    """The master's ledgers. When all clients have left, leases and pending puts are zero."""

    segments: tuple[SegmentStats, ...]
    objects: int
    leases: int
    pending_puts: int
    pending_copies: int
    waiting: int
    """Objects that wait for a replica, or to leave a draining segment."""
    tenants: dict[str, Bytes]
    """Bytes in use by tenant: all replicas, and extents of puts and copies under way."""
    evicted: int
    """Replicas evicted since the start; `demoted` and `promoted` count the same way."""
    demoted: int
    promoted: int
    recovering: bool
