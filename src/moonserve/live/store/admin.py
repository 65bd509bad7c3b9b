"""The JSON of GET /api/segments: answers to questions of people about the pool. Read-only.

live.store.local calls it. Keys are in hex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.store.master import Master
from moonserve.core.store.words import Found, Key, SegmentStats
from moonserve.core.units import whole_number

_MAX_LISTED = 1_000


def lookup(master: Master, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the ledgers of all segments; with `key`, that object; with `prefix`, a list of
    objects.

    The list is in the order of keys, starts after `after` and has at most `limit` objects. Raises
    BadRequest, Recovering.
    """
    if "key" in query:
        key = _key(query["key"], "key")
        if not key:
            raise BadRequest("key must be 1 to 256 bytes in hex", "key")
        found = master.locate(key)
        shown = {"replicas": []} if found is None else _json(found)
        return {"key": key.hex(), "exists": found is not None} | shown
    limit = _limit(query)
    if "prefix" in query:
        after = _key(query["after"], "after") if query.get("after") else None
        listed = master.scan(_key(query["prefix"], "prefix"), after, limit)
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


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", "100")
    limit = whole_number(text)
    if limit is None or not 0 < limit <= _MAX_LISTED:
        raise BadRequest(f"limit must be 1..{_MAX_LISTED}, not {text[:20]!r}", "limit")
    return limit


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
