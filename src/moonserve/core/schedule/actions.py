"""What the Conductor wants done, and the decision behind it: its output, as core.schedule.facts is
its input.

Plain frozen structs. core.schedule.decide makes a Decision, actions carry it to drivers, which may
be in other processes, and reports show it. A driver does each action and reports the result as a
fact, with the call's number. Nothing here computes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.schedule.facts import Connector, InstanceInfo
from moonserve.core.units import BlockKey, InstanceId, Micros, RequestId, SegmentId, Tokens


class Stage(msgspec.Struct, frozen=True):
    """One instance of a group, and the tokens [start, end) of the prompt that it computes.

    Stages follow each other: the first starts at the reused prefix, the last ends with the prompt.
    All starts are multiples of the block size. A stage is one pass, whatever chunk_tokens says:
    else the next one could begin only with the last of its passes, not one layer behind. In the
    form `layers` every stage has all of the tokens, and its share of the layers.
    """

    instance: InstanceId
    start: Tokens
    end: Tokens
    work_us: Micros = 0
    """Predicted time of its engine, waiting for layers of the stage before included."""
    pieces: int = 1
    """In how many parts it hands on what it computes: layers; in the form `layers`, chunks."""


class Candidate(msgspec.Struct, frozen=True):
    """One prefill instance with the terms of its predicted TTFT."""

    instance: InstanceId
    local_tokens: Tokens
    """Prefix that its own segment holds, or will when it has done what it was promised."""
    reused_tokens: Tokens
    """Prefix it would start from, after fetching where that is the plan."""
    holder: SegmentId | None
    """Where the fetched part comes from; None when nothing is fetched."""
    transfer_us: Micros
    queue_us: Micros
    compute_us: Micros
    score: float
    """What the policy chose by. The lowest wins; of equal scores the fewest decodes, then the
    first id."""
    decodes: int = 0
    """How many requests decode there, or will."""

    @property
    def ttft_us(self) -> Micros:
        """Predicted time to first token, from the moment of the decision."""
        return self.transfer_us + self.queue_us + self.compute_us


class Decision(msgspec.Struct, frozen=True):
    """A placement, with everything it was made from but the candidates that lost."""

    policy: str
    prefill: InstanceId
    decode: InstanceId
    prompt_tokens: Tokens
    copies: bool
    """Whether the prefill instance keeps a copy of what it fetches (hot-prefix migration)."""
    waited_us: Micros
    """Time spent at the Conductor before the decision; part of the predicted TTFT."""
    predicted_ttft_us: Micros
    predicted_tbt_us: Micros
    pool_tokens: Tokens
    """Prefix that the pool as a whole holds: the most that any plan could reuse."""
    chosen: Candidate
    """The candidate that won. Of a group, it is the first stage, with the terms that it would have
    had alone."""
    considered: int
    """How many candidates there were."""
    stages: tuple[Stage, ...] = ()
    """The instances that share the prefill and their parts; the last is `prefill`. Empty: it does
    all of it."""
    alone: str | None = None
    """Why no group shares the prefill, where one may (Tuning.cpp); or why decode does all of it."""
    tightened: str | None = None
    """Why the request was held to tighter objectives than its own; None: it was not."""
    connector: Connector = "embedded"
    """How KV gets from `prefill` to `decode`."""
    joint: bool = False
    """Whether one external engine does all of it in one call. The driver reports its first token as
    PrefillEnded, and no Decode follows."""
    call_us: Micros = 0
    """What its prefill call usually takes beside the chosen candidate's terms, see Cost.call_us;
    part of the predicted TTFT."""

    @property
    def reused_tokens(self) -> Tokens:
        """Prefix that prefill starts from."""
        return self.chosen.reused_tokens

    @property
    def holder(self) -> SegmentId | None:
        """Where the fetched part of the prefix comes from; None: nothing is fetched."""
        return self.chosen.holder

    @property
    def shares(self) -> tuple[Stage, ...]:
        """The stages, or the one that `prefill` is by itself."""
        if self.stages:
            return self.stages
        first = self.chosen
        work_us = first.transfer_us + first.compute_us
        return (Stage(self.prefill, first.reused_tokens, self.prompt_tokens, work_us),)


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
    """Refuse the request: no instance can take it, it would miss an objective, or too many wait.

    No work was spent on it, except for the reason `tbt_slo_late`.

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


class GiveUp(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The request failed and no retry is left."""

    request: RequestId
    why: str
    stopping: bool = False
    """Whether the server that drives the request stops: then no engine failed."""


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
