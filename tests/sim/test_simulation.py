"""The simulator: deterministic, loses nobody, balances, and takes the time its formulas say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from moonserve.core.engine.batch import Batch
from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import counterfactual_s, measure, queues
from moonserve.sim.report import report
from moonserve.sim.segments import full_keys
from moonserve.sim.setup import Breakdown, Setup
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import Row, Trace, scale

GOAL = Slo(10_000_000, 100_000)
SMALL = Setup(prefill=2, decode=2, profile=PROFILES["a800"], goal=GOAL)
CHAT = synthesize(1, 80, 2.0, Shape(turns=4.0, system_prompts=2, user_tokens=3_000))
WHOLE = SMALL.chunk_tokens
A800 = PROFILES["a800"].cost()


def tuned(policy: str = "kvcache_centric", admission: Any = "none") -> Tuning:
    """A policy that works for GOAL."""
    return Tuning(policy=policy, slo=GOAL, admission=admission)


def ran(trace: Trace = CHAT, **changes: Any) -> Simulation:
    """A run of SMALL with these changes, to its end."""
    setup = msgspec.structs.replace(SMALL, **{"tuning": tuned(), **changes})
    sim = Simulation(trace, setup)
    assert sim.run()
    return sim


def trace_of(*rows: tuple[int, int, int, Sequence[int]]) -> Trace:
    """Rows as (ms, input, output, blocks)."""
    return Trace("t", 512, [Row(ms * 1000, i, o, tuple(b)) for ms, i, o, b in rows])


def gaps_ms(sim: Simulation) -> list[float]:
    """All gaps of a run."""
    gaps: list[float] = measure(sim, 0.0).gaps_ms.tolist()
    return gaps


def balanced(sim: Simulation) -> None:
    """Everything that was promised, reserved or sent has been given back."""
    assert sim.conductor.promised() == Promised(0, 0, 0, 0)
    assert sim.conductor.waiting == 0
    for node in sim.nodes.values():
        assert node.dead or (node.waiting, node.running) == (0, 0)
        assert node.dead or node._pool.free_count == node.info.kv_blocks
    assert not sim.carrier.network._flows
    assert not any(sim.carrier.network._out.values())
    assert not any(sim.carrier.network._in.values())


def complete(sim: Simulation) -> None:
    """Nobody is lost, and each has its whole output, a gap for every token but the first."""
    assert [one.outcome for one in sim.served] == ["completed"] * len(sim.trace.rows)
    assert [one.generated for one in sim.served] == [r.output_tokens for r in sim.trace.rows]


# Time.


def test_a_request_alone_takes_what_the_formulas_say() -> None:
    """TTFT is the prefill's cost, a gap a decode step's; KV that came meanwhile costs nothing."""
    sim = ran(trace_of((0, 5_000, 4, range(10))), prefill=1, decode=1)
    (served,) = sim.served
    assert served.first_us == A800.prefill_us(5_000, 0, WHOLE)
    steps = [A800.decode_step_us(1, 5_001 + k) / 1e3 for k in range(3)]
    assert gaps_ms(sim) == pytest.approx(steps, abs=0.5)
    assert measure(sim, 0.0).summary["span_s"] == served.ended_us / 1e6


def test_without_overlap_the_transfer_is_waited_for() -> None:
    """KV that only moves when prefill has ended delays the second token by its bytes."""
    trace = trace_of((0, 50_000, 3, range(98)))
    with_overlap, without = (ran(trace, overlap=overlap) for overlap in (True, False))
    moved_ms = 50_000 * SMALL.profile.kv_bytes_per_token / SMALL.profile.link_bytes_per_s * 1e3
    assert gaps_ms(without)[0] - gaps_ms(with_overlap)[0] == pytest.approx(moved_ms, rel=0.01)
    assert gaps_ms(without)[1] == gaps_ms(with_overlap)[1]


def test_chunks_cost_a_pass_each() -> None:
    """Chunked prefill computes the same in more passes, each with its base."""
    trace = trace_of((0, 5_000, 1, range(10)))
    sim = ran(trace, chunk_tokens=1_024)
    first_us = sim.served[0].first_us
    assert first_us == pytest.approx(A800.prefill_us(5_000, 0, 1_024), abs=5)  # rounded per pass
    assert first_us > A800.prefill_us(5_000, 0, WHOLE)


def test_one_prompt_at_a_time_unless_told_otherwise() -> None:
    """The second prompt of a prefill instance waits for the first, or shares its pass."""
    trace = trace_of((0, 5_000, 1, range(10)), (0, 5_000, 1, range(10, 20)))
    alone, together = (ran(trace, prefill=1, prefill_seqs=seqs) for seqs in (1, 2))
    first_us = A800.prefill_us(5_000, 0, WHOLE)
    assert [one.first_us for one in alone.served] == [first_us, 2 * first_us]
    firsts = [one.first_us for one in together.served]
    assert firsts[0] == firsts[1]
    assert first_us < firsts[0] < 2 * first_us


def pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass of an instance is planned by itself, chunk by chunk."""
    monkeypatch.setattr(Batch, "steady", lambda self: 0)
    monkeypatch.setattr(Batch, "plan_step", lambda self: None)


