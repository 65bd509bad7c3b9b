"""Which tenant has had more than its part."""

from __future__ import annotations

from moonserve.core.schedule.objectives import Tenants

SECOND = 1_000_000


def shared(*given: tuple[str, int, int]) -> Tenants:
    """These asked for so much, and were given so much."""
    made = Tenants()
    for tenant, asked, tokens in given:
        made.asked(tenant, asked, 0)
        made.given(tenant, tokens)
    return made


def test_one_alone_may_have_all() -> None:
    """There is no other tenant to leave anything to."""
    assert shared(("a", 900, 900)).share("a", 0) == 1.0


def test_who_has_more_than_a_like_part_leaves_what_the_others_asked_for() -> None:
    """Four fifths of all was asked for by one; the others may have all."""
    found = shared(("flood", 800, 500), ("b", 200, 50))
    assert found.share("flood", 0) == 0.8
    assert found.share("b", 0) == 1.0
    assert found.share("new", 0) == 1.0


def test_who_asks_for_little_is_left_a_tenth() -> None:
    """Less would be less than a request of his."""
    assert shared(("flood", 10_000, 500), ("b", 1, 0)).share("flood", 0) == 0.9


def test_like_parts_are_no_more_than_that() -> None:
    """A tenant that asked for more and received an equal share gives way to none."""
    found = shared(("a", 900, 100), ("b", 100, 100))
    assert (found.share("a", 0), found.share("b", 0)) == (1.0, 1.0)


def test_rounding_makes_nobody_have_more_than_a_like_part() -> None:
    """Equal parts that have faded are equal, however their sums are rounded."""
    names = [f"t{at}" for at in range(10)]
    for steps in range(1, 60):
        found = shared(*((name, 7, 7) for name in names))
        now_us = steps * 30 * SECOND // 8
        found.asked(names[0], 1, now_us)
        for name in names:
            found.asked(name, 0, now_us)
        assert [found.share(name, now_us) for name in names] == [1.0] * 10


def test_what_was_is_forgotten() -> None:
    """Half in 30 seconds; a tenant idle for ten has no share, but is not new either."""
    found = shared(("flood", 900, 900), ("b", 100, 10))
    found.asked("flood", 450, 5 * SECOND)
    assert found.share("flood", 9 * SECOND) == 0.9
    assert found.share("flood", 11 * SECOND) == 1.0, "nobody else asks"
    found.asked("b", 50, 30 * SECOND)
    found.asked("flood", 450, 30 * SECOND)
    assert found.share("flood", 30 * SECOND) == 0.9
    found.asked("flood", 100, 600 * SECOND)
    assert len(found._asked) == 1


def test_names_are_bounded() -> None:
    """Of too many tenants, those that asked for least are forgotten."""
    found = shared(("flood", 10**6, 10**6), *((f"t{at}", 100, 0) for at in range(5_000)))
    assert len(found._asked) <= 256
    assert found.share("flood", 0) < 1.0
