"""The instances of a running cluster that get new work, as its gateway lists them.

Commands that simulate a running cluster call it. It asks over HTTP and changes nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from moonserve.cli.client import Client
from moonserve.core.errors import EngineFailed

T = TypeVar("T")


class _Standing(msgspec.Struct, frozen=True):
    """Whether an instance serves, by its row of /api/instances."""

    block_size: int = 0
    """0: it is an external engine that has not joined, and its row has little else."""
    drained: bool = False
    state: str = "up"
    """Of external engines."""

    @property
    def serves(self) -> bool:
        """Whether it gets new work."""
        return self.block_size > 0 and not self.drained and self.state == "up"


def serving(client: Client, shape: type[T]) -> list[T]:
    """The rows of /api/instances in this shape, without instances that are lost, drained, or have
    not joined. Raises EngineFailed, NobodyAlive."""
    rows = client.get_as("/api/instances", list[dict[str, Any]])
    try:
        found = [row for row in rows if msgspec.convert(row, _Standing).serves]
        return msgspec.convert(found, list[shape])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise EngineFailed(f"the gateway's instances are of another version: {error}") from None
