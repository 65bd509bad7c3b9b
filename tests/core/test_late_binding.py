"""Late binding: which requests wait at the Conductor, for what, how long, in which order."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Joined,
    Left,
    PrefillEnded,
    Tick,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, exact, info

NOTHING = Promised(0, 0, 0, 0)
WORK_US = 410
"""A prefill of 41 tokens that nobody has."""


def cluster(*names: str, **tuning: object) -> Conductor:
    """A Conductor that binds late, with p… and d… instances, and m… that do both."""
    conductor = Conductor(Tuning(policy="late_binding", **tuning), cost_of=exact)  # type: ignore[arg-type]
    roles = {"p": "prefill", "d": "decode", "m": "both"}
    joins = [Joined(info(n, roles[n[0]])) for n in names]  # type: ignore[arg-type]
    assert conductor.step(0, joins) == []
    return conductor


def arrived(
    name: str, slo: Slo | None = None, priority: int = 0, length: int = 41, tenant: str = ""
) -> Arrived:
    """A request whose prompt no instance has."""
    prompt = (ord(name[0]), *range(length - 1))
    keys = tuple(chain_keys(NAMESPACE.root(), prompt, BLOCK))
    request = Request(
        RequestId(name),
        "m",
        len(prompt),
        prompt,
        slo=slo or Slo(),
        priority=priority,
        tenant=tenant,
    )
    return Arrived(request, keys)


def prefills(actions: list[Action]) -> list[tuple[str, str]]:
    """The prefill instance of each request that was bound."""
    return [(a.request, a.to.id) for a in actions if isinstance(a, Prefill)]


def ended(name: str, number: int = 1, final: bool = True) -> PrefillEnded:
    """A prefill's end, the request's last one."""
    return PrefillEnded(RequestId(name), number, final)


def failed(name: str, number: int = 1) -> CallFailed:
    """A prefill's failure."""
    fact = arrived(name)
    return CallFailed(RequestId(name), number, "reset", True, 41, fact.keys)


def test_a_request_waits_until_an_instance_is_free() -> None:
    """Each instance has one prefill at a time; a waiting request is bound when one ends."""
    conductor = cluster("p0", "p1", "d0")
    facts = [arrived(name) for name in "abc"]
    assert prefills(conductor.step(1, facts)) == [("a", "p0"), ("b", "p1")]
    assert conductor.waiting == 1
    assert conductor.promised() == Promised(3, 2, 2 * WORK_US, 2)
    bound = conductor.step(500, [ended("b")])
    assert prefills(bound) == [("c", "p1")]
    [prefill] = [a for a in bound if isinstance(a, Prefill)]
    assert prefill.decision.waited_us == 499
    assert prefill.decision.predicted_ttft_us == 499 + WORK_US
    assert conductor.waiting == 0
    conductor.step(900, [ended("a"), ended("c")])
    assert conductor.promised() == NOTHING


