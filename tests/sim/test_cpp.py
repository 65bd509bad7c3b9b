"""Groups in the simulator: as quick as planned, sharing links, cleanly lost, and undone to zero."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.pipeline import pass_us
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.report import why_slow
from moonserve.sim.setup import Breakdown, Setup
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import Row, Trace
from tests.sim.test_simulation import balanced, complete

A800 = PROFILES["a800"]
FORMS = ["chain", "layers"]


def long(*prompts: tuple[int, int], output: int = 3) -> Trace:
    """Prompts as (ms, tokens) that have nothing in common."""
    rows, block = [], 0
    for ms, tokens in prompts:
        blocks = -(-tokens // 512)
        rows.append(Row(ms * 1_000, tokens, output, tuple(range(block, block + blocks))))
        block += blocks
    return Trace("t", 512, rows)


def ran(trace: Trace, seconds: float = 3.0, **changes: Any) -> Simulation:
    """Eight and two, up to eight of which share what would take longer than that."""
    given = {"cpp": 8, "admission": "none", "slo": Slo(round(seconds * 1e6), None)}
    tuned = {name: changes.pop(name) for name in list(changes) if name in Tuning.__struct_fields__}
    setup = Setup(prefill=8, decode=2, profile=A800, tuning=Tuning(**(given | tuned)))  # type: ignore[arg-type]
    sim = Simulation(trace, msgspec.structs.replace(setup, **changes), keep_events=True)
    assert sim.run()
    return sim


def ttft_s(sim: Simulation, at: int = 0) -> float:
    """Of one request."""
    first_us = sim.served[at].first_us
    assert first_us is not None
    return (first_us - sim.served[at].arrived_us) / 1e6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [33_000, 131_072])
def test_it_takes_as_long_as_planned(form: str, tokens: int) -> None:
    """Alone in the cluster, the first token comes when predicted, but for KV that decode pulls."""
    sim = ran(long((0, tokens)), 0.5, cpp_form=form)
    (served,) = sim.served
    assert served.judged is not None
    assert len(served.judged.stages) > 4
    assert ttft_s(sim) == pytest.approx(served.judged.predicted_ttft_us / 1e6, rel=0.01)
    assert ttft_s(sim) < pass_us(A800.cost(), 0, tokens) / 1e6 / 4
    balanced(sim)
    complete(sim)


@pytest.mark.parametrize(("form", "layers"), [("chain", 80), ("chain", 3), ("layers", 80)])
def test_slow_links_are_planned_for(form: str, layers: int) -> None:
    """Where bandwidth is little a group is worth less, and the plan knows it, to the last piece."""
    sound = msgspec.structs.replace(A800, layers=layers)
    slow = msgspec.structs.replace(sound, link_bytes_per_s=2e9 if layers > 3 else 20e9)
    quick, held = (
        ran(long((0, 65_536)), 0.5, cpp_form=form, profile=profile, overlap=False)
        for profile in (sound, slow)
    )
    assert ttft_s(held) > ttft_s(quick)
    judged = held.served[0].judged
    assert judged is not None
    assert ttft_s(held) == pytest.approx(judged.predicted_ttft_us / 1e6, rel=0.02)
    balanced(held)


def test_members_end_one_after_the_other_and_are_free_then() -> None:
    """Each is reported when it has done its part; what others queue behind is its own part."""
    sim = ran(long((0, 65_536), (50, 4_000)), 3.0)
    assert sim.events is not None
    staged = [event.detail.split()[1] for event in sim.events if event.what == "staged"]
    judged = sim.served[0].judged
    assert judged is not None
    assert staged == [stage.instance for stage in judged.stages[:-1]]
    assert ttft_s(sim, 1) == pytest.approx(pass_us(A800.cost(), 0, 4_000) / 1e6, rel=0.01)


def test_parts_are_stored_where_they_were_computed() -> None:
    """A later turn finds all of the prompt, spread as it is, and loads what it lacks."""
    first, blocks = 65_536, tuple(range(130))
    rows = [Row(0, first, 2, blocks[:128]), Row(20_000_000, first + 900, 2, blocks)]
    sim = ran(Trace("t", 512, rows), 3.0)
    later = sim.served[1]
    assert later.cached == first
    assert later.judged is not None
    assert not later.judged.stages
    assert later.judged.chosen.local_tokens < first
    assert ttft_s(sim, 1) < 2.0
    balanced(sim)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_reused_is_not_computed(form: str) -> None:
    """A group begins at a cached prefix, and hands that on too."""
    blocks = tuple(range(256))
    rows = [Row(0, 32_768, 2, blocks[:64]), Row(20_000_000, 131_072, 2, blocks)]
    sim = ran(Trace("t", 512, rows), 5.0, cpp_form=form)
    later = sim.served[1]
    assert later.judged is not None
    assert later.cached == 32_768 == later.judged.stages[0].start
    assert ttft_s(sim, 1) == pytest.approx(later.judged.predicted_ttft_us / 1e6, rel=0.02)
    balanced(sim)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at_s", [0.005, 1.0, 1.9])
@pytest.mark.parametrize("member", [0, -2, -1])
def test_one_lost_costs_one_retry(form: str, at_s: float, member: int) -> None:
    """Whoever of a group dies amid it, the prompt is prefilled once more, by others."""
    trace = long((0, 65_536))
    sound = ran(trace, 2.6, cpp_form=form).served[0].judged
    assert sound is not None
    lost = sound.stages[member].instance
    sim = ran(trace, 2.6, cpp_form=form, breakdowns=(Breakdown("kill", lost, round(at_s * 1e6)),))
    (served,) = sim.served
    assert served.attempts == 2
    assert served.decision is not None
    assert len(served.decision.stages) > 1
    assert lost not in [stage.instance for stage in served.decision.stages]
    assert 0 < served.wasted_us < served.prefill_us
    assert ttft_s(sim) < 1.2 * (at_s + sound.predicted_ttft_us / 1e6) + 1.0
    balanced(sim)
    complete(sim)


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding", "round_robin"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mixed_load_with_failures_loses_nobody(policy: str, form: str) -> None:
    """Chats and long prompts, two instances killed and one back: all complete, all is undone."""
    chats = synthesize(1, 80, 4.0, Shape(turns=4.0, system_prompts=2, user_tokens=3_000))
    longs = long(*((900 * at, 20_000 + 9_000 * at) for at in range(10)))
    shifted = [
        msgspec.structs.replace(row, blocks=tuple(1_000_000 + b for b in row.blocks))
        if isinstance(row, msgspec.Struct)
        else row._replace(blocks=tuple(1_000_000 + b for b in row.blocks))
        for row in longs.rows
    ]
    rows = sorted([*chats.rows, *shifted], key=lambda row: row.at_us)
    faults = (
        Breakdown("kill", "p000", 5_000_000),
        Breakdown("kill", "p003", 5_000_000),
        Breakdown("join", "p000", 9_000_000),
        Breakdown("slow", "p005", 2_000_000, 2.0),
    )
    sim = ran(Trace("t", 512, rows), 2.0, policy=policy, cpp_form=form, breakdowns=faults, racks=2)
    complete(sim)
    balanced(sim)
    assert any(served.judged.stages for served in sim.served if served.judged)
    again = ran(
        Trace("t", 512, rows), 2.0, policy=policy, cpp_form=form, breakdowns=faults, racks=2
    )
    assert again.digest.hex() == sim.digest.hex()


def test_groups_cross_without_waiting_for_each_other() -> None:
    """Prompts that want the same instances at once are all served, whatever their order."""
    sim = ran(long(*((at, 40_000 + 5_000 * at) for at in range(12))), 1.0)
    complete(sim)
    balanced(sim)


def test_what_is_refused_alone_is_served_together() -> None:
    """With admission, a prompt that one instance would be late with is in time with a group."""
    trace = long((0, 100_000), output=3)
    alone, shared = (ran(trace, 5.0, cpp=most, admission="predictive") for most in (1, 8))
    assert [sim.served[0].outcome for sim in (alone, shared)] == ["refused", "completed"]
    assert measure(shared, 0.0).rows[0].met_ttft


def test_late_binding_takes_those_that_are_free_soon() -> None:
    """Waiting prompts are shared with instances that still have work, if that is in time."""
    trace = long(*((at, 30_000) for at in range(6)), (10, 100_000))
    sim = ran(trace, 9.0, policy="late_binding", admission="ttft")
    judged = sim.served[-1].judged
    assert judged is not None
    assert len(judged.stages) > 2
    assert measure(sim, 0.0).rows[-1].met_ttft
    balanced(sim)


def test_a_member_lost_before_its_turn_ends_the_group() -> None:
    """One that dies while the stage before it still waits for a place fails all of them."""
    trace = long((0, 30_000), (0, 120_000), (1, 120_000))
    for instance in (f"p{at:03}" for at in range(8)):
        sim = ran(trace, 6.0, breakdowns=(Breakdown("kill", instance, 300_000),))
        complete(sim)
        balanced(sim)


def test_the_report_says_who_shared_the_slowest() -> None:
    """The time of a group is its own, not what one instance alone would have taken."""
    sim = ran(long((0, 65_536)), 4.0)
    assert why_slow(sim.served[0]) == "3.7 s by 3 instances together"


def test_the_last_piece_is_waited_for() -> None:
    """Behind a slow instance a stage ends one piece's way, and one piece's work, after that one."""
    profile = msgspec.structs.replace(A800, layers=8, link_bytes_per_s=20e9)
    slow = Breakdown("slow", "p001", 0, 3.0)
    trace = long((0, 512), (1_000, 65_536))
    sim = ran(trace, 6.0, cpp=2, profile=profile, breakdowns=(slow,), overlap=False)
    judged, cost = sim.served[1].judged, profile.cost()
    assert judged is not None
    first = judged.stages[0]
    assert first.instance == "p001"
    way_s = first.end * profile.kv_bytes_per_token / 8 / profile.link_bytes_per_s
    works_s = [pass_us(cost, stage.start, stage.end) / 1e6 for stage in judged.stages]
    assert ttft_s(sim, 1) == pytest.approx(3 * works_s[0] + way_s + works_s[1] / 8, abs=1e-4)
