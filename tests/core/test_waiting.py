"""The order in which late binding serves, by small numbers."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.request import Request
from moonserve.core.schedule.waiting import PATIENCE_US, SHARE, Waiter, WaitingRoom
from moonserve.core.units import BlockKey, RequestId

S = 1_000_000
IDLE = [0]


def waiter(
    name: str,
    work_s: float,
    at_s: float = 0,
    goal_s: float | None = 30,
    priority: int = 0,
    tokens: int = 0,
    lacks: str = "",
) -> Waiter:
    """One that came at that time and wants its first token within the goal."""
    work_us, at_us = round(work_s * S), round(at_s * S)
    due_us = None if goal_s is None else at_us + round(goal_s * S) - work_us
    key = BlockKey(lacks.encode()) if lacks else None
    return Waiter(RequestId(name), priority, at_us, work_us, due_us, tokens=tokens, lacks=key)


def room_of(*waiters: Waiter) -> WaitingRoom:
    """A room in which these wait."""
    room = WaitingRoom()
    for one in waiters:
        room.add(one)
    return room


def order_of(room: WaitingRoom, now_s: float = 0, free_us: list[int] = IDLE) -> list[str]:
    """The order in which requests go, one after the other, at one instant."""
    names = []
    while (first := room.next(round(now_s * S), free_us)) is not None:
        room.went(first)
        names.append(str(first.request))
    assert room.work_us == 0
    return names


def kept_of(room: WaitingRoom) -> list[str]:
    """Those that are not deferred at 0 s, by name: one server, served in order, none late."""
    kept, now_us = [], 0
    while (first := room.next(now_us, [now_us])) is not None and first.begin_us >= now_us:
        room.went(first)
        kept.append(str(first.request))
        now_us += first.work_us
    return sorted(kept)


def test_the_shortest_goes_first_while_all_can_begin_in_time() -> None:
    """Fewest seconds are waited by all."""
    assert order_of(room_of(waiter("long", 4), waiter("mid", 2), waiter("short", 1))) == [
        "short", "mid", "long",
    ]  # fmt: skip


def test_nobody_before_it_is_made_late_by_a_shorter_one() -> None:
    """A request without a second to spare goes before a shorter one."""
    urgent = waiter("urgent", 5, goal_s=6)  # must begin by 1 s
    assert order_of(room_of(urgent, waiter("short", 2)))[0] == "urgent"


def test_the_largest_gives_way_where_not_all_can_begin_in_time() -> None:
    """Three of 9 s can begin in time, a fourth and one of 25 s cannot; the earliest can."""
    room = room_of(waiter("whale", 25), *[waiter(f"w{i}", 9) for i in range(4)])
    assert order_of(room) == ["w0", "w1", "w2", "w3", "whale"]


def test_priority_goes_first_and_is_deferred_last() -> None:
    """A higher priority goes before shorter ones, and is not what gives way."""
    assert order_of(room_of(waiter("a", 1), waiter("b", 3, priority=1))) == ["b", "a"]
    room = room_of(waiter("vip", 25, priority=1), *[waiter(f"w{i}", 9) for i in range(4)])
    assert order_of(room)[0] == "vip"


def test_what_gives_way_takes_the_most_time_for_its_worth() -> None:
    """Three of four fit. Of equal times the shortest prompt gives way; a long one that is mostly
    cached stays where a shorter one that is not takes more time."""
    fit = [waiter(f"w{i}", 9, tokens=10_000) for i in range(3)]
    assert kept_of(room_of(*fit, waiter("few", 9, tokens=5_000))) == ["w0", "w1", "w2"]
    assert kept_of(room_of(*fit, waiter("many", 9.5, tokens=30_000))) == ["many", "w0", "w1"]
    assert kept_of(room_of(*fit, waiter("large", 12, tokens=10_000))) == ["w0", "w1", "w2"]


def test_the_first_of_a_group_is_worth_what_all_of_it_are() -> None:
    """A document of 14 s that four ask for is computed, where one that nobody shares is not."""
    others = [waiter(f"w{i}", 5, tokens=10_000) for i in range(4)]
    alone = [waiter(f"g{i}", 14, tokens=10_000) for i in range(4)]
    assert kept_of(room_of(*alone, *others)) == ["w0", "w1", "w2", "w3"]
    group = [waiter(f"g{i}", 14, tokens=10_000, lacks="doc") for i in range(4)]
    room = room_of(*group, *others)
    assert [w.request for w in room.lacking([BlockKey(b"doc")])] == ["g0", "g1", "g2", "g3"]
    assert kept_of(room) == ["g0", "w0", "w1", "w2"]


def test_a_request_that_takes_less_may_begin_later() -> None:
    """What is known of its prefill changes, and with it the time by which it must begin."""
    room = room_of(waiter("a", 20, lacks="x"))
    assert [w.request for w in room.hopeless(11 * S)] == ["a"]
    room.takes(RequestId("a"), 2 * S, None, 0)
    assert room.hopeless(11 * S) == []
    assert room.first_due_us(11 * S) == 28 * S
    assert room.work_us == 2 * S
    assert room.lacking([BlockKey(b"x")]) == []


def test_without_an_objective_patience_orders() -> None:
    """No goal is as one of PATIENCE_US, but never hopeless."""
    room = room_of(waiter("free", 2, goal_s=None))
    later_us = PATIENCE_US + S
    assert room.hopeless(later_us) == []
    assert room.first_due_us(0) is None
    first = room.next(later_us, IDLE)
    assert first is not None
    assert first.request == "free"


def test_hopeless_are_those_whose_time_to_begin_has_passed() -> None:
    """One microsecond after it, not before; the next one's time is returned."""
    room = room_of(waiter("a", 1), waiter("b", 2))
    assert room.first_due_us(0) == 28 * S
    assert room.hopeless(28 * S) == []
    assert [w.request for w in room.hopeless(28 * S + 1)] == ["b"]
    assert room.first_due_us(28 * S + 1) == 29 * S


