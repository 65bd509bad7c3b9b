"""The tokens of a reply that passes, kept so that another engine can go on with it.

vLLM's events have the ids of their tokens beside the text, if the body asks for them. The gateway
takes them out again unless the client wants them too: then its bytes are those that it would get
without this. The ids stay in the form in which they came. `external` has one object per request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import msgspec

from moonserve.core.errors import UNREADABLE
from moonserve.core.units import Tokens
from moonserve.live.drive.passing import Passing
from moonserve.live.openai import usage
from moonserve.live.openai.request import Form
from moonserve.live.text.stops import StopMatcher

_IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
_ANY_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\[[\d, ]*\]')
_TEXT = {"chat": b'"delta":{"content":"', "completion": b'"text":"'}
"""What is before the text of an event that has text and nothing else."""
_CHOICE = b'"choices":[{'
_NOTHING = b'"delta":{},"logprobs":null,"finish_reason":null'
"""vLLM sends such events only if it is asked for ids: of tokens that its parsers keep to
themselves."""
_QUOTE = ord('"')
_ABORTED = b'"finish_reason":"abort"'
_HEAD = ("id", "object", "created", "model")
_END = b"]}]}\n\n"
"""How an event ends whose last field is the ids."""
_NULL_END = b"null}]}\n\n"
_NEAR = 64
"""The ids of few tokens begin within so many bytes of the end."""
_BEFORE = 8
"""Tokens before those in doubt: the characters of these begin in them at the earliest."""


class _Mark(NamedTuple):
    size: int
    held: int | None
    last: bytes
    matcher: StopMatcher | None
    ready: str


class StreamedTokens:
    """The ids of one stream's tokens, over all calls that make it."""

    def __init__(self, form: Form, wanted: bool, usage: bool = False) -> None:
        """wanted: whether the client gets the ids too; usage: whether it gets an event with the
        usage."""
        self.form = form
        self.wanted = wanted
        self.usage = usage
        self.matcher: StopMatcher | None = None
        """Since another engine goes on with the stream, and if the request has stop strings: what
        ends it at the first of them."""
        self._ready = ""
        """Text that the client may have from `matcher`, and has not got."""
        self.prompt = b""
        """Ids of the prompt, separated by commas."""
        self.why_not = ""
        """Why another engine cannot go on; empty: it can."""
        self.first = b""
        """The first event, as the client got it."""
        self._ids = bytearray()
        """Ids of the answer, each after a comma."""
        self._held: int | None = None
        """Where in `_ids` the last tokens begin whose text has not come; None: it has."""
        self._last = b""
        """Ids of the last event with text."""
        self._text = _TEXT[form]
        self._usual = b"\n\n\n"
        """What the last event had up to its text, and most events have. At first it is what no
        event begins with."""

    @property
    def count(self) -> Tokens:
        """Tokens of the answer so far."""
        return self._ids.count(b",")

    @property
    def known(self) -> bytes:
        """Ids of the answer so far, each after a comma."""
        return bytes(self._ids)

    def forget(self) -> None:
        """The client has received nothing: the next call begins anew."""
        self.prompt = self.first = self._last = b""
        self.why_not = ""
        self._ids.clear()
        self._held = None

    def settle(self) -> None:
        """The call that made the stream is lost: drop tokens whose text has not come.

        Another engine generates them again, so that their text is not lost.
        """
        if self._held is None:
            return
        if self.wanted:
            self.why_not = "its last tokens were sent before their text was complete"
        del self._ids[self._held :]
        self._held = None

    def mark(self) -> _Mark:
        """Where the answer is; see `back`."""
        return _Mark(len(self._ids), self._held, self._last, copy(self.matcher), self._ready)

    def back(self, mark: _Mark) -> None:
        """Forget what came after `mark`: the client has not received it."""
        del self._ids[mark.size :]
        self._held, self._last = mark.held, mark.last
        self.matcher, self._ready = mark.matcher, mark.ready

    def stop_at(self, stops: Sequence[str], held: str) -> None:
        """End the answer from now on at the first of these strings. held: text of its tokens that
        the first engine held back, because a stop string may begin there."""
        self.matcher = StopMatcher(stops)
        self._ready = self.matcher.feed(held)

    def cut(self, text: str, is_last: bool) -> str:
        """The text that the client gets of a piece of text."""
        matcher = self.matcher
        if matcher is None:
            return text
        ready, self._ready = self._ready, ""
        if matcher.met is None:
            ready += matcher.feed(text)
        return ready + matcher.flush() if is_last else ready

    def end_of(self, most: Tokens) -> tuple[list[int], list[int]]:
        """The last tokens of the answer, at most so many, and those before them for context: none
        if there are more."""
        ids = [int(it) for it in bytes(self._ids[1:]).split(b",") if it]
        if len(ids) > most:
            return ids[-most:], []
        return ids, [int(it) for it in self.prompt.rsplit(b",", _BEFORE)[-_BEFORE:]]

    def in_doubt(self) -> tuple[list[int], int]:
        """The end of the answer, and how many of the last tokens may have no text yet.

        An event with several tokens has the text of the last ones only if that is complete. 0: all
        text was sent.
        """
        several = self._last.count(b",") + 1
        if several == 1:
            return [], 0
        end = self.prompt.rsplit(b",", _BEFORE)[-_BEFORE:] + bytes(self._ids[1:]).split(b",")
        return [int(it) for it in end[-several - _BEFORE :]], several

    def drop(self, count: Tokens) -> None:
        """All text was sent but that of so many of the last tokens: drop these."""
        for _ in range(count):
            del self._ids[self._ids.rindex(b",") :]
        self._last = b""

    def add(self, ids: bytes, text: bool) -> None:
        """Note the tokens of an event, separated by commas. text: whether it has text."""
        if not ids:
            return  # an engine that aborts may send text that it held back
        if text:
            self._held = None
            self._last = ids
        elif self._held is None:
            self._held = len(self._ids)
        self._ids += b","
        self._ids += ids

    def usual(self, event: bytes) -> bytes:
        """As `take`, in less time, if this is one event that differs from the one before in its
        text and its ids only; else empty."""
        usual = self._usual
        if not event.startswith(usual) or not event.endswith(_END) or event.count(b"\n") != 2:
            return b""
        begin = event.rfind(_IDS, -_NEAR)
        if begin < 0 or event[len(usual)] == _QUOTE:
            return b""
        begin += len(_IDS)
        ids = event[begin : -len(_END)]
        if not ids:
            return b""
        self._held = None
        self._last = ids
        self._ids += b","
        self._ids += ids
        return event if self.wanted else event[: begin - 1] + _NULL_END

    def take(self, events: bytes) -> bytes:
        """Note the tokens in whole events; the events as the client gets them."""
        each = [it + b"\n\n" for it in events.split(b"\n\n")[:-1]]
        return b"".join([self.usual(it) or self._taken(it) for it in each])

    def _taken(self, event: bytes) -> bytes:
        if not self.first:
            event = self._begun(event)
        text = event.find(self._text) + len(self._text)
        begin = event.rfind(_IDS) + len(_IDS)
        if text < len(self._text) or begin < text:
            return self._other(event)
        end = event.index(b"]", begin)
        self._usual = event[:text]
        self.add(event[begin:end], event[text] != _QUOTE)
        if self.wanted:
            return event
        return event[: begin - 1] + b"null" + event[end + 1 :]

    def _begun(self, event: bytes) -> bytes:
        """The first event has the prompt's ids."""
        begin = event.find(_PROMPT_IDS) + len(_PROMPT_IDS)
        if begin < len(_PROMPT_IDS):
            self.why_not = "its engine did not report the prompt's tokens"
            self.first = event
            return event
        end = event.index(b"]", begin)
        self.prompt = event[begin:end]
        self.first = event[: begin - 1] + b"null" + event[end + 1 :]
        return event if self.wanted else self.first

    def _other(self, event: bytes) -> bytes:
        """An event that is not text with its ids: usage, the end, or what no other engine can go on
        with."""
        if _CHOICE not in event or event is self.first or b'"role":"' in event:
            return event
        if not self.why_not:
            kind = "not all of it is text: it has parts that its engine's parsers make"
            self.why_not = kind if _IDS in event else "its engine did not report all tokens"
        if self.wanted:
            return event
        return b"" if _NOTHING in event else _ANY_IDS.sub(rb"\1null", event)


