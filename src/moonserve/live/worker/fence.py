"""A worker's fence: it serves no call that a Conductor ordered whose term is over.

Two Conductors may each believe for a time that they lead (ADR 25). Fronts put the term into their
calls, and Conductors that lead into their replies to heartbeats. The worker remembers the highest
one. Calls without a term come from clients that no Conductor orders, and are served.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonserve.core.errors import BadRequest
from moonserve.core.units import whole_number
from moonserve.live.openai.headers import TERM


class TermIsOver(BadRequest):
    """A call of a lower term than the worker has seen."""

    status = 409


class Fence:
    """See the module."""

    def __init__(self) -> None:
        self.term = 0
        """The highest term so far."""

    def heard(self, term: int) -> None:
        """A Conductor leads in this term."""
        self.term = max(self.term, term)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises TermIsOver if these are of a call that a deposed Conductor ordered."""
        term = whole_number(headers.get(TERM, ""))
        if term is None:
            return
        if term < self.term:
            raise TermIsOver(
                f"this call was ordered in term {term}, and another Conductor leads in term"
                f" {self.term}: the front has to connect to that one",
                TERM,
            )
        self.term = term
