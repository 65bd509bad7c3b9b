"""Requests that only some instances may serve, as a proxy says: Request.among."""

from __future__ import annotations

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Action, Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    ClientGone,
    Connector,
    InstanceInfo,
    Joined,
    PrefillEnded,
    Role,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, info

PROMPT = tuple(range(10 * BLOCK + 1))
KEYS = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))


def engine(name: str, role: Role, connector: Connector) -> InstanceInfo:
    """An external engine that holds its own KV."""
    own = {"connector": connector, "fetches": False, "segment": SegmentId(name), "layers": 0}
    return msgspec.structs.replace(info(name, role), **own)


def cluster(count: int, policy: str = "kvcache_centric") -> Conductor:
    """Engines e00, e01, … that serve whole requests."""
    it = Conductor(Tuning(policy=policy))
    it.step(0, [Joined(engine(f"e{n:02}", "both", "none")) for n in range(count)])
    return it


def arrived(*among: str, name: str = "r") -> Arrived:
    """PROMPT, for these instances only."""
    ids = tuple(map(InstanceId, among))
    return Arrived(Request(RequestId(name), "m", len(PROMPT), PROMPT, among=ids), KEYS)


def placed(actions: list[Action]) -> list[tuple[str, str]]:
    """The requests that were placed, each with its instance."""
    return [(it.request, it.to.id) for it in actions if isinstance(it, Prefill)]


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
@pytest.mark.parametrize("count", [3, 40])
def test_only_the_instances_that_a_request_may_use_get_it(policy: str, count: int) -> None:
    """Another instance that holds the whole prompt does not get it."""
    it = cluster(count, policy)
    it.step(1, [BlocksStored(SegmentId("e00"), KEYS, None, "device", 1)])
    assert placed(it.step(2, [arrived(name="free")])) == [("free", "e00")]
    assert placed(it.step(3, [arrived("e02", name="bound")])) == [("bound", "e02")]
    it.view.check()


def test_of_several_it_goes_to_the_holder() -> None:
    """Within its instances a request is placed as any other."""
    it = cluster(40)
    for name, blocks in (("e00", 10), ("e20", 4), ("e30", 8)):
        it.step(1, [BlocksStored(SegmentId(name), KEYS[:blocks], None, "device", 1)])
    assert placed(it.step(2, [arrived("e20", "e30", "e31")])) == [("r", "e30")]


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
def test_a_request_without_an_instance_is_refused(policy: str) -> None:
    """If none of its instances is alive, it is refused at once, with the reason."""
    it = cluster(3, policy)
    refusal = it.step(1, [arrived("gone")])[0]
    assert isinstance(refusal, Refuse)
    assert refusal.reason == "nobody_alive"
    assert refusal.why.startswith("of those that the request may use, no instance for model m")


def test_after_a_failure_it_stays_with_its_instances() -> None:
    """A request whose only instance failed it is not placed on another one."""
    it = cluster(3)
    it.step(1, [arrived("e01")])
    failed = CallFailed(RequestId("r"), 1, "no", True, len(PROMPT), KEYS)
    assert placed(it.step(2, [failed])) == [("r", "e01")]


def test_a_bound_request_that_waits_lets_others_pass() -> None:
    """With late binding, a request whose instance is busy does not keep others from free ones."""
    it = cluster(2, "late_binding")
    assert placed(it.step(1, [arrived("e00", name="a")])) == [("a", "e00")]
    assert placed(it.step(2, [arrived("e00", name="b"), arrived("e01", name="c")])) == [
        ("c", "e01")
    ]
    later = it.step(3, [ClientGone(RequestId("a"))])
    assert placed(later) == [("b", "e00")]


def test_prefill_and_decode_are_both_among_them() -> None:
    """The two instances of one request are both chosen from those that it may use."""
    it = Conductor(Tuning())
    roles: list[tuple[str, Role]] = [
        ("d0", "decode"),
        ("d1", "decode"),
        ("p0", "prefill"),
        ("p1", "prefill"),
    ]
    it.step(0, [Joined(engine(name, role, "nixl")) for name, role in roles])
    it.step(1, [BlocksStored(SegmentId("p0"), KEYS, None, "device", 1)])
    [first] = it.step(2, [arrived("p1", "d1")])
    assert isinstance(first, Prefill)
    assert (first.to.id, first.decode.id) == ("p1", "d1")
    [then] = it.step(3, [PrefillEnded(RequestId("r"), first.number, False)])
    assert isinstance(then, Decode)
    assert then.to.id == "d1"
