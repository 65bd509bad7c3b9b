"""Both event loops that moonserve runs on, for tests of what touches sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop


@pytest.fixture(autouse=True, params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def both_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a module that imports this runs on asyncio's own loop and on uvloop."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)