@pytest.mark.python_core
@pytest.mark.parametrize("breakdowns", [(), ("kill",), ("slow",)])
def test_passes_taken_in_one_go_end_when_single_ones_do(
    breakdowns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping over passes that are alike changes no time of any request, nor of any gap."""
    faults = tuple(Breakdown(what, "d001", 12_345_678, 1.5) for what in breakdowns)
    quick = ran(breakdowns=faults)
    pass_by_pass(monkeypatch)
    slow = ran(breakdowns=faults)
    assert len(quick.nodes["d000"].ends) > 100
    assert quick.nodes["d000"].ends == slow.nodes["d000"].ends
    assert gaps_ms(quick) == gaps_ms(slow)
    assert measure(quick, 0.0).rows == measure(slow, 0.0).rows
    assert quick.digest.hex() == slow.digest.hex()


@pytest.mark.python_core
@pytest.mark.parametrize("chunk_tokens", [512, 1 << 40])
def test_passes_without_chunks_are_those_with(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where instances do both, run out of blocks and lose calls: times and shares agree."""
    faults = (Breakdown("kill", "m001", 9_000_000), Breakdown("join", "m001", 15_000_000))
    setup = {
        "prefill": 0,
        "decode": 0,
        "mixed": 3,
        "chunk_tokens": chunk_tokens,
        "profile": msgspec.structs.replace(PROFILES["a800"], kv_tokens=60 * 512),
        "breakdowns": faults,
    }
    quick = ran(scale(CHAT, 3.0), **setup)
    assert any(node.preemptions for node in quick.nodes.values())
    pass_by_pass(monkeypatch)
    slow = ran(scale(CHAT, 3.0), **setup)
    assert measure(quick, 0.0).rows == measure(slow, 0.0).rows
    assert [node.ends for node in quick.nodes.values()] == [n.ends for n in slow.nodes.values()]
    assert quick.samples == slow.samples
    assert quick.digest.hex() == slow.digest.hex()


@pytest.mark.python_core
def test_who_asks_for_room_sees_what_a_run_of_passes_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that were filled in passes taken in one go are not given to a newcomer."""
    trace = trace_of((0, 2_048, 3_000, range(4)), (60_000, 2_560, 100, range(10, 15)))
    profile = msgspec.structs.replace(PROFILES["a800"], kv_tokens=12 * 512)
    quick = ran(trace, prefill=1, decode=1, profile=profile)
    pass_by_pass(monkeypatch)
    slow = ran(trace, prefill=1, decode=1, profile=profile)
    assert quick.digest.hex() == slow.digest.hex()


def test_decode_may_make_the_first_token_again() -> None:
    """Behind connectors TTFT ends with decode's first pass, over the last token of the prompt."""
    trace = trace_of((0, 50_000, 4, range(98)))
    prefill_us = A800.prefill_us(50_000, 0, WHOLE)
    for overlap in (True, False):
        sim = ran(trace, first_token="decode", overlap=overlap)
        assert len(gaps_ms(sim)) == 3
        late_us = 0 if overlap else 98 * 512 * 327_680 / 87e3  # blocks move whole
        again_us = A800.decode_step_us(1, 50_000)
        assert sim.served[0].first_us == pytest.approx(prefill_us + late_us + again_us, abs=5)
    (alone,) = ran(trace_of((0, 1_000, 1, (0, 1))), first_token="decode").served
    assert alone.first_us == A800.prefill_us(1_000, 0, WHOLE), "of one token there is no decode"


def test_the_last_token_may_come_of_a_second_prefill() -> None:
    """A decode instance dies one token before the end: TTFT is decode's, and all gaps count."""
    trace = trace_of((0, 5_000, 3, range(10)))
    whole = ran(trace, first_token="decode").served[0]
    died_us = whole.calls[0][0].ends[1] + 10
    sim = ran(trace, first_token="decode", breakdowns=(Breakdown("kill", "d000", died_us),))
    complete(sim)
    assert sim.served[0].attempts == 2
    assert sim.served[0].first_us == whole.first_us
    assert len(gaps_ms(sim)) == 2


@pytest.mark.parametrize("at_us", [650_000, 679_500, 2_000_000])
def test_a_token_made_again_is_counted_once(at_us: int) -> None:
    """Whenever the decode instance dies, the output is whole, and each token but one has a gap."""
    trace = trace_of((0, 5_000, 200, range(10)))
    sim = ran(trace, first_token="decode", breakdowns=(Breakdown("kill", "d000", at_us),))
    complete(sim)
    assert sim.served[0].attempts == 2
    tokens = sum(last - first for _, call in sim.served[0].calls for first, last in call.spans)
    assert tokens == 200
    assert len(gaps_ms(sim)) == 199


# Determinism.


def test_the_same_inputs_give_the_same_digest() -> None:
    """A run can be repeated; another seed is another run where the policy draws."""
    first, again, other = (ran(tuning=tuned("random"), seed=seed) for seed in (7, 7, 8))
    assert first.digest.hex() == again.digest.hex() != other.digest.hex()
    figures = [measure(sim, 0.0).summary for sim in (first, again)]
    assert figures[0] == figures[1]


def test_looking_more_often_changes_nothing() -> None:
    """Samples of the load are taken without touching the run."""
    often, seldom = (ran(sample_us=every) for every in (77_777, 1_000_000_000))
    assert len(often.samples) > 100 * len(seldom.samples)
    assert often.digest.hex() == seldom.digest.hex()
    assert gaps_ms(often) == gaps_ms(seldom)
    busy = [[node.busy_us for node in sim.nodes.values()] for sim in (often, seldom)]
    assert busy[0] == busy[1]


def test_no_order_of_hashing_shows() -> None:
    """Two PYTHONHASHSEEDs give one digest, under every policy."""
    program = (
        "from tests.sim.test_simulation import *\n"
        "for name in POLICIES: print(name, ran(tuning=tuned(name)).digest.hex())\n"
    )
    printed = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].count("\n") == len(POLICIES)


