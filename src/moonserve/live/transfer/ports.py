"""The ports of the Transfer Engine: what a transport has to do.

memory, tcp and mooncake implement them; tests/contract/test_transport.py checks every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import Address
from moonserve.core.units import Bytes

Op: TypeAlias = Literal["read", "write"]
"""read: from the segment into the caller's memory. write: from the caller's memory into it."""


class Slice(NamedTuple):
    """The caller's `memory` (contiguous, format "B") and as many bytes at a segment's `offset`."""

    offset: Bytes
    memory: memoryview


class Path(msgspec.Struct, frozen=True):
    """One way to a segment: a transport, and one of the owner's network cards."""

    transport: str
    """The name of a transport: local, shm, tcp or mooncake."""
    address: Address
    distance: int = 0
    """Nearer paths are used first: 0 is the card's own rack or socket, other paths have more."""
    source: str = ""
    """The address of this host's card to send from. Empty: the system chooses."""


class Link(Protocol):
    """This process's end of one lane. It carries one run at a time, on any thread."""

    def arm(self) -> None:
        """A run is about to start: a `cut` from now on is for this run."""

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """Carry the slices; done[i] is set once all bytes of the i-th slice have arrived.

        If it returns and some are not done, the segment refused those (out of bounds). If the run
        breaks off, it raises DeadlineExceeded at `deadline_s` (time.monotonic), else MoonserveError
        or OSError. After it has returned or raised, it touches no slice's memory any more.
        """

    def cut(self) -> None:
        """Make the run in progress break off soon; from any thread."""

    def close(self) -> None:
        """Release sockets and memory; not during a run. The link may be used again."""


class Transport(Protocol):
    """One way to move bytes."""

    def open(self, path: Path) -> Link | None:
        """Return a link along `path`, not connected yet; None: this host cannot use that path."""

    def most_lanes(self, path: Path) -> int:
        """Return how many links along `path` are useful at once."""
        return 1


def parse_location(location: str) -> tuple[str, str]:
    """Split `node:segment`; the node's name has no colon. Raises ConfigError."""
    node, colon, segment = location.partition(":")
    if not (node and colon and segment):
        raise ConfigError(f"{location!r} is no location; write it as node:segment", "location")
    return node, segment
