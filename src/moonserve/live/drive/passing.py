"""A reply as it passes from an engine to the client: what is seen of it on the way.

Bytes in, bytes out: whole events go on at once, and nothing is decoded; what is looked for are the
few byte strings that tell usage and the end. One object per call whose reply the client may get.
"""

from __future__ import annotations

import re

from moonserve.core.units import Tokens
from moonserve.live.openai import usage

_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]"
_FINISH = b'"finish_reason":'
_REASON = re.compile(rb'\s*"(\w+)"')
_END_BYTES = 32
"""The last event stands in the last of a stream."""
_MOST_HELD = 4 << 20
"""An event longer than this goes on in pieces."""


class Passing:
    """Counts what passes. `cached`: prompt tokens that prefill reused, where it was another's."""

    def __init__(self, cached: Tokens | None = None) -> None:
        self.counted = usage.SeenUsage()
        """The last usage that was seen."""
        self.events = 0
        self.finish: str | None = None
        """Why the last choice to end did."""
        self.done = False
        """Whether the whole reply, or a stream's last event, has passed."""
        self.failed = False
        """Whether the engine has said, as an event, that it failed."""
        self._prefilled = cached
        self._rest = b""
        """The beginning of an event whose end has not come."""

    @property
    def cached(self) -> Tokens | None:
        """Prompt tokens reused, by who computed the prompt; None: not said (yet)."""
        cached, prompt = self._prefilled, self.counted.prompt
        if cached is None:
            return self.counted.cached
        return cached if prompt is None else min(cached, prompt)

    @property
    def tokens(self) -> Tokens:
        """Tokens generated: as the engine counts, or else about one an event."""
        return self.counted.completion or max(1, self.events - 1)

    def whole(self, chunk: bytes) -> bytes:
        """What ends with an event's end; the beginning of the next is kept until its end comes."""
        if self._rest:
            chunk, self._rest = self._rest + chunk, b""
        if b"\r" in chunk:  # never in JSON: an engine that ends lines so
            chunk = chunk.replace(b"\r\n", b"\n")
        if chunk.endswith(b"\n\n"):
            return chunk
        end = chunk.rfind(b"\n\n") + 2
        if end < 2:
            end = 0 if len(chunk) < _MOST_HELD else len(chunk)
        self._rest = chunk[end:]
        return chunk[:end]

    def passed(self, events: bytes) -> bytes:
        """Whole events as the client gets them."""
        self.events += events.count(b"\n") // 2
        if events.rfind(usage.MARK) >= 0:
            events = self.put_right(events)
        self.finish = _finish(events) or self.finish
        self.done = self.done or _DONE in events[-_END_BYTES:]
        self.failed = _ERROR in events
        return events

    def put_right(self, data: bytes) -> bytes:
        """Note the usage in it, and have it say what was cached."""
        self.counted = usage.read(data)
        cached = self.cached
        return data if cached is None else usage.patched(data, cached)

    def answered(self, body: bytes) -> bytes:
        """A whole reply as the client gets it."""
        self.finish = _finish(body) or "done"
        self.done = True
        return self.put_right(body)


def _finish(data: bytes) -> str | None:
    """Why the choice ended that is told of last; None: it goes on, or none is told of."""
    at = data.rfind(_FINISH)
    found = None if at < 0 else _REASON.match(data, at + len(_FINISH))
    return None if found is None else found[1].decode()
