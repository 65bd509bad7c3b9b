"""The twin's advice: what is simulated, when it matches, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.advice import (
    Advice,
    ClusterShape,
    LoadOutcome,
    TwinFinding,
    TwinQuestion,
    advise,
    alternatives,
    is_stale,
    mismatches,
)

SLO = Slo(2_000_000, 100_000)
SERVED = LoadOutcome(100, 0.7, 0.1, 400.0, 900.0, 40.0, 60.0)
POLICIES = ("kvcache_centric", "late_binding")
Share = Callable[[ClusterShape], float]


def outcome(share: float) -> LoadOutcome:
    """That many in time; the times are those of SERVED."""
    return msgspec.structs.replace(SERVED, in_time=share)


def cluster(prefill: int = 0, decode: int = 0, mixed: int = 0) -> ClusterShape:
    """So many instances, with the present policy."""
    return ClusterShape(prefill, decode, mixed, POLICIES[0])


class World:
    """Simulates by a function, and remembers what was asked."""

    def __init__(self, share: Share, most: int = 1_000) -> None:
        """most: simulations that there is time for."""
        self.asked: list[ClusterShape] = []
        self._share = share
        self._most = most

    def __call__(self, shape: ClusterShape, least: float) -> LoadOutcome | None:
        self.asked.append(shape)
        share = self._share(shape)
        return None if share < least or len(self.asked) > self._most else outcome(share)


def found(
    now: ClusterShape, share: Share, happened: float | None = None, **more: object
) -> TwinFinding:
    """The answer for a cluster that serves this share, and about which nothing else is known."""
    was = outcome(share(now) if happened is None else happened)
    asked = {"policies": POLICIES, "target": 0.99, **more}
    question = TwinQuestion(now, was, SLO, **asked)  # type: ignore[arg-type]
    return advise(question, World(share))


def enough(prefill: int, decode: int) -> Share:
    """All are in time with so many; with fewer, as the scarcer role allows."""
    return lambda it: min(1.0, it.prefill / prefill, it.decode / decode)


def test_the_role_that_is_short_binds_and_the_least_number_is_wanted() -> None:
    """The sentence names the cluster, what it would have had and what happened."""
    said = found(cluster(3, 4), enough(3, 5))
    assert (said.binds, str(said.wanted)) == ("decode", "3 + 5")
    text = "Decode binds: with 3 + 5 the same load would have had 100% in time, now 80%."
    assert said.text.startswith(text)
    said = found(cluster(2, 4), enough(9, 4))
    assert (said.binds, str(said.wanted)) == ("prefill", "9 + 4")
    said = found(cluster(2, 2), enough(7, 6), needs=(7, 1))
    assert (said.binds, str(said.wanted)) == ("both", "7 + 6")


def test_a_split_of_as_many_instances_is_wanted_and_named() -> None:
    """Where one role has too many and the other too few."""
    said = found(cluster(4, 4), enough(3, 5))
    assert (said.binds, str(said.wanted)) == ("decode", "3 + 5")
    assert "Split as 3 + 5, as many instances would have had 100%." in said.text


def test_another_policy_is_named_if_it_serves_more() -> None:
    """The instances that are wanted are those of the present policy."""

    def share(it: ClusterShape) -> float:
        return 0.99 if it.policy == "late_binding" else enough(2, 4)(it)

    said = found(cluster(2, 3), share)
    assert str(said.wanted) == "2 + 4"
    assert said.text.endswith("With policy late_binding they would have had 99%.")


def test_too_many_instances_are_named_and_enough_is_right() -> None:
    """In both cases the load is served in time."""
    said = found(cluster(6, 5), enough(2, 3))
    assert (said.binds, str(said.wanted)) == ("none", "2 + 3")
    assert said.text == (
        "2 + 3 would be enough: the same load would have had 100% in time, now 100%."
    )
    said = found(cluster(2, 3), enough(2, 3))
    assert str(said.wanted) == "2 + 3"
    assert said.text == (
        "2 + 3 is right: 100% were in time, and one instance less would be too few."
    )
    assert found(cluster(1, 1), enough(1, 1)).text == "1 + 1 is right: 100% were in time."


def test_instances_that_do_both_are_counted_as_one_role() -> None:
    """Their number is wanted; there is no split."""
    said = found(cluster(mixed=4), lambda it: min(1.0, it.mixed / 6))
    assert (said.binds, str(said.wanted)) == ("both", "6")
    assert said.text.startswith("There are too few instances: with 6 the same load")
    assert [it.mixed for it in alternatives(cluster(mixed=1), ())] == [2]


def test_no_number_is_wanted_if_none_is_enough() -> None:
    """The role is named of which one more serves the most."""
    said = found(cluster(2, 2), lambda it: 0.5 + min(0.2, it.decode / 100))
    assert (said.binds, said.wanted) == ("decode", None)
    assert said.text.startswith("Decode binds: 52% were in time, and with")


def test_a_twin_that_does_not_match_gives_no_advice() -> None:
    """It says in what it differs, and simulates nothing else."""
    world = World(enough(2, 4))
    question = TwinQuestion(cluster(2, 2), outcome(0.9), SLO, 0.99, POLICIES)
    said = advise(question, world)
    assert said.wanted is None
    assert said.text == ("No advice: the twin does not match what happened (50% in time, not 90%).")
    assert len(world.asked) == len(said.trials) == 1


@pytest.mark.parametrize(
    ("field", "near", "far"),
    [
        ("in_time", 0.61, 0.59),
        ("ttft_p50_ms", 790.0, 810.0),  # 400 ms are a fifth of the objective
        ("ttft_p90_ms", 1_290.0, 1_310.0),
        ("tbt_p50_ms", 21.0, 19.0),
        ("tbt_p90_ms", 79.0, 81.0),
    ],
)
def test_the_bounds_of_a_match(field: str, near: float, far: float) -> None:
    """They are relative to what was measured, or to the objective."""
    for value, count in ((near, 0), (far, 1)):
        twin = msgspec.structs.replace(SERVED, **{field: value})
        assert len(mismatches(SERVED, twin, SLO)) == count


def test_how_late_a_late_request_is_does_not_matter() -> None:
    """Both are late in any case. Without an objective all of a time counts."""
    was = msgspec.structs.replace(SERVED, ttft_p90_ms=5_000.0)
    twin = msgspec.structs.replace(SERVED, ttft_p90_ms=50_000.0)
    assert not mismatches(was, twin, SLO)
    assert mismatches(was, twin, Slo(None, 100_000)) == ["TTFT p90 50,000 ms, not 5,000 ms"]
    nothing = msgspec.structs.replace(was, tbt_p50_ms=None, tbt_p90_ms=None)
    assert not mismatches(nothing, was, SLO)


def test_a_shortage_that_the_twin_does_not_see_changes_nothing() -> None:
    """It matches within its bounds, but its number of instances would be wrong."""
    said = found(cluster(2, 2), lambda it: 1.0, happened=0.95)
    assert str(said.wanted) == "2 + 2"
    assert "sees no shortage" in said.text


def test_without_time_no_instance_is_given_up() -> None:
    """What was not simulated is not enough."""
    question = TwinQuestion(cluster(8, 8), outcome(1.0), SLO, 0.99, POLICIES)
    said = advise(question, World(enough(2, 2), most=2))
    assert str(said.wanted) == "4 + 8"
    short = TwinQuestion(cluster(8, 8), outcome(0.5), SLO, 0.99, POLICIES)
    said = advise(short, World(enough(16, 16), most=2))
    assert said.wanted is None
    assert said.text.startswith("No advice: a round has too little time")
    assert advise(question, World(enough(2, 2), most=0)).text == (
        "No advice: one simulation takes longer than a round may."
    )


def test_each_cluster_is_simulated_once() -> None:
    """The number of simulations grows with the logarithm of the number of instances."""
    world = World(enough(40, 30))
    question = TwinQuestion(cluster(64, 64), outcome(1.0), SLO, 0.99, POLICIES)
    assert str(advise(question, world).wanted) == "40 + 30"
    assert len(world.asked) == len(set(world.asked)) < 25


def test_advice_is_stale_when_rounds_are_missing() -> None:
    """Three of them, or of the time that one took."""
    it = Advice(text="", now=cluster(1, 1), target=0.99, every_s=60, took_s=90)
    assert not is_stale(it, 269)
    assert is_stale(it, 271)
