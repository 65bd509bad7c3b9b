"""How a call to an instance ends without its reply: errors that `request` turns into facts.

Raised by the wire, by `calls` and by the connectors. Nothing here waits.
"""

from __future__ import annotations

import re

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.units import InstanceId
from moonserve.live.http.client import UpstreamError
from moonserve.live.http.message import JSON

_ADDRESS = re.compile(r"^(?:\[[^\]]+\]|[^\s:]+):\d+: ")


class EngineAnswer(msgspec.Struct):
    """A whole reply of an engine, for the client."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: dict[str, str] = {}


class Passed(MoonserveError):
    """The client gets an engine's own error answer, and no other engine is called."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(f"the engine answered {answer.status}")
        self.answer = answer


class CallLost(MoonserveError):
    """A call ended without its reply."""

    status = 502

    def __init__(
        self,
        why: str,
        *,
        member: InstanceId | None = None,
        busy: EngineAnswer | None = None,
        retry: bool = True,
        unreachable: bool = False,
    ) -> None:
        """member: the instance to blame, if it is not the one that was called; busy: its answer
        that it takes no more requests now, which the client gets if every retry fails; retry:
        whether another instance may do better; unreachable: nothing listens at its address.
        """
        super().__init__(why)
        self.member = member
        self.busy = busy
        self.retry = retry
        self.unreachable = unreachable

    @staticmethod
    def of(error: MoonserveError) -> CallLost:
        """The same failure as a CallLost."""
        if isinstance(error, CallLost):
            return error
        unreachable = isinstance(error, UpstreamError) and not error.sent
        return CallLost(str(error), unreachable=unreachable)


def plain(error: MoonserveError, called: InstanceId) -> str:
    """The error's text for clients: with the instance's name in place of its address."""
    text = _ADDRESS.sub("", str(error))
    return text if called in text.replace(":", " ").split() else f"{called}: {text}"
