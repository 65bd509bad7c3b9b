"""Messages between a front and its Conductor, as notices of live.rpc.

Facts and actions of core travel as they are. Of a prompt only the length travels: the Conductor
reads no tokens. Two hosts have two clocks, so no time of a clock travels, only ages. Both ends send
a beat every second, so that each notices a process that hangs, or a host that is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from moonserve.core.request import Request, Slo, Stopping, TraceContext
from moonserve.core.schedule.actions import Abort, Decision, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.adoption import Adopted, FactOfRequest, Tracked
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.observed import Part
from moonserve.core.schedule.record import Measured
from moonserve.core.units import BlockKey, InstanceId, Micros, RequestId, SegmentId, Tokens
from moonserve.live.access.keys import KeyLimits
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.openai.trace_context import SamplingRule
from moonserve.live.ports import DriverFact
from moonserve.live.rpc.connection import ConnectionLimits

PROTOCOL = "moonserve-fronts/8"
PATH = "/internal/front"
"""Where a Conductor's HTTP server switches a front's connection to rpc."""
LIMITS = ConnectionLimits(frame_bytes=256 << 20, unread_bytes=256 << 20, beat_s=1.0, missed_beats=5)
COUNT = "count"
"""The one operation: a front returns the list of Family that it has counted."""


ENTER = "enter"
"""An operation at the Conductor's process: Enter in, Entered out. See access.meter."""


class Enter(msgspec.Struct, frozen=True):
    """A request of an API key with limits arrived. number: this front's own, of the call."""

    number: int
    name: str
    limits: KeyLimits


class Entered(msgspec.Struct, frozen=True):
    """Whether it is let in; if not, why, and when the client should come back."""

    refusal: str = ""
    retry_after_s: float | None = None


class Metered(msgspec.Struct, frozen=True, tag=True):
    """What a request that was let in has used since its beginning; over: it has ended."""

    number: int
    tokens: Tokens
    over: bool


class MeteredBefore(msgspec.Struct, frozen=True, tag=True):
    """Another Conductor has let this request of an API key in, and it has not ended: count it.

    tokens: what it has used, which is not counted again.
    """

    number: int
    name: str
    limits: KeyLimits
    tokens: Tokens


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a front. front: its id, which differs at every start.

    An earlier connection of the same front is over, whatever the Conductor has noticed of that.
    """

    front: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A request arrived at this front: its fields except prompt, sampling and cache salt."""

    id: RequestId
    model: str
    length: Tokens
    keys: tuple[BlockKey, ...]
    stopping: Stopping
    slo: Slo
    priority: int
    age_us: Micros
    """How long ago the front received its headers."""
    whole: bool
    tenant: str
    address: str
    trace: TraceContext | None = None
    among: tuple[InstanceId, ...] = ()

    def request(self, now_us: Micros) -> Request:
        """The request as the Conductor receives it at `now_us` of its clock; its prompt has a
        length only."""
        return Request(
            id=self.id,
            model=self.model,
            length=self.length,
            stopping=self.stopping,
            slo=self.slo,
            priority=self.priority,
            arrived_us=now_us - self.age_us,
            whole=self.whole,
            tenant=self.tenant,
            address=self.address,
            trace=self.trace,
            among=self.among,
        )


def opened(request: Request, keys: Sequence[BlockKey], now_us: Micros) -> Opened:
    """The message for a request that arrived; the inverse of `Opened.request`. now_us: of the clock
    of `request`."""
    return Opened(
        id=request.id,
        model=request.model,
        length=request.length,
        keys=tuple(keys),
        stopping=request.stopping,
        slo=request.slo,
        priority=request.priority,
        age_us=now_us - request.since_us(now_us),
        whole=request.whole,
        tenant=request.tenant,
        address=request.address,
        trace=request.trace,
        among=request.among,
    )


