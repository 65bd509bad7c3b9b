"""Law of the waiting room: it chooses as the plain rules, which look at every request, do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.schedule.waiting import SHARE, Waiter, WaitingRoom
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Micros, RequestId

S = MICROS_PER_SECOND
MARGIN = 1 / 15


class PlainRoom:
    """The rules as they are written at the head of core.schedule.waiting, without any shortcut."""

    def __init__(self) -> None:
        self.waiting: list[Waiter] = []
        self.late: set[RequestId] = set()
        """Requests that were late at some time: they are in no group."""
        self.crowded: set[RequestId] = set()
        self.owed_us = 0.0
        self.repays = False
        self.given_us: dict[str, Micros] = {}
        self.turn_us = 0

    def add(self, waiter: Waiter) -> None:
        self.waiting.append(waiter)

    def parted(self, now_us: Micros) -> tuple[list[Waiter], list[Waiter]]:
        """The late ones and the timely ones, each in order."""
        gone = {w.request for w in self.waiting if w.begin_us < now_us and not w.resumed}
        self.late |= gone
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
        stay: dict[RequestId, Micros] = {}
        by_cost: list[tuple[int, float, int, RequestId]] = []
        for at, w in enumerate(timely):
            room_us = capacity_us(now_us, safe_us(w, 1.0), free_us)
            ahead_us = sum(stay.values())
            heappush(by_cost, (w.priority, -self._cost(w), -at, w.request))
            stay[w.request] = w.work_us
            while ahead_us > room_us and not w.resumed:
                dearest = heappop(by_cost)[-1]
                ahead_us -= stay.pop(dearest)
                if dearest == w.request:
                    break
        return set(stay)

    def _cost(self, w: Waiter) -> float:
        """Its time for its share of the requests plus its share of the tokens; the first of those
        that lack its block has the shares of all of them."""
        all_tokens = max(1, sum(it.tokens for it in self.waiting))
        group = [it for it in self.waiting if it.lacks == w.lacks and it.request not in self.late]
        if w.lacks is None or group[0] is not w:
            group = [w]
        tokens = sum(it.tokens for it in group)
        return w.work_us / (len(group) / len(self.waiting) + tokens / all_tokens)

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
        tokens=st.integers(1, 9).map(lambda n: 1_000 * n),
        lacks=st.sampled_from([None, None, BlockKey(b"x"), BlockKey(b"y")]),
    )
    def add(
        self,
        works: list[Micros],
        goal_s: int | None,
        priority: int,
        resumed: bool,
        tbt_us: Micros | None,
        tenant: str,
        tokens: int,
        lacks: BlockKey | None,
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
                tokens,
                lacks,
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

    @precondition(lambda self: self.plain.waiting)
    @rule(
        pick=st.integers(0, 99),
        work_us=st.integers(1, 40).map(lambda tenths: tenths * S // 4),
        lacks=st.sampled_from([None, BlockKey(b"x"), BlockKey(b"y")]),
    )
    def look_again(self, pick: int, work_us: Micros, lacks: BlockKey | None) -> None:
        """A prefix came or went: it enters its group behind the others."""
        old = self.plain.waiting[pick % len(self.plain.waiting)]
        self.plain.parted(self.now_us)
        assert self.room.everybody(self.now_us)
        self.room.takes(old.request, work_us, lacks, 0)
        if (old.work_us, old.lacks) != (work_us, lacks):
            self.plain.waiting.remove(old)
            self.plain.waiting.append(old.taking(work_us, lacks, 0))
            self.plain.late.discard(old.request)

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
        for key in (BlockKey(b"x"), BlockKey(b"y")):
            lack = [w for w in self.plain.waiting if w.lacks == key]
            group = [w for w in lack if w.request not in self.plain.late]
            assert self.room.lacking([key]) == group
        crowded = {w.request for w in self.plain.waiting if self.room.is_crowded(w.request)}
        assert crowded == self.plain.crowded & {w.request for w in self.plain.waiting}


@settings(max_examples=50, deadline=None)
@given(
    works=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    others=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    lacks=st.sampled_from([None, BlockKey(b"x")]),
)
def test_the_deferred_wait_no_longer_than_their_share(
    works: list[int], others: list[int], lacks: BlockKey | None
) -> None:
    """With W of deferred work before a request, its own included, it goes by the time that others
    were given W / SHARE, whatever else keeps coming, and whatever that is worth."""
    room = WaitingRoom()
    for at, work in enumerate(works):  # they should have begun by 0 s, in this order
        name = RequestId(f"d{at}")
        room.add(Waiter(name, 0, at - 100, work * S, -1, tokens=1))
    given_us = gone_us = came = 0
    for at, work in enumerate(works):
        while True:
            own = others[came % len(others)] * S // 2
            came += 1
            rival = Waiter(RequestId(f"o{came}"), 0, 0, own, 1 << 60, tokens=9_000, lacks=lacks)
            room.add(rival)
            first = room.next(0, [0])
            assert first is not None
            room.went(first)
            if first.request == f"d{at}":
                break
            assert first.request.startswith("o")
            given_us += first.work_us
        gone_us += work * S
        assert given_us <= gone_us / SHARE + max(others) * S / 2


TestWaitingLaw = RoomMachine.TestCase
TestWaitingLaw.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
