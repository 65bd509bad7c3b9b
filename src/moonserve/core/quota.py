"""Quotas by the minute: buckets of tokens as pure functions of a time that is passed in.

live.access counts the requests and tokens of API keys with it. A bucket has room for one minute's
amount and fills at a constant rate. It is kept as one number: the time until which the filling pays
for what was spent. So a bucket may also be overdrawn, when an amount is known only afterwards.
"""

from __future__ import annotations

from moonserve.core.units import Micros

MINUTE_US: Micros = 60_000_000


def wait_us(paid_until_us: Micros, per_minute: int, now_us: Micros) -> Micros:
    """Return how long it takes until the bucket has one unit; 0: it has one now."""
    return max(0, paid_until_us - now_us - MINUTE_US + _price_us(1, per_minute))


def spent(paid_until_us: Micros, per_minute: int, amount: int, now_us: Micros) -> Micros:
    """Return the bucket after `amount` units are taken, more than it has if need be."""
    return max(paid_until_us, now_us) + _price_us(amount, per_minute)


def _price_us(amount: int, per_minute: int) -> Micros:
    """How long the bucket needs to fill by this amount."""
    return amount * MINUTE_US // per_minute
