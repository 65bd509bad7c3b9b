"""KV on its way: prefixes to where they are reused, computed KV to where it is needed next.

sim.cluster calls it to move bytes over sim.network. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from moonserve.core.schedule.actions import Decision, Spread
from moonserve.core.schedule.facts import Fact, SpreadUpTo
from moonserve.core.units import Bytes, InstanceId, Micros, Tokens
from moonserve.sim.call import Call
from moonserve.sim.clock import VirtualClock
from moonserve.sim.network import Network
from moonserve.sim.node import Node
from moonserve.sim.segments import Segments
from moonserve.sim.served import Flow, Served
from moonserve.sim.setup import POOL, Setup


class Carrier:
    """Moves KV between nodes. It calls `tell` with the facts about blocks that segments now
    hold."""

    def __init__(
        self,
        setup: Setup,
        block_size: Tokens,
        clock: VirtualClock,
        nodes: Mapping[InstanceId, Node],
        segments: Segments,
        tell: Callable[[list[Fact]], None],
    ) -> None:
        self._setup = setup
        self._size = block_size
        self._clock = clock
        self._nodes = nodes
        self._segments = segments
        self._tell = tell
        rate, base_us = setup.profile.link_bytes_per_s, round(setup.profile.load_base_us)
        self.network = Network(clock, rate, frozenset({POOL}), base_us)
        self.way_us = round(setup.profile.call.base_us / 2)
        """The time of a call from the gateway to an instance that has nothing to load."""
        self.copied_blocks = 0
        self.pace = 1.0
        """How many times longer all work takes, for want of cores."""

    def after(self, us: Micros, call: Callable[[], None]) -> None:
        """Call after `us`; at once if that is 0."""
        if us:
            self._clock.at(self._clock.now_us + us, call)
        else:
            call()

    def move(self, source: str, target: Node, size: Bytes, done: Callable[[], None]) -> None:
        """Send bytes; between racks the transfer takes as long as a larger one."""
        sender = self._nodes.get(InstanceId(source))
        if sender is not None and sender.info.rack != target.info.rack:
            size = round(size * self._setup.tuning.cross_rack)
        self.network.send(source, target.name, size, done)

    def load_prefix(
        self, served: Served, node: Node, decision: Decision, done: Callable[[Tokens], None]
    ) -> None:
        """Load what is reused: first from the node's own segment, the rest from other holders."""
        size = self._size
        keys = served.keys[: decision.reused_tokens // size]
        fetch = self._setup.one_copy or decision.reused_tokens > decision.chosen.local_tokens
        local, remote = self._segments.find(node, keys, fetch)
        blocks = local + sum(remote.values())
        profile, prompt = self._setup.profile, served.row.input_tokens
        way_us = served.call_us // 2 + profile.turn.us(prompt, served.cold, self.pace)
        own_us = profile.own_load.us(local * size, served.cold, self.pace) if local else 0
        begins_us = self._clock.now_us + way_us
        left = len(remote) + bool(own_us)

        def one_came() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                served.load_us = self._clock.now_us - begins_us
                if decision.copies and remote and not node.dead:
                    self.copied_blocks += blocks - local
                    self._tell(self._segments.store(node, served.keys, 0, blocks, copies=True))
                done(blocks * size)

        if own_us or not remote:
            self.after(way_us + own_us, one_came)
        for source, count in remote.items():
            moved = count * node.info.block_bytes
            self.after(way_us, partial(self.move, source, node, moved, one_came))

    def spread(self, order: Spread) -> None:
        """Copy what the source still has of a hot prefix; the end of the copy is reported last."""
        to = self._nodes[InstanceId(order.to)]
        keys = order.keys[: self._segments.held(order.source, order.keys)]
        count = max(0, len(keys) - order.first)

        def came() -> None:
            if count and not to.dead:
                self._tell(self._segments.store(to, keys, order.first, len(keys), copies=True))
            self._tell([SpreadUpTo(order.number, 0)])

        self.move(order.source, to, count * to.info.block_bytes, came)

    def began(self, served: Served, call: Call) -> None:
        """A prefill's first pass begins: with overlap, its KV begins to move on."""
        decision = served.decision
        if not self._setup.overlap or decision is None or call.number != served.number:
            return
        if served.flow is None:
            served.flow = Flow(self._nodes[decision.decode], len(decision.shares))
        at = served.relay.calls.index(call) if served.relay is not None else 0
        self._hand_over(served, served.flow, at)

    def whole_flow(self, served: Served, target: Node) -> Flow:
        """Send all KV of the last prefill to the decode instance."""
        assert served.decision is not None
        shares = served.decision.shares
        flow = Flow(target, len(shares))
        for at in range(len(shares)):
            self._hand_over(served, flow, at)
        return flow

    def _hand_over(self, served: Served, flow: Flow, at: int) -> None:
        """One of the prefill instances sends its share of the KV; a partial block moves whole."""
        assert served.decision is not None
        shares, target = served.decision.shares, flow.target
        share, count = shares[at], len(shares)
        if share.instance == target.info.id:
            flow.arrived()
            return
        tokens = share.end - share.start if at else share.end
        if count > 1 and self._setup.tuning.cpp_form == "layers":
            tokens = -(-share.end // count)  # its share of the layers, of all tokens
        moved = -(-tokens // self._size) * target.info.block_bytes
        self.move(str(share.instance), target, moved, flow.arrived)

    def load_all(self, served: Served, length: Tokens, done: Callable[[Tokens], None]) -> None:
        """A decode call needs all the KV, which may be on its way already."""
        seated_us = self._clock.now_us
        if served.flow is None:
            served.flow = self.whole_flow(served, served.calls[-1][0])
        way_us = self._setup.profile.decode_call.us(served.row.input_tokens, 0.0, self.pace)

        def came() -> None:
            served.handover_load_us = self._clock.now_us - seated_us
            served.handover_call_us = way_us
            self.after(way_us, partial(done, length))

        if served.flow.there:
            came()
        else:
            served.flow.then = came
