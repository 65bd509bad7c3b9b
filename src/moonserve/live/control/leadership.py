"""Whether the Conductor of this process decides for the cluster, and in which term.

One object per process. InRegistry changes it; the links to fronts and the calls to workers read it.
Whoever takes orders of a Conductor refuses those of a lower term than it has seen (ADR 25).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Leadership:
    """See the module."""

    def __init__(self, confirm: Callable[[], Awaitable[bool]] | None = None) -> None:
        """confirm: asks the registry whether this process still leads. None: there is none, so no
        other process can lead, and this one does from now on."""
        self._confirm = confirm
        self.term = 1 if confirm is None else 0
        """0: it does not lead."""
        self.leader = ""
        """The URL of the Conductor that leads, if that is another one and is known."""
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after each change of the term."""
        self._watchers.append(changed)

    def set_term(self, term: int) -> None:
        """Lead in this term; 0: lead no more."""
        if term != self.term:
            self.term = term
            for changed in self._watchers:
                changed()

    async def confirm(self) -> bool:
        """Whether this process still leads, as far as it can learn. It may have slept."""
        if self._confirm is None:
            return True
        return bool(self.term) and await self._confirm()

    def standing_by(self) -> str:
        """Why this process decides nothing; empty: it leads."""
        if self.term:
            return ""
        return f"this Conductor is a standby; the one at {self.leader or 'no known URL'} leads"
