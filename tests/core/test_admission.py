"""Admission by mode: refused on arrival, refused after the prefill, or waiting for room.

A pass takes 100 us for each member, a new token of a prompt 10 us.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule import decode_forecast
from moonserve.core.schedule.actions import Action, Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    Arrived,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceInfo,
    Joined,
    PrefillEnded,
    Role,
)
from moonserve.core.schedule.objectives import misses
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import RequestId
from tests.support.cluster import info

TWO = Slo(tbt_us=210)
"""Two may decode together."""
TAUGHT = 2_000_000


def simple(joining: InstanceInfo) -> Cost:
    """See above."""
    return Cost((0, 10, 0, 0, 0, 100, 0), (5, 0.005), learns=False)


def cluster(
    admission: str, *names: str, slo: Slo = TWO, places: int = 64, **more: Any
) -> Conductor:
    """p… prefill and d… decode, which streams the first token."""
    more = {"join_passes": 0.0, **more}
    tuning = Tuning(admission=admission, slo=slo, **more)  # type: ignore[arg-type]
    made = Conductor(tuning, cost_of=simple)
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    made.step(0, [Joined(info(n, roles[n[0]], max_seqs=places)) for n in names])
    return made


def arrived(name: str, tokens: int = 41, most: int = 100_000, **more: Any) -> Arrived:
    """A request with nothing cached."""
    stopping = Stopping(max_tokens=most)
    return Arrived(Request(RequestId(name), "m", tokens, stopping=stopping, **more), ())


def prefilled(name: str, number: int = 1) -> PrefillEnded:
    """Its prefill has ended."""
    return PrefillEnded(RequestId(name), number, final=False)


def refusals(actions: list[Action]) -> list[tuple[str, str]]:
    """The refused requests, with the reason."""
    return [(str(a.request), a.reason) for a in actions if isinstance(a, Refuse)]


def begun(actions: list[Action], kind: type[Prefill] | type[Decode]) -> list[str]:
    """The requests for which a call of this kind goes out."""
    return [str(action.request) for action in actions if isinstance(action, kind)]


def begin(conductor: Conductor, now_us: int, *names: str) -> None:
    """These arrive and decode, at that moment."""
    conductor.step(now_us, [arrived(name) for name in names])
    actions = conductor.step(now_us, [prefilled(name) for name in names])
    assert begun(actions, Decode) == list(names)


def teach(conductor: Conductor, tokens: int) -> None:
    """Until TAUGHT, 200 outputs end at this length, one after the other."""
    for at in range(200):
        name, now_us = f"seen{at}", at * TAUGHT // 200
        conductor.step(now_us, [arrived(name)])
        assert begun(conductor.step(now_us + 410, [prefilled(name)]), Decode) == [name]
        conductor.step(now_us + 1_000, [DecodeEnded(RequestId(name), 2, tokens)])


def test_ttft_finds_out_when_prefill_has_ended() -> None:
    """The paper's baseline: whoever decode has no room for is dropped, and frees all it had."""
    c = cluster("ttft", "p0", "d0")
    begin(c, 1, "a", "b")
    assert begun(c.step(2, [arrived("c")]), Prefill) == ["c"]
    assert refusals(c.step(3, [prefilled("c")])) == [("c", "tbt_slo_late")]
    c.step(4, [DecodeEnded(RequestId(name), 2, 5) for name in "ab"])
    assert c.promised() == Promised(0, 0, 0, 0)


def test_none_breaks_goals_rather_than_refuse() -> None:
    """No request is refused, on arrival or later."""
    c = cluster("none", "p0", "d0", slo=Slo(1, 1))
    begin(c, 1, "a", "b", "c", "d")


def test_early_looks_at_those_who_decode_now() -> None:
    """It ignores requests in prefill, so a whole burst is admitted; it counts those in decode."""
    c = cluster("early", "p0", "d0")
    assert len(begun(c.step(1, [arrived(name) for name in "abcde"]), Prefill)) == 5
    actions = c.step(2, [prefilled(name) for name in "abcde"])
    assert begun(actions, Decode) == ["a", "b"]
    assert refusals(actions) == [(name, "tbt_slo_late") for name in "cde"]
    assert refusals(c.step(3, [arrived("f")])) == [("f", "tbt_slo")]


