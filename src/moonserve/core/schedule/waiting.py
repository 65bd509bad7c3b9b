"""Which requests wait at the Conductor, and which goes next: the order of late binding.

Requests wait here rather than in the queue of one instance. So a long prompt does not delay
requests that could have gone elsewhere, and the order can still be chosen. The seconds that a
request takes from those behind it count beside its own TTFT, and more so as load grows:

- Every request has a time by which its prefill must begin: its TTFT objective, less its own work
  (without an objective, PATIENCE_US). While all can begin in time, the shortest goes first, unless
  that could make an earlier one late. So all wait the fewest seconds together.
- If they cannot all begin in time, those are deferred that take the most time for what they are
  worth, until the others can: the rule of Moore and Hodgson ("An n job, one machine sequencing
  algorithm", 1968) with weights, and with the time of several servers taken as one fluid. A request
  is worth its share of the waiting requests plus its share of their tokens.
- Requests that lack the same block next form a group. What the first of them computes, the others
  reuse, so it is worth what all of them are. Else a document that many ask for would be deferred
  again and again, because each request for it alone takes too long.
- Deferred requests go when no other request waits, and else get SHARE of the prefill time, first
  come first served. That bounds their wait: a request with W seconds of deferred work before it,
  its own included, begins by the time that W / SHARE seconds of prefill were given to others.
- Some requests are alike: in size, objectives, priority, tenant, and in how much of their prompts
  the pool holds. The first of these goes first, although what is known of it may be older: costs
  are learned meanwhile.
- Tenants take turns by the prefill time that they received (start-time fair queueing; Goyal, Vin
  and Cheng, 1996). The rules above are the order within the tenant whose turn it is.

Only the Conductor calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, takewhile
from operator import attrgetter

import msgspec

from moonserve.core.frozen import Frozen
from moonserve.core.request import Request, Slo
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Micros, RequestId, Tokens

PATIENCE_US: Micros = 30 * MICROS_PER_SECOND
SHARE = 0.02
_MARGIN = 1 / 15
"""The margin, as a share of PATIENCE_US or of the objective: predictions err."""
_SURE = 2.5
"""Margins by which an earlier request must stay in time when a shorter one passes it."""
_NEVER: Micros = 1 << 80
_MOST_TENANTS = 256
"""The most tenants whose received time is kept."""


class Waiter(Frozen, frozen=True):
    """One request that waits."""

    request: RequestId
    priority: int
    arrived_us: Micros
    work_us: Micros
    """Prefill time it will take, as predicted by what the pool has."""
    due_us: Micros | None
    """Its prefill must begin by then to meet its TTFT objective; None: it has none."""
    resumed: bool = False
    """Whether its instance failed after it was bound: then it goes first within its priority."""
    tbt_us: Micros | None = None
    """Its TBT objective."""
    tenant: str = ""
    tokens: Tokens = 0
    """Of its prompt."""
    lacks: BlockKey | None = None
    """The first block of its prompt that nobody has; None: all are there."""
    has: int = 0
    """Blocks of its prompt before that one. Blocks may have been evicted since, but no more may
    have come, for then it is looked up again."""

    @classmethod
    def of(
        cls,
        request: Request,
        slo: Slo,
        came_us: Micros,
        work_us: Micros,
        resumed: bool,
        lacks: BlockKey | None = None,
        has: int = 0,
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
            request.length,
            lacks,
            has,
        )

    def taking(self, work_us: Micros, lacks: BlockKey | None, has: int) -> Waiter:
        """The same, now that its prefill takes another time."""
        due_us = self.due_us
        if due_us is not None:
            due_us += self.work_us - work_us
        return msgspec.structs.replace(self, work_us=work_us, due_us=due_us, lacks=lacks, has=has)

    @property
    def begin_us(self) -> Micros:
        """The time by which it should begin."""
        if self.due_us is not None:
            return self.due_us
        return max(self.arrived_us, self.arrived_us + PATIENCE_US - self.work_us)


class _Entry:
    """A waiting request, with what choices read of it again and again."""

    __slots__ = (
        "arrival", "arrived_us", "begin_us", "is_late", "kind", "lacks", "number", "order",
        "priority", "request", "resumed", "safe_us", "sure_us", "tokens", "waiter", "work_us",
    )  # fmt: skip

    def __init__(self, waiter: Waiter, number: int) -> None:
        begin_us = waiter.begin_us
        work_us = waiter.work_us
        allowed_us = max(0, begin_us + work_us - waiter.arrived_us)
        self.waiter = waiter
        self.number = number
        """How many came into the room before it."""
        self.request = waiter.request
        self.priority = waiter.priority
        self.resumed = waiter.resumed
        self.work_us = work_us
        self.tokens = waiter.tokens
        self.lacks = waiter.lacks
        """Its group; None: it is in none."""
        self.begin_us = begin_us
        self.safe_us: Micros = begin_us - round(_MARGIN * allowed_us)
        """The time by which it should begin if predictions err by the margin."""
        self.sure_us: Micros = begin_us - round(_SURE * _MARGIN * allowed_us)
        """The same, if they err by _SURE margins."""
        self.is_late = False
        """Whether it stands among the late ones."""
        self.arrived_us = waiter.arrived_us
        self.kind = (
            waiter.priority, waiter.resumed, waiter.tenant, waiter.tokens, allowed_us, waiter.tbt_us
        )  # fmt: skip
        """What it has in common with those that are alike."""
        self.arrival = (waiter.arrived_us, waiter.request)
        self.order = (-waiter.priority, not waiter.resumed, begin_us, *self.arrival)
        """By priority, then resumed ones first, then the earliest begin."""


_ORDER = attrgetter("order")
_ARRIVAL = attrgetter("arrival")


class _Capacity:
    """The prefill time that the instances have left until a moment, together: a fluid.

    free_us: when each will be free.
    """

    def __init__(self, now_us: Micros, free_us: Sequence[Micros]) -> None:
        self.servers = len(free_us)
        self._now_us = now_us
        self._times_us = free_us
        self._free_us: list[Micros] = []
        self._sums_us: list[Micros] = []
        """Made at the first question: where few wait there is none."""

    def until_us(self, until_us: Micros) -> Micros:
        """The time left until then."""
        if not self._sums_us:
            self._free_us = sorted([max(self._now_us, free) for free in self._times_us[:]])
            self._sums_us = [0, *accumulate(self._free_us)]
        count = bisect_left(self._free_us, until_us)
        return count * until_us - self._sums_us[count]


class WaitingRoom:
    """The requests of one model that wait for a prefill instance."""

    def __init__(self) -> None:
        self._timely: list[_Entry] = []
        """By `order`."""
        self._late: list[_Entry] = []
        """Requests past the time by which they should have begun, by `arrival`."""
        self._entries: dict[RequestId, _Entry] = {}
        """All of both."""
        self._came = 0
        """How many ever came in."""
        self._parts_us: Micros | None = None
        """Until then no timely request is late; None: never."""
        self._groups: dict[BlockKey, dict[RequestId, _Entry]] = {}
        """Timely requests by the block that they lack first. The first of a group computes what the
        others reuse."""
        self._alike: dict[tuple[object, ...], dict[RequestId, _Entry]] = {}
        """All of both by kind, in the order in which they came in."""
        self._owed_us = 0.0
        """Prefill time that deferred requests may claim."""
        self._repays = False
        """Whether the request that `next` returned last is a deferred one."""
        self.work_us: Micros = 0
        """Prefill time of all that wait."""
        self._tokens: Tokens = 0
        """Of their prompts."""
        self._of: Counter[str] = Counter()
        """The number of waiting requests, by tenant."""
        self._goals: Counter[Micros | None] = Counter()
        """The same, by TBT objective."""
        self._given_us: dict[str, Micros] = {}
        self._turn_us: Micros = 0
        """Virtual time of the turns; `_given_us` holds when a tenant's next turn begins, if
        later."""
        self._crowd: tuple[int, Micros | None] = (0, None)
        """At the last try there was no room in decode for requests among the first so many that
        came, if their TBT objective is not looser than this; None: for all of them."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, waiter: Waiter) -> None:
        """Add a request."""
        entry = _Entry(waiter, self._came)
        self._came += 1
        self._enter(entry)

    def _enter(self, entry: _Entry) -> None:
        waiter = entry.waiter
        self._entries[entry.request] = entry
        self._alike.setdefault(entry.kind, {})[entry.request] = entry
        insort(self._timely, entry, key=_ORDER)
        if not entry.resumed:
            begin_us = entry.begin_us
            self._parts_us = begin_us if self._parts_us is None else min(self._parts_us, begin_us)
        if entry.lacks is not None:
            self._groups.setdefault(entry.lacks, {})[entry.request] = entry
        self.work_us += entry.work_us
        self._tokens += entry.tokens
        self._of[waiter.tenant] += 1
        self._goals[waiter.tbt_us] += 1

    def everybody(self, now_us: Micros) -> list[Waiter]:
        """All waiting requests, those past their time first."""
        self._part(now_us)
        return [entry.waiter for entries in (self._late, self._timely) for entry in entries]

    def crowd(self, waiter: Waiter, is_late: bool) -> None:
        """Decode has no room for this one, nor for any whose TBT objective is not looser.

        A shorter one might fit, but would take the room that this one waits for. No request passes
        one that should have begun by now.
        """
        self._crowd = (self._came, None if is_late else waiter.tbt_us)

    def try_again(self) -> None:
        """Decode may have room for any of them now; every try begins with it."""
        self._crowd = (0, None)

    def is_crowded(self, request: RequestId) -> bool:
        """Whether at the last try it could not go only for lack of room in decode."""
        entry = self._entries.get(request)
        return entry is not None and self._lacks_room(entry)

    def _lacks_room(self, entry: _Entry) -> bool:
        count, goal_us = self._crowd
        if entry.number >= count:
            return False
        own_us = entry.waiter.tbt_us
        return goal_us is None or (own_us is not None and own_us <= goal_us)

    def _all_lack_room(self) -> bool:
        count, goal_us = self._crowd
        if count < self._came:
            return False
        return goal_us is None or all(us is not None and us <= goal_us for us in self._goals)

    def remove(self, request: RequestId) -> Waiter | None:
        """Remove a request; None if it does not wait here."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        del self._entries[request]
        alike = self._alike[entry.kind]
        del alike[request]
        if not alike:
            del self._alike[entry.kind]
        self._take_out(entry)
        return entry.waiter

    def _take_out(self, entry: _Entry) -> None:
        """The opposite of `_enter`, except where it stands by its name only."""
        if entry.is_late:
            del self._late[bisect_left(self._late, entry.arrival, key=_ARRIVAL)]
        else:
            del self._timely[bisect_left(self._timely, entry.order, key=_ORDER)]
        waiter = entry.waiter
        self._ungroup(entry)
        self._tokens -= entry.tokens
        self.work_us -= waiter.work_us
        self._of[waiter.tenant] -= 1
        if not self._of[waiter.tenant]:
            del self._of[waiter.tenant]
        self._goals[waiter.tbt_us] -= 1
        if not self._goals[waiter.tbt_us]:
            del self._goals[waiter.tbt_us]

    def _ungroup(self, entry: _Entry) -> None:
        if entry.lacks is not None:
            group = self._groups[entry.lacks]
            del group[entry.request]
            if not group:
                del self._groups[entry.lacks]

    def lacking(self, keys: Sequence[BlockKey]) -> list[Waiter]:
        """The requests that lack one of these blocks first."""
        if not self._groups:
            return []
        groups = [self._groups[key] for key in keys if key in self._groups]
        return [entry.waiter for group in groups for entry in group.values()]

    def takes(self, request: RequestId, work_us: Micros, lacks: BlockKey | None, has: int) -> bool:
        """The prefill of a request takes this time now, and lacks this block first, the one after
        `has`; whether that is new."""
        old = self._entries[request]
        waiter = old.waiter
        if (work_us, lacks, has) == (waiter.work_us, waiter.lacks, waiter.has):
            return False
        self._take_out(old)
        self._enter(_Entry(waiter.taking(work_us, lacks, has), old.number))
        return True

    def earlier_alike(self, waiter: Waiter, held: Collection[RequestId]) -> Waiter | None:
        """A request that is to go in place of this one: it is alike, came before, and perhaps the
        pool holds as much of it. None: there is none that could go now and is not late."""
        entry = self._entries[waiter.request]
        if entry.is_late:
            return None
        for other in self._alike[entry.kind].values():
            if other is entry:
                break
            before = other.waiter.has >= waiter.has and other.arrival < entry.arrival
            if before and not (other.is_late or other.request in held or self._lacks_room(other)):
                return other.waiter
        return None

    def gives_way(self, request: Request) -> RequestId:
        """The request that is one too many when this one arrives: of the lowest priority, the last
        of the tenant with the most waiting requests."""
        waiting = [entry.waiter for entry in self._entries.values() if not entry.resumed]
        ranks = [(-w.priority, self._of[w.tenant], w.arrived_us, w.request) for w in waiting]
        last = max(ranks, default=None)
        if last is None or last[:2] <= (-request.priority, self._of[request.party.name]):
            return request.id
        return last[-1]

    def hopeless(self, now_us: Micros) -> list[Waiter]:
        """The requests that can no longer meet their objective, in order of arrival."""
        self._part(now_us)
        return [entry.waiter for entry in self._late if entry.waiter.due_us is not None]

    def first_due_us(self, now_us: Micros) -> Micros | None:
        """When the next request becomes hopeless; those that are hopeless now do not count."""
        first_us: Micros | None = None
        at = 0
        while at < len(self._timely):
            entry = self._timely[at]
            due_us = entry.waiter.due_us
            if due_us is None or due_us < now_us:
                at += 1
                continue
            first_us = due_us if first_us is None else min(first_us, due_us)
            others = (*entry.order[:2], _NEVER)  # of its priority are due later
            at = bisect_left(self._timely, others, key=_ORDER)
        return first_us

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
        """The request that goes next; it is not removed. None: all that wait are `held` back, or
        decode has no room for them.

        free_us: when each instance will be free.
        """
        if self._all_lack_room():
            return None
        self._part(now_us)
        if self._crowd[0]:
            entries = self._entries.values()
            held = {*held, *[entry.request for entry in entries if self._lacks_room(entry)]}
        capacity = _Capacity(now_us, free_us)
        first = self._next(now_us, capacity, held)
        if first is None:
            return None
        if first.resumed or len(self._of) < 2:
            return first.waiter
        waiting = [it for it in chain(self._late, self._timely) if it.request not in held]
        tenants = [it.waiter.tenant for it in waiting if it.priority >= first.priority]
        turn = min(tenants, key=lambda tenant: self._given_us.get(tenant, self._turn_us))
        if turn != first.waiter.tenant:
            others = [it.request for it in waiting if it.waiter.tenant != turn]
            first = self._next(now_us, capacity, {*held, *others})
        return None if first is None else first.waiter

    def _next(
        self, now_us: Micros, capacity: _Capacity, held: Collection[RequestId]
    ) -> _Entry | None:
        """The next of those that are not held."""
        if held and len(held) == len(self):
            return None
        late = self._late
        kept, deferred = self._defer(capacity)
        if held:
            late = [entry for entry in late if entry.request not in held]
            kept = [entry for entry in kept if entry.request not in held]
            deferred = [entry for entry in deferred if entry.request not in held]
        shortest = _shortest(kept, capacity)
        if kept and kept[0].resumed:
            self._repays = False
            return kept[0]
        behind = _first_come(late, deferred, now_us)
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
        if self._parts_us is None or self._parts_us >= now_us:
            return
        stay: list[_Entry] = []
        begins = [entry.begin_us for entry in self._timely if not entry.resumed]
        for entry in self._timely:
            if entry.begin_us >= now_us or entry.resumed:
                stay.append(entry)
            else:
                self._ungroup(entry)
                entry.lacks = None
                entry.is_late = True
                insort(self._late, entry, key=_ARRIVAL)
        self._timely = stay
        self._parts_us = min([us for us in begins if us >= now_us], default=None)

    def _defer(self, capacity: _Capacity) -> tuple[list[_Entry], list[_Entry]]:
        """The requests that can all begin in time, in order, and those that are deferred."""
        timely = self._timely
        stays = [True] * len(timely)
        by_cost: list[tuple[int, float, int]] = []
        """(priority, less cost, the later place): a heap, once one had to be deferred."""
        ordered = False
        ahead_us = 0
        for at, entry in enumerate(timely):
            if ordered:
                heappush(by_cost, (entry.priority, -self._cost(entry), -at))
            if not entry.resumed and ahead_us > 0:
                room_us = capacity.until_us(entry.safe_us)
                while ahead_us > room_us:
                    if not ordered:
                        ordered = True
                        for place, it in enumerate(timely[: at + 1]):
                            by_cost.append((it.priority, -self._cost(it), -place))
                        heapify(by_cost)
                    out = -heappop(by_cost)[-1]
                    stays[out] = False
                    if out == at:
                        break
                    ahead_us -= timely[out].work_us
            if stays[at]:
                ahead_us += entry.work_us
        if all(stays):
            return timely, []
        kept = [entry for entry, stay in zip(timely, stays, strict=True) if stay]
        deferred = [entry for entry, stay in zip(timely, stays, strict=True) if not stay]
        return kept, deferred

    def _cost(self, entry: _Entry) -> float:
        """Its prefill time for what it is worth; the first of a group is worth all of the group."""
        count = 1
        tokens = entry.tokens
        if entry.lacks is not None:
            group = self._groups[entry.lacks]
            if next(iter(group)) == entry.request:
                count = len(group)
                tokens = sum([it.tokens for it in group.values()])
        return entry.work_us / (count / len(self) + tokens / max(1, self._tokens))


def _shortest(entries: Sequence[_Entry], capacity: _Capacity) -> _Entry | None:
    """The shortest of the highest priority that takes no more time than earlier ones can spare."""
    if not entries:
        return None
    best = entries[0]
    least_us = min([entry.work_us for entry in entries])
    spare_us: Micros | None = None
    ahead_us = 0
    for entry in entries:
        if entry.priority < best.priority:
            break
        work_us = entry.work_us
        if work_us < best.work_us and (spare_us is None or work_us <= spare_us):
            best = entry
        if best.work_us == least_us:  # no later one is shorter
            break
        slack_us = capacity.until_us(entry.sure_us) - ahead_us
        spare_us = slack_us if spare_us is None else min(spare_us, slack_us)
        if spare_us < least_us:  # and here none fits
            break
        ahead_us += work_us
    return best


def _first_come(
    late: Sequence[_Entry], deferred: Sequence[_Entry], now_us: Micros
) -> _Entry | None:
    """First come first served. Of one instant: those that can be in time, the shortest first.

    late: by arrival.
    """
    first_us = late[0].arrived_us if late else _NEVER
    first_us = min([first_us, *[entry.arrived_us for entry in deferred]])
    together = list(takewhile(lambda it: it.arrived_us == first_us, late))
    together += [entry for entry in deferred if entry.arrived_us == first_us]
    return min(together, key=lambda it: (it.begin_us < now_us, it.work_us), default=None)
