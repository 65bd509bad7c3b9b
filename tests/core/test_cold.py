"""A cluster that has not measured itself serves, and refuses once it knows that it is slow."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.actions import Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import KNOWN_FROM, Cost
from moonserve.core.schedule.facts import (
    Arrived,
    Beat,
    Connector,
    DecodeEnded,
    Fact,
    InstanceLoad,
    Joined,
    PassSample,
    PrefillEnded,
    Role,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, Micros, RequestId
from tests.support.cluster import info

LENGTH = 500
STOP = Stopping(max_tokens=8)


class Engines:
    """Prefill engines that take `pass_us` for a prompt, one after another, and report each pass
    with the heartbeat of the next second."""

    def __init__(
        self,
        *names: str,
        pass_us: Micros,
        policy: str = "kvcache_centric",
        connector: Connector = "embedded",
        slo: Slo = Slo(1_500_000),  # noqa: B008 - frozen
    ) -> None:
        self.it = Conductor(Tuning(policy=policy, slo=slo), cost_of=lambda _: Cost())
        self.pass_us = pass_us
        roles: dict[str, Role] = dict.fromkeys(names, "prefill") | {"d0": "decode"}
        for name, role in roles.items():
            joining = msgspec.structs.replace(
                info(name, role), kv_blocks=1 << 20, max_seqs=400, connector=connector
            )
            self.it.step(0, [Joined(joining)])
        self.free_us = dict.fromkeys(names, 0)
        self.ends: list[tuple[Micros, str, str, int]] = []
        self.samples: dict[str, list[PassSample]] = {name: [] for name in names}
        self.beats_us = 1_000_000
        self.where: Counter[str] = Counter()
        self.refused: list[tuple[Micros, str]] = []
        self.latest_us: Micros = 0

    def run(self, arrivals: list[Micros]) -> None:
        """Let requests arrive at these times, to the end of all."""
        for number, at_us in enumerate(arrivals):
            self._until(at_us)
            request = Request(RequestId(f"r{number:03}"), "m", LENGTH, stopping=STOP)
            self._act(at_us, [Arrived(request, ())])
        self._until(max(arrivals) + 3_600_000_000)

    def _until(self, now_us: Micros) -> None:
        while True:
            self.ends.sort()
            end_us = self.ends[0][0] if self.ends else now_us + 1
            wake_us = self.it.wake_us(now_us) if not self.ends else None
            if min(end_us, self.beats_us) > now_us:
                return
            assert wake_us is None or wake_us >= now_us
            if self.beats_us <= end_us:
                if not self.ends and not any(self.samples.values()):
                    self.beats_us = max(self.beats_us, now_us) + 1_000_000
                    return
                self._beat()
                continue
            _, request, at, number = self.ends.pop(0)
            self.samples[at].append(PassSample(LENGTH, LENGTH**2, 0, 0, 0, self.pass_us))
            self._act(end_us, [PrefillEnded(RequestId(request), number, final=False)])

    def _beat(self) -> None:
        now_us = self.beats_us
        self.beats_us += 1_000_000
        for name in self.samples:
            passes, self.samples[name] = self.samples[name], []
            self._act(now_us, [Beat(InstanceId(name), 1, InstanceLoad(passes=tuple(passes)))])

    def _act(self, now_us: Micros, facts: list[Fact]) -> None:
        for action in self.it.step(now_us, facts):
            match action:
                case Prefill(request, number, to):
                    begin_us = max(now_us, self.free_us[to.id])
                    self.free_us[to.id] = begin_us + self.pass_us
                    self.latest_us = max(self.latest_us, self.free_us[to.id] - now_us)
                    self.ends.append((self.free_us[to.id], request, to.id, number))
                    self.where[to.id] += 1
                case Decode(request, number):
                    self._act(now_us, [DecodeEnded(request, number, 2)])
                case Refuse(request):
                    self.refused.append((now_us, request))


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding", "cache_aware"])
@pytest.mark.parametrize("connector", ["embedded", "nixl"])
def test_the_first_48_requests_are_served(policy: str, connector: Connector) -> None:
    """All would take at most 370 ms, and the objective is 1,500 ms; no pass is measured yet."""
    engines = Engines("p0", "p1", pass_us=15_000, policy=policy, connector=connector)
    engines.run([100_000 + 100 * at for at in range(48)])
    assert engines.refused == []
    assert engines.where.total() == 48
    assert engines.latest_us <= 370_000


def test_a_slow_engine_refuses_once_it_is_measured() -> None:
    """A prompt takes 600 ms: with one a tenth of a second most are refused from then on."""
    engines = Engines("p0", pass_us=600_000)
    engines.run([100_000 * at for at in range(1, 301)])
    first_us = engines.refused[0][0]
    assert engines.it.view.instances[InstanceId("p0")].cost.known
    assert first_us <= 5_000_000
    served = 300 - len(engines.refused)
    assert served < 300 * 0.1 / 0.6 + 30, "what it can do, and those before it was measured"


def test_the_first_to_report_does_not_draw_the_rest() -> None:
    """Until they have measured themselves, instances of one kind have the fit of the first."""
    engines = Engines("p0", "p1", "p2", "p3", pass_us=15_000)
    samples = tuple(PassSample(n, n * n, 0, 0, 0, 30 * n) for n in (100, 200, 300, 500))
    engines._act(1, [Beat(InstanceId("p2"), 1, InstanceLoad(passes=samples * 3))])
    engines.run([20_000_000 + 1_000_000 * at for at in range(40)])
    assert engines.where == {"p0": 10, "p1": 10, "p2": 10, "p3": 10}
    late = msgspec.structs.replace(info("p4", "prefill"), kv_blocks=1 << 20)
    engines.it.step(90_000_000, [Joined(late)])
    views = engines.it.view.instances
    predicted = [views[InstanceId(name)].cost.prefill_us(500, 0, 1_000) for name in ("p2", "p4")]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.05)


def test_prefill_and_decode_lend_each_other_nothing() -> None:
    """Nor does an instance of another model, or with another way of KV."""
    known = Cost()
    known.observe([PassSample(n, n * n, 0, 0, 0, 30 * n) for n in (100, 200, 300, 500)] * 3, [])
    prior = Cost().prefill_us(500, 0, 1_000)
    for other in (
        info("d0", "decode"),
        msgspec.structs.replace(info("p1", "prefill"), model="other"),
        msgspec.structs.replace(info("p1", "prefill"), connector="none"),
    ):
        it = Conductor(cost_of=lambda joining: known if joining.id == "p0" else Cost())
        it.step(0, [Joined(info("p0", "prefill")), Joined(other)])
        assert it.view.instances[other.id].cost.prefill_us(500, 0, 1_000) == prior


def test_own_measurements_replace_what_was_borrowed() -> None:
    """A slow instance beside a fast one of its kind is known as slow after some passes."""
    fast, slow = Cost(), Cost()
    sizes = (100, 200, 300, 500)
    fast.observe([PassSample(n, n * n, 0, 0, 0, 30 * n) for n in sizes] * 3, [])
    slow.borrow(fast)
    assert slow.prefill_us(500, 0, 1_000) == pytest.approx(15_000, rel=0.1)
    assert 1 < slow.optimism <= 2
    slow.observe([PassSample(n, n * n, 0, 0, 0, 3_000 * n) for n in sizes] * 2, [])
    assert slow.samples == KNOWN_FROM
    assert slow.known
    assert slow.optimism == 1
    assert slow.prefill_us(500, 0, 1_000) == pytest.approx(1_500_000, rel=0.15)
    before = slow.pass_us
    slow.borrow(fast)
    assert slow.pass_us == before
