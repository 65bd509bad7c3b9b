"""What the gateway reports of each call to an external engine while it runs.

The driver calls `Observer.began` when it sends a call. On the OutgoingCall that it gets, it calls
`answered` at the first byte of the reply, raises `count` with every token, and calls `ended` in any
case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonserve.core.schedule.observed import Part
from moonserve.core.units import BlockKey, InstanceId, Tokens


class OutgoingCall(Protocol):
    """One call that was sent and has not ended."""

    count: Tokens
    """Tokens that have arrived; the caller raises it."""

    def answered(self, cached: Tokens | None) -> None:
        """The first token has arrived.

        cached: prompt tokens that the engine says it reused; None: it has not said it yet. If usage
        comes at the end of the reply, pass it to `ended`. If all tokens come at once, set `count`
        first.
        """

    def ended(self, cached: Tokens | None = None) -> None:
        """The call has ended, with or without success. A second call changes nothing."""


class Observer(Protocol):
    """What learns from calls: the Fleet."""

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """An engine did not find these blocks in the shared store, although it was expected to."""

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> OutgoingCall:
        """A call is sent now.

        prompt: its length; predicted: how much of it should be cached there
        (Decision.reused_tokens); streams: whether its tokens come one by one.
        """