def test_a_known_run_stays_what_it_is() -> None:
    """A new digest of this small trace is a change of decisions or times, made on purpose."""
    trace = trace_of(
        (0, 1_500, 3, (0, 1, 2)), (0, 600, 1, (0, 9)), (100, 2_000, 2, (0, 1, 2, 3)),
        (5_000, 2_040, 5, (0, 1, 2, 3)),
    )  # fmt: skip
    sim = ran(trace, prefill=2, decode=1)
    assert sim.digest.hex() == "79b3658d754d91534724035ab64cc7c3b6a8790d56c3cc6298210fdc0ac42aac"


# Nobody is lost.


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody_and_balances(policy: str) -> None:
    """All requests complete, and at the end nothing is promised, held or under way."""
    sim = ran(tuning=tuned(policy))
    complete(sim)
    balanced(sim)
    found = measure(sim, 0.0)
    assert len(found.gaps_ms) == sum(row.output_tokens - 1 for row in CHAT.rows)
    assert found.summary["policy"] == policy
    assert found.summary["hit_rate_tokens"] <= found.summary["hit_rate_available"]


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
@pytest.mark.parametrize("instance", ["p001", "d001"])
def test_a_killed_instance_loses_no_request(instance: str, policy: str) -> None:
    """What was there goes on elsewhere, and has its whole output, whether or not it comes back."""
    for back in ((), (Breakdown("join", instance, 25_000_000),)):
        kill = Breakdown("kill", instance, 15_000_000)
        sim = ran(tuning=tuned(policy), breakdowns=(kill, *back))
        complete(sim)
        balanced(sim)
        again = [one for one in sim.served if one.attempts > 1]
        assert again
        assert sum(one.wasted_us for one in again) > 0
        names = {sim.served[-1].decision.prefill, sim.served[-1].decision.decode}
        assert back or instance not in names


