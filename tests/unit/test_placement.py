"""Algorithm 1 and the decode choice, by tables."""

import pytest

from moonserve.core.index import Match
from moonserve.core.placement import choose_decode, choose_prefill, kvcache_centric, place
from moonserve.core.units import InstanceId, RequestId, SegmentId
from tests.support.cluster import BLOCK, view

P0, P1, D0 = SegmentId("p0"), SegmentId("p1"), SegmentId("d0")


def queued(name: str, work_us: int):  # type: ignore[no-untyped-def]
    """A prefill instance with work promised at time 0."""
    made = view(name, "prefill")
    if work_us:
        made.promise_prefill(RequestId("other"), work_us, 0)
    return made


# 41 tokens = 10 full blocks of 4 and one token; a new token costs 10 us, a fetched block 5 us + 5.
@pytest.mark.parametrize(
    ("match", "queues", "threshold", "winner", "reused", "holder", "ttft_us"),
    [
        # nothing cached anywhere: the first of equals computes it all
        (Match(0, {}), (0, 0), 1.0, "p0", 0, None, 410),
        # p1 holds all: it is local there
        (Match(10, {P1: 10}), (0, 0), 1.0, "p1", 40, None, 10),
        # p1 holds all but is busy: p0 fetches 10 blocks (5 + 50 us) and computes one token
        (Match(10, {P1: 10}), (0, 100), 1.0, "p0", 40, P1, 65),
        # the queue behind the holder is short: waiting there beats fetching
        (Match(10, {P1: 10}), (0, 50), 1.0, "p1", 40, None, 60),
        # p0 holds half; best/own = 2 does not exceed a threshold of 2: p0 computes from its own
        (Match(10, {P0: 5, P1: 10}), (0, 500), 2.0, "p0", 20, None, 210),
        # the same with threshold 1: p0 fetches the other half
        (Match(10, {P0: 5, P1: 10}), (0, 500), 1.0, "p0", 40, P1, 5 + 25 + 10),
        # a run that only the pool as a whole has is fetched from the longest other holder
        (Match(8, {D0: 6}), (0, 0), 1.0, "p0", 32, D0, 5 + 40 + 90),
    ],
)
def test_algorithm_1(match, queues, threshold, winner, reused, holder, ttft_us) -> None:  # type: ignore[no-untyped-def]
    """The chosen instance, its reuse and its predicted TTFT follow FAST'25 Algorithm 1."""
    views = [queued("p0", queues[0]), queued("p1", queues[1])]
    best = choose_prefill(kvcache_centric(41, match, views, threshold, now_us=0))
    assert (best.instance, best.reused_tokens, best.holder) == (winner, reused, holder)
    assert best.ttft_us == ttft_us


def test_the_last_token_is_always_computed() -> None:
    """A fully cached prompt still computes its last block: the logits are needed."""
    candidates = kvcache_centric(40, Match(10, {P0: 10}), [view("p0", "prefill")], 1.0, 0)
    assert candidates[0].reused_tokens == 40 - BLOCK


def test_the_queue_drains_with_time() -> None:
    """T_queue falls as the head runs, never below what stands behind it."""
    made = queued("p0", 100)
    made.promise_prefill(RequestId("second"), 30, 0)
    assert [made.queue_us(t) for t in (0, 40, 100, 900)] == [130, 90, 30, 30]
    made.end_prefill(RequestId("other"), 900)
    assert [made.queue_us(t) for t in (900, 910, 999)] == [30, 20, 0]


def test_ending_another_than_the_head_keeps_the_heads_progress() -> None:
    """A cancelled waiting prefill does not restart the clock of the one that runs."""
    made = queued("p0", 100)
    made.promise_prefill(RequestId("second"), 30, 0)
    made.end_prefill(RequestId("second"), 60)
    assert made.queue_us(60) == 40


def test_decode_goes_where_tbt_is_lowest_after_joining() -> None:
    """Members and their contexts count; a full instance is taken only when all are full."""
    d0, d1 = view("d0", "decode", max_seqs=1), view("d1", "decode", max_seqs=2)
    d1.decoding[RequestId("a")] = 10
    assert choose_decode(41, [d0, d1]) is d0
    d0.decoding[RequestId("b")] = 1
    assert choose_decode(41, [d0, d1]) is d1
    d1.decoding[RequestId("c")] = 500
    assert choose_decode(41, [d0, d1]) is d0


def test_failed_instances_are_avoided_while_there_are_others() -> None:
    """`avoid` excludes an instance only while the role has another one."""
    prefills = [view("p0", "prefill"), view("p1", "prefill")]
    decodes = [view("d0", "decode")]
    avoid = [InstanceId("p0"), InstanceId("d0")]
    decision = place(41, Match(10, {P0: 10}), prefills, decodes, 1.0, 0, avoid)
    assert decision is not None
    assert (decision.prefill, decision.decode) == ("p1", "d0")
    assert place(41, Match(0, {}), prefills, [], 1.0, 0) is None
