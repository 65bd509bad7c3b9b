"""The terms of every candidate, what each policy makes of them, and the decode choice: tables."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.kv.index import Match
from moonserve.core.request import EffectiveSlo, Slo
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.decide import Verdict, decide
from moonserve.core.schedule.estimate import Ask, Estimate, Fetch, Options, Roles, choose_decode
from moonserve.core.schedule.policies import POLICIES, policy_of
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId
from tests.support.cluster import BLOCK, view

P0, P1, D0 = SegmentId("p0"), SegmentId("p1"), SegmentId("d0")
NOTHING = Match(0, {})


def prefill(name: str, work_us: Micros = 0, rack: str = "", **more: object) -> InstanceView:
    """A prefill instance with work promised at time 0."""
    made = view(name, "prefill")
    made = InstanceView(msgspec.structs.replace(made.info, rack=rack, **more), 0, made.cost)
    if work_us:
        made.promise_prefill(RequestId("other"), work_us, 0, 0)
    return made


def decode(name: str, *contexts: int, max_seqs: int = 8, rack: str = "") -> InstanceView:
    """A decode instance with members of these contexts; its TBT is 100 + 10 members + contexts."""
    made = view(name, "decode", max_seqs=max_seqs)
    made.info = msgspec.structs.replace(made.info, rack=rack)
    for number, context in enumerate(contexts):
        made.promise_decode(RequestId(f"{name}-{number}"), context)
    return made


def terms(
    match: Match,
    views: list[InstanceView],
    fetch: Fetch = "threshold",
    threshold: float = 1.0,
    length: int = 41,
    pending: dict[SegmentId, int] | None = None,
    racks: dict[SegmentId, str] | None = None,
) -> Options:
    """The options of one prompt at time 0; a transfer between racks takes twice as long."""
    ask = Ask(length, match, pending=pending or {})
    tuning = Tuning(kvcache_balancing_threshold=threshold, cross_rack=2.0)
    return Estimate(ask, Roles(views, (), racks=racks or {}), BLOCK, fetch, tuning).options(
        views, 0
    )


# 41 tokens = 10 full blocks of 4 and one token; a new token costs 10 us, a fetched block 5 us + 5.
@pytest.mark.parametrize(
    ("match", "fetch", "threshold", "reused", "transfer_us", "compute_us"),
    [
        # nothing cached anywhere: all is computed
        (NOTHING, "threshold", 1.0, (0, 0), (0, 0), (410, 410)),
        # p1 holds all: local there, 10 blocks to load for p0
        (Match(10, {P1: 10}), "threshold", 1.0, (10, 10), (55, 0), (10, 10)),
        # 10 blocks do not exceed twice the 5 that p0 has: it computes from its own
        (Match(10, {P0: 5, P1: 10}), "threshold", 2.0, (5, 10), (0, 0), (210, 10)),
        (Match(10, {P0: 5, P1: 10}), "threshold", 1.9, (10, 10), (30, 0), (10, 10)),
        # never: each from its own
        (Match(10, {P0: 5, P1: 10}), "never", 1.0, (5, 10), (0, 0), (210, 10)),
        # cheaper: as a threshold of 1, where loading pays
        (Match(10, {P0: 5, P1: 10}), "cheaper", 9.0, (10, 10), (30, 0), (10, 10)),
        # a run that only the pool as a whole has is loaded by everybody
        (Match(8, {D0: 6}), "threshold", 1.0, (8, 8), (45, 45), (90, 90)),
    ],
)
def test_the_terms_of_algorithm_1(
    match: Match,
    fetch: Fetch,
    threshold: float,
    reused: tuple[int, int],
    transfer_us: tuple[int, int],
    compute_us: tuple[int, int],
) -> None:
    """What an instance starts from, loads and computes follows FAST'25 Algorithm 1."""
    made = terms(match, [prefill("p0"), prefill("p1", 70)], fetch, threshold)
    assert made.reused == list(reused)
    assert made.transfer_us == list(transfer_us)
    assert made.compute_us == list(compute_us)
    assert made.queue_us == [0, 70]
    assert made.ttft_us[1] == transfer_us[1] + 70 + compute_us[1]


def test_what_costs_more_to_load_than_to_compute_is_computed() -> None:
    """`cheaper` loads nothing over a slow link; `threshold` does as Algorithm 1 says."""
    cost = Cost(pass_prior=(0, 10, 0, 0, 100, 10, 1), transfer_prior=(5, 1.0))
    slow = InstanceView(prefill("p0").info, 0, cost)
    match = Match(2, {P1: 2})
    assert terms(match, [slow], "cheaper").transfer_us == [0]
    assert terms(match, [slow], "threshold").transfer_us == [8_005 - 6_000]


