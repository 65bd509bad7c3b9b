"""Laws of hot prefixes: whatever is used, comes, is lost or never ends."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonserve.core.kv.facts import BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.schedule.actions import Spread
from moonserve.core.schedule.facts import SpreadUpTo
from moonserve.core.units import RequestId, SegmentId
from tests.support.hot import BLOCK_BYTES, HEAD, World

NAMES = st.sampled_from(["p0", "p1", "p2", "p3"])
MOST = 14 * BLOCK_BYTES


class HotMachine(RuleBasedStateMachine):
    """Copies are ordered by requests; a store makes them, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.orders: dict[int, Spread] = {}
        """Of which more may come."""

    @initialize(
        policy=st.sampled_from(["cache_aware", "least_loaded", "late_binding"]),
        busy=st.integers(0, 2),
    )
    def begin(self, policy: str, busy: int) -> None:
        """So many instances have much to do; the first holds the prefix."""
        self.world = World(policy, MOST, busy)
        self.asks(9, "p0", len(HEAD))

    @rule(times=st.integers(1, 9), at=NAMES, blocks=st.sampled_from([3, len(HEAD)]))
    def asks(self, times: int, at: str, blocks: int) -> None:
        """Requests for the prefix, or its head, are placed on an instance."""
        for _ in range(times):
            for order in self.world.ask(keys=HEAD[:blocks], at=at):
                self.check(order)
                self.orders[order.number] = order

    def check(self, order: Spread) -> None:
        """The source has all of it, the target lacks what is copied; both take part in no other."""
        held = self.world.index.match(order.keys).by_holder
        assert held[order.source] == len(order.keys)
        assert held.get(order.to, 0) == order.first < len(order.keys)
        under_way = {flight.order.number for flight in self.world.hot._flights.values()}
        for number in under_way - {order.number}:
            other = self.orders[number]
            assert order.source != other.source
            assert order.to != other.to

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), end=st.booleans())
    def comes(self, data: st.DataObject, end: bool) -> None:
        """Some more blocks of a copy come; no more will, maybe."""
        order = self.orders[data.draw(st.sampled_from(sorted(self.orders)))]
        has = self.world.index.match(order.keys).by_holder.get(order.to, 0)
        stop = data.draw(st.integers(has, len(order.keys)))
        if stop > has:
            parent = order.keys[has - 1] if has else None
            self.world.tell(BlocksStored(order.to, order.keys[has:stop], parent, "dram", 1))
        if end:
            self.world.tell(SpreadUpTo(order.number, 0))
            del self.orders[order.number]

    @rule(name=NAMES, most=st.integers(0, 9))
    def evicts(self, name: str, most: int) -> None:
        """A segment loses the end of what it has, or all of it."""
        segment = SegmentId(name)
        if most:
            self.world.hot.take(BlocksRemoved(segment, HEAD[most:][::-1], "dram", 1))
        else:
            self.world.tell(BlocksCleared(segment, "dram", 1))

    @rule(name=NAMES, us=st.sampled_from([1, 10**9]))
    def works(self, name: str, us: int) -> None:
        """An instance gets much to do, or has done it."""
        for view in self.world.view.instances.values():
            if view.info.id == name:
                view.end_prefill(RequestId("work"), self.world.now_us)
                view.promise_prefill(RequestId("work"), us, 1, self.world.now_us)

    @rule(us=st.sampled_from([1_000_000, 25_000_000, 90_000_000]))
    def time_passes(self, us: int) -> None:
        """Time passes, and the Conductor ticks."""
        self.world.now_us += us
        self.world.hot.expire(self.world.now_us)

    @invariant()
    def the_ledger_is_what_is_still_to_come(self) -> None:
        """Bytes under way are those of the blocks that have not come, within the bound."""
        self.world.view.check()
        hot = self.world.hot
        left = sum(len(flight.left) for flight in hot._flights.values())
        assert hot.bytes_under_way == left * BLOCK_BYTES <= MOST
        assert len(hot) == hot.done["started"] - hot.done["done"] - hot.done["failed"]

    def teardown(self) -> None:
        """After a long time without events, nothing is under way or remembered."""
        self.world.hot.expire(self.world.now_us + 10**9)
        assert len(self.world.hot) == self.world.hot.bytes_under_way == 0
        assert not self.world.hot._sent
        assert not self.world.hot._missed


TestHot = HotMachine.TestCase
TestHot.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
