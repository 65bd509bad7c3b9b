"""A cluster for core.schedule.hot: four prefill instances, asked for one prefix again and again."""

from __future__ import annotations

from moonserve.core.kv.facts import BlocksCleared, BlocksStored
from moonserve.core.kv.index import PendingPrefixes, PrefixIndex
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Spread
from moonserve.core.schedule.decide import decide
from moonserve.core.schedule.estimate import Ask, Roles
from moonserve.core.schedule.facts import SpreadUpTo
from moonserve.core.schedule.hot import Hot
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView
from moonserve.core.units import BlockKey, RequestId, SegmentId
from tests.support.cluster import BLOCK, view

HEAD = tuple(BlockKey(bytes([7, n])) for n in range(10))
LOOK_US = 20_000
BLOCK_BYTES = 1_000


class World:
    """Four prefill instances, of which p0 holds the first ten blocks, and has much to do."""

    def __init__(self, policy: str = "cache_aware", most: int = 1 << 30, busy: int = 1) -> None:
        self.tuning = Tuning(policy=policy, spread_bytes=most)
        self.view, self.index, self.coming = ClusterView(), PrefixIndex(), PendingPrefixes()
        for name in ("p0", "p1", "p2", "p3"):
            self.view.add(view(name, "prefill"))
        self.view.add(view("d0", "decode"))
        self.hot = Hot(self.tuning, self.view, self.index, self.coming)
        self.now_us = 0
        self.count = 0
        self.tell(BlocksStored(SegmentId("p0"), HEAD, None, "dram", 1))
        views = list(self.view.instances.values())
        for instance in [v for v in views if v.info.role == "prefill"][:busy]:
            instance.promise_prefill(RequestId("long"), 10**9, 1, 0)

    def tell(self, *facts: BlocksStored | BlocksCleared | SpreadUpTo) -> None:
        """What a segment reports, or the driver."""
        for fact in facts:
            self.hot.take(fact)

    def ask(self, tail: int = 4, keys: tuple[BlockKey, ...] = HEAD, at: str = "p0") -> list[Spread]:
        """One more request for HEAD and `tail` tokens more, placed on that instance."""
        self.count += 1
        self.now_us += LOOK_US
        length = len(keys) * BLOCK + tail
        match = self.index.match(keys)
        ask = Ask(length=length, match=match, pending=self.coming.match(keys))
        prefills = [v for v in self.view.prefills("m") if v.info.id == at]
        roles = Roles(prefills, self.view.decodes("m"))
        verdict = decide(ask, roles, PolicyState(), self.tuning, self.now_us)
        assert verdict is not None
        request = Request(RequestId(f"r{self.count}"), "m", length)
        return self.hot.placed(request, keys, verdict.decision, self.now_us)

    def until_copied(self, most: int = 40, **ask: object) -> Spread:
        """Ask until a copy is wanted."""
        for _ in range(most):
            wanted = self.ask(**ask)  # type: ignore[arg-type]
            if wanted:
                return wanted[0]
        raise AssertionError(f"no copy: {dict(self.hot.skipped)}")

    def arrives(self, order: Spread) -> None:
        """All of a copy comes."""
        parent = order.keys[order.first - 1] if order.first else None
        keys = order.keys[order.first :]
        self.tell(BlocksStored(order.to, keys, parent, "dram", 1))
