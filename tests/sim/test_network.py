"""The made-up network and clock: who gets what share of a link, and what happens when."""

from __future__ import annotations

from functools import partial

from moonserve.sim.clock import VirtualClock
from moonserve.sim.network import Network

_RATE = 1e6  # bytes a second: a byte takes a microsecond


class Rig:
    """A network, and when each transfer was done."""

    def __init__(self, *wide: str) -> None:
        self.clock = VirtualClock()
        self.network = Network(self.clock, _RATE, frozenset(wide))
        self.done_us: dict[str, int] = {}

    def send(self, name: str, source: str, target: str, size: int, at_us: int = 0) -> None:
        """Begin a transfer at that time."""
        ended = partial(self._ended, name)
        self.clock.at(at_us, lambda: self.network.send(source, target, size, ended))

    def _ended(self, name: str) -> None:
        self.done_us[name] = self.clock.now_us

    def run(self) -> dict[str, int]:
        """All of them, to the end."""
        assert not self.clock.run(lambda: False)
        return self.done_us


def test_a_transfer_alone_has_the_whole_link() -> None:
    """Bytes over bandwidth, and nothing else."""
    rig = Rig()
    rig.send("x", "a", "b", 1_000)
    assert rig.run() == {"x": 1_000}
    assert (rig.network.transfers, rig.network.bytes) == (1, 1_000)


def test_a_congested_sender_is_slow_for_all() -> None:
    """Two transfers from one sender take twice as long; when one ends, the other speeds up."""
    rig = Rig()
    rig.send("short", "a", "b", 500)
    rig.send("long", "a", "c", 1_000)
    assert rig.run() == {"short": 1_000, "long": 1_500}


def test_a_congested_receiver_is_slow_for_all() -> None:
    """Two transfers to one receiver share its link; one that comes later slows the first."""
    rig = Rig()
    rig.send("first", "a", "c", 1_000)
    rig.send("second", "b", "c", 250, at_us=500)
    assert rig.run() == {"first": 1_250, "second": 1_000}


def test_transfers_between_different_nodes_do_not_meet() -> None:
    """Links are each node's own, and each way's."""
    rig = Rig()
    rig.send("x", "a", "b", 1_000)
    rig.send("back", "b", "a", 1_000)
    rig.send("y", "c", "d", 1_000)
    assert rig.run() == {"x": 1_000, "back": 1_000, "y": 1_000}


def test_a_flow_gets_the_smaller_of_its_two_shares() -> None:
    """One of three from a sender is not sped up by an idle receiver."""
    rig = Rig()
    for name in ("x", "y", "z"):
        rig.send(name, "a", name, 100)
    assert set(rig.run().values()) == {300}


def test_a_wide_sender_is_never_congested() -> None:
    """A pool spread over all nodes gives each receiver the whole of its link."""
    rig = Rig("pool")
    rig.send("x", "pool", "a", 1_000)
    rig.send("y", "pool", "b", 1_000)
    assert rig.run() == {"x": 1_000, "y": 1_000}


def test_simultaneous_calls_keep_their_order() -> None:
    """Calls of one instant are made as they were scheduled; what is past happens now."""
    clock, made = VirtualClock(), []
    clock.at(5, lambda: made.append("a"))
    clock.at(5, lambda: clock.at(1, lambda: made.append("c")))
    clock.at(5, lambda: made.append("b"))
    clock.at(6, lambda: made.append("d"))
    assert not clock.run(lambda: False)
    assert made == ["a", "b", "c", "d"]
    assert clock.now_us == 6


def test_an_instant_settles_before_time_moves_on() -> None:
    """`settle` sees all that fell on one microsecond, and is asked again while it does anything."""
    clock, seen, open_work = VirtualClock(), [], [3]

    def settle() -> bool:
        seen.append((clock.now_us, open_work[0]))
        open_work[0] = max(0, open_work[0] - 1)
        return seen[-1][1] > 0

    clock.at(1, lambda: None)
    clock.at(1, lambda: None)
    clock.at(2, lambda: None)
    assert not clock.run(settle)
    assert seen == [(1, 3), (1, 2), (1, 1), (1, 0), (2, 0)]


def test_a_run_may_stop_and_go_on() -> None:
    """Up to a time, and later the rest: nothing is lost between."""
    clock, made = VirtualClock(), []
    clock.at(1, lambda: made.append(1))
    clock.at(9, lambda: made.append(9))
    assert clock.run(lambda: False, until_us=5)
    assert made == [1]
    assert not clock.run(lambda: False)
    assert made == [1, 9]
