"""Token ids to text, piece by piece: whole characters only, and no part of a stop string.

`live/openai/text` uses both classes, one object of each per generation. The joined results of
`feed` and `flush` never depend on how the input was cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from moonserve.live.text.tokenizer import Tokenizer


class Detokenizer:
    """The joined output is the text of all ids; U+FFFD replaces only bytes that are not UTF-8.

    at_start: whether the ids begin a text, as in Tokenizer.decode, or continue a prompt. At the
    start of a text, SentencePiece adds a space that does not belong to it.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and tokenizer.strips_space

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is certain now; bytes of an incomplete character wait."""
        raw = b"".join(map(self._tokenizer.token_bytes, ids))
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """End the text: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text before the first stop string, which may span pieces.

    The first stop string is the one that is complete first. If several end at the same character,
    the longest wins. The stop string itself is never returned (vLLM's
    include_stop_str_in_output=false).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "the API refuses an empty stop string"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.met: str | None = None
        """The stop string that ended the text; None: the text goes on."""

    def feed(self, text: str) -> str:
        """Return the text that may be sent now; none after a stop string."""
        if self.met is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self.met = text[begin:end]
            self._held = ""
            return text[:begin]
        cut = self._safe(text)
        self._held = text[cut:]
        return text[:cut]

    def _safe(self, text: str) -> int:
        """Return where the longest end of `text` starts that may begin a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def flush(self) -> str:
        """End the text: return the text that was held back and is no stop string."""
        held = self._held
        self._held = ""
        return held
