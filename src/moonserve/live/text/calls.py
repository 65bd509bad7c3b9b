"""Calls of tools in the text that a model writes, as the text comes piece by piece.

It reads the form of Hermes and Qwen, `<tool_call>{"name": …, "arguments": …}</tool_call>`, which
most open models with tools write. A generation that may call tools has one CallReader; the
template asks one whether its model writes this form. Nothing here waits or knows which tools exist.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE
from moonserve.live.text.stops import StopMatcher

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class FoundCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


class _CallJson(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: dict[str, Any] = {}


class CallReader:
    """Takes the calls out of a text. Neither the text nor the calls depend on how it was cut.

    A call that is not valid JSON is text, as in vLLM. White space between calls is dropped, and so
    is white space between the beginning of the text and its first call.
    """

    def __init__(self, most: int | None = None, is_call: bool = False) -> None:
        """most: further calls are dropped; None: all are wanted. is_call: the text begins within a
        call, whose begin tag it lacks."""
        self._most = most
        self._begun = "" if is_call else _OPEN
        """The begin tag of the call that is read now."""
        self._tag = StopMatcher((_CLOSE if is_call else _OPEN,))
        self._body: list[str] | None = [] if is_call else None
        """Pieces of the call that is read now; None: it is text."""
        self._blank: list[str] = []
        """White space that is dropped if a call follows."""
        self._is_edge = True
        """Whether there was only white space since the beginning or the last call."""
        self._calls: list[FoundCall] = []
        self.count = 0
        """Calls so far."""

    def feed(self, text: str) -> str:
        """The text without calls that is certain now."""
        said = []
        while True:
            piece = self._tag.feed(text)
            if self._body is None:
                said.append(self._say(piece))
            else:
                self._body.append(piece)
            if self._tag.met is None:
                return "".join(said)
            text = self._tag.after
            if self._body is None:
                self._body = []
                self._tag = StopMatcher((_CLOSE,))
            else:
                said.append(self._close(_CLOSE))
                self._tag = StopMatcher((_OPEN,))

    def end(self) -> str:
        """The text that was held back. A call that lacks nothing but its end tag is a call."""
        rest = self._tag.flush()
        if self._body is None:
            said = self._say(rest)
        else:
            self._body.append(rest)
            said = self._close("")
        return said if self.count else said + "".join(self._blank)

    def take(self) -> list[FoundCall]:
        """The calls that came since the last time."""
        fresh, self._calls = self._calls, []
        return fresh

    def _close(self, tag: str) -> str:
        """End the call that is read; the text that it is if it is none. tag: its end tag."""
        body = "".join(self._body or ())
        begun, self._begun = self._begun, _OPEN
        self._body = None
        try:
            written = msgspec.json.decode(body, type=_CallJson)
            arguments = msgspec.json.encode(written.arguments).decode()
        except (*UNREADABLE, UnicodeEncodeError):
            return self._say(begun + body + tag)
        self._is_edge = True
        self._blank.clear()
        if self._most is None or self.count < self._most:
            self.count += 1
            self._calls.append(FoundCall(written.name, arguments))
        return ""

    def _say(self, text: str) -> str:
        """Text outside calls; white space waits for what follows it."""
        if not self._is_edge:
            return text
        if not text or text.isspace():
            self._blank.append(text)
            return ""
        text = "".join(self._blank) + text
        self._is_edge = False
        self._blank.clear()
        return text
