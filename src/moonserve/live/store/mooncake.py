"""The pool of KV blocks on the real Mooncake Store: KVStore over its MooncakeDistributedStore.

Used from one event loop. An object lies under the hex of its key, with an XXH3-64 of its bytes
behind them: Mooncake does not verify what it brings. Every call runs on a lane (mooncake_calls):
with a deadline, and on memory of the lane's own, from and to which bytes are copied on the loop,
object by object. A call that hangs costs its lane, never a caller's buffer; with all lanes hung,
this is a pool that has nothing.

Mooncake has no leases that one can end: what is found, and what is put under a lease, is kept from
eviction for as long as its master is set to (--default_kv_lease_ttl), and what is put under a lease
is also pinned softly (evicted after the rest). What was evicted all the same, `read` says.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from moonserve.core.errors import ConfigError, StoreError
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.store.words import Found
from moonserve.core.units import LEAST_MOONCAKE_BYTES, BlockKey, Bytes, LeaseId, SegmentId
from moonserve.live.store.mooncake_calls import CallLanes, Lane, called
from moonserve.live.store.reports import POOL, Reports, Tell
from moonserve.live.store.settings import MooncakeProtocol
from moonserve.live.transfer.mooncake_master import require

log = logging.getLogger(__name__)

_SUM_BYTES = 8
_LANE_BYTES = 16 << 20
_NO_SPACE = -200
_EVICTION_S = 0.02  # the master evicts in the background, once a put has found no room
_EVICTION_TRIES = 10
_PIN_MS = 120_000
_ENVIRONMENT = {"MC_LOG_LEVEL": "ERROR"}


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's share in a Mooncake pool."""

    master: str
    """host:port of a mooncake_master."""
    segment_bytes: Bytes
    """Memory lent to the pool; 0: none."""
    host: str = "127.0.0.1"
    """Where the other workers reach this one."""
    protocol: MooncakeProtocol = "tcp"
    device: str = ""
    """For rdma; empty: all that are found."""
    lanes: int = 4
    """Calls at one time."""
    call_s: float = 5.0
    """The longest a call without bytes may take, and the wait for a lane."""
    transfer_s: float = 10.0
    """The longest the bytes of one call may take."""


