"""What the simulator records of each request and of each moment; sim.metrics makes tables of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.schedule.actions import Candidate, Decision, Prefill, Spread
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes, StageTimes, between
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
    cold: float = 0.0
    """How cold the machine was when it arrived; see Overhead.us."""
    called_us: Micros | None = None
    """When its last prefill call went out."""
    call_us: Micros = 0
    """How long that call was on its way, there and back."""
    load_us: Micros = 0
    """How long the KV that it reused took to come."""
    publish_us: Micros = 0
    """From its last pass until its KV was published."""
    computed_us: Micros = 0
    """How long the passes took that prefilled it."""
    decode_us: Micros | None = None
    """When its last decode call went out."""
    handover_call_us: Micros = 0
    """How long that call and its first token were on their ways."""
    handover_load_us: Micros = 0
    """How long its KV took to come, once it had a place."""
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

    def stages(self) -> StageTimes:
        """How long each stage took, as a gateway records it."""
        first_us = first_of_decode_us(self)
        prefill_us = between(self.called_us, self.prefilled_us)
        return StageTimes(
            waited_us=None if self.decision is None else self.decision.waited_us,
            prefill_us=prefill_us,
            parts=None if prefill_us is None else self._parts(prefill_us),
            handover_us=between(self.decode_us, first_us),
            decode_us=between(first_us, self.ended_us),
            total_us=between(self.arrived_us, self.ended_us),
            entry=self._entry(first_us),
        )

    def _entry(self, first_us: Micros | None) -> DecodeTimes | None:
        """None: its last decode call gave no token, or was not its first."""
        began_us = self.calls[0][1].began_us if len(self.calls) == 1 else None
        handover_us = between(self.decode_us, first_us)
        compute_us = between(began_us, first_us)
        if handover_us is None or compute_us is None:
            return None
        known_us = self.handover_call_us + self.handover_load_us + compute_us
        return DecodeTimes(
            queue_us=handover_us - known_us,
            load_us=self.handover_load_us,
            compute_us=compute_us,
        )

    def _parts(self, prefill_us: Micros) -> PrefillTimes | None:
        """None: several instances shared it."""
        if self.relay is not None:
            return None
        known_us = self.call_us + self.load_us + self.computed_us + self.publish_us
        return PrefillTimes(
            queue_us=prefill_us - known_us,
            load_us=self.load_us,
            compute_us=self.computed_us,
            publish_us=self.publish_us,
        )

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
