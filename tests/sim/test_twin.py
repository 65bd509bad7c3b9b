"""The twin on recordings of simulated clusters: what it judges, and what it then advises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.advice import (
    ClusterShape,
    TwinFinding,
    TwinQuestion,
    advise,
    mismatches,
)
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.recorded import RecordedRequest, cluster_of
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.cluster import Simulation
from moonserve.sim.fitted import fit
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Row, Trace
from moonserve.sim.twin import Twin, happened, has_objectives, judged
from tests.support.recorded import START_MS, recording, row

Load = tuple[float, int, int]
"""Requests a second, and the tokens of their prompts and outputs."""


def rows(times: Sequence[int], **known: object) -> list[RecordedRequest]:
    """Requests that arrived then."""
    return [row(f"r{at}", at, **known) for at in times]


def test_the_latest_requests_are_judged_and_earlier_ones_warm_up() -> None:
    """Requests that ended before the warm-up are left out, in whatever order rows come."""
    window = judged(rows([900, 100, 500, 700, 1_000, 800]), [], 1_001, 200, 0)
    assert (window.from_ms, window.until_ms) == (801, 1_001)
    assert [it.timestamp for it in window.rows] == [500, 700, 800, 900, 1_000]
    assert happened(window).requests == 2


def test_judged_requests_end_where_many_are_under_way() -> None:
    """They have no outcome yet, and those that are over are the short ones. All are load."""
    ended = rows(range(0, 1_000, 10))
    window = judged(ended, rows([905, 915, 925, 935], outcome="running"), 991, 300, 0)
    assert window.until_ms == 915  # one of 31 is not over before; with the next it were two of 32
    lone = judged(ended, rows([905], outcome="running"), 991, 300, 0)
    assert lone.until_ms == 991
    assert happened(lone).requests == sum(lone.from_ms <= it.timestamp for it in ended)


def test_what_came_before_a_change_of_the_cluster_is_not_judged() -> None:
    """It is load, but another cluster has served it."""
    window = judged(rows(range(0, 1_000, 10)), [], 991, 300, 900)
    assert (window.from_ms, window.until_ms) == (900, 991)
    assert judged([], [], 991, 300, 0).rows == []


def test_a_load_that_has_ended_is_not_judged_again() -> None:
    """The judged time ends now; nearly all of it is over, so an earlier load does not count."""
    ended = rows(range(0, 1_000, 10))
    assert happened(judged(ended, [], 1_200, 300, 0)).requests == 10  # from 900 on
    later = judged(ended, [], 1_300, 300, 0)
    assert (later.from_ms, later.until_ms) == (1_000, 1_300)
    assert happened(later).requests == 0
    changed = judged(ended, [], 1_300, 300, 5_000)
    assert (changed.from_ms, changed.until_ms) == (1_300, 1_300)


def test_judged_requests_end_before_the_first_of_those_of_which_none_is_over() -> None:
    """Few enough run, but the load of their time is not known."""
    ended = rows(range(0, 1_000, 10))
    window = judged(ended, rows([1_005, 1_100], outcome="running"), 1_300, 300, 0)
    assert window.until_ms == 1_005


def test_requests_that_found_an_idle_cluster_are_judged_from_the_first_on() -> None:
    """Nothing is to be warmed up before them."""
    start = rows(range(600, 1_000, 10))
    assert happened(judged(start, [], 1_000, 1_000, 0)).requests == 13
    assert happened(judged(start, [], 1_000, 1_000, 0, begins_idle=True)).requests == 40


def test_shares_are_of_all_but_cancelled_requests() -> None:
    """Late, refused and failed ones count as not in time."""
    four = [
        row("good", 11),
        row("late", 12, in_time=False, actual_ttft_ms=900.0),
        row("no", 13, outcome="refused", in_time=None, actual_ttft_ms=None, actual_tbt_ms=None),
        row("left", 14, outcome="cancelled", in_time=None),
    ]
    window = judged([row("first", 0), *four], [], 15, 4, 0)
    said = happened(window)
    assert (said.requests, said.in_time, said.refused) == (3, 1 / 3, 1 / 3)
    assert said.ttft_p50_ms == 500.0
    assert has_objectives(window)
    assert not has_objectives(judged(rows([1, 2, 3], ttft_slo_ms=None), [], 4, 4, 0))


class Cluster:
    """A simulated cluster under a load, and a twin that looks at what it recorded."""

    def __init__(self, setup: Setup, load: Callable[[float], Load], seconds: float) -> None:
        """load: by the time in seconds."""
        self.setup = setup
        sim = Simulation(Trace("live", 512, list(arrivals(load, seconds))), setup)
        sim.run()
        self.ends = recording(sim, setup.tuning.slo)
        self.judged_s = 0.0
        """The middle of the time whose requests the last round judged."""

    def look(
        self, at_s: float, every_s: float, most: int = 3_000, fits: bool = False
    ) -> TwinFinding | None:
        """A round of the twin at that time; None: no request can be judged yet. fits: whether it
        fits the costs, as the command does, or knows them."""
        now_ms = START_MS + round(1_000 * at_s)
        over = [it for end_ms, it in self.ends if end_ms <= now_ms][-most:]
        output = sum(it.output_length for it in over) // max(1, len(over))
        under_way = [
            msgspec.structs.replace(it, outcome="running", in_time=None, output_length=output)
            for end_ms, it in self.ends
            if it.timestamp <= now_ms < end_ms and output
        ]
        window = judged(over, under_way, now_ms, round(1_000 * every_s), 0)
        self.judged_s = ((window.from_ms + window.until_ms) / 2 - START_MS) / 1_000
        was = happened(window)
        if was.requests < 20:
            return None
        known = self.setup
        if fits:
            cluster = cluster_of(known.instances(512), known.tuning)
            assert cluster is not None
            fitted = fit("recorded requests", cluster, over)
            known = msgspec.structs.replace(known, profile=fitted.profile)
            twin = Twin(window, known, lambda: False, fitted.paces_since)
        else:
            twin = Twin(window, known, lambda: False)
        now = ClusterShape(self.setup.prefill, self.setup.decode, 0, self.setup.tuning.policy)
        question = TwinQuestion(now, was, self.setup.tuning.slo, 0.99, (), twin.needs())
        return advise(question, twin.simulate)


def arrivals(load: Callable[[float], Load], seconds: float) -> Iterator[Row]:
    """Requests without a common prefix."""
    rng, fresh = Random(5), itertools.count()
    at_s = 0.0
    while True:
        rate, inputs, outputs = load(at_s)
        at_s += rng.expovariate(rate)
        if at_s > seconds:
            return
        blocks = tuple(itertools.islice(fresh, -(-inputs // 512)))
        yield Row(round(1e6 * at_s), inputs, outputs, blocks)


def setup(prefill: int, decode: int, slo: Slo) -> Setup:
    """A cluster of h800 instances that refuses what would have its first token late."""
    tuning = Tuning(slo=slo, admission="ttft")
    return Setup(prefill, decode, profile=PROFILES["h800"], tuning=tuning, goal=slo)


def test_a_twin_with_fitted_costs_sees_that_places_in_decode_are_few() -> None:
    """Requests that wait for a place in decode have no costly calls: the twin matches, and says
    that decode binds."""
    slo = Slo(4_000_000, 25_000)
    few = setup(1, 1, slo)
    few = msgspec.structs.replace(few, decode_seqs=16, tuning=Tuning(slo=slo, admission="none"))
    it = Cluster(few, lambda at_s: (6.0, 500, 300), 40.0)
    found = it.look(40.0, 20.0, fits=True)
    assert found is not None
    assert found.wanted is not None, found.text
    assert found.binds == "decode", found.text


def served_in_time(shape: ClusterShape, load: Callable[[float], Load], slo: Slo) -> float:
    """The share of a minute's requests that such a cluster serves in time."""
    ends = Cluster(setup(shape.prefill, shape.decode, slo), load, 60.0).ends
    return sum(it.in_time is True for _, it in ends) / len(ends)


