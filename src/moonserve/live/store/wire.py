"""What travels between store clients and the master: one request and one reply struct per op.

msgpack, fields by position. Refusals that a client must act on are fields of the replies, not
errors: an error means that the call itself failed.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from moonserve.core.pool import Address, Found, Mount, Outcome, Terms
from moonserve.core.units import BlockKey, Bytes, LeaseId, SegmentId

MAX_BATCH = 4096
"""The most items one call may name."""
MAX_OBJECT_BYTES: Bytes = 1 << 30

Key: TypeAlias = Annotated[BlockKey, msgspec.Meta(min_length=32, max_length=32)]
Size: TypeAlias = Annotated[Bytes, msgspec.Meta(gt=0, le=MAX_OBJECT_BYTES)]
Name: TypeAlias = Annotated[LeaseId, msgspec.Meta(min_length=1, max_length=256)]
Segment: TypeAlias = Annotated[SegmentId, msgspec.Meta(min_length=1, max_length=256)]
_BATCH = msgspec.Meta(max_length=MAX_BATCH)


class MountCall(msgspec.Struct, frozen=True, array_like=True):
    """Offer a segment."""

    mount: Mount


class Mounted(msgspec.Struct, frozen=True, array_like=True):
    """Whether it was taken (not: a newer epoch is mounted), and the master's terms."""

    accepted: bool
    terms: Terms


class SegmentCall(msgspec.Struct, frozen=True, array_like=True):
    """A beat, or a goodbye."""

    segment: Segment
    epoch: int


class Beaten(msgspec.Struct, frozen=True, array_like=True):
    """Whether the segment is mounted (not: mount again), and where all mounted ones are."""

    mounted: bool
    addresses: dict[SegmentId, Address]


class PutStartCall(msgspec.Struct, frozen=True, array_like=True):
    """Start one put per item; `parent` is the key before the first one's."""

    owner: Segment
    items: Annotated[list[tuple[Key, Size]], _BATCH]
    lease: Name | None
    parent: Key | None = None


class PutStarted(msgspec.Struct, frozen=True, array_like=True):
    """One outcome per item, and the addresses of the tickets' segments.

    `outcomes` is None when the owner is not mounted: mount again, then retry.
    """

    outcomes: list[Outcome] | None
    addresses: dict[SegmentId, Address]


class PutEndCall(msgspec.Struct, frozen=True, array_like=True):
    """End puts: (ticket id, XXH3-64 of the bytes)."""

    ends: Annotated[list[tuple[int, int]], _BATCH]
    lease: Name | None


class PutEnded(msgspec.Struct, frozen=True, array_like=True):
    """Per put, whether its object exists now."""

    exist: list[bool]


class PutAbortCall(msgspec.Struct, frozen=True, array_like=True):
    """Give up puts by ticket id."""

    tickets: Annotated[list[int], _BATCH]


class FindCall(msgspec.Struct, frozen=True, array_like=True):
    """Find and lease the leading run of keys."""

    keys: Annotated[list[Key], _BATCH]
    lease: Name


class FoundReply(msgspec.Struct, frozen=True, array_like=True):
    """What was found, and the addresses of the segments it lies on."""

    found: list[Found]
    addresses: dict[SegmentId, Address]


class ReleaseCall(msgspec.Struct, frozen=True, array_like=True):
    """End a lease."""

    lease: Name


class DiscardCall(msgspec.Struct, frozen=True, array_like=True):
    """Remove objects whose bytes were found corrupt: (key, version)."""

    objects: Annotated[list[tuple[Key, int]], _BATCH]


class Done(msgspec.Struct, frozen=True, array_like=True):
    """Nothing to say."""
