"""Which external engines serve a request together, and the calls that follow."""

from __future__ import annotations

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request
from moonserve.core.schedule import explain
from moonserve.core.schedule.actions import GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    Connector,
    DecodeEnded,
    InstanceInfo,
    Joined,
    Left,
    PrefillEnded,
    Role,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, info

PROMPT = tuple(range(10 * BLOCK + 1))
KEYS = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))
NOTHING = Promised(0, 0, 0, 0)
R = RequestId("r")


def engine(name: str, role: Role, connector: Connector) -> InstanceInfo:
    """An external engine that holds its own KV."""
    own = {"connector": connector, "fetches": False, "segment": SegmentId(name), "layers": 0}
    return msgspec.structs.replace(info(name, role), **own)


def conductor(*engines: tuple[str, Role, Connector], **tuning: object) -> Conductor:
    """A Conductor with these."""
    it = Conductor(Tuning(**tuning))  # type: ignore[arg-type]
    it.step(0, [Joined(engine(*one)) for one in engines])
    return it


def holds(name: str, blocks: int) -> BlocksStored:
    """It has so much of PROMPT."""
    return BlocksStored(SegmentId(name), KEYS[:blocks], None, "device", 1)


def prefill(it: Conductor, whole: bool = False) -> Prefill:
    """PROMPT arrives; the call that is made."""
    [action] = it.step(1, [Arrived(Request(R, "m", len(PROMPT), PROMPT, whole=whole), KEYS)])
    assert isinstance(action, Prefill)
    return action


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding", "round_robin"])
def test_an_engine_without_connector_does_all_of_it(policy: str) -> None:
    """One call: its first token ends the prefill promise, its last the decode's; no Decode."""
    it = conductor(("a", "both", "none"), ("b", "both", "none"), policy=policy)
    call = prefill(it)
    assert (call.decision.joint, call.to.id) == (True, call.decision.decode)
    assert it.promised().decodes == it.promised().prefills == 1
    assert it.step(2, [PrefillEnded(R, call.number, final=False)]) == []
    assert it.promised() == Promised(1, 0, 0, 1)
    assert it.step(3, [DecodeEnded(R, call.number, 7)]) == [Release(R, (call.number,))]
    assert it.promised() == NOTHING


def test_a_pair_shares_a_connector() -> None:
    """An engine with another connector, or with none, cannot be the other half."""
    it = conductor(("d1", "decode", "sglang"), ("d2", "decode", "nixl"), ("p", "prefill", "nixl"))
    call = prefill(it)
    assert (call.to.id, call.decision.decode, call.decision.joint) == ("p", "d2", False)
    it.step(2, [Left(engine("d2", "decode", "nixl").id, 1)])
    assert it.step(3, [PrefillEnded(R, call.number, final=False)]) == []  # d1 could not fetch it
    [again] = it.step(4, [Joined(engine("d2", "decode", "nixl"))])
    assert isinstance(again, Prefill)


def test_one_that_nobody_decodes_for_is_not_asked() -> None:
    """A prefill instance without a decode instance is no candidate, and alone serves no request."""
    it = conductor(
        ("d", "decode", "nixl"), ("p1", "prefill", "mooncake"), ("p2", "prefill", "nixl")
    )
    assert prefill(it).to.id == "p2"
    it = conductor(("d", "decode", "sglang"), ("p1", "prefill", "mooncake"))
    [refusal, _] = it.step(1, [Arrived(Request(R, "m", len(PROMPT), PROMPT), KEYS)])
    assert isinstance(refusal, Refuse)


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding", "round_robin"])
def test_decode_serves_alone_where_no_prefill_instance_is_left(policy: str) -> None:
    """Then at once, with the reason in the record; a pair again when prefill is back."""
    it = conductor(("d", "decode", "nixl"), ("d2", "decode", "nixl"), policy=policy)
    call = prefill(it)
    assert call.decision.joint
    assert call.to.id == call.decision.decode
    assert "no prefill instance that hands KV to it is alive" in explain.why(
        call.decision, call.candidates
    )
    assert it.step(2, [PrefillEnded(R, call.number, final=False)]) == []
    [again] = it.step(3, [CallFailed(R, call.number, "broke", True, len(PROMPT), KEYS)])
    assert isinstance(again, Prefill)
    assert again.decision.joint
    assert again.to.id != call.to.id
    it.step(4, [PrefillEnded(R, again.number, final=False)])
    it.step(4, [DecodeEnded(R, again.number)])
    assert it.promised() == NOTHING
    it.step(5, [Joined(engine("p", "prefill", "nixl"))])
    back = prefill(it)
    assert (back.to.id, back.decision.joint) == ("p", False)


def test_prefill_that_dies_with_the_request_leaves_it_to_decode() -> None:
    """The request does not wait for the prefill instance to come back."""
    it = conductor(("d", "decode", "mooncake"), ("p", "prefill", "mooncake"))
    call = prefill(it)
    assert call.to.id == "p"
    actions = it.step(2, [Left(call.to.id, 1)])
    actions += it.step(3, [CallFailed(R, call.number, "broke", True, len(PROMPT), KEYS)])
    [again] = [it for it in actions if isinstance(it, Prefill)]
    assert (again.to.id, again.decision.joint) == ("d", True)