class Adopting(msgspec.Struct, frozen=True, tag=True):
    """A request of this front is under way that another Conductor has placed: see Adopted.

    `facts`: those that the front has reported since the request's last call went out.
    """

    opened: Opened
    """As it arrived, without keys."""
    length: Tokens
    keys: tuple[BlockKey, ...]
    begun: bool
    decision: Decision
    number: int
    leases: tuple[int, ...]
    decodes: bool
    call_age_us: Micros
    """How long ago that call went out."""
    first_age_us: Micros | None
    """How long ago the first token came; None: it has not."""
    facts: tuple[FactOfRequest, ...]

    def adopted(self, now_us: Micros) -> Adopted:
        """The fact for a Conductor whose clock shows `now_us`."""
        first_us = self.first_age_us
        return Adopted(
            self.opened.request(now_us),
            self.length,
            self.keys,
            self.begun,
            self.decision,
            self.number,
            self.leases,
            self.decodes,
            now_us - self.call_age_us,
            None if first_us is None else now_us - first_us,
        )


def adopting(tracked: Tracked, now_us: Micros) -> Adopting:
    """The message for a request that is under way; the inverse of `Adopting.adopted`. now_us: of
    the front's clock."""
    it = tracked.adopted()
    return Adopting(
        opened(it.request, (), now_us),
        it.length,
        it.keys,
        it.begun,
        it.decision,
        it.number,
        it.leases,
        it.decodes,
        now_us - it.called_us,
        None if it.first_us is None else now_us - it.first_us,
        tuple(tracked.facts),
    )


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The first token went to the client; see Conducting.first_token."""

    request: RequestId
    cached_tokens: Tokens | None


class Kept(msgspec.Struct, frozen=True, tag=True):
    """See Conducting.keep."""

    keys: tuple[BlockKey, ...]
    to: SegmentId
    source: SegmentId | None


class Closed(msgspec.Struct, frozen=True, tag=True):
    """See Conducting.close."""

    request: RequestId
    outcome: str
    measured: Measured


class CallBegan(msgspec.Struct, frozen=True, tag=True):
    """A call to an external engine began; see ports.Observer.

    number: this front's own, which later messages about the call repeat.
    """

    number: int
    instance: InstanceId
    part: Part
    prompt: Tokens
    predicted: Tokens
    streams: bool


class CallAnswered(msgspec.Struct, frozen=True, tag=True):
    """The engine answered the call; `count`: tokens so far. See ports.OutgoingCall."""

    number: int
    count: Tokens
    cached: Tokens | None
    after_us: Micros
    """Time from the call's beginning to this answer, by the front's clock. These messages may be
    late, and come again when another Conductor leads."""


class CallEnded(msgspec.Struct, frozen=True, tag=True):
    """The call ended, after `count` tokens."""

    number: int
    count: Tokens
    cached: Tokens | None


class EngineState(msgspec.Struct, frozen=True):
    """An external engine: its instances that have joined, and those of them that send KV events."""

    spec: InstanceSpec
    infos: list[InstanceInfo]
    tells: list[InstanceId]
    version: str = ""
    """Of the engine; empty: it does not report it."""


class EngineStates(msgspec.Struct, frozen=True, tag=True):
    """All external engines. Sent whenever one of them changes."""

    engines: list[EngineState]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The first message to a front: what the instances of this Conductor serve."""

    model: str
    """The model of its workers; empty: it has external engines."""
    expected: int
    """How many instances its settings describe; 0: workers join by themselves."""
    term: int = 0
    """In which this Conductor leads: see control.leadership."""
    has_page: bool = False
    """Whether this Conductor serves the page for operators."""
    sampling: SamplingRule | None = None
    """Which requests have spans; None: none has."""


class Instances(msgspec.Struct, frozen=True, tag=True):
    """All instances that have joined. Sent whenever one joins, leaves, or is drained."""

    infos: list[InstanceInfo]
    """Those that get new work."""
    drained: list[InstanceInfo]


ToConductor: TypeAlias = (
    DriverFact
    | Hello
    | Opened
    | Adopting
    | FirstToken
    | Kept
    | Closed
    | CallBegan
    | CallAnswered
    | CallEnded
    | Metered
    | MeteredBefore
)
ToFront: TypeAlias = Welcome | EngineStates | Instances | Prefill | Decode | Abort | Refuse | GiveUp
