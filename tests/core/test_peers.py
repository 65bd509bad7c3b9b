"""The peers' rules, by tables computed by hand: blocks of 4 tokens, 10 us a computed token."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from moonserve.core.kv.index import Match
from moonserve.core.request import EffectiveSlo, Slo
from moonserve.core.schedule import peer_policies
from moonserve.core.schedule.estimate import Ask, Estimate, Options, Roles
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, RequestId, SegmentId
from tests.support.cluster import BLOCK, view

SECOND = 1_000_000
NAMES = ("p0", "p1", "p2")


def holding(
    length: int, blocks: tuple[int, ...], views: list[InstanceView], goal_us: int | None = None
) -> Options:
    """A prompt of which each instance holds so many blocks, decided at 1,000 s."""
    held = {SegmentId(v.info.id): n for v, n in zip(views, blocks, strict=True) if n}
    ask = Ask(length, Match(max(blocks), held), slo=EffectiveSlo(Slo(goal_us)))
    return Estimate(ask, Roles(views, ()), BLOCK, "never", Tuning()).options(views, 1_000 * SECOND)


def busy(
    name: str, prefills: int = 0, tokens: int = 0, cached: int = 0, decodes: tuple[int, ...] = ()
) -> InstanceView:
    """An instance with prefills promised, each of so many tokens, and decodes of these contexts."""
    made = view(name, "both" if decodes else "prefill")
    for at in range(prefills):
        made.promise_prefill(RequestId(f"p{at}"), 10 * tokens, tokens, 0, cached)
    for at, context in enumerate(decodes):
        made.promise_decode(RequestId(f"d{at}"), context)
    return made


def queued(name: str, tokens: int) -> InstanceView:
    """An instance that at 1,000 s has one prompt of so many tokens to prefill, or none."""
    made = view(name, "prefill")
    if tokens:
        made.promise_prefill(RequestId("p"), 10 * tokens, tokens, 1_000 * SECOND, 0)
    return made


def chosen(policy: str, made: Options, state: PolicyState | None = None) -> int:
    """The row that a policy takes: the lowest score, the first of equals."""
    scores = POLICIES[policy].score(made, state or PolicyState())
    assert len(scores) == len(made.views)
    return min(range(len(scores)), key=scores.__getitem__)


@pytest.mark.parametrize("policy", ["sglang_cache_aware", "vllm_cache_aware"])
@pytest.mark.parametrize(
    ("counts", "blocks", "winner"),
    [
        ((0, 0, 0), (0, 0, 0), 0),  # nothing known of anybody: the first
        ((2, 1, 1), (0, 0, 0), 1),  # nothing cached: the first of those with fewest requests
        ((0, 0, 9), (0, 0, 3), 0),  # 12 of 40 tokens is not more than 0.3: fewest requests
        ((0, 0, 9), (0, 0, 4), 2),  # 16 of 40 is: there, however busy
        ((9, 3, 0), (5, 5, 2), 0),  # equal holders: the first
        ((0, 0, 64), (0, 0, 9), 2),  # 64 more requests is not more than 64: balanced
        ((0, 0, 65), (0, 0, 9), 0),  # 65 is
        ((130, 130, 195), (0, 0, 9), 2),  # 65 apart, but 195 is not more than 1.5 * 130
        ((129, 129, 194), (0, 0, 9), 0),  # 194 is more than 1.5 * 129
    ],
)
def test_sglang_and_vllm(counts, blocks, winner, policy) -> None:  # type: ignore[no-untyped-def]
    """Counts far apart by both thresholds, strictly, balance; else a match above 0.3 wins."""
    views = [busy(name, count) for name, count in zip(NAMES, counts, strict=True)]
    assert chosen(policy, holding(40, blocks, views)) == winner


def test_sglang_counts_a_coupled_request_once() -> None:
    """Where prefill and decode share an instance, a request in prefill is one request."""
    made = holding(40, (0, 0), [busy("p0", 2, 1, decodes=(1, 1)), busy("p1", decodes=(1, 1, 1))])
    assert peer_policies.sglang_cache_aware(made, PolicyState()) == [2, 3]


@pytest.mark.parametrize(
    ("views", "blocks", "scores"),
    [
        # (0 + 41) / 4 = 10.25 to prefill, less the blocks cached; 11 blocks become active
        ([busy("p0"), busy("p1")], (0, 10), [21.25, 11.25]),
        # 20 tokens under way are 5 blocks to prefill and 5 active: as good as 10 cached blocks
        ([busy("p0"), busy("p1", 1, 20)], (0, 10), [21.25, 21.25]),
        # with 8 cached tokens they are 2 blocks more of active ones, but not of prefill
        ([busy("p0"), busy("p1", 1, 20, 8)], (0, 10), [21.25, 23.25]),
        # decodes of 40 and 8 tokens are 12 active blocks
        ([busy("p0", decodes=(40, 8)), busy("p1", 2, 12)], (0, 0), [33.25, 33.25]),
        # a request that prefills and will decode on one instance is active once
        ([busy("p0", 1, 12, decodes=(16,)), busy("p1")], (0, 0), [28.25, 21.25]),
    ],
)
def test_dynamo(views, blocks, scores) -> None:  # type: ignore[no-untyped-def]
    """Cost is (tokens under way + prompt) / block - cached blocks + active blocks."""
    assert peer_policies.dynamo_overlap(holding(41, blocks, views), PolicyState()) == scores


def test_dynamo_frees_at_the_end_of_prefill() -> None:
    """A prefill that ended leaves nothing behind, cached blocks included."""
    made = busy("p0", 1, 20, 8)
    made.end_prefill(RequestId("p0"), 0)
    assert peer_policies.dynamo_overlap(holding(41, (0,), [made]), PolicyState()) == [21.25]


@pytest.mark.parametrize(
    ("counts", "blocks", "scores"),
    [
        # nobody waits (one that runs does not count): all queues score 1
        ((1, 0, 1), (0, 0, 0), [-1, -1, -1]),
        # 3, 1 and 0 wait: 0, 2/3 and 1
        ((4, 2, 0), (0, 0, 0), [0, -2 / 3, -1]),
        # half of the prompt cached weighs as much as the shortest queue against the longest
        ((2, 1, 0), (5, 0, 0), [-1, -1, -1]),
        ((2, 1, 0), (6, 0, 0), [-1.2, -1, -1]),
    ],
)
def test_llmd(counts, blocks, scores) -> None:  # type: ignore[no-untyped-def]
    """The score is twice the cached share plus the queue's place between shortest and longest."""
    views = [busy(name, count) for name, count in zip(NAMES, counts, strict=True)]
    got = peer_policies.llmd_scorers(holding(40, blocks, views), PolicyState())
    assert got == pytest.approx(scores)


