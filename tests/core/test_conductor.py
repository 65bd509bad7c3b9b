"""The Conductor's step, fact by fact."""

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.adoption import Tracked
from moonserve.core.schedule.conductor import PAUSE_US, Conductor
from moonserve.core.schedule.explain import why
from moonserve.core.schedule.facts import (
    Arrived,
    Beat,
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceLoad,
    Joined,
    Left,
    PrefillEnded,
    Tick,
)
from moonserve.core.schedule.handoff import MAX_ATTEMPTS
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId, RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, exact, info

PROMPT = tuple(range(41))
KEYS = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))
NOTHING = Promised(0, 0, 0, 0)
R = RequestId("r")


def cluster(*names: str) -> Conductor:
    """A Conductor with p… as prefill and d… as decode instances."""
    conductor = Conductor()
    joins = [Joined(info(n, "prefill" if n[0] == "p" else "decode")) for n in names]
    assert conductor.step(0, joins) == []
    return conductor


def arrived(name: str = "r") -> Arrived:
    """A request of 41 tokens."""
    return Arrived(Request(RequestId(name), "m", len(PROMPT), PROMPT), KEYS)


def test_who_leaves_in_the_step_of_its_arrival() -> None:
    """A client that is gone before its request was placed leaves nothing promised: facts that came
    one after the other may be taken in one step."""
    conductor = cluster("p0", "d0")
    assert conductor.step(1, [arrived(), ClientGone(R)]) == [Release(R, ())]
    assert conductor.promised() == NOTHING
    [prefill] = conductor.step(2, [arrived()])
    facts = [ClientGone(R), arrived(), ClientGone(R)]  # its id was used again at once
    assert conductor.step(3, facts) == [Release(R, (prefill.number,)), Release(R, ())]
    assert conductor.promised() == NOTHING
    assert conductor.step(4, [ClientGone(R)]) == []


def test_a_life_without_trouble() -> None:
    """Prefill, decode, release; the ledger holds the promise meanwhile and nothing after."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    assert (prefill.to.id, prefill.decision.decode) == ("p0", "d0")
    promised = conductor.promised()
    assert (promised.requests, promised.prefills, promised.decodes) == (1, 1, 1)
    assert promised.prefill_us > 0
    [decode] = conductor.step(2, [PrefillEnded(R, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert conductor.promised() == Promised(1, 0, 0, 1)
    assert conductor.step(3, [DecodeEnded(R, decode.number)]) == [Release(R, (1,))]
    assert conductor.promised() == NOTHING


def test_what_calls_take_beside_their_passes_is_predicted() -> None:
    """After eight prefill calls that met no other and took 40 ms longer than their passes, a TTFT
    is predicted with these 40 ms. A call that waited behind another one teaches nothing."""
    conductor = cluster("p0", "d0")
    now_us = 0

    def serve(name: str, beside_us: int, behind: bool = False) -> Prefill:
        nonlocal now_us
        now_us += 1_000
        other = arrived(f"before-{name}")
        conductor.step(now_us, [other] if behind else [])
        prefill = placed(conductor.step(now_us, [arrived(name)]))
        chosen = prefill.decision.chosen
        assert bool(chosen.queue_us) == behind
        now_us += chosen.ttft_us + beside_us
        conductor.step(now_us, [PrefillEnded(RequestId(name), prefill.number, final=True)])
        conductor.step(now_us, [ClientGone(other.request.id)])
        return prefill

    for at in range(7):
        assert serve(f"r{at}", 40_000).decision.call_us == 0
    for at in range(7, 11):
        serve(f"r{at}", 500_000, behind=True)
    assert serve("r11", 40_000).decision.call_us == 0
    decision = serve("r12", 40_000).decision
    assert decision.call_us == 40_000
    assert decision.predicted_ttft_us == decision.chosen.ttft_us + 40_000
    assert "and 40 ms for its call" in why(decision, [decision.chosen])


def test_one_token_needs_no_decode() -> None:
    """A final prefill ends the life."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    assert conductor.step(2, [PrefillEnded(R, prefill.number, final=True)]) == [Release(R, (1,))]
    assert conductor.promised() == NOTHING


