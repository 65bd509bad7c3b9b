"""Law: a view's readings are those of a naive sum over what all gateways have promised."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonserve.core.schedule.external_load import NO_LOAD
from moonserve.core.schedule.facts import Promises
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, RequestId
from tests.support.cluster import exact, info

NAMES = ("a", "b")
GATEWAYS = ("g1", "g2", "g3")
rows = st.builds(
    Promises,
    st.sampled_from([InstanceId(name) for name in NAMES]),
    st.integers(1, 2),
    queue_us=st.integers(0, 1_000),
    prefills=st.integers(0, 3),
    decodes=st.integers(0, 9),
    context=st.integers(0, 90),
    running=st.integers(0, 9),
    running_context=st.integers(0, 90),
)


class Views(RuleBasedStateMachine):
    """Two instances that come and restart, three other gateways that report and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.view = ClusterView()
        self.told: dict[str, dict[str, Promises]] = {}
        self.own: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self.now_us = 0
        self.count = 0

    @rule(name=st.sampled_from(NAMES), epoch=st.integers(1, 2))
    def joins(self, name: str, epoch: int) -> None:
        """It comes, or comes back: what we had promised there is over."""
        one = info(name, "both", epoch=epoch, max_seqs=1_000)
        self.view.add(InstanceView(one, self.now_us, exact(one)))
        self.own[name] = {}

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        """It goes."""
        self.view.remove(InstanceId(name))
        self.own[name] = {}

    @rule(gateway=st.sampled_from(GATEWAYS), promises=st.lists(rows, max_size=4))
    def tells(self, gateway: str, promises: list[Promises]) -> None:
        """Another gateway reports all that it has promised by now."""
        unique = {it.instance: it for it in promises}
        self.view.take_promises(gateway, list(unique.values()), self.now_us)
        self.told[gateway] = dict(unique)

    @rule(name=st.sampled_from(NAMES), context=st.integers(1, 50))
    def promises(self, name: str, context: int) -> None:
        """We promise a decode."""
        if InstanceId(name) in self.view.instances:
            self.count += 1
            request = RequestId(f"r{self.count}")
            self.view.instances[InstanceId(name)].promise_decode(request, context)
            self.own[name][request] = context

    @rule(name=st.sampled_from(NAMES))
    def ends(self, name: str) -> None:
        """One of ours ends."""
        if self.own[name]:
            request, _ = self.own[name].popitem()
            self.view.instances[InstanceId(name)].end_decode(RequestId(request), self.now_us)

    @invariant()
    def reads_as_the_sum(self) -> None:
        """Of rows on this start of it, from any gateway, and of ours."""
        self.view.check()
        for name, view in self.view.instances.items():
            theirs = [
                of[name]
                for of in self.told.values()
                if name in of and of[name].epoch == view.info.epoch
            ]
            busy = any(it.prefills or it.decodes for it in theirs)
            theirs = theirs if busy else []
            decodes = sum(it.decodes for it in theirs) + len(self.own[name])
            context = sum(it.context for it in theirs) + sum(self.own[name].values())
            assert view.joined_seqs == decodes + 1
            assert view.joined_context == context
            assert view.queue_us(self.now_us) == sum(it.queue_us for it in theirs)
            assert view.residencies.external.running == sum(it.running for it in theirs)
            assert view.tbt_us(7) == 100 + 10 * (decodes + 1) + context + 7

    def teardown(self) -> None:
        """When all gateways have left, no external load is counted."""
        for gateway in GATEWAYS:
            self.view.take_promises(gateway, [], self.now_us)
        assert all(view.external == NO_LOAD for view in self.view.instances.values())
        super().teardown()


TestViews = Views.TestCase
TestViews.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
