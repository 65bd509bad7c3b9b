"""Lanes, case by case; tests/law/test_lanes_law.py has the laws."""

from moonserve.core.transfer.lanes import SPARE, Lanes, LaneTerms, Run

FAR_OFF = 1 << 60


def answer(lanes: Lanes, run: Run, now_us: int, fault: str | None = None) -> list[Run]:
    """End a run, all of it arrived or none; the runs that follow."""
    done = [fault is None] * len(run.slices)
    lanes.ended(run.lane, now_us, done, fault)  # type: ignore[arg-type]
    return lanes.assign(now_us)


def test_the_nearest_idle_lane_is_taken_first() -> None:
    """Runs go to idle lanes by distance, then by id; the far one serves when the near are busy."""
    lanes = Lanes([1, 0, 0], LaneTerms(run_slices=1))
    lanes.submit(7, [10, 10, 10, 10], FAR_OFF)
    runs = lanes.assign(0)
    assert [(run.lane, run.slices) for run in runs] == [(1, (0,)), (2, (1,)), (0, (2,))]
    assert answer(lanes, runs[1], 1) == [Run(2, 7, (3,))]


def test_a_spare_lane_carries_what_failed_or_what_has_no_other_way() -> None:
    """Nothing fresh goes by a spare while a nearer lane is healthy, idle or busy; all does else."""
    terms = LaneTerms(failures=1, probation_us=100, spread_bytes=4)
    lanes = Lanes([0, SPARE], terms)
    lanes.submit(1, [1] * 8, FAR_OFF)
    (first,) = lanes.assign(0)
    assert first == Run(0, 1, tuple(range(8)))
    lanes.submit(2, [1], FAR_OFF)
    assert lanes.assign(0) == []
    assert answer(lanes, first, 1, "lane") == [Run(1, 1, tuple(range(8)))]
    assert answer(lanes, Run(1, 1, tuple(range(8))), 2) == [Run(1, 2, (0,))]
    assert answer(lanes, Run(1, 2, (0,)), 3) == []
    lanes.submit(3, [1], FAR_OFF)
    assert answer(lanes, lanes.assign(200)[0], 201) == []
    assert lanes.lend(1, 1) == 0
    assert lanes.lend(1, 1) is None


def test_a_run_is_bounded_by_bytes_and_by_slices() -> None:
    """A lane gets slices that fit a run together; one that is larger alone goes alone."""
    lanes = Lanes([0], LaneTerms(run_bytes=10, run_slices=3))
    lanes.submit(1, [4, 4, 4, 99, 1, 1, 1, 1], FAR_OFF)
    sizes = []
    runs = lanes.assign(0)
    while runs:
        sizes.append(runs[0].slices)
        runs = answer(lanes, runs[0], 0)
    assert sizes == [(0, 1), (2,), (3,), (4, 5, 6), (7,)]


def test_a_large_group_is_spread_and_a_small_one_is_not() -> None:
    """Lanes share a large group evenly; what one lane does as well is left to one."""
    terms = LaneTerms(spread_bytes=4, run_bytes=100)
    lanes = Lanes([0, 0, 0], terms)
    lanes.submit(1, [1] * 24, FAR_OFF)
    runs = lanes.assign(0)
    assert [len(run.slices) for run in runs] == [8, 8, 8]
    lanes = Lanes([0, 0, 0], terms)
    lanes.submit(1, [1] * 4, FAR_OFF)
    assert lanes.assign(0) == [Run(0, 1, (0, 1, 2, 3))]


def test_a_lane_is_lent_only_while_nobody_waits_and_all_are_trusted() -> None:
    """What skips the queue never overtakes it, and never takes the place of a trial."""
    lanes = Lanes([1, 0], LaneTerms(failures=1, probation_us=100))
    assert lanes.lend(8, 1) == 1
    assert lanes.lend(8, 1) == 0
    assert lanes.lend(8, 1) is None
    lanes.submit(1, [1], FAR_OFF)
    assert lanes.assign(0) == []
    lanes.give_back(1, 0, 1, 8, None)
    assert lanes.lend(8, 1) is None
    assert lanes.assign(0) == [Run(1, 1, (0,))]
    lanes.give_back(0, 0, 0, 0, "lane")
    lanes.ended(1, 0, [True], None)
    assert lanes.lend(8, 1) is None
    assert lanes.counters(1).bytes == 9


def test_groups_take_turns() -> None:
    """A long transfer does not hold up a short one that came after it."""
    lanes = Lanes([0], LaneTerms(run_slices=1))
    lanes.submit(1, [1] * 5, FAR_OFF)
    (first,) = lanes.assign(0)
    lanes.submit(2, [1], FAR_OFF)
    (second,) = answer(lanes, first, 0)
    (third,) = answer(lanes, second, 0)
    assert (second.group, third.group) == (1, 2)


