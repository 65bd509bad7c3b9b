"""The hit funnel: from the tokens of all prompts to those that an engine took from its cache.

The page's history and the metrics count it here, so that both show the same. Requests whose engine
does not report what it reused are counted apart: of them, nobody knows the last stage.
"""

from __future__ import annotations

import msgspec

from moonserve.core.schedule.record import Record
from moonserve.core.units import Tokens


class Funnel(msgspec.Struct):
    """Tokens of the prompts of some requests that were placed."""

    served: int = 0
    """Requests that got their whole answer; those that failed or left count below only."""
    prompt: Tokens = 0
    held: Tokens = 0
    """Their prefix that somebody in the pool held."""
    local: Tokens = 0
    """Their prefix that the chosen instance held."""
    promised: Tokens = 0
    """Their prefix that the decision planned to reuse."""
    delivered: Tokens = 0
    """Their prefix that the engine reports to have reused."""

    def merge(self, other: Funnel) -> None:
        """Add other requests."""
        self.served += other.served
        self.prompt += other.prompt
        self.held += other.held
        self.local += other.local
        self.promised += other.promised
        self.delivered += other.delivered


class Reuse:
    """The funnels of requests whose engines reported their reuse, and of all others."""

    __slots__ = ("reported", "unreported")

    def __init__(self) -> None:
        self.reported = Funnel()
        self.unreported = Funnel()

    def take(self, record: Record) -> None:
        """Count a request that is over, and was not refused."""
        cached = record.measured.cached_tokens
        funnel = self.unreported if cached is None else self.reported
        funnel.served += record.is_good is not None
        decision = record.decision
        if decision is None:
            return
        # A request that was resumed elsewhere was placed with the tokens that it had got.
        prompt = record.prompt_tokens
        funnel.prompt += prompt
        funnel.held += min(prompt, decision.pool_tokens)
        funnel.local += min(prompt, decision.chosen.local_tokens)
        funnel.promised += min(prompt, decision.reused_tokens)
        funnel.delivered += cached or 0

    def merge(self, other: Reuse) -> None:
        """Add other requests."""
        self.reported.merge(other.reported)
        self.unreported.merge(other.unreported)
