"""Which requests wait at the Conductor, and which goes next: the order of late binding.

Requests wait here rather than in the queue of one instance. So a long prompt does not delay
requests that could have gone elsewhere, and the order can still be chosen. The seconds that a
request takes from those behind it count beside its own TTFT, and more so as load grows:

- Every request has a time by which its prefill must begin: its TTFT objective, less its own work
  (without an objective, PATIENCE_US). While all can begin in time, the shortest goes first, unless
  that could make an earlier one late. So all wait the fewest seconds together.
- If they cannot all begin in time, the largest are deferred, as few as possible: the rule of Moore
  and Hodgson ("An n job, one machine sequencing algorithm", 1968), with the time of several servers
  taken as one fluid.
- While more than PATIENCE_US of work waits for each instance, and more comes than they can do, all
  requests above a size are deferred: the size that would bring the load of the last WINDOW_US back
  to what they can do.
- Deferred requests go when no other request waits, and else get SHARE of the prefill time, first
  come first served. That bounds their wait: a request with W seconds of deferred work before it,
  its own included, begins by the time that W / SHARE seconds of prefill were given to others.
- Tenants take turns by the prefill time that they received (start-time fair queueing; Goyal, Vin
  and Cheng, 1996). The rules above are the order within the tenant whose turn it is.

Only the Conductor calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

import msgspec

from moonserve.core.request import Request, Slo
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId

PATIENCE_US: Micros = 30 * MICROS_PER_SECOND
WINDOW_US: Micros = 120 * MICROS_PER_SECOND
SHARE = 0.02
_MARGIN = 1 / 15
"""The margin, as a share of PATIENCE_US or of the objective: predictions err."""
_MOST_TENANTS = 256
"""The most tenants whose received time is kept."""


class Waiter(msgspec.Struct, frozen=True):
    """One request that waits."""

    request: RequestId
    priority: int
    arrived_us: Micros
    work_us: Micros
    """Prefill time it will take, as predicted when it came."""
    due_us: Micros | None
    """Its prefill must begin by then to meet its TTFT objective; None: it has none."""
    resumed: bool = False
    """Whether its instance failed after it was bound: then it goes first within its priority."""
    tbt_us: Micros | None = None
    """Its TBT objective."""
    tenant: str = ""

    @classmethod
    def of(
        cls, request: Request, slo: Slo, came_us: Micros, work_us: Micros, resumed: bool
    ) -> Waiter:
        """A request that arrived at `came_us`. A resumed one has no TTFT objective: its client may
        have tokens already."""
        due_us = None if slo.ttft_us is None or resumed else came_us + slo.ttft_us - work_us
        return cls(
            request.id,
            request.priority,
            came_us,
            work_us,
            due_us,
            resumed,
            slo.tbt_us,
            request.party.name,
        )

    @property
    def begin_us(self) -> Micros:
        """The time by which it should begin."""
        if self.due_us is not None:
            return self.due_us
        return max(self.arrived_us, self.arrived_us + PATIENCE_US - self.work_us)

    def safe_us(self, margins: float) -> Micros:
        """The time by which it should begin if predictions err by this many margins."""
        allowed_us = self.begin_us + self.work_us - self.arrived_us
        return self.begin_us - round(margins * _MARGIN * max(0, allowed_us))

    def turn(self, now_us: Micros) -> tuple[Micros, bool, Micros]:
        """First come first served. Of one instant: those that can be in time, the shortest
        first."""
        return (self.arrived_us, self.begin_us < now_us, self.work_us)

    @property
    def order(self) -> tuple[int, bool, Micros, Micros, RequestId]:
        """By priority, then resumed ones first, then the earliest begin."""
        return (-self.priority, not self.resumed, self.begin_us, self.arrived_us, self.request)


class WaitingRoom:
    """The requests of one model that wait for a prefill instance.

    It is kept when no request waits: recent arrivals show how much is too much.
    """

    def __init__(self) -> None:
        self._timely: list[Waiter] = []
        """By `order`."""
        self._late: list[Waiter] = []
        """Requests past the time by which they should have begun, by arrival."""
        self._arrivals = _Arrivals()
        self._owed_us = 0.0
        """Prefill time that deferred requests may claim."""
        self._repays = False
        """Whether the request that `next` returned last is a deferred one."""
        self.work_us: Micros = 0
        """Prefill time of all that wait."""
        self._of: Counter[str] = Counter()
        """The number of waiting requests, by tenant."""
        self._given_us: dict[str, Micros] = {}
        self._turn_us: Micros = 0
        """Virtual time of the turns; `_given_us` holds when a tenant's next turn begins, if
        later."""
        self.crowded: set[RequestId] = set()
        """Requests that at the last try could not go only for lack of room in decode."""

    def __len__(self) -> int:
        return len(self._timely) + len(self._late)

    def add(self, waiter: Waiter) -> None:
        """Add a request."""
        insort(self._timely, waiter, key=lambda w: w.order)
        self.work_us += waiter.work_us
        self._of[waiter.tenant] += 1
        if not waiter.resumed:
            self._arrivals.add(waiter)

    def everybody(self) -> list[Waiter]:
        """All waiting requests, those past their time first."""
        return [*self._late, *self._timely]

    def crowd(self, waiter: Waiter, is_late: bool) -> None:
        """Decode has no room for this one, nor for any whose TBT objective is not looser.

        A shorter one might fit, but would take the room that this one waits for. No request passes
        one that should have begun by now.
        """
        goal_us = None if is_late else waiter.tbt_us
        for other in self.everybody():
            if goal_us is None or (other.tbt_us is not None and other.tbt_us <= goal_us):
                self.crowded.add(other.request)

    def remove(self, request: RequestId) -> Waiter | None:
        """Remove a request; None if it does not wait here."""
        for waiters in (self._timely, self._late):
            for at, waiter in enumerate(waiters):
                if waiter.request == request:
                    self.work_us -= waiter.work_us
                    self._of[waiter.tenant] -= 1
                    self._of += Counter()  # tenants without a waiting request are forgotten
                    return waiters.pop(at)
        return None

    def gives_way(self, request: Request) -> RequestId:
        """The request that is one too many when this one arrives: of the lowest priority, the last
        of the tenant with the most waiting requests."""
        waiting = [w for w in self.everybody() if not w.resumed]
        ranks = [(-w.priority, self._of[w.tenant], w.arrived_us, w.request) for w in waiting]
        last = max(ranks, default=None)
        if last is None or last[:2] <= (-request.priority, self._of[request.party.name]):
            return request.id
        return last[-1]

    def hopeless(self, now_us: Micros) -> list[Waiter]:
        """The requests that can no longer meet their objective, in order of arrival."""
        self._part(now_us)
        return [w for w in self._late if w.due_us is not None]

    def first_due_us(self, now_us: Micros) -> Micros | None:
        """When the next request becomes hopeless; those that are hopeless now do not count."""
        due = (w.due_us for w in self._timely if w.due_us is not None and w.due_us >= now_us)
        return min(due, default=None)

    def wakes_us(
        self, now_us: Micros, free_us: Sequence[Micros], ahead_us: Micros, refuses: bool
    ) -> list[Micros]:
        """When to look again: a request becomes hopeless, or an instance is about to be free."""
        if not len(self):
            return []
        due_us = self.first_due_us(now_us) if refuses else None
        times = [] if due_us is None else [due_us + 1]
        return times + [free - ahead_us for free in free_us] if ahead_us else times

    def next(
        self, now_us: Micros, free_us: Sequence[Micros], held: Collection[RequestId] = ()
    ) -> Waiter | None:
        """The request that goes next; it is not removed. None: only those `held` back wait.

        free_us: when each instance will be free.
        """
        first = self._next(now_us, free_us, held)
        if first is None or first.resumed or len(self._of) < 2:
            return first
        waiting = [w for w in self.everybody() if w.request not in held]
        tenants = dict.fromkeys(w.tenant for w in waiting if w.priority >= first.priority)
        turn = min(tenants, key=lambda tenant: self._given_us.get(tenant, self._turn_us))
        if turn == first.tenant:
            return first
        return self._next(now_us, free_us, {w.request for w in waiting if w.tenant != turn}, held)

    def _next(
        self,
        now_us: Micros,
        free_us: Sequence[Micros],
        held: Collection[RequestId],
        others: Collection[RequestId] = (),
    ) -> Waiter | None:
        """The next of the requests that are in neither collection."""
        held = {*held, *others} if others else held
        if held and len(held) == len(self):
            return None
        self._part(now_us)
        kept, deferred = self._defer(now_us, free_us)
        if held:
            kept = [waiter for waiter in kept if waiter.request not in held]
            deferred = [waiter for waiter in deferred if waiter.request not in held]
        shortest = _shortest(kept, now_us, free_us)
        if kept and kept[0].resumed:
            self._repays = False
            return kept[0]
        late = [w for w in self._late if w.request not in held] if held else self._late
        behind = min([*late, *deferred], key=lambda w: w.turn(now_us), default=None)
        self._repays = behind is not None and (shortest is None or self._owed_us >= behind.work_us)
        return behind if self._repays else shortest

    def went(self, waiter: Waiter) -> None:
        """The request that `next` returned goes: the deferred get their share, or use it up."""
        self.remove(waiter.request)
        before_us = self._turn_us
        waiting = dict.fromkeys([waiter.tenant, *self._of])
        # The least of the waiting tenants: a tenant out of turn takes nothing from the others.
        self._turn_us = min(self._given_us.get(tenant, before_us) for tenant in waiting)
        given_us = self._given_us.get(waiter.tenant, before_us) + waiter.work_us
        self._given_us[waiter.tenant] = given_us
        turns = [(t, us) for t, us in self._given_us.items() if us > self._turn_us]
        if len(turns) > _MOST_TENANTS:  # the tenant whose turn comes first loses least
            turns.remove(min(turns, key=lambda turn: turn[1]))
        self._given_us = dict(turns)
        if self._repays:
            self._owed_us = max(0.0, self._owed_us - waiter.work_us)
        else:
            self._owed_us += SHARE * waiter.work_us
        if not len(self):
            self._owed_us = 0.0

    def _part(self, now_us: Micros) -> None:
        """Move requests that should have begun by now to the late ones, except resumed ones."""
        late = [w for w in self._timely if w.begin_us < now_us and not w.resumed]
        if late:
            self._timely = [w for w in self._timely if w.begin_us >= now_us or w.resumed]
            for waiter in late:
                insort(self._late, waiter, key=lambda w: (w.arrived_us, w.request))

    def _defer(
        self, now_us: Micros, free_us: Sequence[Micros]
    ) -> tuple[list[Waiter], list[Waiter]]:
        """The requests that can all begin in time, in order, and those that are deferred."""
        behind = self.work_us > PATIENCE_US * len(free_us)
        limit_us = self._arrivals.limit_us(len(free_us)) if behind else None
        by_size: list[tuple[int, Micros, int, RequestId]] = []
        works: dict[RequestId, Micros] = {}
        ahead_us = 0
        for at, waiter in enumerate(self._timely):
            if (
                limit_us is not None
                and waiter.work_us >= limit_us
                and waiter.priority <= 0
                and not waiter.resumed
            ):
                continue
            room_us = _capacity_us(now_us, waiter.safe_us(1.0), free_us)
            works[waiter.request] = waiter.work_us
            heappush(by_size, (waiter.priority, -waiter.work_us, -at, waiter.request))
            while ahead_us > room_us and not waiter.resumed:
                largest = heappop(by_size)[-1]
                work_us = works.pop(largest)
                if largest == waiter.request:
                    break
                ahead_us -= work_us
            else:
                ahead_us += waiter.work_us
        kept = [waiter for waiter in self._timely if waiter.request in works]
        deferred = [waiter for waiter in self._timely if waiter.request not in works]
        return kept, deferred


def _shortest(
    waiters: Sequence[Waiter], now_us: Micros, free_us: Sequence[Micros]
) -> Waiter | None:
    """The shortest of the highest priority that takes no more time than earlier ones can spare."""
    best: Waiter | None = None
    spare_us: Micros | None = None
    ahead_us = 0
    for waiter in waiters:
        if best is not None and waiter.priority < best.priority:
            break
        fits = spare_us is None or waiter.work_us <= spare_us
        if fits and (best is None or waiter.work_us < best.work_us):
            best = waiter
        slack_us = _capacity_us(now_us, waiter.safe_us(2.5), free_us) - ahead_us
        spare_us = slack_us if spare_us is None else min(spare_us, slack_us)
        ahead_us += waiter.work_us
    return best


def _capacity_us(now_us: Micros, until_us: Micros, free_us: Sequence[Micros]) -> Micros:
    """Prefill time that the instances have left until then, together."""
    return sum([until_us - max(now_us, free) for free in free_us if free < until_us > now_us])


class _Arrivals:
    """The work that came in the last WINDOW_US, by size."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Micros, Micros]] = deque()
        self._sizes: list[Micros] = []
        self._sum_us: Micros = 0

    def add(self, waiter: Waiter) -> None:
        """Add a request; those older than the window are forgotten."""
        at_us = max(waiter.arrived_us, self._recent[-1][0] if self._recent else 0)
        self._recent.append((at_us, waiter.work_us))
        insort(self._sizes, waiter.work_us)
        self._sum_us += waiter.work_us
        while self._recent[0][0] < at_us - WINDOW_US:
            _, work_us = self._recent.popleft()
            self._sum_us -= work_us
            del self._sizes[bisect_left(self._sizes, work_us)]

    def limit_us(self, servers: int) -> Micros | None:
        """The work from which on prompts are too much; None while the instances can do all."""
        if not self._recent:
            return None
        span_us = max(WINDOW_US // 2, self._recent[-1][0] - self._recent[0][0])
        excess_us = self._sum_us - servers * span_us
        limit_us = None
        for work_us in reversed(self._sizes):
            if excess_us <= 0:
                break
            excess_us -= work_us
            limit_us = work_us
        return limit_us
