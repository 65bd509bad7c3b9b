"""Order: which replays it wants, and which batches it reports as lost; see also tests/law."""

from moonserve.core.kv.events import ClearedEvent, KvBatch
from moonserve.core.kv.order import Order, Reset, Step


def at(ts: float) -> KvBatch:
    """A batch of that time."""
    return KvBatch(ts, (ClearedEvent(),))


def times(steps: list[Step]) -> list[float | str]:
    """Batches by their time, resets by what they are."""
    how = {True: "restarted", False: "lost"}
    return [how[it.restarted] if isinstance(it, Reset) else it.ts for it in steps]


def following(count: int) -> Order:
    """An order that has had batches 0 to count - 1, at times 100 on, and wants nothing."""
    order = Order(replays=True)
    order.connected()
    for n in range(count):
        order.replayed(n, at(100.0 + n))
    order.replay_ended(True)
    assert order.want is None
    return order


def replay(order: Order, *numbers: int, done: bool = True, ts: float = 100.0) -> list[Step]:
    """A replay that answers with these batches."""
    assert order.want is not None
    steps = [step for n in numbers for step in order.replayed(n, at(ts + n))]
    return steps + order.replay_ended(done)


def test_a_replay_with_a_hole_is_asked_for_again() -> None:
    """An engine may drop some of its answer: what came counts, the rest is fetched again."""
    order = following(2)
    assert order.arrived(6, at(106.0)) == []
    assert order.want == 1
    assert times(replay(order, 1, 2, 3, 5, 6)) == [102.0, 103.0]
    assert order.want == 3
    assert times(replay(order, 3, 4, 5, 6)) == [104.0, 105.0, 106.0]
    assert order.want is None
    assert order.stats.untrusted == 0


def test_a_hole_that_stays_is_a_loss() -> None:
    """A batch that comes with no replay is given up: no asking for ever."""
    order = following(2)
    order.arrived(4, at(104.0))
    assert times(replay(order, 1, 3, 4)) == ["lost", 103.0, 104.0]
    assert order.want is None


def test_more_may_be_lost_while_a_replay_runs() -> None:
    """A gap between a replay's end and what arrived meanwhile is one more gap."""
    order = following(2)
    order.arrived(3, at(103.0))
    order.arrived(5, at(105.0))
    assert times(replay(order, 1, 2, 3)) == [102.0, 103.0]
    assert order.want == 3
    assert times(replay(order, 3, 4, 5)) == [104.0, 105.0]


def test_a_connection_made_during_a_replay_is_looked_into() -> None:
    """The engine may have restarted after its answer began: another replay shows it."""
    order = following(2)
    order.connected()
    order.connected()
    assert replay(order, 1) == []
    assert order.want == 1
    assert times(replay(order)) == ["lost"]
    assert order.want == 0, "and what the new process has"
    assert times(replay(order, 0, ts=500.0)) == [500.0]
    assert order.complete


def test_a_clock_set_back_costs_one_replay() -> None:
    """The next number with an earlier time is a late one of an old run, or the clock was set back:
    the replay shows which, and the new time holds from there."""
    order = following(2)
    assert order.arrived(2, at(12.0)) == []
    assert order.want == 1
    assert order.replayed(1, at(101.0)) == []
    assert times([*order.replayed(2, at(12.0)), *order.replay_ended(True)]) == [12.0]
    assert times(order.arrived(3, at(13.0))) == [13.0]
    order.arrived(4, at(1.0))
    assert replay(order, 3, ts=10.0) == []
    assert order.stats.late > 0


def test_without_replays_each_doubt_is_a_reset() -> None:
    """After a gap, a new connection or a clock set back, all earlier batches are dropped."""
    order = Order(replays=False)
    assert order.connected() == []
    assert times(order.arrived(5, at(105.0))) == [105.0]
    assert not order.complete
    assert times(order.arrived(7, at(107.0))) == ["lost", 107.0]
    assert times(order.connected()) == ["lost"]
    assert times(order.arrived(8, at(108.0))) == [108.0]
    assert times(order.arrived(9, at(9.0))) == ["lost", 9.0]
    assert times(order.arrived(0, at(200.0))) == ["restarted", 200.0]
    assert times(order.arrived(0, at(200.0))) == []
    assert order.complete


def test_what_is_held_is_bounded() -> None:
    """More than is held during a replay is let go, and missed after."""
    order = Order(replays=True, max_held=2)
    order.connected()
    for n in range(3):
        order.arrived(n, at(100.0 + n))
    assert order.stats.overflows == 1
    assert times(replay(order, 0)) == [100.0]
    assert order.want == 0, "the batch held shows a gap"
    assert times(replay(order, 0, 1, 2)) == [101.0, 102.0]


def test_what_came_over_a_connection_that_is_gone_waits_no_longer() -> None:
    """It may be of a run that is over: the next run's batches do not follow it."""
    order = Order(replays=True)
    order.connected()
    assert order.arrived(0, at(100.0)) == []
    order.connected()  # the engine restarted, and its own batch 0 is lost
    assert replay(order) == []
    assert replay(order) == []
    assert order.arrived(1, at(111.0)) == []
    assert times(replay(order, 0, 1, ts=110.0)) == [110.0, 111.0]
    assert order.complete
