"""Every fuzzing test is held to a bound of memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

_MOST_GROWTH_KB = 300 << 10


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Fail where the peak of the process grew by more than hypothesis and imports explain."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < _MOST_GROWTH_KB, f"the peak of memory grew by {grown_kb >> 10} MiB"
