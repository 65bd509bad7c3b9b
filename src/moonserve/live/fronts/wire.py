"""What a front and the Conductor's process say to each other, over a unix socket.

A frame is a size (u32, little-endian) and a msgpack array of messages: all that one turn of the
sender's loop had to say. Facts and actions travel as they are; the prompt of a request does not, as
the Conductor reads its length only. Both ends speak every second, be it a frame of no messages: a
process that hangs is as good as gone, and nobody waits for it without end.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import msgspec

from moonserve.core.request import Counted, Request, Slo, Stopping
from moonserve.core.schedule.actions import Abort, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.observed import Part
from moonserve.core.units import (
    BlockKey,
    Bytes,
    InstanceId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
)
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts.counts import Family
from moonserve.live.ports import Told

log = logging.getLogger(__name__)

_SIZE = struct.Struct("<I")
MAX_FRAME_BYTES: Bytes = 256 << 20
_BEAT_S = 1.0
_MOST_MISSED = 5
"""Beats after which who has said nothing is gone. Counted, not timed: of a pause of our own, in
which nobody was heard either, one is counted."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A request arrived at this front: its fields, but for the prompt and how tokens are drawn."""

    id: RequestId
    model: str
    length: Tokens
    keys: tuple[BlockKey, ...]
    stopping: Stopping
    slo: Slo
    priority: int
    arrived_us: Micros | None
    whole: bool
    tenant: str

    def request(self) -> Request:
        """As the Conductor takes it."""
        return Request(
            id=self.id,
            model=self.model,
            prompt=Counted(self.length),
            stopping=self.stopping,
            slo=self.slo,
            priority=self.priority,
            arrived_us=self.arrived_us,
            whole=self.whole,
            tenant=self.tenant,
        )


def opened(request: Request, keys: Sequence[BlockKey]) -> Opened:
    """What is said of a request that arrives; the inverse of `Opened.request`."""
    return Opened(
        id=request.id,
        model=request.model,
        length=len(request.prompt),
        keys=tuple(keys),
        stopping=request.stopping,
        slo=request.slo,
        priority=request.priority,
        arrived_us=request.arrived_us,
        whole=request.whole,
        tenant=request.tenant,
    )


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """For the record; see Conducting.first_token."""

    request: RequestId
    cached_tokens: Tokens | None


class Kept(msgspec.Struct, frozen=True, tag=True):
    """See Conducting.keep."""

    keys: tuple[BlockKey, ...]
    to: SegmentId
    source: SegmentId | None


class Closed(msgspec.Struct, frozen=True, tag=True):
    """See Conducting.close."""

    request: RequestId
    outcome: str
    tbt_us: Micros | None
    cached_tokens: Tokens | None


class Counts(msgspec.Struct, frozen=True, tag=True):
    """What this front has counted, in answer to `Count`."""

    number: int
    families: list[Family]


class CallBegan(msgspec.Struct, frozen=True, tag=True):
    """A call to a foreign engine; see fleet.observed.Observer. `number`: this front's own."""

    number: int
    instance: InstanceId
    part: Part
    prompt: Tokens
    predicted: Tokens
    streams: bool


class CallAnswered(msgspec.Struct, frozen=True, tag=True):
    """See fleet.observed.Call; `count` tokens by now."""

    number: int
    count: Tokens
    cached: Tokens | None


class CallEnded(msgspec.Struct, frozen=True, tag=True):
    """The same for its end."""

    number: int
    count: Tokens
    cached: Tokens | None


class Engine(msgspec.Struct, frozen=True):
    """A foreign engine: its instances that have joined, and those of them that tell events."""

    spec: InstanceSpec
    infos: list[InstanceInfo]
    tells: list[InstanceId]


class Engines(msgspec.Struct, frozen=True, tag=True):
    """All foreign engines, whenever anything of them changes."""

    engines: list[Engine]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Said first: where the Conductor's process serves HTTP."""

    url: str


class Instances(msgspec.Struct, frozen=True, tag=True):
    """All that have joined, whenever that changes."""

    infos: list[InstanceInfo]


class Count(msgspec.Struct, frozen=True, tag=True):
    """Say what you have counted."""

    number: int


ToConductor: TypeAlias = (
    Told | Opened | FirstToken | Kept | Closed | Counts | CallBegan | CallAnswered | CallEnded
)
ToFront: TypeAlias = (
    Welcome | Engines | Instances | Count | Prefill | Decode | Abort | Refuse | GiveUp
)

_encode = msgspec.msgpack.Encoder().encode


class Frames(asyncio.Protocol):
    """One end of a connection: what is said in one turn of the loop goes out as one frame."""

    transport: asyncio.Transport

    def __init__(self, peer: str, takes: Any) -> None:
        """`takes`: the type of what is heard, a union of the above."""
        self.peer = peer
        self._decode = msgspec.msgpack.Decoder(list[takes]).decode
        self._loop = asyncio.get_running_loop()
        self._said: list[Any] = []
        self._rest = bytearray()
        self._missed = 0
        self._beats: asyncio.TimerHandle | None = None

    def say(self, *messages: Any) -> None:
        """Send, together with all else of this turn of the loop; to nobody once it is closed."""
        if not self._said:
            self._loop.call_soon(self._flush)
        self._said.extend(messages)

    def heard(self, message: Any) -> None:
        """One message is here."""
        raise NotImplementedError

    def lost(self) -> None:
        """The connection has ended."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start."""
        self.transport = cast(asyncio.Transport, transport)
        self._beats = self._loop.call_later(_BEAT_S, self._beat)

    def _beat(self) -> None:
        """Say that we are here, and see whether they are."""
        self._beats = self._loop.call_later(_BEAT_S, self._beat)
        self._missed += 1
        if self._missed > _MOST_MISSED:
            self.break_off("it hangs")
        elif not self._said:
            self._flush()

    def data_received(self, data: bytes) -> None:
        """Cut into frames; whoever sends no such is cut off."""
        self._missed = 0
        self._rest += data
        at, have = 0, len(self._rest)
        while have - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._rest, at)
            start = at + _SIZE.size
            if size > MAX_FRAME_BYTES:
                self.break_off(f"a frame of {size} bytes")
                return
            if start + size > have:
                break
            at = start + size
            try:
                messages = self._decode(memoryview(self._rest)[start:at])
            except msgspec.DecodeError as error:
                self.break_off(str(error))
                return
            for message in messages:
                self.heard(message)
        if at:
            self._rest = self._rest[at:]

    def break_off(self, why: str) -> None:
        """Something else is spoken there."""
        log.warning("%s: cut off: %s", self.peer, why)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is said."""
        if self._beats is not None:
            self._beats.cancel()
        self.lost()

    def _flush(self) -> None:
        said, self._said = self._said, []
        if self.transport.is_closing():
            return
        try:
            body = _encode(said)
        except (OverflowError, TypeError, ValueError) as error:
            self.break_off(f"this cannot be said: {error}")  # else who waits for it would for ever
            return
        self.transport.write(_SIZE.pack(len(body)) + body)
        if self.transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            self.break_off("it does not listen")