def test_priority_goes_first_and_then_first_come() -> None:
    """Among equals the earlier arrival; of one instant, the first id."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived("a")])
    conductor.step(2, [arrived("c"), arrived("b"), arrived("x", priority=-1)])
    conductor.step(3, [arrived("d"), arrived("h", priority=5)])
    order = []
    running = "a"
    for now_us in range(1_000, 7_000, 1_000):
        for bound, _ in prefills(conductor.step(now_us, [ended(running)])):
            order.append(bound)
            running = bound
    assert order == ["h", "b", "c", "d", "x"]
    assert conductor.promised() == NOTHING


def test_a_waiter_is_refused_when_it_can_no_longer_be_in_time() -> None:
    """`wake_us` gives that time; the refusal has the reason and a Retry-After."""
    conductor = cluster("p0", "d0")
    conductor.step(0, [arrived("a")])
    conductor.step(0, [arrived("b", Slo(ttft_us=600)), arrived("c", Slo(ttft_us=900))])
    due_us = 600 - WORK_US
    assert conductor.wake_us(0) == due_us + 1
    assert conductor.step(due_us, []) == []
    refuse, release = conductor.step(due_us + 1, [])
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.reason) == ("b", "ttft_slo")
    assert refuse.retry_after_us == 1_000_000
    assert release == Release(RequestId("b"), ())
    assert conductor.wake_us(due_us + 1) == 900 - WORK_US + 1
    assert prefills(conductor.step(WORK_US, [ended("a")])) == [("c", "p0")]
    assert conductor.wake_us(WORK_US) is None


@pytest.mark.parametrize("policy", ["late_binding", "kvcache_centric", "random"])
def test_an_impossible_objective_is_refused_at_once(policy: str) -> None:
    """Under every policy, with one reason; without refusal, it is served all the same."""
    for slo, reason in ((Slo(ttft_us=5), "ttft_slo"), (Slo(tbt_us=5), "tbt_slo")):
        for refuse in ("predictive", "none"):
            tuning = Tuning(policy=policy, slo=slo, admission=refuse)  # type: ignore[arg-type]
            conductor = Conductor(tuning, Random(1), exact)
            conductor.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
            first, *rest = conductor.step(1, [arrived("a")])
            if refuse == "none":
                assert isinstance(first, Prefill)
                continue
            assert isinstance(first, Refuse)
            assert first.reason == reason
            assert rest == [Release(RequestId("a"), ())]
            assert conductor.promised() == NOTHING


def test_own_objectives_win_over_the_clusters() -> None:
    """A request's own value replaces the default, field by field."""
    conductor = cluster("p0", "d0", slo=Slo(ttft_us=5, tbt_us=1_000))
    assert prefills(conductor.step(1, [arrived("a", Slo(ttft_us=5_000))])) == [("a", "p0")]
    [refuse, _] = conductor.step(1, [arrived("b")])
    assert isinstance(refuse, Refuse)


def test_a_full_room_refuses() -> None:
    """One more request than max_waiting gets a Retry-After."""
    conductor = cluster("p0", "d0", max_waiting=1)
    conductor.step(1, [arrived("a")])
    conductor.step(1, [arrived("b")])
    refuse, _ = conductor.step(2, [arrived("c")])
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.reason) == ("c", "queue_full")
    assert conductor.waiting == 1


def test_a_prompt_that_fits_nowhere_is_refused_and_blocks_nobody() -> None:
    """KV memory of 400 tokens never takes 401."""
    conductor = cluster("p0", "d0")
    actions = conductor.step(1, [arrived("a", length=401), arrived("b")])
    refuse = actions[0]
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.reason) == ("a", "kv_memory")
    assert prefills(actions) == [("b", "p0")]


def test_no_prefill_is_spent_while_decode_would_miss_its_objective() -> None:
    """The head waits for a member to leave; alone in an empty instance it is taken or refused."""
    conductor = cluster("p0", "p1", "d0")
    conductor.step(1, [arrived("a", length=300)])
    strict = Slo(tbt_us=300)  # alone 100 + 10 + 41; beside the other 100 + 20 + 341
    assert conductor.step(2, [arrived("b", strict)]) == []
    [decode] = conductor.step(500, [ended("a", final=False)])
    assert isinstance(decode, Decode)
    left = conductor.step(900, [DecodeEnded(RequestId("a"), decode.number, tokens=0)])
    assert prefills(left) == [("b", "p1")]


def test_a_stricter_goal_of_its_own_holds_nobody_else_up() -> None:
    """Others pass a request that waits for an emptier decode instance than they need."""
    conductor = cluster("p0", "p1", "d0")
    conductor.step(1, [arrived("a", length=300)])
    assert conductor.step(2, [arrived("b", Slo(tbt_us=300))]) == []
    assert prefills(conductor.step(3, [arrived("c")])) == [("c", "p1")]
    assert conductor.waiting == 1


def test_alone_a_request_may_take_all_of_its_objective() -> None:
    """An idle instance that meets the goal does not refuse for the share kept for later ones."""
    conductor = cluster("p0", "d0")
    goal = Slo(tbt_us=160)  # alone 151, which is more than 55% of it
    assert prefills(conductor.step(1, [arrived("a", goal)])) == [("a", "p0")]