def test_nobody_alive_is_refused_at_once() -> None:
    """Without a decode instance nothing is spent on a prefill."""
    conductor = cluster("p0")
    refuse, release = conductor.step(1, [arrived()])
    assert refuse == Refuse(R, "no decode instance for model m is alive")
    assert release == Release(R, ())
    assert conductor.promised() == NOTHING


def test_a_refusal_names_the_objective_that_would_break() -> None:
    """Its own, or that of one that decodes there, with the prediction that exceeds it."""
    conductor = Conductor(Tuning(held_share=0.0), cost_of=exact)
    conductor.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
    conductor.step(1, [Arrived(Request(R, "m", len(PROMPT), PROMPT, slo=Slo(tbt_us=160)), KEYS)])
    for own, rest in (
        (Slo(tbt_us=155), "misses the objective of 0.155 ms"),
        (Slo(), "would break the objective of 0.16 ms of a request that decodes on d0"),
        (Slo(tbt_us=9_000), "would break the objective of 0.16 ms of a request that decodes on d0"),
    ):
        request = Request(RequestId("s"), "m", len(PROMPT), PROMPT, slo=own)
        refuse, _ = conductor.step(2, [Arrived(request, KEYS)])
        assert isinstance(refuse, Refuse)
        assert (refuse.reason, refuse.why) == ("tbt_slo", f"predicted TBT of 0.204 ms {rest}")


def test_the_client_may_leave_at_any_time() -> None:
    """In either phase all is released; later reports of the call have no effect."""
    for decoding in (False, True):
        conductor = cluster("p0", "d0")
        [call] = conductor.step(1, [arrived()])
        assert isinstance(call, Prefill)
        if decoding:
            conductor.step(2, [PrefillEnded(R, call.number, final=False)])
        assert conductor.step(3, [ClientGone(R)]) == [Release(R, (1,))]
        assert conductor.promised() == NOTHING
        assert conductor.step(4, [DecodeEnded(R, 2), ClientGone(R)]) == []


def test_a_failed_prefill_goes_to_another_instance() -> None:
    """One failure is retried elsewhere; three end the life with an error."""
    conductor = cluster("p0", "p1", "d0")
    [first] = conductor.step(1, [arrived()])
    assert isinstance(first, Prefill)
    assert first.to.id == "p0"
    [second] = conductor.step(2, [CallFailed(R, first.number, "reset", True, 41, KEYS)])
    assert isinstance(second, Prefill)
    assert second.to.id == "p1"
    assert conductor.promised().prefills == 1
    [third] = conductor.step(3, [CallFailed(R, second.number, "reset", True, 41, KEYS)])
    assert isinstance(third, Prefill)
    last = conductor.step(4, [CallFailed(R, third.number, "reset", True, 41, KEYS)])
    leases = (first.number, second.number, third.number)
    assert last == [GiveUp(R, "reset"), Release(R, leases)]
    assert conductor.promised() == NOTHING


def test_a_request_may_take_two_instances_with_it() -> None:
    """When a second one dies while it has the request's call, the request is given up with the
    reason, whether it has tokens or not. An instance that died is used no more."""
    for begins in (False, True):
        conductor = cluster("p0", "p1", "p2", "d0", "d1", "d2")
        call: Prefill | Decode = placed(conductor.step(1, [arrived()]))
        for turn in (2, 3):
            if begins:
                [call] = conductor.step(turn, [PrefillEnded(R, call.number, final=False)])
            dead = call.to.id
            actions = fail(conductor, call, turn, 41 + begins, died=1)
            assert dead not in conductor.view.instances
            if turn == 2:
                call = placed(actions)
        why = "2 instances died while they had this request: x"
        assert actions[0] == GiveUp(R, why)
        assert conductor.promised() == NOTHING


