"""Requests and replies between the store's members and its master; see live.store.operations.

msgpack, fields by position. Every member and the master run the same version. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from moonserve.core.kv.facts import BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.store import words
from moonserve.core.store.words import (
    Address,
    Change,
    Claim,
    Found,
    Mount,
    Number,
    Orders,
    Outcome,
    Terms,
)
from moonserve.core.units import Bytes, LeaseId, SegmentId

PATH = "/internal/store"
"""Where a master's HTTP server switches a member's connection to rpc."""
PROTOCOL = "moonserve-store/3"
MAX_REPLY_BYTES: Bytes = 1 << 30
"""A gateway receives all blocks of a pool, many millions, in one reply."""
MAX_BATCH = 4096
"""The most items one call may name."""
MAX_KEY_BYTES: Bytes = 256
MAX_OBJECT_BYTES: Bytes = 1 << 30
MAX_REPLICAS = 8

Key: TypeAlias = Annotated[words.Key, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Size: TypeAlias = Annotated[Bytes, msgspec.Meta(gt=0, le=MAX_OBJECT_BYTES)]
Name: TypeAlias = Annotated[LeaseId, msgspec.Meta(min_length=1, max_length=256)]
Segment: TypeAlias = Annotated[SegmentId, msgspec.Meta(min_length=1, max_length=256)]
_BATCH = msgspec.Meta(max_length=MAX_BATCH)
Keys: TypeAlias = Annotated[Sequence[Key], _BATCH]


class Ending(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A notice of the master: its process ends in order, soon after running requests have."""


class MountCall(msgspec.Struct, frozen=True, array_like=True):
    """Mount a segment: empty, or with one page of its objects; pages are numbered from 0."""

    mount: Mount
    held: Annotated[Sequence[Change], _BATCH] = ()
    page: int = 0
    last: bool = True


class Mounted(msgspec.Struct, frozen=True, array_like=True):
    """Whether the segment was accepted, and the master's terms.

    If not, `holder` is another start that is mounted and may be dead: ask again. Or, after page 0,
    pages are missing: start again with page 0.
    """

    accepted: bool
    terms: Terms
    holder: words.Holder | None = None


class SegmentCall(msgspec.Struct, frozen=True, array_like=True):
    """Unmount a segment."""

    segment: Segment
    epoch: int


class BeatCall(msgspec.Struct, frozen=True, array_like=True):
    """The owner is alive, and knows all changes of its segment up to `seen`.

    The master may hold the answer back for up to `wait_s`, until there are copies to make.
    """

    segment: Segment
    epoch: int
    seen: words.Seen = words.UNSEEN
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class Beaten(msgspec.Struct, frozen=True, array_like=True):
    """Whether the segment is mounted, the addresses of all mounted segments, and the owner's
    orders.

    orders: None if the segment is not mounted; the owner has to mount it again.
    """

    mounted: bool
    addresses: dict[SegmentId, Address]
    orders: Orders | None = None


class CopiedCall(msgspec.Struct, frozen=True, array_like=True):
    """Copies that ended: (id, whether the bytes are there and verified).

    The reply: whether each is a replica now. If not, its extent may be reused.
    """

    segment: Segment
    epoch: int
    results: Annotated[Sequence[tuple[int, bool]], _BATCH]


class ClaimCall(msgspec.Struct, frozen=True, array_like=True):
    """What a client knows that a restarted master may not: puts, and removals as (key, version)."""

    claims: Annotated[Sequence[Claim], _BATCH]
    removed: Annotated[Sequence[tuple[Key, int]], _BATCH]


class DrainCall(msgspec.Struct, frozen=True, array_like=True):
    """Move everything off a segment and put nothing more onto it, or use it again."""

    segment: Segment
    drains: bool = True


