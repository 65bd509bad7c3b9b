"""A simulated instance by itself: whom it lets in, and when."""

from __future__ import annotations

import msgspec

from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.units import RequestId
from moonserve.sim.call import Call
from moonserve.sim.clock import VirtualClock
from moonserve.sim.node import Node
from moonserve.sim.setup import Setup


def test_the_room_of_one_cancelled_in_a_pass_is_seen_when_the_pass_ends() -> None:
    """Its blocks are free only then: who waits for them begins then, with nobody else's help."""
    profile = msgspec.structs.replace(PROFILES["a800"], kv_tokens=12 * 512)
    info = Setup(prefill=1, decode=1, profile=profile).instances(512)[0]
    clock = VirtualClock()
    begun: list[str] = []
    node = Node(
        info,
        profile.cost(),
        clock,
        lambda node, call, step: None,
        lambda node, call: begun.append(call.request),
        ahead=1,
    )
    for name, tokens in (("small", 512), ("large", 4_096), ("last", 4_096)):
        node.accept(Call(RequestId(name), 1, tokens, tokens, 2_000, lambda done: done(0)))
    clock.at(0, lambda: None)
    clock.at(1_000, lambda: node.cancel(RequestId("large")))
    clock.run(node.settle, 1_500_000)
    assert begun == ["small", "large", "last"]
