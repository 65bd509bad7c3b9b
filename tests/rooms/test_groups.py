"""Which group shares a long prompt, and how: against trying everything, and by cases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from moonserve.core.kv.index import Match
from moonserve.core.request import EffectiveSlo, Slo
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.decide import decide
from moonserve.core.schedule.estimate import Ask, Roles
from moonserve.core.schedule.groups import groups, partners, split
from moonserve.core.schedule.pipeline import Group, Step, Work, chain, finish, pass_us, shared_us
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import RequestId, Tokens
from moonserve.sim.setup import Setup

A800 = PROFILES["a800"]
SIZE = 512


def views(
    count: int, queues_us: Sequence[int] = (), cost: Cost | None = None, **more: Any
) -> list[InstanceView]:
    """Prefill instances p000, p001 and so on, with that much work promised."""
    infos = [i for i in Setup(prefill=count, profile=A800).instances(SIZE) if i.role == "prefill"]
    made = []
    for at, info in enumerate(infos):
        view = InstanceView(msgspec.structs.replace(info, **more), 0, cost or A800.cost())
        if at < len(queues_us) and queues_us[at]:
            view.promise_prefill(RequestId("other"), queues_us[at], 1, 0)
        made.append(view)
    return made


def in_rack(view: InstanceView, rack: str) -> InstanceView:
    """The same, standing elsewhere."""
    return InstanceView(msgspec.structs.replace(view.info, rack=rack), 0, view.cost)


def work(length: Tokens, most: int = 8, start: Tokens = 0, **more: Any) -> Work:
    """A prompt to be shared."""
    given = {"load_us": 0, "form": "chain", "cross_rack": 2.0, **more}
    return Work(start, length, SIZE, most=most, **given)


def by_size(members: list[InstanceView], of: Work) -> dict[int, Group]:
    """The groups by how many they are."""
    return {len(group.stages): group for group in groups(members[0], members[1:], of, 0)}


def brute_force_us(steps: Sequence[Step], pieces: int) -> float:
    """When all pieces of all stages are done, one by one."""
    done = [[0.0] * pieces for _ in steps]
    for at, step in enumerate(steps):
        moved = -1e18
        for piece in range(pieces):
            came = step.ready_us
            if at:
                moved = max(moved, done[at - 1][piece] + step.base_us) + step.link_us
                came = max(came, moved)
            before = done[at][piece - 1] if piece else step.ready_us
            done[at][piece] = max(came, before) + step.work_us / pieces
    return done[-1][-1]


def test_two_ends_say_all() -> None:
    """The last piece is done when going through all pieces says so, whatever is slow."""
    rng = Random(1)
    for _ in range(300):
        steps = [
            Step(
                rng.choice([0, 50, 900]), rng.uniform(1, 500), rng.uniform(0, 9), rng.uniform(0, 5)
            )
            for _ in range(rng.randint(1, 6))
        ]
        pieces = rng.randint(1, 20)
        assert finish(steps, pieces)[-1][1] == pytest.approx(brute_force_us(steps, pieces))


def best_cuts_us(members: Sequence[InstanceView], of: Work) -> float:
    """The soonest end that any choice of blocks gives these stages."""
    blocks = -(-(of.length - of.start) // SIZE)
    found = []
    for at in combinations(range(1, blocks), len(members) - 1):
        cuts = [of.start, *(of.start + SIZE * cut for cut in at), of.length]
        steps = []
        for stage, (start, end) in enumerate(pairwise(cuts)):
            view, ready_us = members[stage], members[stage].queue_us(0)
            link_us = view.cost.load_us[1] * view.info.block_bytes / SIZE * start / 80
            took_us = pass_us(view.cost, start, end)
            load_us = of.load_us if not stage else 0
            steps.append(Step(ready_us + load_us, took_us, link_us if stage else 0.0))
        found.append(finish(steps, 80)[-1][1])
    return min(found)


def test_parts_are_about_as_good_as_can_be() -> None:
    """For a few blocks the best of all cuts is at most 5% better, and 1% on average."""
    rng = Random(2)
    ratios = []
    for _ in range(60):
        speed = rng.choice([0.5, 1, 2])
        cost = Cost([us * speed for us in A800.pass_us], (0, 1e6 / 87e9), learns=False)
        members = views(3, [rng.choice([0, 0, 200_000]) for _ in range(3)], cost)
        length = SIZE * rng.randint(16, 26) + rng.randint(1, SIZE)
        of = work(length, 3, SIZE * rng.choice([0, 4]), load_us=rng.choice([0, 30_000]))
        for group in by_size(members, of).values():
            chosen = {stage.instance: at for at, stage in enumerate(group.stages)}
            ordered = sorted(
                (view for view in members if view.info.id in chosen),
                key=lambda view, chosen=chosen: chosen[view.info.id],
            )
            ratios.append(group.ttft_us / best_cuts_us(ordered, of))
    assert max(ratios) < 1.05
    assert sum(ratios) / len(ratios) < 1.01


@pytest.mark.parametrize("form", ["chain", "layers"])
def test_more_take_less_time(form: str) -> None:
    """Idle instances of a kind are the sooner done the more they are, but for their share never."""
    alone_us = pass_us(A800.cost(), 0, 131_072)
    found = by_size(views(8), work(131_072, form=form))
    times = [alone_us, *(found[size].ttft_us for size in range(2, 9))]
    assert all(more < fewer for fewer, more in pairwise(times))
    assert all(group.ttft_us > alone_us / size for size, group in found.items())
    assert all(group.spent_us >= alone_us for group in found.values())


def test_later_parts_are_shorter() -> None:
    """They attend to more, and begin later."""
    stages = by_size(views(8), work(131_072))[8].stages
    lengths = [stage.end - stage.start for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]
    assert all(stage.start % SIZE == 0 for stage in stages)


def test_chunks_of_the_layers_form_cost_what_their_passes_do() -> None:
    """One chunk is one pass, shared evenly; many are more, by what each pass costs."""
    cost = A800.cost()
    assert shared_us(cost, 0, 65_536, 1, 4) == round(pass_us(cost, 0, 65_536) / 4)
    least_us = pass_us(cost, 0, 65_536) + 15 * A800.pass_us[0]
    assert shared_us(cost, 0, 65_536, 16, 1) > least_us


def test_the_free_come_before_the_busy_and_the_near_before_the_far() -> None:
    """An instance of another rack is as good as one here that is free later by the way's length."""
    first, busy, idle = views(3, [0, 3_000_000, 0])
    assert partners(first, [busy, idle], work(32_768), 0) == [idle, busy]
    here = [in_rack(view, "a") for view in views(2)]
    there = [in_rack(view, "b") for view in views(4)[2:]]
    assert partners(here[0], [*there, here[1]], work(32_768), 0) == [here[1], *there]
    assert partners(here[0], [there[0], busy], work(32_768), 0)[0] is there[0]