def test_a_burst_is_accounted_while_it_is_admitted() -> None:
    """Of 500 long prompts in one instant, each counts for the next: early takes them all."""
    burst = [arrived(f"r{at:03}", 300) for at in range(500)]
    room = Slo(tbt_us=800)
    early = begun(cluster("early", "p0", "d0", slo=room).step(1, burst), Prefill)
    c = cluster("predictive", "p0", "d0", slo=room)
    actions = c.step(1, burst)
    assert len(early) == 500
    assert 1 <= len(begun(actions, Prefill)) < 200
    assert {reason for _, reason in refusals(actions)} == {"tbt_slo"}


def test_no_max_tokens_refuses_anyone() -> None:
    """The length to be expected counts: outputs are short, whatever clients set."""
    for most in (10, 100_000):
        c = cluster("predictive", "p0", "d0")
        teach(c, 5)
        begin(c, TAUGHT, "a", "b")
        assert begun(c.step(TAUGHT + 1, [arrived("c", 300, most)]), Prefill) == ["c"]


def test_long_outputs_are_expected_to_last() -> None:
    """The same, where outputs were long: they are still there when this prefill ends."""
    c = cluster("predictive", "p0", "d0")
    teach(c, 5_000)
    begin(c, TAUGHT, "a", "b")
    assert refusals(c.step(TAUGHT + 1, [arrived("c", 300)])) == [("c", "tbt_slo")]


def test_a_prefill_that_finds_no_room_waits_for_it() -> None:
    """Predictive: the request is held until a decode ends, first come first served."""
    c = cluster("predictive", "p0", "d0")
    teach(c, 1)
    assert len(begun(c.step(TAUGHT, [arrived(name) for name in "abcd"]), Prefill)) == 4
    c.step(TAUGHT + 1, [prefilled("a"), prefilled("b")])
    assert c.step(TAUGHT + 2, [prefilled("c")]) == []
    assert c.step(TAUGHT + 3, [prefilled("d")]) == []
    assert begun(c.step(TAUGHT + 4, [DecodeEnded(RequestId("a"), 2, 5)]), Decode) == ["c"]
    assert begun(c.step(TAUGHT + 5, [DecodeEnded(RequestId("b"), 2, 5)]), Decode) == ["d"]


def test_waiting_for_room_ends_with_the_ttft_objective() -> None:
    """Two passes before it, the Conductor wakes up and drops the request."""
    c = cluster("predictive", "p0", "d0", slo=Slo(50_000, 210))
    teach(c, 1)
    assert len(begun(c.step(TAUGHT, [arrived(name) for name in "abc"]), Prefill)) == 3
    c.step(TAUGHT + 1, [prefilled("a"), prefilled("b")])
    assert c.step(TAUGHT + 2, [prefilled("c")]) == []
    due_us = c.wake_us(TAUGHT + 2)
    assert due_us == TAUGHT + 50_000 - 2 * 210
    assert c.step(due_us - 1, []) == []
    assert refusals(c.step(due_us, [])) == [("c", "tbt_slo_late")]
    assert c.wake_us(due_us) is None


def test_a_prefill_that_finds_no_room_goes_elsewhere() -> None:
    """Predictive: another decode instance that has room takes it at once."""
    c = cluster("predictive", "p0", "d0", "d1")
    actions = c.step(1, [arrived(name) for name in "abcd"])
    homes = {str(a.request): a.decision.decode for a in actions if isinstance(a, Prefill)}
    assert len(homes) == 4
    [first] = [a for a in c.step(2, [prefilled("a")]) if isinstance(a, Decode)]
    assert first.to.id == homes["a"]
    for name in "bcd":
        assert begun(c.step(3, [prefilled(name)]), Decode) == [name]
    members = [len(view.residencies.active) for view in c.view.decodes("m")]
    assert members == [2, 2]


@pytest.mark.parametrize("mode", ["ttft", "early", "predictive"])
def test_nobodys_tbt_is_broken_by_who_joins(mode: str) -> None:
    """A request without a goal does not join a member whose goal it would break."""
    c = cluster(mode, "p0", "d0", slo=Slo())
    c.step(1, [arrived("1 strict", slo=Slo(tbt_us=150)), arrived("2 lax")])
    actions = c.step(2, [prefilled("1 strict"), prefilled("2 lax")])
    assert begun(actions, Decode) == ["1 strict"]
    assert list(c.view.decodes("m")[0].residencies.active) == ["1 strict"]


