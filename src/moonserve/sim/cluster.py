"""The driver: a trace against core's Conductor, with instances, caches and links made up.

What the live shell does with sockets and engines is done here with a heap: facts of one instant go
into one step, actions become calls on nodes, outcomes become facts. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from moonserve.core.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse, Release, Spread
from moonserve.core.batch import Progress
from moonserve.core.conductor import Conductor
from moonserve.core.cost import Cost
from moonserve.core.errors import BadRequest
from moonserve.core.events import Digest, Event, events
from moonserve.core.facts import (
    Arrived,
    BlocksCleared,
    CallFailed,
    DecodeEnded,
    Fact,
    InstanceInfo,
    Joined,
    Left,
    PrefillEnded,
)
from moonserve.core.placement import Decision
from moonserve.core.request import Counted, Request
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId, Tokens
from moonserve.sim.clock import Clock
from moonserve.sim.network import Network
from moonserve.sim.node import Call, Node
from moonserve.sim.segments import Segments, full_keys, next_turns
from moonserve.sim.served import Flow, Sample, Served, first_of_decode_us
from moonserve.sim.setup import MODEL, POOL, UNTOLD, Breakdown, Setup
from moonserve.sim.spreading import Spreading
from moonserve.sim.trace import Trace


class Simulation:
    """One run; `run` it once, then read what it left."""

    def __init__(self, trace: Trace, setup: Setup, keep_events: bool = False) -> None:
        setup.check()
        self.trace = trace
        self.setup = setup
        self.clock = Clock()
        self.digest = Digest()
        self.events: list[Event] | None = [] if keep_events else None
        cost = setup.profile.cost()
        rng = Random(setup.seed)
        self.conductor = Conductor(setup.tuning, rng, lambda info: cost, self._length_of)
        infos = setup.instances(trace.block_size)
        self.nodes = {info.id: self._node(info, cost) for info in infos}
        self._in_order = list(self.nodes.values())
        self.prefills = [node for node in self._in_order if node.info.role != "decode"]
        self.decodes = [node for node in self._in_order if node.info.role != "prefill"]
        rate, base_us = setup.profile.link_bytes_per_s, round(setup.profile.load_base_us)
        racks, far = {str(info.id): info.rack for info in infos}, setup.tuning.cross_rack
        self.network = Network(self.clock, rate, frozenset({POOL}), base_us, racks, far)
        self.segments = Segments(setup, self.prefills, self.decodes)
        self.served: list[Served] = []
        self.samples: list[Sample] = []
        self.copied_blocks = 0
        self._by_id: dict[RequestId, Served] = {}
        self._rows = iter(trace.rows)
        self._coming = next(self._rows, None)
        self._tails: dict[str, Served | None] = {n.name: None for n in self.prefills}
        self._facts: list[Fact] = [Joined(info) for info in infos]
        self._spreading = Spreading(self.network, self.segments, self._facts)
        self._next_turns = next_turns(trace) if setup.keep_output else {}
        self._again = setup.first_token == "decode"
        self._way_us = round(setup.profile.call_us / 2)
        self._back_us = round(setup.profile.call_us / 2 + setup.profile.hand_over_us)
        self._awake = False
        self._wakes_us: Micros | None = None
        self._open = 0
        self._sampling = False
        for breakdown in setup.breakdowns:
            self.clock.at(breakdown.at_us, partial(self._break, breakdown))

    def run(self, stop: Callable[[], bool] | None = None) -> bool:
        """From the first arrival until nothing is left to happen; then True.

        `stop` is asked from time to time; False when it said to leave the rest.
        """
        self.clock.at(0, self._arrive)
        until_us = None if stop is None else self.setup.sample_us
        while self.clock.run(self._settle, until_us):
            assert stop is not None
            assert until_us is not None
            if stop():
                return False
            until_us = max(until_us, self.clock.next_us) + self.setup.sample_us
        for served in self.served:
            if served.outcome == "running":
                served.outcome = "failed"
                served.why = "it waits for instances that never came back"
        return True

    def _node(self, info: InstanceInfo, cost: Cost) -> Node:
        return Node(info, cost, self.clock, self._progress, self._began, self.setup.ahead)

    def _length_of(self, request: RequestId) -> Tokens:
        """For the oracle alone."""
        return self._by_id[request].row.output_tokens

    # Time.

    def _after(self, us: Micros, call: Callable[[], None]) -> None:
        """Call so much later; at once where that is nothing."""
        if us:
            self.clock.at(self.clock.now_us + us, call)
        else:
            call()

    def _arrive(self) -> None:
        """All requests of this instant; the next arrival is scheduled."""
        size = self.trace.block_size
        while self._coming is not None and self._coming.at_us <= self.clock.now_us:
            row = self._coming
            served = Served(len(self.served), row, full_keys(row, size))
            self.served.append(served)
            self._by_id[served.id] = served
            self._open += 1
            prompt = Counted(row.input_tokens)
            request = Request(served.id, MODEL, prompt, stopping=UNTOLD)
            self._facts.append(Arrived(request, served.keys))
            self._coming = next(self._rows, None)
        if self._coming is not None:
            self.clock.at(self._coming.at_us, self._arrive)
        if self._open and not self._sampling:
            self._sampling = True
            self._sample()

    def _sample(self) -> None:
        """Look, and look again while somebody is served: a trace may pause for years."""
        now_us = self.clock.now_us
        self.samples.append(Sample(now_us, self.conductor.waiting, self._in_order))
        goes_on = self._facts or self.clock.pending or any(n.stirred for n in self._in_order)
        self._sampling = bool(goes_on and self._open)
        if self._sampling:
            self.clock.at(now_us + self.setup.sample_us, self._sample)

    def _settle(self) -> bool:
        if self._facts or self._awake:
            self._step()
            return True
        did = False
        for node in self._in_order:
            if node.stirred:
                did |= node.settle()
        return did

    def _step(self) -> None:
        now_us = self.clock.now_us
        facts = self._facts.copy()
        self._facts.clear()
        self._awake = False
        actions = self.conductor.step(now_us, facts)
        happened = events(now_us, facts, actions)
        self.digest.take(happened)
        if self.events is not None:
            self.events += happened
        for action in actions:
            self._act(action)
        wakes_us = self.conductor.wake_us(now_us)
        if wakes_us is not None and (
            self._wakes_us is None or not now_us < self._wakes_us <= wakes_us
        ):
            self._wakes_us = wakes_us
            self.clock.at(wakes_us, self._wake)

    def _wake(self) -> None:
        self._awake = True

    # What the Conductor wants.

    def _act(self, action: Action) -> None:
        served = self._by_id[action.request]
        match action:
            case Prefill():
                self._prefill(served, action)
            case Decode():
                self._decode(served, action)
            case Abort(number=number):
                decision = served.decision
                assert decision is not None
                nodes = (self.nodes[decision.prefill], self.nodes[decision.decode])
                if any(node.cancel(served.id) for node in nodes):  # else it has failed already
                    self._failed(served, number)
            case Spread(to=to):
                served.spread = action
                self._spreading.begin(action, self.nodes[InstanceId(to)])
            case Refuse(why=why, reason=reason, decision=decision):
                served.outcome, served.why, served.decision = "refused", why, decision
                served.reason = reason
            case GiveUp(why=why):
                served.outcome, served.why = "failed", why
            case Release():
                self._open -= 1
                served.ended_us = self.clock.now_us
                if served.outcome == "running":
                    served.outcome = "completed"
                    if self._again:
                        served.first_us = first_of_decode_us(served) or served.first_us
                else:
                    served.wasted_us = served.prefill_us

    def _prefill(self, served: Served, action: Prefill) -> None:
        node, decision = self.nodes[action.to.id], action.decision
        served.was_placed(decision, action.number, self._tails)
        self._tails[node.name] = served
        length = decision.prompt_tokens
        load = partial(self._load_prefix, served, node, decision)
        self._send(node, Call(served.id, action.number, length, length, 1, load))

    def _decode(self, served: Served, action: Decode) -> None:
        node, decision = self.nodes[action.to.id], served.decision
        assert decision is not None
        if not self._again and served.attempts == 1:  # it may have been held until now
            served.first_us = served.prefilled_tokens_us[-1] = self.clock.now_us
        length = decision.prompt_tokens
        if served.flow is not None and served.flow.target is not node:  # that one is gone
            served.flow = self._flow(length, self.nodes[decision.prefill], node)
        most, known = served.row.output_tokens - served.generated, length
        if not self._again:  # the token that prefill made is known, and counts
            most, known = most + 1, length + 1
        load = partial(self._load_all, served, length)
        call = Call(served.id, action.number, known, length, most, load)
        served.calls.append((node, call))
        self._send(node, call)

    def _send(self, node: Node, call: Call) -> None:
        """Give a call to a node; one that could never run there has failed for good."""
        try:
            node.accept(call)
        except BadRequest as err:
            served = self._by_id[call.request]
            why = f"instance {node.name} answered 400: {err}"
            failed = CallFailed(served.id, call.number, why, False, call.known, served.keys)
            self._facts.append(failed)

    # KV.

    def _load_prefix(
        self, served: Served, node: Node, decision: Decision, done: Callable[[Tokens], None]
    ) -> None:
        """What is reused comes from the node's own segment, the rest from whoever holds it."""
        size = self.trace.block_size
        keys = served.keys[: decision.reused_tokens // size]
        fetch = self.setup.one_copy or decision.reused_tokens > decision.candidates[0].local_tokens
        local, remote = self.segments.find(node, keys, fetch)
        blocks = local + sum(remote.values())
        left = len(remote)

        def one_came() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                if decision.copies and remote and not node.dead:
                    self.copied_blocks += blocks - local
                    self._facts += self.segments.store(node, served.keys, 0, blocks, copies=True)
                done(blocks * size)

        if not remote:
            self._after(self._way_us, one_came)
        for source, count in remote.items():
            size = count * node.info.block_bytes
            sent = partial(self.network.send, source, node.name, size, one_came)
            self._after(self._way_us, sent)

    def _began(self, node: Node, call: Call) -> None:
        """A call's first pass begins: with overlap, its KV begins to move on."""
        served = self._by_id[call.request]
        decision = served.decision
        if not self.setup.overlap or decision is None or call.most != 1:
            return
        if served.flow is None and call.number == served.number:
            served.flow = self._flow(call.known, node, self.nodes[decision.decode])

    def _flow(self, tokens: Tokens, source: Node, target: Node) -> Flow:
        flow = Flow(target)
        if source is target:
            flow.there = True
        else:
            blocks = -(-tokens // self.trace.block_size)  # a partial one moves whole
            moved = blocks * target.info.block_bytes
            self.network.send(source.name, target.name, moved, flow.arrived)
        return flow

    def _load_all(self, served: Served, length: Tokens, done: Callable[[Tokens], None]) -> None:
        decision = served.decision
        assert decision is not None
        if served.flow is None:
            source, target = self.nodes[decision.prefill], served.calls[-1][0]
            served.flow = self._flow(length, source, target)
        here = partial(self._after, self._way_us, partial(done, length))
        if served.flow.there:
            here()
        else:
            served.flow.then = here

    # What nodes tell.

    def _progress(self, node: Node, call: Call, step: Progress) -> None:
        served = self._by_id[call.request]
        decision = served.decision
        assert decision is not None
        if served.calls and served.calls[-1][1] is call:
            if step.finish is not None:
                tokens = served.row.output_tokens
                served.generated = tokens
                if self.setup.keep_output:
                    self._keep_output(node, served)
                self._facts.append(DecodeEnded(served.id, call.number, tokens))
            return
        size = self.trace.block_size
        first = step.computed_before // size
        if decision.copies or self.segments.is_local(node, served.keys[:first]):
            first = 0  # the whole chain is used, not only what was computed
        last = min(step.computed_after // size, len(served.keys))
        self._facts += self.segments.store(node, served.keys, first, last)
        if step.finish is not None:
            self._after(self._back_us, partial(self._prefilled, served, node, call))

    def _keep_output(self, node: Node, served: Served) -> None:
        """What it generated is the beginning of the conversation's next turn, if there is one.

        A trace does not name the blocks of an output; the next turn's chain does.
        """
        size = self.trace.block_size
        chain = self._next_turns.get(served.keys[-1], ()) if served.keys else ()
        row = served.row
        last = min(len(chain), (row.input_tokens + row.output_tokens) // size)
        if last > len(served.keys):
            self._facts += self.segments.store(node, chain, len(served.keys), last)

    def _prefilled(self, served: Served, node: Node, call: Call) -> None:
        if node.dead:
            self._failed(served, call.number)
            return
        now_us = self.clock.now_us
        served.prefill_us += call.busy_us
        served.prefilled_us = now_us
        if served.first_us is None:
            served.first_us = now_us
            served.placed = served.decision
            served.cached = call.cached
            served.available = max(served.available, call.cached)  # some came meanwhile
        final = served.generated + 1 >= served.row.output_tokens
        if final or not self._again:
            served.generated += 1
            served.prefilled_tokens_us.append(now_us)
        self._facts.append(PrefillEnded(served.id, call.number, final))

    def _failed(self, served: Served, number: int) -> None:
        for _, call in served.calls[-1:]:
            if call.number == number:
                served.generated += sum(last - first for first, last in call.spans)
        served.wasted_us = served.prefill_us
        length = served.row.input_tokens + served.generated
        failed = CallFailed(served.id, number, "instance lost", True, length, served.keys)
        self._facts.append(failed)

    def _break(self, breakdown: Breakdown) -> None:
        node = next(n for n in self._in_order if n.name == breakdown.instance)
        if breakdown.what == "slow":
            node.slow_down(breakdown.factor)
        elif breakdown.what == "kill" and not node.dead:
            self._facts.append(Left(node.info.id, node.info.epoch))
            cleared = BlocksCleared(SegmentId(node.name), "dram", node.info.epoch)
            self._facts.append(cleared)
            self.segments.clear(node)
            for call in node.kill():
                served = self._by_id[call.request]
                if call.number == served.number:  # of prefill: what it computed is lost
                    served.prefill_us += call.busy_us
                self._failed(served, call.number)
        elif breakdown.what == "join" and node.dead:
            self._revive(node)

    def _revive(self, old: Node) -> None:
        """The same machine with nothing on it, and a new epoch."""
        info = msgspec.structs.replace(old.info, epoch=old.info.epoch + 1)
        node = self._node(info, self.setup.profile.cost())
        node.busy_us = old.busy_us  # counted by place, not by life
        self.nodes[info.id] = node
        for nodes in (self._in_order, self.prefills, self.decodes):
            if old in nodes:
                nodes[nodes.index(old)] = node
        self._facts.append(Joined(info))
