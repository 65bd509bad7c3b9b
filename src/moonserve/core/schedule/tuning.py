"""The Conductor's settings: what an owner may choose, live and in simulation alike."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from moonserve.core.kv.index import MAX_ENTRIES
from moonserve.core.request import Slo
from moonserve.core.schedule.pipeline import Form
from moonserve.core.schedule.residency import PredictorName
from moonserve.core.units import Bytes, Micros, Tokens

Admission: TypeAlias = Literal["none", "ttft", "early", "predictive"]
"""What refuses a request. none: nothing. ttft: a TTFT predicted to be missed. early: that, or
decode too full now. predictive: that, or decode predicted to be too full when the prefill will
have ended. In all but `none`, a request for which decode has no room after its prefill is dropped
then."""


class Tuning(msgspec.Struct, frozen=True):
    """Settings of the Conductor, the same live and in simulation."""

    policy: str = "kvcache_centric"
    kvcache_balancing_threshold: float = 1.0
    """Fetch if the pool's prefix is longer than this many times the instance's own (Algorithm
    1)."""
    slo: Slo = Slo()
    """Objectives of requests without objectives of their own."""
    admission: Admission = "predictive"
    admission_low: Admission | None = None
    admission_high: Admission | None = None
    """The same for requests of a priority below, and above, 0; None: as for the others."""
    predictor: PredictorName = "survival"
    """predictive: how the lengths of outputs are predicted; see core.schedule.residency."""
    deviations: float = 0.0
    """predictive: how many standard deviations above the mean load must have room."""
    overtaken: float = 0.75
    """predictive: how much room is kept for later requests with a quicker prefill, as a share of
    what they could take. 1 serves the most requests; less serves longer ones and more tokens."""
    held_share: float = 0.05
    """predictive: after its prefill a request may wait for room in decode, for this share of what
    its TTFT objective leaves. So decode is not idle if a forecast load does not come."""
    due_share: float = 0.5
    """The same for a refused client that returns at its Retry-After time."""
    join_passes: float = 1.0
    """predictive: if prefill streams the first token, the second is later by this many passes than
    those after it, since a request that joins waits for the pass under way. The predicted TBT
    includes it, by its part in measured TBTs, in the mean over outputs. 0 if decode streams it."""
    low_share: float = 0.8
    """Requests of a priority below 0 are held to this share of the objectives, so that they are
    refused first. Those of a tenant above its share are held to this or more; see
    core.schedule.objectives. An idle instance accepts both for their whole objectives."""
    alone_tokens: Tokens = 256
    """If an external decode instance lacks at most this many tokens of a prompt, it gets the
    request without a prefill elsewhere; 0: never."""
    cross_rack: float = 2.0
    """How many times longer a transfer between racks takes than one within."""
    max_waiting: int = 10_000
    """How many requests may wait at the Conductor; one more is refused."""
    tbt_share: float = 0.55
    """Late binding fills decode up to this share of the TBT objective. A request that joins waits
    for the pass under way before its own; if prefill has streamed the first token, clients notice
    that. If decode streams it, nearly 1 will do. A request that has waited long may fill more."""
    spread_bytes: Bytes = 8 << 30
    """Bytes of hot prefixes that are copied to other segments at a time, in the background; 0:
    none; see core.schedule.hot."""
    cpp: int = 1
    """The most instances that may prefill one prompt together, if one alone is predicted to miss
    the TTFT objective; see core.schedule.groups."""
    cpp_form: Form = "chain"
    """How they share it; the form `layers` is for simulation."""
    bind_ahead_us: Micros = 0
    """Late binding: an instance gets its next request when this much of its work is left."""
    max_indexed_blocks: int = MAX_ENTRIES
    """The most blocks that the prefix index knows, each counted once for each holder."""
    dead_after_us: Micros = 5_000_000
    """An instance without a heartbeat for this long is taken for dead."""
    pause_us: Micros = 2_000_000
    """If a tick comes later than this, this process slept; no instance is taken for dead then."""
    patience_us: Micros = 30_000_000
    """How long a request that lost its instances waits for one to join: a restart's time."""

    def mode(self, priority: int) -> Admission:
        """How requests of this priority are admitted."""
        own = self.admission_low if priority < 0 else self.admission_high if priority else None
        return own or self.admission
