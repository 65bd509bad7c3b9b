"""A reply on its way from an engine to the client: what the gateway reads of it.

Whole events go on at once and are not decoded. The gateway looks for the few byte strings that
report usage and the end. `external` has one object per call that makes a client's reply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.units import Tokens
from moonserve.live.openai import usage
from moonserve.live.openai.external import GENERATING
from moonserve.live.openai.request import Form

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
    decode: DecodeTimes | None = None
    """Nor that of a decode."""

    def __init__(self, cached: Tokens | None = None, elsewhere: bool = False) -> None:
        self.counted = usage.SeenUsage()
        """The last usage that the reply had."""
        self.events = 0
        self._begun = False
        """Whether something of an answer has passed, and not only the mark of the end."""
        self.finish: str | None = None
        """The last finish_reason of the reply; None: no choice has ended."""
        self.done = False
        """Whether the whole reply, or a stream's last event, has passed."""
        self.cut_short = False
        """Whether the engine goes on, although the reply has ended."""
        self.uncounted = False
        """Whether it has ended by a stop string, and its last events wait for the number of tokens:
        see streamed.ContinuedPassing."""
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
    def begun(self) -> bool:
        """Whether the first token has passed."""
        return self._begun

    @property
    def cached(self) -> Tokens | None:
        """Prompt tokens that the prefill engine reused; None: not reported (yet)."""
        cached, prompt = self._prefilled, self.counted.prompt
        if not self._elsewhere:
            return self.counted.cached
        return cached if prompt is None or cached is None else min(cached, prompt)

    @property
    def tokens(self) -> Tokens:
        """Tokens generated: the engine's count, or about one per event; 0: nothing has passed."""
        return self.counted.completion or (max(1, self.events - 1) if self._begun else 0)

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
        if not self._begun:  # the mark of the end is an event too
            self._begun = self.events > (1 if done else 0)
        return events

    def put_right(self, data: bytes) -> bytes:
        """Note the usage in these bytes, and write the number of cached tokens into it."""
        self.counted = usage.read(data)
        cached = self.cached
        return usage.patched(data, cached) if self._elsewhere or cached is not None else data

    def answered(self, body: bytes) -> bytes:
        """Account for a whole reply; the bytes that the client gets."""
        self.finish = _finish(body) or "done"
        self.done = self._begun = True
        return self.put_right(body)


class NamedReply(msgspec.Struct, frozen=True):
    """How the events of a form are read that have names."""

    token: bytes
    """In each event that brings a piece of the text."""
    last: re.Pattern[bytes]
    """The end of the stream."""
    error: re.Pattern[bytes]
    reason: re.Pattern[bytes]
    """Why the reply ended, in its last events or in the whole reply."""
    usage: usage.UsageNames


NAMED: Mapping[Form, NamedReply] = {
    "responses": NamedReply(
        b".delta\n",
        re.compile(rb"^event: response\.(?:completed|incomplete)$", re.MULTILINE),
        re.compile(rb'^event: (?:error|response\.failed)$|^data: \{\s*"error"', re.MULTILINE),
        re.compile(rb'"status":\s*"(\w+)"'),
        usage.UsageNames(b"cached_tokens"),
    ),
    "messages": NamedReply(
        b"event: content_block_delta\n",
        re.compile(rb"^event: message_stop$", re.MULTILINE),
        re.compile(rb"^event: error$", re.MULTILINE),
        re.compile(rb'"stop_reason":\s*"(\w+)"'),
        usage.UsageNames(
            b"cache_read_input_tokens",
            (b"cache_read_input_tokens", b"cache_creation_input_tokens"),
        ),
    ),
}
REASONS: Mapping[str, str] = {
    "completed": "stop",
    "end_turn": "stop",
    "incomplete": "length",
    "max_tokens": "length",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
}
"""Why a reply ended, in the words of chat."""


class NamedPassing(Passing):
    """Counts what passes of a form whose events have names."""

    def __init__(
        self, named: NamedReply, cached: Tokens | None = None, elsewhere: bool = False
    ) -> None:
        super().__init__(cached, elsewhere)
        self._named = named
        self._reason = b""

    @property
    def begun(self) -> bool:
        """See Passing. Some events come before the first token, and an answer may have none."""
        return self._begun or self.done

    @property
    def tokens(self) -> Tokens:
        """See Passing."""
        return self.counted.completion or (max(1, self.events) if self._begun else 0)

    def passed(self, events: bytes) -> bytes:
        """See Passing."""
        named = self._named
        if (found := named.error.search(events)) is not None:
            events, self.error = events[: found.start()], events[found.start() :]
        self.events += events.count(named.token)
        self._begun = self.events > 0
        if usage.MARK in events:
            events = self.put_right(events)
        if reasons := named.reason.findall(events):
            self._reason = reasons[-1]
        if named.last.search(events) is not None:
            self._end()
        return events

    def put_right(self, data: bytes) -> bytes:
        """See Passing."""
        names = self._named.usage
        seen = usage.read_named(data, names)
        if seen.prompt is None:
            return data
        self.counted = seen
        return usage.patched_named(data, names, self.cached) if self._elsewhere else data

    def answered(self, body: bytes) -> bytes:
        """See Passing."""
        self._reason = next(reversed(self._named.reason.findall(body)), b"")
        self._end()
        self._begun = True
        return self.put_right(body)

    def _end(self) -> None:
        reason = self._reason.decode()
        self.finish = REASONS.get(reason, reason) or "done"
        self.done = True


class PooledPassing(Passing):
    """Counts what passes of a form that generates no token."""

    @property
    def tokens(self) -> Tokens:
        """See Passing."""
        return 0


def passing(form: Form, cached: Tokens | None = None, elsewhere: bool = False) -> Passing:
    """The counter for a reply of this form; see Passing."""
    named = NAMED.get(form)
    if named is not None:
        return NamedPassing(named, cached, elsewhere)
    kind = Passing if form in GENERATING else PooledPassing
    return kind(cached, elsewhere)


def _finish(data: bytes) -> str | None:
    """Why the choice ended that is told of last; None: it goes on, or none is told of."""
    at = data.rfind(_FINISH)
    found = None if at < 0 else _REASON.match(data, at + len(_FINISH))
    return None if found is None else found[1].decode()
