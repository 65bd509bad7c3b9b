"""One Conductor, two drivers: the heap and the live shell give the same account of a run."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.sim.cluster import Simulation
from moonserve.sim.setup import Setup
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import Row, Trace, head, read_trace, scale
from tests.support.traces import public_trace
from tests.support.virtual import LiveRun, tokens_of
from tests.support.virtual_time import run


def setup_of(
    policy: str, slo: Slo | None = None, refuse: str = "none", cache: int | None = None
) -> Setup:
    """Two and two, as both drivers can do it: no overlap, no calls that load ahead."""
    return Setup(
        prefill=2,
        decode=2,
        tuning=Tuning(policy=policy, slo=slo or Slo(), admission=refuse),  # type: ignore[arg-type]
        cache_blocks=cache,
        ahead=0,
        overlap=False,
    )


def both(trace: Trace, setup: Setup) -> tuple[Simulation, LiveRun]:
    """The same trace through the heap and through the live shell on a virtual loop."""
    heap = Simulation(trace, setup, keep_events=True)
    heap.run()
    cost = setup.profile.cost()
    conductor = Conductor(setup.tuning, Random(setup.seed), lambda info: cost, clients_return=False)
    live = LiveRun(trace, setup, conductor, POLICIES[setup.tuning.policy].copies)
    run(live.run())
    return heap, live


def check(heap: Simulation, live: LiveRun) -> None:
    """Equal events, and both ledgers are zero."""
    assert heap.events is not None
    for ours, theirs in zip(heap.events, live.events, strict=False):
        assert ours == theirs
    assert len(heap.events) == len(live.events)
    assert heap.digest.hex() == live.digest.hex()
    assert heap.conductor.promised() == live.conductor.promised() == Promised(0, 0, 0, 0)


def small(seed: int, requests: int = 40, rps: float = 2.0) -> Trace:
    """Sessions short enough to be served token by token in a moment."""
    made = synthesize(seed, requests, rps, block_size=512)
    return scale(made, lengths=16)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_heap_and_live_shell_agree(policy: str) -> None:
    """Every decision, call and outcome falls on the same microsecond in both."""
    heap, live = both(small(3), setup_of(policy))
    check(heap, live)


def test_they_agree_when_caches_are_small_and_requests_are_refused() -> None:
    """Evictions, objectives and refusals are the same in both."""
    slo = Slo(ttft_us=300_000, tbt_us=None)
    for policy in ("kvcache_centric", "late_binding"):
        heap, live = both(small(5, rps=30.0), setup_of(policy, slo, "ttft", cache=12))
        check(heap, live)
        assert any(event.what == "refused" for event in live.events)


@pytest.mark.parametrize(
    ("policy", "rps"), [("alpha_beta", 30.0), ("least_loaded", 4.0), ("kvcache_centric", 30.0)]
)
def test_they_agree_on_copies_of_a_hot_prefix(policy: str, rps: float) -> None:
    """Two of three sessions share a long prompt: the same copies, at the same time, in both."""
    shape = Shape(hot_share=0.7, sigma=0.5, turns=1.5)
    trace = scale(synthesize(5, 60, rps, shape, block_size=512), lengths=16)
    setup = msgspec.structs.replace(setup_of(policy), one_copy=True)
    heap, live = both(trace, setup)
    check(heap, live)
    copies = [event for event in live.events if event.what == "spread"]
    assert bool(copies) == (policy != "kvcache_centric"), "which copies what it fetches"
    assert heap.conductor.hot.done == live.conductor.hot.done
    assert heap.conductor.hot.bytes_under_way == live.conductor.hot.bytes_under_way == 0


def test_they_share_long_prompts_alike() -> None:
    """The same groups do the same parts in the same order; times differ by what a layer takes.

    The fake engine waits for earlier parts after its layer, the heap before, and frames take none.
    """
    profile = msgspec.structs.replace(PROFILES["a800"], layers=8)
    tuning = Tuning(slo=Slo(900_000, None), admission="none", cpp=3)
    setup = Setup(
        prefill=4,
        decode=1,
        profile=profile,
        tuning=tuning,
        ahead=0,
        overlap=False,
        cache_blocks=None,
    )
    blocks = [tuple(range(20)), (*range(10), *range(100, 116)), tuple(range(200, 217))]
    rows = [
        Row(at * 5_000_000, 512 * len(of) - 100, 3, of)
        for at, of in enumerate([*blocks, blocks[0]])
    ]
    heap, live = both(Trace("long", 512, rows), setup)
    assert heap.events is not None
    told = [[(e.what, e.request, e.detail) for e in them] for them in (heap.events, live.events)]
    assert told[0] == told[1]
    assert sum(event.what == "staged" for event in heap.events) >= 3
    layer_us = profile.cost().prefill_us(512 * 26, 0, 512 * 26) // 8
    late_us = [abs(a.at_us - b.at_us) for a, b in zip(heap.events, live.events, strict=True)]
    assert max(late_us) < layer_us
    assert heap.conductor.promised() == live.conductor.promised() == Promised(0, 0, 0, 0)
    for number, row in enumerate(rows):
        expected = live.reference(tokens_of(row, 512), row.output_tokens)
        assert live.tokens[f"r{number:06}"] == expected


def test_the_live_tokens_are_right() -> None:
    """What the parity runs generate is what one process would have generated."""
    trace = small(7, requests=12)
    _, live = both(trace, setup_of("kvcache_centric"))
    for number, row in enumerate(trace.rows):
        expected = live.reference(tokens_of(row, trace.block_size), row.output_tokens)
        assert live.tokens[f"r{number:06}"] == expected


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
def test_they_agree_on_the_conversation_trace(policy: str) -> None:
    """The first 200 rows of the public trace, lengths divided by 16."""
    trace = scale(head(read_trace(public_trace("conversation")), 200), speed=4.0, lengths=16)
    heap, live = both(trace, setup_of(policy))
    check(heap, live)
