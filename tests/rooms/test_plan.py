"""Searches: what the highest speed is, also where attainment is not monotone; bounds; splits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.request import Slo
from moonserve.core.schedule.tuning import Tuning
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.plan import (
    MOST,
    Misses,
    Trials,
    Try,
    central_queue,
    decode_bound,
    max_speed,
    plan,
    prefill_bound,
    requests_needed,
)
from moonserve.sim.setup import Setup
from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import Row, Trace, scale, write_trace

GOAL = Slo(30_000_000, 200_000)
SETUP = Setup(tuning=Tuning(slo=GOAL, admission="none"), goal=GOAL, prefill=1, decode=1)


def stand_in(meets: Callable[[float], bool]) -> tuple[Callable[[float], Try], list[float]]:
    """Trials that need no simulation, and the speeds that were asked for."""
    asked: list[float] = []

    def at(speed: float) -> Try:
        if speed not in asked:
            asked.append(speed)
        share = 0.995 if meets(speed) else 0.9
        return Try(speed, share, share, share, whole=True)

    return at, asked


@pytest.mark.parametrize("guess", [0.01, 0.5, 1.3, 1.35, 1.4, 9.0])
def test_the_highest_speed_is_found_from_any_guess(guess: float) -> None:
    """Where attainment falls once, the last step before is found, with few simulations."""
    at, asked = stand_in(lambda speed: speed <= 1.36)
    found = max_speed(at, 0.99, guess)
    assert found.speed == 1.35
    assert found.missed is not None
    assert found.missed.speed == 1.4
    assert len(asked) <= 24
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("guess", [0.01, 1.35, 9.0])
def test_what_may_come_next_changes_no_answer(guess: float) -> None:
    """The speed that is asked for is the first of those that were named just before."""
    at, asked = stand_in(lambda speed: speed <= 1.36)
    plain = max_speed(at, 0.99, guess)
    named: list[float] = []
    assert max_speed(at, 0.99, guess, ahead=named.extend) == plain
    assert max(named) <= MOST
    assert len(set(asked) & set(named)) > len(asked) / 2


def test_a_search_side_by_side_finds_the_same() -> None:
    """Simulations that were not needed change no split, and each call gives what it gives alone."""
    chat = synthesize(5, 60, 4.0, block_size=512)
    groups: list[int] = []

    def several(calls: Sequence[Callable[[], Try]]) -> list[Try]:
        groups.append(len(calls))
        return [call() for call in reversed(calls)][::-1]

    assert plan(chat, SETUP, 3, tolerance=0.25, several=several) == plan(
        chat, SETUP, 3, tolerance=0.25
    )
    assert 2 in groups


def test_a_narrow_dip_is_walked_through() -> None:
    """One speed that misses by itself does not end the search; two in a row do."""
    at, _ = stand_in(lambda speed: speed <= 2.0 and speed != 1.5)
    assert max_speed(at, 0.99, 1.4).speed == 2.0
    at, _ = stand_in(lambda speed: speed <= 1.4 or speed == 1.55)
    assert max_speed(at, 0.99, 1.3).speed == 1.4


def test_no_speed_and_every_speed_are_told() -> None:
    """A search ends at both ends of the scale, and says so."""
    at, _ = stand_in(lambda speed: False)
    found = max_speed(at, 0.99, 1.0)
    assert found.speed is None
    assert found.missed is not None
    at, _ = stand_in(lambda speed: True)
    found = max_speed(at, 0.99, 1.0)
    assert found.speed is not None
    assert MOST / 2 < found.speed <= MOST
    assert found.missed is None


@pytest.mark.parametrize(
    "goal", [GOAL, Slo(30_000_000, 60_000), Slo(None, 60_000), Slo(900_000, None)]
)
@pytest.mark.parametrize("speed", [0.1, 3.0, 40.0])
def test_a_run_left_early_bounds_what_a_whole_one_attains(goal: Slo, speed: float) -> None:
    """What is left early attains less than the target; what is not, exactly what is measured."""
    trace = synthesize(3, 400, 2.0)
    setup = msgspec.structs.replace(SETUP, goal=goal)
    sim = Simulation(scale(trace, speed), setup)
    sim.run()
    truth = measure(sim, 0.0).summary
    tried = Trials(trace, setup, 0.99)(speed)
    if tried.whole:
        assert tried.attainment == pytest.approx(truth["attainment"])
        assert tried.attainment_ttft == pytest.approx(truth["attainment_ttft"])
    else:
        assert truth["attainment"] <= tried.attainment < 0.99
        assert truth["attainment_ttft"] <= tried.attainment_ttft
    whole = Trials(trace, setup, 0.0)(speed)
    assert whole.whole
    assert whole.attainment == pytest.approx(truth["attainment"])


def test_without_tbt_a_first_token_decides_and_tokens_are_counted() -> None:
    """The run is left when the last first token is there; the shares are those of a whole run."""
    goal = Slo(900_000, None)
    setup = msgspec.structs.replace(SETUP, goal=goal, sample_us=100_000)
    trace = synthesize(3, 100, 2.0)
    whole, left = Simulation(trace, setup), Simulation(trace, setup)
    whole.run()
    misses = Misses(left)

    def decided() -> bool:
        misses.look()
        return misses.decided

    assert not left.run(decided)
    assert left.clock.now_us < whole.clock.now_us
    truth = measure(whole, 0.0).summary
    tokens = sum(row.input_tokens for row in trace.rows)
    assert 0 < misses.any < 100
    assert 1 - misses.any / 100 == pytest.approx(truth["attainment"])
    assert 1 - misses.tokens / tokens == pytest.approx(truth["goodput_token_share"])


def test_who_fails_after_its_first_token_has_missed() -> None:
    """The first token decides nothing of a request that may not fit a decode instance."""
    profile = msgspec.structs.replace(SETUP.profile, kv_tokens=4_096)
    setup = msgspec.structs.replace(SETUP, goal=Slo(9_000_000, None), profile=profile)
    trace = rows(3, 1.0, output=4_000)
    assert Trials(trace, setup, 0.99)(1.0).attainment == 0


def rows(count: int, apart_s: float, length: int = 512, output: int = 1) -> Trace:
    """Requests that share nothing."""
    return Trace(
        "t",
        512,
        [Row(round(i * apart_s * 1e6), length, output, (i,)) for i in range(count)],
    )


def test_the_prefill_bound_is_work_over_time() -> None:
    """Twice the instances, or half the work, bound twice the speed."""
    trace = rows(11, 1.0)
    work_s = SETUP.profile.cost().prefill_us(512, 0, 1 << 30) / 1e6
    bound = prefill_bound(trace, SETUP)
    assert bound == pytest.approx(10.0 / (11 * work_s))
    two = msgspec.structs.replace(SETUP, prefill=2)
    assert prefill_bound(trace, two) == pytest.approx(2 * bound)


def test_the_decode_bound_is_the_batch_that_takes_as_long_as_the_objective() -> None:
    """At the bound a step of the batch lasts the objective; none is met that no step meets."""
    trace = rows(11, 1.0, output=101)
    speed = decode_bound(trace, SETUP)
    seqs = speed * 1111 / 10.0 * 0.2  # tokens a second times seconds a token
    step_us = SETUP.profile.cost().decode_step_us(round(seqs), round(seqs * (512 + 50.5)))
    assert step_us == pytest.approx(200_000, rel=0.02)
    assert decode_bound(trace, msgspec.structs.replace(SETUP, goal=Slo(None, 1_000))) == 0.0


def test_what_takes_no_time_has_no_bound() -> None:
    """Costs that are fitted to few requests may be all zero; a load may have no output."""
    trace = Trace("made", 512, [Row(0, 1_000, 10, (1, 2)), Row(10**6, 1_000, 10, (3, 4))])
    free = msgspec.structs.replace(SETUP.profile, pass_us=(0.0,) * 7)
    setup = msgspec.structs.replace(SETUP, profile=free)
    assert decode_bound(trace, setup) == prefill_bound(trace, setup) == math.inf
    flat = msgspec.structs.replace(free, pass_us=(0.0, 0.0, 0.0, 0.0, 20_000.0, 0.0, 0.0))
    assert 0 < decode_bound(trace, msgspec.structs.replace(SETUP, profile=flat)) < math.inf
    silent = Trace("made", 512, [Row(0, 1_000, 0, (1, 2)), Row(10**6, 1_000, 0, (3, 4))])
    assert decode_bound(silent, SETUP) == math.inf


def test_a_central_queue_serves_in_order_and_may_refuse() -> None:
    """Simultaneous requests are served one after the other; the refused take no time."""
    service_s = SETUP.profile.cost().prefill_us(512, 0, 1 << 30) / 1e6
    goal = Slo(round(service_s * 2.5 * 1e6), None)
    setup = msgspec.structs.replace(SETUP, goal=goal)
    assert central_queue(rows(4, 0.0), setup, 1.0, refuse=False)[0] == 0.5
    bursts = rows(4, 0.0).rows
    late = [msgspec.structs.replace(bursts[0], at_us=round(service_s * 2e6), blocks=(9,))]
    both = Trace("t", 512, [*bursts, *late])
    assert central_queue(both, setup, 1.0, refuse=False)[0] == 2 / 5
    assert central_queue(both, setup, 1.0, refuse=True)[0] == 3 / 5


@pytest.fixture(scope="module")
def chat() -> Trace:
    """A short trace whose work is mostly prefill."""
    return synthesize(5, 300, 1.0)


def test_the_plan_beats_its_neighbours(chat: Trace) -> None:
    """No split next to the best is faster, and what binds it is what misses above its speed."""
    told: list[int] = []
    best, *others = plan(
        chat, SETUP, 6, tolerance=0.25, tell=lambda split: told.append(split.prefill)
    )
    assert best.speed is not None
    assert {best.prefill - 1, best.prefill + 1} & set(range(1, 6)) <= {s.prefill for s in others}
    assert sorted(told) == sorted(split.prefill for split in (best, *others))
    for split in others:
        setup = msgspec.structs.replace(SETUP, prefill=split.prefill, decode=split.decode)
        assert Trials(chat, setup, 0.99)(best.speed + 0.25).attainment < 0.99
    assert best.missed is not None
    assert best.missed.attainment < 0.99
    for split in others:
        assert (split.speed is None) == (split.not_above is not None)


def test_what_binds_is_what_one_more_of_helps() -> None:
    """Late binding holds back before prefill what decode has no room for: TTFT misses, and decode
    binds; with short answers and long prompts prefill does."""
    tuning = Tuning(policy="late_binding", slo=GOAL, admission="none")
    setup = msgspec.structs.replace(SETUP, tuning=tuning)
    chatty = rows(300, 0.3, output=900)
    best, *others = plan(chatty, setup, 3, tolerance=0.1)
    assert {split.binds for split in (best, *others)} == {"decode"}
    assert best.missed is not None
    assert best.missed.attainment_ttft < best.missed.attainment_tbt
    reading = Trace(
        "r",
        512,
        [Row(i * 1_000_000, 20_480, 2, tuple(range(i * 40, i * 40 + 40))) for i in range(80)],
    )
    assert {split.binds for split in plan(reading, setup, 3, tolerance=0.1)} == {"prefill"}
    assert plan(rows(1, 1.0), setup, 2)[0].binds == "nothing"


def test_a_request_too_long_for_its_objective_binds_neither() -> None:
    """No instance more makes one prefill shorter."""
    goal = Slo(1_000, None)
    setup = msgspec.structs.replace(SETUP, goal=goal, tuning=Tuning(slo=goal, admission="none"))
    assert plan(rows(3, 1.0), setup, 2)[0].binds == "neither"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--tbt-slo", "-1ms"), ("--ttft-slo", "0s"), ("--cache-blocks", "lots")),
        *(("--attainment", "nan"), ("--tolerance", "nan")),
    ],
)
def test_what_is_wrong_is_named(flag: str, value: str) -> None:
    """A wrong value ends with 2 and one line that names it, before the trace is read."""
    done = CliRunner().invoke(cli, ["plan", "--trace", "not-read.jsonl", flag, value])
    assert done.exit_code == 2
    assert flag.strip("-") in done.stderr.replace("_", "-")
    assert done.stderr.count("\n") == 1


def test_a_plan_says_how_many_requests_it_needs() -> None:
    """So many that one may miss, and that they come for longer than the TTFT objective."""
    rows = [Row(second * 1_000_000, 100, 10, ()) for second in range(61)]
    trace = Trace("t", 512, rows)
    assert requests_needed(trace, SETUP, 0.99, None) == 100
    assert requests_needed(trace, SETUP, 0.9, None) == 10
    assert requests_needed(trace, SETUP, 1.0, None) == 0
    assert requests_needed(trace, SETUP, 0.9, 2.0) == 61  # 61 / 60 s, twice as fast, for 30 s
    at_once = Trace("t", 512, [rows[0]] * 50)
    assert requests_needed(at_once, SETUP, 0.9, 99.0) == 10


def test_a_plan_for_a_tiny_trace_warns(tmp_path: Path) -> None:
    """It says how many requests there were, how many it needs, and what its speed is worth."""
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    path.write_text(row % 0 + row % 3_000)
    argv = ["plan", "--trace", str(path), "--nodes", "2", "-j", "1", "--json"]
    done = CliRunner().invoke(cli, argv)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == 2
    assert found["requests_needed"] > 100
    assert f"has 2 requests, and this answer needs {found['requests_needed']:,}" in done.stderr
    assert "the speed is that of one burst" in done.stderr


def test_a_run_left_early_is_not_a_result(tmp_path: Path) -> None:
    """The sentence gives the share that had missed by then, and no share that was met."""
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    path.write_text("".join(row % (second * 1_000) for second in range(60)))
    argv = ["plan", "--trace", str(path), "--nodes", "2", "-j", "1"]
    done = CliRunner().invoke(cli, [*argv, "--ttft-slo", "1us", "--tbt-slo", "1us"])
    assert done.exit_code == 0, done.output
    assert "no speed meets the objectives" in done.stdout
    assert " 1.66% of all had missed an objective when its run was stopped early (" in done.stdout
    assert "meet both" not in done.stdout


def test_the_program_plans(chat: Trace, tmp_path: Path) -> None:
    """`moonserve plan` prints the split as JSON, and in one sentence."""
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        write_trace(chat, file)
    argv = ["plan", "--trace", str(path), "--nodes", "3", "--tolerance", "0.5"]
    argv += ["--cache-blocks", "infinite"]
    done = CliRunner().invoke(cli, [*argv, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cache_blocks"] is None
    best = found["best"]
    assert best["prefill"] + best["decode"] == 3
    span_s = (chat.rows[-1].at_us - chat.rows[0].at_us) / 1e6
    assert found["requests_per_s"] == pytest.approx(best["speed"] * 300 / span_s, rel=1e-3)
    piped = CliRunner().invoke(cli, argv)
    said = piped.stdout
    missed = best["missed"]
    share = missed["attainment"] if missed["whole"] else 1 - missed["attainment"]
    verb = "meet both objectives (" if missed["whole"] else "of all had missed an objective when"
    assert f"{int(share * 10_000 + 1e-6) / 100:.2f}% {verb}" in said
    worse = [split for split in found["splits"] if split["speed"] is None]
    assert worse
    for split in worse:
        assert f"not above {split['not_above']:.2f}x" in piped.stderr
    assert f"{best['prefill']} prefill + {best['decode']} decode" in said