def test_a_death_counts_for_all_that_had_a_call_there_without_a_token() -> None:
    """Also for those whose call is aborted for it. A token of decode forgives what came before, and
    the death of the instance that gave it."""
    conductor = cluster("p0", "d0")
    other = RequestId("other")
    prefills = conductor.step(1, [arrived(), arrived(other)])
    for turn, tokens in ((10, 1), (20, 3)):
        ended = [PrefillEnded(it.request, placed([it]).number, False) for it in prefills]
        numbers = {it.request: it.number for it in conductor.step(turn, ended)}  # type: ignore[union-attr]
        died = CallFailed(R, numbers[R], "x", True, 41 + tokens, KEYS, died=max(1, turn - 10))
        aborts = conductor.step(turn + 1, [died])
        assert aborts == [Abort(other, numbers[other], "instance d0 is gone: it died")]
        actions = conductor.step(turn + 2, [CallFailed(other, numbers[other], "y", True, 42, KEYS)])
        prefills = conductor.step(turn + 3, [Joined(info("d0", "decode", turn))])
    assert actions[0] == GiveUp(other, "2 instances died while they had this request: y")
    assert [it.request for it in prefills if isinstance(it, Prefill)] == [R]


def test_what_cannot_be_mended_is_not_retried() -> None:
    """retry=False gives up at once."""
    conductor = cluster("p0", "p1", "d0")
    [first] = conductor.step(1, [arrived()])
    assert isinstance(first, Prefill)
    last = conductor.step(2, [CallFailed(R, first.number, "400", False, 41, KEYS)])
    assert last == [GiveUp(R, "400"), Release(R, (1,))]