def test_an_instance_about_to_be_free_is_bound_ahead() -> None:
    """One request runs; the next is bound when little work is left; `wake_us` gives the time."""
    conductor = cluster("p0", "d0", bind_ahead_us=100)
    conductor.step(0, [arrived("a"), arrived("b"), arrived("c")])
    assert conductor.wake_us(0) == WORK_US - 100
    assert conductor.step(WORK_US - 101, []) == []
    assert prefills(conductor.step(WORK_US - 100, [])) == [("b", "p0")]
    assert prefills(conductor.step(WORK_US, [])) == []
    assert prefills(conductor.step(WORK_US + 9, [ended("a")])) == []
    assert conductor.wake_us(WORK_US + 9) == WORK_US + 9 + WORK_US - 100


def test_who_leaves_while_waiting_leaves_nothing() -> None:
    """No call, no promise, no place in the room."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived("a"), arrived("b")])
    assert conductor.step(2, [ClientGone(RequestId("b"))]) == [Release(RequestId("b"), ())]
    assert conductor.waiting == 0
    assert conductor.step(3, [ended("a")]) == [Release(RequestId("a"), (1,))]
    assert conductor.promised() == NOTHING
    assert conductor.wake_us(3) is None


def test_a_failed_instance_is_left_alone_while_there_is_another() -> None:
    """The retry waits for the other one rather than take the free one that failed it."""
    conductor = cluster("p0", "p1", "d0")
    conductor.step(1, [arrived("a"), arrived("b")])
    assert conductor.step(2, [failed("a")]) == []
    assert prefills(conductor.step(3, [ended("b")])) == [("a", "p1")]
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived("a")])
    assert prefills(conductor.step(2, [failed("a")])) == [("a", "p0")]


@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_who_waits_outlives_the_loss_of_the_last_instance(lost: str) -> None:
    """It waits for one to join, up to the patience, then in the room again."""
    role = "prefill" if lost == "p0" else "decode"
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived("a"), arrived("b")])
    assert conductor.step(2, [Left(InstanceId(lost), 1)]) == []
    assert conductor.waiting == 0
    assert conductor.step(3, [Tick()]) == []
    again = conductor.step(4, [Joined(info(lost, role, epoch=2))])  # type: ignore[arg-type]
    busy = lost == "d0"
    assert prefills(again) == ([] if busy else [("b", "p0")])
    assert conductor.waiting == busy
    assert conductor.step(5, [Tick()]) == []
    assert conductor.waiting == busy
    ends = conductor.step(6, [ClientGone(RequestId("a")), ClientGone(RequestId("b"))])
    assert [type(a) for a in ends] == [Release, Release]
    assert conductor.promised() == NOTHING


def test_patience_ends_for_who_waited_too() -> None:
    """If no instance joins, the request fails."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived("a"), arrived("b")])
    conductor.step(2, [Left(InstanceId("p0"), 1)])
    ends = conductor.step(31_000_000, [Tick()])
    assert [type(a) for a in ends if a.request == "b"] == [GiveUp, Release]


def test_several_models_wait_in_rooms_of_their_own() -> None:
    """A busy model delays no other."""
    conductor = cluster("p0", "d0")
    for name, role in (("p5", "prefill"), ("d5", "decode")):
        other = msgspec.structs.replace(info(name, role), model="n")  # type: ignore[arg-type]
        conductor.step(0, [Joined(other)])
    conductor.step(1, [arrived("a"), arrived("b")])
    fact = arrived("c")
    foreign = msgspec.structs.replace(fact.request, model="n")
    assert prefills(conductor.step(2, [Arrived(foreign, fact.keys)])) == [("c", "p5")]
    assert conductor.waiting == 1


