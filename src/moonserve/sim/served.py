"""What the simulator records of each request and of each moment; sim.metrics makes tables of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.schedule.actions import Candidate, Decision, Prefill, Spread
from moonserve.core.units import BlockKey, Micros, RequestId, Tokens
from moonserve.sim.call import Call
from moonserve.sim.cpp import Relay
from moonserve.sim.node import Node
from moonserve.sim.trace import Row


class Served(msgspec.Struct, eq=False):
    """One request of the trace, and what became of it."""

    id: RequestId
    row: Row
    keys: tuple[BlockKey, ...]
    arrived_us: Micros
    first_us: Micros | None = None
    ended_us: Micros | None = None
    prefilled_us: Micros | None = None
    """When its last prefill ended."""
    prefilled_tokens_us: list[Micros] = []
    """When each token came that a prefill streamed: one, and one more for each resumption."""
    outcome: str = "running"
    """completed, refused or failed."""
    why: str = ""
    """Why it was refused or failed."""
    reason: str = ""
    """The reason of a refusal, for programs."""
    generated: Tokens = 0
    """Tokens generated before the current call."""
    attempts: int = 0
    number: int = 0
    """The number of its last prefill call."""
    cached: Tokens = 0
    """Prompt tokens that its first prefill did not compute."""
    available: Tokens = 0
    """Prompt tokens that some instance held when it was placed."""
    prefill_us: Micros = 0
    """Engine time of its prefills."""
    wasted_us: Micros = 0
    """The part of `prefill_us` that was wasted."""
    calls: list[tuple[Node, Call]] = []
    """Its decode calls, in order."""
    decision: Decision | None = None
    """The last decision; for a refused request, what it would have been."""
    candidates: Sequence[Candidate] = ()
    """The candidates of that decision, the chosen one first."""
    placed: Decision | None = None
    """The decision that its first token came from."""
    placed_among: Sequence[Candidate] = ()
    """The candidates of that decision, likewise."""
    spread: Spread | None = None
    """The copy of its prefix that its placement called for."""
    flow: Flow | None = None
    relay: Relay | None = None
    """The group of its last prefill, if a group does it."""
    tails: tuple[tuple[str, Served | None], ...] = ()
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


class Flow(msgspec.Struct, eq=False):
    """KV on its way to a decode instance: `then` is called when it is there."""

    target: Node
    left: int
    """Parts that have not arrived."""
    then: Callable[[], None] | None = None

    @property
    def there(self) -> bool:
        """Whether all of it has arrived."""
        return not self.left

    def arrived(self) -> None:
        """The last byte of one part has arrived."""
        self.left -= 1
        if self.there and self.then is not None:
            self.then()


class Sample(msgspec.Struct, frozen=True):
    """Queues and loads at one moment."""

    at_us: Micros
    conductor: int
    """Requests that wait at the Conductor."""
    waiting: list[int]
    running: list[int]
    busy_us: list[Micros]


def sample(at_us: Micros, conductor: int, nodes: Sequence[Node]) -> Sample:
    """The queues and loads of all nodes now."""
    waiting = [0 if node.dead else node.waiting for node in nodes]
    running = [0 if node.dead else node.running for node in nodes]
    return Sample(at_us, conductor, waiting, running, [node.busy_by_us() for node in nodes])
