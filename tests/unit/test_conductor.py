"""The Conductor's step, fact by fact."""

from moonserve.core.conductor import Abort, Conductor, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.facts import (
    Arrived,
    Beat,
    BlockStored,
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceLoad,
    Joined,
    Left,
    PrefillEnded,
    Tick,
)
from moonserve.core.prefix import chain_keys
from moonserve.core.request import Request
from moonserve.core.units import InstanceId, RequestId, SegmentId
from moonserve.core.view import Promised
from tests.support.cluster import BLOCK, NAMESPACE, info

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
    return Arrived(Request(RequestId(name), "m", PROMPT), KEYS)


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
    assert conductor.step(3, [DecodeEnded(R, decode.number)]) == [Release(R)]
    assert conductor.promised() == NOTHING


def test_one_token_needs_no_decode() -> None:
    """A final prefill ends the life."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    assert conductor.step(2, [PrefillEnded(R, prefill.number, final=True)]) == [Release(R)]
    assert conductor.promised() == NOTHING


def test_nobody_alive_is_refused_at_once() -> None:
    """Without a decode instance nothing is spent on a prefill."""
    conductor = cluster("p0")
    refuse, release = conductor.step(1, [arrived()])
    assert refuse == Refuse(R, "no decode instance for model m is alive")
    assert release == Release(R)
    assert conductor.promised() == NOTHING


def test_the_client_may_leave_at_any_time() -> None:
    """Leaving releases all, in either phase; what the call says later is of no effect."""
    for decoding in (False, True):
        conductor = cluster("p0", "d0")
        [call] = conductor.step(1, [arrived()])
        assert isinstance(call, Prefill)
        if decoding:
            conductor.step(2, [PrefillEnded(R, call.number, final=False)])
        assert conductor.step(3, [ClientGone(R)]) == [Release(R)]
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
    assert last == [GiveUp(R, "reset"), Release(R)]
    assert conductor.promised() == NOTHING


def test_what_cannot_be_mended_is_not_retried() -> None:
    """retry=False gives up at once."""
    conductor = cluster("p0", "p1", "d0")
    [first] = conductor.step(1, [arrived()])
    assert isinstance(first, Prefill)
    last = conductor.step(2, [CallFailed(R, first.number, "400", False, 41, KEYS)])
    assert last == [GiveUp(R, "400"), Release(R)]


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
    """An instance not heard of is dropped; calls on it are aborted, its late beats ignored."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    beat = Beat(InstanceId("d0"), 1, InstanceLoad())
    assert conductor.step(5_000_000, [beat, Tick()]) == []
    [abort] = conductor.step(5_000_002, [Tick()])
    assert isinstance(abort, Abort)
    assert abort.number == prefill.number
    ended = conductor.step(5_000_003, [CallFailed(R, abort.number, abort.why, True, 41, KEYS)])
    assert [type(a) for a in ended] == [GiveUp, Release]
    conductor.step(5_000_004, [Beat(InstanceId("p0"), 1, InstanceLoad())])
    assert list(conductor.view.instances) == ["d0"]


def test_a_restart_is_another_epoch() -> None:
    """A new epoch aborts what ran there and forgets its promises; an old goodbye is ignored."""
    conductor = cluster("p0", "d0")
    conductor.step(1, [arrived()])
    [abort] = conductor.step(2, [Joined(info("p0", "prefill", epoch=2))])
    assert isinstance(abort, Abort)
    assert conductor.promised().prefills == 0
    assert conductor.step(3, [Left(InstanceId("p0"), 1)]) == []
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
        *[BlockStored(key, SegmentId("p1")) for key in KEYS],
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
