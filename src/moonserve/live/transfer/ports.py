"""The seams of the Transfer Engine: what a transport must do, and the words for it.

One contract suite, tests/contract/test_transport.py, runs over every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import Address
from moonserve.core.units import Bytes

Op: TypeAlias = Literal["read", "write"]
"""Read: from the segment into our memory. Write: from our memory into the segment."""


class Slice(NamedTuple):
    """`memory` (ours, contiguous, format "B") against as many bytes at `offset` of a segment."""

    offset: Bytes
    memory: memoryview


class Path(msgspec.Struct, frozen=True):
    """One way to a segment: by which transport, to which of its owner's network cards."""

    transport: str
    """local, shm, tcp or mooncake."""
    address: Address
    distance: int = 0
    """Nearer paths are used first: 0 the card's own rack or socket, more for others."""
    source: str = ""
    """Our own card's address to send from; empty: the system chooses."""


class Link(Protocol):
    """One lane's end of a path: carries one run at a time, on whichever thread."""

    def arm(self) -> None:
        """A run is about to start: a `cut` from here on is for that run."""

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """Carry the slices; done[i] is set once all bytes of the i-th are where they belong.

        Returns with some not done: the segment refused those (out of bounds). Raises what broke the
        run off: DeadlineExceeded at `deadline_s` (time.monotonic), else MoonserveError or OSError.
        Once it has returned or raised, no slice's memory is touched any more.
        """

    def cut(self) -> None:
        """Make the run in progress break off soon; from any thread."""

    def close(self) -> None:
        """Give back sockets and memory; not during a run. The link may be used again."""


class Transport(Protocol):
    """One way of moving bytes."""

    def open(self, path: Path) -> Link | None:
        """A link along `path`, not connected yet; None: it does not lead there from this host."""

    def most_lanes(self, path: Path) -> int:
        """How many links along `path` can be of use at once."""


def parse_location(location: str) -> tuple[str, str]:
    """Split `node:segment`; the node's name has no colon. Raises ConfigError."""
    node, colon, segment = location.partition(":")
    if not (node and colon and segment):
        raise ConfigError(f"{location!r} is not of the form node:segment", "location")
    return node, segment
