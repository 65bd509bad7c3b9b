"""Whole objects of any bytes under any key, for programs and people rather than for requests.

It uses a StoreClient on its event loop. A KVStore goes on without what the pool does not give; this
tries again until its time is up, and then raises an error with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from moonserve.core.errors import BadRequest, ConfigError, StoreError
from moonserve.core.store.words import Found, Full, Key, Outcome, OverQuota, PutOptions, TooLarge
from moonserve.core.units import LeaseId
from moonserve.live.store import wire
from moonserve.live.store.client import StoreClient
from moonserve.live.store.link import FAILURES, text

_AGAIN_S = 0.1
_OBJECTS = PutOptions(blocks=False)
_numbers = itertools.count(1)  # numbers of leases: a client may have several Objects


class Objects:
    """Puts and gets of one client. Each takes at most `most_s` and one or two calls more."""

    def __init__(self, client: StoreClient, most_s: float | None = None) -> None:
        """most_s: the longest a put or get may take; None: the client's transfer_s."""
        self._client = client
        self._most_s = most_s or client.settings.transfer_s

    async def put(
        self, items: Sequence[tuple[Key, memoryview]], options: PutOptions = _OBJECTS
    ) -> None:
        """Store up to wire.MAX_BATCH objects, from any buffers. An object that exists stays as it
        is.

        Raises BadRequest at once if a key, a buffer or an option is invalid; it has the field and
        its limit. Raises StoreError unless all objects exist at the end: at once if the pool is
        full or the tenant over its quota. Some objects may exist all the same.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._most_s
        left = _checked(items)
        _check_options(options)
        why = "the segments chosen for it do not answer"
        while left:
            try:
                outcomes = await self._client.write(left, None, None, options)
            except (ConfigError, BadRequest):
                raise
            except FAILURES as error:
                why = text(error)
            else:
                for (key, memory), outcome in zip(left, outcomes, strict=True):
                    _check_outcome(key, len(memory), outcome, options)
                left = [it for it, outcome in zip(left, outcomes, strict=True) if outcome is None]
            if left and loop.time() + _AGAIN_S > end_s:
                raise StoreError(f"{_name(left[0][0])} is not stored: {why}")
            if left:
                await asyncio.sleep(_AGAIN_S)

    async def get(self, keys: Sequence[Key]) -> list[bytearray | None]:
        """Return the bytes of up to wire.MAX_BATCH objects; None: there is no such object.

        Raises BadRequest at once if a key is invalid. Raises StoreError if an object exists, and no
        replica of it can be read in time.
        """
        _check_count(len(keys))
        for key in keys:
            _check_key(key)
        mine = self._client.settings
        lease = LeaseId(f"{mine.segment}-{mine.epoch}-{next(_numbers)}")
        try:
            return await self._get(keys, lease)
        finally:  # always: a reply that was lost may have begun a lease
            await self._client.release(lease)

    async def _get(self, keys: Sequence[Key], lease: LeaseId) -> list[bytearray | None]:
        seen: dict[Key, Found] = {}
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._most_s
        got: dict[Key, bytearray] = {}
        left = list(dict.fromkeys(keys))
        why = ""
        while left:
            try:
                replies = await self._client.get(left, lease)
            except (ConfigError, BadRequest):
                raise
            except FAILURES as error:
                why = text(error)
            else:
                there = [it for it in replies if it is not None]
                buffers = [bytearray(it.size) for it in there]
                into = [memoryview(it) for it in buffers]
                lost = await self._client.fetch(there, into, max(_AGAIN_S, end_s - loop.time()))
                for index, it in enumerate(there):
                    if index not in lost:
                        got[it.key] = buffers[index]
                seen |= {it.key: it for it in there}
                left = [key for key in left if key in seen and key not in got]
                for key in left:
                    if key not in {it.key for it in there}:
                        raise StoreError(f"{_name(key)} is lost: {_where(seen[key])} left the pool")
                why = _where(seen[left[0]]) + " cannot be read" if left else ""
            if left and loop.time() + _AGAIN_S > end_s:
                raise StoreError(f"{_name(left[0])} is out of reach: {why}")
            if left:
                await asyncio.sleep(_AGAIN_S)
        return [got.get(key) for key in keys]


def _checked(items: Sequence[tuple[Key, memoryview]]) -> list[tuple[Key, memoryview]]:
    """Return the items with their buffers as bytes. Raises BadRequest."""
    _check_count(len(items))
    checked = []
    for key, data in items:
        _check_key(key)
        try:
            memory = memoryview(data).cast("B")
        except TypeError:
            kind = type(data).__name__
            raise BadRequest(f"data must be contiguous bytes, not {kind}", "data") from None
        if not 0 < len(memory) <= wire.MAX_OBJECT_BYTES:
            most = wire.MAX_OBJECT_BYTES
            raise BadRequest(f"data must be 1 to {most} bytes, not {len(memory)}", "data")
        checked.append((key, memory))
    return checked


def _check_count(count: int) -> None:
    if count > wire.MAX_BATCH:
        raise BadRequest(f"items must be at most {wire.MAX_BATCH} a call, not {count}", "items")


def _check_key(key: Key) -> None:
    if not isinstance(key, bytes):
        raise BadRequest(f"key must be bytes, not {type(key).__name__}", "key")
    if not 0 < len(key) <= wire.MAX_KEY_BYTES:
        raise BadRequest(f"key must be 1 to {wire.MAX_KEY_BYTES} bytes, not {len(key)}", "key")


def _check_options(options: PutOptions) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(options), PutOptions)
    except (msgspec.ValidationError, TypeError) as error:
        wrong, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`") or "options"
        raise BadRequest(f"{field}: {wrong}", field) from None
    for field, name in (("tenant", options.tenant), ("preferred", options.preferred or "")):
        try:
            length = len(name.encode())
        except UnicodeEncodeError:
            raise BadRequest(f"{field} has half a character, a surrogate", field) from None
        if length > wire.MAX_KEY_BYTES:
            most = wire.MAX_KEY_BYTES
            raise BadRequest(f"{field} must be at most {most} bytes, not {length}", field)
    if not 1 <= options.replicas <= wire.MAX_REPLICAS:
        most = wire.MAX_REPLICAS
        raise BadRequest(f"replicas must be 1 to {most}, not {options.replicas}", "replicas")


def _check_outcome(key: Key, size: int, outcome: Outcome | None, options: PutOptions) -> None:
    """Raise StoreError if trying again cannot help."""
    match outcome:
        case Full():
            why = "all segments are full of what is leased or pinned"
            raise StoreError(f"{_name(key)}: no room for {size} bytes: {why}")
        case TooLarge(largest):
            why = f"the largest segment has {largest}" if largest else "no segment takes objects"
            raise StoreError(f"{_name(key)}: no room for {size} bytes: {why}")
        case OverQuota(tenant, quota):
            raise StoreError(
                f"{_name(key)}: tenant {tenant!r} has a quota of {quota} bytes, all copies counted:"
                f" no room in it for {options.replicas} of {size} bytes"
            )


def _name(key: Key) -> str:
    return f"object {key.hex()}"


def _where(found: Found) -> str:
    """Name the object's segments in a sentence."""
    names = " and ".join(it.segment for it in found.replicas)
    return f"segment {names}, which had it," if len(found.replicas) == 1 else f"segments {names}"
