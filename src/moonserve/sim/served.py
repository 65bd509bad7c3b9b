"""What the simulator records of each request and of each moment; sim.metrics makes tables of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moonserve.core.schedule.actions import Prefill, Spread
from moonserve.core.schedule.decision import Candidate, Decision
from moonserve.core.units import BlockKey, Micros, RequestId, Tokens
from moonserve.sim.call import Call
from moonserve.sim.cpp import Relay
from moonserve.sim.node import Node
from moonserve.sim.trace import Row


class Served:
    """One request of the trace, and what became of it."""

    __slots__ = (
        "arrived_us", "attempts", "available", "cached", "calls", "candidates", "decision",
        "ended_us", "first_us", "flow", "generated", "id", "keys", "number", "outcome", "placed",
        "placed_among", "prefill_us", "prefilled_tokens_us", "prefilled_us", "reason", "relay",
        "row", "spread", "tails", "wasted_us", "why",
    )  # fmt: skip

    def __init__(self, number: int, row: Row, keys: tuple[BlockKey, ...]) -> None:
        self.id = RequestId(f"r{number:06}")
        self.row = row
        self.keys = keys
        self.arrived_us: Micros = row.at_us
        self.first_us: Micros | None = None
        self.ended_us: Micros | None = None
        self.prefilled_us: Micros | None = None
        """When its last prefill ended."""
        self.prefilled_tokens_us: list[Micros] = []
        """When each token came that a prefill streamed: one, and one more for each resumption."""
        self.outcome = "running"
        """completed, refused or failed."""
        self.why = ""
        """Why it was refused or failed."""
        self.reason = ""
        """The reason of a refusal, for programs."""
        self.generated: Tokens = 0
        """Tokens generated before the current call."""
        self.attempts = 0
        self.number = 0
        """The number of its last prefill call."""
        self.cached: Tokens = 0
        """Prompt tokens that its first prefill did not compute."""
        self.available: Tokens = 0
        """Prompt tokens that some instance held when it was placed."""
        self.prefill_us: Micros = 0
        """Engine time of its prefills."""
        self.wasted_us: Micros = 0
        """The part of `prefill_us` that was wasted."""
        self.calls: list[tuple[Node, Call]] = []
        """Its decode calls, in order."""
        self.decision: Decision | None = None
        """The last decision; for a refused request, what it would have been."""
        self.candidates: Sequence[Candidate] = ()
        """The candidates of that decision, the chosen one first."""
        self.placed: Decision | None = None
        """The decision that its first token came from."""
        self.placed_among: Sequence[Candidate] = ()
        """The candidates of that decision, likewise."""
        self.spread: Spread | None = None
        """The copy of its prefix that its placement called for."""
        self.flow: Flow | None = None
        self.relay: Relay | None = None
        """The group of its last prefill, if a group does it."""
        self.tails: tuple[tuple[str, Served | None], ...] = ()
        """For each prefill instance: the last request there when this one was placed."""

    def was_placed(self, action: Prefill, tails: Mapping[str, Served | None]) -> None:
        """A prefill call goes out; `tails`: the last request of each prefill instance."""
        decision = action.decision
        if not self.attempts:
            self.available = min(decision.pool_tokens, self.row.input_tokens - 1)
        self.attempts += 1
        self.number = action.number
        self.decision = decision
        self.candidates = action.candidates
        self.flow = None
        self.relay = None
        if self.first_us is None:
            self.tails = tuple(tails.items())

    def spend(self, call: Call) -> None:
        """A prefill call is over: count its engine time, once."""
        self.prefill_us += call.busy_us
        call.busy_us = 0

    @property
    def judged(self) -> Decision | None:
        """The decision with which the results are compared."""
        return self.placed or self.decision

    @property
    def judged_among(self) -> Sequence[Candidate]:
        """The candidates of that decision."""
        return self.placed_among if self.placed is not None else self.candidates


def first_of_decode_us(served: Served) -> Micros | None:
    """When decode gave its first token; None if it gave none."""
    return next((node.ends[call.spans[0][0]] for node, call in served.calls if call.spans), None)


class Flow:
    """KV on its way to a decode instance: `then` is called when it is there."""

    def __init__(self, target: Node, parts: int) -> None:
        self.target = target
        self._left = parts
        self.then: Callable[[], None] | None = None

    @property
    def there(self) -> bool:
        """Whether all of it has arrived."""
        return not self._left

    def arrived(self) -> None:
        """The last byte of one part has arrived."""
        self._left -= 1
        if self.there and self.then is not None:
            self.then()


class Sample:
    """Queues and loads at one moment."""

    __slots__ = ("at_us", "busy_us", "conductor", "running", "waiting")

    def __init__(self, at_us: Micros, conductor: int, nodes: Sequence[Node]) -> None:
        self.at_us = at_us
        self.conductor = conductor
        """Requests that wait at the Conductor."""
        self.waiting = [0 if node.dead else node.waiting for node in nodes]
        self.running = [0 if node.dead else node.running for node in nodes]
        self.busy_us = [node.busy_by_us() for node in nodes]
