"""The pool of KV blocks on the real Mooncake Store: KVStore over its MooncakeDistributedStore.

Used from one event loop. Blocks are kept under the hex of their keys, with an XXH3-64 of the bytes
behind them: Mooncake does not verify what it brings. It calls into C++ that may wait for long, so
every call runs in a daemon thread, with a deadline, and on memory of its own (a lane); bytes are
copied between lanes and callers on the loop. A call that hangs costs its lane, never a caller's
buffer; with all lanes hung, the pool is one that has nothing.

What Mooncake's API does not have: leases that one can end. What is found, and what is put under a
lease, is kept from eviction for the time its master is set to (`--default_kv_lease_ttl`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from moonserve.core.errors import ConfigError, StoreError
from moonserve.core.facts import BlocksRemoved, BlocksStored
from moonserve.core.pool import Found
from moonserve.core.units import BlockKey, Bytes, LeaseId, SegmentId
from moonserve.live.store.mooncake_master import require
from moonserve.live.store.reports import Reports, Tell

log = logging.getLogger(__name__)

POOL = SegmentId("mooncake")
"""The holder's name under which all that lies in this pool is reported."""

_SUM_BYTES = 8
_LANE_BYTES = 16 << 20  # fewer calls gain nothing more from here on
_MIN_SEGMENT_BYTES = 16 << 20
_NO_SPACE = -200
_EVICTION_S = 0.02  # the master evicts in the background once a put found no room
_EVICTION_TRIES = 10
_PIN_MS = 120_000  # evicted after others, until decode has surely fetched it


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's share in a Mooncake pool."""

    master: str
    """host:port of a mooncake_master."""
    segment_bytes: Bytes
    """Memory lent to the pool."""
    host: str = "127.0.0.1"
    """Where the other workers reach this one."""
    lanes: int = 4
    """Calls at one time."""
    call_s: float = 5.0
    """The longest a call without bytes may take, and the wait for a lane."""
    transfer_s: float = 10.0
    """The longest the bytes of one call may take."""


class _Lane:
    """Memory that Mooncake reads and writes, for one call at a time."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.call: asyncio.Future[Any] | None = None
        self._take(_LANE_BYTES)

    def _take(self, size: Bytes) -> None:
        self._array = np.empty(size, np.uint8)
        self.memory = memoryview(self._array)
        self._store.register_buffer(self._array.ctypes.data, size)

    def places(self, sizes: Sequence[Bytes]) -> list[int]:
        """Addresses for values of these sizes, one after another; grows where they need it."""
        if sum(sizes) > len(self.memory):
            self._store.unregister_buffer(self._array.ctypes.data)
            self._take(sum(sizes))
        ends = np.cumsum([0, *sizes[:-1]])
        return [int(end) + self._array.ctypes.data for end in ends]


class MooncakeStore:
    """A KVStore that lends a segment to a Mooncake pool. Made by `open`, ended by `close`.

    The master out of reach is a pool that has nothing, and a warning is logged. A caller that is
    cancelled leaves at once: what Mooncake still does, it does on a lane.
    """

    def __init__(self, store: Any, config: Callable[[], Any], reports: Reports) -> None:
        """`open` does this, with a store that is set up and makers of what it needs."""
        self.store = store
        self._config = config
        self._reports = reports
        self._lanes: asyncio.Queue[_Lane] = asyncio.Queue()
        self.settings = MooncakeSettings(master="", segment_bytes=0)

    @classmethod
    async def open(cls, settings: MooncakeSettings, tell: Tell) -> MooncakeStore:
        """Join the pool; `tell` gets what is put, found and missed there.

        Raises ConfigError where Mooncake is not installed, StoreError where its master is away.
        """
        raise NotImplementedError
