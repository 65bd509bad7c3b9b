"""The frames of KV events, in all versions of vLLM and in SGLang's form of them.

A batch is [topic, sequence number u64 big-endian, msgpack [seconds, [event…], data-parallel rank]].
An event is a map with a `type` (vLLM since 0.24, newest SGLang) or an array that begins with the
type (vLLM up to 0.20, SGLang). Fields may be missing at the end, and there may be unknown ones.
SGLang has a salt in a field of its own; vLLM has it among the extra keys of a block. A replay is
requested with [empty, first number] and answered with [empty, topic, number, payload]…; vLLM up to
0.24 and SGLang leave out the topic. It ends with the number -1. Called by subscriber and publisher.

What never happens here: an exception other than BadFrame because of what others sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, MoonserveError
from moonserve.core.kv.events import ClearedEvent, KvBatch, KvEvent, RemovedEvent, StoredEvent

END_SEQ = (1 << 64) - 1
"""The number that ends a replay: -1 as u64."""


class EventAddress(msgspec.Struct, frozen=True):
    """Where one engine rank publishes its KV events, as ZMQ addresses."""

    endpoint: str
    """Such as tcp://10.0.0.7:5557; rank N publishes at the port N higher."""
    replay: str = ""
    """Where it replays past events; empty: nowhere."""
    topic: str = ""
    """A prefix of the topics to follow; empty: all."""
    curve: bool = False
    """Whether both addresses are encrypted by CURVE."""


class BadFrame(MoonserveError):
    """A received message is not a batch of KV events."""


class _StoredArray(StoredEvent, frozen=True, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(RemovedEvent, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(ClearedEvent, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


_Form = TypeVar("_Form")


class _Batch(msgspec.Struct, Generic[_Form], frozen=True, array_like=True):
    ts: float
    events: list[_Form]
    data_parallel_rank: int | None = None


_map = msgspec.msgpack.Decoder(_Batch[StoredEvent | RemovedEvent | ClearedEvent])
_array = msgspec.msgpack.Decoder(_Batch[_StoredArray | _RemovedArray | _ClearedArray])
_any = msgspec.msgpack.Decoder(_Batch[Any])
_encoder = msgspec.msgpack.Encoder()
_KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_SALT = "cache_salt"
_SHARED = 7
"""Leading items of an array from SGLang that are like vLLM's, with the type."""


def decode_batch(payload: bytes) -> KvBatch:
    """Read one batch. Events of unknown types are left out and counted. Raises BadFrame."""
    salted = _SALT.encode() in payload
    for decoder in () if salted else (_map, _array):
        try:
            it = decoder.decode(payload)
        except UNREADABLE:
            continue
        return KvBatch(it.ts, tuple(it.events), it.data_parallel_rank)
    return _decode_slowly(payload)


def _decode_slowly(payload: bytes) -> KvBatch:
    """The same, event by event: both forms and unknown types may be mixed."""
    try:
        it = _any.decode(payload)
        events = [event for event in map(_event, it.events) if event is not None]
    except UNREADABLE as error:
        raise BadFrame(f"not a batch of KV events: {error}") from None
    unknown = len(it.events) - len(events)
    return KvBatch(it.ts, tuple(events), it.data_parallel_rank, unknown)


def _event(raw: Any) -> KvEvent | None:
    """One event; None: its type is unknown. Raises msgspec.ValidationError."""
    if isinstance(raw, dict):
        if raw.get("type") in _KNOWN:
            return _salted(
                msgspec.convert(raw, StoredEvent | RemovedEvent | ClearedEvent), raw.get(_SALT)
            )
    elif isinstance(raw, list) and raw:
        if raw[0] in _KNOWN:
            more = raw[_SHARED] if len(raw) > _SHARED and raw[0] == "BlockStored" else None
            if isinstance(more, dict | list):  # SGLang's
                raw = raw[:_SHARED]
            event = msgspec.convert(raw, _StoredArray | _RemovedArray | _ClearedArray)
            return _salted(event, more.get(_SALT) if isinstance(more, dict) else None)
    else:
        raise msgspec.ValidationError("an event is a map or an array")
    return None


def _salted(event: KvEvent, salt: object) -> KvEvent:
    """The event with SGLang's salt where vLLM has it: among the keys of a chain's first block."""
    if not isinstance(event, StoredEvent) or not isinstance(salt, str) or not salt:
        return event
    if event.parent_block_hash is not None or any(event.extra_keys or ()):
        return event
    return msgspec.structs.replace(event, extra_keys=[[salt]])


def encode_batch(ts: float, events: Sequence[KvEvent], dp_rank: int) -> bytes:
    """One batch as vLLM 0.32 writes it."""
    return _encoder.encode(_Batch(ts, list(events), dp_rank))


def read_live(frames: Sequence[bytes]) -> tuple[int, KvBatch]:
    """Sequence number and batch of a published message. Raises BadFrame."""
    if len(frames) != 3:
        raise BadFrame(f"{len(frames)} frames, not 3")
    return _number(frames[1]), decode_batch(frames[2])


def read_replayed(frames: Sequence[bytes]) -> tuple[int, KvBatch] | None:
    """Sequence number and batch of a replay's answer; None: the replay ends. Raises BadFrame."""
    if not 3 <= len(frames) <= 4 or frames[0]:
        raise BadFrame(f"{len(frames)} frames are no answer to a replay")
    number = _number(frames[-2])
    return None if number == END_SEQ else (number, decode_batch(frames[-1]))


def _number(frame: bytes) -> int:
    if len(frame) != 8:
        raise BadFrame(f"a sequence number of {len(frame)} bytes, not 8")
    return int.from_bytes(frame, "big")


def replay_request(since: int) -> list[bytes]:
    """The frames that ask for all kept batches from number `since` on."""
    return [b"", since.to_bytes(8, "big")]


def replay_since(request: Sequence[bytes]) -> int | None:
    """The number in a request for a replay; None: it is malformed."""
    if len(request) != 2 or request[0] or len(request[1]) != 8:
        return None
    return _number(request[1])


def batch_frames(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    """The frames of a published batch."""
    return [topic, number.to_bytes(8, "big"), payload]


def replay_answer(topic: bytes, number: int | None, payload: bytes) -> list[bytes]:
    """The frames of one message of a replay; number None: the replay ends."""
    return [b"", *batch_frames(topic, END_SEQ if number is None else number, payload)]