def test_llmd_sees_no_prefix_beyond_its_cap() -> None:
    """Prefixes are told apart up to 256 blocks of 64 characters, 4,096 tokens, and no further."""
    views = [busy("p0"), busy("p1"), busy("p2")]
    made = holding(8_000, (512, 1_024, 1_999), views)
    assert peer_policies.llmd_scorers(made, PolicyState()) == [-2, -3, -3]


@pytest.mark.parametrize("policy", ["dynamo_overlap", "llmd_scorers"])
def test_equals_are_drawn_from_where_the_rule_says_so(policy: str) -> None:
    """Among the lowest scores each is taken about as often, no other ever; the first unseeded."""
    made = holding(40, (0, 5, 5), [busy(name) for name in NAMES])
    assert chosen(policy, made) == 1
    state = PolicyState(Random(7))
    drawn = Counter(chosen(policy, made, state) for _ in range(200))
    assert sorted(drawn) == [1, 2]
    assert min(drawn.values()) > 60


MANY_MS = 0.001 * 512**1.5 + 5
"""What AIBrix takes for the mean prefill where none was measured: 16.6 ms."""


@pytest.mark.parametrize(
    ("counts", "blocks", "work", "scores"),
    [
        # 40 tokens to compute: 0.001 * 253 + 5
        ((0, 0), (0, 0), (), [5.252982, 5.252982]),
        # 20 cached, 20 to compute: 0.005 * 20 + 1 + 0.001 * 89.44 + 5, behind two of 16.6 ms
        ((2, 0), (5, 0), (), [2 * MANY_MS + 6.189443, 5.252982]),
        # the same behind two of 4 ms
        ((2, 0), (5, 0), (4_000,), [14.189443, 5.252982]),
    ],
)
def test_aibrix(counts, blocks, work, scores) -> None:  # type: ignore[no-untyped-def]
    """The score is requests * mean prefill + loading the prefix + computing the rest, in ms."""
    views = [busy(name, count) for name, count in zip(NAMES, counts, strict=False)]
    got = peer_policies.aibrix_conductor(holding(40, blocks, views), worked(*work))
    assert got == pytest.approx(scores, abs=1e-6)