def test_advice_turns_with_the_shape_of_the_load() -> None:
    """From long prompts to long outputs: after two rounds the other role binds, and what is wanted
    serves the load of its phase in time."""
    turn_s, every_s = 120.0, 20.0
    phases = (5.0, 16_000, 8), (14.0, 500, 300)
    slo = Slo(4_000_000, 25_000)
    it = Cluster(setup(3, 1, slo), lambda at_s: phases[at_s >= turn_s], turn_s + 2 * every_s)
    for rounds, load, binds in ((0, phases[0], "prefill"), (2, phases[1], "decode")):
        found = it.look(turn_s + rounds * every_s, every_s)
        assert found is not None
        assert found.wanted is not None, found.text
        assert found.binds == binds, found.text
        share = served_in_time(found.wanted, lambda at_s, load=load: load, slo)  # type: ignore[misc]
        assert share > 0.95, (found.text, share)


def test_a_pool_that_is_full_from_earlier_is_full_in_the_twin() -> None:
    """Prefixes that requests before the window have brought are there at its start."""
    slo = Slo(2_000_000, None)
    rng, heads = Random(3), [tuple(range(1_000 * k, 1_000 * k + 16)) for k in range(1, 151)]
    fresh = itertools.count(1_000_000)
    rows_ = [
        Row(200_000 * at, 17 * 512, 4, (*rng.choice(heads), next(fresh))) for at in range(1_000)
    ]
    live = setup(2, 1, slo)
    sim = Simulation(Trace("live", 512, rows_), live)
    sim.run()
    last = [it for _, it in recording(sim, slo)][800:]
    now_ms = max(it.timestamp for it in last) + 1
    window = judged(last, [], now_ms, 30_000, 0)
    found = Twin(window, live, lambda: False).simulate(ClusterShape(2, 1, 0, "kvcache_centric"))
    assert found is not None
    assert mismatches(happened(window), found, slo) == []
    bare = [msgspec.structs.replace(it, pool_tokens=0) for it in last]
    empty = judged(bare, [], now_ms, 30_000, 0)
    cold = Twin(empty, live, lambda: False).simulate(ClusterShape(2, 1, 0, "kvcache_centric"))
    assert cold is not None
    assert cold.ttft_p90_ms is not None
    assert found.ttft_p90_ms is not None
    assert cold.ttft_p90_ms > found.ttft_p90_ms


