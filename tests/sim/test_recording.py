"""A recording simulated again: costs fitted from its stages, and both sides next to each other."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.schedule.explain import Explanation, Stages
from moonserve.core.schedule.facts import Connector
from moonserve.core.schedule.profiles import OVERHEADS, Overhead, Profile
from moonserve.core.schedule.recorded import (
    CLUSTER_FILE,
    RecordedCluster,
    RecordedInstance,
    RecordedRequest,
)
from moonserve.core.schedule.shown import in_ms
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId
from moonserve.sim.cluster import Simulation
from moonserve.sim.compared import Compared, compare
from moonserve.sim.fitted import fit
from moonserve.sim.recording import finds_output, read_recording, setup_of_cluster
from moonserve.sim.served import Served
from moonserve.sim.setup import Pace
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import Row, Trace

BLOCK = 32
SHAPE = Shape(system_prompts=2, system_tokens=150, user_tokens=60, output_tokens=20, sigma=0.7)
TRUTH = Profile(
    "truth",
    "made up",
    (50_000.0, 1_000.0, 0.1, 0.5, 30_000.0, 4_000.0, 12.0),
    23_040,
    800e6,
    17_472,
    load_base_us=3_000.0,
    arrive=Overhead(4_000.0, 2.0, 20_000.0),
    call=Overhead(8_000.0, 3.0, 40_000.0),
    turn=Overhead(5_000.0, 0.0, 10_000.0),
    own_load=Overhead(3_000.0, 28.0, 20_000.0),
    publish=Overhead(6_000.0, 10.0),
    decode_call=Overhead(9_000.0),
    wake_us=150_000.0,
    cold_after_us=2e6,
)
UNREPORTED = msgspec.structs.replace(
    TRUTH, **dict.fromkeys(("call", "turn", "own_load", "publish"), Overhead())
)
"""The same, of engines whose calls have no parts."""


def cluster(prefill: int = 1, decode: int = 1) -> RecordedCluster:
    """So many instances of the true profile."""
    names = [(f"p{at}", "prefill") for at in range(prefill)]
    names += [(f"d{at}", "decode") for at in range(decode)]
    instances = [
        RecordedInstance(
            id=InstanceId(name),
            role=role,  # type: ignore[arg-type]
            connector="embedded",
            block_size=BLOCK,
            block_bytes=BLOCK * TRUTH.kv_bytes_per_token,
            kv_blocks=546,
            max_seqs=16,
            chunk_tokens=512,
            segment_bytes=400 * BLOCK * TRUTH.kv_bytes_per_token,
            layers=30,
        )
        for name, role in names
    ]
    return RecordedCluster(instances, Tuning())


def external(connector: Connector) -> RecordedCluster:
    """Engines that do not report what a block has: a pair, or two that serve whole requests."""
    replace = msgspec.structs.replace
    instances = [
        replace(it, connector=connector, block_bytes=0, segment_bytes=0, layers=0)
        for it in cluster().instances
    ]
    if connector == "none":
        instances = [
            replace(it, id=InstanceId(f"m{at}"), role="both") for at, it in enumerate(instances)
        ]
    return RecordedCluster(instances, Tuning(alone_tokens=64))


def run(
    of: RecordedCluster, profile: Profile, trace: Trace, paces: tuple[Pace, ...] = ()
) -> list[Served]:
    """What became of the requests in a simulation."""
    setup = msgspec.structs.replace(setup_of_cluster(of, profile, BLOCK), paces=paces)
    sim = Simulation(trace, setup)
    assert sim.run()
    return sim.served


def recorded(one: Served, of: RecordedCluster) -> RecordedRequest:
    """The row that a gateway would have written of it, 10^12 ms after 1970."""
    decision, first_us, ended_us = one.decision, one.first_us, one.ended_us
    assert decision is not None
    assert first_us is not None
    assert ended_us is not None
    gaps = one.row.output_tokens - 1
    by_number = {f"{kind}{at:03}": f"{kind}{at}" for kind in "pdm" for at in range(9)}
    arrived_ms = 10**12 + one.row.at_us // 1_000
    return RecordedRequest(
        request=str(one.id),
        tenant="",
        priority=0,
        outcome="length",
        why="",
        arrived_ms=arrived_ms,
        prefill=InstanceId(by_number[decision.prefill]),
        decode=InstanceId(by_number[decision.decode]),
        prompt_tokens=one.row.input_tokens,
        output_tokens=one.row.output_tokens,
        actual_cached_tokens=one.cached,
        actual_ttft_ms=(first_us - one.arrived_us) / 1e3,
        actual_tbt_ms=(ended_us - first_us) / 1e3 / gaps if gaps else None,
        in_time=True,
        stages=in_ms(one.stages()),
        timestamp=arrived_ms,
        input_length=one.row.input_tokens,
        output_length=one.row.output_tokens,
        hash_ids=list(one.row.blocks),
        block_size=BLOCK,
        output_guessed=False,
    )


def hidden(row: RecordedRequest) -> RecordedRequest:
    """The same, of an engine that does not report the parts of its calls."""
    assert row.stages is not None
    names = ("queue_ms", "load_ms", "compute_ms", "publish_ms")
    handover = ("decode_queue_ms", "decode_load_ms", "decode_first_ms")
    parts = dict.fromkeys((*names, *handover))
    row.stages = msgspec.structs.replace(row.stages, **parts)
    return row


def fit_profile(name: str, of: RecordedCluster, rows: Sequence[Explanation]) -> Profile:
    """The costs alone."""
    return fit(name, of, rows).profile


def compared(rows: Sequence[Explanation], served: Sequence[Served]) -> dict[str, Compared]:
    """All figures by name."""
    return {it.name: it for it in compare(zip(rows, served, strict=True))}


@pytest.mark.parametrize(("prefill", "decode", "rate"), [(1, 1, 0.8), (1, 2, 2.0), (2, 2, 4.0)])
def test_what_was_recorded_comes_again(prefill: int, decode: int, rate: float) -> None:
    """Fitted from the stages of a run whose costs are known, the same run again has the same TTFT,
    TBT and stages, at low and at high load."""
    of = cluster(prefill, decode)
    trace = synthesize(7, 300, rate, SHAPE, BLOCK)
    before = run(of, TRUTH, trace)
    rows = [recorded(one, of) for one in before]
    after = run(of, fit_profile("again", of, rows), trace)
    found = compared(rows, after)
    assert len(found) == 17
    for name, it in found.items():
        most = {"ttft_ms": 0.05, "tbt_ms": 0.03, "queue_ms": 0.2}.get(name, 0.1)
        assert abs(it.errors()["mean"]) < most, (name, it)
        assert not it.missed(), (name, it)


def test_each_term_is_found() -> None:
    """Each stage's own line is close to the truth where its requests show it."""
    of = cluster()
    rows = [recorded(one, of) for one in run(of, TRUTH, synthesize(7, 300, 0.8, SHAPE, BLOCK))]
    profile = fit_profile("again", of, rows)
    prefill, step = profile.pass_us[:2], profile.pass_us[4:]
    assert prefill == pytest.approx(TRUTH.pass_us[:2], rel=0.1)
    assert step == pytest.approx(TRUTH.pass_us[4:], rel=0.1)
    assert profile.cold_after_us == TRUTH.cold_after_us
    assert profile.wake_us == pytest.approx(TRUTH.wake_us, rel=0.1)
    for name in OVERHEADS:
        found, truth = getattr(profile, name), getattr(TRUTH, name)
        at = (300, 0.5)
        assert found.us(*at) == pytest.approx(truth.us(*at), rel=0.1, abs=500), name


