"""Moves objects' bytes between this process's buffers and segments, verified by checksum.

live.store.client uses it on its event loop. Large copies, and copies through sockets, run in
threads. Small copies of mapped memory run on the loop, since a thread would take longer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import xxhash

from moonserve.core.store.words import Address, Found, Replica, Ticket
from moonserve.core.units import Bytes, SegmentId
from moonserve.live.store.link import MasterLink, to_the_end
from moonserve.live.store.settings import StoreSettings
from moonserve.live.transfer.client import Slice, Transfer
from moonserve.live.transfer.ports import Op

T = TypeVar("T")

_ASIDE_S = 10.0
"""For this long, a segment that did not deliver is read last; by then the master has dropped it."""

_INLINE_BYTES: Bytes = 1 << 20
_SHARE_BYTES: Bytes = 4 << 20
"""Another thread is used for each share of this size."""


class Write(NamedTuple):
    """Bytes, and the extent to which they may be written."""

    ticket: Ticket
    memory: memoryview


class Fetched(NamedTuple):
    """The result of reading some objects, by their indices."""

    missing: list[int]
    """Objects of which no replica arrived whole."""
    corrupt: list[tuple[int, SegmentId]]
    """Replicas whose checksum is wrong."""


class Copier:
    """Reads and writes by one Transfer, in threads; the link has the addresses of segments."""

    def __init__(
        self, link: MasterLink, transfer: Transfer, threads: Executor, settings: StoreSettings
    ) -> None:
        """settings: they have the node and rack of this process."""
        self._link = link
        self._node = settings.node or settings.segment
        self._rack = settings.rack
        self._transfer = transfer
        self._threads = threads
        self._aside_s: dict[SegmentId, float] = {}
        """Until when each segment that did not deliver is read last."""
        self._cores = min(settings.threads, os.cpu_count() or 1)

    async def read(
        self, found: Sequence[Found], into: Sequence[memoryview], most_s: float
    ) -> Fetched:
        """Fill the buffers: from the nearest replica of each object, then from the others in turn.

        Each turn gets its share of the time, so that one silent peer leaves some for the others.
        """
        end_s = time.monotonic() + most_s
        missing = list(range(len(found)))
        corrupt = []
        known = self._link.addresses  # a beat may replace it meanwhile
        orders = [self._near_first(it.replicas, known) for it in found]
        turns = max(map(len, orders), default=0)
        for turn in range(turns):
            groups: dict[SegmentId, list[int]] = {}
            for index in missing:
                if turn < len(orders[index]):
                    groups.setdefault(orders[index][turn].segment, []).append(index)
            now_s = time.monotonic()
            deadline_s = now_s + (end_s - now_s) / (turns - turn)
            jobs, asked = [], []
            for segment, indices in groups.items():
                address = known[segment]
                for share in self._shares(address, indices, into):
                    slices = [Slice(orders[i][turn].offset, into[i]) for i in share]
                    sums = [found[i].checksum for i in share]
                    asked.append((segment, len(share)))
                    jobs.append(
                        self._run(address, slices, self._fetch, segment, share, sums, deadline_s)
                    )
            good: set[int] = set()
            for (segment, count), (fetched, bad) in zip(asked, await _all(jobs), strict=True):
                good.update(fetched)
                corrupt += bad
                if len(fetched) + len(bad) < count:
                    self._put_aside(segment)
            missing = [index for index in missing if index not in good]
            if not missing:
                break
        return Fetched(missing, corrupt)

    async def write(self, writes: Sequence[Write], most_s: float) -> list[int | None]:
        """Write each to its extent and return the checksums; None: not all bytes were written."""
        deadline_s = time.monotonic() + most_s
        groups: dict[SegmentId, list[int]] = {}
        for index, write in enumerate(writes):
            groups.setdefault(write.ticket.segment, []).append(index)
        jobs = []
        memories = [write.memory for write in writes]
        for segment, indices in groups.items():
            address = self._link.addresses[segment]
            for share in self._shares(address, indices, memories):
                slices = [Slice(writes[i].ticket.offset, memories[i]) for i in share]
                jobs.append(self._run(address, slices, self._send, share, deadline_s))
        sums: list[int | None] = [None] * len(writes)
        for sent in await _all(jobs):
            for index, checksum in sent:
                sums[index] = checksum
        return sums

    def _put_aside(self, segment: SegmentId) -> None:
        now_s = time.monotonic()
        self._aside_s = {name: at_s for name, at_s in self._aside_s.items() if at_s > now_s}
        self._aside_s[segment] = now_s + _ASIDE_S

    def _near_first(
        self, replicas: Sequence[Replica], known: Mapping[SegmentId, Address]
    ) -> Sequence[Replica]:
        """Return the replicas that can be reached, in the order in which to read them.

        Mapped memory comes first, then memory before disk; among these the same node, then the same
        rack, then others. Replicas on segments that lately did not deliver come last.
        """
        reachable = [it for it in replicas if it.segment in known]
        if len(reachable) > 1:
            now_s = time.monotonic()
            reachable.sort(
                key=lambda it: (
                    self._aside_s.get(it.segment, now_s) > now_s,
                    self._distance(known[it.segment]),
                )
            )
        return reachable

    def _distance(self, address: Address) -> int:
        if self._transfer.is_near(address):
            return 0
        disk = 0 if address.region else 3
        if address.location.partition(":")[0] == self._node:
            return disk + 1
        return disk + (2 if self._rack and address.rack == self._rack else 3)

    def _shares(
        self, address: Address, indices: Sequence[int], memories: Sequence[memoryview]
    ) -> list[Sequence[int]]:
        """Divide the objects among cores for mapped memory. Through sockets, the transfer has
        lanes."""
        size = sum(len(memories[i]) for i in indices)
        count = min(self._cores, size // _SHARE_BYTES) if self._transfer.is_near(address) else 1
        each = -(-len(indices) // max(1, count))
        return [indices[at : at + each] for at in range(0, len(indices), each)]

    async def _run(
        self, address: Address, slices: Sequence[Slice], copy: Callable[..., T], *args: Any
    ) -> T:
        """Run a copying function in a thread, or here if that is faster."""
        size = sum(len(piece.memory) for piece in slices)
        in_memory = bool(address.region)  # a disk may be slow
        if size <= _INLINE_BYTES and in_memory and self._transfer.is_near(address):
            return copy(address, slices, *args)
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._threads, copy, address, slices, *args)
        return await to_the_end(copying)

    def _fetch(
        self,
        address: Address,
        slices: Sequence[Slice],
        segment: SegmentId,
        indices: Sequence[int],
        checksums: Sequence[int],
        deadline_s: float,
    ) -> tuple[list[int], list[tuple[int, SegmentId]]]:
        """Copy and verify; return the good ones and the corrupt ones."""
        good, corrupt = [], []
        sums = self._sums("read", address, slices, deadline_s)
        for index, checksum, got in zip(indices, checksums, sums, strict=True):
            if got == checksum:
                good.append(index)
            elif got is not None:
                corrupt.append((index, segment))
        return good, corrupt

    def _send(
        self, address: Address, slices: Sequence[Slice], indices: Sequence[int], deadline_s: float
    ) -> list[tuple[int, int | None]]:
        """Copy and return the checksum of each; None: not all bytes were written."""
        return list(zip(indices, self._sums("write", address, slices, deadline_s), strict=True))

    def _sums(
        self, op: Op, address: Address, slices: Sequence[Slice], deadline_s: float
    ) -> list[int | None]:
        """Copy the slices and return the checksum of each; None: not all bytes arrived."""
        run = self._transfer.read if op == "read" else self._transfer.write
        return [
            xxhash.xxh3_64_intdigest(it.memory) if here else None
            for it, here in zip(slices, run(address, slices, deadline_s), strict=True)
        ]


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results once all jobs have ended, also if one fails or the caller is cancelled.

    So no thread is still copying afterwards. A single job needs no task of its own.
    """
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    await to_the_end(asyncio.gather(*tasks, return_exceptions=True))
    return [task.result() for task in tasks]