def test_the_last_token_is_always_computed() -> None:
    """A fully cached prompt still computes its last block: the logits are needed."""
    made = terms(Match(10, {P0: 10}), [prefill("p0")], length=40)
    assert made.reused == [10 - 1]
    assert made.compute_us == [10 * BLOCK]


def test_what_is_coming_counts_as_held() -> None:
    """An instance that was promised the same prefix will have it when this request's turn comes."""
    made = terms(NOTHING, [prefill("p0"), prefill("p1")], pending={P1: 6})
    assert made.local == [0, 6]
    assert made.compute_us == [410, 410 - 6 * 10 * BLOCK]


def test_a_transfer_between_racks_takes_longer() -> None:
    """Only where both racks are known and differ."""
    views = [prefill("p0", rack="a"), prefill("p2", rack="b"), prefill("p3")]
    made = terms(Match(10, {P1: 10}), views, racks={P1: "a"})
    assert made.transfer_us == [55, 110, 55]
    assert terms(Match(10, {P1: 10}), views).transfer_us == [55, 55, 55]


def verdict(
    policy: str,
    match: Match = NOTHING,
    prefills: list[InstanceView] | None = None,
    decodes: list[InstanceView] | None = None,
    slo: Slo | None = None,
    state: PolicyState | None = None,
    avoid: list[InstanceId] | None = None,
    **tuning: object,
) -> Verdict | None:
    """A decision about 41 tokens at time 0; two prefill and one decode instance by default."""
    roles = Roles(
        prefills if prefills is not None else [prefill("p0"), prefill("p1")],
        decodes if decodes is not None else [decode("d0")],
    )
    ask = Ask(41, match, slo=EffectiveSlo(slo or Slo()), avoid=avoid or ())
    made = Tuning(policy=policy, **tuning)  # type: ignore[arg-type]
    return decide(ask, roles, state or PolicyState(Random(1)), made, 0)


def chosen(*args: object, **more: object) -> tuple[str, int]:
    """Prefill instance and reused tokens of a verdict."""
    made = verdict(*args, **more)  # type: ignore[arg-type]
    assert made is not None
    return made.decision.prefill, made.decision.reused_tokens


# All of a prompt of 41 tokens takes 410 us; p1 holds it all, and then one token takes 10 us.
HELD = Match(10, {P1: 10})
MS = 1_000


@pytest.mark.parametrize(
    ("policy", "match", "queues", "winner", "reused"),
    [
        # load alone, whoever holds what
        ("least_loaded", HELD, (0, 1), "p0", 0),
        ("least_loaded", NOTHING, (1, 1), "p0", 0),
        ("least_loaded", HELD, (1, 1), "p1", 40),
        ("least_loaded", HELD, (2, 1), "p1", 40),
        # queue + compute from its own: 410 against 10 + 399, and against 10 + 400
        ("cache_aware", HELD, (0, 399), "p1", 40),
        ("cache_aware", HELD, (0, 400), "p1", 40),
        ("cache_aware", HELD, (0, 401), "p0", 0),
        # the same, where loading 10 blocks takes 55: 65 against 10 + queue
        ("kvcache_centric", HELD, (0, 50), "p1", 40),
        ("kvcache_centric", HELD, (0, 56), "p0", 40),
        ("kvcache_centric", HELD, (0, 0), "p1", 40),
        ("kvcache_centric", NOTHING, (0, 0), "p0", 0),
        ("late_binding", HELD, (0, 56), "p0", 40),
        # 0.7 * 10/11 outweighs 0.3 * load of the longest queue, unless it is overloaded
        ("alpha_beta", HELD, (0, 5_000 * MS), "p1", 40),
        ("alpha_beta", NOTHING, (1_000 * MS, 5_000 * MS), "p0", 0),
        ("alpha_beta", HELD, (0, 9_500 * MS), "p0", 0),
        ("alpha_beta", HELD, (20_000 * MS, 19_000 * MS), "p1", 40),
    ],
)
def test_each_policy_by_its_rule(
    policy: str, match: Match, queues: tuple[int, int], winner: str, reused: int
) -> None:
    """The winner of two instances under each policy."""
    views = [prefill("p0", queues[0]), prefill("p1", queues[1])]
    assert chosen(policy, match, views) == (winner, reused)


