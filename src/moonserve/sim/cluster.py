"""The driver of a simulation: it feeds a trace to the Conductor of core and pretends the rest.

The live shell uses sockets and engines; this driver uses a heap of timed events. The facts of one
instant go into one step, actions become calls on nodes, and their results become facts. Commands
and bench/paper run it through `Simulation`. It decides nothing.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random

import msgspec

from moonserve.core.engine.batch import Progress
from moonserve.core.errors import BadRequest
from moonserve.core.kv.facts import BlocksCleared
from moonserve.core.request import Request
from moonserve.core.schedule.actions import (
    Abort,
    Action,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
    Spread,
)
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.events import Digest, Event, events
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    DecodeEnded,
    Fact,
    InstanceInfo,
    Joined,
    Left,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import BlockKey, Micros, RequestId, SegmentId, Tokens
from moonserve.sim.call import Call
from moonserve.sim.carrier import Carrier
from moonserve.sim.clock import VirtualClock
from moonserve.sim.cpp import Relay
from moonserve.sim.node import Node
from moonserve.sim.segments import Segments, full_keys, next_turns
from moonserve.sim.served import Sample, Served, first_of_decode_us, sample
from moonserve.sim.setup import MODEL, UNTOLD, Breakdown, Setup
from moonserve.sim.trace import Trace


class Simulation:
    """One simulation: call `run` once, then read the fields."""

    def __init__(self, trace: Trace, setup: Setup, keep_events: bool = False) -> None:
        setup.check()
        self.trace = trace
        self.setup = setup
        self.clock = VirtualClock()
        self.digest = Digest()
        self.events: list[Event] | None = [] if keep_events else None
        cost = setup.profile.cost()
        rng = Random(setup.seed)
        self.conductor = Conductor(
            setup.tuning, rng, lambda info: cost, self._length_of, clients_return=False
        )
        infos = setup.instances(trace.block_size)
        self.nodes = {info.id: self._node(info, cost) for info in infos}
        self._in_order = list(self.nodes.values())
        self.prefills = [node for node in self._in_order if node.info.role != "decode"]
        self.decodes = [node for node in self._in_order if node.info.role != "prefill"]
        self.segments = Segments(setup, self.prefills, self.decodes)
        self.carrier = Carrier(
            setup, trace.block_size, self.clock, self.nodes, self.segments, self._tell
        )
        self.served: list[Served] = []
        self.samples: list[Sample] = []
        self._by_id: dict[RequestId, Served] = {}
        self._rows = iter(trace.rows)
        self._coming = next(self._rows, None)
        self._tails: dict[str, Served | None] = {n.name: None for n in self.prefills}
        self._facts: list[Fact] = [Joined(info) for info in infos]
        self._next_turns = next_turns(trace) if setup.keep_output else {}
        self._again = setup.first_token == "decode"
        self._pace = 1.0
        """How many times longer all work takes, for want of cores and of a fast machine."""
        self._paced = 0
        """How many of the setup's paces have begun."""
        self._looks_for = -1
        """The number of the one at whose beginning the clock stops."""
        self._awake = False
        self._wakes_us: Micros | None = None
        self._open = 0
        self._sampling = False
        for breakdown in setup.breakdowns:
            self.clock.at(breakdown.at_us, partial(self._break, breakdown))

    def run(self, stop: Callable[[], bool] | None = None) -> bool:
        """Run from the first arrival until nothing more can happen, and return True.

        `stop` is called from time to time. When it returns True, the run ends early and returns
        False.
        """
        with _no_collections():
            return self._run(stop)

    def _run(self, stop: Callable[[], bool] | None) -> bool:
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
        return Node(
            info,
            cost,
            self.clock,
            self._progress,
            self._began,
            self.setup.ahead,
            self._wake_us if self.setup.profile.cold_after_us else lambda: 0,
        )

    def _length_of(self, request: RequestId) -> Tokens:
        """The true output length of a request in tokens; only the oracle predictor asks for it."""
        return self._by_id[request].row.output_tokens

    # Time.

    def _cold(self) -> float:
        """How cold the machine is that all instances share; see Overhead.us."""
        after_us = self.setup.profile.cold_after_us
        if not after_us or any(node.computes for node in self._in_order):
            return 0.0
        ends = [node.ends[-1] for node in self._in_order if node.ends]
        if not ends:
            return 1.0
        idle_us = self.clock.now_us - max(ends)
        return idle_us / (idle_us + after_us)

    def _wake_us(self) -> Micros:
        return round(self.setup.profile.wake_us * self._cold())

    def _arrive(self) -> None:
        """Take all requests that arrive at this instant, and schedule the next arrival."""
        size = self.trace.block_size
        while self._coming is not None and self._coming.at_us <= self.clock.now_us:
            row = self._coming
            id = RequestId(f"r{len(self.served):06}")
            served = Served(id, row, full_keys(row, size), row.at_us)
            self.served.append(served)
            self._by_id[served.id] = served
            self._open += 1
            request = Request(
                served.id,
                MODEL,
                row.input_tokens,
                stopping=UNTOLD,
                priority=row.priority,
                tenant=row.tenant,
                arrived_us=row.at_us,
            )
            served.cold = self._cold()
            arrived = partial(self._tell, [Arrived(request, served.keys)])
            way_us = self.setup.profile.arrive.us(row.input_tokens, served.cold, self._pace)
            self.carrier.after(way_us, arrived)
            self._coming = next(self._rows, None)
        if self._coming is not None:
            self.clock.at(self._coming.at_us, self._arrive)
        if self._open and not self._sampling:
            self._sampling = True
            self._sample()

    def _sample(self) -> None:
        """Record queues and loads, and again later while a request is open: a trace may pause for
        years."""
        now_us = self.clock.now_us
        self.samples.append(sample(now_us, self.conductor.waiting, self._in_order))
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
        if not did and (self.setup.profile.cores or self.setup.paces):
            self._set_pace()
        return did

    def _set_pace(self) -> None:
        """All are slower if more instances compute than the machine has cores for, and in times in
        which the machine was slow."""
        busy = sum(node.computes for node in self._in_order)
        pace = max(1.0, busy / (self.setup.profile.cores or math.inf)) * self._machine_pace(busy)
        if pace != self._pace:
            self._pace = self.carrier.pace = pace
            for node in self._in_order:
                node.pace(pace)

    def _machine_pace(self, busy: int) -> float:
        """See Setup.paces. While an instance computes, the next change is looked at in time."""
        paces = self.setup.paces
        while self._paced < len(paces) and paces[self._paced].at_us <= self.clock.now_us:
            self._paced += 1
        if busy and self._paced < len(paces) and self._looks_for != self._paced:
            self._looks_for = self._paced
            self.clock.at(paces[self._paced].at_us, lambda: None)
        return paces[self._paced - 1].factor if self._paced else 1.0

    def _step(self) -> None:
        now_us = self.clock.now_us
        facts, self._facts = self._facts, []
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
                nodes = [self.nodes[share.instance] for share in decision.shares]
                nodes.append(self.nodes[decision.decode])
                # if no node had the call, it has failed already
                if any(node.cancel(served.id) for node in nodes):
                    self._failed(served, number)
            case Spread():
                served.spread = action
                self.carrier.spread(action)
            case Refuse(why=why, reason=reason, decision=decision):
                served.outcome = "refused"
                served.why = why
                served.reason = reason
                served.decision = decision
                served.candidates = action.candidates
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
        decision, length = action.decision, action.decision.prompt_tokens
        served.was_placed(action, self._tails)
        served.called_us = self.clock.now_us
        served.call_us = self.setup.profile.call.us(length, served.cold, self._pace)
        nodes = [self.nodes[share.instance] for share in decision.shares]
        self._tails.update((node.name, served) for node in nodes)
        load = partial(self.carrier.load_prefix, served, nodes[0], decision)
        if decision.stages:
            form, size = self.setup.tuning.cpp_form, self.trace.block_size
            served.relay = Relay(self.carrier, action, nodes, form, size, load, self._send)
            served.relay.begin()
            return
        most = served.row.output_tokens - served.generated if decision.joint else 1
        keys = self._shared_keys(served)
        self._send(nodes[0], Call(served.id, action.number, length, length, most, load, keys))

    def _decode(self, served: Served, action: Decode) -> None:
        node, decision = self.nodes[action.to.id], served.decision
        served.decode_us = self.clock.now_us
        assert decision is not None
        # the Conductor may have held the call until now
        if not self._again and served.attempts == 1:
            served.first_us = served.prefilled_tokens_us[-1] = self.clock.now_us
        length = decision.prompt_tokens
        # the instance that the KV flowed to is gone
        if served.flow is not None and served.flow.target is not node:
            served.flow = self.carrier.whole_flow(served, node)
        most, known = served.row.output_tokens - served.generated, length
        if not self._again:  # the token that prefill made is known, and counts
            most, known = most + 1, length + 1
        load = partial(self.carrier.load_all, served, length)
        keys = self._shared_keys(served)
        call = Call(served.id, action.number, known, length, most, load, keys)
        served.calls.append((node, call))
        if self.setup.connector != "embedded":  # the engine keeps what it gets
            self._facts += self.segments.store(node, served.keys, 0, len(served.keys))
        self._send(node, call)

    def _shared_keys(self, served: Served) -> Sequence[BlockKey]:
        """Workers of ours load a copy of each prefix; in external engines requests share it."""
        return () if self.setup.connector == "embedded" else served.keys

    def _send(self, node: Node, call: Call) -> None:
        """Give a call to a node; a call that can never run there fails for good."""
        try:
            node.accept(call)
        except BadRequest as err:
            served = self._by_id[call.request]
            why = f"instance {node.name} answered 400: {err}"
            failed = CallFailed(served.id, call.number, why, False, call.known, served.keys)
            self._facts.append(failed)

    # What the nodes report.

    def _tell(self, facts: list[Fact]) -> None:
        self._facts += facts

    def _began(self, node: Node, call: Call) -> None:
        served = self._by_id[call.request]
        if served.relay is not None and call.part is not None:
            served.relay.began(node, call)
        self.carrier.began(served, call)

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
                if self.setup.embedded_store:
                    self._take_room(self.nodes[decision.prefill], served)
                self._facts.append(DecodeEnded(served.id, call.number, tokens))
            return
        size, relay = self.trace.block_size, served.relay
        first = step.computed_before // size
        begins = relay is None or call is relay.calls[0]
        if (decision.copies and begins) or self.segments.is_local(node, served.keys[:first]):
            first = 0  # the whole chain is used, not only what was computed
        last = min(step.computed_after // size, len(served.keys))
        if relay is None or self.setup.tuning.cpp_form == "chain" or call is relay.calls[-1]:
            self._facts += self.segments.store(node, served.keys, first, last)
        if decision.joint and step.token is not None:
            served.calls.append((node, call))  # what follows is its decode
            served.computed_us = call.computed_us
            self._prefilled(served, node, call)
        elif step.finish is not None:
            over = partial(self._prefilled, served, node, call)
            if relay is not None and call is not relay.calls[-1]:
                over = partial(self._staged, served, node, call)
            new = call.known - call.cached
            served.publish_us = self.setup.profile.publish.us(new, served.cold, self._pace)
            served.computed_us = call.computed_us
            back_us = served.call_us - served.call_us // 2 + served.publish_us
            over = partial(self.carrier.after, back_us, over)
            if relay is not None:
                relay.ended(call, over)
            else:
                over()

    def _staged(self, served: Served, node: Node, call: Call) -> None:
        """One member of a group has finished its part."""
        served.spend(call)
        if call.number == served.number:
            self._facts.append(StageEnded(served.id, call.number, node.info.id))

    def _keep_output(self, node: Node, served: Served) -> None:
        """Store the blocks of an output that the conversation's next turn begins with, if there is
        one.

        A trace does not name the blocks of an output, but the chain of the next turn does.
        """
        size = self.trace.block_size
        chain = self._next_turns.get(served.keys[-1], ()) if served.keys else ()
        row = served.row
        last = min(len(chain), (row.input_tokens + row.output_tokens) // size)
        if last > len(served.keys):
            self._facts += self.segments.store(node, chain, len(served.keys), last)

    def _take_room(self, near: Node, served: Served) -> None:
        """Take the room of the blocks that only this request has: of its output, and the partial
        one at the end of its prompt."""
        size, row = self.trace.block_size, served.row
        full = row.input_tokens // size
        count = (row.input_tokens + served.generated - 1) // size - full
        names = [f"{served.id}/{at}" for at in range(count + bool(row.input_tokens % size))]
        self._facts += self.segments.fill(near, [BlockKey(name.encode()) for name in names])

    def _prefilled(self, served: Served, node: Node, call: Call) -> None:
        if node.dead:
            self._failed(served, call.number, node)
            return
        now_us = self.clock.now_us
        served.spend(call)
        served.prefilled_us = now_us
        if served.first_us is None:
            served.first_us = now_us
            served.placed = served.decision
            served.placed_among = served.candidates
            first = call if served.relay is None else served.relay.calls[0]
            served.cached = first.cached
            # some blocks came while it was prefilled
            served.available = max(served.available, first.cached)
        final = served.generated + 1 >= served.row.output_tokens
        joint = served.decision is not None and served.decision.joint
        if not joint and (final or not self._again):
            served.generated += 1
            served.prefilled_tokens_us.append(now_us)
        self._facts.append(PrefillEnded(served.id, call.number, final))

    def _failed(self, served: Served, number: int, who: Node | None = None) -> None:
        """A call has failed; if it belongs to a group, the calls of all other members fail too."""
        relay, member = served.relay, None
        if relay is not None and number == served.number:
            member = None if who is None else who.info.id
            relay.over = True
            for node, call in zip(relay.nodes, relay.calls, strict=True):
                node.cancel(served.id)
                served.spend(call)
        for _, call in served.calls[-1:]:
            if call.number == number:
                served.generated += sum(last - first for first, last in call.spans)
        served.wasted_us = served.prefill_us
        length = served.row.input_tokens + served.generated
        failed = CallFailed(
            served.id,
            number,
            "instance lost",
            True,
            length,
            served.keys,
            member=member,
            died=0 if who is None else who.info.epoch,
        )
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
                if call.number == served.number:  # it was a prefill call: what it computed is lost
                    served.spend(call)
                self._failed(served, call.number, node)
            for served in self.served:
                if served.relay is not None and served.relay.needs(node):
                    self._failed(served, served.number, node)
        elif breakdown.what == "join" and node.dead:
            self._revive(node)

    def _revive(self, old: Node) -> None:
        """The instance comes back with an empty memory and a new epoch."""
        info = msgspec.structs.replace(old.info, epoch=old.info.epoch + 1)
        node = self._node(info, self.setup.profile.cost())
        node.busy_us = old.busy_us  # counted by place, not by start
        self.nodes[info.id] = node
        for nodes in (self._in_order, self.prefills, self.decodes):
            if old in nodes:
                nodes[nodes.index(old)] = node
        self._facts.append(Joined(info))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Let Python look for no cycles of garbage: a run keeps nearly all that it makes until its end,
    and each look would go through all of that."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
