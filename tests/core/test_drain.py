"""An instance that an operator drains: it finishes what it has and gets nothing new."""

import pytest

from moonserve.core.schedule.actions import Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import (
    Arrived,
    DecodeEnded,
    Draining,
    Joined,
    PrefillEnded,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId
from tests.core.test_conductor import arrived, cluster, fail
from tests.support.cluster import info


def order(name: str, drains: bool = True, epoch: int = 1) -> Draining:
    """An operator's order."""
    return Draining(InstanceId(name), epoch, drains)


def test_what_it_has_goes_on_and_nothing_new_comes() -> None:
    """A request with a prefill and a decode promised there ends there; the next goes elsewhere."""
    conductor = cluster("p0", "d0")
    [prefill] = conductor.step(1, [arrived()])
    assert isinstance(prefill, Prefill)
    conductor.step(2, [order("p0"), order("d0")])
    conductor.step(3, [Joined(info("p1", "prefill")), Joined(info("d1", "decode"))])
    [decode] = conductor.step(4, [PrefillEnded(prefill.request, prefill.number, final=False)])
    assert isinstance(decode, Decode)
    assert decode.to.id == "d0"
    [other] = conductor.step(5, [arrived("s")])
    assert isinstance(other, Prefill)
    assert (other.to.id, other.decode.id) == ("p1", "d1")
    conductor.view.check()
    conductor.step(6, [DecodeEnded(prefill.request, decode.number, 2)])
    assert conductor.promised().requests == 1
    assert conductor.view.instances[InstanceId("d0")].decodes == 0


@pytest.mark.parametrize("policy", ["kvcache_centric", "late_binding"])
def test_a_drained_cluster_refuses_and_serves_again(policy: str) -> None:
    """The refusal says why; after the order is taken back, all is as before."""
    conductor = Conductor(Tuning(policy=policy))
    conductor.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
    refuse, _ = conductor.step(1, [order("p0"), order("d0"), arrived()])
    assert isinstance(refuse, Refuse)
    assert (refuse.reason, refuse.why) == (
        "nobody_alive",
        "no instance for model m gets new work; drained: d0, p0;"
        " `moonserve drain NAME --resume` for each",
    )
    conductor.step(2, [order("d0", drains=False)])
    refuse, _ = conductor.step(3, [arrived()])
    assert isinstance(refuse, Refuse)
    assert refuse.why == (
        "no prefill instance for model m gets new work; drained: p0; `moonserve drain p0 --resume`"
    )
    [prefill] = conductor.step(4, [order("p0", drains=False), arrived()])
    assert isinstance(prefill, Prefill)
    conductor.view.check()


def test_a_refusal_names_the_first_drained_instances_and_how_many_more() -> None:
    """A large cluster would make it long. One that can prefill is enough."""
    names = [f"p{i}" for i in range(5)]
    conductor = Conductor(Tuning())
    conductor.step(0, [Joined(info(name, "prefill")) for name in names])
    conductor.step(1, [Joined(info("d0", "decode"))])
    refuse, _ = conductor.step(2, [*map(order, names), arrived()])
    assert isinstance(refuse, Refuse)
    assert refuse.why == (
        "no prefill instance for model m gets new work; drained: p0, p1, p2 and 2 more;"
        " `moonserve drain NAME --resume` for one of them"
    )


def test_an_order_holds_for_one_start() -> None:
    """It is kept until that start joins; a later start serves; an order for another start is of no
    effect."""
    conductor = cluster("d0")
    conductor.step(1, [order("p0", epoch=2), order("d0", epoch=7)])
    assert isinstance(conductor.step(2, [Joined(info("p0", "prefill", 2)), arrived()])[0], Refuse)
    assert conductor.view.instances[InstanceId("p0")].drained
    [prefill] = conductor.step(3, [Joined(info("p0", "prefill", 3)), arrived()])
    assert isinstance(prefill, Prefill)
    assert conductor.promised() == Promised(1, 1, conductor.promised().prefill_us, 1)


def test_orders_are_noted_once() -> None:
    """For the lane of events: repeated orders change nothing."""
    conductor = cluster("p0")
    conductor.member_changes()
    conductor.step(1, [order("p0")])
    conductor.step(2, [order("p0"), order("x")])
    conductor.step(3, [order("p0", drains=False), order("p0", drains=False)])
    changes = [(it.instance, it.what) for it in conductor.member_changes()]
    assert changes == [("p0", "drain"), ("p0", "resume")]


def test_requests_that_wait_go_where_work_is_allowed_again() -> None:
    """A request that lost its instance waits; it goes on when a drained one serves again."""
    conductor = cluster("p0", "p1", "d0")
    conductor.step(1, [order("p1")])
    [prefill] = conductor.step(2, [arrived()])
    assert isinstance(prefill, Prefill)
    assert fail(conductor, prefill, 3, unreachable=True) == []
    [again] = conductor.step(4, [order("p1", drains=False)])
    assert isinstance(again, Prefill)
    assert again.to.id == "p1"


def test_the_arrival_of_the_same_instant_is_not_placed_there() -> None:
    """Orders are taken before arrivals."""
    conductor = cluster("p0", "p1", "d0")
    facts = [arrived(), order("p0")]
    [prefill] = conductor.step(1, facts)
    assert isinstance(facts[0], Arrived)
    assert isinstance(prefill, Prefill)
    assert prefill.to.id == "p1"
