"""A placement in plain data: both instances, and every term that the decision was made from.

core.schedule.decide makes it; actions carry it to drivers, which may be in other processes; reports
show it. Nothing here computes anything.
"""

from __future__ import annotations

import msgspec

from moonserve.core.schedule.facts import Connector
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens


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
