"""The account of one request at a Conductor, for tests that look at what became of it."""

from __future__ import annotations

from moonserve.core.schedule.record import Record
from moonserve.core.units import RequestId
from moonserve.live.control.loop import ConductorLoop


def record_of(loop: ConductorLoop, name: str) -> Record:
    """The record of the latest request of this id."""
    found = loop.account.find(RequestId(name))
    assert found is not None, f"no record of {name} is kept"
    return found