def test_a_resumed_request_keeps_the_tokens_it_had() -> None:
    """A decode instance dies: the prompt and what was generated are prefilled, the rest decoded."""
    trace = trace_of((0, 5_000, 200, range(10)))
    sim = ran(trace, breakdowns=(Breakdown("kill", "d000", 2_000_000),))
    (served,) = sim.served
    complete(sim)
    assert (served.attempts, len(served.calls)) == (2, 2)
    had = 1 + sum(last - first for first, last in served.calls[0][1].spans)
    assert 10 < had < 100
    assert served.decision.prompt_tokens == 5_000 + had
    rest = sum(last - first for first, last in served.calls[1][1].spans)
    assert had + 1 + rest == 200
    gaps = gaps_ms(sim)
    assert len(gaps) == 199, "the token that the second prefill gave is one of 200"
    again_ms = (served.prefilled_us - 2_000_000) / 1e3
    assert again_ms <= max(gaps) < again_ms + 100, "the wait is a gap, with what ran before it"


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
@pytest.mark.parametrize("instance", ["p000", "d000"])
def test_no_number_of_faults_ends_a_stream(instance: str, policy: str) -> None:
    """A fault every three seconds, of all instances of a role: each time one is soon back."""
    trace = trace_of((0, 5_000, 1_000, range(10)))
    times = range(2_000_000, 40_000_000, 3_000_000)
    kills = [Breakdown("kill", name, at) for at in times for name in ("d000", instance)]
    joins = [Breakdown("join", name, at + 500_000) for at in times for name in ("d000", instance)]
    faults = sorted([*kills, *joins], key=lambda fault: fault.at_us)
    sim = ran(trace, prefill=1, decode=1, tuning=tuned(policy), breakdowns=tuple(faults))
    complete(sim)
    balanced(sim)
    assert sim.served[0].attempts > 5


def test_what_joins_again_is_empty_and_its_past_counts() -> None:
    """A killed instance has lost its cache; the work it did stays in the figures."""
    trace = trace_of((0, 5_000, 1, range(10)))
    faults = (Breakdown("kill", "p000", 5_000_000), Breakdown("join", "p000", 6_000_000))
    sim = ran(trace, prefill=1, breakdowns=faults)
    node = sim.nodes["p000"]
    assert node.info.epoch == 2
    assert node.busy_us == A800.prefill_us(5_000, 0, WHOLE)
    assert not sim.segments.is_local(node, sim.served[0].keys)
    assert sim.conductor.index.match(sim.served[0].keys).pool == 0


def test_kv_on_its_way_to_a_dead_instance_is_sent_again() -> None:
    """The decode instance dies while prefill runs: another one gets the KV, and the request."""
    trace = trace_of((0, 50_000, 5, range(98)))
    sim = ran(trace, breakdowns=(Breakdown("kill", "d000", 1_000_000),))
    complete(sim)
    assert sim.served[0].calls[0][0].name == "d001"
    assert sim.carrier.network.transfers == 2


