"""The pool's vocabulary: what the store's master, its clients and transfer tell each other.

Frozen structs and nothing else; they travel as msgpack on the control plane.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from moonserve.core.units import BlockKey, Bytes, Micros, SegmentId


class Address(msgspec.Struct, frozen=True):
    """Where a segment's bytes are served: a TCP listener, and a shared-memory region beside it.

    `identity` is drawn at random by the owner; whoever reaches the memory by either way checks it
    there, so that a reused port or file name is never taken for the segment.
    """

    host: str
    port: int
    region: str
    """File name of the shared-memory region, useful on the owner's host only."""
    identity: bytes


class Mount(msgspec.Struct, frozen=True):
    """A segment as its owner offers it to the pool; fixed for one epoch of the owner."""

    id: SegmentId
    epoch: int
    """Grows at every start of the owner: an older one is a late message."""
    capacity_bytes: Bytes
    address: Address


class Terms(msgspec.Struct, frozen=True):
    """How long the master waits before it takes something back."""

    lease_ttl_us: Micros = 120_000_000
    """For holders that crashed: every other lease is released. Longer than a decode may queue."""
    put_ttl_us: Micros = 20_000_000
    segment_ttl_us: Micros = 10_000_000
    """A segment not heard of for so long is unmounted."""


class Replica(msgspec.Struct, frozen=True):
    """Where one copy of an object lies."""

    segment: SegmentId
    offset: Bytes


class Found(msgspec.Struct, frozen=True):
    """One object that exists: complete, readable, leased to the finder."""

    key: BlockKey
    size: Bytes
    checksum: int
    """XXH3-64 of its bytes."""
    version: int
    replicas: tuple[Replica, ...]


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Leave to write one object at `offset` of `segment`, and then to end the put."""

    id: int
    segment: SegmentId
    offset: Bytes


class Exists(msgspec.Struct, frozen=True, tag=True):
    """The object is there already (and leased, if a lease was named): nothing to write."""


class Full(msgspec.Struct, frozen=True, tag=True):
    """No segment has room, and what could be evicted does not make room."""


Outcome: TypeAlias = Ticket | Exists | Full


class SegmentStats(msgspec.Struct, frozen=True):
    """One segment's ledger."""

    id: SegmentId
    epoch: int
    address: Address
    capacity_bytes: Bytes
    used_bytes: Bytes
    evictable_bytes: Bytes
    objects: int


class MasterStats(msgspec.Struct, frozen=True):
    """The master's ledgers: after every release and reap, leases and pending puts are zero."""

    segments: tuple[SegmentStats, ...]
    objects: int
    leases: int
    pending_puts: int
    evicted: int
    """Objects evicted since the start."""
