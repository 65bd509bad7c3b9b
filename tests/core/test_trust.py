"""How claims lose and regain their weight, and what others' work does to a view."""

from __future__ import annotations

import pytest

from moonserve.core.kv.index import Match
from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.estimate import Ask, Estimate, Roles
from moonserve.core.schedule.external_load import NO_LOAD, ExternalLoad, external_load
from moonserve.core.schedule.facts import HitSample, InstanceInfo, InstanceLoad, Role
from moonserve.core.schedule.observed import Trust
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, RequestId, SegmentId


def info(name: str = "e", role: Role = "both", fetches: bool = False) -> InstanceInfo:
    """An external engine's instance."""
    return InstanceInfo(
        id=InstanceId(name),
        epoch=1,
        role=role,
        url="http://127.0.0.1:1",
        model="m",
        namespace=Namespace("m", "", "vllm", 32),
        kv_blocks=1_000,
        block_bytes=0,
        max_seqs=8,
        chunk_tokens=8_192,
        max_len=32_000,
        segment=SegmentId(name),
        connector="none",
        fetches=fetches,
    )


def test_a_wrong_index_loses_its_weight_and_proves_right_again() -> None:
    """Four claims without a hit take the claims' weight; claims that hold give it back."""
    trust = Trust()
    for _ in range(3):
        trust.observe(HitSample(320, 0))
    assert trust.trusted
    trust.observe(HitSample(320, 0))
    assert not trust.trusted
    assert trust.share == Trust.FLOOR
    for _ in range(4 * 4):
        assert not trust.trusted
        trust.observe(HitSample(32, 32))
    assert trust.trusted


def test_late_evictions_and_silence_cost_no_trust() -> None:
    """With six claims of ten confirmed, the index is only late; no claim teaches nothing."""
    trust = Trust()
    for _ in range(40):
        trust.observe(HitSample(320, 192))
        trust.observe(HitSample(0, 640))
    assert trust.trusted
    assert (trust.claimed, trust.found, trust.unclaimed) == (12_800, 7_680, 25_600)


def test_doubted_claims_count_by_their_share() -> None:
    """Placement reuses a share of what a doubted holder claims, of others all; never nothing."""
    view = ClusterView()
    for name in ("a", "b"):
        view.add(InstanceView(info(name), 0))
    bad = view.instances[InstanceId("a")]
    view.beat(bad, InstanceLoad(hits=(HitSample(320, 32),) * 4), 0)
    match = Match(20, {SegmentId("a"): 20, SegmentId("b"): 10})
    views = view.prefills("m")
    roles = Roles(views, (), doubts=view.doubts)
    ask = Ask(length=1_000, match=match)
    made = Estimate(ask, roles, 32, "never", Tuning()).options(views, 0)
    assert made.reused == [2, 10]
    view.remove(InstanceId("a"))
    assert view.doubts == {}


def test_who_cannot_fetch_reuses_its_own_only() -> None:
    """An engine without a shared store cannot start from a prefix that others hold."""
    views = [InstanceView(info("a", fetches=fetches), 0) for fetches in (False, True)]
    ask = Ask(length=1_000, match=Match(20, {SegmentId("b"): 20}))
    made = Estimate(ask, Roles(views, ()), 32, "threshold", Tuning()).options(views, 0)
    assert made.reused == [0, 20]


@pytest.mark.parametrize(
    ("role", "running", "waiting", "ours", "want"),
    [
        ("both", 2, 3, (3, 2), NO_LOAD),  # all of them are ours
        ("both", 4, 4, (0, 0), ExternalLoad(4, 4, 900)),
        ("prefill", 3, 3, (2, 0), ExternalLoad(4, 0, 0)),
        ("decode", 5, 1, (0, 2), ExternalLoad(0, 4, 900)),
    ],
)
def test_only_what_exceeds_ours_is_others(
    role: Role, running: int, waiting: int, ours: tuple[int, int], want: ExternalLoad
) -> None:
    """An engine's counts include our requests: they are not counted twice."""
    load = InstanceLoad(running, waiting, everybody=True, kv_tokens=1_000)
    assert external_load(role, load, *ours, context=100) == want
    quiet = InstanceLoad(running, waiting, kv_tokens=1_000)
    assert external_load(role, quiet, *ours, context=100) == NO_LOAD


def test_work_of_others_is_queued_before_ours_and_passes() -> None:
    """Two waiting prompts of others cost two of our usual prefills, less what time has passed."""
    view = InstanceView(info(), 0)
    view.promise_prefill(RequestId("r"), 50_000, 500, 0)
    assert view.queue_us(0) == 50_000
    view.beat(InstanceLoad(1, 2, everybody=True), 0)
    assert view.external == NO_LOAD  # one may have ended while we asked
    view.beat(InstanceLoad(1, 2, everybody=True), 0)  # one of the three is ours
    assert view.external.waiting == 1
    for _ in range(2):
        view.beat(InstanceLoad(0, 3, everybody=True), 0)
    assert view.queue_us(0) == 50_000 + 2 * 50_000
    assert view.queue_us(60_000) == 50_000 - 50_000 + 40_000
    view.end_prefill(RequestId("r"), 60_000)
    view.beat(InstanceLoad(everybody=True), 60_000)
    assert (view.queue_us(60_000), view.external) == (0, NO_LOAD)


def test_decodes_of_others_take_slots_room_and_time() -> None:
    """Others in the batch make steps longer, and leave less room."""
    view = InstanceView(info(), 0)
    alone_us, room = view.tbt_us(100), view.room_tokens
    for _ in range(2):
        view.beat(InstanceLoad(7, 0, everybody=True, kv_tokens=9_000), 0)
    assert view.room_tokens == room - 9_000
    assert view.tbt_us(100) == view.cost.decode_step_us(8, 9_100) > alone_us
    assert view.tbt_now_us(100) == view.tbt_us(100)
    for _ in range(2):
        view.beat(InstanceLoad(8, 0, everybody=True, kv_tokens=9_000), 0)
    assert not view.has_slot(1)