def test_a_wait_for_a_place_in_decode_is_no_cost() -> None:
    """If decode has more requests than places, all wait there for long, and its call costs what it
    costs; so with another decode instance the simulated wait is gone."""
    of = cluster()
    trace = synthesize(7, 150, 1.0, msgspec.structs.replace(SHAPE, output_tokens=100), BLOCK)
    before = run(of, TRUTH, trace)
    rows = [recorded(one, of) for one in before]
    queues_ms = [row.stages.decode_queue_ms or 0.0 for row in rows if row.stages is not None]
    assert np.mean(queues_ms) > 5_000
    profile = fit_profile("again", of, rows)
    assert profile.decode_call.us(300, 0.0) == pytest.approx(9_000, rel=0.2)
    assert not [it for it in compared(rows, run(of, profile, trace)).values() if it.missed()]
    wider = cluster(1, 3)
    found = compared(
        [recorded(one, wider) for one in run(wider, TRUTH, trace)], run(wider, profile, trace)
    )
    assert found["decode_queue_ms"].recorded.mean < 1_000
    assert not [it for it in found.values() if it.missed()]


def test_recordings_that_lack_the_parts_of_a_handover_are_read() -> None:
    """Those of earlier versions: the hand-over as a whole is fitted then, and comes again."""
    of = cluster()
    trace = synthesize(7, 100, 0.8, SHAPE, BLOCK)
    rows = [recorded(one, of) for one in run(of, TRUTH, trace)]
    for it in rows:
        stages = msgspec.json.decode(msgspec.json.encode(it.stages))
        earlier = {name: value for name, value in stages.items() if not name.startswith("decode_")}
        it.stages = msgspec.convert(earlier | {"decode_ms": stages["decode_ms"]}, Stages)
    found = compared(rows, run(of, fit_profile("again", of, rows), trace))
    assert "decode_queue_ms" not in found
    assert abs(found["handover_ms"].errors()["mean"]) < 0.05
    assert not [it for it in found.values() if it.missed()]