@pytest.mark.parametrize(
    ("alive", "says"),
    [
        ([], "no instance for model m is alive"),
        ([("p", "prefill", "nixl")], "no decode instance for model m is alive"),
        ([("d", "decode", "sglang")], "no prefill instance for model m is alive"),
        (
            [("p", "prefill", "nixl"), ("d", "decode", "sglang")],
            "no prefill and decode instance for model m have a connector in common",
        ),
    ],
)
def test_the_half_that_lacks_is_named(alive: list[tuple[str, Role, Connector]], says: str) -> None:
    """The refusal names the role that is missing."""
    [refusal, _] = conductor(*alive).step(1, [Arrived(Request(R, "m", len(PROMPT), PROMPT), KEYS)])
    assert isinstance(refusal, Refuse)
    assert refusal.why == says


@pytest.mark.parametrize(("held", "alone"), [(0, False), (5, False), (9, True), (10, True)])
def test_decode_that_has_nearly_all_of_it_gets_it_alone(held: int, alone: bool) -> None:
    """Only so many tokens are left to compute: no prefill elsewhere, no transfer."""
    it = conductor(("d", "decode", "nixl"), ("p", "prefill", "nixl"), alone_tokens=2 * BLOCK)
    if held:
        it.step(0, [holds("d", held)])
    call = prefill(it)
    assert call.decision.joint is alone
    assert call.to.id == ("d" if alone else "p")
    if alone:
        assert call.decision.reused_tokens == min(held, 10) * BLOCK


def test_a_request_for_one_call_goes_to_a_decode_instance() -> None:
    """Several choices cannot share what is handed on: one engine computes and decodes."""
    it = conductor(("d", "decode", "nixl"), ("p", "prefill", "nixl"))
    call = prefill(it, whole=True)
    assert (call.to.id, call.decision.joint, call.decision.reused_tokens) == ("d", True, 0)


def test_sglangs_decode_never_serves_alone() -> None:
    """Whatever it holds, and though the request is for one engine: it refuses who brings no room.
    Prefill meets each of several choices, so a pair serves these too."""
    pools: list[tuple[str, Role, Connector]] = [
        ("d", "decode", "sglang"),
        ("p", "prefill", "sglang"),
    ]
    for whole in (False, True):
        it = conductor(*pools, alone_tokens=2 * BLOCK)
        it.step(0, [holds("d", 10)])
        call = prefill(it, whole=whole)
        assert (call.to.id, call.decision.decode, call.decision.joint) == ("p", "d", False)


def test_a_request_for_one_engine_is_handed_to_nobody() -> None:
    """Where no decode instance takes a prefill now, it waits or is refused: KV has one reader."""
    it = conductor(("d", "decode", "nixl"), ("p", "prefill", "nixl"))
    d = it.view.instances[engine("d", "decode", "nixl").id]
    for number in range(d.info.max_requests):
        d.promise_prefill(RequestId(f"other{number}"), 1, 1, 0)
    assert prefill(it).to.id == "p", "who may be handed over is"
    request = Request(RequestId("second"), "m", len(PROMPT), PROMPT, whole=True)
    actions = it.step(2, [Arrived(request, KEYS)])
    assert not any(isinstance(action, Prefill) for action in actions), actions


def test_what_others_hold_is_no_source_for_who_cannot_fetch() -> None:
    """An external engine reuses its own prefix only, even if another has more."""
    it = conductor(("a", "both", "none"), ("b", "both", "none"), policy="kvcache_centric")
    it.step(0, [holds("b", 8)])
    call = prefill(it)
    assert (call.to.id, call.decision.reused_tokens) == ("b", 8 * BLOCK)
    [first, second] = call.candidates
    assert (second.instance, second.reused_tokens, second.holder) == ("a", 0, None)
    assert first.transfer_us == second.transfer_us == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_fails_is_made_elsewhere_or_given_up(begun: bool) -> None:
    """Before and after its first token alike, as the driver says; the ledger is zero at the end."""
    it = conductor(("a", "both", "none"), ("b", "both", "none"))
    call = prefill(it)
    if begun:
        it.step(2, [PrefillEnded(R, call.number, final=False)])
    [again] = it.step(3, [CallFailed(R, call.number, "broke", True, len(PROMPT), KEYS)])
    assert isinstance(again, Prefill)
    assert again.to.id != call.to.id
    failed = CallFailed(R, again.number, "broke", False, len(PROMPT), KEYS)
    assert it.step(4, [failed])[0] == GiveUp(R, "broke")
    assert it.promised() == NOTHING


def test_an_engine_that_left_still_ends_its_call() -> None:
    """Its goodbye takes it out of the view; what it serves goes on to its end."""
    it = conductor(("a", "both", "none"))
    call = prefill(it)
    it.step(2, [Left(call.to.id, 1)])
    assert it.step(3, [PrefillEnded(R, call.number, final=False)]) == []
    assert it.step(4, [DecodeEnded(R, call.number)]) == [Release(R, (call.number,))]
    assert it.promised() == NOTHING
