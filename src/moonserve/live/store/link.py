"""Calls to the store's master, and what this process reports to a master that has restarted.

live.store's client and owners use it on one event loop. A master that has just started refuses
calls with Recovering. The link then claims its recent writes and repeats the call until its time is
up.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from moonserve.core.errors import MoonserveError, Recovering, StoreError
from moonserve.core.store.owners import RecentWrites
from moonserve.core.store.words import Address, Terms
from moonserve.core.units import MICROS_PER_SECOND, Micros, SegmentId, seconds_to_us
from moonserve.live.store import operations, wire
from moonserve.live.store.operations import Operation, Reply, Request

log = logging.getLogger(__name__)
T = TypeVar("T")

Rpc = Callable[[str, bytes, float], Awaitable[bytes]]
"""Runs one operation at the master, until a time on the loop's clock.

May raise MoonserveError or OSError.
"""

FAILURES: Final = (MoonserveError, OSError)  # TimeoutError is an OSError
_AGAIN_S = 0.05


class MasterEnded(StoreError):
    """A call failed after the master had said that its process ends."""


_CLAIM_EVERY_S = 1.0
_TIDY_EVERY_US: Micros = MICROS_PER_SECOND
_KEPT_US: Micros = 30 * MICROS_PER_SECOND
"""How long recent writes are kept: by then owners know them by their beats."""
_PUT_TTL_US: Final = Terms().put_ttl_us  # no command line gives a master another one
_encode = msgspec.msgpack.Encoder().encode


class MasterLink:
    """Calls to one master, the recent writes of this process, and the addresses of segments."""

    def __init__(self, rpc: Rpc, call_s: float) -> None:
        self.rpc = rpc
        self.call_s = call_s
        self.recent = RecentWrites()
        self.addresses: dict[SegmentId, Address] = {}
        self._claimed_s = float("-inf")
        self._tidied_us = 0

    async def call(
        self, operation: Operation[Request, Reply], call: Request, most_s: float | None = None
    ) -> Reply:
        """Run one operation and return its reply, within `most_s` or `call_s`.

        While the master recovers, the call is repeated. Raises MoonserveError or OSError.
        """
        body = _encode(call)
        deadline_s = _now_s() + (most_s or self.call_s)
        while True:
            try:
                answer = await self.rpc(operation.name, body, deadline_s)
                break
            except Recovering:
                await self._claim_at_times(deadline_s)
                if _now_s() + _AGAIN_S > deadline_s:
                    why = "the store's master has started, and still gathers what segments hold"
                    raise Recovering(why) from None
                await asyncio.sleep(_AGAIN_S)
        return operation.reply(answer)

    async def attempt(self, operation: Operation[Request, None], call: Request) -> None:
        """Run one operation whose failure changes nothing for the caller: it is logged."""
        try:
            await self.call(operation, call)
        except FAILURES as error:
            is_expected = operation is operations.UNMOUNT  # a master that is gone forgets by itself
            log_failure(operation.name, error, is_expected)

    async def claim(self) -> None:
        """Report to the master what it may not know: puts and removals of the last half minute."""
        self._claimed_s = _now_s()
        claims, removed = self.recent.claims(now_us(), _PUT_TTL_US)
        for start in range(0, max(len(claims), len(removed)), wire.MAX_BATCH):
            part = slice(start, start + wire.MAX_BATCH)
            await self.attempt(operations.CLAIM, wire.ClaimCall(claims[part], removed[part]))

    def tidy(self) -> None:
        """Forget old writes, at most once a second; to be called after each addition."""
        if now_us() >= self._tidied_us + _TIDY_EVERY_US:
            self._tidied_us = now_us()
            self.recent.forget(self._tidied_us - _KEPT_US)

    async def _claim_at_times(self, deadline_s: float) -> None:
        if _now_s() < self._claimed_s + _CLAIM_EVERY_S:
            return
        try:
            async with asyncio.timeout_at(deadline_s):
                await self.claim()
        except TimeoutError:
            log.debug("store master: no time left to report recent writes")


def now_us() -> Micros:
    """The time of the loop's clock, which recent writes and copies use."""
    return seconds_to_us(_now_s())


def log_failure(what: str, error: BaseException, is_expected: bool = False) -> None:
    """Log that something failed at the master: a warning, unless that was to be expected.

    When a whole cluster stops, the master says that it ends, and is gone before its members.
    """
    is_expected = is_expected or isinstance(error, MasterEnded)
    level = logging.DEBUG if is_expected else logging.WARNING
    log.log(level, "store master: %s failed: %s", what, text(error))


def text(error: BaseException) -> str:
    """Return the text of an error, or its class if it has none."""
    return str(error) or type(error).__name__


async def to_the_end(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await `work` until it is done, also if the caller is cancelled; then let the cancel go on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        ended: asyncio.Future[None] = task.get_loop().create_future()
        task.add_done_callback(functools.partial(_wake, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved; the cancel is raised instead
        raise cancelled
    return task.result()


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