def test_low_priority_goes_first() -> None:
    """Where one of the usual priority is taken still, one of a lower is refused."""
    for priority, taken in ((0, True), (5, True), (-1, False)):
        c = cluster("predictive", "p0", "d0", slo=TWO, held_share=0.0)
        begin(c, 0, "x")
        found = begun(c.step(1, [arrived("a", priority=priority)]), Prefill)
        assert bool(found) == taken


@pytest.mark.parametrize("tenants", [("a",), ("a", "b")])
def test_low_priority_goes_first_within_a_tenant_too(tenants: tuple[str, ...]) -> None:
    """Also within one that was given more than its part, since another asks for little."""
    c = cluster("predictive", "p0", "d0", slo=Slo(10_000))
    taken, ends = Counter[int](), dict[RequestId, int]()
    for at in range(400):  # prompts of about 1 ms, four times as many as can be done
        now_us, priority = at * 250, (5, -5)[at % 2]
        over = [name for name, us in ends.items() if us <= now_us]
        facts: list[Fact] = [PrefillEnded(name, 1, final=True) for name in over]
        ends = {name: us for name, us in ends.items() if us > now_us}
        tenant = tenants[-1] if at % 5 == 1 else "a"
        facts.append(arrived(f"r{at}", 97, priority=priority, tenant=tenant))
        for action in c.step(now_us, facts):
            match action:
                case Prefill(request):
                    ends[request] = max([now_us, *ends.values()]) + 970
                    taken[priority] += tenant == "a"
                case _:
                    pass
    assert taken[5] > 4 * taken[-5]


@pytest.mark.parametrize("slo", [Slo(tbt_us=120), Slo(ttft_us=450)])
def test_low_priority_gives_way_to_nobody_where_nobody_is(slo: Slo) -> None:
    """An idle cluster takes it where its own objectives are met, and else refuses it still."""
    for most, taken in ((1.0, True), (0.8, False)):
        goal = Slo(*(us and round(us * most) for us in (slo.ttft_us, slo.tbt_us)))
        c = cluster("predictive", "p0", "d0", slo=goal)
        assert bool(begun(c.step(1, [arrived("a", priority=-1)]), Prefill)) == taken


def test_a_class_may_have_a_mode_of_its_own() -> None:
    """Priority above 0 is never refused here; below 0 only late requests are dropped."""
    for priority, taken in ((0, 0), (1, 3), (-1, 1)):
        modes = {"admission_low": "ttft", "admission_high": "none"}
        c = cluster("early", "p0", "d0", slo=Slo(5_000, 90), low_share=1.0, **modes)
        names = [arrived(f"r{at}", 300, priority=priority) for at in range(3)]
        assert len(begun(c.step(1, names), Prefill)) == taken


def test_a_tenants_flood_does_not_starve_others() -> None:
    """A flood leaves room for requests of other tenants; without them it uses all."""
    for others, taken in ((False, False), (True, True)):
        c = cluster("predictive", "p0", "d0", slo=Slo(tbt_us=1_050), held_share=0.0)
        if others:
            c.step(0, [arrived("calm 0", tenant="calm")])
            c.step(0, [prefilled("calm 0")])
        flood = [arrived(f"flood {at:02}", tenant="flood") for at in range(40)]
        c.step(1, flood)
        late = arrived("late", tenant="calm" if others else "flood")
        assert bool(begun(c.step(2, [late]), Prefill)) == taken


def test_one_may_count_on_a_short_wait_for_room() -> None:
    """Predictive: a request is admitted if decode will be full only for a short time."""
    for tokens, taken in ((5, True), (50_000, False)):
        c = cluster("predictive", "p0", "d0")
        teach(c, tokens)
        begin(c, TAUGHT, "a", "b")
        assert bool(begun(c.step(TAUGHT + 1, [arrived("c")]), Prefill)) == taken


