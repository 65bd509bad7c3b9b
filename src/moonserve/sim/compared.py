"""Recorded and simulated times side by side, stage by stage, with the goals for TTFT and mean TBT.

`moonserve simulate --compare` and `moonserve replay --compare` print it. Both sides are of the same
requests: those that were served there and here. Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from moonserve.core.schedule.explain import Explanation
from moonserve.core.schedule.shown import in_ms
from moonserve.sim.served import Served

GOALS = {"ttft_ms": 0.15, "tbt_ms": 0.07}
"""By how much a simulation may differ from what was recorded, as a share."""


SHOWN = {"ttft_ms": "TTFT", "tbt_ms": "mean TBT"}
"""What people call the figures that have a goal. This TBT is the mean of all gaps of a request: the
longest ones were not recorded."""


class Distribution(msgspec.Struct, frozen=True):
    """The values of one figure over all requests that have it."""

    mean: float
    p50: float
    p90: float


class Compared(msgspec.Struct, frozen=True):
    """One figure of the requests, recorded and simulated, in its name's unit."""

    name: str
    requests: int
    """Those that have it on both sides."""
    recorded: Distribution
    simulated: Distribution

    @property
    def goal(self) -> float | None:
        """By which share the simulated one may differ; None: there is no goal."""
        return GOALS.get(self.name)

    def errors(self) -> dict[str, float]:
        """Simulated against recorded, as a share, by the name of the statistic."""
        before, after = (
            msgspec.structs.asdict(self.recorded),
            msgspec.structs.asdict(self.simulated),
        )
        return {name: after[name] / value - 1 for name, value in before.items() if value}

    def as_json(self) -> dict[str, Any]:
        """With its errors and what it misses, for programs."""
        found = {"errors": self.errors(), "goal": self.goal, "missed": self.missed()}
        return {**msgspec.structs.asdict(self), **found}

    def missed(self) -> list[str]:
        """The statistics that miss the goal."""
        goal = self.goal
        return [name for name, error in self.errors().items() if goal and abs(error) > goal]


_Both = tuple[Callable[[Explanation], float | None], Callable[[Served], float | None]]


def compare(pairs: Iterable[tuple[Explanation, Served]]) -> list[Compared]:
    """All figures that some request has on both sides: TTFT, mean TBT, then the stages in order."""
    served = [
        (row, one) for row, one in pairs if row.in_time is not None and one.outcome == "completed"
    ]
    found = (_compared(name, sides, served) for name, sides in _FIGURES.items())
    return [it for it in found if it is not None]


def _compared(
    name: str, sides: _Both, served: Sequence[tuple[Explanation, Served]]
) -> Compared | None:
    of_row, of_served = sides
    values = [(of_row(row), of_served(one)) for row, one in served]
    both = [(left, right) for left, right in values if left is not None and right is not None]
    if not both:
        return None
    recorded, simulated = (_distribution(side) for side in zip(*both, strict=True))
    return Compared(name, len(both), recorded, simulated)


def _distribution(values: Sequence[float]) -> Distribution:
    p50, p90 = np.percentile(values, (50, 90))
    return Distribution(float(np.mean(values)), float(p50), float(p90))


def _stage(name: str) -> _Both:
    def of_row(row: Explanation) -> float | None:
        return None if row.stages is None else getattr(row.stages, name)

    return of_row, lambda one: getattr(in_ms(one.stages()), name)


def _ttft_ms(one: Served) -> float | None:
    return None if one.first_us is None else (one.first_us - one.arrived_us) / 1e3


def _tbt_ms(one: Served) -> float | None:
    gaps = one.row.output_tokens - 1
    if one.first_us is None or one.ended_us is None or not gaps:
        return None
    return (one.ended_us - one.first_us) / 1e3 / gaps


_FIGURES: dict[str, _Both] = {
    "ttft_ms": (lambda row: row.actual_ttft_ms, _ttft_ms),
    "tbt_ms": (lambda row: row.actual_tbt_ms, _tbt_ms),
    "waited_ms": _stage("waited_ms"),
    "call_ms": _stage("call_ms"),
    "queue_ms": _stage("queue_ms"),
    "load_ms": _stage("load_ms"),
    "compute_ms": _stage("compute_ms"),
    "publish_ms": _stage("publish_ms"),
    "prefill_ms": _stage("prefill_ms"),
    "handover_ms": _stage("handover_ms"),
    "decode_queue_ms": _stage("decode_queue_ms"),
    "decode_load_ms": _stage("decode_load_ms"),
    "decode_first_ms": _stage("decode_first_ms"),
    "decode_call_ms": _stage("decode_call_ms"),
    "decode_ms": _stage("decode_ms"),
    "total_ms": _stage("total_ms"),
    "cached_tokens": (lambda row: row.actual_cached_tokens, lambda one: one.cached),
}