class PutStartCall(msgspec.Struct, frozen=True, array_like=True):
    """Start one put per item; `parent` is the key before the first one's.

    `owner` is the segment of the client that will write, None where it has none.
    """

    owner: Segment | None
    items: Annotated[Sequence[tuple[Key, Size]], _BATCH]
    lease: Name | None
    parent: Key | None = None
    options: words.PutOptions = words.PutOptions()


class PutStarted(msgspec.Struct, frozen=True, array_like=True):
    """One outcome per item, and the addresses of the tickets' segments."""

    outcomes: list[Outcome]
    addresses: dict[SegmentId, Address]


class PutEndCall(msgspec.Struct, frozen=True, array_like=True):
    """End puts: (ticket id, XXH3-64 of the bytes).

    The reply: per put the version of the object that exists now; None: the ticket is stale.
    """

    ends: Annotated[Sequence[tuple[int, Number]], _BATCH]
    lease: Name | None


class PutAbortCall(msgspec.Struct, frozen=True, array_like=True):
    """Give up puts by ticket id."""

    tickets: Annotated[Sequence[int], _BATCH]


class FindCall(msgspec.Struct, frozen=True, array_like=True):
    """Find and lease the leading run of keys (op find) or all that exist (op get).

    Objects that are on disk only may be promoted to `reader`, the caller's own segment.
    """

    keys: Keys
    lease: Name
    reader: Segment | None = None


class FoundReply(msgspec.Struct, frozen=True, array_like=True):
    """The objects found, and the addresses of their segments."""

    found: list[Found]
    addresses: dict[SegmentId, Address]


class GotReply(msgspec.Struct, frozen=True, array_like=True):
    """The object of each key or None, and the addresses of their segments."""

    found: list[Found | None]
    addresses: dict[SegmentId, Address]


class KeysCall(msgspec.Struct, frozen=True, array_like=True):
    """Ask whether each key exists."""

    keys: Keys


class ScanCall(msgspec.Struct, frozen=True, array_like=True):
    """List up to `limit` objects whose keys start with `prefix` and come after `after`."""

    prefix: Annotated[bytes, msgspec.Meta(max_length=256)]
    after: Key | None
    limit: Annotated[int, msgspec.Meta(gt=0, le=MAX_BATCH)]


class RemoveCall(msgspec.Struct, frozen=True, array_like=True):
    """Remove objects; leased ones too with `force`."""

    keys: Keys
    force: bool = False


class PinCall(msgspec.Struct, frozen=True, array_like=True):
    """Pin objects, or unpin them. The reply: whether each exists."""

    keys: Keys
    pinned: bool


class EvictCall(msgspec.Struct, frozen=True, array_like=True):
    """Evict `size` bytes of the segment.

    The reply: bytes freed or on their way to disk, and whether any are on their way.
    """

    segment: Segment
    size: Annotated[Bytes, msgspec.Meta(gt=0)]


class CopyCall(msgspec.Struct, frozen=True, array_like=True):
    """Make replicas of objects on one more segment, preferably from `source`.

    The reply: how many of the first keys have a replica there, or will have one.
    """

    keys: Keys
    to: Segment
    source: Segment | None


class ReleaseCall(msgspec.Struct, frozen=True, array_like=True):
    """End a lease."""

    lease: Name


class DiscardCall(msgspec.Struct, frozen=True, array_like=True):
    """Drop replicas whose bytes are corrupt: (key, version, segment; None: all segments)."""

    objects: Annotated[Sequence[tuple[Key, int, Segment | None]], _BATCH]


class EventsCall(msgspec.Struct, frozen=True, array_like=True):
    """Ask for the events after `after` of one start of the master; waits for one up to `wait_s`."""

    start: int
    after: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class EventsReply(msgspec.Struct, frozen=True, array_like=True):
    """Events, and the number of the last one.

    anew: forget all events before; these report everything. It is set for a listener that is new,
    too far behind, or knows another start of the master.
    """

    start: int
    at: int
    anew: bool
    events: list[BlocksStored | BlocksRemoved | BlocksCleared]
