"""The Retry-After calendar: when each refused client should return, and which are expected now.

If every refused client got the same Retry-After, they would all return together and most would be
refused again. If new requests took the places meanwhile, so would they. So every refused client
gets the next free time of a calendar that is as dense as places become free. Room is kept for those
clients that are due, as far as refused clients do return: against new requests of their own tenant
only, since no tenant is to wait for the clients of another. A request with objectives of its own
may never find room, so no room is kept for it.

A client that returns is recognised by its Client key, which arrives on every road. The Conductor
keeps the calendar; it is bounded and knows no instance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from moonserve.core.request import Request, Slo
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Micros, RequestId, Tokens

LATEST_US: Micros = 60 * MICROS_PER_SECOND
"""OpenAI's clients obey a Retry-After up to this. A client whose time is later returns too early
once, and is given the rest."""
_SOONEST_US: Micros = MICROS_PER_SECOND
_EARLY_US: Micros = MICROS_PER_SECOND // 2
"""A client may return so much early: clocks differ."""
_GRACE_US: Micros = 3 * MICROS_PER_SECOND
"""A client may return so much late: Retry-After is in whole seconds, and the way takes time."""
_AHEAD_US: Micros = MICROS_PER_SECOND
"""A place that is free now is kept for clients that are due this soon."""
_MOST = 4_096
_WEIGHT = 1 / 16
_LEAST_SHARE = 0.1
_GOLDEN = 0.618
_SPARSER = 1.02
_DENSER = 0.995
_DENSEST = 1.15
_SPARSEST = 2.0


class ReturningClient(NamedTuple):
    """What a refused request is recognised by when its client sends it again."""

    model: str
    tenant: str
    last_key: BlockKey
    """Of the last full block of its prompt, which names all tokens up to there."""
    length: Tokens


def client_of(request: Request, keys: Sequence[BlockKey]) -> ReturningClient | None:
    """The client of a request that arrives with these keys.

    None: a prompt without a full block has no key, and its client is not recognised.
    """
    return (
        ReturningClient(request.model, request.tenant, keys[-1], request.length) if keys else None
    )


_FIRST = ReturningClient("", "", BlockKey(b""), 0)
"""Is sorted before every other."""


class RetryCalendar:
    """See the module. `returns` False: clients never return, as in a simulation.

    keys: those of the prompt as it arrived, by which its client is recognised.
    """

    def __init__(self, returns: bool = True) -> None:
        self._returns = returns
        self._due: dict[ReturningClient, Micros] = {}
        self._order: list[tuple[Micros, ReturningClient]] = []
        """The same times, sorted, with their clients."""
        self._last_us: dict[str, Micros] = {}
        """The latest time that was given out, by model."""
        self._again_us: Micros = 0
        """The latest time that was given to a client that returned in time and was refused."""
        self._back: RequestId | None = None
        """The request that arrived last, if its client returned in time."""
        self._spread = 0.0
        self._pace = _DENSEST
        """How much sparser the calendar is than free places: as returning clients find none."""
        self.share = 1.0
        """The share of refused clients that return in time, lately."""

    def __len__(self) -> int:
        return len(self._due)

    def arrive(self, request: Request, keys: Sequence[BlockKey], now_us: Micros) -> None:
        """A request arrives: its client may be a returning one. Times that are past are dropped."""
        self._back = None
        if not self._order:
            return
        past_us = now_us - _GRACE_US
        if self._order[0][0] < past_us:
            missed = bisect_left(self._order, (past_us, _FIRST))
            for _, key in self._order[:missed]:
                del self._due[key]
            del self._order[:missed]
            self.share *= (1 - _WEIGHT) ** missed
        client = client_of(request, keys)
        due_us = None if client is None else self._due.get(client)
        if client is not None and due_us is not None and now_us >= due_us - _EARLY_US:
            self._forget(client)
            self._back = request.id
            self.share += _WEIGHT * (1 - self.share)

    def ahead(self, request: Request, now_us: Micros) -> float:
        """How many clients are expected about now that go before it: 0.0, if it is due itself."""
        if not self._order or self._back == request.id:
            return 0.0
        near = self._order[: bisect_left(self._order, (now_us + _AHEAD_US, _FIRST))]
        model = request.model
        tenant = request.tenant
        return self.share * sum([c.model == model and c.tenant == tenant for _, c in near])

    def is_due(self, request: Request) -> bool:
        """Whether it arrived last, and at the time that its client was given."""
        return self._back == request.id

    def admit(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """The request found a place: its client will not return for it."""
        if self._back == request.id:
            self._pace = max(_DENSEST, self._pace * _DENSER)
        elif self._due:
            client = client_of(request, keys)
            if client is not None and client in self._due:
                self._forget(client)

    def book(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        now_us: Micros,
        first_us: Micros,
        interval_us: float,
    ) -> Micros:
        """Book the next free time for a refused client; returns how long it should wait.

        A client that returned before its time keeps that time. The wait may exceed LATEST_US.
        first_us: from now until there is one place. interval_us: from place to place.
        """
        client = client_of(request, keys)
        due_us = None if client is None else self._due.get(client)
        if due_us is not None:
            return max(_SOONEST_US, due_us - now_us)
        if client is not None and self._back == request.id:  # its time was too early
            self._pace = min(_SPARSEST, self._pace * _SPARSER)
            due_us = max(now_us + _SOONEST_US, self._again_us + round(interval_us))
            self._again_us = due_us
            if request.model in self._last_us:  # it takes the place of a client with a later time
                self._last_us[request.model] += round(interval_us)
            self._remember(client, due_us)
            return due_us - now_us
        if self.next_us(request.model, now_us) == 0 and not self._order:
            self.share = 1.0  # a crowd of which nothing is known yet
        gap_us = self._pace * max(_LEAST_SHARE, self.share) * interval_us
        due_us = max(now_us + first_us, self._last_us.get(request.model, 0) + round(gap_us))
        wait_us = max(_SOONEST_US, due_us - now_us)
        keeps_room = self._returns and request.slo == Slo() and len(self._due) < _MOST
        if client is None or not keeps_room:
            apart = 1 + self._spread / 4  # not at the same time at least
            self._spread = (self._spread + _GOLDEN) % 1.0
            return round(apart * wait_us)
        self._last_us[request.model] = due_us
        self._remember(client, due_us)
        return wait_us

    def next_us(self, model: str, now_us: Micros) -> Micros:
        """How long until the latest time that was given out; 0 where that is past."""
        return max(0, self._last_us.get(model, 0) - now_us)

    def _remember(self, client: ReturningClient, due_us: Micros) -> None:
        self._due[client] = due_us
        insort(self._order, (due_us, client))

    def _forget(self, client: ReturningClient) -> None:
        due_us = self._due.pop(client)
        del self._order[bisect_left(self._order, (due_us, client))]
