"""Where a text meets one of some strings first, as the text comes piece by piece.

TextStream cuts generations with it, external streams are cut with it, and CallReader finds tags.
It never waits. What `feed` and `flush` return, joined, never depends on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


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
        self.after = ""
        """The text that came behind it with its last piece."""

    def feed(self, text: str) -> str:
        """Return the text that may be sent now; none after a stop string."""
        if self.met is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)
            self.met = text[begin:end]
            self.after = text[end:]
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
