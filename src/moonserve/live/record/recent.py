"""GET /api/recording/rows: the latest requests as rows of a recording, for the twin.

The twin (`moonserve twin`) may run on another machine, so it asks the process that decides. Nothing
is kept until somebody asks, and nothing any more once nobody has asked for some minutes. A request
that ends only puts its record into a bounded queue; rows are made in a thread when they are asked
for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from moonserve.core.schedule.record import Record
from moonserve.core.schedule.recorded import RecordedRequest
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Micros, Tokens
from moonserve.live.clock import since_1970_us, wall_ms
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.http.message import HttpRequest, Response, decode_query, json_response

PATH = "/api/recording/rows"
_MOST_KEPT = 4_096
_MOST_KEYS = 1_000_000
"""Of all kept records together: a key takes about 70 bytes."""
_MOST_AT_ONCE = 512
_MOST_UNDER_WAY = 2_048
_MOST_KEYS_AT_ONCE = 200_000
"""Of one reply, or of its first request alone: a key becomes 20 bytes of JSON."""
_WANTED_US: Micros = 300 * MICROS_PER_SECOND


class RowsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /api/recording/rows."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Only rows after this one, by the number that the last reply gave as `last`."""


class RecentRows(msgspec.Struct, frozen=True):
    """What it answers."""

    last: int
    """The number of the last row; they count from the start of this process."""
    more: bool
    """Whether there are more rows after it."""
    rows: list[RecordedRequest]
    """In the order in which requests ended, without their candidates."""
    under_way: list[RecordedRequest]
    """Requests that are not over, the earliest first, with a guess of their output; with the last
    rows only."""
    now_ms: int
    """The time of this reply, in ms since 1970, by the clock of the rows."""


class EndedRequest(NamedTuple):
    """A request whose record is complete, before there is a row of it."""

    record: Record
    keys: Sequence[BlockKey]
    """Of the full blocks of its prompt."""
    since_us: Micros
    """What to add to the record's times, to count from 1970."""


class Recent:
    """The latest requests. `take` runs on the event loop, `row` in a thread."""

    def __init__(
        self,
        conductor: ConductorLoop,
        row: Callable[[EndedRequest, Tokens], RecordedRequest],
    ) -> None:
        """row: makes a row; its second argument is the output of requests that were not served."""
        self._conductor = conductor
        self._row = row
        self._kept: deque[EndedRequest] = deque()
        self._keys = 0
        self._last = 0
        self._wanted_until_us: Micros = 0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody has asked lately."""
        if not self._wanted_until_us:
            return False
        if self._conductor.now_us() <= self._wanted_until_us:
            return True
        self._kept.clear()
        self._keys = 0
        self._wanted_until_us = 0
        return False

    def take(self, ended: EndedRequest) -> None:
        """Keep a request, and drop the oldest ones if there are too many."""
        self._kept.append(ended)
        self._last += 1
        self._keys += len(ended.keys)
        while len(self._kept) > _MOST_KEPT or (self._keys > _MOST_KEYS and len(self._kept) > 1):
            self._keys -= len(self._kept.popleft().keys)

    async def send(self, request: HttpRequest) -> Response:
        """The route."""
        asked = decode_query(request.query, RowsAsked)
        self._wanted_until_us = self._conductor.now_us() + _WANTED_US
        before = self._last - len(self._kept)
        after = max(before, asked.after if asked.after <= self._last else 0)
        chosen = _first(list(self._kept)[after - before :], _MOST_AT_ONCE)
        last = after + len(chosen)
        is_all = last == self._last
        guess = self._guess()
        now_us = self._conductor.now_us()
        now_ms = wall_ms(since_1970_us(now_us))(now_us)
        under_way = self._under_way() if is_all else []

        def made() -> Response:
            rows = [self._made(it, guess) for it in chosen]
            running = [self._made(it, guess) for it in under_way]
            return json_response(RecentRows(last, not is_all, rows, running, now_ms))

        return await asyncio.to_thread(made)

    def _made(self, ended: EndedRequest, guess: Tokens) -> RecordedRequest:
        row = self._row(ended, guess)
        row.candidates = []
        return row

    def _guess(self) -> Tokens:
        """How long the answers of requests are that have none yet: the mean of the kept ones."""
        served = [it.record.measured.tokens for it in self._kept if it.record.is_good is not None]
        return round(sum(served) / len(served)) if served else 0

    def _under_way(self) -> list[EndedRequest]:
        if not self._conductor.instances():
            return []  # perhaps none has ever joined, and the block size is not known
        since_us = since_1970_us(self._conductor.now_us())
        found = [
            EndedRequest(record, record.keys, since_us)
            for record in self._conductor.account.latest()
            if not (record.is_closed and record.ended_us is not None)
        ]
        return _first(found[::-1], _MOST_UNDER_WAY)


def _first(requests: Sequence[EndedRequest], most: int) -> list[EndedRequest]:
    """The first ones, as many as fit into one reply."""
    keys = accumulate(len(it.keys) for it in requests)
    fitting = [it for it, sum_ in zip(requests, keys, strict=True) if sum_ <= _MOST_KEYS_AT_ONCE]
    return list(fitting or requests[:1])[:most]
