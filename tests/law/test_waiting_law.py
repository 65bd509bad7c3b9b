"""Law of the waiting room: it chooses as the plain rules, which look at every request, do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.schedule.waiting import PATIENCE_US, SHARE, WINDOW_US, Waiter, WaitingRoom
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId

S = MICROS_PER_SECOND
MARGIN = 1 / 15


class PlainRoom:
    """The rules as they are written at the head of core.schedule.waiting, without any shortcut."""

    def __init__(self) -> None:
        self.waiting: list[Waiter] = []
        self.arrivals: list[tuple[Micros, Micros]] = []
        self.crowded: set[RequestId] = set()
        self.owed_us = 0.0
        self.repays = False
        self.given_us: dict[str, Micros] = {}
        self.turn_us = 0

    def add(self, waiter: Waiter) -> None:
        self.waiting.append(waiter)
        if not waiter.resumed:
            last_us = self.arrivals[-1][0] if self.arrivals else 0
            at_us = max(waiter.arrived_us, last_us)
            self.arrivals.append((at_us, waiter.work_us))
            self.arrivals = [it for it in self.arrivals if it[0] >= at_us - WINDOW_US]

    def parted(self, now_us: Micros) -> tuple[list[Waiter], list[Waiter]]:
        """The late ones and the timely ones, each in order."""
        gone = {w.request for w in self.waiting if w.begin_us < now_us and not w.resumed}
        late = [w for w in self.waiting if w.request in gone]
        timely = [w for w in self.waiting if w.request not in gone]
        late.sort(key=lambda w: (w.arrived_us, w.request))
        timely.sort(key=lambda w: (-w.priority, not w.resumed, w.begin_us, w.arrived_us, w.request))
        return late, timely

    def crowd(self, waiter: Waiter, is_late: bool) -> None:
        goal_us = None if is_late else waiter.tbt_us
        for other in self.waiting:
            if goal_us is None or (other.tbt_us is not None and other.tbt_us <= goal_us):
                self.crowded.add(other.request)

    def next(
        self, now_us: Micros, free_us: Sequence[Micros], held: Collection[RequestId]
    ) -> Waiter | None:
        held = {*held, *self.crowded}
        first = self._next(now_us, free_us, held)
        late, timely = self.parted(now_us)
        if first is None or first.resumed or len({w.tenant for w in self.waiting}) < 2:
            return first
        free = [w for w in late + timely if w.request not in held]
        tenants = dict.fromkeys(w.tenant for w in free if w.priority >= first.priority)
        turn = min(tenants, key=lambda tenant: self.given_us.get(tenant, self.turn_us))
        if turn == first.tenant:
            return first
        return self._next(now_us, free_us, {w.request for w in free if w.tenant != turn} | held)

    def _next(
        self, now_us: Micros, free_us: Sequence[Micros], held: Collection[RequestId]
    ) -> Waiter | None:
        if not any(w.request not in held for w in self.waiting):
            return None
        late, timely = self.parted(now_us)
        stay = self._stay(timely, now_us, free_us)
        kept = [w for w in timely if w.request in stay and w.request not in held]
        behind = [w for w in late + timely if w.request not in stay and w.request not in held]
        shortest = self._shortest(kept, now_us, free_us)
        if kept and kept[0].resumed:
            self.repays = False
            return kept[0]
        first = min(
            behind, key=lambda w: (w.arrived_us, w.begin_us < now_us, w.work_us), default=None
        )
        self.repays = first is not None and (shortest is None or self.owed_us >= first.work_us)
        return first if self.repays else shortest

    def _stay(
        self, timely: Sequence[Waiter], now_us: Micros, free_us: Sequence[Micros]
    ) -> set[RequestId]:
        limit_us = None
        if sum(w.work_us for w in self.waiting) > PATIENCE_US * len(free_us) and self.arrivals:
            span_us = max(WINDOW_US // 2, self.arrivals[-1][0] - self.arrivals[0][0])
            excess_us = sum(us for _, us in self.arrivals) - len(free_us) * span_us
            for work_us in sorted((us for _, us in self.arrivals), reverse=True):
                if excess_us <= 0:
                    break
                excess_us -= work_us
                limit_us = work_us
        stay: dict[RequestId, Micros] = {}
        by_size: list[tuple[int, Micros, int, RequestId]] = []
        for at, w in enumerate(timely):
            too_large = limit_us is not None and w.work_us >= limit_us
            if too_large and w.priority <= 0 and not w.resumed:
                continue
            room_us = capacity_us(now_us, safe_us(w, 1.0), free_us)
            ahead_us = sum(stay.values())
            heappush(by_size, (w.priority, -w.work_us, -at, w.request))
            stay[w.request] = w.work_us
            while ahead_us > room_us and not w.resumed:
                largest = heappop(by_size)[-1]
                ahead_us -= stay.pop(largest)
                if largest == w.request:
                    break
        return set(stay)

    def _shortest(
        self, kept: Sequence[Waiter], now_us: Micros, free_us: Sequence[Micros]
    ) -> Waiter | None:
        best: Waiter | None = None
        spares: list[Micros] = []
        ahead_us = 0
        for w in kept:
            if best is not None and w.priority < best.priority:
                break
            fits = all(w.work_us <= spare for spare in spares)
            if fits and (best is None or w.work_us < best.work_us):
                best = w
            spares.append(capacity_us(now_us, safe_us(w, 2.5), free_us) - ahead_us)
            ahead_us += w.work_us
        return best

    def went(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        before_us = self.turn_us
        tenants = {waiter.tenant, *(w.tenant for w in self.waiting)}
        self.turn_us = min(self.given_us.get(tenant, before_us) for tenant in tenants)
        given_us = self.given_us.get(waiter.tenant, before_us) + waiter.work_us
        self.given_us[waiter.tenant] = given_us
        self.given_us = {t: us for t, us in self.given_us.items() if us > self.turn_us}
        if self.repays:
            self.owed_us = max(0.0, self.owed_us - waiter.work_us)
        else:
            self.owed_us += SHARE * waiter.work_us
        if not self.waiting:
            self.owed_us = 0.0


def safe_us(w: Waiter, margins: float) -> Micros:
    """The time by which it should begin if predictions err by this many margins."""
    allowed_us = w.begin_us + w.work_us - w.arrived_us
    return w.begin_us - round(margins * MARGIN * max(0, allowed_us))


def capacity_us(now_us: Micros, until_us: Micros, free_us: Sequence[Micros]) -> Micros:
    """Prefill time that the instances have left until then, together."""
    return sum(until_us - max(now_us, free) for free in free_us if free < until_us > now_us)


class RoomMachine(RuleBasedStateMachine):
    """The room beside the plain rules, while time passes and requests come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.room, self.plain = WaitingRoom(), PlainRoom()
        self.now_us = 0
        self.count = 0

    @rule(
        works=st.lists(st.integers(1, 40).map(lambda tenths: tenths * S // 4), max_size=8),
        goal_s=st.sampled_from([2, 10, 30, 30, 30, None]),
        priority=st.sampled_from([0, 0, 0, 0, 1, -1]),
        resumed=st.sampled_from([False, False, False, False, True]),
        tbt_us=st.sampled_from([None, 100_000, 200_000, 200_000]),
        tenant=st.sampled_from(["a", "a", "a", "b", "c"]),
    )
    def add(
        self,
        works: list[Micros],
        goal_s: int | None,
        priority: int,
        resumed: bool,
        tbt_us: Micros | None,
        tenant: str,
    ) -> None:
        for work_us in works:
            due_us = None
            if goal_s is not None and not resumed:
                due_us = self.now_us + goal_s * S - work_us
            waiter = Waiter(
                RequestId(f"r{self.count:04}"),
                priority,
                self.now_us,
                work_us,
                due_us,
                resumed,
                tbt_us,
                tenant,
            )
            self.count += 1
            self.room.add(waiter)
            self.plain.add(waiter)

    @rule(passed_us=st.integers(0, 12 * S))
    def wait(self, passed_us: Micros) -> None:
        self.now_us += passed_us

    @precondition(lambda self: self.plain.waiting)
    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        gone = self.plain.waiting.pop(pick % len(self.plain.waiting))
        assert self.room.remove(gone.request) == gone
        assert self.room.remove(gone.request) is None

    @rule(
        free_us=st.lists(st.integers(-S, 8 * S), min_size=1, max_size=3),
        held=st.sets(st.integers(0, 9), max_size=2),
        turns=st.integers(1, 6),
        crowds=st.sampled_from([False, False, True]),
    )
    def serve(self, free_us: list[Micros], held: set[int], turns: int, crowds: bool) -> None:
        self.room.try_again()
        self.plain.crowded = set()
        at_us = [self.now_us + us for us in free_us]
        back = {w.request for at, w in enumerate(self.plain.waiting) if at in held}
        for _ in range(turns):
            first = self.plain.next(self.now_us, at_us, back)
            assert self.room.next(self.now_us, at_us, back) == first
            if first is None:
                return
            if crowds:
                is_late = first.begin_us < self.now_us
                self.room.crowd(first, is_late)
                self.plain.crowd(first, is_late)
            else:
                self.room.went(first)
                self.plain.went(first)

    @invariant()
    def agree(self) -> None:
        late, timely = self.plain.parted(self.now_us)
        assert self.room.everybody(self.now_us) == late + timely
        assert self.room.hopeless(self.now_us) == [w for w in late if w.due_us is not None]
        due = [w.due_us for w in timely if w.due_us is not None and w.due_us >= self.now_us]
        assert self.room.first_due_us(self.now_us) == min(due, default=None)
        assert self.room.work_us == sum(w.work_us for w in self.plain.waiting)
        crowded = {w.request for w in self.plain.waiting if self.room.is_crowded(w.request)}
        assert crowded == self.plain.crowded & {w.request for w in self.plain.waiting}


TestWaitingLaw = RoomMachine.TestCase
TestWaitingLaw.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