def test_the_deferred_get_their_share() -> None:
    """A late one of W seconds goes once W / SHARE seconds were given to others, not before."""
    room = room_of(waiter("late", 1, at_s=-60))
    given_s = 0
    for number in range(1_000):
        room.add(waiter(f"n{number}", 1))
        first = room.next(0, IDLE)
        assert first is not None
        if first.request == "late":
            break
        room.went(first)
        given_s += 1
    assert given_s == round(1 / SHARE)


def test_held_ones_are_passed_over() -> None:
    """None is returned if only held requests wait."""
    room = room_of(waiter("a", 1), waiter("b", 2))
    first = room.next(0, IDLE, {RequestId("a")})
    assert first is not None
    assert first.request == "b"
    assert room.next(0, IDLE, {RequestId("a"), RequestId("b")}) is None


def owned(tenant: str, *waiters: Waiter) -> list[Waiter]:
    """These, on its behalf."""
    return [msgspec.structs.replace(one, tenant=tenant) for one in waiters]


def test_tenants_take_turns_by_the_time_they_were_given() -> None:
    """A tenant that received less passes a flood; within a tenant the order is the usual."""
    flood = owned("flood", *(waiter(f"f{at}", 1) for at in range(9)))
    calm = owned("calm", waiter("c long", 4), waiter("c short", 2))
    found = order_of(room_of(*flood, *calm))
    assert found[:6] == ["c short", "f0", "f1", "c long", "f2", "f3"]


def test_turns_hold_among_the_late() -> None:
    """Also where no request can be in time any more."""
    flood = owned("flood", *(waiter(f"f{at}", 1) for at in range(9)))
    calm = owned("calm", waiter("c", 1, at_s=50))
    assert order_of(room_of(*flood, *calm), now_s=100)[:2] == ["f0", "c"]


def test_who_comes_back_has_saved_nothing_up() -> None:
    """A tenant that asked for nothing does not go before all others for as long."""
    room = room_of(*owned("a", *(waiter(f"a{at}", 1) for at in range(20))))
    for _ in range(10):
        first = room.next(0, IDLE)
        assert first is not None
        room.went(first)
    for one in owned("b", *(waiter(f"b{at}", 1) for at in range(5))):
        room.add(one)
    names = order_of(room)
    assert sum(name[0] == "b" for name in names[:6]) == 3


def test_priority_goes_before_turns() -> None:
    """Whoever's it is."""
    room = room_of(
        *owned("flood", *(waiter(f"f{at}", 1, priority=1) for at in range(3))),
        *owned("calm", waiter("c", 1)),
    )
    assert order_of(room) == ["f0", "f1", "f2", "c"]