def test_few_cores_are_found() -> None:
    """If three instances share two cores, all of them are slow while all compute, and the fit finds
    how many cores there are."""
    of = cluster(1, 2)
    truth = msgspec.structs.replace(TRUTH, cores=2.0)
    trace = synthesize(7, 300, 3.0, SHAPE, BLOCK)
    rows = [recorded(one, of) for one in run(of, truth, trace)]
    profile = fit_profile("again", of, rows)
    assert profile.cores == 2.0
    found = compared(rows, run(of, profile, trace))
    assert not [it for it in found.values() if it.missed()]
    free = compared(rows, run(of, msgspec.structs.replace(profile, cores=0.0), trace))
    assert free["tbt_ms"].errors()["mean"] < -0.05


def test_a_machine_that_was_slow_for_a_while_is_so_again() -> None:
    """If other programs take a machine's cores for some minutes, the fit finds when and how much,
    and the simulation is slow then; on average the costs are those of all the time."""
    of = cluster()
    trace = synthesize(7, 200, 0.6, SHAPE, BLOCK)
    truth = tuple(Pace(round(60e6 * at), 2.0 if at in (1, 2) else 1.0) for at in range(9))
    rows = [recorded(one, of) for one in run(of, TRUTH, trace, truth)]
    fitted = fit("again", of, rows)
    paces = fitted.paces_since(1e15)
    slow = [it.factor for it in paces if 65e6 < it.at_us < 145e6]
    quick = [it.factor for it in paces if 185e6 < it.at_us < 300e6]
    assert np.mean(slow) / np.mean(quick) == pytest.approx(2.0, rel=0.15)
    found = compared(rows, run(of, fitted.profile, trace, paces))
    assert not [it for it in found.values() if it.missed()]
    steady = compared(rows, run(of, fitted.profile, trace))
    assert {"p50", "p90"} <= set(steady["tbt_ms"].missed())