def test_aibrix_takes_the_mean_of_what_was_given() -> None:
    """Of prefills of 3 and 5 ms the mean is 4; what another instance was given does not count."""
    state = worked(3_000, 900_000).assigned(InstanceId("p0"), 999 * SECOND, 5_000)
    made = holding(40, (0, 0), [busy("p0", 1), busy("p1")])
    assert peer_policies.aibrix_conductor(made, state)[0] == pytest.approx(4 + 5.252982, abs=1e-6)


@pytest.mark.parametrize(
    ("ahead", "blocks", "goal_us", "scores"),
    [
        # 600, 370 and 140 us to spare: the least is the likeliest
        ((0, 23, 46), (0, 0, 0), 1_000, [-2, -51, -101]),
        # the last is late by 60 us; the others spare 600 and 370
        ((0, 23, 66), (0, 0, 0), 1_000, [-2, -101, 0]),
        # all are late: the idle ones alone, and all idle ones are equal
        ((0, 23, 0), (0, 0, 0), 300, [-51, 0, -51]),
        # all are late and busy, by 50, 100 and 150 us: the least late is the likeliest
        ((5, 10, 15), (0, 0, 0), 400, [-101, -51, -2]),
        # without an objective that is the soonest
        ((5, 10, 15), (0, 0, 0), None, [-101, -51, -2]),
        # one holds all of the nine blocks that can be cached: it alone, though it is late
        ((0, 97, 0), (0, 9, 0), 1_000, [0, -51, 0]),
        # but not if it is later than the soonest by more than 5 s
        ((0, 500_037, 0), (0, 9, 0), 1_000, [-51, 0, -51]),
        ((0, 500_036, 0), (0, 9, 0), 1_000, [0, -51, 0]),
        # eight of nine blocks are more than 0.80: alone among those in time, unless late
        ((0, 20, 0), (0, 8, 0), 1_000, [0, -51, 0]),
        ((0, 93, 0), (0, 8, 0), 1_000, [-51, 0, -51]),
        # seven are less
        ((0, 0, 0), (0, 7, 0), 1_000, [-101, -2, -101]),
    ],
)
def test_llmd_latency(ahead, blocks, goal_us, scores) -> None:  # type: ignore[no-untyped-def]
    """Sticky ones, then those in time, then the idle, weighed by how little time they spare."""
    views = [queued(name, tokens) for name, tokens in zip(NAMES, ahead, strict=True)]
    made = holding(40, blocks, views, goal_us)
    assert peer_policies.llmd_latency(made, PolicyState()) == scores


def test_llmd_latency_draws_by_weight() -> None:
    """Weights of 101, 51 and 2 are drawn about so often, and the late one hardly ever."""
    views = [queued("p0", 0), queued("p1", 23), queued("p2", 46), queued("p3", 66)]
    made = holding(40, (0, 0, 0, 0), views, 1_000)
    state = PolicyState(Random(7))
    drawn = Counter(chosen("llmd_latency", made, state) for _ in range(3_080))
    assert abs(drawn[2] - 2_020) < 150
    assert abs(drawn[1] - 1_020) < 150
    assert abs(drawn[0] - 40) < 30
    assert 10 < drawn[3] < 60  # 1 of 100 takes those that are late


