"""The index of one Conductor as another one takes it over, over HTTP.

Only what a new Conductor gets from no other source is copied: the blocks in Mooncake's pool, which
Conductors know from the reports of workers alone. The store's master and the KV events of engines
report all other blocks. control.in_registry serves `packed`, and calls `first_of` at the start.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

import msgspec

from moonserve.core.errors import UNREADABLE, MoonserveError, RegistryError
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.index import Held
from moonserve.core.units import SegmentId
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient

INDEX_PATH = "/internal/index"
_PAGE = 1_024
"""Keys in one event."""
_MOST_EVENTS_BYTES = 1 << 20
_ANSWER_S = 5.0
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlocksStored).decode


async def packed(
    inventory: Callable[[SegmentId], list[Held]], holders: list[SegmentId]
) -> AsyncIterator[bytes]:
    """All blocks of these holders as events, each after its length; the length 0 ends them.

    inventory: returns the blocks of one holder.
    """
    for holder in holders:
        for keys, parent, tier, epoch in inventory(holder):
            for at in range(0, len(keys), _PAGE):
                part = keys[at : at + _PAGE]
                before = keys[at - 1] if at else parent
                body = _encode(BlocksStored(holder, part, before, tier, epoch))  # type: ignore[arg-type]
                yield _LENGTH.pack(len(body)) + body
            await asyncio.sleep(0)
    yield _LENGTH.pack(0)


async def ask(http: HttpClient, url: str, token: str, take: Callable[[BlocksStored], None]) -> int:
    """Pass all events of a peer to `take`; return how many blocks. Raises MoonserveError."""
    buffer, count = bytearray(), 0
    async with http.stream(
        "GET",
        url + INDEX_PATH,
        headers=bearer(token),
        timeout_s=_ANSWER_S,
        idle_timeout_s=_ANSWER_S,
    ) as reply:
        if reply.status != 200:
            raise RegistryError(f"{url}{INDEX_PATH} answers {reply.status}")
        async for chunk in reply:
            buffer += chunk
            while len(buffer) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer)
                if size == 0:
                    return count
                if size > _MOST_EVENTS_BYTES:
                    raise RegistryError(
                        f"{url}{INDEX_PATH} sends an event of {size} bytes, which is too large"
                    )
                end = _LENGTH.size + size
                if len(buffer) < end:
                    break
                event = _read(bytes(buffer[_LENGTH.size : end]), url)
                del buffer[:end]
                take(event)
                count += len(event.keys)
    raise RegistryError(f"{url}{INDEX_PATH} ended early, after {count} blocks")


def _read(body: bytes, url: str) -> BlocksStored:
    try:
        return _decode(body)
    except UNREADABLE as error:
        raise RegistryError(f"{url}{INDEX_PATH} sends no valid event: {error}") from None


async def first_of(
    http: HttpClient, urls: list[str], token: str, take: Callable[[BlocksStored], None]
) -> str:
    """Ask peers in turn until one has sent all its blocks; return the result in words."""
    why = "there is no other Conductor"
    for url in urls:
        try:
            count = await ask(http, url, token, take)
        except MoonserveError as error:
            why = str(error)
        else:
            return f"{count} blocks from {url}"
    return f"incomplete: {why}" if urls else why