def test_the_output_to_expect_is_learnt() -> None:
    """Long outputs make a decode count for more context."""
    conductor = cluster("p0", "d0")
    for turn in range(3):
        name, now_us = f"{turn}", Micros(turn * 1_000)
        conductor.step(now_us, [arrived(name)])
        [decode] = conductor.step(now_us + 500, [ended(name, final=False)])
        assert isinstance(decode, Decode)
        conductor.step(now_us + 900, [DecodeEnded(RequestId(name), decode.number, tokens=640)])
    conductor.step(9_000, [arrived("x")])
    assert conductor.view.instances[InstanceId("d0")].context > 41 + 10


def test_one_too_long_for_the_free_instance_holds_nobody_up() -> None:
    """A waiter that only the busy, larger instance can hold does not idle the small one."""
    c = Conductor(Tuning(policy="late_binding"), cost_of=exact)
    small = msgspec.structs.replace(info("p0", "prefill"), kv_blocks=4)
    c.step(0, [Joined(small), Joined(info("p1", "prefill")), Joined(info("d0", "decode"))])
    first = prefills(c.step(1, [arrived("a", length=4 * BLOCK + 1)]))
    assert first == [("a", "p1")]
    c.step(2, [arrived("b", length=4 * BLOCK + 2, priority=1)])  # waits for p1
    got = prefills(c.step(3, [arrived("c", length=5)]))
    assert got == [("c", "p0")], got


def test_a_retry_that_avoids_the_free_instance_holds_nobody_up() -> None:
    """It failed on the free instance, so it waits for another one; others pass it."""
    c = cluster("p0", "p1", "d0")
    assert prefills(c.step(1, [arrived("a")])) == [("a", "p0")]
    assert prefills(c.step(2, [arrived("b", length=400)])) == [("b", "p1")]
    c.step(3, [failed("a")])  # p0 is free, p1 busy: a waits for p1
    got = prefills(c.step(4, [arrived("c")]))
    assert got == [("c", "p0")], got


def test_a_resumed_stream_does_not_wait_behind_new_ones() -> None:
    """A request whose stream broke goes before requests without a token."""
    c = cluster("p0", "d0", "d1")
    fact = arrived("a", length=400)
    c.step(1, [fact])
    c.step(5_000, [ended("a", final=False)])
    t = 40_000_000
    c.step(t, [arrived("b", length=40)])
    c.step(t, [CallFailed(RequestId("a"), 2, "reset", True, 400, fact.keys)])
    running, went = "b", []
    for i in range(60):
        t += 400
        new = arrived(chr(ord("c") + i), length=40)
        got = prefills(c.step(t, [ended(running), new]))
        went += [g[0] for g in got]
        running = got[0][0]
        if running == "a":
            break
    assert "a" in went[:3], f"{len(went)} went first"


def test_a_strict_goal_of_its_own_does_not_let_others_pass_for_ever() -> None:
    """It is bound or refused in bounded time though others keep decode busy."""
    c = cluster("p0", "d0")
    c.step(1, [arrived("a")])
    now_us = 1_000
    c.step(now_us, [ended("a", final=False)])
    alone_us = c.view.instances[InstanceId("d0")].cost.decode_step_us(1, 41)
    c.step(now_us + 1, [arrived("s", Slo(tbt_us=2 * alone_us))])
    before = "a"
    for number in range(1_200):
        now_us += 1_000_000
        name = f"n{number}"
        actions = c.step(now_us, [arrived(name)])
        actions += c.step(now_us + 1_000, [ended(name, final=False)])
        actions += c.step(now_us + 2_000, [DecodeEnded(RequestId(before), 2, 5)])
        if any(action.request == "s" for action in actions):
            return
        before = name
    pytest.fail("passed by 1,200 requests in 1,200 s")


def test_a_full_mixed_instance_does_not_hold_up_the_others() -> None:
    """The one that has the prefix is full of decodes, another is idle: it decodes there."""
    c = cluster("m0", "m1", slo=Slo(tbt_us=500), admission="none")
    fact = arrived("a")
    c.step(1, [BlocksStored(SegmentId("m0"), fact.keys, None, "dram", 1)])
    full, number = c.view.instances[InstanceId("m0")], 0
    while full.tbt_us(41) <= 275:
        full.promise_decode(RequestId(f"x{number}"), 41)
        number += 1
    assert full.has_slot(41)
    [prefill] = [a for a in c.step(2, [fact]) if isinstance(a, Prefill)]
    assert prefill.decision.decode == "m1"