def test_who_cannot_be_a_stage_is_none() -> None:
    """Other models' layers, other namespaces, engines that hand nothing on, and full ones."""
    first, other = views(2)
    [mute] = views(1, layers=0)
    [unlike] = views(1, layers=40)
    [foreign] = views(1, namespace=msgspec.structs.replace(first.info.namespace, revision="x"))
    [full] = views(1, [5], max_requests=1)
    everybody = [first, mute, unlike, foreign, full, other]
    assert partners(first, everybody, work(32_768), 0) == [other]
    assert partners(mute, everybody, work(32_768), 0) == []


def test_a_stage_waits_for_its_instance_and_for_the_stage_before() -> None:
    """Work promised to a member delays it, so it gets less to do; its ledger knows its end."""
    idle, late = views(2), views(2, [0, 1_000_000])
    even, uneven = (by_size(both, work(32_768))[2] for both in (idle, late))
    assert uneven.stages[1].start > even.stages[1].start
    assert even.ttft_us < uneven.ttft_us < even.ttft_us + 1_000_000
    assert uneven.stages[1].work_us == uneven.ttft_us - 1_000_000


def whom(seconds: float | None, queues_us: Sequence[int] = (0,) * 8) -> tuple[int, str]:
    """How many share 65,536 tokens of which one alone computes for 10.4 s; and why not more."""
    members = views(len(queues_us), queues_us)
    alone_us = pass_us(members[0].cost, 0, 65_536)
    within_us = None if seconds is None else round(seconds * 1e6)
    alone = (alone_us + queues_us[0], alone_us)
    group, why = split(members[0], members[1:], work(65_536), alone, within_us, 0)
    assert (group is None) == bool(why)
    return len(group.stages) if group else 1, why


