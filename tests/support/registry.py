"""A registry within one process, for tests that need none that can fail.

Nothing here expires: what was registered goes when it is closed, and so do duties.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count

import msgspec

from moonserve.live.registry.etcd import LeaderEntry


class MemoryRegistry:
    """See ports.Registry. One object is one member; members of one `Shared` see each other."""

    ttl_s = 5.0

    def __init__(self, shared: Shared | None = None) -> None:
        self._shared = shared or Shared()
        self._own: list[_Entry | _Candidate] = []

    async def register(self, key: str, value: bytes) -> _Entry:
        """See ports.Registry."""
        entry = _Entry(self._shared, key)
        self._own.append(entry)
        await self.put(key, value)
        self._shared.owners[key] = entry
        return entry

    async def put(self, key: str, value: bytes) -> None:
        """See ports.Registry."""
        self._shared.owners.pop(key, None)
        self._shared.entries[key] = value
        self._shared.change()

    async def remove(self, key: str) -> bool:
        """See ports.Registry."""
        found = self._shared.entries.pop(key, None)
        self._shared.change()
        return found is not None

    async def read(self, prefix: str) -> dict[str, bytes]:
        """See ports.Registry."""
        entries = sorted(self._shared.entries.items())
        return {key: value for key, value in entries if key.startswith(prefix)}

    def alarms(self) -> list[str]:
        """See ports.Registry."""
        return []

    async def watch(self, prefix: str) -> AsyncIterator[Mapping[str, bytes]]:
        """See ports.Registry."""
        known: dict[str, bytes] | None = None
        while True:
            changed = self._shared.changed
            now = await self.read(prefix)
            if now != known:
                known = now
                yield dict(now)
            else:
                await changed.wait()

    async def elect(
        self, duty: str, who: str, changed: Callable[[int], None], patience_s: float = 0.0
    ) -> _Candidate:
        """See ports.Registry."""
        candidate = _Candidate(self._shared, duty, who, changed)
        self._own.append(candidate)
        waiting = self._shared.candidates.setdefault(duty, [])
        waiting.append(candidate)
        if waiting[0] is candidate:
            candidate.lead(True)
        return candidate

    async def close(self) -> None:
        """See ports.Registry."""
        for one in self._own:
            await one.close()


class Shared:
    """What members of one registry have in common."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.owners: dict[str, _Entry] = {}
        self.candidates: dict[str, list[_Candidate]] = {}
        """By duty; the first has it."""
        self.terms = count(1)
        self.changed = asyncio.Event()

    def change(self) -> None:
        """Wake who watches."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class _Entry:
    def __init__(self, shared: Shared, key: str) -> None:
        self._shared = shared
        self._key = key

    async def close(self) -> None:
        if self._shared.owners.get(self._key) is self:
            del self._shared.owners[self._key], self._shared.entries[self._key]
            self._shared.change()


class _Candidate:
    def __init__(self, shared: Shared, duty: str, who: str, changed: Callable[[int], None]) -> None:
        self._shared = shared
        self._key = f"leaders/{duty}"
        self._who = who
        self._waiting = shared.candidates.setdefault(duty, [])
        self._changed = changed
        self.term = 0

    def lead(self, leads: bool) -> None:
        """Take the duty, or give it up; its name stands among the entries meanwhile."""
        self.term = next(self._shared.terms) if leads else 0
        if leads:
            value = msgspec.json.encode(LeaderEntry(self._who, self.term))
            self._shared.entries[self._key] = value
        else:
            self._shared.entries.pop(self._key, None)
        self._shared.change()
        self._changed(self.term)

    async def depose(self, term: int) -> None:
        """Take the duty from its holder of this term."""
        first = self._waiting[0]
        if first is not self and first.term == term:
            self._waiting.remove(self)
            self._waiting.insert(0, self)
            first.lead(False)
            self.lead(True)

    def give_way(self, term: int) -> None:
        """Give up a lower term."""
        if 0 < self.term < term:
            self.lead(False)

    async def close(self) -> None:
        if self in self._waiting:
            had = self._waiting[0] is self
            self._waiting.remove(self)
            if had:
                self.lead(False)
                if self._waiting:
                    self._waiting[0].lead(True)
