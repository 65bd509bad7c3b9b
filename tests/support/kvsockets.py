"""The ZMQ context and the publisher of a test, closed also when the test fails."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import zmq.asyncio

from moonserve.live.kvevents.curve import CurveKeys
from moonserve.live.kvevents.publisher import Publisher


@contextlib.contextmanager
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    """A context whose sockets a test closes; ends also when the test fails before it has.

    A context left open would later stop the garbage collector, and with it the whole run.
    """
    context = zmq.asyncio.Context()
    try:
        yield context
        assert all(socket.closed for socket in context._sockets), "the test leaves a socket open"
    finally:
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publishing(
    endpoint: str, replay: str | None, *, kept: int = 10_000, curve: CurveKeys | None = None
) -> AsyncIterator[Publisher]:
    """A publisher, closed after."""
    events = Publisher(endpoint, replay, kept=kept, curve=curve)
    try:
        yield events
    finally:
        await events.close()
