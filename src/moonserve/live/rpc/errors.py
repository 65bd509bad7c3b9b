"""Errors as they travel in a reply: the name of a class and a text.

live.rpc.connection writes and reads them. An error of another class travels as its nearest base.
"""

from __future__ import annotations

import msgspec

from moonserve.core.errors import (
    UNREADABLE,
    BadRequest,
    DeadlineExceeded,
    MoonserveError,
    NobodyAlive,
    Recovering,
    StoreError,
    UnknownSegment,
)

_CLASSES: dict[str, type[MoonserveError]] = {
    it.__name__: it
    for it in (
        MoonserveError,
        BadRequest,
        DeadlineExceeded,
        NobodyAlive,
        StoreError,
        UnknownSegment,
        Recovering,
    )
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str]).decode


def encoded(error: MoonserveError) -> bytes:
    """The body of a reply that reports this error."""
    name = next(it.__name__ for it in type(error).__mro__ if it.__name__ in _CLASSES)
    return _encode((name, str(error)))


def decoded(body: bytes) -> MoonserveError:
    """The error that the body of a reply reports."""
    try:
        name, text = _decode(body)
    except UNREADABLE as error:
        return MoonserveError(f"the peer reports an error that cannot be decoded: {error}")
    return _CLASSES.get(name, MoonserveError)(text)
