"""What the relay tells of each call to a foreign engine, as it goes on.

`Observer.began` when a call is sent, then on the OutgoingCall it gives: `answered` at the first
byte of its reply, `count` raised with every token, and `ended` on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonserve.core.schedule.observed import Part
from moonserve.core.units import BlockKey, InstanceId, Tokens


class OutgoingCall(Protocol):
    """One call that is out."""

    count: Tokens
    """Tokens that have come; raised by the caller as they do."""

    def answered(self, cached: Tokens | None) -> None:
        """The first token is there. cached: prompt tokens reused, as the engine says it, or None:
        it did not say. Where usage comes at the end, say None here and give it to `ended`.
        For a reply that comes at once, with all its tokens, `count` is set before.
        """

    def ended(self, cached: Tokens | None = None) -> None:
        """The call is over, however; a second time is of no effect."""


class Observer(Protocol):
    """Who takes note; Fleet does."""

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """Not found in the store that engines share, by one that was taken to find them."""

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> OutgoingCall:
        """A call goes out now. prompt: its length; predicted: the part that is taken to be cached
        there (Decision.reused_tokens); streams: whether its tokens come one by one.
        """