def test_between_racks_transfers_take_longer() -> None:
    """From one rack to the other KV takes cross_rack times as long."""
    trace = trace_of((0, 50_000, 2, range(98)))
    sims = [ran(trace, prefill=1, decode=1, overlap=False, racks=racks) for racks in (0, 2)]
    steps_ms = A800.decode_step_us(1, 50_001) / 1e3
    near_ms, far_ms = (gaps_ms(sim)[0] - steps_ms for sim in sims)
    assert far_ms == pytest.approx(2 * near_ms, rel=0.01)


def test_a_slow_instance_is_slow_from_then_on() -> None:
    """Its passes take as much longer as was said."""
    trace = trace_of((0, 1_000, 100, (0, 1)))
    sim = ran(trace, decode=1, breakdowns=(Breakdown("slow", "d000", 1_000_000, 3.0),))
    gaps = gaps_ms(sim)
    assert gaps[-1] == pytest.approx(3 * gaps[1], rel=0.01)


def test_a_cluster_that_is_gone_fails_its_requests() -> None:
    """Where no instance comes back, requests end as failed or refused, and are counted."""
    kills = tuple(Breakdown("kill", name, 10_000_000) for name in ("d000", "d001"))
    sim = ran(breakdowns=kills)
    found = measure(sim, 0.0).summary
    assert found["failed"] > 0
    assert found["completed"] + found["rejected"] + found["failed"] == len(CHAT.rows)
    assert all(one.why for one in sim.served if one.outcome != "completed")


def test_what_could_never_fit_fails_alone() -> None:
    """More tokens than an instance's KV: decode refuses it for good, and the others go on."""
    profile = msgspec.structs.replace(PROFILES["a800"], kv_tokens=4_096)
    trace = trace_of((0, 3_000, 2_000, range(6)), (100, 1_000, 9, (7, 8)))
    sim = ran(trace, profile=profile)
    assert [one.outcome for one in sim.served] == ["failed", "completed"]
    assert "answered 400" in sim.served[0].why
    assert sim.served[0].attempts == 1, "nobody else would do better"
    balanced(sim)
    assert measure(sim, 0.0).summary["failed"] == 1


# Refusing.


def test_who_would_be_late_is_refused_before_any_work() -> None:
    """With refusal nobody who is served misses the TTFT goal, and no prefill is wasted."""
    rows = [(0, 10_000, 100, range(20 * k, 20 * k + 20)) for k in range(40)]
    burst = trace_of(*rows)
    all_served, refused = (ran(burst, tuning=tuned(admission=mode)) for mode in ("none", "ttft"))
    complete(all_served)
    balanced(refused)
    found = measure(refused, 0.0)
    assert found.summary["rejected"] > 10
    assert found.summary["completed"] + found.summary["rejected"] == len(rows)
    assert found.summary["wasted_prefill_s"] == 0
    assert found.summary["attainment_ttft"] == found.summary["completed"] / len(rows)
    assert found.summary["attainment_ttft"] >= measure(all_served, 0.0).summary["attainment_ttft"]


# Caches.


def test_a_global_pool_finds_more_than_each_instance_alone() -> None:
    """With own caches only, a prefix is found where it was computed; in a pool, by everybody."""
    local, pooled = (ran(tuning=tuned("random"), pooled=pooled) for pooled in (False, True))
    hits = [measure(sim, 0.0).summary["hit_rate_tokens"] for sim in (local, pooled)]
    assert hits[0] < hits[1]
    complete(pooled)
    balanced(pooled)


def test_kept_output_is_found_by_the_next_turn() -> None:
    """Decode instances that keep what they made save the next turn from computing it."""
    turns = synthesize(2, 60, 0.05, Shape(turns=6.0, output_tokens=2_000, open_sessions=8))
    without, kept = (ran(turns, keep_output=keep) for keep in (False, True))
    hits = [measure(sim, 0.0).summary["hit_rate_blocks"] for sim in (without, kept)]
    assert hits[0] < hits[1]
    balanced(kept)


def test_small_caches_hit_less() -> None:
    """Hits grow with the blocks a cache holds; none holds none."""
    sims = [ran(cache_blocks=blocks) for blocks in (0, 50, None)]
    hits = [measure(sim, 0.0).summary["hit_rate_blocks"] for sim in sims]
    assert hits[0] == 0
    assert hits[0] < hits[1] < hits[2]