def test_one_request_that_waited_for_something_else_changes_no_cost() -> None:
    """A wait for the first instance is no cost of an arrival: a sample far from all is left out."""
    of = cluster()
    rows = [recorded(one, of) for one in run(of, TRUTH, synthesize(7, 100, 0.8, SHAPE, BLOCK))]
    before = fit_profile("again", of, rows)
    stages = rows[0].stages
    assert stages is not None
    assert stages.waited_ms is not None
    rows[0].stages = msgspec.structs.replace(stages, waited_ms=stages.waited_ms + 4_000)
    rows[0].arrived_ms = (rows[0].arrived_ms or 0) - 4_000
    after = fit_profile("again", of, rows)
    at = (300, 0.5)
    assert after.arrive.us(*at) == pytest.approx(before.arrive.us(*at), rel=0.05)


def test_a_machine_that_is_never_cold_has_no_such_term() -> None:
    """The term is taken only if it explains something."""
    of = cluster()
    warm = {name: msgspec.structs.replace(getattr(TRUTH, name), cold_us=0.0) for name in OVERHEADS}
    truth = msgspec.structs.replace(TRUTH, wake_us=0.0, cold_after_us=0.0, **warm)
    rows = [recorded(one, of) for one in run(of, truth, synthesize(7, 200, 0.8, SHAPE, BLOCK))]
    profile = fit_profile("again", of, rows)
    assert (profile.cold_after_us, profile.wake_us, profile.call.cold_us) == (0.0, 0.0, 0.0)


def test_engines_that_report_no_parts_are_fitted_by_their_calls() -> None:
    """Then a prefill is its whole call, and nothing is said of its parts."""
    of = cluster()
    trace = synthesize(7, 200, 0.8, SHAPE, BLOCK)
    rows = [recorded(one, of) for one in run(of, TRUTH, trace)]
    for row in rows:
        hidden(row)
    profile = fit_profile("again", of, rows)
    assert profile.call == profile.turn == profile.publish == Overhead()
    found = compared(rows, run(of, profile, trace))
    assert "compute_ms" not in found
    assert not found["ttft_ms"].missed()
    assert not found["tbt_ms"].missed()


@pytest.mark.parametrize("connector", ["nixl", "none"])
def test_external_engines_are_simulated_as_they_serve(connector: Connector) -> None:
    """They report no parts and no bytes. A request that one engine serves alone, also a decode
    engine that has most of the prompt, is one call; none loads KV of another to prefill."""
    of = external(connector)
    trace = synthesize(7, 200, 0.8, SHAPE, BLOCK)
    before = run(of, UNREPORTED, trace)
    rows = [hidden(recorded(one, of)) for one in before]
    lone = [one for one in before if one.decision is not None and one.decision.joint]
    assert len(lone) == 200 if connector == "none" else 20 < len(lone) < 200
    profile = fit_profile("again", of, rows)
    assert profile.pass_us[4:] == pytest.approx(UNREPORTED.pass_us[4:], rel=0.12)
    found = compared(rows, run(of, profile, trace))
    assert abs(found["ttft_ms"].errors()["mean"]) < 0.05
    assert abs(found["tbt_ms"].errors()["mean"]) < 0.02
    assert not [it for it in found.values() if it.missed()], found
    assert abs(found["cached_tokens"].errors()["mean"]) < 0.02


def test_requests_of_an_external_engine_share_the_blocks_of_their_prefix() -> None:
    """Ten prompts with a common prefix of 20 blocks run at once in 64 blocks of an engine that has
    cached it; ten others of that length wait for room. Blocks are free again when all have ended.
    """
    of = external("none")
    of = RecordedCluster([msgspec.structs.replace(of.instances[0], kv_blocks=64)], of.tuning)
    size = 21 * BLOCK
    common, own = tuple(range(20)), range(100, 111)
    late_us = [0, *range(20_000_000, 20_000_010)]
    alike = [Row(at, size, 8, (*common, key)) for at, key in zip(late_us, own, strict=True)]
    apart = [
        Row(at, size, 8, tuple(range(1_000 * key, 1_000 * key + 21)))
        for at, key in zip(late_us, own, strict=True)
    ]
    last = Row(90_000_000, 60 * BLOCK, 8, tuple(range(5_000, 5_060)))
    for rows, together in ((alike, True), (apart, False)):
        served = run(of, TRUTH, Trace("t", BLOCK, [*rows, last]))
        begun_us = [one.calls[0][1].began_us for one in served[1:11]]
        assert (len(set(begun_us)) <= 2) == together
        assert all(one.outcome == "completed" for one in served)
        assert [one.cached for one in served[1:11]] == [20 * BLOCK if together else 0] * 10