@pytest.mark.parametrize(
    ("counts", "blocks", "scores"),
    [
        # the mean is 2: one has twice as many, two have half; half of the prompt is cached
        ((4, 1, 1), (5, 0, 0), [0.5, -0.5, -0.5]),
        # a mean below 1 counts as 1
        ((1, 0, 0), (0, 0, 5), [2 / 3, -1 / 3, -1 / 3 - 0.5]),
        # twice the mean costs as much as a full hit, here of 36 of 40 tokens
        ((4, 2, 0), (9, 0, 0), [0.1, 0, -1]),
    ],
)
def test_production_stack(counts, blocks, scores) -> None:  # type: ignore[no-untyped-def]
    """The score is requests above the mean, in means of at least 1, less the cached share."""
    views = [busy(name, count) for name, count in zip(NAMES, counts, strict=True)]
    got = peer_policies.production_stack_loadaware(holding(40, blocks, views), PolicyState())
    assert got == pytest.approx(scores)


def worked(*work: int, at_us: int = 999 * SECOND, requests: int = 1) -> PolicyState:
    """A state in which each instance was given so many requests of so much work each."""
    state = PolicyState()
    for name, work_us in zip(NAMES, work, strict=False):
        for _ in range(requests):
            state = state.assigned(InstanceId(name), at_us, work_us)
    return state


@pytest.mark.parametrize(
    ("work", "blocks", "winner"),
    [
        ((0, 0, 0), (0, 0, 0), 0),  # all the same: the first
        ((30, 20, 20), (0, 0, 0), 1),  # nothing cached: explore, the first of the least loaded
        ((300, 0, 0), (5, 0, 0), 1),  # 20 of 40 tokens are not more than the rest: explore
        ((100, 0, 0), (5, 0, 0), 0),  # exploring counts this prompt's 200 or 400 us as well
        ((9_999, 0, 0), (6, 0, 0), 0),  # 24 of 40 are: exploit, however loaded
        ((500, 400, 0), (6, 6, 5), 1),  # the least loaded of those with the longest
    ],
)
def test_preble(work, blocks, winner) -> None:  # type: ignore[no-untyped-def]
    """A prefix longer than the rest of the prompt is exploited, else the least load is taken."""
    made = holding(40, blocks, [busy(name) for name in NAMES])
    assert chosen("preble_e2", made, worked(*work)) == winner


@pytest.mark.parametrize(
    ("work", "requests", "winner"),
    [
        ((1_500, 100, 110), 17, 1),  # 15 times the least, 51 requests: to it, with no prefix
        ((1_499, 100, 200), 17, 0),  # not 15 times
        ((1_500, 100, 200), 16, 0),  # 48 requests: too early to say
        ((1_500, 100, 2_000), 17, 0),  # another is the most loaded
    ],
)
def test_preble_spares_the_most_loaded(work, requests, winner) -> None:  # type: ignore[no-untyped-def]
    """Exploiting the most loaded instance ends where loads differ by 15 times or more."""
    made = holding(40, (9, 0, 8), [busy(name) for name in NAMES])
    assert chosen("preble_e2", made, worked(*work, requests=requests)) == winner


def test_preble_looks_back_three_minutes() -> None:
    """Work given more than 180 s ago is no load any more, and the memory reaches that far."""
    assert peer_policies.PREBLE_WINDOW_US >= peer_policies.PREBLE_WINDOW_US
    made = holding(40, (0, 0), [busy("p0"), busy("p1")])
    assert peer_policies.preble_e2(made, worked(70, 0, at_us=820 * SECOND)) == [470, 400]
    assert peer_policies.preble_e2(made, worked(70, 0, at_us=820 * SECOND - 1)) == [400, 400]


def test_peers_never_fetch() -> None:
    """None of them loads a prefix from elsewhere: they are compared by routing alone."""
    names = [name for name in POLICIES if hasattr(peer_policies, name)]
    assert len(names) == 8
    assert {POLICIES[name].fetch for name in names} == {"never"}
    assert not any(POLICIES[name].copies or POLICIES[name].late for name in names)
