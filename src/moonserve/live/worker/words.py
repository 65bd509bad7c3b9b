"""The text of one generation as its tokens come, cut at the first stop string.

For the worker's wire, where a tokenizer was given.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.live.text.detok import Detokenizer, StopMatcher
from moonserve.live.text.tokenizer import Tokenizer


class Words:
    """One per generation; what `push` and `flush` return, joined, is the completion's text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, at_start=False)
        self._matcher = StopMatcher(stops)
        self._stops = stops
        self._unsent = ""

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string if one was met."""
        return self._match(self._detokenizer.feed((token,)))

    def flush(self) -> str:
        """What was held back, at the end; a stop string can no longer be met."""
        return self._match(self._detokenizer.flush())[0] + self._matcher.flush()

    def _match(self, text: str) -> tuple[str, str | None]:
        self._unsent += text
        certain, met = self._matcher.feed(text)
        self._unsent = self._unsent[len(certain) :]
        if not met:
            return certain, None
        return certain, next(stop for stop in self._stops if self._unsent.startswith(stop))