@pytest.mark.parametrize(("tokens", "taken"), [(5, False), (100, True)])
def test_a_late_second_token_counts_in_the_tbt(tokens: int, taken: bool) -> None:
    """Where prefill streams the first, one that joins waits a pass: of few tokens, that is much.

    The longest tenth of the gaps is that one gap, or it and eight others.
    """
    for join_passes, let_in in ((0.0, True), (1.0, taken)):
        more = {"join_passes": join_passes, "held_share": 0.0}
        c = cluster("predictive", "p0", "d0", slo=Slo(tbt_us=240), **more)
        teach(c, tokens)
        begin(c, TAUGHT, "a")
        assert bool(begun(c.step(TAUGHT + 1, [arrived("b", 2)]), Prefill)) == let_in


def test_a_late_second_token_refuses_nobody_who_is_alone() -> None:
    """No pass is under way there."""
    c = cluster("predictive", "p0", "d0", slo=Slo(tbt_us=110), join_passes=1.0)
    teach(c, 5)
    begin(c, TAUGHT, "a")


def test_who_finds_all_places_promised_is_refused() -> None:
    """Four decode at a time, longer than the TTFT objective would have one wait."""
    c = cluster("predictive", "p0", "d0", slo=Slo(100_000, 2_000), places=4)
    teach(c, 5_000)
    actions = c.step(TAUGHT, [arrived(f"r{at:02}") for at in range(20)])
    assert begun(actions, Prefill) == ["r00", "r01", "r02", "r03"]
    assert {reason for _, reason in refusals(actions)} == {"tbt_slo"}


@pytest.mark.parametrize("mode", ["ttft", "early", "predictive"])
def test_nobody_begins_to_decode_without_a_place(mode: str) -> None:
    """Else its first token would be sent, and the second only after another decode has ended."""
    c = cluster(mode, "p0", "d0", slo=Slo(tbt_us=2_000), places=2)
    teach(c, 20)
    arrive = [arrived("a"), arrived("b"), arrived("c", 300)]
    assert len(begun(c.step(TAUGHT, arrive), Prefill)) == 3
    actions = c.step(TAUGHT + 1, [prefilled(name) for name in "abc"])  # sooner than predicted
    assert begun(actions, Decode) == ["a", "b"]
    actions = c.step(TAUGHT + 2, [DecodeEnded(RequestId("a"), 2, 20)])
    assert begun(actions, Decode) == (["c"] if mode == "predictive" else [])


def test_without_a_place_nobody_begins_on_a_cold_start_either() -> None:
    """Predictive: a held request is not refused for unknown costs, and has sent no token."""
    c = Conductor(Tuning(slo=Slo(50_000, 5_000)), cost_of=lambda _: Cost())
    c.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode", max_seqs=2))])
    assert len(begun(c.step(1, [arrived(name) for name in "abc"]), Prefill)) == 3
    assert begun(c.step(2, [prefilled(name) for name in "abc"]), Decode) == ["a", "b"]
    assert begun(c.step(3, [DecodeEnded(RequestId("a"), 2, 20)]), Decode) == ["c"]


def test_a_cold_start_refuses_nobody() -> None:
    """Costs that are not measured refuse no request, on arrival or later."""
    for mode in ("ttft", "early", "predictive"):
        c = Conductor(Tuning(admission=mode, slo=Slo(1, 1)), cost_of=lambda _: Cost())  # type: ignore[arg-type]
        c.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
        begin(c, 1, "a", "b", "c")


def test_come_back_when_somebody_will_have_ended() -> None:
    """Retry-After grows with the expected outputs of the decodes there."""
    waits = []
    for tokens in (5, 50_000):
        c = cluster("predictive", "p0", "d0", held_share=0.0)
        teach(c, tokens)
        begin(c, TAUGHT, "a", "b")
        [refuse] = [a for a in c.step(TAUGHT + 1, [arrived("c")]) if isinstance(a, Refuse)]
        waits.append(refuse.retry_after_us)
    assert waits[0] == 1_000_000
    assert waits[1] is not None
    assert waits[1] > 1_000_000


