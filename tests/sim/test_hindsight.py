"""Which of those refused could have been served: by small cases that can be done in the head."""

from __future__ import annotations

from typing import Any

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.cluster import Simulation
from moonserve.sim.hindsight import could_have_been_served
from moonserve.sim.metrics import measure
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Row, Trace

SECOND = 1_000_000


def ran(rows: list[tuple[int, int, int]], refused: set[int], goal: Slo, **more: Any) -> Simulation:
    """A run in which nobody was refused, but for those whom we take out of it by their number."""
    trace = Trace("t", 512, [Row(s * SECOND, length, out, ()) for s, length, out in rows])
    setup = Setup(prefill=1, decode=1, tuning=Tuning(admission="none"), goal=goal)
    sim = Simulation(trace, msgspec.structs.replace(setup, **more))
    assert sim.run()
    for number in refused:
        sim.served[number].outcome = "refused"
    return sim


def test_all_could_where_nobody_else_is() -> None:
    """One after the other, each finds room; nobody refused is nobody."""
    rows = [(10 * at, 4_000, 100) for at in range(5)]
    goal = Slo(30 * SECOND, 100_000)
    assert could_have_been_served(ran(rows, set(), goal)) == 0
    assert could_have_been_served(ran(rows, set(range(5)), goal)) == 5


def test_prefill_is_taken_by_one_at_a_time() -> None:
    """Of ten prompts of 4.5 s in one instant, so many as are done within the goal."""
    rows = [(0, 32_000, 2)] * 10
    for goal_s, fit in ((4, 0), (6, 1), (20, 4)):
        goal = Slo(goal_s * SECOND, 100_000)
        assert could_have_been_served(ran(rows, set(range(10)), goal)) == fit


def test_whoever_completed_keeps_its_time() -> None:
    """The same instance's time is not given twice."""
    rows = [(0, 32_000, 2)] * 4
    goal = Slo(20 * SECOND, 100_000)
    assert could_have_been_served(ran(rows, {2, 3}, goal)) == 2
    more = [(0, 32_000, 2)] * 8
    assert could_have_been_served(ran(more, {4, 5, 6, 7}, goal)) == 0


def test_decode_has_room_for_so_many_as_meet_the_goal() -> None:
    """A pass takes 21.6 ms and 4.2 for each: ten within 65 ms, if they stay for long."""
    rows = [(0, 512, 5_000)] * 30
    goal = Slo(30 * SECOND, 65_000)
    assert could_have_been_served(ran(rows, set(range(30)), goal)) == 10


def test_instances_that_do_both_are_not_looked_at() -> None:
    """Their passes are shared: no figure rather than a wrong one."""
    sim = ran([(0, 512, 5)], {0}, Slo(), prefill=0, decode=0, mixed=1)
    assert could_have_been_served(sim) is None


def test_the_summary_has_it() -> None:
    """Beside what was refused."""
    trace = Trace("t", 512, [Row(0, 32_000, 2, ()) for _ in range(8)])
    goal = Slo(10 * SECOND, 100_000)
    tuning = Tuning(admission="ttft", slo=goal)
    sim = Simulation(trace, Setup(prefill=1, decode=1, tuning=tuning, goal=goal))
    sim.run()
    found = measure(sim, 0.0).summary
    assert found["rejected"] == 6
    assert found["could_have_been_served"] == 0
