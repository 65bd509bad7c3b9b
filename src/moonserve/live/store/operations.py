"""Every operation of the store's master: its name, request, reply, and the method that runs it.

Members call by this table (live.store.link), and masters answer by it (live.store.server). A
refusal that a member must act on is a part of the reply; an error means that the call failed.
Nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, StoreError
from moonserve.core.store.master import Master
from moonserve.core.store.words import Address, Found, Removal, Ticket
from moonserve.core.units import Bytes, Micros, SegmentId
from moonserve.live.store import wire

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply")

_MAX_CAPACITY_BYTES = 1 << 46
_encode = msgspec.msgpack.Encoder().encode


class Operation(Generic[Request, Reply]):
    """One operation, for both ends of a call."""

    def __init__(
        self,
        name: str,
        request: type[Request],
        reply: type[Reply],
        run: Callable[[Master, Micros, Request], Reply],
    ) -> None:
        """run: is given the master, its time, and the request."""
        self.name = name
        self.run = run
        self._decode_request = msgspec.msgpack.Decoder(request).decode
        self._decode_reply = msgspec.msgpack.Decoder(reply).decode

    def request(self, body: bytes) -> Request:
        """Decode a call. Raises BadRequest."""
        try:
            return self._decode_request(body)
        except UNREADABLE as error:
            raise BadRequest(f"store operation {self.name!r}: {error}", "body") from None

    def reply(self, body: bytes) -> Reply:
        """Decode a reply. Raises StoreError."""
        try:
            return self._decode_reply(body)
        except UNREADABLE as error:
            why = f"the master's reply to {self.name!r} cannot be decoded: {error}"
            raise StoreError(why) from None

    def answer(self, master: Master, now_us: Micros, body: bytes) -> bytes:
        """Decode a call, run it and encode the reply. Raises MoonserveError."""
        return _encode(self.run(master, now_us, self.request(body)))


# Operations that do more than one method of Master


def _mount(master: Master, now_us: Micros, it: wire.MountCall) -> wire.Mounted:
    mount = it.mount
    if not 0 < mount.capacity_bytes <= _MAX_CAPACITY_BYTES:
        raise BadRequest(
            f"capacity_bytes must be 1..{_MAX_CAPACITY_BYTES}, not {mount.capacity_bytes}",
            "capacity_bytes",
        )
    accepted = master.mount(now_us, mount, it.held, it.page, it.last)
    level = logging.INFO if accepted else logging.DEBUG  # an owner that waits for a name asks often
    facts = (mount.id, mount.epoch, it.page, accepted)
    log.log(level, "mount of segment %s, epoch %d, page %d: accepted=%s", *facts)
    return wire.Mounted(accepted, master.terms, None if accepted else master.holder(mount.id))


def _beat(master: Master, now_us: Micros, it: wire.BeatCall) -> wire.Beaten:
    orders = master.beat(now_us, it.segment, it.epoch, it.seen)
    return wire.Beaten(orders is not None, master.addresses(), orders)


def _put_start(master: Master, now_us: Micros, it: wire.PutStartCall) -> wire.PutStarted:
    if not 1 <= it.options.replicas <= wire.MAX_REPLICAS:
        raise BadRequest(f"replicas must be 1..{wire.MAX_REPLICAS}", "replicas")
    outcomes = master.put_start(now_us, it.owner, it.items, it.lease, it.parent, it.options)
    used = (outcome.segment for outcome in outcomes if isinstance(outcome, Ticket))
    return wire.PutStarted(outcomes, _addresses(master, used))


def _get(master: Master, now_us: Micros, it: wire.FindCall) -> wire.GotReply:
    got = master.get(now_us, it.keys, it.lease, it.reader)
    return wire.GotReply(got, _places(master, [found for found in got if found is not None]))


def _find(master: Master, now_us: Micros, it: wire.FindCall) -> wire.FoundReply:
    found = master.find(now_us, it.keys, it.lease, it.reader)
    return wire.FoundReply(found, _places(master, found))


def _scan(master: Master, now_us: Micros, it: wire.ScanCall) -> wire.FoundReply:
    found = master.scan(it.prefix, it.after, it.limit)
    return wire.FoundReply(found, _places(master, found))


def _discard(master: Master, now_us: Micros, it: wire.DiscardCall) -> None:
    for key, version, segment in it.objects:
        log.warning("object %s is corrupt on %s", key.hex(), segment or "all its segments")
        master.discard(key, version, segment)


def _events(master: Master, now_us: Micros, it: wire.EventsCall) -> wire.EventsReply:
    raise BadRequest("store operation 'events': this master keeps no events for other processes")


def _places(master: Master, found: Sequence[Found]) -> dict[SegmentId, Address]:
    return _addresses(master, (replica.segment for it in found for replica in it.replicas))


def _addresses(master: Master, segments: Iterable[SegmentId]) -> dict[SegmentId, Address]:
    known = master.addresses()
    return {name: known[name] for name in segments}


MOUNT = Operation("mount", wire.MountCall, wire.Mounted, _mount)
UNMOUNT = Operation(
    "unmount",
    wire.SegmentCall,
    type(None),
    lambda master, now_us, it: master.unmount(it.segment, it.epoch),
)
BEAT = Operation("beat", wire.BeatCall, wire.Beaten, _beat)
COPIED = Operation(
    "copied",
    wire.CopiedCall,
    list[bool],
    lambda master, now_us, it: master.copied(now_us, it.segment, it.epoch, it.results),
)
CLAIM = Operation(
    "claim",
    wire.ClaimCall,
    type(None),
    lambda master, now_us, it: master.claim(now_us, it.claims, it.removed),
)
DRAIN = Operation(
    "drain",
    wire.DrainCall,
    bool,
    lambda master, now_us, it: master.drain(now_us, it.segment, it.drains),
)
PUT_START = Operation("put_start", wire.PutStartCall, wire.PutStarted, _put_start)
PUT_END = Operation(
    "put_end",
    wire.PutEndCall,
    list[int | None],
    lambda master, now_us, it: master.put_end(now_us, it.ends, it.lease),
)
PUT_ABORT = Operation(
    "put_abort",
    wire.PutAbortCall,
    type(None),
    lambda master, now_us, it: master.put_abort(it.tickets),
)
FIND = Operation("find", wire.FindCall, wire.FoundReply, _find)
GET = Operation("get", wire.FindCall, wire.GotReply, _get)
EXISTS = Operation(
    "exists", wire.KeysCall, list[bool], lambda master, now_us, it: master.exists(it.keys)
)
SCAN = Operation("scan", wire.ScanCall, wire.FoundReply, _scan)
REMOVE = Operation(
    "remove",
    wire.RemoveCall,
    list[Removal],
    lambda master, now_us, it: master.remove(now_us, it.keys, it.force),
)
PIN = Operation(
    "pin", wire.PinCall, list[bool], lambda master, now_us, it: master.pin(it.keys, it.pinned)
)
EVICT = Operation(
    "evict",
    wire.EvictCall,
    tuple[Bytes, bool],
    lambda master, now_us, it: master.evict(now_us, it.segment, it.size),
)
COPY = Operation(
    "copy",
    wire.CopyCall,
    int,
    lambda master, now_us, it: master.copy(now_us, it.keys, it.to, it.source),
)
RELEASE = Operation(
    "release", wire.ReleaseCall, type(None), lambda master, now_us, it: master.release(it.lease)
)
DISCARD = Operation("discard", wire.DiscardCall, type(None), _discard)
EVENTS = Operation("events", wire.EventsCall, wire.EventsReply, _events)
"""live.store.local answers it, if the master keeps events."""

OPERATIONS: dict[str, Operation[Any, Any]] = {
    it.name: it
    for it in (
        *(MOUNT, UNMOUNT, BEAT, COPIED, CLAIM, DRAIN),
        *(PUT_START, PUT_END, PUT_ABORT, FIND, GET, EXISTS, SCAN),
        *(REMOVE, PIN, EVICT, COPY, RELEASE, DISCARD, EVENTS),
    )
}
"""All operations by name."""
