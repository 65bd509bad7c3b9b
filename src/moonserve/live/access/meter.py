"""The meter: counts the requests and tokens of API keys, and refuses those over a key's limits.

The gateway's API enters each generation of a key that has such limits. Tokens are counted when they
are known: those of the prompt at its start, those of the answer at its end. So a key may overdraw
its tokens, and then waits until they are paid back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from moonserve.core.errors import Overloaded
from moonserve.core.quota import spent, wait_us
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.live.access.keys import ApiKey, KeyLimits

REASON = "key_limit"
_BUSY_S = 1.0
_LONGEST_S = 60.0
"""OpenAI's clients obey no longer Retry-After."""
_KEPT = 4_096


class CountedCall(Protocol):
    """One request that was let in."""

    def spent(self, tokens: Tokens) -> None:
        """It has used these tokens, since its beginning."""

    def over(self) -> None:
        """It has ended."""


class Meter(Protocol):
    """Lets requests in."""

    async def enter(self, key: ApiKey) -> CountedCall:
        """Count a request of this key; `over` must follow. Raises Overloaded if it is over a
        limit."""


class Use(msgspec.Struct):
    """What one key has used."""

    requests_us: Micros = 0
    tokens_us: Micros = 0
    """Its buckets; see core.quota."""
    under_way: int = 0


class Uncounted:
    """A request that no limit needs to count."""

    def spent(self, tokens: Tokens) -> None:
        """See CountedCall."""

    def over(self) -> None:
        """See CountedCall."""


UNCOUNTED = Uncounted()


class LocalMeter:
    """The meter of a gateway whose requests all come through this process."""

    def __init__(self, now_us: Callable[[], Micros]) -> None:
        self._now_us = now_us
        self._used: dict[str, Use] = {}

    async def enter(self, key: ApiKey) -> CountedCall:
        """See Meter."""
        return self.let_in(key.name, key.limits)

    def let_in(self, name: str, limits: KeyLimits) -> MeteredCall:
        """Count a request of the key of this name. Raises Overloaded."""
        now_us = self._now_us()
        use = self._use(name, now_us)
        if limits.under_way is not None and use.under_way >= limits.under_way:
            what = f"{use.under_way} requests are under way, its limit"
            raise Overloaded(f"key {name}: {what}", REASON, _BUSY_S)
        for used_us, most, what in (
            (use.requests_us, limits.requests_per_minute, "requests"),
            (use.tokens_us, limits.tokens_per_minute, "tokens"),
        ):
            if most is not None and (left_us := wait_us(used_us, most, now_us)):
                left_s = left_us / MICROS_PER_SECOND
                raise Overloaded(
                    f"key {name}: its limit is {most} {what} a minute; it has room again in"
                    f" {left_s:.0f} s",
                    REASON,
                    min(left_s, _LONGEST_S),
                )
        if limits.requests_per_minute is not None:
            use.requests_us = spent(use.requests_us, limits.requests_per_minute, 1, now_us)
        use.under_way += 1
        return MeteredCall(use, limits.tokens_per_minute, self._now_us)

    def take_over(self, name: str, limits: KeyLimits, tokens: Tokens) -> MeteredCall:
        """Count a request as under way that another process has let in. tokens: what it has used
        before, which that process has counted."""
        use = self._use(name, self._now_us())
        use.under_way += 1
        return MeteredCall(use, limits.tokens_per_minute, self._now_us, tokens)

    def _use(self, name: str, now_us: Micros) -> Use:
        use = self._used.get(name)
        if use is None:
            self._forget(now_us)
            use = self._used[name] = Use()
        return use

    def _forget(self, now_us: Micros) -> None:
        """Forget keys whose buckets are full again, so that renamed keys do not add up."""
        if len(self._used) >= _KEPT:
            self._used = {
                name: use
                for name, use in self._used.items()
                if use.under_way or max(use.requests_us, use.tokens_us) > now_us
            }


class MeteredCall:
    """A request of a key that has limits. See CountedCall."""

    def __init__(
        self,
        use: Use,
        tokens_per_minute: int | None,
        now_us: Callable[[], Micros],
        before: Tokens = 0,
    ) -> None:
        """before: tokens that are counted already."""
        self._use = use
        self._tokens_per_minute = tokens_per_minute
        self._now_us = now_us
        self._spent = before
        self._open = True

    def spent(self, tokens: Tokens) -> None:
        """See CountedCall."""
        more, self._spent = tokens - self._spent, max(tokens, self._spent)
        if more > 0 and self._tokens_per_minute is not None:
            use = self._use
            use.tokens_us = spent(use.tokens_us, self._tokens_per_minute, more, self._now_us())

    def over(self) -> None:
        """See CountedCall."""
        if self._open:
            self._open = False
            self._use.under_way -= 1
