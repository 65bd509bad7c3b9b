"""The last hours in numbers: what a sample counts, how samples get coarser, what fades."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Candidate, Decision
from moonserve.core.schedule.history import (
    REASONS,
    ClusterHistory,
    Durations,
    LaneEvent,
    Pools,
    StoreLevels,
    Tally,
    columns,
    heat_of,
    pools_of,
)
from moonserve.core.schedule.record import Measured, Record
from moonserve.core.units import BlockKey, InstanceId, RequestId
from tests.support.cluster import view

MS = 1_000
P0, D0 = InstanceId("p0"), InstanceId("d0")


def decision(**changes: Any) -> Decision:
    """1,000 tokens, of which 600 are held somewhere, 200 on p0, and 500 are to be reused."""
    chosen = Candidate(P0, 200, 500, None, 0, 0, 0, 0.0)
    made = Decision("x", P0, D0, 1_000, False, 0, 9, 9, 600, chosen, 1)
    return msgspec.structs.replace(made, **changes)


def record(outcome: str = "stop", good: bool | None = True, **fields: Any) -> Record:
    """A request that is over: its first token came after 80 ms."""
    made = Record(RequestId("r"), "m", "", 0, 1_000, (), Slo(), 0, decision=decision())
    made.outcome = outcome
    made.is_good = good
    made.attempts = 1
    made.first_us = 80 * MS
    made.measured = Measured(10, 400, 20 * MS, 5 * MS)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def second(history: ClusterHistory, at_s: int, **levels: Any) -> None:
    """One second is over."""
    history.second(at_s * 1_000, Pools(**levels), {P0: 1.0, D0: 0.25}, StoreLevels(5, 9, at_s))


@pytest.mark.parametrize("us", [9, 900, 12_345, 80_000, 7_000_000, 3_600_000_000])
def test_a_quantile_is_right_to_a_few_per_cent(us: int) -> None:
    """Whatever the size of the values, from microseconds to an hour."""
    found = Durations()
    for _ in range(9):
        found.add(us)
    found.add(100 * us)
    assert found.quantile_ms(0.5) == pytest.approx(us / 1_000, rel=0.07)
    assert found.quantile_ms(0.9) == pytest.approx(us / 1_000, rel=0.07)
    assert found.quantile_ms(0.99) == pytest.approx(us / 10, rel=0.07)
    assert Durations().quantile_ms(0.5) is None


def test_a_request_is_counted_by_what_became_of_it() -> None:
    """In time, late, refused by reason or by an engine, failed, or cancelled."""
    tally = Tally()
    for it in (
        record(),
        record(good=False),
        record("failed", None),
        record("engine answered 503", None),
        record("engine answered 400", None),
        record("cancelled", None),
        record("refused", None, reason="ttft_slo"),
    ):
        tally.take(it)
    assert (tally.in_time, tally.late, tally.failed, tally.cancelled) == (1, 1, 2, 1)
    assert tally.engine_refused == 1
    assert tally.refused == {"ttft_slo": 1}
    assert tally.reuse.reported.prompt == 6_000


def test_the_funnel_narrows() -> None:
    """Prompt tokens, held by anyone, held where it ran, promised, delivered; and how many tokens
    engines did not report."""
    history = ClusterHistory()
    history.ended(record(), 0, 0)
    history.ended(record(measured=Measured(10)), 0, 0)
    second(history, 1)
    [sample] = history.rings[0].samples
    assert sample.prompt_tokens == 2_000
    assert (sample.held_tokens, sample.chosen_tokens, sample.promised_tokens) == (1_200, 400, 1_000)
    assert (sample.delivered_tokens, sample.told_tokens) == (400, 1_000)


def test_coarse_samples_add_up_fine_ones() -> None:
    """Counts are summed, levels are means, and quantiles are of all requests."""
    history = ClusterHistory()
    for at in range(1, 16):
        for _ in range(at % 2):
            history.ended(record(first_us=at * MS), 0, 0)
        second(history, at, waiting=at, decode_slots=0.5)
    fine, coarse = history.rings
    assert [it.in_time for it in fine.samples] == [1, 0] * 7 + [1]
    assert [it.at_ms for it in fine.samples] == [at * 1_000 for at in range(1, 16)]
    [sample] = coarse.samples
    assert (sample.at_ms, sample.in_time) == (15_000, 8)
    assert (sample.waiting, sample.decode_slots) == (8.0, 0.5)
    assert sample.ttft_p50_ms == pytest.approx(7, rel=0.07)
    assert sample.ttft_p99_ms == pytest.approx(15, rel=0.07)
    assert sample.evicted == 15
    assert fine.samples[1].ttft_p50_ms is None


def test_samples_are_bounded() -> None:
    """A quarter of an hour by seconds; four hours by 15 seconds."""
    history = ClusterHistory()
    for at in range(1, 1_000):
        second(history, at)
    fine, coarse = history.rings
    assert len(fine.samples) == 900
    assert fine.samples[0].at_ms == 100_000
    assert len(coarse.samples) == 66
    assert [(ring.samples.maxlen, ring.step_s) for ring in history.rings] == [(900, 1), (960, 15)]
    for at in range(2_000):
        history.happened(LaneEvent(at, "join", "p0"))
    assert len(history.lane) <= 500


def test_a_column_of_heat_is_a_mean_over_its_time() -> None:
    """An instance that came late counts as empty before; one that is gone has no place."""
    history = ClusterHistory()
    for at in range(1, 6):
        heat = {P0: 1.0} if at < 5 else {P0: 0.0, D0: 1.0}
        history.second(at, Pools(), heat, StoreLevels())
    [column] = history.rings[0].heat
    assert (column.at_ms, column.instances) == (5, (P0, D0))
    assert list(column.percents) == [80, 20]


def test_the_last_minute_forgets() -> None:
    """Requests of more than 60 seconds ago do not count."""
    history = ClusterHistory()
    history.ended(record(), 0, 0)
    for at in range(1, 61):
        second(history, at)
    assert history.last_minute().in_time == 1
    second(history, 61)
    assert history.last_minute().in_time == 0
    assert history.seconds() == 60


def test_columns_name_what_was_refused() -> None:
    """A reason for which nothing was refused has no column; an unknown one is `other`."""
    history = ClusterHistory()
    history.ended(record("refused", None, reason="kv_memory"), 0, 0)
    history.ended(record("refused", None, reason="of late"), 0, 0)
    second(history, 1)
    second(history, 2)
    table = columns(list(history.rings[0].samples))
    assert table["refused_kv_memory"] == [1, 0]
    assert table["refused_other"] == [1, 0]
    assert {name for name in table if name.startswith("refused_")} == {
        "refused_kv_memory",
        "refused_other",
    }
    assert "kv_memory" in REASONS
    assert table["at_ms"] == [1_000, 2_000]


def test_pairs_show_speed_and_failures_and_fade() -> None:
    """KV bytes by the time of the hand-over; what was placed again counts as failed; a pair
    without requests is forgotten."""
    history = ClusterHistory()
    history.ended(record(), 1_000, 10)
    history.ended(record(attempts=2, measured=Measured(1)), 1_000, 10)
    pair = history.pairs[P0, D0]
    assert (pair.requests, pair.failed) == (2, 1)
    assert pair.moved_bytes / pair.took_us == 100_000 / 5_000
    assert pair.bytes_per_s == 20_000_000
    history.ended(record(decision=decision(joint=True)), 1_000, 10)
    assert pair.requests == 2  # one engine did both
    for at in range(1, 16):
        second(history, at)
    assert pair.requests < 2
    assert pair.moved_bytes / pair.took_us == pytest.approx(20)
    for at in range(16, 15 * 130):
        second(history, at)
    assert not history.pairs


def test_the_pairs_of_the_busiest_instances_are_shown() -> None:
    """Of each role those with the most requests, whatever instances they worked with."""
    history = ClusterHistory()
    for prefill, decode, count in (
        ("p0", "d0", 2),
        ("p1", "d0", 3),
        ("p2", "d1", 4),
        ("p2", "d2", 1),
    ):
        made = decision(prefill=InstanceId(prefill), decode=InstanceId(decode))
        for _ in range(count):
            history.ended(record(decision=made), 1_000, 10)
    found = {key: pair.requests for key, pair in history.busiest_pairs(2)}
    assert found == {("p1", "d0"): 3, ("p2", "d1"): 4}
    assert history.busiest_pairs(1) == [], "the busiest two never worked together"


def test_chains_of_prompts_are_bounded_by_their_keys() -> None:
    """The latest ones are kept, at most 20 of a second and 100,000 keys."""
    history = ClusterHistory()
    keys = [BlockKey(b"%d" % at) for at in range(30_000)]
    for _ in range(30):
        history.ended(record(keys=keys[:10]), 1, 16)
    assert len(history.chains) == 20
    for at in range(4):
        second(history, at)
        history.ended(record(keys=keys), 1, 16)
    assert [len(chain.keys) for chain in history.chains] == [30_000] * 3
    history.ended(record("refused", None, keys=keys), 1, 16)
    assert len(history.chains) == 3


def test_how_full_the_pools_are() -> None:
    """A prefill instance is busy or not; decode has places and memory; the mean is over each."""
    views = [view("p0", "prefill"), view("p1", "prefill"), view("d0", "decode", max_seqs=4)]
    views[0].promise_prefill(RequestId("a"), 6_000, 100, 0)
    views[2].promise_decode(RequestId("b"), 100)
    views[2].begin_decode(RequestId("b"), 0)
    pools = pools_of(views, 0, 3, 4)
    assert (pools.prefills, pools.decodes) == (2, 1)
    assert (pools.prefill_busy, pools.queue_ms) == (0.5, 3.0)
    assert (pools.decode_slots, pools.decode_kv) == (0.25, 0.25)
    assert pools.step_ms > 0
    assert (pools.waiting, pools.under_way) == (3, 4)
    assert [heat_of(it, 0) for it in views] == [1.0, 0.0, 0.25]
    assert heat_of(views[0], 6_000) == 0.0
    both = view("e0", "both")
    assert pools_of([both], 0, 0, 0).prefills == pools_of([both], 0, 0, 0).decodes == 1
    assert pools_of([], 0, 0, 0) == Pools()