def test_a_cluster_objective_holds_up_nobody_whose_own_is_looser() -> None:
    """For all others nothing is gained by a prefill while decode has no room."""
    loose = Slo(tbt_us=10_000)
    c = cluster("p0", "p1", "d0", slo=Slo(tbt_us=300), admission="none")
    c.step(1, [arrived("a", loose, length=300)])
    assert c.step(2, [arrived("b"), arrived("c")]) == []
    assert prefills(c.step(3, [arrived("e", loose)])) == [("e", "p1")]
    assert c.waiting == 2


def test_without_an_objective_nobody_breaks_those_of_others() -> None:
    """It waits until the strict one has left decode, as the others would."""
    c = cluster("p0", "p1", "d0")
    assert prefills(c.step(1, [arrived("a", Slo(tbt_us=160))])) == [("a", "p0")]
    assert c.step(2, [arrived("b")]) == []
    [decode] = c.step(500, [ended("a", final=False)])
    assert isinstance(decode, Decode)
    left = c.step(900, [DecodeEnded(RequestId("a"), decode.number, tokens=0)])
    assert prefills(left) == [("b", "p1")]


@pytest.mark.parametrize("policy", ["late_binding", "kvcache_centric"])
def test_an_objective_missed_from_the_start_binds_nobody_else(policy: str) -> None:
    """If it is bound all the same, it does not keep other requests from joining."""
    c = Conductor(Tuning(policy=policy, admission="none"), cost_of=exact)
    joins = [Joined(info(n, "prefill")) for n in ("p0", "p1")] + [Joined(info("d0", "decode"))]
    c.step(0, joins)
    assert prefills(c.step(1, [arrived("a", Slo(tbt_us=5))])) == [("a", "p0")]
    c.step(2, [ended("a", final=False)])
    assert c.view.instances[InstanceId("d0")].strictest_us() is None
    assert len(prefills(c.step(3, [arrived("b", Slo(tbt_us=5)), arrived("c")]))) == 2


def test_an_impossible_objective_is_refused_at_once_though_decode_is_busy() -> None:
    """No instance that empties would help it; one that could be met alone waits."""
    c = cluster("p0", "p1", "d0")
    c.step(1, [arrived("a")])
    refuse, _ = c.step(2, [arrived("b", Slo(tbt_us=150)), arrived("c", Slo(tbt_us=151))])
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.reason) == ("b", "tbt_slo")
    assert c.waiting == 1


def test_who_waited_for_decode_is_refused_for_it() -> None:
    """The TTFT can no longer be met, since decode had no room: the refusal names the objectives of
    decode only."""
    c = cluster("p0", "p1", "d0", slo=Slo(10_000, 300), admission="ttft")
    c.step(1, [arrived("a", length=300)])
    assert c.step(2, [arrived("b")]) == []
    refuse, _ = c.step(20_000, [])
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.reason) == ("b", "tbt_slo")
    waited, why = refuse.why.split(", ")
    assert waited == "after 0.02 s of waiting"
    assert why == "decode had no room for it within the TBT objectives"


def stored(name: str, blocks: int, instance: str = "p0") -> BlocksStored:
    """An instance has the first blocks of a request's prompt."""
    keys = tuple(arrived(name).keys[:blocks])
    return BlocksStored(SegmentId(instance), keys, None, "dram", 1)


def test_a_prefix_that_is_being_computed_is_not_computed_twice() -> None:
    """A request waits for it though another instance is idle, if that makes it sooner."""
    c = cluster("p0", "p1", "d0")
    assert prefills(c.step(1, [arrived("a")])) == [("a", "p0")]
    assert prefills(c.step(200, [arrived("a2")])) == []
    assert prefills(c.step(201, [arrived("b")])) == [("b", "p1")]  # another may pass it
    assert prefills(c.step(412, [stored("a", 10), ended("a")])) == [("a2", "p0")]


