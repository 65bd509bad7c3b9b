"""How often a text has each token: what the penalties of one job count.

ActiveJob has one. It only counts; the engine's sampler reads what `taken` returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from moonserve.core.request import TokenCounts


class Counts:
    """The tokens of one prompt and its text, which grows."""

    def __init__(self, prompt: Iterable[int], generated: Iterable[int]) -> None:
        """prompt: empty where no penalty is for its tokens. It may contain `generated`."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._places)
        self._counts = array("q", bytes(8 * len(self._ids)))
        for token in generated:
            self.add(token)

    def add(self, token: int) -> None:
        """This token was generated."""
        place = self._places.get(token)
        if place is None:
            self._places[token] = len(self._ids)
            self._ids.append(token)
            self._counts.append(1)
        else:
            self._counts[place] += 1

    def taken(self) -> TokenCounts:
        """The counts now, for one pass."""
        return TokenCounts(self._ids.tobytes(), self._counts.tobytes())
