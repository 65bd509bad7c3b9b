"""The JSON of GET /api/segments: answers to questions of people about the pool. Read-only.

live.store.local calls it. Keys are in hex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.store.master import Master
from moonserve.core.store.words import Found, Key, SegmentStats
from moonserve.live.http.message import decode_query

_LISTED = 100
_MAX_LISTED = 1_000


class SegmentsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /api/segments. Keys are in hex."""

    key: str | None = None
    prefix: str | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LISTED)] | None = None


def lookup(master: Master, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the ledgers of all segments; with `key`, that object; with `prefix`, a list of
    objects.

    The list is in the order of keys, starts after `after` and has at most `limit` objects. Raises
    BadRequest, Recovering.
    """
    asked = decode_query(query, SegmentsAsked)
    if asked.key is not None:
        key = _key(asked.key, "key")
        if not key:
            raise BadRequest("key must be 1 to 256 bytes in hex", "key")
        found = master.locate(key)
        shown = {"replicas": []} if found is None else _json(found)
        return {"key": key.hex(), "exists": found is not None} | shown
    if asked.prefix is not None:
        after = _key(asked.after, "after") if asked.after else None
        limit = _LISTED if asked.limit is None else asked.limit
        listed = master.scan(_key(asked.prefix, "prefix"), after, limit)
        return {"objects": [_json(found) for found in listed]}
    for name in ("limit", "after"):
        if name in query:
            raise BadRequest(f"{name} goes with prefix, which may be empty", name)
    return ledgers(master)


def ledgers(master: Master) -> dict[str, Any]:
    """Return what is stored on each segment, what is under way, and the quotas of tenants."""
    stats = master.stats()
    segments = [_segment_json(segment) for segment in stats.segments]
    more = {"segments": segments, "quotas": master.terms.quotas}
    return msgspec.structs.asdict(stats) | more


def _key(text: str, name: str) -> Key:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise BadRequest(f"{name} must be in hex, not {text[:80]!r}", name) from None
    if len(key) > 256:
        raise BadRequest(f"{name} must be at most 256 bytes", name)
    return key


def _segment_json(stats: SegmentStats) -> dict[str, Any]:
    fields = msgspec.structs.asdict(stats)
    address = stats.address
    return fields | {"address": f"{address.host}:{address.port}", "rack": address.rack}


def _json(found: Found) -> dict[str, Any]:
    return {
        "key": found.key.hex(),
        "size": found.size,
        "checksum": f"{found.checksum:016x}",
        "version": found.version,
        "replicas": [msgspec.structs.asdict(replica) for replica in found.replicas],
    }
