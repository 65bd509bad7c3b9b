"""Blocking calls into Mooncake, from an event loop that must not wait for them.

Used by MooncakeStore. Its C++ may wait for long, and cannot be interrupted: a call runs in a daemon
thread of its own, its caller waits until a deadline at most, and what the call reads and writes is
memory that stays its own until it ends. Nothing here knows what is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from moonserve.core.errors import StoreError
from moonserve.core.units import Bytes


class Lane:
    """Memory that Mooncake may read and write, for one call at a time."""

    def __init__(self, store: Any, size: Bytes) -> None:
        self._store = store
        self.call: asyncio.Future[Any] | None = None
        """The last one."""
        self._allocate(size)

    def _allocate(self, size: Bytes) -> None:
        self._array = np.empty(size, np.uint8)
        self.memory = self._array.data
        self._store.register_buffer(self._array.ctypes.data, size)

    def places(self, sizes: Sequence[Bytes]) -> tuple[list[int], list[int]]:
        """Offsets and addresses for values of these sizes; grows where they need it."""
        if sum(sizes) > len(self.memory):
            self._store.unregister_buffer(self._array.ctypes.data)
            self._allocate(sum(sizes))
        offsets = [sum(sizes[:at]) for at in range(len(sizes))]
        return offsets, [self._array.ctypes.data + offset for offset in offsets]

    async def run(self, within_s: float, call: Callable[..., Any], *args: Any) -> Any:
        """The call's result. Raises StoreError at the deadline; the lane stays taken until it ends.

        Only one may run, and none after one that ran past its deadline.
        """
        self.call = _start(call, args)
        return await _end(self.call, within_s, call)


class CallLanes:
    """A few lanes; the one used last is given first, while it is in the cache."""

    def __init__(self, store: Any, count: int, size: Bytes, wait_s: float) -> None:
        """`wait_s`: the longest wait for a free one."""
        self._count = count
        self._wait_s = wait_s
        self._free: asyncio.LifoQueue[Lane] = asyncio.LifoQueue()
        for _ in range(count):
            self._free.put_nowait(Lane(store, size))

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Lane]:
        """A lane, free again when nothing runs on it any more. Raises StoreError if all hang."""
        lane = await self._get()
        try:
            yield lane
        finally:
            if lane.call is None or lane.call.done():
                self._free.put_nowait(lane)
            else:
                lane.call.add_done_callback(lambda _: self._free.put_nowait(lane))

    async def close(self) -> None:
        """Wait until nothing runs. Raises StoreError if something hangs."""
        for _ in range(self._count):
            await self._get()

    async def _get(self) -> Lane:
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._free.get()
        except TimeoutError:
            raise StoreError("Mooncake does not answer: all calls under way hang") from None


async def called(within_s: float, call: Callable[..., Any], *args: Any) -> Any:
    """A call without a lane. Raises StoreError at the deadline."""
    return await _end(_start(call, args), within_s, call)


def _start(call: Callable[..., Any], args: Sequence[Any]) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def done(results: list[Any]) -> None:
        if results:
            future.set_result(results[0])
        else:
            future.set_exception(StoreError(f"{call.__name__} failed; its thread said how"))

    def run() -> None:
        results: list[Any] = []
        try:
            results.append(call(*args))
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done, results)

    threading.Thread(target=run, name="mooncake", daemon=True).start()
    return future


async def _end(future: asyncio.Future[Any], within_s: float, call: Callable[..., Any]) -> Any:
    done, _ = await asyncio.wait({future}, timeout=within_s)
    if not done:
        raise StoreError(f"Mooncake's {call.__name__} did not end within {within_s:g} s")
    return future.result()
