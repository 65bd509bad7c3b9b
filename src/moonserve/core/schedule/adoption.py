"""How a Conductor takes over requests that another Conductor has placed, when that one is gone.

A driver tracks each of its requests: the Conductor's last action for it, and the facts that the
driver has reported since. `Tracked` keeps these. When another Conductor leads, the driver sends it
`Adopted`, and then those facts once more. So no fact is lost, whether or not the first Conductor
took it in before it ended.

The facts before an action need no repetition: a call goes out only after the Conductor has taken in
how the one before it ended. Only failed calls leave something behind: the tokens known by then.
How often calls have failed is not handed over, so the attempts count anew.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decision, Decode, Prefill
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import BlockKey, Micros, Tokens

FactOfRequest: TypeAlias = PrefillEnded | StageEnded | DecodeEnded | CallFailed | ClientGone
"""Facts about one request that has arrived."""


class Adopted(msgspec.Struct, frozen=True, tag=True):
    """A request is under way that another Conductor has placed: count it, and promise it again.

    The state is that of its last call, `number`; facts about that call follow. A second Adopted of
    the same request replaces the first.
    """

    rank: ClassVar[int] = 3
    """After instances that join, before the facts about calls."""
    request: Request
    length: Tokens
    """Of the prompt and the tokens known when that call went out."""
    keys: tuple[BlockKey, ...]
    """Of these tokens."""
    begun: bool
    """Whether they include a token beyond the prompt."""
    decision: Decision
    number: int
    leases: tuple[int, ...]
    """The numbers of all prefill calls so far; each has a lease on the store."""
    decodes: bool
    """Whether that call is the decode; else the prefill."""
    called_us: Micros
    """When that call went out, by the Conductor's clock."""
    first_us: Micros | None = None
    """When the first token came; None: it has not, or the driver does not report it."""

    @property
    def subject(self) -> str:
        """What ties within a rank are ordered by."""
        return self.request.id


class Deposed(msgspec.Struct, frozen=True, tag=True):
    """Another Conductor leads, and has all requests: forget them, and release nothing."""

    rank: ClassVar[int] = 8
    """After all others, arrivals included."""
    subject: ClassVar[str] = ""


StepFact: TypeAlias = Fact | Adopted | Deposed
"""All facts that a Conductor takes in."""


class Tracked:
    """One request of a driver, so that another Conductor can adopt it.

    The driver of the request reports every action and every fact, in order.
    """

    __slots__ = (
        "_begun", "_called_us", "_decision", "_decodes", "_first_us", "_keys", "_leases",
        "_length", "_number", "facts", "keys", "request",
    )  # fmt: skip

    def __init__(self, request: Request, keys: tuple[BlockKey, ...]) -> None:
        self.request = request
        self.keys = keys
        """Of its prompt."""
        self.facts: list[FactOfRequest] = []
        """Those that were reported since the last call went out."""
        self._length = request.length
        self._keys = keys
        self._begun = False
        self._decision: Decision | None = None
        self._number = 0
        self._leases: list[int] = []
        self._decodes = False
        self._called_us: Micros = 0
        self._first_us: Micros | None = None

    @property
    def is_placed(self) -> bool:
        """Whether a call has gone out; else it is for another Conductor like a new request."""
        return self._decision is not None

    @property
    def awaits(self) -> bool:
        """Whether nothing happens for the request before the Conductor's next action."""
        return self._decision is None or any(
            isinstance(fact, CallFailed)
            or (isinstance(fact, PrefillEnded) and not (fact.final or self._decision.joint))
            for fact in self.facts
        )

    def acted(self, action: Prefill | Decode, now_us: Micros) -> None:
        """A call goes out."""
        for fact in self.facts:
            self._take(fact)
        self.facts.clear()
        self._number = action.number
        self._called_us = now_us
        if isinstance(action, Prefill):
            self._decision = action.decision
            self._leases.append(action.number)
            self._decodes = False
            return
        assert self._decision is not None, "a prefill goes before each decode"
        self._decodes = True
        if action.to.id != self._decision.decode:
            self._decision = msgspec.structs.replace(self._decision, decode=action.to.id)

    def told(self, fact: FactOfRequest) -> None:
        """The driver has reported this fact. One about an earlier call has no effect."""
        if isinstance(fact, ClientGone) or fact.number == self._number:
            self.facts.append(fact)

    def first_token(self, now_us: Micros) -> None:
        """The first token has come."""
        if self._first_us is None:
            self._first_us = now_us

    def adopted(self) -> Adopted:
        """What another Conductor needs; `facts` must follow. The request must be placed."""
        assert self._decision is not None, "a request without a call is like a new one"
        return Adopted(
            self.request,
            self._length,
            self._keys,
            self._begun,
            self._decision,
            self._number,
            tuple(self._leases),
            self._decodes,
            self._called_us,
            self._first_us,
        )

    def _take(self, fact: FactOfRequest) -> None:
        """Keep what a fact says about the tokens, since the Conductor has taken it in."""
        if isinstance(fact, CallFailed):
            self._begun |= fact.length > self._length
            self._length = fact.length
            self._keys = fact.keys
        elif isinstance(fact, PrefillEnded) and self._decision is not None:
            self._begun |= self._decision.connector == "embedded"
