"""Units and ids: the words every other module uses.

Quantities are plain integers whose unit is the last word of the name (`_us`, `_bytes`, tokens);
the aliases below document signatures. Ids are NewTypes, so that two kinds cannot be swapped.
"""

from typing import Final, NewType, TypeAlias

Micros: TypeAlias = int
"""Microseconds, from whatever epoch the driver's clock has."""
Tokens: TypeAlias = int
"""A count of tokens."""
Bytes: TypeAlias = int
"""A count of bytes."""

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
SegmentId = NewType("SegmentId", str)
"""A store segment; by convention the id of the instance that owns the memory."""
LeaseId = NewType("LeaseId", str)
"""Names everything one reader keeps from eviction; by convention the request's id."""
BlockKey = NewType("BlockKey", bytes)
"""The name of one KV block, such as a chained SHA-256 over its tokens and all before it."""

MICROS_PER_SECOND = 1_000_000
_WHOLE: Final = 6_755_399_441_055_744.0
"""3 * 2 ** 51: a float of this size has no room for a fraction."""
_MOST_DIGITS = 18
_SHOWN_IN_SECONDS_US: Micros = 9_999_500
"""Four digits of milliseconds show no longer time."""
MAX_BYTES: Bytes = 1 << 62
"""No size is larger: it exceeds every pool, and every wire format can carry it."""

LEAST_MOONCAKE_BYTES: Bytes = 16 << 20
"""Mooncake's store takes no smaller segment."""


def seconds_to_us(seconds: float) -> Micros:
    """Convert seconds to whole microseconds."""
    return round(seconds * MICROS_PER_SECOND)


def shown_us(time_us: Micros) -> str:
    """A time for a reader: "0.155 ms", "2228 ms", or "25.5 s" from 10 s on."""
    if time_us < _SHOWN_IN_SECONDS_US:
        return f"{time_us / 1e3:.4g} ms"
    return f"{round(time_us / MICROS_PER_SECOND, 1):.10g} s"


def nearest(number: float) -> int:
    """`round(number)` for numbers below 2 ** 51. In compiled core it takes a twentieth of that."""
    return int(number + _WHOLE - _WHOLE)


def whole_number(text: str) -> int | None:
    """The number that at most 18 digits are; None: the text is something else. Python itself takes
    other digits than 0 to 9, and raises ValueError for thousands of them."""
    return int(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal() else None


def lease_of(request: RequestId, number: int) -> LeaseId:
    """The lease that prefill call `number` of a request takes on the store, and its decode call
    after it.

    Each attempt has its own, so that the late end of an aborted attempt ends no other lease.
    """
    return LeaseId(f"{request}/{number}")
