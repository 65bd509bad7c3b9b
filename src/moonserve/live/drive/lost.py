"""How a call to an instance ends without its reply: errors that `request` turns into facts.

Raised by the wire, by `calls` and by the connectors. What clients may read of a failure is made
here: no address of an instance, and of an engine's text only what concerns the client's request.
Nothing here waits.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError
from moonserve.core.units import InstanceId
from moonserve.live.http.client import UpstreamError
from moonserve.live.http.message import JSON, ErrorBody, shaped
from moonserve.live.openai.request import PATHS, SERVED_BY, Form

_NOT_FOUND = 404
_MOST_CHARS = 4_000
"""Of an engine's message; a longer one is cut."""
_LOGGED_BYTES = 500
_PEER = re.compile(r"(?:^|(?<=: ))(?:\[[^\]]+\]|[^\s:]+):\d+: ")
"""How texts of the HTTP client begin."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>,;)]*[^\s'\"<>,;:.)]")
_HOST = re.compile(
    r"(?<![\w.:])(?:\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.%]*\]|(?:\d{1,3}\.){3}\d{1,3}|localhost"
    r"|(?:[A-Za-z0-9-]+\.)+[A-Za-z][A-Za-z0-9-]*(?=:\d))(?::\d{1,5})?(?![\w.]\w)"
)
_ADDRESS = "(an address)"
_MESSAGE = re.compile(r'"(?:message|detail)"\s*:\s*"((?:[^"\\]|\\.)*)')
_QUOTED = re.compile(r"""(?<!\w)(["'])(?:(?!\1)[^\\]|\\.){21,}(?:\1|\Z)""", re.DOTALL)
"""A quotation of more than 20 characters, also one whose end is cut off: it may be of a prompt."""
_READ_CHARS = 1_000
_SAID_CHARS = 300


def without_addresses(text: str) -> str:
    """The text without URLs, and without hosts and their ports."""
    return _HOST.sub(_ADDRESS, _URL.sub(_ADDRESS, _PEER.sub("", text)))


def quoted_message(detail: str) -> str:
    """What operators see beside a request of an engine's answer: its message, without addresses and
    long quotations."""
    detail = detail[:_READ_CHARS]
    message = _MESSAGE.search(detail)
    text = detail if message is None else message[1].replace('\\"', '"')
    text = without_addresses(_QUOTED.sub("(a quotation)", text))
    return " ".join(text.replace("\\n", " ").split())[:_SAID_CHARS]


def logged(body: bytes) -> str:
    """The beginning of an engine's answer, for the log."""
    return body[:_LOGGED_BYTES].decode("utf-8", "replace")


def refusal(status: int, body: bytes, form: Form) -> bytes:
    """What the client gets of an engine's 4xx about its request: the message in the path's shape.

    If the engine does not answer in that shape, the client gets the status only: then the answer
    may come from something between this gateway and the engine.
    """
    path = PATHS[form]
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        given = {}
    said = given.get("error", given)  # some engines have the fields beside "error", or its text
    found: dict[str, Any] = said if isinstance(said, dict) else {"message": said}
    message = found.get("message")
    if not isinstance(message, str):
        found, message = {}, f"the engine refused the request with status {status}"
        if status == _NOT_FOUND:
            message = f"the engine has no path {path}: {SERVED_BY[form]}"
    error = ErrorBody(
        without_addresses(message)[:_MOST_CHARS],
        _text(found.get("type")) or "invalid_request_error",
        _text(found.get("param")),
        code if isinstance(code := found.get("code"), int) else _text(code),
    )
    return msgspec.json.encode(shaped(path, status, error))


def _text(value: object) -> str | None:
    return without_addresses(value)[:_MOST_CHARS] if isinstance(value, str) else None


class EngineAnswer(msgspec.Struct):
    """A whole reply of an engine, as the client gets it."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: dict[str, str] = {}


class Passed(MoonserveError):
    """The client gets an engine's own error answer, and no other engine is called."""

    def __init__(self, answer: EngineAnswer, detail: str = "") -> None:
        """detail: what only operators see, such as the engine's own text."""
        super().__init__(f"the engine answered {answer.status}")
        self.answer = answer
        self.detail = detail


class CallLost(MoonserveError):
    """A call ended without its reply."""

    status = 502

    def __init__(
        self,
        why: str,
        *,
        member: InstanceId | None = None,
        busy: EngineAnswer | None = None,
        detail: str = "",
        retry: bool = True,
        unreachable: bool = False,
        broke: bool = False,
        package_missing: bool = False,
        refused: BadRequest | None = None,
    ) -> None:
        """member: the instance to blame, if it is not the one that was called; busy: its answer
        that it takes no more requests now, which the client gets if every retry fails; detail: what
        only the log has, such as the engine's own text; retry: whether another instance may do
        better; unreachable: nothing listens at its address; broke: the connection broke off after
        the call was sent, so its process may have died; package_missing: its host must install
        something; refused: what is wrong with the request itself, which the client gets.
        """
        super().__init__(why)
        self.detail = detail
        self.member = member
        self.busy = busy
        self.retry = retry
        self.unreachable = unreachable
        self.broke = broke
        self.package_missing = package_missing
        self.refused = refused

    @staticmethod
    def of(error: MoonserveError) -> CallLost:
        """The same failure as a CallLost."""
        if isinstance(error, CallLost):
            return error
        if isinstance(error, UpstreamError) and not error.sent:
            return CallLost("it cannot be reached", detail=str(error), unreachable=True)
        return CallLost(str(error), broke=isinstance(error, UpstreamError))

    @property
    def said(self) -> str:
        """What operators see of `detail` beside the request."""
        return quoted_message(self.detail)

    @property
    def in_full(self) -> str:
        """The text for the log."""
        return f"{self}: {self.detail}" if self.detail else str(self)


def plain(error: MoonserveError, called: InstanceId) -> str:
    """The error's text for clients, with the instance's name and without addresses."""
    text = without_addresses(str(error))
    return text if called in text.replace(":", " ").split() else f"{called}: {text}"
