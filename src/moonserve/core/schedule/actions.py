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

    `decode` may be told, so that it pulls what prefill publishes while more is computed.
    """

    request: RequestId
    number: int
    to: InstanceInfo
    decision: Decision
    decode: InstanceInfo
    group: tuple[InstanceInfo, ...] = ()
    """Those of decision.stages, in that order: call each for its part, by the same number. The last
    is `to`, whose outcome is the call's; where any of them fails, all are broken off."""
    candidates: Sequence[Candidate] = ()
    """The chosen one, then the best that it won against: for explanations, not for other
    processes."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Call `to` to decode on from the KV that prefill put in the store."""

    request: RequestId
    number: int
    to: InstanceInfo


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Break off call `number`: its instance is gone. The outcome is reported as CallFailed."""

    request: RequestId
    number: int
    why: str


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Nobody can take the request. Nothing was spent on it, unless the reason is `tbt_slo_late`.

    `retry_after_us`: it may be taken by then; None where nobody is alive, and where its objective
    could not be met by an idle cluster either.
    """

    request: RequestId
    why: str
    reason: Reason = "nobody_alive"
    """For programs."""
    retry_after_us: Micros | None = None
    decision: Decision | None = None
    """What it would have been, where it was refused for what that predicts."""
    candidates: Sequence[Candidate] = ()
    """See Prefill."""


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """The request failed and no retry is left."""

    request: RequestId
    why: str


class Release(msgspec.Struct, frozen=True):
    """The request's life is over, however it ended: drop its leases on the store.

    One lease per prefill call, by the call's number.
    """

    request: RequestId
    numbers: tuple[int, ...]


class Spread(msgspec.Struct, frozen=True):
    """Copy a hot prefix to one more segment, in the background.

    The index learns of it by the target's events. Where less comes than asked for, the driver says
    so by a fact, with the copy's number.
    """

    request: RequestId
    """The one whose placement showed that it is wanted."""
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
    """Requests that asked for it lately, an older one counting less; see
    core.schedule.hot.HALF_LIFE_US."""
    missed: bool
    """The target was chosen for such requests before, and has not kept it; else it is for relief of
    its holders."""
    holder_us: Micros | None
    """Queue of its least loaded holder; None: none of the instances that prefill has it."""
    mean_us: Micros
    target_us: Micros


Action: TypeAlias = Prefill | Decode | Abort | Refuse | GiveUp | Release | Spread
