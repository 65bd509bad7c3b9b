"""What other gateways have promised counts in a view, beside what an engine counts itself."""

from __future__ import annotations

import random

from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.external_load import NO_LOAD, NO_PEERS, ExternalLoad, peer_load
from moonserve.core.schedule.facts import Arrived, Joined, Leading, PeerPromised, Promises
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, RequestId
from tests.support.cluster import BLOCK, NAMESPACE, exact, info, view
from tests.support.hot import World

P0, D0 = InstanceId("p0"), InstanceId("d0")
PROMPT = tuple(range(41))


def promised(instance: InstanceId, epoch: int = 1, queue_us: int = 500) -> Promises:
    """One prefill, three decodes of which one runs."""
    return Promises(instance, epoch, queue_us, 1, 3, 60, 1, 20)


def test_several_gateways_promises_add_up() -> None:
    """Sums of what each reports, and when their prefills would be done."""
    assert peer_load([], 5) is NO_PEERS
    found = peer_load([promised(P0), promised(P0)], 1_000)
    assert found.until_us == 2_000
    assert found.promised == ExternalLoad(2, 6, 120)
    assert found.now == ExternalLoad(2, 2, 40)


def test_others_promises_count_in_every_reading_and_go_with_their_gateway() -> None:
    """Queue, TBT, slots and KV room count them; the ledger and our reports do not."""
    cluster = ClusterView()
    p0, d0 = view("p0", "prefill"), view("d0", "decode", max_seqs=4)
    for one in (p0, d0):
        cluster.add(one)
    before = (d0.tbt_us(10), d0.tbt_now_us(10), d0.room_tokens)
    cluster.take_promises("g1", [promised(P0), promised(D0)], 1_000)
    assert p0.queue_us(1_100) == 400, "others' work goes on while time passes"
    assert not p0.is_free(1_100, 0)
    assert d0.tbt_us(10) == before[0] + 3 * 10 + 60
    assert d0.tbt_now_us(10) == before[1] + 1 * 10 + 20
    assert d0.room_tokens == before[2] - 60
    p0.promise_prefill(RequestId("r"), 300, 30, 1_100)
    assert p0.queue_us(1_100) == 700, "behind ours and theirs"
    d0.promise_decode(RequestId("r"), 10)
    assert d0.room_tokens == -1, "four slots, three theirs and one ours"
    ledger = cluster.promised(1)
    assert (ledger.prefills, ledger.prefill_us, ledger.decodes) == (1, 300, 1)
    assert cluster.promises(1_200) == (
        Promises(D0, 1, 0, 0, 1, 10, 0, 0),
        Promises(P0, 1, 200, 1, 0, 0, 0, 0),
    )
    cluster.take_promises("g1", [], 1_300)
    assert (p0.external, d0.external, p0.queue_us(1_300)) == (NO_LOAD, NO_LOAD, 100)
    d0.end_decode(RequestId("r"), 1_300)
    assert (d0.tbt_us(10), d0.tbt_now_us(10), d0.room_tokens) == before


def test_what_is_told_replaces_what_was_and_another_start_is_not_meant() -> None:
    """Each report is complete; promises on an older epoch do not count for the newer one."""
    cluster = ClusterView()
    cluster.take_promises("g1", [promised(P0), promised(D0)], 0)
    p0 = view("p0", "prefill")
    cluster.add(p0)
    assert p0.queue_us(0) == 500, "told before it joined here"
    cluster.take_promises("g2", [promised(P0, queue_us=100)], 0)
    assert p0.queue_us(0) == 600
    cluster.take_promises("g1", [promised(D0)], 0)
    assert p0.queue_us(0) == 100
    again = InstanceView(info("p0", "prefill", epoch=2), 0)
    cluster.add(again)
    assert again.queue_us(0) == 0


def test_a_full_instance_is_full_whoever_filled_it() -> None:
    """max_requests counts the promises of all gateways."""
    one = view("p0", "both")
    most = one.info.max_requests
    one.take_peer_load(peer_load([Promises(P0, 1, 1, most, most, 1, 0, 0)], 0))
    assert not one.takes_prefill
    assert not one.takes_decode
    one.take_peer_load(NO_PEERS)
    assert one.takes_prefill
    assert one.takes_decode


def test_a_request_goes_where_no_other_gateway_sent_much() -> None:
    """The Conductor's decision sees a peer's promises, of embedded workers too."""
    conductor = Conductor(rng=random.Random(1), cost_of=exact)
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    conductor.step(0, [Joined(info(name, role)) for name, role in roles.items()])  # type: ignore[arg-type]
    keys = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))
    [first] = conductor.step(1, [Arrived(Request(RequestId("r1"), "m", len(PROMPT), PROMPT), keys)])
    assert isinstance(first, Prefill)
    assert first.to.id == "p0"
    other = Conductor(rng=random.Random(1), cost_of=exact)
    other.step(0, [Joined(info(name, role)) for name, role in roles.items()])  # type: ignore[arg-type]
    told_of = PeerPromised("g1", conductor.view.promises(2))
    [second, *_] = other.step(
        2, [told_of, Arrived(Request(RequestId("r2"), "m", len(PROMPT), PROMPT), keys)]
    )
    assert isinstance(second, Prefill)
    assert second.to.id == "p1"


def test_only_the_leader_has_hot_prefixes_copied() -> None:
    """Without the duty no copy begins; what was asked meanwhile is known when it comes."""
    world = World()
    world.hot.take(Leading(False))
    for _ in range(20):
        assert world.ask() == []
    world.hot.take(Leading(True))
    assert world.ask(), "it was hot already"
    world.hot.take(Leading(False))
    assert len(world.hot) == 1, "what is under way ends by itself"
