"""Trust: which share of an instance's claims to hold prefixes counts.

The index claims what an instance holds; its engine reports for each request how much it reused. If
the engine finds far less than was claimed, the index is wrong: other token ids, another template,
or events lost unnoticed. From then on only a share of its claims counts, until these prove right.
Only the view changes it.
"""

from __future__ import annotations

from collections import deque

import msgspec

from moonserve.core.units import Tokens


class HitSample(msgspec.Struct, frozen=True):
    """How much a request should find cached at an instance, and how much it found."""

    claimed: Tokens
    found: Tokens


class Trust:
    """The trust in one instance. `share`: the part of its claims that counts; 1: trusted."""

    WINDOW = 16
    """How many recent claims are judged together."""
    LEAST = 4
    """Fewer claims are not judged."""
    LOST = 0.5
    """If a smaller part of the claims is confirmed, the index is wrong, not merely late."""
    PROVEN = 0.8
    """If this part or more is confirmed, the index is right."""
    FLOOR = 1 / 16
    """The lowest share. A claim that counted nothing could never prove right."""

    def __init__(self) -> None:
        self.share = 1.0
        self.claimed: Tokens = 0
        self.found: Tokens = 0
        """Tokens found of those claimed, ever."""
        self.unclaimed: Tokens = 0
        """Tokens found beyond the claims, ever."""
        self._recent: deque[HitSample] = deque(maxlen=self.WINDOW)

    @property
    def trusted(self) -> bool:
        """Whether all of its claims count."""
        return self.share >= 1.0

    def observe(self, sample: HitSample) -> None:
        """Learn from one request. A request without a claim teaches nothing."""
        found = min(sample.claimed, sample.found)
        self.claimed += sample.claimed
        self.found += found
        self.unclaimed += sample.found - found
        if not sample.claimed:
            return
        self._recent.append(HitSample(sample.claimed, found))
        if len(self._recent) < self.LEAST:
            return
        ratio = sum(it.found for it in self._recent) / sum(it.claimed for it in self._recent)
        if ratio < self.LOST:
            self.share = max(self.FLOOR, self.share * ratio)
        elif not self.trusted and ratio >= self.PROVEN:
            self.share = min(1.0, 2 * self.share)
        else:
            return
        self._recent.clear()  # claims with the old share say nothing about the new one
