"""What the Conductor wants done: the other half of its vocabulary, beside core.schedule.facts.

Plain frozen structs. A driver does each and reports the outcome as a fact, with the call's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.schedule.decision import Candidate, Decision
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, Micros, RequestId, SegmentId, Tokens

Reason: TypeAlias = Literal[
    "nobody_alive",
    "instances_full",
    "queue_full",
    "kv_memory",
    "ttft_slo",
    "tbt_slo",
    "tbt_slo_late",
    "duplicate_request_id",
]
"""Why a request is refused. tbt_slo_late: found when its prefill had ended, which is wasted;
duplicate_request_id: another process serves a request of this id."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Call `to` to prefill what is known of the request, reusing decision.reused_tokens.

    The driver may notify `decode`, so that it pulls what prefill publishes while more is computed.
    """

    request: RequestId
    number: int
    to: InstanceInfo
    decision: Decision
    decode: InstanceInfo
    group: tuple[InstanceInfo, ...] = ()
    """The instances of decision.stages, in that order: call each for its part, by the same number.
    The last is `to`; its outcome is that of the call. If one of them fails, all are aborted."""
    candidates: Sequence[Candidate] = ()
    """The chosen one, then the best that it won against: for explanations, not for other
    processes."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Call `to` to decode, from the KV that prefill put in the store."""

    request: RequestId
    number: int
    to: InstanceInfo


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort call `number`: its instance is gone. The driver reports the outcome as CallFailed."""

    request: RequestId
    number: int
    why: str


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """No instance can take the request. No work was spent on it, except for `tbt_slo_late`.

    `retry_after_us`: it may be accepted by then. None: no instance is alive, or an idle cluster
    could not meet its objective either.
    """

    request: RequestId
    why: str
    reason: Reason = "nobody_alive"
    """For programs."""
    retry_after_us: Micros | None = None
    decision: Decision | None = None
    """The decision that was rejected, if it was refused for what that predicts."""
    candidates: Sequence[Candidate] = ()
    """See Prefill."""


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """The request failed and no retry is left."""

    request: RequestId
    why: str


class Release(msgspec.Struct, frozen=True):
    """The life of the request has ended: drop its leases on the store.

    There is one lease for each prefill call, by the call's number.
    """

    request: RequestId
    numbers: tuple[int, ...]


class Spread(msgspec.Struct, frozen=True):
    """Copy a hot prefix to one more segment, in the background.

    The index learns of it from the target's events. If fewer blocks come than were ordered, the
    driver reports SpreadUpTo with the copy's number.
    """

    request: RequestId
    """The request whose placement called for it."""
    number: int
    """Of the copy."""
    keys: tuple[BlockKey, ...]
    """The chain from its head; the target has the first `first` of them."""
    first: int
    source: SegmentId
    to: SegmentId
    tokens: Tokens
    """Length of the prefix, in tokens."""
    count: float
    """Requests that asked for it lately; older ones count less, see core.schedule.hot.HALF_LIFE_US.
    """
    missed: bool
    """Whether the target was chosen for such requests before and has not kept the prefix; else the
    copy relieves its holders."""
    holder_us: Micros | None
    """Queue of its least loaded holder; None: none of the instances that prefill has it."""
    mean_us: Micros
    target_us: Micros


Action: TypeAlias = Prefill | Decode | Abort | Refuse | GiveUp | Release | Spread
