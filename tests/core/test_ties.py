"""Of equal instances the one is chosen that costs later requests least, not always the first."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.actions import Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    Arrived,
    Beat,
    Connector,
    DecodeEnded,
    InstanceInfo,
    InstanceLoad,
    Joined,
    PassSample,
    PrefillEnded,
    Role,
    Selected,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import BlockKey, RequestId
from tests.support.cluster import BLOCK, NAMESPACE, exact, info

LENGTH = 41
BLOCKS = LENGTH // BLOCK
INSTANCES: dict[str, list[tuple[str, Role]]] = {
    "apart": [(f"p{n}", "prefill") for n in range(4)] + [(f"d{n}", "decode") for n in range(4)],
    "both": [(f"m{n}", "both") for n in range(4)],
}


class Quiet:
    """A cluster that serves one request after another, each with its own prompt."""

    def __init__(
        self,
        kind: str = "apart",
        policy: str = "kvcache_centric",
        connector: Connector = "embedded",
        store_blocks: int = 0,
        learns: bool = False,
    ) -> None:
        self.costs: dict[str, Cost] = {}

        def cost(joining: InstanceInfo) -> Cost:
            self.costs[joining.id] = Cost() if learns else exact(joining)
            return self.costs[joining.id]

        self.it = Conductor(Tuning(policy=policy), cost_of=cost)
        self.served = 0
        for name, role in INSTANCES[kind]:
            made = info(name, role)
            segment = made.segment if connector == "embedded" else None
            joining = msgspec.structs.replace(
                made,
                connector=connector,
                segment=segment,
                segment_bytes=store_blocks * made.block_bytes,
            )
            self.it.step(0, [Joined(joining)])

    def chain(self, number: int) -> tuple[BlockKey, ...]:
        """The keys of one of many prompts."""
        return tuple(chain_keys(NAMESPACE.root(), [number * 1_000 + i for i in range(LENGTH)], 4))

    def ask(self, number: int) -> tuple[str, str]:
        """Serve a request from its arrival to its end; the instances that did it."""
        self.served += 1
        name, now_us = RequestId(f"r{self.served}"), 1_000_000 * self.served
        request = Request(name, "m", LENGTH, stopping=Stopping(max_tokens=8))
        [action] = self.it.step(now_us, [Arrived(request, self.chain(number))])
        assert isinstance(action, Prefill)
        at = action.decision.prefill
        facts = [PrefillEnded(name, action.number, final=False)]
        if action.to.segment is not None:
            self.hold(action.to, number, now_us)
        calls = self.it.step(now_us + 1_000, facts)
        last = calls[0].number if calls and isinstance(calls[0], Decode) else action.number
        self.it.step(now_us + 2_000, [DecodeEnded(name, last, 2)])
        assert self.it.promised().requests == 0
        return at, action.decision.decode

    def hold(self, at: InstanceInfo, number: int, now_us: int) -> None:
        """The instance stores the prompt."""
        assert at.segment is not None
        keys = self.chain(number)
        self.it.step(now_us, [BlocksStored(at.segment, keys, None, "dram", at.epoch)])


@pytest.mark.parametrize("kind", ["apart", "both"])
@pytest.mark.parametrize(
    "policy", ["kvcache_centric", "late_binding", "cache_aware", "least_loaded", "alpha_beta"]
)
def test_four_idle_instances_get_ten_of_forty_each(kind: str, policy: str) -> None:
    """40 prompts one after another: also for decode, and for instances that do both."""
    quiet = Quiet(kind, policy)
    found = [quiet.ask(number) for number in range(40)]
    assert sorted(Counter(at for at, _ in found).values()) == [10] * 4
    assert sorted(Counter(at for _, at in found).values()) == [10] * 4


def test_four_idle_external_engines_get_ten_of_forty_each() -> None:
    """They have no store that the gateway knows; the least recently used is next."""
    quiet = Quiet("both", connector="none")
    assert sorted(Counter(at for at, _ in map(quiet.ask, range(40))).values()) == [10] * 4
    pairs = Quiet("apart", connector="nixl")
    found = [pairs.ask(number) for number in range(40)]
    assert sorted(Counter(at for at, _ in found).values()) == [10] * 4
    assert sorted(Counter(at for _, at in found).values()) == [10] * 4


def test_a_prefix_goes_to_its_holder() -> None:
    """Spreading ends where an instance has the prompt: each comes back to where it was."""
    quiet = Quiet()
    first = {number: quiet.ask(number)[0] for number in range(12)}
    for number in (5, 5, 5, 0, 11, 7):
        assert quiet.ask(number)[0] == first[number]


def test_a_store_with_room_is_filled_before_another_evicts() -> None:
    """p0 may be the next in turn, but has no room left; p1 to p3 have."""
    quiet = Quiet(store_blocks=2 * BLOCKS)
    infos = {str(it.info.id): it.info for it in quiet.it.view.prefills("m")}
    for number in (100, 101):
        quiet.hold(infos["p0"], number, 1)
    assert Counter(quiet.ask(number)[0] for number in range(6)) == {"p1": 2, "p2": 2, "p3": 2}
    assert {quiet.ask(number)[0] for number in range(6, 10)} == {"p0", "p1", "p2", "p3"}


def measured(quiet: Quiet, name: str, us_per_token: int, passes: int = 40) -> None:
    """An instance reports prefill passes of this speed."""
    samples = tuple(
        PassSample(n, n * n, 0, 0, 0, n * us_per_token) for n in (20, 41, 80) * (passes // 3)
    )
    quiet.it.step(1, [Beat(quiet.it.view.instances[name].info.id, 1, InstanceLoad(passes=samples))])


def test_a_fit_that_is_a_little_lower_does_not_draw_all() -> None:
    """1 % between fits is less than they err; 50 % is more."""
    quiet = Quiet(learns=True)
    for name, us in (("p0", 1_010), ("p1", 1_000), ("p2", 1_005), ("p3", 1_500)):
        measured(quiet, name, us)
    found = Counter(quiet.ask(number)[0] for number in range(40))
    assert found["p3"] == 0
    assert min(found[name] for name in ("p0", "p1", "p2")) >= 13


def test_what_other_routers_select_takes_turns() -> None:
    """An answer to /api/select reserves nothing, but of equal instances others are next."""
    quiet = Quiet()
    request = Request(RequestId("r"), "m", LENGTH, stopping=Stopping(max_tokens=8))
    found = []
    for number in range(40):
        decision = quiet.it.preview(request, quiet.chain(number), 1)
        assert not isinstance(decision, Refuse)
        quiet.it.step(1, [Selected(decision.prefill, decision.decode)])
        found.append((decision.prefill, decision.decode))
    assert sorted(Counter(at for at, _ in found).values()) == [10] * 4
    assert sorted(Counter(at for _, at in found).values()) == [10] * 4


def test_preview_alone_changes_nothing() -> None:
    """The same question has the same answer."""
    quiet = Quiet()
    request = Request(RequestId("r"), "m", LENGTH, stopping=Stopping(max_tokens=8))
    assert quiet.it.preview(request, quiet.chain(0), 1) == quiet.it.preview(
        request, quiet.chain(0), 1
    )
