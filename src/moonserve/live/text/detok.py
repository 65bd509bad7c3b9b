"""Token ids to text as they come: whole characters only, and nothing of a stop string.

For whoever streams: the gateway, and the worker where it has stop strings to watch for. One object
per generation. What `feed` and `flush` return, joined, never depends on how the input was cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from moonserve.live.text.tokenizer import Tokenizer


class Detokenizer:
    """Joined, the output is the text of all ids fed: U+FFFD only for bytes that are not UTF-8.

    at_start: whether the ids begin a text, as in Tokenizer.decode, or continue a prompt: only at
    its start does SentencePiece put a space that is not of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and tokenizer.strips_space

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is now certain; bytes of an unfinished character wait for the next call."""
        raw = b"".join(map(self._tokenizer.token_bytes, ids))
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text before the first stop string, which may span pieces.

    The first is the one complete first; of several that end at once, the one that began first. The
    stop string itself is never returned (vLLM's include_stop_str_in_output=false).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is the client's error, refused at the door"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string has been met."""
        if self._stopped:
            return "", True
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return text[: min(matches)[1]], True
        cut = self._safe(text)
        self._held = text[cut:]
        return text[:cut], False

    def _safe(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string could begin with."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def flush(self) -> str:
        """The end: text held back that turned out to begin no stop string."""
        held, self._held = self._held, ""
        return held
