"""The one rule of liveness: silence, pauses of the observer, and who is lost."""

from __future__ import annotations

from moonserve.core.liveness import Liveness


def test_a_peer_is_lost_after_its_time_and_not_before() -> None:
    """Exactly silent_us of silence is still alive; one microsecond more is lost."""
    liveness = Liveness(silent_us=100, pause_us=60)
    assert liveness.silent(50, [("a", 0)]) == []
    assert liveness.silent(100, [("a", 0), ("b", 30)]) == []
    assert liveness.silent(101, [("a", 0), ("b", 30)]) == ["a"]


def test_nobody_is_lost_by_a_pause_of_the_observer() -> None:
    """The look after a pause gives peers time to be heard; silence at the next one counts."""
    liveness = Liveness(silent_us=100, pause_us=60)
    assert liveness.silent(0, [("a", 0), ("b", 0)]) == []
    assert liveness.silent(1_000, [("a", 0), ("b", 0)]) == []
    assert liveness.silent(1_050, [("a", 0), ("b", 1_010)]) == ["a"]


def test_the_first_look_loses_nobody() -> None:
    """What happened before the observer started says nothing."""
    assert Liveness(silent_us=100, pause_us=60).silent(10**9, [("a", 0)]) == []


def test_grace_after_a_pause_gives_peers_the_whole_time_again() -> None:
    """Peers on one host are paused together, so a pause of the observer proves nothing of them."""
    liveness = Liveness(silent_us=100, pause_us=60, grace_us=100)
    assert liveness.silent(0, [("a", 0)]) == []
    assert liveness.silent(1_000, [("a", 0)]) == []
    assert liveness.silent(1_050, [("a", 0)]) == []
    assert liveness.silent(1_100, [("a", 0), ("b", 1_050)]) == []
    assert liveness.silent(1_150, [("a", 0), ("b", 1_050)]) == ["a"]
