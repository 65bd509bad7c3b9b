"""How far an instance's claims to hold prefixes are believed: as far as its engine confirms them.

The index says what an instance holds, its engine says of each request what it reused. An instance
whose engine finds far less than was claimed has an index that is wrong (other token ids, another
template, events lost without a trace): from then on only a share of its claims counts, until what
is still claimed of it proves right. Only the view changes it.
"""

from __future__ import annotations

from collections import deque

import msgspec

from moonserve.core.units import Tokens


class HitSample(msgspec.Struct, frozen=True):
    """What a request was taken to find cached at an instance, and what it found."""

    claimed: Tokens
    found: Tokens


class Trust:
    """One instance's standing. `share`: the part of its claims that counts, 1 where trusted."""

    WINDOW = 16
    """Claims by which it is judged."""
    LEAST = 4
    """So many, and more, say something."""
    LOST = 0.5
    """A smaller part of the claims confirmed: the index is wrong, not merely late."""
    PROVEN = 0.8
    """So much of them confirmed, or more: it is right."""
    FLOOR = 1 / 16
    """A claim is never ignored: it could not prove right any more."""

    def __init__(self) -> None:
        self.share = 1.0
        self.claimed: Tokens = 0
        self.found: Tokens = 0
        """Of what was claimed, ever."""
        self.unclaimed: Tokens = 0
        """Found beyond what was claimed, ever."""
        self._recent: deque[HitSample] = deque(maxlen=self.WINDOW)

    @property
    def trusted(self) -> bool:
        """Whether all of its claims count."""
        return self.share >= 1.0

    def observe(self, sample: HitSample) -> None:
        """Learn from one request; those of which nothing was claimed say nothing."""
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
        self._recent.clear()  # what was claimed by the old share says nothing of the new one
