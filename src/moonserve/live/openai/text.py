"""The text of one generation as its tokens come, cut before the first stop string.

The gateway and the worker use it for the requests of our own instances. It never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.units import Tokens
from moonserve.live.text.stops import StopMatcher
from moonserve.live.text.tools import TokenText


class TextStream:
    """One per generation. What `feed` and `end` return, joined, is the generation's text."""

    def __init__(self, tokens: TokenText, stops: Sequence[str], free: Tokens = 0) -> None:
        """free: in the text of so many first tokens no stop string is looked for."""
        self._tokens = tokens
        self._matcher = StopMatcher(stops) if stops else None
        self._free = free
        self.met: str | None = None
        """The stop string that ended the text; None: the text has met none."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain once these token ids have come."""
        if self._matcher is None:
            return self._tokens.feed(ids)
        before = ""
        if self._free:
            before, ids = self._pass_free(ids)
        return before + self._cut(self._matcher, self._tokens.feed(ids))

    def end(self, ids: Sequence[int] = ()) -> str:
        """The rest of the text, where these ids are the last ones with text."""
        before = ""
        if self._free:
            before, ids = self._pass_free(ids)
        text = self._tokens.feed(ids) + self._tokens.flush()
        if self._matcher is None:
            return before + text
        text = before + self._cut(self._matcher, text)
        return text if self.met else text + self._matcher.flush()

    def _pass_free(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """The text of those tokens that may have a stop string, and the other tokens."""
        free = ids[: self._free]
        self._free -= len(free)
        return self._tokens.feed(free), ids[len(free) :]

    def _cut(self, matcher: StopMatcher, text: str) -> str:
        text = matcher.feed(text)
        self.met = matcher.met
        return text
