"""The store master as a service: bytes in, bytes out.

live.store.local runs its members' calls, `reap` on a timer, and drains the master's events after
each of them. No I/O, no waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from moonserve.core.errors import BadRequest, Recovering, UnknownSegment
from moonserve.core.store.master import Master
from moonserve.core.store.words import Address, Found, Ticket
from moonserve.core.units import Micros, SegmentId
from moonserve.live.store import wire

log = logging.getLogger(__name__)

_MAX_CAPACITY_BYTES = 1 << 46
_encode = msgspec.msgpack.Encoder().encode


class MasterService:
    """Decodes one operation, runs it on the master at `now_us()`, encodes the reply."""

    def __init__(self, master: Master, now_us: Callable[[], Micros]) -> None:
        self.master = master
        self._now_us = now_us

    def handle(self, op: str, body: bytes) -> bytes:
        """Run one of OPS. Raises BadRequest on an unknown op or a malformed body.

        While the master recovers, what it cannot answer yet gets nil.
        """
        if op not in OPS:
            raise BadRequest(f"no such store operation: {op!r}; there are {', '.join(OPS)}", "op")
        decoder, method = OPS[op]
        try:
            call = decoder.decode(body)
        except msgspec.DecodeError as error:
            raise BadRequest(f"store operation {op!r}: {error}", "body") from None
        try:
            return _encode(method(self, call))
        except Recovering:
            return _encode(None)

    def hear(self, beat: wire.BeatCall) -> bool:
        """A beat is here, whose answer may be held back. False: its segment is not mounted."""
        return self.master.keep_alive(self._now_us(), beat.segment, beat.epoch)

    def reap(self) -> None:
        """Take back what ran out; to be called about once a second."""
        for segment in self.master.reap(self._now_us()):
            log.warning("segment %s was not heard of in time: its objects are dropped", segment)

    def copy(self, call: wire.CopyCall) -> wire.Copying:
        """The operation of that name. Raises Recovering."""
        return wire.Copying(self.master.copy(self._now_us(), call.keys, call.to, call.source))

    # Operations

    def _mount(self, call: wire.MountCall) -> wire.Mounted:
        mount = call.mount
        if not 0 < mount.capacity_bytes <= _MAX_CAPACITY_BYTES:
            raise BadRequest(
                f"capacity_bytes must be 1..{_MAX_CAPACITY_BYTES}, not {mount.capacity_bytes}",
                "capacity_bytes",
            )
        accepted = self.master.mount(self._now_us(), mount, call.held, call.page, call.last)
        told = (mount.id, mount.epoch, call.page, accepted)
        level = logging.INFO if accepted else logging.DEBUG  # who waits for a name asks often
        log.log(level, "segment %s, epoch %d, page %d: taken=%s", *told)
        holder = None if accepted else self.master.holder(mount.id)
        return wire.Mounted(accepted, self.master.terms, holder)

    def _unmount(self, call: wire.SegmentCall) -> wire.Done:
        self.master.unmount(call.segment, call.epoch)
        return wire.Done()

    def _beat(self, call: wire.BeatCall) -> wire.Beaten:
        orders = self.master.beat(self._now_us(), call.segment, call.epoch, call.seen)
        return wire.Beaten(orders is not None, self.master.addresses(), orders)

    def _copied(self, call: wire.CopiedCall) -> wire.Answer:
        return wire.Answer(
            self.master.copied(self._now_us(), call.segment, call.epoch, call.results)
        )

    def _claim(self, call: wire.ClaimCall) -> wire.Done:
        self.master.claim(self._now_us(), call.claims, call.removed)
        return wire.Done()

    def _drain(self, call: wire.DrainCall) -> wire.Answer:
        return wire.Answer([self.master.drain(self._now_us(), call.segment)])

    def _put_start(self, call: wire.PutStartCall) -> wire.PutStarted:
        if not 1 <= call.options.replicas <= wire.MAX_REPLICAS:
            raise BadRequest(f"replicas must be 1..{wire.MAX_REPLICAS}", "replicas")
        try:
            outcomes = self.master.put_start(
                self._now_us(), call.owner, call.items, call.lease, call.parent, call.options
            )
        except UnknownSegment:
            return wire.PutStarted(None, {})
        used = (outcome.segment for outcome in outcomes if isinstance(outcome, Ticket))
        return wire.PutStarted(outcomes, self._addresses(used))

    def _put_end(self, call: wire.PutEndCall) -> wire.PutEnded:
        return wire.PutEnded(self.master.put_end(self._now_us(), call.ends, call.lease))

    def _put_abort(self, call: wire.PutAbortCall) -> wire.Done:
        self.master.put_abort(call.tickets)
        return wire.Done()

    def _find(self, call: wire.FindCall) -> wire.FoundReply:
        return self._found(self.master.find(self._now_us(), call.keys, call.lease, call.reader))

    def _get(self, call: wire.FindCall) -> wire.GotReply:
        got = self.master.get(self._now_us(), call.keys, call.lease, call.reader)
        there = self._found([it for it in got if it is not None])
        return wire.GotReply(got, there.addresses)

    def _exists(self, call: wire.KeysCall) -> wire.Answer:
        return wire.Answer(self.master.exists(call.keys))

    def _scan(self, call: wire.ScanCall) -> wire.FoundReply:
        return self._found(self.master.scan(call.prefix, call.after, call.limit))

    def _remove(self, call: wire.RemoveCall) -> wire.Removed:
        return wire.Removed(self.master.remove(self._now_us(), call.keys, call.force))

    def _pin(self, call: wire.PinCall) -> wire.Answer:
        return wire.Answer(self.master.pin(call.keys, call.pinned))

    def _evict(self, call: wire.EvictCall) -> wire.Freed:
        return wire.Freed(*self.master.evict(self._now_us(), call.segment, call.size))

    def _release(self, call: wire.ReleaseCall) -> wire.Done:
        self.master.release(call.lease)
        return wire.Done()

    def _discard(self, call: wire.DiscardCall) -> wire.Done:
        for key, version, segment in call.objects:
            log.warning("object %s is corrupt on %s", key.hex(), segment or "all its segments")
            self.master.discard(key, version, segment)
        return wire.Done()

    def _found(self, found: list[Found]) -> wire.FoundReply:
        used = (replica.segment for it in found for replica in it.replicas)
        return wire.FoundReply(found, self._addresses(used))

    def _addresses(self, segments: Iterable[SegmentId]) -> dict[SegmentId, Address]:
        known = self.master.addresses()
        return {name: known[name] for name in segments}


def _op(
    shape: type[Any], method: Callable[[MasterService, Any], msgspec.Struct]
) -> tuple[msgspec.msgpack.Decoder[Any], Callable[[MasterService, Any], msgspec.Struct]]:
    return msgspec.msgpack.Decoder(shape), method


OPS = {
    "mount": _op(wire.MountCall, MasterService._mount),
    "unmount": _op(wire.SegmentCall, MasterService._unmount),
    "beat": _op(wire.BeatCall, MasterService._beat),
    "copied": _op(wire.CopiedCall, MasterService._copied),
    "claim": _op(wire.ClaimCall, MasterService._claim),
    "drain": _op(wire.DrainCall, MasterService._drain),
    "put_start": _op(wire.PutStartCall, MasterService._put_start),
    "put_end": _op(wire.PutEndCall, MasterService._put_end),
    "put_abort": _op(wire.PutAbortCall, MasterService._put_abort),
    "find": _op(wire.FindCall, MasterService._find),
    "get": _op(wire.FindCall, MasterService._get),
    "exists": _op(wire.KeysCall, MasterService._exists),
    "scan": _op(wire.ScanCall, MasterService._scan),
    "remove": _op(wire.RemoveCall, MasterService._remove),
    "pin": _op(wire.PinCall, MasterService._pin),
    "evict": _op(wire.EvictCall, MasterService._evict),
    "copy": _op(wire.CopyCall, MasterService.copy),
    "release": _op(wire.ReleaseCall, MasterService._release),
    "discard": _op(wire.DiscardCall, MasterService._discard),
}
"""Every operation: how its body is read and what runs it."""
