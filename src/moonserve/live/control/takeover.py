"""What a new gateway takes over of another's index before it says that it is ready.

For several gateways (`several`). The blocks of holders that nobody else tells a newcomer of: those
of a foreign pool, which are known from workers' reports. What the store's master and engines' own
events tell comes from there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable

import msgspec

from moonserve.core.errors import MoonserveError, RegistryError
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.index import Held
from moonserve.core.units import SegmentId
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient

PATH = "/internal/index"
_PAGE = 1_024
"""Keys in one event."""
_MOST_EVENTS_BYTES = 1 << 20
_ANSWER_S = 5.0
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlocksStored).decode


async def tell(
    inventory: Callable[[SegmentId], list[Held]], holders: list[SegmentId]
) -> AsyncIterator[bytes]:
    """All that they hold, event by event, each behind its length; an empty one ends it.

    inventory: what the index knows of one holder.
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
    """Take over what a peer tells; how many blocks that were. Raises MoonserveError."""
    buffer, count = bytearray(), 0
    async with http.stream(
        "GET", url + PATH, headers=bearer(token), timeout_s=_ANSWER_S, idle_timeout_s=_ANSWER_S
    ) as reply:
        if reply.status != 200:
            raise RegistryError(f"{url}{PATH} answers {reply.status}")
        async for chunk in reply:
            buffer += chunk
            while len(buffer) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer)
                if size == 0:
                    return count
                if size > _MOST_EVENTS_BYTES:
                    raise RegistryError(f"{url}{PATH} tells events of {size} bytes")
                end = _LENGTH.size + size
                if len(buffer) < end:
                    break
                event = _read(bytes(buffer[_LENGTH.size : end]), url)
                del buffer[:end]
                take(event)
                count += len(event.keys)
    raise RegistryError(f"{url}{PATH} broke off after {count} blocks")


def _read(body: bytes, url: str) -> BlocksStored:
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise RegistryError(f"{url}{PATH} tells no events: {error}") from None


async def first_of(
    http: HttpClient, urls: list[str], token: str, take: Callable[[BlocksStored], None]
) -> str:
    """Ask one after the other until one has told all; in words, what came of it."""
    why = "there is no other gateway"
    for url in urls:
        try:
            count = await ask(http, url, token, take)
        except MoonserveError as error:
            why = str(error)
        else:
            return f"{count} blocks from {url}"
    return f"incomplete: {why}" if urls else why
