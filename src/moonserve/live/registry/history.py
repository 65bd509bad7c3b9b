"""What one watch of etcd knows, across the loss of all that etcd knew.

An etcd that lost its data, or has it from a backup, says less than it did, and nobody removed
anything. Two things tell: its revision is lower than the one seen, or a mark that was put there
once is another one, or gone. The identity of its cluster tells nothing: it is made of addresses,
and an empty etcd at the same ones has the same. What no lease held then stays known until it is
there again; nobody but who knew it can put it there. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Read(msgspec.Struct, frozen=True):
    """One answer of etcd."""

    mark: bytes
    """Which history it is; empty: it was never marked."""
    revision: int
    entries: Mapping[str, bytes]
    leased: Iterable[str] = ()
    """Those of the entries that go with the process that put them there."""


class History:
    """See the module; answers in the order in which they were given."""

    def __init__(self) -> None:
        self._mark, self._revision = b"", 0
        self._lasting: dict[str, bytes] = {}
        self.lost: dict[str, bytes] = {}
        """What an earlier history had, and this one was never told."""

    def read(self, now: Read) -> dict[str, bytes]:
        """What there is now, in the order of keys."""
        if self._mark not in (b"", now.mark) or now.revision < self._revision:
            self.lost |= self._lasting
        self._mark, self._revision = now.mark, now.revision
        self.lost = {key: it for key, it in self.lost.items() if key not in now.entries}
        leased = set(now.leased)
        self._lasting = {key: it for key, it in now.entries.items() if key not in leased}
        return dict(sorted({**self.lost, **now.entries}.items()))