class KeptPassing(Passing):
    """Counts what passes, and keeps the tokens."""

    def __init__(self, tokens: StreamedTokens, cached: Tokens | None, elsewhere: bool) -> None:
        super().__init__(cached, elsewhere)
        self._tokens = tokens

    @property
    def tokens(self) -> Tokens:
        """See Passing. Exact, if the engine reports all ids."""
        kept = self._tokens
        return self.counted.completion or (super().tokens if kept.why_not else kept.count)

    def passed(self, events: bytes) -> bytes:
        """See Passing."""
        out = self._tokens.usual(events)
        if out.endswith(self._open_end):  # it has no error, no usage and no end
            self.events += 1
            return out
        out = super().passed(out or self._tokens.take(events))
        return self._unless_aborted(out) if self.finish == "abort" else out

    def _unless_aborted(self, events: bytes) -> bytes:
        """The events before the one by which an engine that stops gives the request up."""
        at = events.rfind(b"data: ", 0, events.index(_ABORTED))
        self.error = events[at:]
        self.finish = None
        self.done = False
        return events[:at]


class ContinuedPassing(KeptPassing):
    """The same, of a completion that goes on with a stream: its events get the form of those
    before, and its usage counts the whole answer."""

    def __init__(self, tokens: StreamedTokens, cached: Tokens | None) -> None:
        """cached: prompt tokens that the first call reused; None: it did not report them."""
        super().__init__(tokens, cached, elsewhere=True)
        self._before = tokens.count
        first = _read(tokens.first) or {}
        self._head = {name: first[name] for name in _HEAD if name in first}

    def passed(self, events: bytes) -> bytes:
        """See Passing."""
        out = Passing.passed(self, events)
        if self.finish == "abort":
            out = self._unless_aborted(out)
        written = []
        for event in out.split(b"\n\n")[:-1]:
            written.append(self._rewritten(event))
            if self._stopped():
                self.cut_short = not self.done
                self.done = False
                self.finish = "stop"
                self.uncounted = self._tokens.in_doubt()[1] > 0
                if not self.uncounted:
                    written.append(self.end())
                break
        return b"".join(written)

    def _stopped(self) -> bool:
        """Whether a stop string has ended the answer. Its engine does not know of it."""
        matcher = self._tokens.matcher
        return matcher is not None and matcher.met is not None

    def end(self) -> bytes:
        """The last events of an answer that a stop string has ended. If it is `uncounted`, the
        caller has dropped the tokens after that string."""
        tokens = self._tokens
        self.done = True
        self.uncounted = False
        prompt = tokens.prompt.count(b",") + 1
        self.counted = usage.SeenUsage(prompt, tokens.count)
        if not tokens.usage:
            return b"data: [DONE]\n\n"
        said = {"completion_tokens": tokens.count - self._before}
        event = {**self._head, "choices": [], "usage": self._whole_usage(said)}
        return b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(event)

    def put_right(self, data: bytes) -> bytes:
        """See Passing. The usage is written when its event is."""
        seen = usage.read(data)
        if seen.prompt is not None:
            prompt = self._tokens.prompt.count(b",") + 1
            said = None if seen.completion is None else self._before + seen.completion
            self.counted = usage.SeenUsage(prompt, said, seen.cached)
        return data

    def _rewritten(self, event: bytes) -> bytes:
        chunk = _read(event)
        if chunk is None:
            return event + b"\n\n"  # the end of the stream
        chunk["choices"] = [self._choice(it) for it in chunk.get("choices", ())]
        if chunk.get("usage"):
            chunk["usage"] = self._whole_usage(chunk["usage"])
        return b"data: %b\n\n" % msgspec.json.encode({**chunk, **self._head})

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice in the form of the stream before."""
        tokens = self._tokens
        text = choice.get("text", "")
        ids = choice.get("token_ids") or []
        tokens.add(b",".join([b"%d" % it for it in ids]), bool(text))
        finish, reason = choice.get("finish_reason"), choice.get("stop_reason")
        text = tokens.cut(text, finish is not None)
        if tokens.matcher is not None and tokens.matcher.met is not None:
            finish, reason = "stop", tokens.matcher.met
        ended = {"finish_reason": finish, "stop_reason": reason}
        shown = {"token_ids": ids if tokens.wanted else None}
        if tokens.form == "completion":
            return {**choice, "text": text, **ended, "prompt_token_ids": None, **shown}
        if not finish:
            del ended["stop_reason"]
        content = {"index": 0, "delta": {"content": text}, "logprobs": None}
        return {**content, **ended, **shown}

    def _whole_usage(self, said: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer, for the usage of its rest."""
        prompt = self._tokens.prompt.count(b",") + 1
        completion = self._before + said.get("completion_tokens", 0)
        whole = {
            **said,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if details := said.get("prompt_tokens_details"):
            whole["prompt_tokens_details"] = {**details, "cached_tokens": self.cached}
        return whole


def _read(event: bytes) -> dict[str, Any] | None:
    """An event's fields. None: it has none."""
    try:
        return msgspec.json.decode(event.removeprefix(b"data: "), type=dict[str, Any])
    except UNREADABLE:
        return None