def test_the_smallest_group_that_is_in_time() -> None:
    """No larger than need be; none where one alone will do."""
    found = by_size(views(8), work(65_536))
    for size in (2, 3, 5, 8):
        assert whom(found[size].ttft_us / 1e6)[0] == size
    assert whom(11) == (1, "one instance alone meets the TTFT objective")
    assert whom(None) == (1, "there is no TTFT objective")
    assert whom(1, [0]) == (1, "no other instance can take a part of it")


def test_too_long_for_all_together_the_idle_do_it() -> None:
    """Late all the same, it is at least as quick as can be, but never at the cost of who waits."""
    assert whom(1)[0] == 8
    size, why = whom(1, [0, *[5_000_000] * 7])
    assert size == 1
    assert why.startswith("the best group, of 8 instances, would be late too, after 5.")
    assert whom(1, [5_000_000, *[0] * 7])[0] == 1


def test_queues_are_no_reason_to_share() -> None:
    """One that would be in time with nobody before it is not split."""
    late = whom(11, [1_000_000] * 8)
    assert late == (1, "it would be late because of the queue before it, not because of its length")


def test_where_all_are_busy_it_is_soon_said_that_none_is_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No plan is made for a crowd that is refused; where there is time enough, one is."""
    assert whom(6, [1_000_000] * 8)[0] > 1

    def chain(*args: object) -> None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr("moonserve.core.schedule.groups.chain", chain)
    late = whom(6, [5_000_000] * 8)
    assert late == (1, "the instances that could share it have too little time left")


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random"}))
def test_a_decision_names_the_group(policy: str) -> None:
    """Under any policy the chosen one comes first; what it would take alone can still be read."""
    ask = Ask(65_536, Match(0, {}), slo=EffectiveSlo(Slo(3_000_000, None)))
    tuning = Tuning(policy=policy, cpp=4)
    decodes = views(1, role="decode")
    verdict = decide(ask, Roles(views(8), decodes), PolicyState(), tuning, 0)
    assert verdict is not None
    decision = verdict.decision
    assert len(decision.stages) == 4
    assert decision.stages[0].instance == decision.chosen.instance
    assert decision.prefill == decision.stages[-1].instance
    assert decision.predicted_ttft_us < 3_000_000 < decision.chosen.ttft_us
    assert not verdict.misses_ttft


@pytest.mark.parametrize("within_us", [700_000, 1_000_000, 2_000_000, 5_000_000])
def test_of_many_the_smallest_that_is_in_time_is_found(within_us: int) -> None:
    """Though not every size is planned: the same as by trying them all."""
    members, of = views(40), work(100_000, most=40)
    tried = {size: chain(members[:size], of, 0) for size in range(2, 41)}
    sizes = [size for size, it in tried.items() if it is not None and it.ttft_us <= within_us]
    alone_us = pass_us(members[0].cost, 0, of.length)
    found, _ = split(members[0], members[1:], of, (alone_us, alone_us), within_us, 0)
    if sizes:
        assert found is not None
        assert len(found.stages) == min(sizes)
    else:
        assert found is None or found.ttft_us > within_us