def test_fetched_prefixes_are_counted_and_kept() -> None:
    """Algorithm 1 keeps a copy of what it fetches: bytes move, and blocks are counted."""
    sim = ran()
    found = measure(sim, 0.0).summary
    assert found["migrations"] > 0
    assert found["transfers"] > len(CHAT.rows)  # to decode, and the copies
    assert found["transfer_bytes"] > sum(r.input_tokens for r in CHAT.rows) * 327_680


def test_what_a_node_has_itself_never_moves() -> None:
    """After a hole in its own chain, which others fill, its own blocks are local again."""
    segments = Simulation(CHAT, SMALL).segments
    near, far = ran().prefills
    keys = full_keys(Row(0, 5 * 512, 1, (1, 2, 3, 4, 5)), 512)
    for node, first, last in ((near, 0, 1), (near, 2, 4), (far, 0, 5)):
        segments.store(node, keys, first, last)
    assert segments.find(near, keys, fetch=True) == (3, {"p001": 2})
    assert segments.find(near, keys, fetch=False) == (1, {})
    pooled = Simulation(CHAT, msgspec.structs.replace(SMALL, pooled=True)).segments
    pooled.store(near, keys, 0, 3)
    for fetch in (True, False):
        assert pooled.find(near, keys, fetch) == (0, {"pool": 3}), "a pool is loaded from, always"


# Mixed.


def test_mixed_instances_do_both() -> None:
    """A coupled cluster decodes where it prefills; nothing moves, and everybody is served."""
    sim = ran(prefill=0, decode=0, mixed=3, chunk_tokens=2_048, tuning=tuned("cache_aware"))
    complete(sim)
    balanced(sim)
    assert all(one.decision.prefill == one.decision.decode for one in sim.served)
    assert sim.carrier.network.transfers == 0


# Figures.


def test_queues_over_time_say_where_requests_stood() -> None:
    """Few looks out of many, the last included; a request stands in one place at a time."""
    for policy, cluster in (("late_binding", {}), ("cache_aware", {"prefill": 0, "decode": 0})):
        mixed = {} if not cluster else {**cluster, "mixed": 3}
        sim = ran(tuning=tuned(policy), sample_us=50_000, **mixed)
        found = queues(sim, 100)
        assert [len(values) for values in found.values()] == [100] * 5
        assert found["times_s"] == sorted(found["times_s"])
        assert found["times_s"][-1] == sim.samples[-1].at_us / 1e6
        assert max(found["decoding"]) > 0
        standing = [sum(found[name][at] for name in list(found)[1:]) for at in range(100)]
        assert max(standing) <= len(CHAT.rows)
        assert bool(max(found["waiting"])) == (policy == "late_binding")
    many = [(0, 20_000, 1, range(k * 40, k * 40 + 40)) for k in range(9)]
    stuck = queues(ran(trace_of(*many), prefill=1, decode=1, sample_us=100_000))
    assert stuck["prefill_queued"][1] == 8
    assert stuck["decode_queued"][1] == stuck["decoding"][1] == 0


def test_the_papers_tbt_is_the_mean_of_the_longest_tenth() -> None:
    """Of 39 gaps the three longest count; of fewer than twenty, the longest."""
    slow = (Breakdown("slow", "d000", 1_150_000, 3.0),)  # two of the 39
    for outputs, count in ((40, 3), (2, 1)):
        sim = ran(trace_of((0, 1_000, outputs, (0, 1))), prefill=1, decode=1, breakdowns=slow)
        gaps = np.sort(gaps_ms(sim))
        assert outputs == 2 or gaps[-2] > 2 * gaps[-3]
        assert measure(sim, 0.0).rows[0].tbt_ms == pytest.approx(gaps[-count:].mean(), rel=1e-6)


