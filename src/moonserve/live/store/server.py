"""The store's master as a service: the bytes of a call in, the bytes of its reply out.

live.store.local uses it for the calls of members, and calls `reap` on a timer. No I/O, no waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonserve.core.errors import BadRequest
from moonserve.core.store.master import Master
from moonserve.core.units import Micros
from moonserve.live.store import wire
from moonserve.live.store.operations import OPERATIONS, Operation, Reply, Request

log = logging.getLogger(__name__)


class MasterService:
    """Runs operations on a master at `now_us()`."""

    def __init__(self, master: Master, now_us: Callable[[], Micros]) -> None:
        self.master = master
        self._now_us = now_us

    def handle(self, op: str, body: bytes) -> bytes:
        """Run one operation of the table and return its encoded reply.

        Raises BadRequest: no such operation, or a malformed body; and what Master raises.
        """
        operation = OPERATIONS.get(op)
        if operation is None:
            there = ", ".join(OPERATIONS)
            raise BadRequest(f"no such store operation: {op!r}; there are {there}", "op")
        return operation.answer(self.master, self._now_us(), body)

    def run(self, operation: Operation[Request, Reply], call: Request) -> Reply:
        """Run one operation without encoding. Raises what Master raises."""
        return operation.run(self.master, self._now_us(), call)

    def keep_alive(self, beat: wire.BeatCall) -> bool:
        """A beat has arrived, whose answer may be held back. False: its segment is not mounted."""
        return self.master.keep_alive(self._now_us(), beat.segment, beat.epoch)

    def reap(self) -> None:
        """Take back what ran out; to be called about once a second."""
        for segment in self.master.reap(self._now_us()):
            log.warning("no beat of segment %s in time: its objects are dropped", segment)
