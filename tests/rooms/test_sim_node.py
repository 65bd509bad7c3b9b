"""A simulated instance by itself: whom it lets in, and when."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

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


def test_a_pass_under_way_takes_longer_when_the_machine_is_shared() -> None:
    """The rest of the pass is stretched, then later ones; what is done stays done."""
    profile = PROFILES["a800"]
    info = Setup(prefill=1, decode=1, profile=profile).instances(512)[0]
    step_us = profile.cost().decode_step_us(1, 101)
    ends: dict[float, list[int]] = {}
    for factor in (1.0, 2.0):
        clock = VirtualClock()
        node = Node(info, profile.cost(), clock, lambda *_: None, lambda *_: None, ahead=1)
        node.accept(Call(RequestId("one"), 1, 101, 100, 9, lambda done: done(100)))
        clock.at(0, lambda: None)
        clock.at(step_us // 2, partial(node.pace, factor))
        clock.run(node.settle, 10_000_000)
        ends[factor] = list(node.ends)
    assert ends[1.0][0] == step_us
    assert ends[2.0][0] == step_us // 2 + 2 * (step_us - step_us // 2)
    gaps = [[b - a for a, b in pairwise(ends[factor])] for factor in (1.0, 2.0)]
    assert gaps[1] == [2 * gap for gap in gaps[0]]
