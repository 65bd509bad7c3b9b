"""Lanes against a plain account of where every slice is."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.transfer.lanes import SPARE, Lanes, LaneTerms, Run

DISTANCES = [0, 0, 1, SPARE]
TERMS = LaneTerms(
    tries=3,
    failures=2,
    probation_us=10,
    probation_max_us=40,
    run_bytes=10,
    spread_bytes=6,
    run_slices=4,
)


class LanesAgainstAccount(RuleBasedStateMachine):
    """Every slice is waiting, on one lane, or ended once; the driver's view decides which."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = Lanes(DISTANCES, TERMS)
        self.now_us = 0
        self.next_group = 0
        self.sizes: dict[int, list[int]] = {}
        self.deadline_us: dict[int, int] = {}
        self.open: dict[tuple[int, int], int] = {}
        """Slices not ended: how often a lane failed them."""
        self.runs: dict[int, Run] = {}
        self.lent: list[int] = []
        self.arrived = 0

    @rule(sizes=st.lists(st.integers(1, 12), max_size=8), lasts_us=st.integers(1, 200))
    def submit(self, sizes: list[int], lasts_us: int) -> None:
        group, self.next_group = self.next_group, self.next_group + 1
        self.sizes[group] = sizes
        self.deadline_us[group] = self.now_us + lasts_us
        self.open |= {(group, index): 0 for index in range(len(sizes))}
        self.lanes.submit(group, sizes, self.now_us + lasts_us)
        self.turn()

    @rule(us=st.integers(1, 60))
    def wait(self, us: int) -> None:
        self.now_us += us
        self.turn()

    @precondition(lambda self: self.lanes.groups)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.lanes.groups))
        self.lanes.drop(group)
        running = {(run.group, i) for run in self.runs.values() for i in run.slices}
        self.take_ends()
        assert {it for it in self.open if it[0] == group} <= running

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), fault=st.sampled_from([None, "lane", "lane", "late"]))
    def end(self, data: st.DataObject, fault: str | None) -> None:
        lane = data.draw(st.sampled_from(sorted(self.runs)))
        run = self.runs.pop(lane)
        count = len(run.slices)
        done = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        for index, arrived in zip(run.slices, done, strict=True):
            self.arrived += arrived and self.sizes[run.group][index]
            if fault == "lane" and not arrived:
                self.open[run.group, index] += 1
        self.lanes.ended(lane, self.now_us, done, fault)  # type: ignore[arg-type]
        self.turn()

    @rule(size=st.integers(1, 12), slices=st.integers(1, 5))
    def lend(self, size: int, slices: int) -> None:
        lane = self.lanes.lend(size, slices)
        if lane is None:
            return
        assert size <= TERMS.spread_bytes
        assert slices <= TERMS.run_slices
        assert not self.lanes.waiting
        assert not any(self.lanes.on_probation(it) for it in range(len(DISTANCES)))
        assert lane not in self.runs
        assert lane not in self.lent
        self.lent.append(lane)

    @precondition(lambda self: self.lent)
    @rule(fault=st.sampled_from([None, "lane", "late"]))
    def give_back(self, fault: str | None) -> None:
        size = 0 if fault else 5
        self.arrived += size
        self.lanes.give_back(self.lent.pop(), self.now_us, 1, size, fault)  # type: ignore[arg-type]
        self.turn()

    def turn(self) -> None:
        """What the engine does after every event."""
        trusted = [not self.lanes.on_probation(lane) for lane in range(len(DISTANCES))]
        idle = [
            lane
            for lane in range(len(DISTANCES))
            if lane not in self.runs and lane not in self.lent
        ]
        started = self.lanes.assign(self.now_us)
        for run in started:
            assert run.lane in idle
            assert self.deadline_us[run.group] > self.now_us
            assert {(run.group, index) for index in run.slices} <= set(self.open)
            sizes = [self.sizes[run.group][index] for index in run.slices]
            assert len(sizes) == 1 or sum(sizes) <= TERMS.run_bytes
            assert len(sizes) <= (TERMS.run_slices if trusted[run.lane] else 1)
            idle.remove(run.lane)
            self.runs[run.lane] = run
        self.take_ends()
        if self.lanes.waiting:  # nothing waits without a run whose end will take it up
            assert self.runs or self.lent

    def take_ends(self) -> None:
        for end in self.lanes.take_ends():
            tries = self.open.pop((end.group, end.slice))  # KeyError: it ended twice
            assert tries <= TERMS.tries
            if end.loss == "failed":
                assert tries == TERMS.tries
            if end.loss == "no lane":
                assert not self.runs
                assert not self.lent
                assert all(self.lanes.on_probation(lane) for lane in range(len(DISTANCES)))

    @invariant()
    def ledgers_balance(self) -> None:
        assert self.lanes.running == sum(len(run.slices) for run in self.runs.values())
        assert self.lanes.waiting + self.lanes.running == len(self.open)
        assert self.lanes.groups == list(dict.fromkeys(group for group, _ in sorted(self.open)))
        carried = [self.lanes.counters(lane) for lane in range(len(DISTANCES))]
        assert sum(it.bytes for it in carried) == self.arrived

    def teardown(self) -> None:
        """Whatever happened, every slice ends once the lanes answer."""
        while self.lent:
            self.give_back(None)
        for _ in range(1_000):
            if not self.runs:
                break
            lane, run = self.runs.popitem()
            self.lanes.ended(lane, self.now_us, [True] * len(run.slices), None)
            self.now_us += 1
            self.arrived += sum(self.sizes[run.group][index] for index in run.slices)
            self.turn()
        assert not self.open
        assert self.lanes.running == self.lanes.waiting == 0
        assert not self.lanes.groups


TestLanes = LanesAgainstAccount.TestCase
TestLanes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