def test_of_too_many_the_last_of_those_who_have_most_gives_way() -> None:
    """To a tenant with fewer requests; among its own none gives way."""
    room = room_of(*owned("flood", *(waiter(f"f{at}", 1, at_s=at) for at in range(3))))
    for tenant, gives_way in (("flood", "new"), ("calm", "f2")):
        request = Request(RequestId("new"), "m", 9, tenant=tenant)
        assert room.gives_way(request) == gives_way


def test_who_is_urgent_does_not_take_others_their_turns() -> None:
    """Between urgent requests of another tenant, the calm one still gets every other turn."""
    room = room_of(
        *owned("flood", *(waiter(f"f{at}", 1) for at in range(9))),
        *owned("calm", *(waiter(f"c{at}", 1, at_s=1) for at in range(9))),
    )
    names = []
    for at in range(6):
        room.add(owned("urgent", waiter(f"u{at}", 2, priority=1))[0])
        for _ in range(2):
            first = room.next(0, IDLE)
            assert first is not None
            room.went(first)
            names.append(first.request)
    assert names[1::2] == ["f0", "c0", "f1", "c1", "f2", "c2"]


def test_tenants_without_end_are_not_remembered_without_end() -> None:
    """Each request under a new name, while one waits: what is kept has a bound."""
    room = room_of(*owned("old", waiter("old", 1)))
    for at in range(600):
        room.add(owned(f"t{at}", waiter(f"w{at}", 1, priority=1))[0])
        first = room.next(0, IDLE)
        assert first is not None
        room.went(first)
    assert len(room._given_us) <= 256


def test_of_too_many_low_priority_gives_way_first() -> None:
    """Whoever's it is, and whoever has most; among equals it is the one that came."""
    low = owned("calm", waiter("low", 1, priority=-1))
    room = room_of(*owned("flood", waiter("f", 1), waiter("g", 1)), *low)
    for priority, gives_way in ((0, "low"), (-1, "new"), (-2, "new")):
        request = Request(RequestId("new"), "m", 9, priority=priority, tenant="flood")
        assert room.gives_way(request) == gives_way


def test_an_empty_room_without_places_takes_nobody() -> None:
    """Where max_waiting is 0, whoever comes is one too many."""
    assert room_of().gives_way(Request(RequestId("new"), "m", 9)) == "new"


works = st.lists(st.floats(0.1, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(works, works)
def test_turns_are_fair_to_one_prompt(one: list[float], other: list[float]) -> None:
    """While both wait, what two tenants were given differs by no more than a prompt of each."""
    left = {"a": [waiter(f"a{at}", w) for at, w in enumerate(one)]}
    left["b"] = [waiter(f"b{at}", w) for at, w in enumerate(other)]
    room = room_of(*(w for tenant, own in left.items() for w in owned(tenant, *own)))
    given_us = {"a": 0, "b": 0}
    most_us = round((max(one) + max(other)) * S)
    while all(room._of[tenant] for tenant in left):
        first = room.next(0, IDLE)
        assert first is not None
        room.went(first)
        given_us[first.tenant] += first.work_us
        assert abs(given_us["a"] - given_us["b"]) <= most_us


@given(works, st.integers(1, 4))
def test_everybody_goes_once(sizes: list[float], servers: int) -> None:
    """Whatever their sizes: no request is forgotten, none goes twice."""
    room = room_of(*[waiter(f"w{i}", size) for i, size in enumerate(sizes)])
    went = order_of(room, free_us=[0] * servers)
    assert sorted(went) == sorted(f"w{i}" for i in range(len(sizes)))


@given(works)
def test_one_server_meets_all_that_can_be_met_by_deferring_the_fewest(sizes: list[float]) -> None:
    """Served in its order, at most one more is late than by Moore and Hodgson's own rule.

    (The margin for errors of prediction may cost one.)
    """
    room = room_of(*[waiter(f"w{i}", size) for i, size in enumerate(sizes)])
    now_us = in_time = 0
    while (first := room.next(now_us, [now_us])) is not None:
        in_time += now_us <= first.begin_us
        room.went(first)
        now_us += first.work_us
    ahead, best = 0.0, 0
    for size in sorted(sizes):  # one objective for all: the most fit shortest first
        if ahead + size <= 30:
            ahead += size
            best += 1
    assert in_time >= best - 1


def test_of_those_put_off_together_one_that_can_be_in_time_goes_first() -> None:
    """The shortest of them; one that is late already has nothing to lose."""
    room = room_of(waiter("late", 31), *[waiter(f"w{i}", 13) for i in range(5)], waiter("s", 12))
    assert order_of(room)[:2] == ["s", "w0"]
