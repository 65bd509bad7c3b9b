"""How much of a large body is structure and not text, found in small steps.

`Front` calls it before a large body is decoded: to decode text is quick, to decode structure is
slow, and an honest body has little of it. It parses nothing, and it never keeps the loop for long.
"""

from __future__ import annotations

import asyncio
import re

from moonserve.core.errors import BadRequest
from moonserve.core.units import Bytes

_PIECE_BYTES: Bytes = 64 << 10
_MARK_BYTES: Bytes = 8
"""A quotation mark counts as so many bytes: two of them are one object to decode."""
_BACKSLASHES = re.compile(rb"\\*")


async def check_structure(body: bytes, most: Bytes) -> Bytes:
    """Return how many bytes of this JSON are outside strings; each string counts as 16 of them.

    Raises BadRequest if there are more than `most`.
    """
    outside = 0
    is_inside = False
    at = 0
    while at < len(body):
        end = _end_of_piece(body, at)
        piece = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside += sum(map(len, parts[is_inside::2])) + _MARK_BYTES * (len(parts) - 1)
        if outside > most:
            raise BadRequest(
                f"request body: has more than {most} bytes outside strings, with 16 for each"
                " string; send text as one string, fewer token ids, or fewer fields"
            )
        if len(parts) % 2 == 0:
            is_inside = not is_inside
        at = end
        await asyncio.sleep(0)
    return outside


def _end_of_piece(body: bytes, at: int) -> int:
    """Where the next piece ends: never within an escape."""
    end = at + _PIECE_BYTES
    if body[end - 1 : end] != b"\\":
        return end
    run = _BACKSLASHES.match(body, end)
    return (end if run is None else run.end()) + 1