def test_an_external_engine_looks_for_a_prefix_when_a_pass_begins() -> None:
    """A prompt that comes while the same prefix is computed finds it: its turn is the next pass."""
    of = external("none")
    of = RecordedCluster(of.instances[:1], of.tuning)
    size = 10 * BLOCK + 1
    rows = [Row(at_us, size, 4, (*range(10), at_us + 100)) for at_us in (0, 300_000)]
    first, second = run(of, UNREPORTED, Trace("t", BLOCK, rows))
    assert (first.cached, second.cached) == (0, 10 * BLOCK)
    assert second.calls[0][1].began_us == first.first_us


def test_a_slow_time_is_not_taken_for_the_cost_of_many_requests() -> None:
    """While an engine is slow, more requests are there. What each adds to a step is found all the
    same, and the times come again."""
    of = external("none")
    of = RecordedCluster(of.instances[:1], of.tuning)
    trace = synthesize(7, 200, 0.9, SHAPE, BLOCK)
    slow = tuple(Pace(round(60e6 * at), 2.0 if at == 1 else 1.0) for at in range(9))
    rows = [hidden(recorded(one, of)) for one in run(of, UNREPORTED, trace, slow)]
    fitted = fit("again", of, rows)
    base, each = fitted.profile.pass_us[4:6]
    true_base, true_each = UNREPORTED.pass_us[4:6]
    assert each / base == pytest.approx(true_each / true_base, rel=0.25)
    found = compared(rows, run(of, fitted.profile, trace, fitted.paces_since(1e15)))
    assert not found["ttft_ms"].missed()
    assert abs(found["tbt_ms"].errors()["mean"]) < 0.03


def test_whether_a_next_turn_finds_an_output_is_seen_in_a_recording() -> None:
    """It did if a request found a block that no earlier prompt had: of an answer that came back."""
    of = external("none")
    of = RecordedCluster(of.instances[:1], of.tuning)
    turn = Row(0, 4 * BLOCK, 2 * BLOCK + 1, (0, 1, 2, 3))
    following = Row(60_000_000, 7 * BLOCK, 4, (0, 1, 2, 3, 4, 5, 6))
    for keeps, cached in ((True, 6 * BLOCK), (False, 4 * BLOCK)):
        setup = setup_of_cluster(of, UNREPORTED, BLOCK, keeps)
        sim = Simulation(Trace("t", BLOCK, [turn, following]), setup)
        assert sim.run()
        assert sim.served[1].cached == cached
        assert finds_output([recorded(one, of) for one in sim.served]) == keeps


def test_costs_without_a_base_are_a_fit_too() -> None:
    """A step that costs nothing but for its requests makes no figure that is not a number."""
    of = cluster()
    truth = msgspec.structs.replace(TRUTH, pass_us=(0.0, 900.0, 0.0, 0.0, 0.0, 9_000.0, 0.0))
    trace = synthesize(7, 100, 0.8, SHAPE, BLOCK)
    rows = [recorded(one, of) for one in run(of, truth, trace)]
    profile = fit_profile("again", of, rows)
    assert all(math.isfinite(us) for us in profile.pass_us)
    assert not compared(rows, run(of, profile, trace))["tbt_ms"].missed()


def test_too_few_requests_are_no_fit() -> None:
    """The error says how many there are, and how many are needed."""
    of = cluster()
    rows = [recorded(one, of) for one in run(of, TRUTH, synthesize(7, 5, 0.8, SHAPE, BLOCK))]
    with pytest.raises(ConfigError, match=r"mine: has 5 requests .* a fit needs 8: serve more"):
        fit_profile("mine", of, rows)