def test_a_prefix_that_comes_too_late_is_computed_again() -> None:
    """Waiting is worth it only where it saves more time than it takes, and no objective is lost."""
    c = cluster("p0", "p1", "d0")
    c.step(1, [arrived("a")])
    assert prefills(c.step(2, [arrived("a2")])) == [("a2", "p1")]  # 409 us to wait, 400 saved
    c = cluster("p0", "p1", "d0", slo=Slo(ttft_us=600))
    c.step(1, [arrived("a")])
    assert prefills(c.step(200, [arrived("a2")])) == [("a2", "p1")]  # less than the margin is left


def test_a_prefix_that_came_meanwhile_makes_a_request_hopeful() -> None:
    """It lacked a block that is stored now: it is not refused for the time it would have taken."""
    for comes in (True, False):
        c = cluster("p0", "d0", slo=Slo(ttft_us=500), admission="ttft")
        c.step(1, [arrived("a")])
        c.step(2, [arrived("a2")])  # its prefill of 410 us must begin by 92
        c.step(90, [stored("a", 10)] if comes else [])
        refused = [a.request for a in c.step(93, []) if isinstance(a, Refuse)]
        assert refused == ([] if comes else ["a2"])
        assert prefills(c.step(412, [ended("a")])) == ([("a2", "p0")] if comes else [])


def test_a_prefix_that_came_meanwhile_makes_a_request_the_shortest() -> None:
    """It passes one that took less time before the blocks were stored."""
    c = cluster("p0", "d0")
    c.step(1, [arrived("a")])
    c.step(2, [arrived("b"), arrived("c", length=21)])
    c.step(100, [stored("b", 10)])
    assert prefills(c.step(411, [ended("a")])) == [("b", "p0")]


def test_a_prefix_that_was_evicted_makes_a_request_wait_its_turn() -> None:
    """It seemed the shortest; looked up again when it is chosen, it is not."""
    c = cluster("p0", "d0")
    c.step(0, [stored("b", 10)])
    c.step(1, [arrived("a")])
    c.step(2, [arrived("b"), arrived("c", length=21)])  # 10 us by what is cached, and 210
    c.step(3, [BlocksRemoved(SegmentId("p0"), tuple(arrived("b").keys[:10]), "dram", 1)])
    assert prefills(c.step(411, [ended("a")])) == [("c", "p0")]


def test_one_that_has_waited_fills_decode_further() -> None:
    """Room is kept for a joiner's own gap, but not at the price of its TTFT objective."""
    c = cluster("p0", "d0", slo=Slo(ttft_us=8_000_000, tbt_us=500), admission="none")
    decode, number = c.view.instances[InstanceId("d0")], 0
    while decode.tbt_us(41) <= 0.7 * 500:
        decode.promise_decode(RequestId(f"x{number}"), 41)
        number += 1
    assert not c.step(1, [arrived("a")])
    assert not c.step(2_000_000, [])
    assert [type(action) for action in c.step(2_000_002, [])] == [Prefill]


def test_a_tenants_flood_leaves_others_a_place_to_wait() -> None:
    """Where all places are taken the flood's last gives way, and turns bring the other in soon."""
    conductor = cluster("p0", "d0", max_waiting=3)
    for at in range(4):
        conductor.step(1, [arrived(f"{at} flood", tenant="flood")])
    actions = conductor.step(2, [arrived("calm", tenant="calm")])
    assert [(a.request, a.reason) for a in actions if isinstance(a, Refuse)] == [
        ("3 flood", "queue_full")
    ]
    assert prefills(conductor.step(3, [ended("0 flood")])) == [("calm", "p0")]
    actions = conductor.step(
        4, [arrived("4 flood", tenant="flood"), arrived("5 flood", tenant="flood")]
    )
    assert [a.request for a in actions if isinstance(a, Refuse)] == ["5 flood"]
