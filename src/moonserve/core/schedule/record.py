"""What became of one request: the one account that reports, recordings and metrics are made from.

`account.Account` fills it in, from facts and actions and from what the driver of the request
measured. Everybody else only reads. Nothing here decides or computes a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.request import Slo, TraceContext
from moonserve.core.schedule.actions import Candidate, Decision, Spread
from moonserve.core.units import BlockKey, InstanceId, Micros, RequestId, Tokens

KEPT_CALLS = 8
Fate: TypeAlias = Literal["in_time", "late", "refused", "engine_refused", "failed", "cancelled"]
"""late: served, but not within its objectives. refused: by the Conductor. engine_refused: an
instance answered that the request is wrong. cancelled: its client left."""
ANSWERED = "engine answered "
"""How the outcome of a request begins that an instance refused; its status follows."""


class PrefillTimes(msgspec.Struct, frozen=True):
    """How a worker spent the time of one prefill call. External engines do not report it."""

    queue_us: Micros
    """It waited for blocks, for a place in the batch, and for passes of others."""
    load_us: Micros
    """Its prefix came from the pool."""
    compute_us: Micros
    """The passes that it had a part in."""
    publish_us: Micros
    """From its last pass until all its KV was in the pool."""


class DecodeTimes(msgspec.Struct, frozen=True):
    """How a worker spent a decode call until its first token. External engines do not report it."""

    queue_us: Micros
    """It waited for blocks, for a place in the batch, and for the pass that it found."""
    load_us: Micros
    """Its KV came from the pool."""
    compute_us: Micros
    """The pass that gave the token."""


class Measured(msgspec.Struct, frozen=True):
    """What the driver of a request measured: counts, and lengths of time, which need no clock that
    two hosts share."""

    tokens: Tokens = 0
    """Generated."""
    cached_tokens: Tokens | None = None
    """Prompt tokens that prefill reused; None: no engine reported it."""
    tbt_us: Micros | None = None
    """The mean time between its tokens; None: it had no two."""
    handover_us: Micros | None = None
    """From its last decode call to the first token of that call; None: there was none."""
    prefill: PrefillTimes | None = None
    """Of its last prefill call that gave a token."""
    decode: DecodeTimes | None = None
    """Of its last decode call."""
    said: str = ""
    """What an instance said that refused the request, with its name before it, for operators."""


class StageTimes(msgspec.Struct, frozen=True):
    """How long each stage of a request took. None: it had no such stage, or nobody measured it.

    The stages follow each other. The four of `PrefillTimes` are parts of `prefill_us`, the three of
    `DecodeTimes` of `handover_us`. Of a request that was placed several times they are those of its
    last calls.
    """

    waited_us: Micros | None
    """At the Conductor, before its decision."""
    prefill_us: Micros | None
    """From the prefill call to its end."""
    parts: PrefillTimes | None
    handover_us: Micros | None
    """From the decode call to its first token."""
    decode_us: Micros | None
    """From then to the last token."""
    total_us: Micros | None
    """From the arrival to the end."""
    entry: DecodeTimes | None = None
    """The parts of the hand-over that a worker of ours reports."""


class FailedCall(msgspec.Struct, frozen=True):
    """A call of a request that failed, and after which the request was placed again."""

    instance: InstanceId
    decodes: bool
    """Whether it was a decode call."""
    began_us: Micros
    ended_us: Micros
    why: str
    said: str = ""
    """What the instance itself said, for operators."""


class Record(msgspec.Struct, eq=False):
    """One request. All times are the Conductor's."""

    id: RequestId
    model: str
    tenant: str
    priority: int
    prompt_tokens: Tokens
    keys: Sequence[BlockKey]
    """Of the full blocks of its prompt."""
    slo: Slo
    """Its own objectives, or the cluster's."""
    arrived_us: Micros
    """When the gateway received it."""
    trace: TraceContext | None = None
    """Where its spans belong; None: it has none."""
    decision: Decision | None = None
    """The last one. For a refused request: the decision that admission did not accept."""
    candidates: Sequence[Candidate] = ()
    """The candidates of that decision; the chosen one is the first."""
    spread: Spread | None = None
    """The copy of its prefix that its placement caused."""
    attempts: int = 0
    """How many prefill calls were made."""
    failed: tuple[FailedCall, ...] = ()
    """The calls that failed, in order; of many, the latest `KEPT_CALLS`."""
    number: int = 0
    """Of the call that is out."""
    prefill_us: Micros | None = None
    """When its last prefill call went out."""
    prefilled_us: Micros | None = None
    """When that call ended."""
    decode_us: Micros | None = None
    """When its last decode call went out."""
    first_us: Micros | None = None
    """When its first token came."""
    ended_us: Micros | None = None
    predicted_us: Micros = 0
    """Predicted work of the prefill call that is out; 0: none is."""
    spent_us: Micros = 0
    """Predicted work of the latest prefill, once it has ended."""
    wasted_us: Micros = 0
    """Predicted work of prefills that were of no use."""
    measured: Measured = Measured()
    """By its driver; complete when the request is over."""
    outcome: str = "waiting"
    """waiting, running, stop, length, cancelled, refused, failed, or a word of its driver."""
    reason: str | None = None
    """Why it was refused, as a word for programs."""
    error: str | None = None
    """Why it was refused or failed, in words."""
    is_good: bool | None = None
    """Whether it was served within its objectives; None: it was not served, or not yet."""
    is_closed: bool = False
    """Whether its driver has closed it."""

    @property
    def ttft_us(self) -> Micros | None:
        """Time to its first token; None: it has none, or nobody saw when it came."""
        return None if self.first_us is None else self.first_us - self.arrived_us

    @property
    def fate(self) -> Fate:
        """What became of it in the end."""
        if self.outcome == "refused":
            return "refused"
        if self.outcome == "failed" or self.outcome.startswith(f"{ANSWERED}5"):
            return "failed"
        if self.outcome.startswith(ANSWERED):
            return "engine_refused"
        if self.is_good is None:
            return "cancelled"
        return "in_time" if self.is_good else "late"

    def stages(self) -> StageTimes:
        """How long each stage took."""
        measured, ended_us = self.measured, self.ended_us
        decode_began_us = self.prefilled_us
        if self.decode_us is not None:
            handover_us = measured.handover_us
            decode_began_us = None if handover_us is None else self.decode_us + handover_us
        return StageTimes(
            waited_us=None if self.decision is None else self.decision.waited_us,
            prefill_us=between(self.prefill_us, self.prefilled_us),
            parts=measured.prefill,
            handover_us=measured.handover_us,
            decode_us=between(decode_began_us, ended_us),
            total_us=between(self.arrived_us, ended_us),
            entry=measured.decode,
        )


def between(began_us: Micros | None, ended_us: Micros | None) -> Micros | None:
    """The time from one to the other; None: one of them is not known."""
    return None if began_us is None or ended_us is None else ended_us - began_us