def test_hindsight_knows_who_was_really_ahead() -> None:
    """The best place counts from when its instance was really free of those before."""
    trace = trace_of(*((0, 20_000, 1, range(k * 40, k * 40 + 40)) for k in range(3)))
    alone = ran(trace, prefill=1)
    for served in alone.served:
        assert counterfactual_s(served) == ("p000", served.first_us / 1e6)
    drawn = ran(trace, tuning=tuned("random"), seed=3)
    regrets = [one.first_us / 1e6 - counterfactual_s(one)[1] for one in drawn.served]
    assert min(regrets) == pytest.approx(0, abs=1e-3)
    assert max(regrets) > 1, "a draw sends two of three to one instance, while one is idle"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": 0}, "prefill"),
        ({"mixed": 2}, "mixed"),
        ({"cache_blocks": -1}, "cache_blocks"),
        ({"eviction": "mru"}, "eviction"),
        ({"tuning": Tuning(policy="best")}, "policy"),
        ({"breakdowns": (Breakdown("kill", "p009", 0),)}, "fault"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], field: str) -> None:
    """A wrong setup is told by its field before anything runs."""
    with pytest.raises(ConfigError, match=field):
        ran(**changes)


def test_time_may_be_counted_from_anywhere_and_pause_for_years() -> None:
    """A trace in epoch time, with a year between two requests, takes a few looks and no more."""
    year_s = 365 * 86_400
    trace = Trace(
        "epoch",
        512,
        [Row(at_s * 1_000_000, 600, 5, (1, 2)) for at_s in (1_764_300_000, 1_764_300_000 + year_s)],
    )
    sim = ran(trace)
    assert [served.outcome for served in sim.served] == ["completed"] * 2
    assert len(sim.samples) < 10
    assert "</html>" in report(sim, measure(sim, 0.0), "t", "s")


def test_prefill_time_is_counted_beside_decodes_and_when_it_is_lost() -> None:
    """Decodes in the same pass do not take a prompt's time; a death loses what was computed."""
    rows = [(0, 600, 400, (n, n + 10)) for n in range(4)] + [(5_000, 20_480, 2, range(100, 140))]
    apart, mixed = trace_of(*rows), trace_of(*rows)
    alone_us = ran(apart, prefill=1, decode=1).served[-1].prefill_us
    beside_us = ran(mixed, prefill=0, decode=0, mixed=1).served[-1].prefill_us
    assert beside_us == pytest.approx(alone_us, rel=0.1)
    long = trace_of((0, 102_400, 2, range(200)))
    faults = (Breakdown("kill", "p000", 15_000_000), Breakdown("join", "p000", 15_100_000))
    lost = measure(ran(long, prefill=1, decode=1, breakdowns=faults), 0.0).summary
    assert lost["wasted_prefill_s"] == pytest.approx(15, abs=0.1)
    killed = measure(ran(long, prefill=1, decode=1, breakdowns=faults[:1]), 0.0).summary
    assert killed["busy_prefill"] <= 1


def test_back_at_the_moment_it_died_an_instance_loses_each_call_once() -> None:
    """The tokens of a lost call are counted once, though the Conductor breaks it off as well."""
    trace = trace_of((0, 2_000, 500, range(4)))
    faults = (Breakdown("kill", "d000", 8_000_000), Breakdown("join", "d000", 8_000_000))
    sim = ran(trace, prefill=1, decode=1, breakdowns=faults)
    complete(sim)


@pytest.mark.parametrize("shared", [0, 1, 2], ids=lambda it: f"{it} blocks in common")
@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding", "least_loaded"])
def test_small_segments_are_filled_side_by_side(policy: str, shared: int) -> None:
    """At low load, what fits into all segments together stays there, as by round_robin: the
    instance that stored the first blocks does not evict while others have room."""
    prompts = [[*range(shared), *range(100 * n, 100 * n + 8 - shared)] for n in range(1, 25)]
    trace = trace_of(*[(10_000 * at, 4_096, 4, prompts[at % 24]) for at in range(72)])

    def reused(policy: str) -> float:
        sim = ran(trace, prefill=4, cache_blocks=60, tuning=tuned(policy))
        again = sim.served[24:]
        return sum(one.cached for one in again) / (len(again) * (4_096 - 512))

    assert reused(policy) == pytest.approx(reused("round_robin"), rel=0.01)
    assert reused(policy) > 0.99