def in_turn(policy: str, count: int, state: PolicyState) -> list[str]:
    """The prefill instances of `count` requests, one after another, of three instances."""
    views = [prefill(name) for name in ("p0", "p1", "p2")]
    found = []
    for _ in range(count):
        made = verdict(policy, prefills=views, state=state)
        assert made is not None
        state = made.state
        found.append(str(made.decision.prefill))
    return found


def test_round_robin_takes_turns() -> None:
    """In order of ids, from the first."""
    turns = in_turn("round_robin", 4, PolicyState())
    assert sorted(turns[:3]) == ["p0", "p1", "p2"]
    assert turns[3] == turns[0]


def test_random_draws_from_its_seed() -> None:
    """Every instance gets some; the same seed gives the same choices."""
    assert in_turn("random", 30, PolicyState(Random(1))) == in_turn(
        "random", 30, PolicyState(Random(1))
    )
    assert in_turn("random", 30, PolicyState(Random(1))) != in_turn(
        "random", 30, PolicyState(Random(2))
    )
    assert set(in_turn("random", 30, PolicyState(Random(1)))) == {"p0", "p1", "p2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_is_a_function(policy: str) -> None:
    """The same state gives the same answer again; the new state is part of the answer."""
    state = PolicyState(Random(1), turn=5)
    views = [prefill(name) for name in ("p0", "p1", "p2")]
    first, second = (verdict(policy, prefills=views, state=state) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.decision == second.decision
    assert list(first.candidates) == list(second.candidates)
    assert (state.turn, first.state.turn) == (5, 6)
    assert state.rng is not None
    assert state.rng.getstate() == Random(1).getstate()
    draws = first.state.rng
    assert draws is not None
    assert second.state.rng is not None
    assert draws.getstate() == second.state.rng.getstate()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decides(policy: str) -> None:
    """Each names both instances and keeps every candidate with its terms; the lowest score wins."""
    made = verdict(policy, HELD)
    assert made is not None
    decision = made.decision
    assert decision.policy == policy
    assert decision.decode == "d0"
    assert decision.considered == 2
    winner, loser = made.candidates
    assert winner == decision.chosen
    assert winner.instance == decision.prefill != loser.instance
    assert winner.score <= loser.score
    assert decision.predicted_ttft_us == winner.ttft_us
    assert decision.predicted_tbt_us == 100 + 10 + 41


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    """The error names the policies that may be written instead."""
    with pytest.raises(ConfigError, match="policy: best is none of random, round_robin"):
        policy_of("best")


def test_hard_constraints_come_before_any_score() -> None:
    """A full queue, too little KV memory, and an instance that failed this request before."""
    full = prefill("p1", 1, max_requests=1)
    assert chosen("kvcache_centric", HELD, [prefill("p0"), full]) == ("p0", 40)
    small = prefill("p1")
    small.kv_tokens = 40
    assert chosen("kvcache_centric", HELD, [prefill("p0"), small]) == ("p0", 40)
    avoid = [InstanceId("p1"), InstanceId("d0")]
    assert chosen("kvcache_centric", HELD, avoid=avoid) == ("p0", 40)
    assert verdict("kvcache_centric", HELD, [full]) is None
    assert verdict("kvcache_centric", HELD, decodes=[]) is None
    assert verdict("kvcache_centric", HELD, decodes=[decode("d0", 1, max_seqs=1)]) is not None


@pytest.mark.parametrize(
    ("slo", "misses"),
    [
        (Slo(), (False, False)),
        (Slo(410, 151), (False, False)),
        (Slo(409, 151), (True, False)),
        (Slo(None, 150), (False, True)),
    ],
)
def test_objectives_are_held_against_the_prediction(slo: Slo, misses: tuple[bool, bool]) -> None:
    """Equal meets, more misses; without an objective nothing is missed."""
    made = verdict("kvcache_centric", slo=slo)
    assert made is not None
    assert (made.misses_ttft, made.misses_tbt) == misses


def test_a_verdict_says_whose_objective_breaks() -> None:
    """That of one that decodes there, where it is tighter than the prediction."""
    strict = decode("d0")
    strict.promise_decode(RequestId("strict"), 1, 155)
    made = verdict("kvcache_centric", decodes=[strict], slo=Slo(None, 300))
    assert made is not None
    assert (made.misses_tbt, made.tbt_us, made.breaks_us) == (True, 162, 155)
    made = verdict("kvcache_centric", decodes=[decode("d0")], slo=Slo(None, 100))
    assert made is not None
    assert (made.misses_tbt, made.tbt_us, made.breaks_us) == (True, 151, None)


@pytest.mark.parametrize(
    ("views", "winner"),
    [
        # the lowest TBT after joining: members and their contexts count
        ([decode("d0", 30), decode("d1", 10, 9)], "d1"),
        ([decode("d0", 10, 9), decode("d1", 30)], "d0"),
        # equal: the first
        ([decode("d0", 5), decode("d1", 5)], "d0"),
        # no slot: only where all are full
        ([decode("d0", 1, max_seqs=1), decode("d1", 99)], "d1"),
        ([decode("d0", 1, max_seqs=1), decode("d1", 99, max_seqs=1)], "d0"),
        # no KV room for 41 more of 400
        ([decode("d0", 360), decode("d1", 99, 98, 97)], "d1"),
    ],
)
def test_decode_goes_where_tbt_is_lowest_after_joining(
    views: list[InstanceView], winner: str
) -> None:
    """Among instances with a slot and KV room, if there are any."""
    best, meets = choose_decode(41, views)
    assert (best.info.id, meets) == (winner, True)


def test_nobody_may_be_pushed_over_its_objective() -> None:
    """The tightest goal of the decodes there counts as much as the request's own."""
    strict, lax = decode("d0"), decode("d1", 50)
    strict.promise_decode(RequestId("strict"), 1, 155)
    best, meets = choose_decode(41, [strict, lax], 300)
    assert (best.info.id, meets) == ("d1", True)
    assert choose_decode(41, [strict], 300) == (strict, False)
    strict.end_decode(RequestId("strict"), 0)
    assert choose_decode(41, [strict, lax], 300) == (strict, True)


def test_kv_that_is_there_already_is_decoded_there() -> None:
    """A prefill instance that decodes too keeps its request, while it has a place."""
    both, idle = decode("d1", 100), decode("d0")
    assert choose_decode(41, [idle, both], near=both)[0] is both
    full = decode("d1", 1, max_seqs=1)
    assert choose_decode(41, [idle, full], near=full)[0] is idle
    filled = decode("d2", 50, max_seqs=1)
    assert choose_decode(41, [full, filled], near=filled) == (filled, True)


def test_late_binding_leaves_the_kv_where_a_goal_would_break() -> None:
    """Another instance that meets every goal decodes; if none does, the least TBT."""
    idle, crowded = decode("d0"), decode("d1", 100)  # 151 after joining, 261 with the other
    assert choose_decode(41, [idle, crowded], 200, crowded) == (crowded, False)
    assert choose_decode(41, [idle, crowded], 200, crowded, leaves=True) == (idle, True)
    assert choose_decode(41, [idle, crowded], 300, crowded, leaves=True) == (crowded, True)
    assert choose_decode(41, [idle, crowded], 100, crowded, leaves=True) == (idle, False)
    same = decode("d2", 100)
    assert choose_decode(41, [crowded, same], 100, same, leaves=True) == (same, False)


def test_the_same_rack_wins_near_ties_of_tbt() -> None:
    """Two percent are a tie, more is not."""
    near = prefill("p0", rack="b")
    far, tie = decode("d0", 100, rack="a"), decode("d1", 103, rack="b")
    assert choose_decode(41, [far, tie], near=near)[0] is tie
    worse = decode("d1", 110, rack="b")
    assert choose_decode(41, [far, worse], near=near)[0] is far


def test_the_queue_drains_with_time() -> None:
    """T_queue falls as the head runs, never below what stands behind it."""
    made = prefill("p0", 100)
    made.promise_prefill(RequestId("second"), 30, 3, 0)
    assert [made.queue_us(t) for t in (0, 40, 100, 900)] == [130, 90, 30, 30]
    made.end_prefill(RequestId("other"), 900)
    assert [made.queue_us(t) for t in (900, 910, 999)] == [30, 20, 0]


def test_ending_another_than_the_head_keeps_the_heads_progress() -> None:
    """A cancelled waiting prefill does not restart the clock of the one that runs."""
    made = prefill("p0", 100)
    made.promise_prefill(RequestId("second"), 30, 3, 0)
    made.end_prefill(RequestId("second"), 60)
    assert made.queue_us(60) == 40


def test_a_decode_promised_twice_counts_once() -> None:
    """Its latest context counts; after its end it is forgotten, and unknown ones are no error."""
    made = decode("d0", 10)
    made.promise_decode(RequestId("d0-0"), 30)
    assert (made.decodes, made.context) == (1, 30)
    for _ in range(2):
        made.end_decode(RequestId("d0-0"), 0)
    assert (made.decodes, made.context, made.strictest_us()) == (0, 0, None)
