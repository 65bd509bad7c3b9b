"""A decision that looks at few instances is that of tests.support.plain_decision, which looks at
all: over random fleets, costs, ties, stores, racks, objectives, connectors and histories."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from unittest.mock import patch

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.kv.index import Match
from moonserve.core.request import EffectiveSlo, Slo
from moonserve.core.schedule import estimate, search
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.decide import decide
from moonserve.core.schedule.estimate import Ask, Roles
from moonserve.core.schedule.facts import Connector, InstanceLoad, PassSample, Role
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId
from tests.support.cluster import BLOCK, info
from tests.support.plain_decision import plain_decide, runners_up

MODES: tuple[tuple[Role, ...], ...] = (("prefill", "decode"), ("both",), ("both", "decode"))
LINKS: tuple[tuple[Connector, ...], ...] = (
    ("embedded",),
    ("embedded",),
    ("embedded",),
    ("nixl",),
    ("nixl", "mooncake"),
    ("none",),
    ("nixl", "none"),
    ("sglang",),
)


SMALL = (
    (search, "FEW", 1),
    (search, "LOOKED", 3),
    (search, "_WINDOW", 6),
    (estimate, "HOLDERS", 3),
)


class Fleet:
    """Instances of one model with some history, made by a generator."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random = Random(seed)
        self.now_us = 1_000_000
        self.view = ClusterView()
        self.requests = 0
        self.under_way: list[tuple[InstanceView, RequestId, bool]] = []
        roles = random.choice(MODES)
        links = random.choice(LINKS)
        self.racks = random.choice([[""], [""], ["a", "b"], ["a", "b", ""]])
        self.costs = random.choice(["one", "two", "own", "own"])
        self.error = random.choice([0.0, 0.0, 0.02, 0.1, None])
        self.stores = random.choice([0, 0, 8, 40])
        self.full = random.choice([1, 1, 1, 40])
        pair = [self.cost(), self.cost()]
        for at in range(count):
            cost = self.cost() if self.costs == "own" else pair[at % (1 + (self.costs == "two"))]
            it = info(f"i{at:03}", roles[at % len(roles)], max_seqs=random.choice([8, 8, 2]))
            more = {
                "rack": random.choice(self.racks),
                "connector": random.choice(links),
                "kv_blocks": random.choice([100, 100, 100, 30]),
                "segment_bytes": self.stores * it.block_bytes,
                "chunk_tokens": random.choice([1_000, 1_000, 16]),
                "max_requests": random.choice([10_000, 10_000, 2]),
            }
            self.view.add(InstanceView(msgspec.structs.replace(it, **more), 0, cost))

    def cost(self) -> Cost:
        """Exact or with an error; coefficients are small numbers, so that there are ties."""
        draw = self.random.choice
        spread = draw([0, 0, 1])
        cost = Cost(
            (draw([0, 7]), 10 + spread, draw([0, 0.01]), draw([0, 0.1]), 100, 10, 1 + spread / 10),
            (5, draw([0.005, 0.1])),
            learns=self.error is not None and draw([True, True, False]),
        )
        if self.error:
            cost.error = draw([self.error, self.error / 2])
        return cost

    def live(self, steps: int) -> None:
        """Some history: promises, ends, heartbeats, learning."""
        random = self.random
        views = list(self.view.instances.values())
        for _ in range(steps):
            view = random.choice(views)
            what = random.choice("pppdddebbcu")
            self.requests += 1
            name = RequestId(f"r{self.requests}")
            if what == "p" and view.takes_prefill:
                work_us = random.choice([10, 100, 410, random.randrange(1_000)])
                view.promise_prefill(name, work_us, random.choice([4, 40]), self.now_us)
                self.under_way.append((view, name, True))
            elif what == "d" and view.takes_decode:
                goal_us = random.choice([None, None, None, 150, 400])
                view.promise_decode(name, random.choice([1, 20, 41]), goal_us)
                self.under_way.append((view, name, False))
            elif what == "e" and self.under_way:
                at = random.randrange(len(self.under_way))
                view, name, prefills = self.under_way.pop(at)
                (view.end_prefill if prefills else view.end_decode)(name, self.now_us)
            elif what == "b":
                counts = random.choice([(0, 0), (3, 2)])
                load = InstanceLoad(*counts, kv_tokens=50, everybody=True)
                self.view.beat(view, load, self.now_us)
            elif what == "c" and self.error is None:
                sample = PassSample(20, 400, 0, 1, 20, random.choice([150, 300]))
                self.view.beat(view, InstanceLoad(passes=(sample,) * 3), self.now_us)
            elif what == "u":
                view.use()
            self.now_us += random.choice([0, 0, 10, 100])

    def ask(self) -> Ask:
        """A request."""
        random = self.random
        views = list(self.view.instances.values())
        blocks = random.choice([1, 10, 10, 20])
        holders = random.choice([0, 0, 2, 5, len(views)])
        held: dict[SegmentId, int] = {}
        for view in random.sample(views, min(holders, len(views))):
            held[view.segment] = random.choice([1, 1, random.randint(1, blocks)])
        pool = max(held.values(), default=0)
        pending = {
            view.segment: random.randint(1, blocks)
            for view in random.sample(views, random.choice([0, 0, min(3, len(views))]))
        }
        slo = Slo(random.choice([None, 300, 5_000]), random.choice([None, None, 130, 200]))
        return Ask(
            blocks * BLOCK + random.choice([0, 1]),
            Match(min(blocks, pool + random.choice([0, 0, 3])), held),
            pending,
            waited_us=random.choice([0, 500]),
            expected_tokens=random.choice([0, 20]),
            whole=random.random() < 0.1,
            rank=random.choice([0, 0, 1]),
            slo=EffectiveSlo(slo),
            avoid=[view.info.id for view in random.sample(views, random.choice([0, 0, 0, 1]))],
            decode_load=random.choice([None, Later()]),
        )

    def roles(self, late: bool) -> Roles:
        """What the Conductor offers; with late binding only those about to be free."""
        views = self.view
        stores = {view.segment: self.random.randrange(2 * self.stores + 1) * (self.full == 1)
                  for view in views.instances.values()}  # fmt: skip
        doubts = {}
        if views.instances and self.random.random() < 0.2:
            doubts[self.random.choice(list(views.instances.values())).segment] = 0.5
        prefills = views.prefill_role("m")
        decodes = views.decode_role("m")
        held = stores.__getitem__
        if late:
            free = [it for it in prefills.views if it.is_free(self.now_us, 100)]
            prefills.sync()
            assert prefills.free(self.now_us, 100) == free
            some = prefills.only(free, kept=True)
            return Roles(some, decodes, prefills.views, views.racks, doubts, held)
        return Roles(prefills, decodes, None, views.racks, doubts, held)