def test_a_lost_decode_resumes_from_what_was_sent() -> None:
    """After a decode failure the request is placed again with its longer known sequence."""
    conductor = cluster("p0", "d0", "d1")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    [decode] = conductor.step(2, [PrefillEnded(R, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert decode.to.id == "d0"
    known = tuple(range(60))
    keys = tuple(chain_keys(NAMESPACE.root(), known, BLOCK))
    failed = CallFailed(R, decode.number, "reset", True, len(known), keys)
    [again] = conductor.step(3, [failed])
    assert isinstance(again, Prefill)
    assert again.decision.prompt_tokens == 60
    assert again.decision.decode == "d1"
    assert again.number > decode.number


def test_silence_is_death() -> None:
    """An instance without a heartbeat is dropped; its calls are aborted, its late beats ignored."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    beat = Beat(InstanceId("d0"), 1, InstanceLoad())
    assert conductor.step(5_000_000, [beat, Tick()]) == []
    [abort] = conductor.step(5_500_000, [Tick()])
    assert isinstance(abort, Abort)
    assert abort.number == prefill.number
    conductor.step(5_500_001, [Beat(InstanceId("p0"), 1, InstanceLoad())])
    assert list(conductor.view.instances) == ["d0"]


def test_a_late_tick_blames_nobody() -> None:
    """After a pause of our own no instance is dropped before the next tick."""
    conductor = cluster("p0", "d0")
    conductor.step(1_000_000, [Tick()])
    conductor.step(9_000_000, [Tick()])
    assert list(conductor.view.instances) == ["d0", "p0"]
    conductor.step(9_500_000, [Tick()])
    assert list(conductor.view.instances) == []


def lost_prefill(conductor: Conductor) -> Prefill:
    """A request whose only prefill instance refuses connections; it waits now."""
    [call] = conductor.step(1, [arrived()])
    assert isinstance(call, Prefill)
    failed = CallFailed(R, call.number, "refused", True, 41, KEYS, unreachable=True)
    assert conductor.step(2, [failed]) == []
    assert "p0" not in conductor.view.instances
    assert conductor.promised() == Promised(1, 0, 0, 0)
    return call


def test_a_request_outlives_the_restart_of_its_only_instance() -> None:
    """Without an instance for a retry the request waits, and is placed when one joins."""
    conductor = cluster("p0", "d0")
    call = lost_prefill(conductor)
    assert conductor.step(3, [CallFailed(R, call.number, "again", True, 41, KEYS)]) == []
    [again] = conductor.step(1_000_000, [Joined(info("p0", "prefill", epoch=2))])
    assert isinstance(again, Prefill)
    assert again.number > call.number
    assert conductor.promised() == Promised(1, 1, conductor.promised().prefill_us, 1)


def fail(
    conductor: Conductor, call: Prefill | Decode, now_us: int, length: int = 43, **more: int
) -> list[Action]:
    """The call fails with so many tokens known."""
    return conductor.step(now_us, [CallFailed(R, call.number, "x", True, length, KEYS, **more)])


def placed(actions: list[Action]) -> Prefill:
    """The one action, which is a prefill."""
    [call] = actions
    assert isinstance(call, Prefill)
    return call


def begun(conductor: Conductor) -> Prefill:
    """A request that has tokens, and whose first decode call has failed: its next prefill call."""
    call = placed(conductor.step(1, [arrived()]))
    [decode] = conductor.step(2, [PrefillEnded(R, call.number, final=False)])
    assert isinstance(decode, Decode)
    return placed(fail(conductor, decode, 3))


def test_a_restart_uses_up_no_attempt() -> None:
    """Calls that no instance received end a request only once its patience is over."""
    conductor = cluster("p0", "d0")
    call = begun(conductor)
    for turn in range(1, 31):
        assert fail(conductor, call, turn * 1_000_000, unreachable=True) == []
        joined = Joined(info("p0", "prefill", epoch=1 + turn))
        call = placed(conductor.step(turn * 1_000_000, [joined]))
    ended = fail(conductor, call, 31_000_000, unreachable=True)
    assert [type(action) for action in ended] == [GiveUp, Release]
    assert conductor.promised() == NOTHING


def test_new_tokens_give_the_attempts_back() -> None:
    """A stream may meet any number of faults, if decode gives tokens between them."""
    conductor = cluster("p0", "d0", "d1")
    call = begun(conductor)
    for turn in range(4, 40, 2):
        [decode] = conductor.step(turn, [PrefillEnded(R, call.number, final=False)])
        assert isinstance(decode, Decode)
        call = placed(fail(conductor, decode, turn + 1, 43 + turn))
        assert call.decision.decode != decode.to.id, "the instance that failed last is avoided"


def test_faults_before_the_first_token_use_up_no_patience() -> None:
    """A stream that has just begun may wait as long as any other for an instance."""
    conductor = cluster("p0", "d0")
    call = placed(conductor.step(1, [arrived()]))
    for turn in range(1, 30):
        fail(conductor, call, turn * 1_000_000, len(PROMPT), unreachable=True)
        joined = Joined(info("p0", "prefill", epoch=1 + turn))
        call = placed(conductor.step(turn * 1_000_000, [joined]))
    [decode] = conductor.step(40_000_000, [PrefillEnded(R, call.number, final=False)])
    assert isinstance(decode, Decode)
    placed(fail(conductor, decode, 40_000_001))


def test_a_stream_that_fails_too_often_pauses() -> None:
    """After three failed calls without a token it is placed once a second, until its patience is
    over."""
    conductor = cluster("p0", "d0")
    call = placed(fail(conductor, begun(conductor), 4))
    now_us = 5
    calls = 3
    while not (ended := fail(conductor, call, now_us)):
        assert conductor.promised() == Promised(1, 0, 0, 0)
        wake_us = conductor.wake_us(now_us)
        assert wake_us == now_us + PAUSE_US
        assert conductor.step(wake_us - 1, [Joined(info("p1", "prefill", epoch=now_us))]) == []
        call = placed(conductor.step(wake_us, []))
        now_us = wake_us + 5
        calls += 1
    assert [type(action) for action in ended] == [GiveUp, Release]
    assert calls == 3 + 30
    assert conductor.promised() == NOTHING


def test_a_request_without_a_token_is_tried_three_times() -> None:
    """Its client can send it again."""
    conductor = cluster("p0", "d0")
    call = placed(conductor.step(1, [arrived()]))
    for turn in range(1, MAX_ATTEMPTS):
        call = placed(fail(conductor, call, 1 + turn, len(PROMPT)))
    ended = fail(conductor, call, 9, len(PROMPT))
    assert [type(action) for action in ended] == [GiveUp, Release]


def test_a_client_that_leaves_ends_a_pause() -> None:
    """Nothing is left of the request."""
    conductor = cluster("p0", "d0")
    call = placed(fail(conductor, begun(conductor), 4))
    assert fail(conductor, call, 5) == []
    [released] = conductor.step(6, [ClientGone(R)])
    assert isinstance(released, Release)
    assert conductor.wake_us(6) is None


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_stream_waits_for_full_instances(has_tokens: bool) -> None:
    """If instances are alive but full, patience ends a request without tokens, but no stream."""
    conductor = Conductor()
    small = msgspec.structs.replace(info("d0", "decode"), max_requests=1)
    conductor.step(0, [Joined(info("p0", "prefill")), Joined(small)])
    call: Prefill | Decode = placed(conductor.step(1, [arrived()]))
    if has_tokens:
        [decode] = conductor.step(2, [PrefillEnded(R, call.number, final=False)])
        assert isinstance(decode, Decode)
        call = decode
    conductor.step(3, [Left(InstanceId("d0"), 1, "it was killed")])
    conductor.step(4, [Joined(msgspec.structs.replace(small, epoch=2)), arrived("other")])
    assert fail(conductor, call, 5, 43 if has_tokens else len(PROMPT)) == []
    ended = []
    for second in range(1, 40):
        beats = [
            Beat(InstanceId(id), epoch, InstanceLoad()) for id, epoch in (("p0", 1), ("d0", 2))
        ]
        ended += conductor.step(second * 1_000_000, [*beats, Tick()])
    assert [type(action) for action in ended] == ([] if has_tokens else [GiveUp, Release])


def test_a_pause_of_this_process_uses_up_no_patience() -> None:
    """Workers could not join again while the gateway itself was stopped."""
    conductor = cluster("p0", "d0")
    conductor.step(0, [Tick()])
    lost_prefill(conductor)
    conductor.step(1_000_000, [Tick()])
    assert conductor.step(60_000_000, [Tick()]) == []
    placed(conductor.step(60_500_000, [Joined(info("p0", "prefill", epoch=2))]))


def test_patience_ends() -> None:
    """A request that waits too long for an instance has failed; one that leaves is forgotten."""
    conductor = cluster("p0", "d0")
    lost_prefill(conductor)
    conductor.step(29_000_000, [Tick()])
    assert conductor.promised().requests == 1
    ended = conductor.step(31_000_000, [Tick()])
    assert [type(a) for a in ended] == [GiveUp, Release]
    assert conductor.promised() == NOTHING
    conductor = cluster("p0", "d0")
    lost_prefill(conductor)
    assert conductor.step(3, [ClientGone(R)]) == [Release(R, (1,))]
    assert conductor.step(4, [Joined(info("p0", "prefill", epoch=2))]) == []


def test_an_instance_that_leaves_finishes_what_it_has() -> None:
    """A goodbye stops new placements and aborts nothing."""
    conductor = cluster("p0", "d0", "d1")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    [decode] = conductor.step(2, [PrefillEnded(R, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert conductor.step(3, [Left(InstanceId(decode.to.id), 1)]) == []
    assert conductor.step(4, [DecodeEnded(R, decode.number)]) == [Release(R, (1,))]
    assert conductor.promised() == NOTHING


def test_no_instance_is_promised_more_than_it_takes() -> None:
    """When every instance of a role is full, a request is refused with a time to come back."""
    conductor = Conductor()
    small = msgspec.structs.replace(info("d0", "decode"), max_requests=2)
    conductor.step(0, [Joined(info("p0", "prefill")), Joined(small)])
    placed = conductor.step(1, [arrived("a"), arrived("b")])
    assert [type(action) for action in placed] == [Prefill, Prefill]
    refuse, release = conductor.step(2, [arrived("c")])
    assert isinstance(refuse, Refuse)
    assert refuse.why == "every decode instance of model m is full"
    assert refuse.retry_after_us is not None
    assert refuse.retry_after_us >= 1_000_000
    assert release == Release(RequestId("c"), ())
    assert conductor.promised().requests == 2


def test_a_restart_is_another_epoch() -> None:
    """A newer epoch aborts what ran there; joins and goodbyes of an older one are ignored."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived()])
    [abort] = conductor.step(2, [Joined(info("p0", "prefill", epoch=2))])
    assert isinstance(abort, Abort)
    assert conductor.promised().prefills == 0
    assert conductor.step(3, [Left(InstanceId("p0"), 1)]) == []
    conductor.step(3, [Joined(info("p0", "prefill", epoch=1))])
    assert conductor.view.instances[InstanceId("p0")].info.epoch == 2
    assert "p0" in conductor.view.instances
    conductor.step(4, [Left(InstanceId("p0"), 2)])
    assert "p0" not in conductor.view.instances


def test_a_decode_instance_lost_before_its_turn_is_replaced() -> None:
    """When prefill ends and the chosen decode is gone, another is chosen."""
    conductor = cluster("p0", "d0", "d1")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    conductor.step(2, [Left(InstanceId("d0"), 1)])
    [decode] = conductor.step(3, [PrefillEnded(R, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert decode.to.id == "d1"
    assert conductor.promised() == Promised(1, 0, 0, 1)


def test_facts_of_one_instant_are_taken_in_a_fixed_order() -> None:
    """Whatever order the mailbox had, blocks are known before arrivals, arrivals go by id."""
    facts = [
        arrived("b"),
        arrived("a"),
        BlocksStored(SegmentId("p1"), tuple(KEYS), None, "dram", 1),
        Joined(info("p1", "prefill")),
        Joined(info("p0", "prefill")),
        Joined(info("d0", "decode")),
    ]
    forwards = Conductor().step(0, facts)
    backwards = Conductor().step(0, reversed(facts))
    assert forwards == backwards
    first, second = forwards
    assert isinstance(first, Prefill)
    assert isinstance(second, Prefill)
    assert [first.request, second.request] == ["a", "b"]
    assert (first.to.id, first.decision.reused_tokens) == ("p1", 40)


def tracked(conductor: Conductor) -> tuple[Tracked, Prefill]:
    """A request that this Conductor has placed, as its driver keeps it for another one."""
    fact = arrived()
    kept = Tracked(msgspec.structs.replace(fact.request, prompt=()), fact.keys)
    prefill = placed(conductor.step(1, [fact]))
    kept.acted(prefill, 1)
    return kept, prefill


def test_another_conductor_goes_on_with_a_prefill() -> None:
    """It promises the same, keeps the number of the call, and frees every lease at the end."""
    first, second = cluster("p0", "d0"), cluster("p0", "d0")
    kept, prefill = tracked(first)
    assert second.step(5, [kept.adopted()]) == []
    assert second.promised() == first.promised()
    [decode] = second.step(6, [PrefillEnded(R, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert decode.number == prefill.number + 1
    assert second.step(7, [DecodeEnded(R, decode.number)]) == [Release(R, (prefill.number,))]
    assert second.promised() == NOTHING


def test_a_fact_that_the_first_conductor_took_in_is_repeated() -> None:
    """Its answer may be lost with it: the second one answers the same fact again."""
    first, second = cluster("p0", "d0"), cluster("p0", "d0")
    kept, prefill = tracked(first)
    fact = PrefillEnded(R, prefill.number, final=False)
    kept.told(fact)
    first.step(2, [fact])
    [decode] = second.step(5, [kept.adopted(), *kept.facts])
    assert isinstance(decode, Decode)
    assert second.promised() == Promised(1, 0, 0, 1)


def test_a_decode_is_adopted_with_the_tokens_that_it_should_have() -> None:
    """Its length counts from when it began, not from when it was adopted."""
    first, second = cluster("p0", "d0"), cluster("p0", "d0")
    kept, prefill = tracked(first)
    fact = PrefillEnded(R, prefill.number, final=False)
    kept.told(fact)
    [decode] = first.step(2, [fact])
    assert isinstance(decode, Decode)
    kept.acted(decode, 2)
    assert not kept.facts
    second.step(10_000_000, [kept.adopted()])
    now = second.view.instances[InstanceId("d0")].residencies
    then = first.view.instances[InstanceId("d0")].residencies
    step_us = first.view.instances[InstanceId("d0")].cost.step_us
    passes = then.passes(10_000_000, step_us) - then.active[R].began_tokens
    assert passes > 0
    assert -now.active[R].began_tokens == pytest.approx(passes)
    assert second.promised() == Promised(1, 0, 0, 1)


def test_a_request_adopted_twice_is_counted_once() -> None:
    """A front may connect twice to one Conductor."""
    first, second = cluster("p0", "d0"), cluster("p0", "d0")
    kept, _ = tracked(first)
    second.step(5, [kept.adopted()])
    second.step(6, [kept.adopted()])
    assert second.promised() == first.promised()
    second.step(7, [ClientGone(R)])
    assert second.promised() == NOTHING


def test_an_adopted_request_waits_for_its_instances() -> None:
    """What it needs of an instance is promised when that joins; a decode waits for its instance."""
    first, second = cluster("p0", "d0"), cluster("p0")
    kept, prefill = tracked(first)
    second.step(5, [kept.adopted()])
    assert second.promised().prefills == 1
    assert second.promised().decodes == 0
    assert second.step(6, [PrefillEnded(R, prefill.number, final=False)]) == []
    [decode] = second.step(7, [Joined(info("d0", "decode"))])
    assert isinstance(decode, Decode)
    assert second.promised() == Promised(1, 0, 0, 1)


def test_an_instance_that_does_not_join_is_lost() -> None:
    """After the time that makes an instance dead, the call to it is aborted."""
    first, second = cluster("p0", "d0"), cluster("d0")
    kept, prefill = tracked(first)
    second.step(5, [kept.adopted(), Tick()])
    late_us = 5
    actions: list[Action] = []
    while not actions:
        late_us += 1_000_000
        actions = second.step(late_us, [Beat(InstanceId("d0"), 1, InstanceLoad()), Tick()])
    assert late_us > second.tuning.dead_after_us
    [abort] = actions
    assert isinstance(abort, Abort)
    assert abort.number == prefill.number
    assert fail(second, prefill, late_us + 1) == []  # it waits for an instance to join
    assert second.promised() == Promised(1, 0, 0, 0)


def test_members_that_came_and_went_are_noted() -> None:
    """A join, a new start, an orderly leave and a loss with its reason; read once."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [Joined(info("p0", "prefill", epoch=2)), Left(InstanceId("d0"), 1)])
    conductor.step(2, [Left(InstanceId("p0"), 2, "its host is gone"), Left(InstanceId("x"), 1)])
    assert [(it.instance, it.what, it.why) for it in conductor.member_changes()] == [
        ("d0", "join", ""),
        ("p0", "join", ""),
        ("p0", "epoch", ""),
        ("d0", "leave", ""),
        ("p0", "loss", "its host is gone"),
    ]
    assert not conductor.member_changes()
