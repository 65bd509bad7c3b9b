"""The text of one generation as its tokens come, cut before the first stop string.

The gateway and the worker use it for the requests of our own instances. It never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.live.text.tools import StopMatcher, TokenText


class TextStream:
    """One per generation. What `feed` and `end` return, joined, is the generation's text."""

    def __init__(self, tokens: TokenText, stops: Sequence[str]) -> None:
        self._tokens = tokens
        self._matcher = StopMatcher(stops) if stops else None
        self.met: str | None = None
        """The stop string that ended the text; None: the text has met none."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain once these token ids have come."""
        text = self._tokens.feed(ids)
        return text if self._matcher is None else self._cut(self._matcher, text)

    def end(self, ids: Sequence[int] = ()) -> str:
        """The rest of the text, where these ids are the last ones with text."""
        text = self._tokens.feed(ids) + self._tokens.flush()
        if self._matcher is None:
            return text
        text = self._cut(self._matcher, text)
        return text if self.met else text + self._matcher.flush()

    def _cut(self, matcher: StopMatcher, text: str) -> str:
        text = matcher.feed(text)
        self.met = matcher.met
        return text