class Later:
    """A forecast: twice what is promised now."""

    def tbt_us(self, view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
        """See DecodeLoad."""
        return view.tbt_us(1), 2 * view.tbt_us(1) + ends_us % 3


def compare(seed: int, count: int, steps: int) -> None:
    """Several decisions of one fleet, with some history between them."""
    fleet = Fleet(seed, count)
    random = fleet.random
    for _ in range(4):
        fleet.live(steps)
        policy = random.choice(
            ["kvcache_centric", "kvcache_centric", "late_binding", "cache_aware"]
        )
        tuning = Tuning(
            policy,
            kvcache_balancing_threshold=random.choice([1.0, 1.0, 2.0]),
            cpp=random.choice([1, 1, 3]),
            alone_tokens=random.choice([0, 8]),
        )
        ask = fleet.ask()
        roles = fleet.roles(policy == "late_binding")
        state = PolicyState()
        quick = decide(ask, roles, state, tuning, fleet.now_us)
        plain = plain_decide(ask, roles, state, tuning, fleet.now_us)
        if plain is None or quick is None:
            assert quick is None
            assert plain is None
            continue
        verdict, options, scores = plain
        assert quick.decision == verdict.decision
        for field in ("slo", "misses_ttft", "misses_tbt", "tbt_us", "breaks_us", "state"):
            assert getattr(quick, field) == getattr(verdict, field)
        losers = runners_up(options, scores, quick.decision.chosen.instance)
        shown = list(quick.candidates)
        assert shown[0] == quick.decision.chosen
        assert [it.score for it in shown[1:2]] == losers[:1]
        rows = {str(view.info.id): row for row, view in enumerate(options.views)}
        for one in shown:
            row = rows[one.instance]
            assert one == options.candidate(row, scores[row])
        fleet.view.check()
        if random.random() < 0.1 and len(fleet.view.instances) > 1:
            gone = random.choice(list(fleet.view.instances))
            fleet.under_way = [it for it in fleet.under_way if it[0].info.id != gone]
            fleet.view.remove(InstanceId(gone))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 80), st.sampled_from([0, 10, 100, 400]), st.booleans())
def test_a_decision_is_that_of_a_look_at_all(
    seed: int, count: int, steps: int, small: bool
) -> None:
    """Winner, terms, runner-up and its score, decode instance, objectives and verdict.

    Also if the bounds of the search are so small that few are priced.
    """
    with ExitStack() as patches:
        for module, name, bound in SMALL if small else ():
            patches.enter_context(patch.object(module, name, bound))
        compare(seed, count, steps)