def test_the_first_pass_after_an_idle_time_is_slow() -> None:
    """The first request finds a cold machine, one beside it a warm one, a late one a cold one."""
    of = cluster()
    rows = [Row(at_us, 40, 2, (at_us, at_us + 1)) for at_us in (0, 3_000_000, 3_150_000)]
    first, second, third = run(of, TRUTH, Trace("t", BLOCK, rows))
    assert first.cold == 1.0
    assert 0.5 < second.cold < 0.6
    assert third.cold == 0.0
    assert first.computed_us - third.computed_us == TRUTH.wake_us
    assert first.call_us - third.call_us == TRUTH.call.cold_us


def test_the_embedded_store_is_full_of_more_than_prompts() -> None:
    """Partial blocks and outputs take room too, and a full segment evicts several blocks."""
    of = cluster()
    setup = setup_of_cluster(of, TRUTH, BLOCK)
    setup = msgspec.structs.replace(setup, cache_blocks=20)  # 19 is too much, then 18 stay
    rows = [
        Row(at * 9_000_000, 5 * BLOCK + 1, BLOCK, tuple(range(6 * at, 6 * at + 6)))
        for at in range(3)
    ]
    again = Row(40_000_000, 5 * BLOCK + 1, 1, tuple(range(6)))
    for kept, expected in ((True, 5 * BLOCK), (False, 2 * BLOCK)):
        trace = Trace("t", BLOCK, [*(rows[:2] if kept else rows), again])
        sim = Simulation(trace, setup)
        assert sim.run()
        assert sim.served[-1].cached == expected


# The command.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of 60 requests."""
    import gzip

    of = cluster()
    rows = [recorded(one, of) for one in run(of, TRUTH, synthesize(7, 60, 0.8, SHAPE, BLOCK))]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    (tmp_path / "requests-1.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / CLUSTER_FILE).write_bytes(msgspec.json.encode(of))
    return tmp_path


def simulate(*argv: str | Path, code: int = 0) -> Result:
    """Run `moonserve simulate` in this process."""
    done = CliRunner().invoke(cli, ["simulate", *map(str, argv)], prog_name="moonserve")
    assert done.exit_code == code, done.output
    return done


def test_a_recording_is_simulated_on_its_own_cluster(folder: Path) -> None:
    """Instances, settings and costs are the recording's, unless an option says otherwise."""
    said = simulate(folder, "--compare").stdout
    assert "1 prefill + 1 decode, kvcache_centric" in said
    assert "costs      fitted from 60 recorded requests" in said
    assert "TTFT within 15% in mean, p50 and p90" in said
    assert "mean TBT within 7% in mean, p50 and p90" in said
    assert "\nmean TBT, ms " in said
    other = simulate(folder, "--decode", "3", "--policy", "random").stdout
    assert "1 prefill + 3 decode, random" in other
    mixed = simulate(folder, "--mixed", "2", "--profile", "a800").stdout
    assert "2 mixed, kvcache_centric, a800" in mixed
    elsewhere = simulate(next(folder.glob("*.gz")), "--json")
    assert json.loads(elsewhere.stdout)["prefill"] == 1
    plan = CliRunner().invoke(
        cli, ["plan", "--trace", str(folder), "--profile", str(folder), "--nodes", "2", "-j", "1"]
    )
    assert plan.exit_code == 0, plan.output


def test_a_missed_goal_is_said(folder: Path) -> None:
    """With other costs the comparison names what is off, and by how much."""
    said = simulate(folder, "--compare", "--profile", "a800").stdout
    assert "TTFT NOT within 15%: mean by -" in said
    found = json.loads(simulate(folder, "--compare", "--profile", "a800", "--json").stdout)
    ttft = found["compared"][0]
    assert (ttft["name"], ttft["goal"], ttft["missed"]) == ("ttft_ms", 0.15, ["mean", "p50", "p90"])
    assert ttft["errors"]["mean"] == pytest.approx(
        ttft["simulated"]["mean"] / ttft["recorded"]["mean"] - 1
    )


def test_a_recording_that_grows_is_read_once(folder: Path) -> None:
    """Requests that end after the rows were read are neither simulated nor compared."""
    recording = read_recording(folder)
    assert recording is not None
    file = next(folder.glob("*.gz"))
    file.with_name("requests-2.jsonl.gz").write_bytes(file.read_bytes())
    trace = recording.trace(None, 512)
    assert [row.blocks for row in trace.rows] == [tuple(row.hash_ids) for row in recording.rows]
    assert len(trace.rows) == 60


def test_what_cannot_be_compared_says_why(folder: Path, tmp_path: Path) -> None:
    """No such file, an empty folder, a plain trace, another speed: each has a sentence."""
    empty = tmp_path / "empty"
    empty.mkdir()
    plain = tmp_path / "chat.jsonl"
    row = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}
    plain.write_text(json.dumps(row))
    for path, argv, said in (
        (tmp_path / "gone", (), "gone: cannot be read: No such file"),
        (empty, (), "empty: has no recording"),
        (plain, (), f"--compare: {plain} is no recording; name a folder"),
        (folder, ("--speed", "2"), "--compare: a recording has its own speed; leave --speed out"),
    ):
        assert said in simulate(path, "--compare", *argv, code=2).stderr


