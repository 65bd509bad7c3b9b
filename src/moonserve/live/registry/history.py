"""What one watch of etcd remembers, so that etcd's loss of its data removes no engine.

If etcd lost its data, or restored a backup, it returns fewer entries although nothing removed them.
The watch finds this out in two ways: the revision is lower than before, or the mark that moonserve
put into etcd is missing or differs. The cluster's id does not help, because it depends only on the
addresses. Entries without a lease then stay known until they are in etcd again; only a process that
remembers them can put them there. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Read(msgspec.Struct, frozen=True):
    """One answer of etcd."""

    mark: bytes
    """The mark of etcd's history; empty: there is none."""
    revision: int
    entries: Mapping[str, bytes]
    leased: Iterable[str] = ()
    """Keys of entries with a lease: they end with the process that put them there."""


class History:
    """The memory of one watch. It takes etcd's answers in the order in which etcd gave them."""

    def __init__(self) -> None:
        self._mark = b""
        self._revision = 0
        self._lasting: dict[str, bytes] = {}
        self.lost: dict[str, bytes] = {}
        """Entries without a lease that etcd has lost, and that are not there again."""

    def read(self, now: Read) -> dict[str, bytes]:
        """Take in an answer; return the entries that exist now, lost ones included, by key."""
        if self._mark not in (b"", now.mark) or now.revision < self._revision:
            self.lost |= self._lasting
        self._mark = now.mark
        self._revision = now.revision
        self.lost = {key: it for key, it in self.lost.items() if key not in now.entries}
        leased = set(now.leased)
        self._lasting = {key: it for key, it in now.entries.items() if key not in leased}
        return dict(sorted({**self.lost, **now.entries}.items()))
