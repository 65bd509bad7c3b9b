"""Quotas by the minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.quota import MINUTE_US, spent, wait_us


def test_a_full_bucket_gives_a_minutes_amount_and_then_one_by_one() -> None:
    """Six a minute: six at once, the next after ten seconds."""
    bucket, now_us = 0, 5 * MINUTE_US
    for _ in range(6):
        assert wait_us(bucket, 6, now_us) == 0
        bucket = spent(bucket, 6, 1, now_us)
    assert wait_us(bucket, 6, now_us) == 10_000_000
    assert wait_us(bucket, 6, now_us + 10_000_000) == 0


def test_what_is_known_only_afterwards_is_paid_back_first() -> None:
    """A request of three minutes' tokens: the next comes when two of them are paid back."""
    bucket = spent(0, 100, 300, MINUTE_US)
    assert wait_us(bucket, 100, MINUTE_US) == 2 * MINUTE_US + MINUTE_US // 100


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(0, MINUTE_US), st.integers(1, 50)), max_size=60),
)
def test_no_more_is_spent_than_filled(per_minute: int, steps: list[tuple[int, int]]) -> None:
    """Over any time, at most a full bucket, what was filled since, and the last overdraft."""
    bucket = now_us = total = 0
    for pause_us, amount in steps:
        now_us += pause_us
        if wait_us(bucket, per_minute, now_us) == 0:
            bucket = spent(bucket, per_minute, amount, now_us)
            total += amount
    rounding = len(steps) * (1 + per_minute // MINUTE_US)
    assert total <= per_minute + now_us * per_minute / MINUTE_US + 50 + rounding
