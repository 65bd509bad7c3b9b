"""A reply on its way from an engine to the client: what the gateway reads of it.

Whole events go on at once and are not decoded. The gateway looks for the few byte strings that
report usage and the end. `external` has one object per call that makes a client's reply.
"""

from __future__ import annotations

import re

from moonserve.core.schedule.record import PrefillTimes
from moonserve.core.units import Tokens
from moonserve.live.openai import usage

_ERROR = b'"error"'
_ERROR_EVENT = re.compile(rb'data: \{\s*"(?:error"|object":\s*"error")')
_DONE = b"data: [DONE]"
_FINISH = b'"finish_reason":'
_REASON = re.compile(rb'\s*"(\w+)"')
_END_BYTES = 32
"""The stream's last event is within this many bytes at its end."""
_MOST_HELD = 4 << 20
"""A longer event is sent on in pieces."""


class Passing:
    """Counts what passes.

    elsewhere: whether another engine prefilled the prompt: what this one reports as cached is then
    what it received. cached: prompt tokens that the other one reused; None: it reports none.
    """

    prefill: PrefillTimes | None = None
    """External engines do not report how they spend a prefill's time."""

    def __init__(self, cached: Tokens | None = None, elsewhere: bool = False) -> None:
        self.counted = usage.SeenUsage()
        """The last usage that the reply had."""
        self.events = 0
        self.finish: str | None = None
        """The last finish_reason of the reply; None: no choice has ended."""
        self.done = False
        """Whether the whole reply, or a stream's last event, has passed."""
        self.error = b""
        """The engine's error event, which does not pass; empty: it has sent none."""
        self._prefilled = cached
        self._elsewhere = elsewhere or cached is not None
        self._open_end = b"\n\n\n"
        """The end, from its finish_reason on, of the last event whose choice goes on. Most events
        end like the one before, and tell nothing new. At first it is what no event ends with."""
        self._rest = b""
        """The beginning of an event whose end has not come."""

    @property
    def cached(self) -> Tokens | None:
        """Prompt tokens that the prefill engine reused; None: not reported (yet)."""
        cached, prompt = self._prefilled, self.counted.prompt
        if not self._elsewhere:
            return self.counted.cached
        return cached if prompt is None or cached is None else min(cached, prompt)

    @property
    def tokens(self) -> Tokens:
        """Tokens generated: the engine's count, or about one per event."""
        return self.counted.completion or max(1, self.events - 1)

    def whole(self, chunk: bytes) -> bytes:
        """The whole events of a chunk. The beginning of the next event is kept until its end
        comes."""
        if self._rest:
            chunk, self._rest = self._rest + chunk, b""
        if b"\r" in chunk:  # JSON has no carriage return: this engine ends lines with CRLF
            chunk = chunk.replace(b"\r\n", b"\n")
        if chunk.endswith(b"\n\n"):
            return chunk
        end = chunk.rfind(b"\n\n") + 2
        if end < 2:
            end = 0 if len(chunk) < _MOST_HELD else len(chunk)
        self._rest = chunk[end:]
        return chunk[:end]

    def passed(self, events: bytes) -> bytes:
        """Account for whole events; the bytes that the client gets."""
        if _ERROR in events and (found := _ERROR_EVENT.search(events)) is not None:
            events, self.error = events[: found.start()], events[found.start() :]
        self.events += events.count(b"\n") // 2
        if usage.MARK in events:
            events = self.put_right(events)
        if events.endswith(self._open_end):
            return events
        finish = _finish(events)
        done = _DONE in events[-_END_BYTES:]
        if finish is None and not done and (at := events.rfind(_FINISH)) >= 0:
            self._open_end = events[at:]
        self.finish = finish or self.finish
        self.done = self.done or done
        return events

    def put_right(self, data: bytes) -> bytes:
        """Note the usage in these bytes, and write the number of cached tokens into it."""
        self.counted = usage.read(data)
        cached = self.cached
        return usage.patched(data, cached) if self._elsewhere or cached is not None else data

    def answered(self, body: bytes) -> bytes:
        """Account for a whole reply; the bytes that the client gets."""
        self.finish = _finish(body) or "done"
        self.done = True
        return self.put_right(body)


def _finish(data: bytes) -> str | None:
    """Why the choice ended that is told of last; None: it goes on, or none is told of."""
    at = data.rfind(_FINISH)
    found = None if at < 0 else _REASON.match(data, at + len(_FINISH))
    return None if found is None else found[1].decode()