def test_a_run_ends_early_when_its_result_is_certain_or_time_is_over() -> None:
    """Too few in time: no outcome, as without time. Alone, the same run has one."""
    slo = Slo(4_000_000, 25_000)
    it = Cluster(setup(3, 1, slo), lambda at_s: (5.0, 16_000, 8), 60.0)
    window = judged([row for _, row in it.ends], [], START_MS + 60_000, 20_000, 0)
    small = ClusterShape(1, 1, 0, "kvcache_centric")
    twin = Twin(window, it.setup, lambda: False)
    outcome = twin.simulate(small)
    assert outcome is not None
    assert outcome.in_time < 0.5
    assert twin.simulate(small, 0.5) is None
    assert twin.simulate(small, outcome.in_time) == outcome
    assert Twin(window, it.setup, lambda: True).simulate(small) is None


@pytest.mark.slow
def test_advice_follows_a_sine() -> None:
    """From 1 to 24 requests a second and back, with 8,000 tokens in and 1,000 out: what is wanted
    follows the load, and serves the load of its time."""
    period_s, every_s = 300.0, 30.0
    slo = Slo(8_000_000, 60_000)

    def load(at_s: float) -> Load:
        return 12.5 - 11.5 * math.cos(2 * math.pi * at_s / period_s), 8_000, 1_000

    it = Cluster(setup(8, 8, slo), load, period_s + 2 * every_s)
    sizes: list[int] = []
    for round_ in (3, 5, 7, 9, 11):
        found = it.look(round_ * every_s, every_s)
        assert found is not None, round_
        assert found.wanted is not None, (round_, found.text)
        sizes.append(found.wanted.prefill + found.wanted.decode)
        then = load(it.judged_s)
        share = served_in_time(found.wanted, lambda _, then=then: then, slo)  # type: ignore[misc]
        assert share > 0.85, (round_, found.text, share)
    assert max(sizes) >= 2 * sizes[0], sizes
    assert max(sizes) >= 2 * sizes[-1], sizes
