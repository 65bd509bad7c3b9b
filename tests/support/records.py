"""What became of one request: its account at a Conductor, and an explanation made by hand."""

from __future__ import annotations

from typing import Any

from moonserve.core.schedule.explain import CandidateRow, Explanation, Stages
from moonserve.core.schedule.record import Record
from moonserve.core.units import RequestId
from moonserve.live.control.loop import ConductorLoop


def record_of(loop: ConductorLoop, name: str) -> Record:
    """The record of the latest request of this id."""
    found = loop.account.find(RequestId(name))
    assert found is not None, f"no record of {name} is kept"
    return found


def explained_request(name: str, arrived_ms: int, **fields: Any) -> Explanation:
    """A request that waited 10 ms, prefilled for 100, and decoded for 200 after a hand-over."""
    stages = Stages(
        waited_ms=10.0,
        queue_ms=20.0,
        load_ms=None,
        compute_ms=70.0,
        publish_ms=5.0,
        prefill_ms=100.0,
        handover_ms=15.0,
        decode_ms=200.0,
        total_ms=330.0,
    )
    candidate = CandidateRow("p0", 0, 0, None, 0.0, 18.0, 66.0, 84.0, 84.0)  # type: ignore[arg-type]
    known: dict[str, Any] = {"prefill": "p0", "decode": "d0", "stages": stages}
    known |= {"candidates": [candidate], "arrived_ms": arrived_ms} | fields
    return Explanation(request=name, outcome="stop", why="Because.", **known)