class MooncakeStore:
    """A KVStore that lends a segment to a Mooncake pool. Made by `open`, ended by `close`.

    The master out of reach is a pool that has nothing, and a warning is logged. A caller that is
    cancelled leaves at once; what Mooncake still does then, it does on a lane.
    """

    def __init__(self, module: Any, store: Any, settings: MooncakeSettings, tell: Tell) -> None:
        """`store` is set up already; `open` does that."""
        self.settings = settings
        self.store = store
        self._module = module
        self._reports = Reports(tell)
        self._lanes = CallLanes(store, settings.lanes, _LANE_BYTES, settings.call_s)

    @classmethod
    async def open(cls, settings: MooncakeSettings, tell: Tell) -> MooncakeStore:
        """Join the pool; `tell` brings the gateway what is put, found and missed there.

        Raises ConfigError where Mooncake cannot work here, StoreError where its master is away.
        """
        require()
        if not settings.master:
            raise ConfigError("mooncake needs its master's host:port", "mooncake_master")
        if 0 < settings.segment_bytes < LEAST_MOONCAKE_BYTES:
            raise ConfigError("Mooncake takes segments of 16MiB and more", "segment_bytes")
        for name, value in {**_ENVIRONMENT, "MC_TCP_BIND_ADDRESS": settings.host}.items():
            os.environ.setdefault(name, value)
        module = await asyncio.to_thread(_load)
        store = module.MooncakeDistributedStore()
        code = await called(
            settings.call_s, store.setup, settings.host, "P2PHANDSHAKE", settings.segment_bytes, 0,
            settings.protocol, settings.device, settings.master,
        )  # fmt: skip
        if code:
            raise StoreError(f"no Mooncake master at {settings.master} (setup gave {code})")
        return cls(module, store, settings, tell)

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        """See KVStore.find. The lease's name means nothing to Mooncake; see the module."""
        if not keys:
            return []
        try:
            exist = await self._exist(keys)
            count = exist.index(0) if 0 in exist else len(keys)
            sizes = await self._sizes(keys[:count]) if count else []
        except StoreError as error:
            log.warning("find: %s", error)
            return []
        if len(sizes) < len(keys):
            self._missed(keys[len(sizes)])
        return [Found(key, size, 0, 0, ()) for key, size in zip(keys, sizes, strict=False)]

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """See KVStore.read. What arrives corrupt is removed."""
        assert [it.size for it in found] == [len(memory) for memory in into]
        good = 0
        for part in _parts([it.size for it in found]):
            good += await self._get(found[part], into[part])
            if good < part.stop:
                self._missed(BlockKey(found[good].key))
                break
        return good

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        """See KVStore.put; `near` has no meaning here."""
        if not items:
            return 0
        keys = [key for key, _ in items]
        try:
            exist = await self._exist(keys)
            new = [item for item, there in zip(items, exist, strict=True) if not there]
            stored: list[BlockKey] = []
            for part in _parts([len(memory) for _, memory in new]):
                stored += await self._set(new[part], lease)
        except StoreError as error:
            log.warning("put: %s", error)
            return 0
        new_keys = set(stored)
        there = [bool(had) or key in new_keys for key, had in zip(keys, exist, strict=True)]
        self._tell_stored(keys, there, parent)
        return sum(there)

    async def release(self, lease: LeaseId) -> None:
        """Nothing: Mooncake's leases end by time alone."""

    async def close(self) -> None:
        """Leave the pool: what lies on this segment is gone. Skipped while a call hangs."""
        await self._reports.close()
        try:
            await self._lanes.close()
            await called(self.settings.call_s, self.store.close)
        except StoreError:
            log.warning("Mooncake does not let go: left without goodbye")

    # Calls, each on a lane
    async def _exist(self, keys: Sequence[BlockKey]) -> list[int]:
        """1 or 0 for each; those that exist are leased."""
        names = [key.hex() for key in keys]
        async with self._lanes.take() as lane:
            codes: list[int] = await lane.run(
                self.settings.call_s, self.store.batch_is_exist, names
            )
        if min(codes) < 0:
            raise StoreError(f"Mooncake's master does not answer (code {min(codes)})")
        return codes

    async def _sizes(self, keys: Sequence[BlockKey]) -> list[Bytes]:
        """Of the leading objects that are still there."""
        names = [key.hex() for key in keys]
        async with self._lanes.take() as lane:
            replicas = await lane.run(
                self.settings.call_s, self.store.batch_get_replica_desc, names
            )
        sizes: list[Bytes] = []
        for name in names:
            held = [it for it in replicas.get(name, ()) if it.is_memory_replica()]
            if not held:
                break
            sizes.append(held[0].get_memory_descriptor().buffer_descriptor.size - _SUM_BYTES)
        return sizes

    async def _get(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """How many leading objects are now in their buffers."""
        names = [it.key.hex() for it in found]
        sizes = [it.size + _SUM_BYTES for it in found]
        try:
            async with self._lanes.take() as lane:
                offsets, places = lane.places(sizes)
                lengths = await lane.run(
                    self.settings.transfer_s, self.store.batch_get_into, names, places, sizes
                )
                for at, offset in enumerate(offsets):
                    if lengths[at] != sizes[at]:
                        return at
                    end = offset + found[at].size
                    if _sum(lane.memory[offset:end]) != lane.memory[end : end + _SUM_BYTES]:
                        log.warning("object %s is corrupt and removed", names[at])
                        call = self.store.remove
                        await lane.run(self.settings.call_s, call, names[at], True)
                        return at
                    into[at][:] = lane.memory[offset:end]
                    await asyncio.sleep(0)
        except StoreError as error:
            log.warning("read: %s", error)
            return 0
        return len(found)

    async def _set(
        self, items: Sequence[tuple[BlockKey, memoryview]], lease: LeaseId | None
    ) -> list[BlockKey]:
        """The keys of those that exist now."""
        sizes = [len(memory) + _SUM_BYTES for _, memory in items]
        try:
            async with self._lanes.take() as lane:
                offsets, places = lane.places(sizes)
                for (_, memory), offset in zip(items, offsets, strict=True):
                    end = offset + len(memory)
                    lane.memory[offset:end] = memory
                    lane.memory[end : end + _SUM_BYTES] = _sum(lane.memory[offset:end])
                    await asyncio.sleep(0)
                names = [key.hex() for key, _ in items]
                codes = await self._write(lane, names, places, sizes, lease)
        except StoreError as error:
            log.warning("put: %s", error)
            return []
        refused = [code for code in codes if code not in (0, _NO_SPACE)]
        if refused:
            log.warning("put: Mooncake refused %d objects (code %d)", len(refused), refused[0])
        return [key for (key, _), code in zip(items, codes, strict=True) if code == 0]

    async def _write(
        self,
        lane: Lane,
        names: Sequence[str],
        places: Sequence[int],
        sizes: Sequence[Bytes],
        lease: LeaseId | None,
    ) -> list[int]:
        """Mooncake's code for each; waits a little for the master to make room.

        What is under a lease is asked for at once, which leases it; evicted before, it is written
        again.
        """
        codes = [_NO_SPACE] * len(names)
        for turn in range(_EVICTION_TRIES):
            left = [at for at, code in enumerate(codes) if code == _NO_SPACE]
            if not left:
                break
            if turn:
                await asyncio.sleep(_EVICTION_S)
            columns = [[column[at] for at in left] for column in (names, places, sizes)]
            put, ask = self.store.batch_put_from, self.store.batch_is_exist
            config = self._config(lease)
            got = await lane.run(self.settings.transfer_s, put, *columns, config)
            if lease is not None:
                held = await lane.run(self.settings.call_s, ask, columns[0])
                got = [
                    _NO_SPACE if code == 0 and there == 0 else code
                    for code, there in zip(got, held, strict=True)
                ]
            for at, code in zip(left, got, strict=True):
                codes[at] = code
        return codes

    def _config(self, lease: LeaseId | None) -> Any:
        """Own memory first."""
        config = self._module.ReplicateConfig()
        config.preferred_segment = self.store.get_hostname()
        if lease is not None:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = _PIN_MS
        return config

    def _tell_stored(
        self, keys: Sequence[BlockKey], there: Sequence[bool], parent: BlockKey | None
    ) -> None:
        run: list[BlockKey] = []
        for key, is_there in zip(keys, there, strict=True):
            if is_there:
                run.append(key)
                continue
            self._stored(run, parent)
            run, parent = [], key
        self._stored(run, parent)

    def _stored(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        if keys:
            self._reports.add(BlocksStored(POOL, tuple(keys), parent, "dram", 0))

    def _missed(self, key: BlockKey) -> None:
        self._reports.add(BlocksRemoved(POOL, (key,), "dram", 0))


def _load() -> Any:
    """Mooncake's library; after `require`, which knows what is most often missing."""
    try:
        from mooncake import store
    except ImportError as error:
        raise ConfigError(f"Mooncake's library does not load here: {error}", "store") from None
    return store


def _sum(memory: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(memory)


def _parts(sizes: Sequence[Bytes]) -> list[slice]:
    """Runs of objects that fit into a lane together; a larger one is a part of its own."""
    parts: list[slice] = []
    start = filled = 0
    for at, size in enumerate(sizes):
        if filled and filled + size + _SUM_BYTES > _LANE_BYTES:
            parts.append(slice(start, at))
            start, filled = at, 0
        filled += size + _SUM_BYTES
    return [*parts, slice(start, len(sizes))] if sizes else []
