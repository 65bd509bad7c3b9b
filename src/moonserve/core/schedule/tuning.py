"""The Conductor's settings: what an owner may choose, live and in simulation alike."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.pipeline import Form
from moonserve.core.schedule.residency import PredictorName
from moonserve.core.units import Bytes, Micros, Tokens

Admission: TypeAlias = Literal["none", "ttft", "early", "predictive"]
"""What refuses a request: nothing; on arrival a TTFT predicted to be missed; that, and decode too
full now; that, and decode predicted to be too full when its prefill will have ended. In all but the
first, one that decode turns out to have no room for when prefill has ended is dropped then."""


class Tuning(msgspec.Struct, frozen=True):
    """Settings of the Conductor, the same live and in simulation."""

    policy: str = "kvcache_centric"
    kvcache_balancing_threshold: float = 1.0
    """Fetch when the pool's prefix exceeds this many times the instance's own (Algorithm 1)."""
    slo: Slo = Slo()
    """Objectives of requests that bring none of their own."""
    admission: Admission = "predictive"
    admission_low: Admission | None = None
    admission_high: Admission | None = None
    """The same for requests of a priority below, and above, 0; None: as for the others."""
    predictor: PredictorName = "survival"
    """predictive: how long others decode; see core.predict."""
    deviations: float = 0.0
    """predictive: one is admitted that has room so many standard deviations above the mean load."""
    overtaken: float = 0.75
    """predictive: room is kept for so much of what requests that are yet to come, and are quicker
    through prefill, could take. 1 serves the most requests; less, longer ones and more tokens."""
    held_share: float = 0.05
    """predictive: one may wait for room in decode, its prefill done, for this share of what its
    TTFT objective leaves: so decode is not idle where what was forecast does not come."""
    due_share: float = 0.5
    """The same for one that comes at the time that its refusal told it."""
    join_passes: float = 1.0
    """predictive: where prefill streams the first token, the second is later by so many passes than
    those after it: one that joins waits for the pass under way. TBT is predicted with that, by the
    part that it has in TBT as measured, in the mean over outputs. 0 where decode streams it."""
    low_share: float = 0.8
    """Requests of a priority below 0 are held to this share of the objectives, and so go first;
    those of a tenant that has more than its part, to this or more: see core.schedule.tenants. An
    instance with nothing to do takes them for their whole objectives."""
    alone_tokens: Tokens = 256
    """A foreign decode instance that has all but so many tokens of a prompt gets it without a
    prefill elsewhere; 0: never."""
    cross_rack: float = 2.0
    """How many times longer a transfer between racks takes than one within."""
    max_waiting: int = 10_000
    """Requests that wait at the Conductor; one more is refused."""
    tbt_share: float = 0.55
    """Late binding fills decode up to this share of the TBT objective: one that joins waits for the
    pass under way before its own, and where prefill has streamed the first token, clients see it.
    Nearly 1 will do where decode streams it; and for one that has waited long, whose TTFT would be
    missed else."""
    spread_bytes: Bytes = 8 << 30
    """Of hot prefixes, so much is copied to other segments at a time, in the background; 0: none;
    see core.hot."""
    cpp: int = 1
    """The most instances that may prefill one prompt together, where one alone is predicted to miss
    its TTFT objective; see core.groups."""
    cpp_form: Form = "chain"
    """How they share it; the other form is for simulation."""
    bind_ahead_us: Micros = 0
    """Late binding: an instance gets its next request when this much of its work is left."""
    dead_after_us: Micros = 5_000_000
    """An instance not heard of for this long is taken for dead."""
    pause_us: Micros = 2_000_000
    """A tick that comes later than this says that we slept, not that everybody else died."""
    patience_us: Micros = 30_000_000
    """How long a request that lost its instances waits for one to join: a restart's time."""

    def mode(self, priority: int) -> Admission:
        """How requests of this priority are admitted."""
        own = self.admission_low if priority < 0 else self.admission_high if priority else None
        return own or self.admission