def test_a_failed_slice_is_tried_elsewhere_up_to_the_bound() -> None:
    """Each try is on a lane that has not failed the slice, while there is one; then it ends."""
    lanes = Lanes([0, 0, 0], LaneTerms(tries=3))
    lanes.submit(1, [8], FAR_OFF)
    tried = []
    runs = lanes.assign(0)
    while runs:
        tried.append(runs[0].lane)
        runs = answer(lanes, runs[0], 0, "lane")
    assert tried == [0, 1, 2]
    assert [(end.slice, end.loss) for end in lanes.take_ends()] == [(0, "failed")]
    assert [lanes.counters(lane).retries for lane in range(3)] == [0, 1, 1]
    assert not any(lanes.on_probation(lane) for lane in range(3))


def test_what_arrived_before_the_lane_failed_is_not_sent_again() -> None:
    """Of a run that breaks off, only the rest is retried."""
    lanes = Lanes([0, 0], LaneTerms())
    lanes.submit(1, [5, 6, 7], FAR_OFF)
    lanes.assign(0)
    lanes.ended(0, 0, [True, True, False], "lane")
    assert lanes.assign(0) == [Run(1, 1, (2,))]
    assert [(end.slice, end.loss) for end in lanes.take_ends()] == [(0, None), (1, None)]
    assert lanes.counters(0).bytes == 11


def test_probation_grows_until_a_trial_slice_arrives() -> None:
    """On probation a lane gets nothing, then one slice; failed trials double the wait, bounded."""
    terms = LaneTerms(tries=9, failures=1, probation_us=100, probation_max_us=300)
    lanes = Lanes([0, 1], terms)
    lanes.submit(1, [1] * 50, FAR_OFF)
    runs = lanes.assign(0)
    assert [run.lane for run in runs] == [0]  # one run has all; the other lane stays idle
    now_us = 0
    (other,) = answer(lanes, runs[0], now_us, "lane")
    assert other.lane == 1
    for wait_us in (100, 200, 300, 300):
        assert lanes.assign(now_us + wait_us - 1) == []
        now_us += wait_us
        lanes.submit(now_us, [1, 1], FAR_OFF)
        (trial,) = lanes.assign(now_us)
        assert trial.lane == 0
        assert len(trial.slices) == 1
        assert answer(lanes, trial, now_us, "lane") == []
    now_us += 300
    (trial,) = lanes.assign(now_us)
    (healthy,) = answer(lanes, trial, now_us)
    assert healthy.lane == 0
    assert not lanes.on_probation(0)
    assert len(healthy.slices) > 1


def test_with_no_lane_left_slices_end_at_once() -> None:
    """All lanes on probation and none due: what waits is told so, and not left to its deadline."""
    lanes = Lanes([0], LaneTerms(failures=1))
    lanes.submit(1, [1, 1], FAR_OFF)
    (run,) = lanes.assign(0)
    assert answer(lanes, run, 0, "lane") == []
    assert [end.loss for end in lanes.take_ends()] == ["no lane"] * 2
    lanes.submit(2, [1], FAR_OFF)
    assert lanes.assign(1) == []
    assert [end.loss for end in lanes.take_ends()] == ["no lane"]
    lanes.submit(3, [1], FAR_OFF)
    (trial,) = lanes.assign(LaneTerms().probation_us)
    assert trial.group == 3


def test_a_refused_slice_is_nobodys_fault() -> None:
    """What the peer refuses ends at once; the lane stays trusted."""
    lanes = Lanes([0, 0], LaneTerms(failures=1))
    lanes.submit(1, [1, 1], FAR_OFF)
    lanes.assign(0)
    lanes.ended(0, 0, [True, False], None)
    assert [end.loss for end in lanes.take_ends()] == [None, "refused"]
    assert not lanes.on_probation(0)


def test_late_slices_end_and_blame_no_lane() -> None:
    """A deadline ends what waits; what is on a lane ends with its run."""
    lanes = Lanes([0], LaneTerms(run_slices=1, failures=1))
    lanes.submit(1, [1, 1], 50)
    (run,) = lanes.assign(49)
    assert lanes.assign(50) == []
    assert [(end.slice, end.loss) for end in lanes.take_ends()] == [(1, "late")]
    assert answer(lanes, run, 50, "late") == []
    assert [(end.slice, end.loss) for end in lanes.take_ends()] == [(0, "late")]
    assert not lanes.on_probation(0)