@pytest.mark.python_core
def test_who_is_too_late_anyway_costs_no_look_at_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TTFT objective refuses it, and no forecast is made."""
    conductor = cluster("predictive", "p0", "d0", slo=Slo(ttft_us=450, tbt_us=210))
    conductor.step(0, [arrived("before")])

    def forecast(*args: Any) -> tuple[int, int]:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr(decode_forecast, "forecast", forecast)
    assert refusals(conductor.step(0, [arrived("a")])) == [("a", "ttft_slo")]


@pytest.mark.parametrize("mode", ["ttft", "early", "predictive"])
def test_what_an_idle_cluster_misses_is_told_no_time(mode: str) -> None:
    """A retry would not help: the refusal says so, and names the least time."""
    for slo, where in ((Slo(400, None), "TTFT"), (Slo(None, 90), "TBT")):
        if (mode, where) == ("ttft", "TBT"):
            continue
        c = cluster(mode, "p0", "p1", "d0", slo=slo)
        [refuse] = [a for a in c.step(1, [arrived("a")]) if isinstance(a, Refuse)]
        assert refuse.retry_after_us is None
        least = {"TTFT": "0.41", "TBT": "0.101"}[where]
        assert f"an idle cluster would take {least} ms" in refuse.why
    c = cluster(mode, "p0", "d0", slo=Slo(500, None))
    refused = [a for a in c.step(1, [arrived("a"), arrived("b")]) if isinstance(a, Refuse)]
    assert [a.retry_after_us is None for a in refused] == [False]  # only for whom is before it


@pytest.mark.parametrize("mode", ["early", "predictive"])
def test_one_token_has_no_time_between_tokens(mode: str) -> None:
    """No TBT objective refuses it, neither its own nor that of a decode there."""
    c = cluster(mode, "p0", "d0")
    teach(c, 5_000)
    begin(c, TAUGHT, "a", "b")
    assert refusals(c.step(TAUGHT + 1, [arrived("c", most=2)])) == [("c", "tbt_slo")]
    assert begun(c.step(TAUGHT + 2, [arrived("d", most=1)]), Prefill) == ["d"]
    c = cluster(mode, "p0", "d0", slo=Slo(None, 1))
    assert begun(c.step(1, [arrived("a", most=1)]), Prefill) == ["a"]


def test_a_long_wait_is_named_and_told_in_parts() -> None:
    """Clients wait for a minute at most: Retry-After is that, and the text names the whole wait."""
    slow = Cost((0, 1_000_000, 0, 0, 0, 100, 0), (5, 0.005), learns=False)
    c = Conductor(Tuning(slo=Slo(ttft_us=90_000_000)), cost_of=lambda _: slow)
    c.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
    c.step(1, [arrived(f"r{at}", 80) for at in range(5)])
    prompts = [tuple(range(at, at + 80)) for at in range(5)]
    asks = [
        Arrived(Request(RequestId(f"s{at}"), "m", len(prompt), prompt), ())
        for at, prompt in enumerate(prompts)
    ]
    refused = [a for a in c.step(2, asks) if isinstance(a, Refuse)]
    assert {a.retry_after_us for a in refused} == {60_000_000}
    assert "room is predicted in " in refused[-1].why


def test_what_tightens_an_objective_is_named() -> None:
    """A priority below 0, or a tenant's part: in the refusal, and in the decision's record."""
    low = cluster("predictive", "p0", "d0", slo=Slo(900, None))
    actions = low.step(1, [arrived("a"), arrived("b", priority=-1)])
    [refuse] = [a for a in actions if isinstance(a, Refuse)]
    assert "objective of 0.72 ms (0.8 of its own, since its priority is below 0)" in refuse.why
    flood = cluster("predictive", "p0", "d0", slo=Slo(2_000, 100_000))
    flood.step(1, [arrived("other", tenant="calm")])
    actions = flood.step(1, [arrived(f"r{at}", tenant="flood") for at in range(6)])
    [first, *_] = [a for a in actions if isinstance(a, Refuse)]
    assert "since tenant 'flood' received more than its share" in first.why
    held = [a.decision.tightened for a in actions if isinstance(a, Prefill)]
    assert held[0] is None
    assert (held[-1] or "").endswith("received more than its share")
    free = cluster("predictive", "p0", "d0", slo=Slo())
    [placed] = [a for a in free.step(1, [arrived("a", priority=-1)]) if isinstance(a, Prefill)]
    assert placed.decision.tightened is None, "without objectives there is none to tighten"


def test_a_crowd_on_a_cold_start_is_bounded_by_its_work() -> None:
    """Enough requests to learn the costs, more while a fast machine would be in time; the others
    return soon."""
    for tokens, taken in ((6_000, 120), (90_000, 16), (20, 200)):
        c = Conductor(Tuning(slo=Slo(30_000_000, None)), cost_of=lambda _: Cost())
        names: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
        infos = [
            msgspec.structs.replace(info(n, r), max_requests=400, kv_blocks=1 << 20)
            for n, r in names.items()
        ]
        c.step(0, [Joined(it) for it in infos])
        prompts = [tuple(range(at, at + tokens)) for at in range(200)]
        crowd = [
            Arrived(Request(RequestId(f"r{at:03}"), "m", len(prompt), prompt), ())
            for at, prompt in enumerate(prompts)
        ]
        actions = c.step(1, crowd)
        assert len(begun(actions, Prefill)) == taken
        waits = [a.retry_after_us for a in actions if isinstance(a, Refuse)]
        assert all(us is not None and 1_000_000 <= us <= 6_000_000 for us in waits)
        assert len(set(waits)) >= (200 - taken) // 2


def test_who_leaves_early_says_little_and_one_token_says_all() -> None:
    """Clients that left teach that outputs are longer; outputs of one token teach their length."""
    expected = {}
    for how in ("left", "one"):
        c = cluster("predictive", "p0", "d0", slo=Slo())
        for at in range(100):
            name, now_us = f"seen{at}", at * 100_000
            c.step(now_us, [arrived(name)])
            if how == "one":
                c.step(now_us + 410, [PrefillEnded(RequestId(name), 1, final=True)])
            else:
                c.step(now_us + 410, [prefilled(name)])
                c.step(now_us + 1_410, [ClientGone(RequestId(name))])  # after some ten passes
        c.step(20_000_000, [arrived("next")])
        expected[how] = c.view.instances["d0"].residencies.promised[RequestId("next")].expected  # type: ignore[index]
    assert expected["left"] > 100
    assert expected["one"] < 30


def test_full_instances_keep_places_for_others() -> None:
    """When one tenant fills every instance, another finds room, and an invented tenant none."""
    made = Conductor(Tuning(), cost_of=simple)
    joining = [info("p0", "prefill"), info("d0", "decode")]
    made.step(0, [Joined(msgspec.structs.replace(one, max_requests=8)) for one in joining])
    flood = {"tenant": "flood", "address": "a"}
    asked = made.step(1, [arrived(f"f{i}", **flood) for i in range(20)])
    assert len(begun(asked, Prefill)) == 8
    assert {reason for _, reason in refusals(asked)} == {"instances_full"}
    invented = made.step(2, [arrived(f"i{i}", tenant=f"t{i}", address="a") for i in range(4)])
    assert len(begun(invented, Prefill)) == 1
    other = made.step(3, [arrived(f"o{i}", tenant="calm", address="b") for i in range(2)])
    assert len(begun(other, Prefill)) == 1
    made.view.check()
    names = [name for actions in (asked, invented, other) for name in begun(actions, Prefill)]
    made.step(4, [ClientGone(RequestId(name)) for name in names])
    assert made.promised() == Promised(0, 0, 0, 0)
    assert made._under_way.used == 0


def test_one_tenant_alone_may_fill_every_instance() -> None:
    """Without others there is no reserve: many addresses of one tenant get no more, and no less."""
    made = Conductor(Tuning(), cost_of=simple)
    joining = [info("p0", "prefill"), info("d0", "decode")]
    made.step(0, [Joined(msgspec.structs.replace(one, max_requests=8)) for one in joining])
    asked = made.step(1, [arrived(f"f{i}") for i in range(9)])
    assert len(begun(asked, Prefill)) == 8
    assert refusals(asked) == [("f8", "instances_full")]


@pytest.mark.parametrize(
    ("predicted_us", "goal_us", "said"),
    [
        (2_228_132, 2_000_000, "2228 ms misses the objective of 2000 ms"),
        (25_473_813, 2_000_000, "25.5 s misses the objective of 2000 ms"),
        (9_999_960, 9_999_000, "10 s misses the objective of 9999 ms"),
        (2_000_132, 2_000_000, "2000.132 ms misses the objective of 2000 ms"),
        (204, 155, "0.204 ms misses the objective of 0.155 ms"),
    ],
)
def test_a_refusal_rounds_its_times(predicted_us: int, goal_us: int, said: str) -> None:
    """But not so far that both would be the same."""
    assert misses("TTFT", predicted_us, goal_us) == f"predicted TTFT of {said}"