@pytest.mark.parametrize(
    "argv", [("--decode", "3"), ("--policy", "random"), ("--ttft-slo", "9s"), ("--mixed", "2")]
)
def test_two_clusters_are_not_compared(folder: Path, argv: tuple[str, ...]) -> None:
    """An option that makes another cluster than the recorded one is refused by its name."""
    done = simulate(folder, "--compare", *argv, code=2)
    assert f"error: {argv[0]}: makes another cluster than the recorded one" in done.stderr
    assert "TTFT" in simulate(folder, "--compare", "--decode", "1", "--no-overlap").stdout


def test_json_says_what_was_simulated(folder: Path) -> None:
    """The options in `setup` have the values of the recording, and those that were given."""
    file = folder / CLUSTER_FILE
    slo = Slo(2_000_000, 100_000)
    of = msgspec.structs.replace(cluster(), tuning=Tuning(slo=slo, admission="predictive"))
    file.write_bytes(msgspec.json.encode(of))
    setup = json.loads(simulate(folder, "--decode", "2", "--json").stdout)["setup"]
    names = ("ttft_slo", "tbt_slo", "admission", "prefill_seqs", "prefill", "decode", "no_overlap")
    assert [setup[name] for name in names] == ["2s", "100ms", "predictive", 16, 1, 2, True]


def test_a_recording_that_cannot_be_taken_so_says_why(folder: Path) -> None:
    """No traceback: the file, what is wrong, and what to do."""
    file = folder / CLUSTER_FILE
    file.write_text('{"instances": 3}')
    assert f"{file}: is none that --record has written" in simulate(folder, code=2).output
    lame = msgspec.structs.replace(cluster(), instances=cluster().instances[:1])
    file.write_bytes(msgspec.json.encode(lame))
    other = simulate(folder)
    assert "warning: the recorded cluster has not both roles" in other.stderr
    assert "8 prefill + 8 decode" in other.stdout
    assert "has not both roles" in simulate(folder, "--profile", folder, code=2).output
    sizeless = msgspec.structs.replace(cluster().instances[0], block_bytes=0)
    lame = msgspec.structs.replace(cluster(), instances=[sizeless, *cluster().instances[1:]])
    file.write_bytes(msgspec.json.encode(lame))
    assert "does not say its sizes, p0" in simulate(folder).stderr
    file.unlink()
    assert "2 prefill + 2 decode" in simulate(folder, "--prefill", "2", "--decode", "2").stdout
    assert f"{folder} has no {CLUSTER_FILE}" in simulate(folder, "--compare", code=2).output
    assert f"has no {CLUSTER_FILE}" in simulate(folder, "--profile", folder, code=2).output
