"""Law of late binding: of two requests that are alike, the one that came first goes first.

Costs are learned and blocks are evicted while requests wait, so what is known of an earlier one may
be older than what is known of a later one. That must not decide their order.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.actions import Action, Decode, Prefill, Refuse
from moonserve.core.schedule.adoption import StepFact
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    Arrived,
    Beat,
    DecodeEnded,
    InstanceLoad,
    Joined,
    PassSample,
    PrefillEnded,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, info

LENGTHS = (41, 41, 200, 201)
SHARED = 24
"""Tokens that the first two prompts have in common."""
SLOS = (Slo(), Slo(ttft_us=40_000))
NAMES = ("p0", "p1")


def prompt_of(kind: int) -> tuple[int, ...]:
    """One of a few prompts."""
    length = LENGTHS[kind]
    if kind < 2:
        return (*range(SHARED), *(1_000 + kind for _ in range(length - SHARED)))
    return tuple(range(5_000, 5_000 + length))


KEYS = [tuple(chain_keys(NAMESPACE.root(), prompt_of(kind), BLOCK)) for kind in range(4)]


class World:
    """A Conductor, and what would be seen of it from outside."""

    def __init__(self) -> None:
        self.conductor = Conductor(Tuning(policy="late_binding"), cost_of=lambda _: Cost())
        joins = [Joined(info(name, "prefill")) for name in NAMES]
        self.conductor.step(0, [*joins, Joined(info("d0", "decode"))])
        self.now_us: Micros = 0
        self.count = 0
        self.waiting: dict[RequestId, tuple[int, int]] = {}
        """Those that have no instance yet, in order of arrival: (kind, objective)."""
        self.late_us: dict[RequestId, Micros] = {}
        """When each of them has waited too long to be kept before others."""
        self.running: dict[str, list[tuple[Prefill, int]]] = {name: [] for name in NAMES}
        """Prefills by instance, with the kind of their prompt."""

    def step(self, *facts: StepFact) -> None:
        """Take in these facts, and look at what is done."""
        actions = self.conductor.step(self.now_us, facts)
        while actions:
            actions = self.conductor.step(self.now_us, self._done(actions))

    def _done(self, actions: list[Action]) -> list[StepFact]:
        follows: list[StepFact] = []
        for action in actions:
            match action:
                case Prefill(request=name, to=to):
                    self.running[to.id].append((action, self._went(name)))
                case Refuse(request=name):
                    del self.waiting[name]
                case Decode(request=name, number=number):
                    follows.append(DecodeEnded(name, number, 1))
                case _:
                    pass
        return follows

    def _went(self, name: RequestId) -> int:
        """A request goes: none that is alike and came before is left behind, unless it is late.
        Returns its kind."""
        alike = self.waiting.pop(name)
        behind = [
            other
            for other, what in self.waiting.items()
            if what == alike and self.late_us[other] > self.now_us and int(other) < int(name)
        ]
        assert not behind, f"{name} has passed {behind}"
        return alike[0]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("end"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("learn"), st.sampled_from(NAMES), st.integers(1, 60)),
        st.tuples(st.just("evict"), st.integers(0, 3), st.integers(0, 24)),
        st.tuples(st.just("wait"), st.integers(1, 20_000), st.just(0)),
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=100)
@given(STEPS)
def test_of_two_that_are_alike_the_first_goes_first(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was learned, stored or evicted between their arrivals."""
    world = World()
    for what, one, two in steps:
        world.now_us += 50
        if what == "wait":
            world.now_us += one
            world.step()
        elif what == "arrive":
            world.count += 1
            name = RequestId(str(world.count))
            slo = SLOS[two]
            world.waiting[name] = (one, two)
            patience_us = 30_000_000 if slo.ttft_us is None else slo.ttft_us
            world.late_us[name] = world.now_us + patience_us // 4
            prompt = prompt_of(one)
            request = Request(name, "m", len(prompt), prompt, stopping=Stopping(1), slo=slo)
            world.step(Arrived(request, KEYS[one]))
        elif what == "learn":
            passes = tuple(
                PassSample(tokens, 0, 0, 0, 0, 500 + two * tokens) for tokens in (10, 50, 100, 200)
            )
            load = InstanceLoad(passes=passes)
            world.step(Beat(InstanceId(str(one)), 1, load))
        elif what == "evict":
            keys = KEYS[one][two // 4 :]
            world.step(BlocksRemoved(SegmentId("p0"), keys, "dram", 1))
        elif world.running[str(one)]:
            done, kind = world.running[str(one)].pop(0)
            facts: list[StepFact] = [PrefillEnded(done.request, done.number, final=True)]
            if two:
                facts.append(BlocksStored(SegmentId(str(one)), KEYS[kind], None, "dram", 1))
            world.step(*facts)
