"""What the simulator notes of each request and of each moment; sim.metrics makes tables of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moonserve.core.schedule.actions import Spread
from moonserve.core.schedule.placement import Decision
from moonserve.core.units import BlockKey, Micros, RequestId, Tokens
from moonserve.sim.call import Call
from moonserve.sim.cpp import Relay
from moonserve.sim.node import Node
from moonserve.sim.trace import Row


class Served:
    """One request of the trace, and what became of it."""

    __slots__ = (
        "arrived_us", "attempts", "available", "cached", "calls", "decision", "ended_us",
        "first_us", "flow", "generated", "id", "keys", "number", "outcome", "placed", "prefill_us",
        "prefilled_tokens_us", "prefilled_us", "reason", "relay", "row", "spread", "tails",
        "wasted_us", "why",
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
        """When each token came that prefill streamed: one, and one more for each resumption."""
        self.outcome = "running"
        """completed, refused or failed."""
        self.why = ""
        """For what, if refused or failed."""
        self.reason = ""
        """The same for programs, if refused."""
        self.generated: Tokens = 0
        """Before the call that is out."""
        self.attempts = 0
        self.number = 0
        """Of its last prefill call."""
        self.cached: Tokens = 0
        """Prompt tokens that its first prefill did not compute."""
        self.available: Tokens = 0
        """Prompt tokens that somebody held when it was placed."""
        self.prefill_us: Micros = 0
        """Engine time of its prefills."""
        self.wasted_us: Micros = 0
        """Of that, what came to nothing."""
        self.calls: list[tuple[Node, Call]] = []
        """Its decode calls, in order."""
        self.decision: Decision | None = None
        """The last one; where it was refused, what it would have been."""
        self.placed: Decision | None = None
        """The one that its first token came of."""
        self.spread: Spread | None = None
        """The copy of its prefix that its placement called for."""
        self.flow: Flow | None = None
        self.relay: Relay | None = None
        """Of its last prefill, if a group does it."""
        self.tails: tuple[tuple[str, Served | None], ...] = ()
        """Whom it would have queued behind on each prefill instance, when it was placed."""

    def was_placed(
        self, decision: Decision, number: int, tails: Mapping[str, Served | None]
    ) -> None:
        """Prefill call `number` goes out; `tails`: the last request of each prefill instance."""
        if not self.attempts:
            self.available = min(decision.pool_tokens, self.row.input_tokens - 1)
        self.attempts += 1
        self.number, self.decision, self.flow, self.relay = number, decision, None, None
        if self.first_us is None:
            self.tails = tuple(tails.items())

    def spend(self, call: Call) -> None:
        """A prefill call is over: its engine time counts, once."""
        self.prefill_us += call.busy_us
        call.busy_us = 0

    @property
    def judged(self) -> Decision | None:
        """The decision that what came is held against."""
        return self.placed or self.decision


def first_of_decode_us(served: Served) -> Micros | None:
    """When decode gave its first token; None where it gave none."""
    return next((node.ends[call.spans[0][0]] for node, call in served.calls if call.spans), None)


class Flow:
    """KV on its way to a decode instance: `then` is called when it is there."""

    def __init__(self, target: Node, parts: int) -> None:
        self.target = target
        self._left = parts
        self.then: Callable[[], None] | None = None

    @property
    def there(self) -> bool:
        """Whether all of it is."""
        return not self._left

    def arrived(self) -> None:
        """The last byte of one part is here."""
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
