"""Who was refused and told to come again, each at a time of its own; who comes first when they do.

Told the same time, all of a crowd would meet again and all but a few be refused again; told a time
at which newcomers may have taken their place, so would they. So each is told the next free time of
a calendar that is as dense as places become free, and room is kept for those whose time it is, in
so far as those who are told do come: against newcomers of their own tenant, since no tenant is to
wait for another's crowd. One is known again by its tenant, model and prompt. For objectives of a
request's own there may never be room, so that none is kept. Kept by core.schedule.admission;
bounded; knows no instance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from moonserve.core.request import Counted, Request, Slo
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId

_Kind: TypeAlias = tuple[str, str]
_Key: TypeAlias = tuple[str, str, int]
"""Model, tenant, and a hash of the prompt."""
_NOBODY: _Key = ("", "", 0)

LATEST_US: Micros = 60 * MICROS_PER_SECOND
"""OpenAI's clients do as Retry-After says up to this, and else as they like. Whose time is later
comes too early once, and is told the rest."""
_SOONEST_US: Micros = MICROS_PER_SECOND
_EARLY_US: Micros = MICROS_PER_SECOND // 2
"""Clocks differ."""
_GRACE_US: Micros = 3 * MICROS_PER_SECOND
"""Retry-After is in whole seconds, rounded up, and the way here takes some time."""
_AHEAD_US: Micros = MICROS_PER_SECOND
"""A place that is free now is for those whose time is so near."""
_MOST = 4_096
_WEIGHT = 1 / 16
_LEAST_SHARE = 0.1
_GOLDEN = 0.618
_SPARSER, _DENSER, _DENSEST, _SPARSEST = 1.02, 0.995, 1.15, 2.0


class Told:
    """See the module."""

    def __init__(self) -> None:
        self._due: dict[_Key, Micros] = {}
        self._order: list[tuple[Micros, _Key]] = []
        """The same times, sorted, and whose."""
        self._last_us: dict[str, Micros] = {}
        """The latest time that was given out, by model."""
        self._again_us: Micros = 0
        """The same for those who came in time, and in vain."""
        self._back: RequestId | None = None
        """Who came last, where that was in time."""
        self._spread = 0.0
        self._pace = _DENSEST
        """How much sparser the calendar is than it was told to be: as returns find no place."""
        self.share = 1.0
        """Of those who were told, how many come in time, lately."""

    def __len__(self) -> int:
        return len(self._due)

    def came(self, request: Request, now_us: Micros) -> None:
        """A request arrives: it may be one of them. Those whose time is past are forgotten."""
        self._back = None
        if not self._order:
            return
        past_us = now_us - _GRACE_US
        if self._order[0][0] < past_us:
            missed = bisect_left(self._order, (past_us, _NOBODY))
            for _, key in self._order[:missed]:
                del self._due[key]
            del self._order[:missed]
            self.share *= (1 - _WEIGHT) ** missed
        due_us = self._due.get(_key(request))
        if due_us is not None and now_us >= due_us - _EARLY_US:
            self._forget(request)
            self._back = request.id
            self.share += _WEIGHT * (1 - self.share)

    def ahead(self, request: Request, now_us: Micros) -> float:
        """How many are expected about now who go before it: none, if it is its own turn."""
        if not self._order or self._back == request.id:
            return 0.0
        near = self._order[: bisect_left(self._order, (now_us + _AHEAD_US, _NOBODY))]
        kind = _kind(request)
        return self.share * sum([key[:2] == kind for _, key in near])

    def is_due(self, request: Request) -> bool:
        """Whether it came last, and at the time that it was told."""
        return self._back == request.id

    def admitted(self, request: Request) -> None:
        """It found a place."""
        if self._back == request.id:
            self._pace = max(_DENSEST, self._pace * _DENSER)
        elif self._due and _key(request) in self._due:
            self._forget(request)

    def tell(
        self, request: Request, now_us: Micros, first_us: Micros, interval_us: float
    ) -> Micros:
        """How long it is to wait; the same again for one that came before its time.

        It may be more than LATEST_US. first_us: from now until there is one place. interval_us:
        from place to place.
        """
        if (due_us := self._due.get(_key(request))) is not None:
            return max(_SOONEST_US, due_us - now_us)
        if self._back == request.id:  # it had been told too early
            self._pace = min(_SPARSEST, self._pace * _SPARSER)
            due_us = max(now_us + _SOONEST_US, self._again_us + round(interval_us))
            self._again_us = due_us
            if request.model in self._last_us:  # it takes the place of one told later
                self._last_us[request.model] += round(interval_us)
            self._remember(request, due_us)
            return due_us - now_us
        if self.next_us(request.model, now_us) == 0 and not self._order:
            self.share = 1.0  # a crowd of which nothing is known yet
        gap_us = self._pace * max(_LEAST_SHARE, self.share) * interval_us
        due_us = max(now_us + first_us, self._last_us.get(request.model, 0) + round(gap_us))
        wait_us = max(_SOONEST_US, due_us - now_us)
        if len(self._due) >= _MOST or request.slo != Slo() or isinstance(request.prompt, Counted):
            apart = 1 + self._spread / 4  # not at the same time at least
            self._spread = (self._spread + _GOLDEN) % 1.0
            return round(apart * wait_us)
        self._last_us[request.model] = due_us
        self._remember(request, due_us)
        return wait_us

    def next_us(self, model: str, now_us: Micros) -> Micros:
        """How long until the next free time: 0 where nobody was told a later one than now."""
        return max(0, self._last_us.get(model, 0) - now_us)

    def _remember(self, request: Request, due_us: Micros) -> None:
        key = _key(request)
        self._due[key] = due_us
        insort(self._order, (due_us, key))

    def _forget(self, request: Request) -> None:
        key = _key(request)
        del self._order[bisect_left(self._order, (self._due.pop(key), key))]


def _kind(request: Request) -> _Kind:
    """Whom it waits with."""
    return (request.model, request.tenant)


def _key(request: Request) -> _Key:
    """What a request is known by when it comes again; in a simulation none does."""
    if isinstance(request.prompt, Counted):
        return (request.id, "", 0)
    return (*_kind(request), hash(tuple(request.prompt)))
